#!/usr/bin/env python3
"""Several cards of one host: arms side by side, what cards and neighbours change, and ranks against replicas.

    python3 tools/gpu/multi_plan.py --stages replicas --out $OUT
    python3 tools/gpu/multi_plan.py --stages tp --out $OUT
    python3 tools/gpu/multi_plan.py --model bed --out $OUT

Stage `replicas` starts every arm on every card, so that arms change cards without a restart. In every round
each layout is loaded for some seconds by this one process: DDTREE alone on one card, each arm on all cards,
and the arms side by side, every card with the next arm. Stage `tp` holds DDTREE over 2, 4 and 8 cards
against DDTREE with one replica a card, under the same number of requests on the host; widths that the
model's heads do not allow are named (the small pair has 2: `--model bed` takes the 27B's heads). Both
stages in one call, the default, are for hosts whose kernels are compiled: cold, each needs its own. Greedy
answers of all servers are compared, and first differences judged as near-ties.

Needs what `engine_plan.py` needs, and 2 cards or more. NVLink multicast is off in every server. Raw answers,
loads, what every card did, and logs go to `<out>/multi.tar.xz`; `multi_summary.py` makes figures of it. What
does not fit into `--minutes` is listed as left over.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bed_plan import PACKAGE, write_bed
from engine.cards import ARMS, RUNNING, WIDTHS, Seat, obstacle, side_by_side, single_seats, wide_seats
from engine.host import Context, add_host_options
from engine.multi_figures import figures_of
from engine.parting import best_tokens, noise_rows, parting
from engine.servers import START_LIMIT, Server
from engine.telemetry import by_card, watched

STAGES = ("replicas", "tp")
# Of the bed one card holds two servers.
DEFAULT_ARMS = {"pair": ("ar", "dflash", "ddtree"), "bed": ("ar", "ddtree")}
# With as many cards as this there is room for a fourth arm.
MANY_CARDS = 4
TREE, PLAIN = "ddtree", "ar"
# Seconds kept for every width that is still to come, its start in it.
LATER = 170
# Seconds of a load that is not counted.
WARM_UP = 1.0
PORTS = range(30700, 32000, 10)

# Server name -> itself.
Servers = dict[str, Server]


class MultiContext(Context):
    """A context with an archive of its own name."""

    NAME = "multi"


def main() -> int:
    options = parse_options()
    options.out, options.pair = options.out.resolve(), options.pair.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    context = MultiContext(options)
    failures: list[str] = []
    log = context.raw / "telemetry.csv"
    try:
        context.prepare()
        folder = write_bed(context) if options.model == "bed" else options.pair
        with watched(log):
            failures += Plan(context, folder).run()
        context.keep("host", "telemetry", by_card(log.read_text()))
        print(json.dumps(figures_of(context.results), indent=1), flush=True)
    finally:
        context.close()
    print("left over:", ", ".join(context.left_over) or "nothing", flush=True)
    print("failed:", ", ".join(failures) or "nothing", flush=True)
    return 1 if failures else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--stages", default=",".join(STAGES), help="comma-separated: " + ", ".join(STAGES))
    add("--model", choices=sorted(DEFAULT_ARMS), default="pair", help="the small pair, or the bed made of it")
    add("--arms", help="comma-separated, on every card: " + ", ".join(ARMS))
    add("--gpus", type=int, help="how many cards; default: all")
    add("--tp", default=",".join(map(str, WIDTHS)), help="ranks of one server, those that fit are tried")
    add_host_options(parser, minutes=9.3)
    add("--prompts", type=int, default=24)
    add("--tokens", type=int, default=128, help="of every answer")
    add("--rounds", type=int, help="of loads, all layouts in each; default: one for each arm, at least 3")
    add("--seconds", type=float, default=4.0, help="of one load")
    options = parser.parse_args()
    options.gpus = options.gpus or count_cards()
    if options.gpus < 2:
        parser.error(f"--gpus: found {options.gpus}, allowed are 2 or more")
    options.stages = _listed(parser, "--stages", options.stages, STAGES)
    options.tp = [int(width) for width in _listed(parser, "--tp", options.tp, [str(w) for w in WIDTHS])]
    more = ("shadow",) if options.gpus >= MANY_CARDS and options.model == "pair" else ()
    arms = options.arms or ",".join((*DEFAULT_ARMS[options.model], *more))
    options.arms = _listed(parser, "--arms", arms, list(ARMS))
    if TREE not in options.arms:
        parser.error(f"--arms: found no {TREE}, which the others are held against")
    options.rounds = options.rounds or max(3, len(options.arms))
    return options


def _listed(parser: argparse.ArgumentParser, option: str, text: str, allowed: Sequence[str]) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(allowed):
        parser.error(f"{option}: found {', '.join(sorted(unknown))}, allowed are {', '.join(allowed)}")
    return list(dict.fromkeys(names))


def count_cards() -> int:
    """The cards that nvidia-smi lists; 0 where there is none."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


