#!/usr/bin/env python3
"""What a tree is worth at 27B cost: arms of the bed in turns, two servers on one card.

    python3 tools/gpu/headline_plan.py --against dflash --out $OUT
    python3 tools/gpu/headline_plan.py --against ar --out $OUT
    python3 tools/gpu/headline_plan.py --judge OUT/headline.tar.xz

One server is the linear arm (`ar`; `dflash` on SGLang's kernels; `chain`, DFlash's chain on ours), the other
DDTREE with `state: wy` and several widths, whose budget every request names. All are asked the same prompts,
alone and several at a time, and for the time of a step, each in turns. With 54 GB an arm two servers fit on a
card of 139 GiB, so each linear arm is a run of its own. Needs what `bed_plan.py` needs; raw answers and logs
go to `<out>/headline.tar.xz`, `figures.json` in it has:

    step_ratio   by budget: a step of DDTREE over one of the linear arm, median of the rounds, lowest, highest
    throughput   by budget and requests in flight: tokens a second over the linear arm's, with a 95 % interval
                 over prompts
    best         the budget that is best on every other prompt, judged on the rest
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import statistics
import sys
import tarfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from bed_plan import LONGEST, PACKAGE, STEPS, BedContext, timed, write_bed
from engine.arms import BLOCK, Arm, launch_argv, tree
from engine.host import ROOT
from engine.servers import START_LIMIT, Server

WIDTHS = (8, 16, 32, 64)
ENVIRONMENT = (("SGLANG_EXTERNAL_MODEL_PACKAGE", PACKAGE),)
LINEAR = {"ar": Arm(), "dflash": Arm("DFLASH"), "chain": tree(BLOCK, topk=1, state="wy")}
TREE = tree(max(WIDTHS), state="wy", widths=list(WIDTHS))
IN_FLIGHT = (1, 4)
SERVER = """
--host 127.0.0.1 --attention-backend triton --sampling-backend pytorch --linear-attn-backend triton
--grammar-backend none --skip-tokenizer-init --context-length 2048 --random-seed 1 --disable-radix-cache
--max-running-requests 4 --cuda-graph-bs-decode 1 2 4 --mem-fraction-static 0.9 --max-total-tokens 16384
--max-mamba-cache-size 8 --mamba-ssm-dtype float32 --disable-prefill-cuda-graph --watchdog-timeout 900
""".split()  # noqa: SIM905 - as it is typed
DRAWS = 2000


class HeadlineContext(BedContext):
    """A context with an archive of its own name."""

    @property
    def archive(self) -> Path:
        return Path(self.options.out) / "headline.tar.xz"


def main() -> int:
    options = parse_options()
    if options.judge:
        print(json.dumps(figures_of(read(options.judge)), indent=1))
        return 0
    options.out, options.pair = options.out.resolve(), options.pair.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    context = HeadlineContext(options)
    failures: list[str] = []
    try:
        context.prepare()
        failures += serve(context, write_bed(context))
        figures = figures_of(context.results["headline"]) if "headline" in context.results else {}
        (context.raw / "figures.json").write_text(json.dumps(figures, indent=1))
        print(json.dumps(figures, indent=1), flush=True)
    finally:
        context.close()
    print("left over:", ", ".join(context.left_over) or "nothing", flush=True)
    print("failed:", ", ".join(failures) or "nothing", flush=True)
    return 1 if failures else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--against", choices=list(LINEAR), default="dflash", help="the linear arm")
    add("--judge", type=Path, metavar="ARCHIVE", help="print the figures of a finished run")
    add("--out", type=Path, default=Path(os.environ.get("OUT", "out")), help="where results go")
    add("--pair", type=Path, default=ROOT / "engine_patch/reference/pair", help="the small pair")
    add(
        "--bundle", default=str(ROOT / ".gpu/bundle/site.tar.xz"), help="site-packages to unpack; '' for none"
    )
    add("--minutes", type=float, default=9.0, help="end by itself after this long")
    add("--prompts", type=int, default=24)
    add("--tokens", type=int, default=128)
    add("--rounds", type=int, default=8, help="of step times, all budgets in each")
    return parser.parse_args()


def serve(context: HeadlineContext, folder: Path) -> list[str]:
    """Start the two servers, one after the other, and ask them; what failed."""
    name = context.options.against
    arms = {name: LINEAR[name], "ddtree": TREE}
    servers: dict[str, Server] = {}
    try:
        # One after the other: the first fills the caches of compiled kernels and takes its memory.
        for port, (label, arm) in zip((30300, 30330), arms.items(), strict=True):
            with_bed = replace(arm, environment=ENVIRONMENT)
            argv = launch_argv(folder, with_bed, port, SERVER)
            servers[label] = Server(context, label, with_bed, port, argv)
            if not servers[label].wait(min(START_LIMIT, context.seconds_left() - 60)):
                print(f"{label}: NOT READY\n{servers[label].why()}", flush=True)
                return [label]
            print(f"{label}: ready after {servers[label].ready_after:.0f} s", flush=True)
        ways = ways_of(servers[name], servers["ddtree"])
        context.keep("headline", "about", {"linear": name, "widths": WIDTHS})
        context.keep("headline", "steps", step_rounds(context, ways))
        for size in IN_FLIGHT:
            context.keep("headline", f"in-flight-{size}", throughput(context, ways, size))
            context.save()
        info = json.loads(servers["ddtree"].get("/server_info"))["internal_states"][0]
        context.keep("headline", "ddtree", info.get("ddtree"))
    except (OSError, ValueError, KeyError) as error:
        print(f"FAILED {type(error).__name__}: {error}", flush=True)
        traceback.print_exc(limit=-3)
        return [name]
    finally:
        for server in servers.values():
            server.stop()
    return []


# A way: its label, the server that serves it and the sampling parameters that ask for it.
Way = tuple[str, Server, dict[str, Any]]


def ways_of(linear: Server, trees: Server) -> list[Way]:
    """The linear arm, then every budget."""
    budgets = [width - 1 for width in WIDTHS]
    asked: list[Way] = [(str(b), trees, {"custom_params": {"ddtree_budget": b}}) for b in budgets]
    return [("linear", linear, {}), *asked]


def step_rounds(context: HeadlineContext, ways: list[Way]) -> list[dict[str, float]]:
    """Milliseconds of a step at batch 1, all ways in every round, in an order that changes."""
    rng = random.Random(0)
    prompt = [rng.randrange(4, 4096) for _ in range(200)]
    tokens = {label: _enough_tokens(server, prompt, sampling) for label, server, sampling in ways}
    rows = []
    for number in range(context.options.rounds):
        if context.seconds_left() < 120:
            context.left_over.append(f"step rounds from {number}")
            break
        row = {}
        for label, server, sampling in rng.sample(ways, len(ways)):
            row[label] = timed(server, prompt, tokens[label], sampling=sampling).ms
        rows.append(row)
    return rows


def _enough_tokens(server: Server, prompt: list[int], sampling: dict[str, Any]) -> int:
    warm = timed(server, prompt, STEPS, sampling=sampling)
    return min(LONGEST, max(STEPS, round(STEPS * STEPS / warm.steps)))


def throughput(context: HeadlineContext, ways: list[Way], size: int) -> list[dict[str, Any]]:
    """Groups of `size` prompts at once, every way on one group before the next, in an order that changes."""
    rng = random.Random(size)
    groups = [context.prompts[i : i + size] for i in range(0, len(context.prompts) - size + 1, size)]
    rows = []
    for number, group in enumerate(groups):
        if context.seconds_left() < 45:
            context.left_over.append(f"{size} in flight from group {number}")
            break
        for label, server, sampling in rng.sample(ways, len(ways)):
            rows.append({"group": number, "way": label, **together(context, server, group, sampling)})
    return rows


def together(
    context: HeadlineContext, server: Server, prompts: list[list[int]], sampling: dict[str, Any]
) -> dict[str, Any]:
    """One request a prompt, all at once: the longest time, tokens, steps and texts."""

    def ask(ids: list[int]) -> Any:
        return server.generate(ids, context.options.tokens, sampling=sampling)

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    return {
        "seconds": max(answer["meta_info"]["e2e_latency"] for answer in answers),
        "tokens": sum(len(answer["output_ids"]) for answer in answers),
        "steps": sum(answer["meta_info"].get("spec_verify_ct") or 0 for answer in answers),
        "output_ids": [answer["output_ids"] for answer in answers],
    }


def read(archive: Path) -> dict[str, Any]:
    """What an archive holds of the run."""
    prefix, suffix = "headline.", ".json"
    found = {}
    with tarfile.open(archive) as tar:
        for entry in tar:
            if entry.name.startswith(prefix) and entry.name.endswith(suffix):
                file = tar.extractfile(entry)
                assert file is not None
                found[entry.name[len(prefix) : -len(suffix)]] = json.loads(file.read())
    return found


def figures_of(results: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run (see this file's head)."""
    figures: dict[str, Any] = {"linear": results["about"]["linear"]}
    budgets = [str(width - 1) for width in results["about"]["widths"]]
    steps = results.get("steps") or []
    if steps:
        figures["step_ms"] = {way: statistics.median(row[way] for row in steps) for way in steps[0]}
        ratios = {budget: [row[budget] / row["linear"] for row in steps] for budget in budgets}
        figures["step_ratio"] = {
            budget: {"median": statistics.median(found), "lowest": min(found), "highest": max(found)}
            for budget, found in ratios.items()
        }
    for size in IN_FLIGHT:
        rows = results.get(f"in-flight-{size}") or []
        if rows:
            figures[f"in-flight-{size}"] = throughput_figures(rows, budgets)
    return figures


