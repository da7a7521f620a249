"""What a step of a tree costs at a 27B's shape: one server of the bed, traced when alone on the card."""

from __future__ import annotations

import random

from bed_plan import PACKAGE, timed, write_bed

from engine.arms import Arm, launch_argv, tree
from engine.host import Context
from engine.profiles import take
from engine.servers import START_LIMIT, Server

NAME = "bed-trees"
WIDTHS = (16, 32, 64)
ARM = Arm(
    "DDTREE",
    max(WIDTHS),
    tree(max(WIDTHS), state="wy", widths=list(WIDTHS)).config,
    environment=(("SGLANG_EXTERNAL_MODEL_PACKAGE", PACKAGE),),
)
RUNNING = 4
SERVER = f"""
--host 127.0.0.1 --attention-backend triton --sampling-backend pytorch --linear-attn-backend triton
--grammar-backend none --skip-tokenizer-init --context-length 2048 --random-seed 1 --disable-radix-cache
--mem-fraction-static 0.9 --mamba-ssm-dtype float32 --disable-prefill-cuda-graph --watchdog-timeout 900
--max-running-requests {RUNNING} --max-total-tokens 16384 --max-mamba-cache-size 8
--cuda-graph-bs-decode 1 2 {RUNNING}
""".split()
# Tokens of a timing without the profiler, and how often.
STEPS, ROUNDS = 256, 3


def start(context: Context) -> Server:
    """The server, ready; others may be on the card meanwhile. Raises RuntimeError."""
    port = 32100
    server = Server(context, NAME, ARM, port, launch_argv(write_bed(context), ARM, port, SERVER))
    if not server.wait(min(START_LIMIT, context.seconds_left() - 30)):
        server.stop()
        raise RuntimeError(f"{NAME}: NOT READY\n{server.why()}")
    print(f"{NAME}: ready after {server.ready_after:.0f} s", flush=True)
    return server


def measure(context: Context, server: Server) -> None:
    """Milliseconds of a step by width in turns, then a trace of each, for one request and for several."""
    rng = random.Random(0)
    prompt = [rng.randrange(4, 4096) for _ in range(200)]
    asked = {width: {"custom_params": {"ddtree_budget": width - 1}} for width in WIDTHS}
    rounds = []
    for _ in range(ROUNDS):
        order = rng.sample(WIDTHS, len(WIDTHS))
        rounds.append({width: timed(server, prompt, STEPS, sampling=asked[width]).ms for width in order})
        context.keep(NAME, "step-ms", rounds)
    print(f"{NAME}: ms a step {rounds}", flush=True)
    for size in (1, RUNNING):
        for width in WIDTHS:
            what = f"trace-{width}-nodes-{size}-in-flight"
            if context.seconds_left() < 30:
                context.left_over.append(what)
                continue
            prompts = [[token + number for token in prompt] for number in range(size)]
            trace = take(server, context.site / what, prompts, asked[width])
            context.keep(NAME, what, trace)
            print(f"{NAME}: {what}: {len(trace['events'])} events", flush=True)
            context.save()