class Plan:
    """One run: its servers, and what failed."""

    def __init__(self, context: MultiContext, folder: Path) -> None:
        self.context = context
        self.options = context.options
        self.folder = folder
        self.servers: Servers = {}
        self.failures: list[str] = []
        self._ports = iter(PORTS)

    def run(self) -> list[str]:
        """All stages, most important first; what failed."""
        options = self.options
        widths = [tp for tp in options.tp if tp <= options.gpus] if "tp" in options.stages else []
        about = {"gpus": options.gpus, "arms": options.arms, "model": options.model, "tp": widths}
        self.context.keep("plan", "about", about | {"seconds": options.seconds, "running": RUNNING})
        try:
            self._replicas([tp for tp in widths if self._possible(tp)])
            self._stop([name for name in self.servers if not name.startswith(f"{TREE}-c")])
            for number, tp in enumerate(widths):
                if self._possible(tp):
                    self._wide(tp, floor=15.0 + LATER * sum(map(self._possible, widths[number + 1 :])))
        except (OSError, ValueError, KeyError) as error:
            print(f"FAILED {type(error).__name__}: {error}", flush=True)
            traceback.print_exc(limit=-3)
            self.failures.append(type(error).__name__)
        finally:
            self._stop(list(self.servers))
        return self.failures

    def _possible(self, tp: int) -> bool:
        why = obstacle(self.folder, tp)
        if why is not None:
            self.context.keep(f"tp{tp}", "obstacle", why)
        return why is None

    def _replicas(self, widths: list[int]) -> None:
        """One rank a server: answers, what right executions differ by, and the loads of all layouts."""
        options, context = self.options, self.context
        loads = "replicas" in options.stages
        seats = single_seats(options.arms if loads else [TREE], options.gpus)
        if not loads:
            seats.append(Seat(f"{PLAIN}-c0", PLAIN, (0,)))
        self._start(sorted(seats, key=lambda seat: seat.cards != (0,)))
        self._answers(list(self.servers))
        floor = 40.0 + LATER * len(widths)
        if f"{PLAIN}-c0" in self.servers and f"{TREE}-c0" in self.servers:
            plain, trees = self.servers[f"{PLAIN}-c0"], self.servers[f"{TREE}-c0"]
            noise = list(noise_rows(context.prompts, plain, trees, lambda: context.seconds_left() >= floor))
            context.keep("replicas", "noise", noise)
            found = list(differences(context, plain.name, plain, list(self.servers), floor))
            context.keep("replicas", "differences", found)
        context.save()
        if loads:
            rows: list[dict[str, Any]] = []
            for in_flight in (
                1,
                RUNNING,
            ):  # all rounds of the one first: the floor and the arms are judged by it
                rows += self._rounds("replicas", partial(self._layouts, in_flight), floor)
                context.keep("replicas", "loads", rows)
                context.save()

    def _layouts(self, in_flight: int, number: int) -> Iterator[tuple[str, list[str], int]]:
        """(layout, its servers, requests of each) of a round."""
        arms, gpus = self.options.arms, self.options.gpus
        if in_flight == 1:
            yield "alone", [f"{TREE}-c{number % gpus}"], in_flight
        for arm in arms:
            yield f"all-{arm}", [f"{arm}-c{card}" for card in range(gpus)], in_flight
        yield "side-by-side", side_by_side(arms, gpus, number), in_flight

    def _wide(self, tp: int, floor: float) -> None:
        """DDTREE over `tp` cards beside its replicas of one card, in turns."""
        context, name = self.context, f"tp{tp}"
        if context.seconds_left() < floor + 90:
            context.left_over.append(name)
            return
        single = [seat for seat in self.servers if seat.startswith(f"{TREE}-c")]
        wide = [seat.name for seat in self._start(wide_seats(TREE, tp, self.options.gpus))]
        if wide and single:
            self._answers(wide)
            reference = self.servers[single[0]]
            found = list(differences(context, reference.name, reference, wide, floor))
            context.keep(name, "differences", found)

            def layouts(number: int) -> Iterator[tuple[str, list[str], int]]:
                for in_flight in (1, RUNNING):
                    both = [(f"all-{TREE}", single, in_flight), (f"{name}-{TREE}", wide, in_flight * tp)]
                    yield from both if number % 2 == 0 else both[::-1]

            context.keep(name, "loads", self._rounds(name, layouts, floor))
        self._stop(wide)
        context.save()

    def _start(self, seats: list[Seat]) -> list[Seat]:
        """Servers that answer, of these; the first starts alone and fills the caches of compiled kernels."""
        package = (("SGLANG_EXTERNAL_MODEL_PACKAGE", PACKAGE),) if self.options.model == "bed" else ()
        ready = []
        for group in (seats[:1], seats[1:]) if not self.servers else (seats,):
            limit = min(START_LIMIT, self.context.seconds_left() - 30)
            begun = {}
            for seat in group:
                port, arm = next(self._ports), seat.served(package)
                begun[seat] = Server(self.context, seat.name, arm, port, seat.argv(self.folder, port))
                self.servers[seat.name] = begun[seat]
            answers = side_by_side_calls({seat: partial(begun[seat].wait, limit) for seat in group})
            for seat, good in answers.items():
                server = begun[seat]
                if good:
                    print(f"{seat.name}: ready after {server.ready_after:.0f} s", flush=True)
                    ready.append(seat)
                    continue
                print(f"{seat.name}: NOT READY\n{server.why()}", flush=True)
                self.failures.append(seat.name)
                self._stop([seat.name])
        return ready

    def _stop(self, names: Sequence[str]) -> None:
        """All at once: each waits a second for its card's memory."""
        side_by_side_calls({name: self.servers.pop(name).stop for name in names})

    def _answers(self, names: Sequence[str]) -> None:
        """Greedy tokens of all prompts, one at a time at every server; the servers side by side."""

        def ask(server: Server) -> list[dict[str, Any]]:
            rows = []
            for prompt in self.context.prompts:
                answer = server.generate(prompt, self.options.tokens)
                steps = answer["meta_info"].get("spec_verify_ct")
                rows.append({"output_ids": answer["output_ids"], "steps": steps})
            return rows

        found = side_by_side_calls({name: partial(ask, self.servers[name]) for name in names})
        for name, rows in found.items():
            self.context.keep(name, "answers", rows)

    def _rounds(self, what: str, layouts: Any, floor: float) -> list[dict[str, Any]]:
        """Loads of all layouts in every round; layouts with a server that did not start are left out."""
        rows: list[dict[str, Any]] = []
        for number in range(-1, self.options.rounds):  # the round before the first warms up
            for layout, names, in_flight in layouts(max(number, 0)):
                if not set(names) <= set(self.servers):
                    continue
                seconds = self.options.seconds if number >= 0 else min(WARM_UP, self.options.seconds)
                if self.context.seconds_left() < floor + seconds + 2:
                    self.context.left_over.append(f"{what}: loads from round {number}, {layout}")
                    return rows
                servers = [self.servers[name] for name in names]
                found = load(servers, self.context.prompts, self.options.tokens, in_flight, seconds)
                if number >= 0:
                    row = {"round": number, "layout": layout, "in_flight": in_flight, "servers": found}
                    rows.append(row)
        return rows


