#!/usr/bin/env python3
"""What the measurements of results/h200-27b let one expect elsewhere: computed, not measured.

    .venv/bin/python tools/gpu/projections.py results/h200-27b/summary.json [--write docs/h200-27b.md]

Two projections, each with its assumptions, which `headline_summary.py` puts under `projections`:

    accept_curves  step ratios of the H200 with accept lengths that others published for drafters of
                   27B hybrids
    rtx_pro_6000   a step of one request on an RTX PRO 6000 Blackwell, from the parts of a step on the
                   H200, and how many requests fit into its memory

A part of the step that was not timed by itself stands between the bounds that are known. A range is over
every combination of the assumptions' ends; where one of them moves both terms of a ratio, it moves both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddtree_ops.memory.planner import GIB, Verdict, Wanted, plan_memory
from ddtree_ops.memory.shapes import QWEN_3_6_27B, QWEN_3_6_27B_DFLASH
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.cluster import Scratch

RESULTS = Path(__file__).parents[2] / "results"
KERNELS = RESULTS / "h200-kernels"
CURVES = RESULTS / "h200-27b" / "published-accept.json"
#: The linear arm that trees are compared with.
STOCK = "dflash"
WIDTHS = ("16", "32", "64")
#: Tokens of KV that a step of the measured requests reads, about.
CONTEXT = 500

H200 = {"bytes_per_second": 4.8e12, "clock_mhz": 1980}
#: NVIDIA's data sheet: 24,064 cores on 188 multiprocessors, 125 TFLOPS of float32, which is a clock of
#: 2.6 GHz; 4,000 TOPS of sparse FP4, which is 500 TFLOPS of dense bfloat16.
PRO_6000 = {"bytes_per_second": 1.792e12, "clock_mhz": 2600, "bfloat16_flops": 500e12, "gib": 95.6}
#: Share of the data sheet's bandwidth that reading weights reaches; a copy on the H200 reached 0.86.
REACHED = (0.80, 0.92)
#: Times longer than on the H200: by the clocks at best, and at worst twice (see the assumptions).
KERNEL = (H200["clock_mhz"] / PRO_6000["clock_mhz"], 2.0)

CURVE_ASSUMPTIONS = [
    "Accept lengths carry over from their own engines, quantised targets, prompts and trees to this engine "
    "in bfloat16. Nobody has measured that.",
    "A step costs what it cost on the bed on the H200 (one request, short prompts, greedy, bfloat16), "
    "however much it accepts. Low and high: the rounds of step times.",
    "Decoding only. Prefill and transport are the same for both arms and draw a ratio towards 1.",
    "A width is given the published accept length of the most nodes that fit into it (budget + 1 <= width); "
    "nothing is interpolated. Budgets are taken to be counted without the root.",
    "DFLASH's step is that of a chain of 16 nodes, for the drafter of 7 positions too.",
]
CARD_ASSUMPTIONS = [
    "Weights are read once a step: the target without its embedding table, the drafter, and the head a "
    "second time for the drafter's logits; with the KV of 500 tokens. That part scales with bandwidth: 0.80 "
    "to 0.92 of 1.792 TB/s (the H200 reached 0.86 of 4.8 TB/s). Products take less: `products_ms`.",
    "Our kernels for one request are bound by latency, not by bandwidth: they scale with the clock (2.6 "
    "against 1.98 GHz) at best and take twice as long at worst, since a multiprocessor's tensor cores do a "
    "quarter of the products a clock there and the products' share of a kernel's time was not measured. That "
    "there are 188 multiprocessors and not 132 is not counted: one request does not fill them.",
    "64 nodes take the three launches there; their time is the H200's of the same launches.",
    "Not timed: the convolution of 16 and 32 nodes (between nothing and that of 64), commit and build of one "
    "request (between an eighth and the whole of eight requests').",
    "The rest of a step (attention, norms, what products of matrices take beyond reading, sampling, gaps) "
    "was not split up: it scales with the clock at best and with bandwidth at worst.",
    "FP8: linear layers of the target at a byte a weight, everything else as in bfloat16. No FP8 step was "
    "measured.",
    "SGLang's recurrent kernel chooses other tiles on sm_120, so its time there is unknown: DFLASH's step is "
    "given without it, and a ratio over that is an upper bound of the ratio over DFLASH.",
]
MEMORY_ASSUMPTIONS = [
    "`ddtree plan memory`: 95.6 GiB, the best share for pools from 0.80 to 0.95, at most 64 requests; what "
    "lies outside the pools is an estimate.",
]

Range = tuple[float, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("summary", type=Path)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables between its marks")
    options = parser.parse_args()
    figures = json.loads(options.summary.read_text(encoding="utf-8"))["figures"]
    found = tables(projections(figures))
    if options.write is None:
        sys.stdout.writelines(f"{text}\n\n" for text in found.values())
        return 0
    page = options.write.read_text(encoding="utf-8")
    for name, text in found.items():
        page = put(page, name, text)
    options.write.write_text(page, encoding="utf-8")
    return 0


def projections(figures: dict[str, Any]) -> dict[str, Any]:
    """Both projections: from a headline run's figures, the kernels' measurements and published curves."""
    published = json.loads(CURVES.read_text(encoding="utf-8"))
    bench = json.loads((KERNELS / "bench.json").read_text(encoding="utf-8"))["results"]
    launches = json.loads((KERNELS / "one-launch.json").read_text(encoding="utf-8"))["times"]
    return {
        "what": "computed from measurements and the assumptions named; nothing here was measured",
        "accept_curves": accept_curves(published, figures[STOCK]["step_ratio"]),
        "rtx_pro_6000": rtx_pro_6000(figures, bench, launches),
    }


# -- published accept lengths -------------------------------------------------------------------------------


def accept_curves(published: dict[str, Any], steps: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Of every curve and width: tokens a second over DFLASH's, or the chain that the tree would beat."""
    widths = {int(width): steps[str(int(width) - 1)] for width in WIDTHS}
    return {
        "assumptions": CURVE_ASSUMPTIONS,
        "data": CURVES.name,
        "break_even": {str(width): found["median"] for width, found in sorted(widths.items())},
        "curves": [
            {
                "id": curve["id"],
                "chain": curve["chain"]["accept"] if curve["chain"] else None,
                "widths": dict(_on_curve(curve, widths)),
                "caution": curve["caution"],
            }
            for curve in published["curves"]
        ],
    }


