#!/usr/bin/env python3
"""What a tree is worth at 27B cost: arms of the bed in turns, two servers on one card.

    python3 tools/gpu/headline_plan.py --against dflash,ar --costs results/h200-27b/costs.json --out $OUT
    python3 tools/gpu/headline_plan.py --against chain --out $OUT
    python3 tools/gpu/headline_plan.py --judge OUT/headline.tar.xz

One server is a linear arm (`ar`; `dflash` on SGLang's kernels; `chain`, DFlash's chain on ours), the other
DDTREE with `state: wy` and several widths, whose budget every request names (`auto`, with a table of costs).
All are asked the same prompts, alone and several at a time, and for the time of a step, each in turns. With
54 GB an arm two servers fit on a card of 139 GiB: of several linear arms the second takes the first one's
place when that has been asked. Needs what `bed_plan.py` needs; raw answers and logs go to
`<out>/headline.tar.xz`, `figures.json` in it has for each linear arm:

    step_ratio   by budget: a step of DDTREE over one of the linear arm, median of the rounds, lowest, highest
    throughput   by budget and requests in flight: tokens a second over the linear arm's, with a 95 % interval
                 over prompts
    best         the budget that is best on every other prompt, judged on the rest
    auto         tokens a second over those of the budget that was best in hindsight
    differences  against `ar`: where greedy tokens first part, and whether that was a near-tie: the logits of
                 the two no further apart than twice what two right executions of one prefix differ by
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import random
import sys
import tarfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bed_plan import LONGEST, PACKAGE, SHORT, BedContext, Timed, timed, write_bed
from engine.arms import BLOCK, Arm, launch_argv, tree
from engine.headline_figures import figures_of
from engine.host import add_host_options
from engine.parting import best_tokens, noise_rows, parting
from engine.servers import START_LIMIT, Server

WIDTHS = (16, 32, 64)
ENVIRONMENT = (("SGLANG_EXTERNAL_MODEL_PACKAGE", PACKAGE),)
LINEAR = {"ar": Arm(), "dflash": Arm("DFLASH"), "chain": tree(BLOCK, topk=1, state="wy")}
SERVER = """
--host 127.0.0.1 --attention-backend triton --sampling-backend pytorch --linear-attn-backend triton
--grammar-backend none --skip-tokenizer-init --context-length 2048 --random-seed 1 --disable-radix-cache
--mem-fraction-static 0.9 --mamba-ssm-dtype float32 --disable-prefill-cuda-graph --watchdog-timeout 900
""".split()  # noqa: SIM905 - as it is typed
# Of a step time; all ways take turns, so each is short.
STEPS = 128
# Seconds kept for each linear arm that is still to come, and of its start.
LATER, LATER_START = 150, 70

# Seconds left below which a linear arm's turn ends.
Floor = float


class HeadlineContext(BedContext):
    """A context with an archive of its own name."""

    NAME = "headline"


@dataclass(frozen=True)
class Way:
    """One way of getting tokens: `server` and the sampling parameters that ask it for that."""

    label: str
    server: Server
    sampling: dict[str, Any]


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
        figures = figures_of(context.results)
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
    add("--against", default="dflash", help="linear arms, one after the other: " + ", ".join(LINEAR))
    add(
        "--in-flight",
        default="1,4",
        help="requests at once, most important first; pools are made for the most",
    )
    add("--costs", type=Path, metavar="FILE", help="step costs by width and batch: adds the way `auto`")
    add("--judge", type=Path, metavar="ARCHIVE", help="print the figures of a finished run")
    add_host_options(parser)
    add("--prompts", type=int, default=24)
    add("--tokens", type=int, default=128)
    add("--rounds", type=int, default=8, help="of step times, all budgets in each")
    options = parser.parse_args()
    options.against = options.against.split(",")
    options.in_flight = [int(size) for size in options.in_flight.split(",")]
    if unknown := set(options.against) - set(LINEAR):
        parser.error(f"--against: found {', '.join(sorted(unknown))}, allowed are {', '.join(LINEAR)}")
    if options.costs is not None:
        if not options.costs.is_file():
            parser.error(f"--costs: found no file {options.costs}")
        options.costs = options.costs.resolve()
    return options


def tree_arm(costs: Path | None) -> Arm:
    """DDTREE with all budgets in one server."""
    more: dict[str, Any] = {} if costs is None else {"budget": "auto", "costs": str(costs)}
    return tree(max(WIDTHS), state="wy", widths=list(WIDTHS), **more)


def serve(context: HeadlineContext, folder: Path) -> list[str]:
    """The trees' server beside one linear arm after the other; what failed."""
    servers: dict[str, Server] = {}
    ports = iter(range(30300, 30600, 30))
    names = context.options.against
    try:
        for number, name in enumerate(names):
            later = len(names) - number - 1
            floor = 20.0 + LATER * later
            if number and context.seconds_left() < floor + LATER_START + 30:
                context.left_over += names[number:]
                return []
            servers[name] = start(context, folder, name, LINEAR[name], next(ports))
            # The first linear arm alone: it fills the caches of compiled kernels and takes its memory.
            if "ddtree" not in servers:
                trees = tree_arm(context.options.costs)
                servers["ddtree"] = start(context, folder, "ddtree", trees, next(ports))
            measure(context, name, ways_of(context, servers[name], servers["ddtree"]), floor)
            servers.pop(name).stop()
        info = json.loads(servers["ddtree"].get("/server_info"))["internal_states"][0]
        context.keep("ddtree", "info", info.get("ddtree"))
    except NotReady as error:
        print(error, flush=True)
        return [error.name]
    except (OSError, ValueError, KeyError) as error:
        print(f"FAILED {type(error).__name__}: {error}", flush=True)
        traceback.print_exc(limit=-3)
        return [name]
    finally:
        for server in [*servers.values()]:
            server.stop()
    return []


