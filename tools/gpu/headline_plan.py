#!/usr/bin/env python3
"""What a tree is worth at 27B cost: arms of the bed in turns, two servers on one card.

    python3 tools/gpu/headline_plan.py --dry-run --minutes 28
    python3 tools/gpu/detached.py start headline -- python3 tools/gpu/headline_plan.py --out {out}
    python3 tools/gpu/detached.py wait headline --out $OUT
    python3 tools/gpu/headline_plan.py --judge OUT/headline.tar.xz

One server holds DDTREE with `state: wy` and several widths, whose budget every request names (`auto` too).
Beside it one arm takes another's place: `ar`, `dflash` on SGLang's kernels, `chain` (DFlash's chain on ours),
`snapshot` (trees with stored states), `unsafe`, `shadow`; in the end both give way to a pair with FP8
weights. All ways are asked the same prompts in turns. `--sections` picks parts; each has an expected time
(`--dry-run` prints it), and what does not fit into `--minutes` is left over, least important first. Needs
what `bed_plan.py` needs; raw answers and logs go to `<out>/headline.tar.xz`, written anew after every
section, `figures.json` in it has for each arm beside the trees:

    step_ratio    by budget: a step of DDTREE over one of the arm, median of the rounds, lowest, highest
    in-flight-N   tokens a second over the arm's, with a 95 % interval over groups of prompts; the budget that
                  is best on every other group, judged on the rest; `auto` over the best budget in hindsight
    stages        milliseconds of a step's stages by width
    differences   against `ar`: where greedy tokens first part, and whether that was a near-tie: the logits of
                  the two no further apart than twice what two right executions of one prefix differ by
    traces, long  gaps of the card; stored and replayed states over thousands of tokens
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tarfile
import time
import traceback
from pathlib import Path
from typing import Any

from bed_plan import BedContext, write_bed
from engine.headline_arms import SERVED
from engine.headline_asking import ASKING
from engine.headline_figures import figures_of
from engine.headline_pair import NotReady, Pair
from engine.headline_sections import (
    CLOSING,
    PARTS,
    PREPARING,
    SECTIONS,
    TOKENS,
    Section,
    Up,
    cost,
    floor,
    schedule,
)
from engine.host import add_host_options, make_prompts

MORE_PROMPTS = "calibration-prompts.jsonl"


class HeadlineContext(BedContext):
    """A context with an archive of its own name, and prompts for groups of sixteen."""

    NAME = "headline"

    def prepare(self) -> None:
        super().prepare()
        more = make_prompts(self.options.pair, len(self.prompts), MORE_PROMPTS)
        self.prompts = [*self.prompts, *more]
        self.keep("host", "prompts", self.prompts)
        sha256 = hashlib.sha256((self.options.pair / MORE_PROMPTS).read_bytes()).hexdigest()
        self.results["host"]["facts"]["more_prompts_sha256"] = sha256
        self.keep("host", "facts", self.results["host"]["facts"])


def main() -> int:
    options = parse_options()
    if options.judge:
        print(json.dumps(figures_of(read(options.judge)), indent=1))
        return 0
    sections = [section for section in SECTIONS if section.part in options.sections]
    if options.dry_run:
        print(foreseen(sections, options.minutes * 60 - PREPARING - CLOSING))
        return 0
    options.out, options.pair = options.out.resolve(), options.pair.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    context = HeadlineContext(options)
    failures: list[str] = []
    try:
        context.prepare()
        if options.earlier:
            recall(context, read(options.earlier))
        failures += serve(context, write_bed(context), sections)
        figures = figures_of(context.results)
        (context.raw / "figures.json").write_text(json.dumps(figures, indent=1))
    finally:
        context.close()
    print("left over:", ", ".join(context.left_over) or "nothing", flush=True)
    print("failed:", ", ".join(failures) or "nothing", flush=True)
    return 1 if failures else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--sections", default=",".join(PARTS), help="parts, comma-separated: " + ", ".join(PARTS))
    add("--dry-run", action="store_true", help="print what fits into --minutes and the seconds of each")
    add("--costs", type=Path, metavar="FILE", help="step costs by width and batch, in place of estimates")
    add("--earlier", type=Path, metavar="ARCHIVE", help="of a run with plain decoding: its texts and costs")
    add("--judge", type=Path, metavar="ARCHIVE", help="print the figures of a finished run")
    add_host_options(parser, minutes=28)
    add("--prompts", type=int, default=40, help="one at a time")
    add("--tokens", type=int, default=TOKENS)
    options = parser.parse_args()
    options.sections = options.sections.split(",")
    if unknown := set(options.sections) - set(PARTS):
        parser.error(f"--sections: found {', '.join(sorted(unknown))}, allowed are {', '.join(PARTS)}")
    for name in ("costs", "earlier"):
        path = getattr(options, name)
        if path is not None and not path.is_file():
            parser.error(f"--{name}: found no file {path}")
    return options


def recall(context: HeadlineContext, earlier: dict[str, dict[str, Any]]) -> None:
    """What later sections go by of an earlier run's plain decoding; it is not kept a second time."""
    wanted = ("in-flight-1", "noise", "differences")
    found = earlier.get("ar", {}).items()
    context.results["ar"] = {key: value for key, value in found if key in wanted or key.startswith("steps")}