def throughput_figures(rows: list[dict[str, Any]], budgets: list[str]) -> dict[str, Any]:
    """Ratios by budget over all groups, and the best budget of even groups judged on odd ones."""
    complete = _by_group(rows, ["linear", *budgets])
    halves = ([g for g in complete if not g % 2], [g for g in complete if g % 2])
    found: dict[str, Any] = {"groups": len(complete)}
    found["accept_length"] = {
        way: sum(g[way]["tokens"] for g in complete.values()) / steps
        for way in ("linear", *budgets)
        if (steps := sum(g[way]["steps"] for g in complete.values()))
    }
    found["ratio"] = {budget: interval(list(complete.values()), budget) for budget in budgets}
    if all(halves):
        picked, judged = ([complete[g] for g in half] for half in halves)
        best = max(budgets, key=lambda budget: ratio(picked, budget))
        found["best"] = {"budget": int(best), **interval(judged, best)}
    return found


def _by_group(rows: list[dict[str, Any]], ways: list[str]) -> dict[int, dict[str, dict[str, Any]]]:
    groups: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], {})[row["way"]] = row
    return {number: group for number, group in groups.items() if set(ways) <= set(group)}


def ratio(groups: list[dict[str, dict[str, Any]]], way: str) -> float:
    """Tokens a second of a way over those of the linear arm, over these groups."""

    def rate(label: str) -> float:
        tokens = sum(group[label]["tokens"] for group in groups)
        return float(tokens / sum(group[label]["seconds"] for group in groups))

    return rate(way) / rate("linear")


def interval(groups: list[dict[str, dict[str, Any]]], way: str) -> dict[str, float]:
    """The ratio with its 95 % bootstrap interval over groups of prompts."""
    rng = random.Random(0)
    draws = sorted(ratio(rng.choices(groups, k=len(groups)), way) for _ in range(DRAWS))
    low, high = draws[round(0.025 * DRAWS)], draws[round(0.975 * DRAWS) - 1]
    return {"ratio": ratio(groups, way), "low": low, "high": high}


if __name__ == "__main__":
    sys.exit(main())