class NotReady(Exception):
    """A server that did not start."""

    def __init__(self, server: Server) -> None:
        super().__init__(f"{server.name}: NOT READY\n{server.why()}")
        self.name = server.name


def start(context: HeadlineContext, folder: Path, name: str, arm: Arm, port: int) -> Server:
    """A server that answers. Raises `NotReady`, the server stopped."""
    with_bed = replace(arm, environment=ENVIRONMENT)
    argv = launch_argv(folder, with_bed, port, server_options(max(context.options.in_flight)))
    server = Server(context, name, with_bed, port, argv)
    if not server.wait(min(START_LIMIT, context.seconds_left() - 30)):
        server.stop()
        raise NotReady(server)
    print(f"{name}: ready after {server.ready_after:.0f} s", flush=True)
    return server


def server_options(running: int) -> list[str]:
    """Those of a server of so many requests; its pools are small, since two servers share a card."""
    sizes = sorted({running, *(2**power for power in range(running.bit_length()))})
    return [
        *SERVER,
        *("--max-running-requests", str(running), "--max-total-tokens", str(4096 * running)),
        *("--max-mamba-cache-size", str(2 * running), "--cuda-graph-bs-decode", *map(str, sizes)),
    ]


def ways_of(context: HeadlineContext, linear: Server, trees: Server) -> list[Way]:
    """The linear arm, every budget and, where there are costs, the server's own choice."""
    names = [str(width - 1) for width in WIDTHS]
    asked: list[Any] = [width - 1 for width in WIDTHS]
    if context.options.costs is not None:
        names.append("auto")
        asked.append("auto")
    pairs = zip(names, asked, strict=True)
    return [
        Way("linear", linear, {}),
        *(Way(name, trees, {"custom_params": {"ddtree_budget": budget}}) for name, budget in pairs),
    ]


def measure(context: HeadlineContext, name: str, ways: list[Way], floor: Floor) -> None:
    """Everything against one linear arm, most important first, until `floor` seconds are left."""
    context.keep(name, "about", {"linear": name, "budgets": [way.label for way in ways[1:]]})
    for size in context.options.in_flight:
        steps = "steps" if size == 1 else f"steps-{size}"
        context.keep(name, steps, step_rounds(context, ways, size, floor + 60))
        context.save()
        rows = throughput(context, name, ways, size, floor)
        context.keep(name, f"in-flight-{size}", rows)
        context.save()
        if name == "ar" and size == 1:
            servers = ways[0].server, ways[1].server
            noise = list(noise_rows(context.prompts, *servers, lambda: context.seconds_left() >= floor))
            context.keep(name, "noise", noise)
            context.keep(name, "differences", list(differences(context, ways[0].server, rows, floor)))


def step_rounds(context: HeadlineContext, ways: list[Way], size: int, floor: Floor) -> list[dict[str, float]]:
    """Milliseconds of a step with `size` copies of a request, all ways in every round, order changing."""
    rng = random.Random(0)
    prompt = [rng.randrange(4, 4096) for _ in range(200)]
    tokens = {way.label: _enough_tokens(way, prompt, size) for way in ways}
    rows = []
    for number in range(context.options.rounds):
        if context.seconds_left() < floor:
            context.left_over.append(f"step rounds of {size} from {number}")
            break
        row = {}
        for way in rng.sample(ways, len(ways)):
            row[way.label] = timed_together(way, prompt, size, tokens[way.label]).ms
        rows.append(row)
    return rows


