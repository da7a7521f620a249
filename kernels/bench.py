"""Time and check the tree kernels on this machine's CUDA card, beside SGLang's own where it can be imported.

    python -m ddtree_kernels.bench [--out DIR] [--sweep] [--no-stock] [--only NAME ...] [--budget-s 600]

Writes `bench.json` (every measurement), `summary.json` (the targets) and `dispatch.json` (the faster form by
shape) after every measurement. Times are medians of a CUDA graph that holds all 48 layers of Qwen3.6-27B's
shape; errors are RMS of the float32 result against a float64 recurrence, relative. Every measurement has a
process of its own, so that a fault costs that one alone. SGLang's tree kernel chooses its tile by card (4
value channels on sm_90, 32 elsewhere), so a ratio to it belongs to the card it was taken on.

`--tiny` with TRITON_INTERPRET=1 rehearses everything on the CPU; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from ddtree_kernels import bench_commit, bench_steps, bench_stock, bench_timing, bench_verify, interpreting
from ddtree_kernels.bench_inputs import QWEN36_27B, TINY
from ddtree_kernels.bench_targets import TARGETS, measurement_of, sign, summary
from ddtree_kernels.bench_timing import Place

# Most wanted first.
MEASUREMENTS: dict[str, Callable[[Place], dict[str, Any]]] = {
    "bandwidth": bench_timing.bandwidth,
    "numerics": bench_steps.numerics,
    "verify-n1-q64": lambda place: bench_verify.verify(place, 1, 64),
    "stock": bench_stock.stock,
    "verify-n1-q16": lambda place: bench_verify.verify(place, 1, 16),
    "verify-n4-q64": lambda place: bench_verify.verify(place, 4, 64),
    "verify-n8-q64": lambda place: bench_verify.verify(place, 8, 64),
    "verify-adversarial": bench_verify.adversarial,
    "commit-n8": bench_commit.commit,
    "build-walk": bench_steps.build_walk,
    "memory-q64": bench_steps.memory,
    "conv-n1-q64": bench_steps.conv,
    "forms": bench_verify.forms,
    "verify-n1-q32": lambda place: bench_verify.verify(place, 1, 32),
    "verify-n4-q16": lambda place: bench_verify.verify(place, 4, 16),
    "sweep-n1": lambda place: bench_verify.sweep(place, 1),
    "sweep-n4": lambda place: bench_verify.sweep(place, 4),
    "commit-sweep": bench_commit.commit_sweep,
}


def main(arguments: list[str] | None = None) -> int:
    """Measure what fits into the time budget; 0 when every measurement was made."""
    options = _options(arguments)
    if options.dry_run:
        for name, target in TARGETS.items():
            print(f"{name:<26} {target.what}: {sign(target.direction)} {target.target}")
        return 0
    if options.sglang_site:
        sys.path.append(str(options.sglang_site))
    if options.one:
        result = measure(options.one, options.tiny) | {"environment": _environment(options.tiny)}
        _write(options.out / f"{options.one}.json", result)
        return 0
    if not options.tiny and not torch.cuda.is_available():
        print("no CUDA card here: run this on a GPU host", file=sys.stderr)
        return 3
    only = {measurement_of(name) for name in options.only or ()}
    names = [name for name in MEASUREMENTS if not only or name in only]
    names = [name for name in names if options.only or options.sweep or "sweep" not in name]
    names = [name for name in names if name != "stock" or (options.stock and not options.tiny)]
    return Bench(options).run(names)


def measure(name: str, tiny: bool) -> dict[str, Any]:
    """One measurement in this process."""
    if tiny:
        return MEASUREMENTS[name](Place(TINY, torch.device("cpu"), tiny=True))
    return MEASUREMENTS[name](Place(QWEN36_27B, torch.device("cuda")))


class Bench:
    """Runs measurements in order, keeps results and failures on disk, and stops when the time is used up."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.environment: dict[str, Any] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        self.started = time.perf_counter()

    def run(self, names: list[str]) -> int:
        """All of these; 1 if one failed."""
        if self.options.tiny:
            interpreting.prepare()
        for name in names:
            left = self.options.budget_s - (time.perf_counter() - self.started)
            if left <= 0:
                self.failures[name] = "not measured: time used up"
            else:
                self._step(name, left)
            self._write()
        return 1 if self.failures else 0

    def _step(self, name: str, seconds: float) -> None:
        begun = time.perf_counter()
        try:
            result = self._here(name) if self.options.tiny else self._apart(name, seconds)
        except Exception as error:  # a benchmark of many parts loses the part, not the run
            self.failures[name] = f"{type(error).__name__}: {str(error)[-1500:]}"
            print(f"{name}: {self.failures[name]}", file=sys.stderr, flush=True)
            return
        self.environment = _merge(self.environment, result.pop("environment"))
        result["took_seconds"] = round(time.perf_counter() - begun, 2)
        self.results[name] = result
        shown = {key: value for key, value in result.items() if not isinstance(value, list | dict)}
        print(f"{name}: {json.dumps(shown)}", flush=True)

    def _here(self, name: str) -> dict[str, Any]:
        return measure(name, self.options.tiny) | {"environment": _environment(self.options.tiny)}

    def _apart(self, name: str, seconds: float) -> dict[str, Any]:
        command = [
            sys.executable,
            "-m",
            "ddtree_kernels.bench",
            "--one",
            name,
            "--out",
            str(self.options.out),
        ]
        if self.options.sglang_site:
            command += ["--sglang-site", str(self.options.sglang_site)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        if done.returncode:
            raise RuntimeError(f"exit {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
        written = self.options.out / f"{name}.json"
        result: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
        written.unlink()
        return result

    def _write(self) -> None:
        report = {"schema": 1, **self.environment, "shape": asdict(TINY if self.options.tiny else QWEN36_27B)}
        _write(self.options.out / "bench.json", report | {"results": self.results, "failures": self.failures})
        _write(self.options.out / "summary.json", summary(self.environment, self.results, "bench.json"))
        if "forms" in self.results:
            table = {"schema": 1, "kind": "ddtree-verify-dispatch", "measured": self.environment}
            _write(self.options.out / "dispatch.json", table | {"rows": self.results["forms"]["rows"]})


def _merge(known: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """One environment of several processes, of which only the stock one knows SGLang's version."""
    versions = {**known.get("versions", {}), **{k: v for k, v in found["versions"].items() if v is not None}}
    return found | {"versions": versions}


def _environment(tiny: bool) -> dict[str, Any]:
    return bench_timing.environment(not tiny)


def _write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ddtree_kernels.bench", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("kernel-bench"), help="folder for the JSON files")
    add("--budget-s", type=float, default=600, help="stop after so many seconds")
    add("--only", nargs="+", choices={**MEASUREMENTS, **TARGETS}, metavar="NAME", help="these alone")
    add("--no-stock", dest="stock", action="store_false", help="leave SGLang's kernels out")
    add("--sglang-site", type=Path, help="folder to import SGLang from")
    add("--sweep", action="store_true", help="time other launch configurations as well")
    add("--dry-run", action="store_true", help="list the targets and stop")
    add("--tiny", action="store_true", help="rehearsal on the CPU, with TRITON_INTERPRET=1")
    add("--one", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
