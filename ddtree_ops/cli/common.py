"""What the command groups share: option types, the output sink, and flags that may stand anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.errors import BadInput
from ddtree_ops.schemas.arms import BUDGETS, Arm, Builder

if TYPE_CHECKING:
    from ddtree_ops.output import Output

GLOBAL_FLAGS = {"--json": "--json", "--quiet": "--quiet", "-q": "--quiet"}

ARMS = ", ".join(arm.value for arm in Arm)
ALL_BUDGETS = ", ".join(map(str, BUDGETS))

Arms = Annotated[
    list[str] | None, typer.Option("--arm", "-a", help=f"An arm ({ARMS}); repeat it or separate by commas.")
]
Budgets = Annotated[
    list[str] | None,
    typer.Option(
        "--budget", "-b", help=f"Tree nodes without the root ({ALL_BUDGETS}); repeat or use commas."
    ),
]
Concurrencies = Annotated[
    list[str] | None, typer.Option("--concurrency", "-c", help="Requests in flight; repeat or use commas.")
]
Temperatures = Annotated[
    list[str] | None, typer.Option("--temperature", "-t", help="0 is greedy; repeat or use commas.")
]
Dataset = Annotated[
    str | None, typer.Option("--dataset", help="'pair' (the shipped prompts) or a JSONL file of prompts.")
]
Prompts = Annotated[int | None, typer.Option("--prompts", min=1, help="How many prompts, from the start.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", min=1, help="Tokens decoded for each prompt.")]
Repeats = Annotated[int | None, typer.Option("--repeats", min=1, help="Passes over the prompts.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed for sampling at T > 0.")]
Results = Annotated[Path, typer.Option("--results", help="Folder of the results store.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and its duration; start nothing.")]
RetryFailed = Annotated[
    bool,
    typer.Option("--retry-failed", help="Measure failed and invalid cells again; old records move aside."),
]
Model = Annotated[
    Path | None, typer.Option("--model", help="Target checkpoint folder; default: the shipped pair.")
]
Drafter = Annotated[
    Path | None, typer.Option("--drafter", help="Drafter checkpoint folder; default: the shipped pair.")
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32 (default) or bfloat16.")]
Topk = Annotated[int | None, typer.Option("--topk", min=1, max=64, help="Candidates per position (16).")]
TreeBuilder = Annotated[
    Builder | None, typer.Option("--builder", help="How trees are grown.", show_default="best-first")
]
Calibration = Annotated[
    Path | None,
    typer.Option("--calibration", help="File of `ddtree bench calibrate`, for --builder calibrated."),
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Torch threads of a service.")]
AllowUnsafe = Annotated[
    bool | None,
    typer.Option(
        "--allow-hybrid-unsafe", help="Permit the arm 'unsafe', whose output is wrong.", show_default=False
    ),
]


def hoist_global_flags(arguments: list[str]) -> list[str]:
    """Move `--json` and `--quiet` to the front, where typer looks for them; what follows `--` stays."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags = [GLOBAL_FLAGS[word] for word in arguments[:end] if word in GLOBAL_FLAGS]
    rest = [word for word in arguments[:end] if word not in GLOBAL_FLAGS]
    return [*dict.fromkeys(flags), *rest, *arguments[end:]]


def sink(context: typer.Context) -> Output:
    """The output sink of this invocation."""
    found: Output = context.find_root().obj
    return found


def split(values: list[str] | None) -> list[str] | None:
    """Values of an option that may be repeated and may hold commas."""
    if values is None:
        return None
    return [part.strip() for value in values for part in value.split(",") if part.strip()] or None


def integers(option: str, values: list[str] | None, allowed: str) -> list[int] | None:
    """Whole numbers of such an option. Raises BadInput."""
    return _numbers(option, values, allowed, int)


def numbers(option: str, values: list[str] | None, allowed: str) -> list[float] | None:
    """Numbers of such an option. Raises BadInput."""
    return _numbers(option, values, allowed, float)


def _numbers(option: str, values: list[str] | None, allowed: str, convert: Any) -> list[Any] | None:
    parts = split(values)
    if parts is None:
        return None
    found = []
    for part in parts:
        try:
            found.append(convert(part))
        except ValueError:
            raise BadInput.at(file=None, key=option, found=part, allowed=allowed) from None
    return found