def _enough_tokens(way: Way, prompt: list[int], size: int) -> int:
    warm = timed_together(way, prompt, size, STEPS)
    return min(LONGEST, max(STEPS, round(STEPS * STEPS / warm.steps)))


def timed_together(way: Way, prompt: list[int], size: int, tokens: int) -> Timed:
    """As `bed_plan.timed`, with copies of one request that end together."""
    if size == 1:
        return timed(way.server, prompt, tokens, sampling=way.sampling)
    (few, short), (many, long) = [_longest(way, prompt, size, count) for count in (SHORT, SHORT + tokens)]
    return Timed(1e3 * (long - short) / (many - few), many - few)


def _longest(way: Way, prompt: list[int], size: int, count: int) -> tuple[int, float]:
    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        copies = [pool.submit(way.server.generate, prompt, count, sampling=way.sampling) for _ in range(size)]
        metas = [copy.result()["meta_info"] for copy in copies]
    steps = max(meta.get("spec_verify_ct") or count - 1 for meta in metas)
    return steps, max(meta["e2e_latency"] for meta in metas)


def throughput(
    context: HeadlineContext, name: str, ways: list[Way], size: int, floor: Floor
) -> list[dict[str, Any]]:
    """Groups of `size` prompts at once, every way on one group before the next, in an order that changes."""
    rng = random.Random(size)
    groups = [context.prompts[i : i + size] for i in range(0, len(context.prompts) - size + 1, size)]
    if not groups:
        context.left_over.append(f"{name}: {size} in flight: found {len(context.prompts)} prompts")
        return []
    for way in ways:  # unmeasured: the first of a size may compile
        together(context, way, groups[0])
    rows = []
    for number, group in enumerate(groups):
        if context.seconds_left() < floor + 25:
            context.left_over.append(f"{name}: {size} in flight from group {number}")
            break
        for way in rng.sample(ways, len(ways)):
            rows.append({"group": number, "way": way.label, **together(context, way, group)})
    return rows


def together(context: HeadlineContext, way: Way, prompts: list[list[int]]) -> dict[str, Any]:
    """One request a prompt, all at once: the longest time, tokens, steps and texts."""

    def ask(ids: list[int]) -> Any:
        return way.server.generate(ids, context.options.tokens, sampling=way.sampling)

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    return {
        "seconds": max(answer["meta_info"]["e2e_latency"] for answer in answers),
        "tokens": sum(len(answer["output_ids"]) for answer in answers),
        "steps": sum(answer["meta_info"].get("spec_verify_ct") or 0 for answer in answers),
        "output_ids": [answer["output_ids"] for answer in answers],
    }


def differences(
    context: HeadlineContext, plain: Server, rows: list[dict[str, Any]], floor: Floor
) -> Iterator[dict[str, Any]]:
    """Where a way's greedy tokens first leave plain decoding's, and what the target says of the two tokens.

    Answers of other linear arms to the same prompts are held against it as well, as `linear` of their name.
    """
    answers: dict[tuple[int, str], list[int]] = {
        (row["group"], row["way"]): row["output_ids"][0] for row in rows
    }
    for name, found in context.results.items():
        if name != "ar":
            answers |= {
                (row["group"], name): row["output_ids"][0]
                for row in found.get("in-flight-1", [])
                if row["way"] == "linear"
            }
    asked: dict[tuple[int, int], Any] = {}
    for (group, way), tokens in sorted(answers.items()):
        truth = answers.get((group, "linear"))
        if truth is None or way == "linear":
            continue
        place = parting(truth, tokens)
        row = {"group": group, "way": way, "place": place}
        if place is not None:
            if (group, place) not in asked:
                if context.seconds_left() < floor:
                    return
                asked[group, place] = best_tokens(plain, context.prompts[group] + truth[:place])
            row |= {"tokens": [truth[place], tokens[place]], "best": asked[group, place]}
        yield row


def read(archive: Path) -> dict[str, dict[str, Any]]:
    """What an archive holds of the run: arm -> workload -> value."""
    found: dict[str, dict[str, Any]] = {}
    with tarfile.open(archive) as tar:
        for entry in tar:
            arm, _, rest = entry.name.partition(".")
            if (arm in LINEAR or arm in ("ddtree", "host")) and rest.endswith(".json"):
                file = tar.extractfile(entry)
                assert file is not None
                found.setdefault(arm, {})[rest.removesuffix(".json")] = json.loads(file.read())
    return found


if __name__ == "__main__":
    sys.exit(main())