def load(
    servers: Sequence[Server], prompts: list[list[int]], tokens: int, in_flight: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """Keep `in_flight` requests at every server for so long, and wait for those that are under way.

    Server -> tokens and requests that came back, seconds until its last one, and the seconds that it says
    that they took, added up. A server's first prompt is another one than its neighbour's.
    """
    ready = threading.Barrier(len(servers) * in_flight)

    def client(number: int, place: int) -> tuple[int, int, float, float]:
        count, produced, said = 0, 0, 0.0
        ready.wait()
        began = time.monotonic()
        while True:
            prompt = prompts[(number + place * len(servers) + count) % len(prompts)]
            answer = servers[number].generate(prompt, tokens)
            count, produced = count + 1, produced + len(answer["output_ids"])
            said += answer["meta_info"]["e2e_latency"]
            took = time.monotonic() - began
            if took >= seconds:
                return count, produced, took, said

    jobs = [(number, place) for number in range(len(servers)) for place in range(in_flight)]
    found = side_by_side_calls({job: partial(client, *job) for job in jobs})
    rows = {}
    for number, server in enumerate(servers):
        mine = [found[number, place] for place in range(in_flight)]
        rows[server.name] = {
            "requests": sum(row[0] for row in mine),
            "tokens": sum(row[1] for row in mine),
            "seconds": max(row[2] for row in mine),
            "said_seconds": sum(row[3] for row in mine),
        }
    return rows


def side_by_side_calls(calls: Mapping[Any, Any]) -> dict[Any, Any]:
    """Key -> what its call returned, all made at once; the first error is raised when all have ended."""
    if not calls:
        return {}
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        futures = {key: pool.submit(call) for key, call in calls.items()}
    return {key: future.result() for key, future in futures.items()}


def differences(
    context: MultiContext, truth: str, judge: Server, names: Sequence[str], floor: float
) -> Iterator[dict[str, Any]]:
    """Where a server's greedy tokens first leave those of `truth`; what `judge` says of the two tokens."""
    asked: dict[tuple[int, int], Any] = {}
    for name in names:
        rows = zip(context.results[truth]["answers"], context.results[name]["answers"], strict=True)
        for number, (right, other) in enumerate(rows):
            if name == truth:
                continue
            tokens = right["output_ids"], other["output_ids"]
            place = parting(*tokens)
            row: dict[str, Any] = {"prompt": number, "server": name, "against": truth, "place": place}
            if place is not None:
                if (number, place) not in asked:
                    if context.seconds_left() < floor:
                        context.left_over.append(f"differences of {name} from prompt {number}")
                        return
                    prefix = context.prompts[number] + right["output_ids"][:place]
                    asked[number, place] = best_tokens(judge, prefix)
                row |= {"tokens": [one[place] for one in tokens], "best": asked[number, place]}
            yield row


if __name__ == "__main__":
    sys.exit(main())
