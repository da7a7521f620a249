#!/usr/bin/env python3
"""Validate the 27B-cost bed on a GPU host: it costs what dummy weights cost, and says what the pair says.

    python3 tools/gpu/bed_plan.py --out $OUT
    python3 tools/gpu/bed_plan.py --arms ar --out $OUT

For each arm three servers on one card: the 27B's shape with dummy weights, the bed, and the small pair as
it is. The first two are asked in turns for the time of a step; the last two for the same prompts, greedily
and with the prompts' log-probabilities. An arm may take six minutes, of which five are starts. Needs some
130 GiB of GPU memory, and what `engine_plan.py` needs; raw answers and logs go to `<out>/bed.tar.xz`,
`figures.json` in it has for each arm:

    step_ratio      bed / dummy: median over the rounds, lowest, highest; the median is to be within 1 % of 1
    logprob_change  of the prompts' tokens, bed against small pair: median and largest
    identical       prompts whose greedy tokens are the small pair's (in bf16 others part at a near-tie)
    accept_length   of both; equal but for those prompts
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.arms import Arm, launch_argv
from engine.host import Context, add_host_options
from engine.servers import START_LIMIT, Server

PACKAGE = "ddtree_engine.bed.sglang_models"
KINDS = ("dummy", "bed", "small")
ALGORITHMS = {"ar": None, "dflash": "DFLASH"}
# Pools as small as they can be: two models of 54 GB are on the card at once.
SERVER = """
--host 127.0.0.1 --attention-backend triton --sampling-backend pytorch --linear-attn-backend triton
--grammar-backend none --skip-tokenizer-init --context-length 2048 --random-seed 1 --disable-radix-cache
--max-running-requests 1 --cuda-graph-bs-decode 1 --mem-fraction-static 0.9 --max-total-tokens 8192
--max-mamba-cache-size 4 --mamba-ssm-dtype float32 --disable-prefill-cuda-graph --watchdog-timeout 900
""".split()  # noqa: SIM905 - as it is typed
SHORT, STEPS, LONGEST = 8, 256, 1500
WITHIN = 0.01


class BedContext(Context):
    """A context with an archive of its own name."""

    NAME = "bed"


@dataclass(frozen=True)
class Timed:
    """Decoding at batch 1: `ms` a step, over `steps` steps, with prefill and connection taken off."""

    ms: float
    steps: int


def main() -> int:
    options = parse_options()
    options.out, options.pair = options.out.resolve(), options.pair.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    context = BedContext(options)
    failures: list[str] = []
    try:
        context.prepare()
        folder = write_bed(context)
        for number, name in enumerate(options.arms.split(",")):
            failures += serve_arm(context, folder, name, 30200 + 100 * number)
            context.save()
        failures += judge(context)
    finally:
        context.close()
    print("left over:", ", ".join(context.left_over) or "nothing", flush=True)
    print("failed:", ", ".join(failures) or "nothing", flush=True)
    return 1 if failures else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--arms", default=",".join(ALGORITHMS), help="comma-separated: " + ", ".join(ALGORITHMS))
    add_host_options(parser)
    add("--prompts", type=int, default=20)
    add("--tokens", type=int, default=128)
    add("--rounds", type=int, default=8, help="of step times, both servers in each")
    options = parser.parse_args()
    unknown = set(options.arms.split(",")) - set(ALGORITHMS)
    if unknown:
        parser.error(f"--arms: found {', '.join(sorted(unknown))}, allowed are {', '.join(ALGORITHMS)}")
    return options


def write_bed(context: Context) -> Path:
    """The bed's folders, by the command that users have."""
    folder = context.site / "bed"
    command = [sys.executable, "-m", "ddtree_engine.bed", str(folder), "--pair", str(context.options.pair)]
    environment = context.environment(Arm(), "bed")
    subprocess.run(command, check=True, env=environment, cwd=context.raw)
    return folder


def arm_of(name: str) -> Arm:
    """The bed's classes serve all three kinds: nothing but the weights differs."""
    return Arm(ALGORITHMS[name], environment=(("SGLANG_EXTERNAL_MODEL_PACKAGE", PACKAGE),))


def argv_of(folder: Path, pair: Path, kind: str, name: str, port: int) -> list[str]:
    """Command line of a server; `folder` and `pair` hold target/ and drafter/."""
    source = pair if kind == "small" else folder
    options = [*SERVER, *(["--load-format", "dummy"] if kind == "dummy" else [])]
    return launch_argv(source, arm_of(name), port, options)


def serve_arm(context: Context, folder: Path, name: str, port: int) -> list[str]:
    """Start the three servers of an arm and ask them; what failed."""
    if context.seconds_left() < 240:
        context.left_over.append(name)
        return []
    servers: dict[str, Server] = {}
    try:
        # The first alone: it fills the caches of compiled kernels and takes its memory before others look.
        for group in (KINDS[:1], KINDS[1:]):
            for kind in group:
                port += 7
                argv = argv_of(folder, context.options.pair, kind, name, port)
                servers[kind] = Server(context, f"{name}-{kind}", arm_of(name), port, argv)
            for kind in group:
                if not servers[kind].wait(min(START_LIMIT, context.seconds_left() - 30)):
                    print(f"{name}-{kind}: NOT READY\n{servers[kind].why()}", flush=True)
                    return [f"{name}-{kind}"]
                print(f"{name}-{kind}: ready after {servers[kind].ready_after:.0f} s", flush=True)
        context.keep(name, "rounds", rounds(context, servers["dummy"], servers["bed"]))
        for kind in ("bed", "small"):
            context.keep(name, kind, answers(context, servers[kind]))
    except (OSError, ValueError, KeyError) as error:
        print(f"{name}: FAILED {type(error).__name__}: {error}", flush=True)
        traceback.print_exc(limit=-3)
        return [name]
    finally:
        for server in servers.values():
            server.stop()
    return []


