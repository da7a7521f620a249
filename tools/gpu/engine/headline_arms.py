"""The servers of a headline run: what each serves, for how many requests, and what it takes on the card."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bed_plan import PACKAGE

from engine.arms import BLOCK, FP8_TARGET, TRITON_FP8, Arm, launch_argv, tree

WIDTHS = (8, 16, 32, 64, 128)
SIZES = (1, 2, 4, 8, 16)
SERVER = """
--host 127.0.0.1 --attention-backend triton --sampling-backend pytorch --linear-attn-backend triton
--skip-tokenizer-init --context-length 10240 --chunked-prefill-size 4096 --random-seed 1
--mem-fraction-static 0.98 --mamba-ssm-dtype float32 --disable-prefill-cuda-graph --watchdog-timeout 900
""".split()  # noqa: SIM905 - as it is typed
# A prompt of 8,000 tokens, or so many of a short one with the nodes of a tree behind it.
LEAST_TOKENS, TOKENS_A_REQUEST = 10240, 1024
# GiB: target and drafter, FP8 ones, a recurrent state of all layers, what a node leaves with `wy`, a thousand
# tokens of both caches, the rest of a server as two of them had it, and logits in graphs for a node.
WEIGHTS, WEIGHTS_FP8, STATE, STASH, CACHE, REST, LOGITS = 53.36, 28.5, 0.1406, 0.00093, 0.0806, 2.3, 0.0024
# Of one H200.
CARD = 139.1


@dataclass(frozen=True)
class Served:
    """One server's arm, its requests at most, and its start's seconds beside a server that is there.

    trees     the server of several widths that it stands beside; '' for none: it has the card to itself
    budgets   a request has to name one of these; the first is way `linear`
    """

    arm: Arm
    running: int
    start: float
    trees: str = "ddtree"
    budgets: tuple[int, ...] = ()


def _bed(arm: Arm, *more: tuple[str, str]) -> Arm:
    return replace(arm, environment=(("SGLANG_EXTERNAL_MODEL_PACKAGE", PACKAGE), *more))


def _fp8(arm: Arm) -> Arm:
    return _bed(replace(arm, flags=FP8_TARGET), *TRITON_FP8)


# DFLASH keeps a state for every token of its chains: beside the trees' server more than four do not fit.
BESIDE = {
    "ar": Served(_bed(Arm()), 16, 55),
    "dflash": Served(_bed(Arm("DFLASH")), 4, 80),
    "chain": Served(_bed(tree(BLOCK, topk=1, state="wy")), 16, 70),
    "snapshot": Served(_bed(tree(32, widths=[16, 32])), 1, 80, budgets=(31, 15)),
    # With room for its states.
    "dflash-alone": Served(_bed(Arm("DFLASH")), 16, 90, trees=""),
    "dflash-fp8": Served(_fp8(Arm("DFLASH")), 4, 80, trees="ddtree-fp8"),
    "unsafe": Served(_bed(tree(32, mode="unsafe", allow_hybrid_unsafe=True)), 1, 75),
    "shadow": Served(_bed(Arm("DDTREE", None, {"mode": "shadow", "budget": 63, "self_check": 0})), 4, 75),
}
TREES = {
    "ddtree": Served(_bed(tree(max(WIDTHS), state="wy", widths=list(WIDTHS), budget="auto")), 16, 110),
    "ddtree-fp8": Served(_fp8(tree(64, state="wy", widths=[16, 32, 64])), 4, 90),
}
SERVED = {**BESIDE, **TREES}
# In place of one that does not start: 128 nodes have served on no card yet, and take most of its memory.
NARROWER = {"ddtree": _bed(tree(64, state="wy", widths=[8, 16, 32, 64], budget="auto"))}


def command(folder: Path, arm: Arm, running: int, port: int) -> list[str]:
    """SGLang's command line for a server on the bed in `folder`."""
    return launch_argv(folder, arm, port, [*SERVER, *arm.flags, *pools(running)])


def pools(running: int) -> list[str]:
    """Pools and graphs for so many requests; small, since two servers share a card."""
    sizes = sorted({running, *(size for size in SIZES if size < running)})
    return [
        *("--max-running-requests", str(running), "--max-mamba-cache-size", str(running + 2)),
        *("--max-total-tokens", str(max(LEAST_TOKENS, TOKENS_A_REQUEST * running))),
        *("--cuda-graph-bs-decode", *map(str, sizes)),
    ]


def with_costs(arm: Arm, costs: Path) -> Arm:
    """The arm with its table of step seconds, where it chooses by one."""
    if arm.config is None or arm.config.get("budget") != "auto":
        return arm
    return replace(arm, config=arm.config | {"costs": str(costs)})


def footprint(name: str) -> float:
    """GiB on the card; within 2 of what two servers of four requests were seen to take."""
    served = SERVED[name]
    config = served.arm.config or {}
    width = 1 if served.arm.algorithm is None else served.arm.width or BLOCK
    node = 0.0 if served.arm.algorithm is None else STASH if config.get("state") == "wy" else STATE
    tokens = max(LEAST_TOKENS, TOKENS_A_REQUEST * served.running) / 1000
    return (
        (WEIGHTS_FP8 if "--quantization" in served.arm.flags else WEIGHTS)
        + (served.running + 3) * STATE
        + (served.running + 1) * width * node
        + served.running * width * LOGITS
        + tokens * CACHE
        + REST
    )


def table(seconds: dict[str, dict[str, float]]) -> dict[str, Any]:
    """As the policy reads it."""
    return {"schema": 1, "kind": "ddtree-step-costs", "seconds": seconds}


def read_costs(path: Path) -> dict[str, dict[str, float]]:
    """Width -> requests -> seconds."""
    seconds: dict[str, dict[str, float]] = json.loads(path.read_text())["seconds"]
    return seconds
