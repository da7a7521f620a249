#!/usr/bin/env python3
"""Prove the SGLang plugin on a GPU host: start servers arm by arm, run workloads, keep everything raw.

    python3 tools/gpu/engine_plan.py --stages smoke --out $OUT
    python3 tools/gpu/engine_plan.py --stages a,b,c,d,f,g --out $OUT --parallel 4
    python3 tools/gpu/engine_plan.py --list

Needs on the host: Python 3.12, a CUDA build of torch, `tokenizers`; SGLang itself comes from the bundle
(`--bundle`, a tar of site-packages; `--bundle ''` uses an installed SGLang). Standard library otherwise.

Stages are the gates of the engine (a..k), `smoke`, `paths`, `wy` (replayed states beside stored ones),
`widths` and `widths-wy` (several widths in one server, each beside the arm that has only this one; with
`--parallel 1` where the seconds that the policy reads are to mean something), `features`, `referee` (plain
decoding alone, to be asked about the ties of an `--earlier` run), `checkpoints` (the pair as the 27B's class,
with pictures, a short window and long texts), `fp8`, `kv8` and `profile` (traces of a step at a 27B's cost,
from a server that starts when all arms but those under load have ended). Every arm is started once and serves
all workloads that the stages ask of it; arms under load start first, and the others are served meanwhile. Raw
answers and logs go to `<out>/engine.tar.xz`, written anew after every arm, one JSON file per arm and
workload; `judge-*.json` in it has the figures that need no statistics; `tools/gpu/engine_summary.py` makes
the gates of them. An arm that fails stops nothing else; in `smoke` it is started again in simpler ways to see
which part fails. What does not fit into `--minutes` is listed as left over, and the plan ends by itself.
Where commands may take ten minutes only, start it detached (`tools/gpu/detached.py`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from engine.arms import EXTRA_STAGES, STAGES, plan_of
from engine.host import Context, add_host_options
from engine.runs import Run


def main() -> int:
    options = parse_options()
    options.out, options.pair = options.out.resolve(), options.pair.resolve()
    if options.list:
        print(json.dumps({"stages": STAGES, "extra": EXTRA_STAGES}, indent=1))
        return 0
    stages = options.stages.split(",")
    work = plan_of(stages)
    options.out.mkdir(parents=True, exist_ok=True)
    context = Context(options)
    print("arms:", ", ".join(work) or "none", flush=True)
    run = Run(context)
    try:
        context.prepare()
        extra = [stage for stage in stages if stage in EXTRA_STAGES]
        run.all(work, extra, diagnose="smoke" in stages)
    finally:
        context.close()
    print("left over:", ", ".join(context.left_over) or "nothing", flush=True)
    print("failed:", ", ".join(run.failures) or "nothing", flush=True)
    return 1 if run.failures else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--stages", default="smoke", help="comma-separated: " + ", ".join([*STAGES, *EXTRA_STAGES]))
    add("--list", action="store_true", help="show stages and arms, run nothing")
    add_host_options(parser)
    add("--parallel", type=int, default=3, help="arms served side by side")
    add("--prompts", type=int, default=40)
    add("--tokens", type=int, default=160)
    add(
        "--earlier",
        type=Path,
        metavar="ARCHIVE",
        help="answers of a run that ended before its ties: their first differences are asked about too",
    )
    add("--load-minutes", type=float, default=3.0)
    add("--draws", type=int, default=1000, help="per prompt, 20 prompts")
    options = parser.parse_args()
    if options.earlier is not None:
        options.earlier = options.earlier.resolve()
    return options


if __name__ == "__main__":
    raise SystemExit(main())