def foreseen(sections: list[Section], seconds: float) -> str:
    """The sections that fit, in their order, with expected seconds; what is left over."""
    up, lines = Up(), []
    planned = schedule(sections, seconds, up)
    for section in planned:
        if section.beside != up.beside:
            lines.append(f"{up.starting(section.beside):6.0f} s  {section.beside} starts")
            up = up.then(section.beside)
        lines.append(f"{section.seconds():6.0f} s  {section.part}: {section.name}")
    left = [section.name for section in sections if section not in planned]
    lines.append(f"{cost(planned, Up()):6.0f} s  of {seconds:.0f}")
    return "\n".join([*lines, f"left over: {', '.join(left) or 'nothing'}"])


def serve(context: HeadlineContext, folder: Path, sections: list[Section]) -> list[str]:
    """Ask section after section, planning anew before each; what failed."""
    pair = Pair(context, folder)
    waiting, failures = list(sections), []
    try:
        while planned := schedule(waiting, context.seconds_left() - CLOSING, pair.up):
            section = planned[0]
            began = time.monotonic()
            try:
                beside, trees = pair.serve(section.beside)
                ends = floor(section, planned, context.seconds_left(), pair.up)
                ASKING[section.kind](context, section, beside, trees, ends)
                waiting.remove(section)
                print(f"  {section.name}: {time.monotonic() - began:.0f} s", flush=True)
            except NotReady as error:
                print(error, flush=True)
                failures.append(error.name)
                waiting = [one for one in waiting if not pair.needs(one.beside, error.name)]
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                print(f"  {section.name}: FAILED {type(error).__name__}: {error}", flush=True)
                traceback.print_exc(limit=-3)
                failures.append(section.name)
                waiting.remove(section)
                pair.forget_ended()
            context.save()
    finally:
        pair.stop()
    context.left_over += [section.name for section in waiting]
    return failures


def read(archive: Path) -> dict[str, dict[str, Any]]:
    """What an archive holds of the run: arm -> workload -> value."""
    found: dict[str, dict[str, Any]] = {}
    with tarfile.open(archive) as tar:
        for entry in tar:
            arm, _, rest = entry.name.partition(".")
            if (arm in SERVED or arm == "host") and rest.endswith(".json"):
                file = tar.extractfile(entry)
                assert file is not None
                found.setdefault(arm, {})[rest.removesuffix(".json")] = json.loads(file.read())
    return found


if __name__ == "__main__":
    sys.exit(main())