def _on_curve(
    curve: dict[str, Any], widths: dict[int, dict[str, float]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    trees = {int(budget): accept for budget, accept in curve["trees"].items()}
    for width, step in sorted(widths.items()):
        fitting = [budget for budget in trees if budget < width]
        if not fitting:
            continue
        budget = max(fitting)
        accept = trees[budget]
        found = {"budget": budget, "accept": accept, "pays_below_chain": accept / step["median"]}
        if curve["chain"]:
            gain = accept / curve["chain"]["accept"]
            found |= {
                "accept_ratio": gain,
                "over_dflash": gain / step["median"],
                "low": gain / step["highest"],
                "high": gain / step["lowest"],
            }
        yield str(width), found


# -- another card -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A step of one request on the H200 in milliseconds: `total` = reading + `kernels` + the rest.

    kernels  of ours in this step; a range where they were not timed for one request
    there    the same kernels as they would run on sm_120, where that is another form
    """

    total: float
    drafts: bool = True
    kernels: Range = (0.0, 0.0)
    there: Range = (0.0, 0.0)


@dataclass(frozen=True)
class Card:
    """One combination of the assumptions' ends."""

    reached: float
    kernel: float
    rest: float
    low_kernels: bool


def rtx_pro_6000(
    figures: dict[str, Any], bench: dict[str, Any], launches: list[dict[str, Any]]
) -> dict[str, Any]:
    """Milliseconds of a step there, its ratio over DFLASH's without the recurrent kernel, and memory."""
    measured = bench["bandwidth"]["bytes_per_second"]
    steps = steps_of(figures, bench, launches)
    return {
        "assumptions": CARD_ASSUMPTIONS,
        "card": PRO_6000,
        "h200": {
            "bytes_per_second": measured,
            "steps": {name: _parts(step, measured) for name, step in steps.items()},
        },
        "step_ms": {
            dtype: {name: _range(step, measured, dtype) for name, step in steps.items()}
            for dtype in ("bfloat16", "fp8")
        },
        "over_dflash_at_most": {
            dtype: {name: _at_most(steps[name], steps["dflash"], measured, dtype) for name in WIDTHS}
            for dtype in ("bfloat16", "fp8")
        },
        "products_ms": {name: products_ms(int(name)) for name in WIDTHS},
        "memory": {"assumptions": MEMORY_ASSUMPTIONS, "rows": list(memory_rows())},
    }


def steps_of(
    figures: dict[str, Any], bench: dict[str, Any], launches: list[dict[str, Any]]
) -> dict[str, Step]:
    """Plain decoding, DFLASH less SGLang's recurrent kernel, and every width; medians of the rounds."""
    taken = figures[STOCK]["step_ms"]
    steps = {
        "ar": Step(figures["ar"]["step_ms"]["linear"], drafts=False),
        "dflash": Step(taken["linear"] - bench["stock"]["verify-n1-q16"]["milliseconds"]),
    }
    conv = bench["conv-n1-q64"]["milliseconds"]
    commit, build = _of_one(bench, "commit"), _of_one(bench, "build-walk")
    for width in map(int, WIDTHS):
        verify = bench[f"verify-n1-q{width}"]["milliseconds"]
        least = (conv if width == 64 else 0.0) + commit[0] + build[0]
        most = conv + commit[1] + build[1]
        there = verify if width < 64 else three_launches(launches, width)
        steps[str(width)] = Step(
            taken[str(width - 1)],
            kernels=(verify + least, verify + most),
            there=(there + least, there + most),
        )
    return steps


def _of_one(bench: dict[str, Any], name: str) -> Range:
    """Milliseconds for one request: as timed, or between an eighth and the whole of what eight take."""
    if f"{name}-n1" in bench:
        found = bench[f"{name}-n1"]["milliseconds"]
        return found, found
    eight = bench[f"{name}-n8" if f"{name}-n8" in bench else name]["milliseconds"]
    return eight / 8, eight


def three_launches(launches: list[dict[str, Any]], width: int) -> float:
    """Verify of one request by the form that cards other than Hopper take; `config` is null there."""
    (found,) = (
        row["milliseconds"]
        for row in launches
        if (row["batch"], row["width"], row["config"]) == (1, width, None)
    )
    return float(found)


def bytes_of(step: Step, dtype: str) -> float:
    """What a step reads from memory, but for recurrent states, which are in the kernels' times."""
    target, drafter = QWEN_3_6_27B, QWEN_3_6_27B_DFLASH
    head = target.vocab * target.hidden * 2
    found = target.weight_bytes(tp=1, dtype=dtype) - head  # the embedding table is as large, and not read
    found += CONTEXT * target.attention.kv_bytes(tp=1, element=2)
    if step.drafts:
        found += drafter.weight_bytes(tp=1) + head + CONTEXT * drafter.attention.kv_bytes(tp=1, element=2)
    return float(found)


def _parts(step: Step, measured: float) -> dict[str, Any]:
    reading = 1e3 * bytes_of(step, "bfloat16") / measured
    rest = [step.total - reading - kernels for kernels in reversed(step.kernels)]
    return {"step": step.total, "reading": reading, "kernels": list(step.kernels), "rest": rest}


def milliseconds(step: Step, card: Card, measured: float, dtype: str) -> float:
    """A step on the other card under one combination of assumptions."""
    place = 0 if card.low_kernels else 1
    reading = 1e3 * bytes_of(step, "bfloat16") / measured
    rest = step.total - reading - step.kernels[place]
    there = 1e3 * bytes_of(step, dtype) / (card.reached * PRO_6000["bytes_per_second"])
    return there + card.kernel * step.there[place] + card.rest * rest


def cards(measured: float) -> list[Card]:
    """All combinations of the ends."""
    best_rest = H200["clock_mhz"] / PRO_6000["clock_mhz"]
    return [
        Card(reached, kernel, rest, low_kernels)
        for reached, kernel, low_kernels in itertools.product(REACHED, KERNEL, (True, False))
        for rest in (best_rest, measured / (reached * PRO_6000["bytes_per_second"]))
    ]


def _range(step: Step, measured: float, dtype: str) -> dict[str, float]:
    found = [milliseconds(step, card, measured, dtype) for card in cards(measured)]
    return {"low": min(found), "high": max(found)}


def _at_most(step: Step, over: Step, measured: float, dtype: str) -> float:
    return max(
        milliseconds(step, card, measured, dtype) / milliseconds(over, card, measured, dtype)
        for card in cards(measured)
    )


def products_ms(width: int) -> float:
    """Products of all linear layers for so many nodes, at the data sheet's bfloat16 rate."""
    target, drafter = QWEN_3_6_27B, QWEN_3_6_27B_DFLASH
    table = target.vocab * target.hidden
    weights = (target.parameters - table) * width + (drafter.parameters + table) * drafter.block
    return 1e3 * 2 * weights / PRO_6000["bfloat16_flops"]


def memory_rows() -> Iterator[dict[str, Any]]:
    """Requests of 64 nodes beside the weights: all at full context, and the most that may run at once."""
    for weights, scratch, context in itertools.product(("bfloat16", "fp8"), Scratch, (8192, 32768)):
        wanted = Wanted(
            arm=Arm.DDTREE,
            budget=63,
            running=1,
            context=context,
            card=int(PRO_6000["gib"] * GIB),
            weights=weights,
            scratch=scratch,
        )
        yield {
            "weights": weights,
            "scratch": scratch.value,
            "context": context,
            "all_at_full_context": most_running(wanted, (Verdict.FITS,)),
            "at_once": most_running(wanted, (Verdict.FITS, Verdict.TIGHT)),
        }


def most_running(wanted: Wanted, verdicts: tuple[Verdict, ...]) -> int:
    """The most requests that one of the verdicts is given for, over shares of the card for pools; 0: none."""
    return max(
        (
            running
            for running in range(1, 65)
            for percent in range(80, 96)
            if plan_memory(
                QWEN_3_6_27B,
                QWEN_3_6_27B_DFLASH,
                replace(wanted, running=running, mem_fraction=percent / 100),
            ).verdict
            in verdicts
        ),
        default=0,
    )


# -- for the page -------------------------------------------------------------------------------------------


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The page's tables by the names of their marks."""
    card = found["rtx_pro_6000"]
    made = {
        "curves": _curve_lines(found["accept_curves"]),
        "steps": _step_lines(card),
        "memory": _memory_lines(card["memory"]["rows"]),
    }
    return {name: "\n".join(lines) for name, lines in made.items()}


def put(page: str, name: str, text: str) -> str:
    """The page with this text between the marks of that name."""
    begin, end = f"<!-- projected {name}: begin -->\n", f"\n<!-- projected {name}: end -->"
    head, _, rest = page.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise SystemExit(f"the page has no place between {begin.strip()} and {end.strip()}")
    return head + begin + text + end + tail


def _curve_lines(found: dict[str, Any]) -> Iterator[str]:
    order = ("32", "64", "16")
    yield "| published curve | its chain | 32 nodes | 64 nodes | 16 nodes |"
    yield "|---|---|---|---|---|"
    for curve in found["curves"]:
        chain = "not published" if curve["chain"] is None else f"{curve['chain']:.2f}"
        cells = (_curve_cell(curve["widths"].get(width)) for width in order)
        yield f"| {curve['id']} | {chain} | {' | '.join(cells)} |"
    even = " | ".join(f"{found['break_even'][width]:.3f}" for width in order)
    yield f"| the accept ratio that breaks even | | {even} |"


def _step_lines(card: dict[str, Any]) -> Iterator[str]:
    yield (
        "| one request, ms | H200: a step | reading | our kernels | the rest | there: BF16 | over DFLASH's | "
        "FP8 | over DFLASH's |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    names = {"ar": "plain decoding", "dflash": "DFLASH without SGLang's recurrent kernel"}
    for name, parts in card["h200"]["steps"].items():
        cells = [f"{parts['step']:.1f}", f"{parts['reading']:.1f}"]
        cells += [_between(*parts["kernels"]), _between(*parts["rest"])]
        for dtype in ("bfloat16", "fp8"):
            over = card["over_dflash_at_most"][dtype].get(name)
            step = "{low:.0f} to {high:.0f}".format(**card["step_ms"][dtype][name])
            cells += [step, f"at most {over:.2f}" if over else ""]
        yield f"| {names.get(name, f'{name} nodes')} | {' | '.join(cells)} |"


def _between(low: float, high: float) -> str:
    if high == 0:
        return ""
    return f"{low:.1f} to {high:.1f}" if f"{low:.1f}" != f"{high:.1f}" else f"{low:.1f}"


def _memory_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| weights | kept of a node | context | requests, all at full context | at once |"
    yield "|---|---|---|---|---|"
    for row in rows:
        counts = (_count(row[key]) for key in ("all_at_full_context", "at_once"))
        yield f"| {row['weights']} | {row['scratch']} | {row['context']} | {' | '.join(counts)} |"


def _curve_cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    if "over_dflash" in found:
        return f"{found['over_dflash']:.2f} ({found['accept']:.2f})"
    return f"pays below {found['pays_below_chain']:.1f}"


def _count(value: int) -> str:
    return "none" if value == 0 else "64 or more" if value == 64 else str(value)


if __name__ == "__main__":
    sys.exit(main())