def rounds(context: Context, dummy: Server, bed: Server) -> list[dict[str, Any]]:
    """Step times of both servers in turns, who is first changing with every round."""
    rng = random.Random(0)
    prompt = [rng.randrange(4, 4096) for _ in range(200)]
    # A bed accepts drafts: as many steps take more tokens there.
    warm = {server.name: timed(server, prompt, STEPS) for server in (dummy, bed)}
    tokens = {name: min(LONGEST, round(STEPS * STEPS / one.steps)) for name, one in warm.items()}
    rows = []
    for number in range(context.options.rounds):
        if context.seconds_left() < 60:
            context.left_over.append(f"{dummy.name} rounds from {number}")
            break
        order = (dummy, bed) if number % 2 == 0 else (bed, dummy)
        times = {server.name: timed(server, prompt, tokens[server.name]) for server in order}
        one, other = times[dummy.name], times[bed.name]
        rows.append({"dummy_ms": one.ms, "bed_ms": other.ms, "steps": [one.steps, other.steps]})
    return rows


def timed(server: Server, prompt: list[int], tokens: int, **options: Any) -> Timed:
    """From a short and a long answer to the same prompt: their difference has no prefill in it.

    `options` go with both requests.
    """
    seconds, steps = [], []
    for count in (SHORT, SHORT + tokens):
        meta = server.generate(prompt, count, **options)["meta_info"]
        seconds.append(meta["e2e_latency"])
        steps.append(meta.get("spec_verify_ct") or count - 1)
    taken = steps[1] - steps[0]
    return Timed(1e3 * (seconds[1] - seconds[0]) / taken, taken)


def answers(context: Context, server: Server) -> list[dict[str, Any]]:
    """Greedy tokens of the pair's prompts and the log-probabilities of the prompts themselves."""
    rows = []
    for prompt in context.prompts:
        if context.seconds_left() < 30:
            context.left_over.append(f"{server.name} prompts from {len(rows)}")
            break
        scored = server.generate(prompt, 1, return_logprob=True, logprob_start_len=0)["meta_info"]
        answer = server.generate(prompt, context.options.tokens)
        rows.append(
            {
                "output_ids": answer["output_ids"],
                "verify_steps": answer["meta_info"].get("spec_verify_ct"),
                # The first token has none.
                "logprobs": [entry[0] for entry in scored["input_token_logprobs"][1:]],
            }
        )
    return rows


def judge(context: Context) -> list[str]:
    """Figures of all arms, printed and kept; arms whose steps do not cost what dummy weights cost."""
    figures = {name: figures_of(results) for name, results in context.results.items() if "rounds" in results}
    context.keep("figures", "all", figures)
    (context.raw / "figures.json").write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures, indent=1), flush=True)
    return [f"{name}.step_ratio" for name, row in figures.items() if not row["step_ratio"]["within"]]


def figures_of(results: dict[str, Any]) -> dict[str, Any]:
    """The figures of one arm from its rounds and answers (see this file's head)."""
    ratios = [row["bed_ms"] / row["dummy_ms"] for row in results["rounds"]]
    middle = statistics.median(ratios) if ratios else None
    figures: dict[str, Any] = {
        "step_ratio": {
            "median": middle,
            "lowest": min(ratios, default=None),
            "highest": max(ratios, default=None),
            "rounds": len(ratios),
            "within": middle is not None and abs(middle - 1) <= WITHIN,
        },
        "step_ms": {
            kind: statistics.median(row[f"{kind}_ms"] for row in results["rounds"]) if ratios else None
            for kind in ("dummy", "bed")
        },
    }
    both = list(zip(results.get("bed", []), results.get("small", []), strict=False))
    if not both:
        return figures
    changes = [abs(x - y) for a, b in both for x, y in zip(a["logprobs"], b["logprobs"], strict=True)]
    figures["logprob_change"] = {"median": statistics.median(changes), "largest": max(changes)}
    figures["identical"] = [sum(a["output_ids"] == b["output_ids"] for a, b in both), len(both)]
    figures["accept_length"] = {
        kind: accept_length([pair[place] for pair in both]) for place, kind in enumerate(("bed", "small"))
    }
    return figures


def accept_length(rows: list[dict[str, Any]]) -> float | None:
    """Tokens a verify step, the prefill's token left out; None for plain decoding."""
    steps = sum(row["verify_steps"] or 0 for row in rows)
    return sum(len(row["output_ids"]) - 1 for row in rows) / steps if steps else None


if __name__ == "__main__":
    raise SystemExit(main())
