#!/usr/bin/env python3
"""One GPU call for the kernels: builders against numpy, numerics, the benchmark with a sweep, a memory check.

    python3 tools/gpu/kernels_plan.py --out "$OUT" [--sglang-site DIR] [--budget-s 280]
    TRITON_INTERPRET=1 python3 tools/gpu/kernels_plan.py --tiny --out /tmp/plan  # rehearsal without a card

Needs torch, triton and numpy only. Writes builders.json, bench.json, summary.json, sanitizer.json and
plan.json into `--out`; a part that fails is named there and the others go on. Exits 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    use_checkout()
    if options.sanitize_body:
        small_launches(options.tiny)
        return 0
    started = time.perf_counter()
    plan: dict[str, Any] = {"schema": 1, "parts": {}}

    def part(name: str, work: Callable[[], int | dict[str, Any]]) -> None:
        begun = time.perf_counter()
        try:
            outcome: Any = work()
        except Exception as error:
            outcome = {"failed": f"{type(error).__name__}: {str(error)[-1500:]}"}
        plan["parts"][name] = {"outcome": outcome, "seconds": round(time.perf_counter() - begun, 1)}
        print(f"== {name}: {json.dumps(plan['parts'][name])[:2000]}", flush=True)
        write(options.out / "plan.json", plan)

    def left() -> float:
        return options.budget_s - (time.perf_counter() - started)

    part("builders", lambda: builders(options.out / "builders.json", options.tiny))
    part("bench", lambda: benchmark(options, left() - (0 if options.tiny else 25)))
    if left() > 15 and not options.tiny:
        part("sanitizer", lambda: sanitizer(options, left()))
    failed = [
        name
        for name, row in plan["parts"].items()
        if row["outcome"] not in (0, None)
        and not (isinstance(row["outcome"], dict) and row["outcome"].get("ok"))
    ]
    plan["failed"], plan["seconds"] = failed, round(time.perf_counter() - started, 1)
    write(options.out / "plan.json", plan)
    print(f"failed: {failed or 'nothing'}")
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path(os.environ.get("OUT", "kernels-plan")), help="where the JSON goes")
    add("--budget-s", type=float, default=280, help="seconds for everything")
    add("--sglang-site", type=Path, help="folder to import SGLang from; without it there is no stock time")
    add("--no-sweep", dest="sweep", action="store_false", help="leave other launch configurations out")
    add("--tiny", action="store_true", help="rehearse on the CPU with TRITON_INTERPRET=1")
    add("--sanitize-body", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def use_checkout() -> None:
    """Import the two packages from the checkout, whose folders carry other names."""
    links = Path(tempfile.mkdtemp(prefix="ddtree-plan-"))
    (links / "ddtree_kernels").symlink_to(ROOT / "kernels")
    (links / "ddtree_engine").symlink_to(ROOT / "engine_patch")
    sys.path.insert(0, str(links))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(links), os.environ.get("PYTHONPATH")]))


def write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def builders(path: Path, tiny: bool) -> dict[str, Any]:
    """The card's trees against numpy's, node for node: three builders, ties, holes, widths, budgets."""
    import numpy as np
    import torch
    from ddtree_engine.tree import Builder, build_tree, parse_calibration
    from ddtree_engine.tree.calibration import LOG_SIGMOID, LOG_SIGMOID_STEP
    from ddtree_kernels.ancestry import ancestor_bits_naive
    from ddtree_kernels.tree_build.triton import CalibrationTables, tree_build

    device = torch.device("cpu" if tiny else "cuda")
    rng = np.random.default_rng(0)
    side = [
        {"depth": rng.normal(0, 1, 15).tolist(), "rank": rng.normal(-1, 1, 16).tolist(), "slope": slope}
        for slope in (0.7, 0.35)
    ]
    head = {"schema": 1, "kind": "ddtree-calibration", "block": 16, "topk": 16, "logprob_floor": -12.0}
    fitted = parse_calibration(head | {"on": side[0], "off": side[1]})

    def on_device(array: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).to(device)

    tables = CalibrationTables(
        depth=on_device(np.stack([fitted.on.depth, fitted.off.depth])),
        rank=on_device(np.stack([fitted.on.rank, fitted.off.rank])),
        slope=on_device(np.array([fitted.on.slope, fitted.off.slope])),
        floor=on_device(np.array([fitted.logprob_floor])),
        value=on_device(LOG_SIGMOID[:-1]),
        step=on_device(LOG_SIGMOID_STEP),
    )
    batch = 1 if tiny else 32
    differing: list[dict[str, Any]] = []
    trees = 0
    for kind in ("smooth", "coarse", "equal", "holes"):
        logprobs = -rng.exponential(2.0, size=(batch, 15, 16)).astype(np.float32)
        if kind == "coarse":
            logprobs = np.round(logprobs)
        if kind == "equal":
            logprobs[:] = 0.0
        if kind == "holes":
            logprobs[rng.random(logprobs.shape) < 0.5] = -np.inf
        logprobs = -np.sort(-logprobs, axis=-1)
        ids = rng.permuted(np.tile(np.arange(5000), (batch * 15, 1)), axis=1)[:, :16].reshape(batch, 15, 16)
        for width in (8,) if tiny else (8, 16, 32, 64, 128):
            for builder in Builder:
                calibrated = builder is Builder.CALIBRATED
                found = tree_build(
                    torch.full((batch,), 7, device=device),
                    torch.from_numpy(ids).to(device),
                    on_device(logprobs),
                    width,
                    torch.zeros(batch, dtype=torch.int64, device=device),
                    builder=builder.value,
                    calibration=tables if calibrated else None,
                )
                right_bits = torch.equal(found.bits, ancestor_bits_naive(found.parents))
                host = [t.cpu().numpy() for t in (found.tokens, found.parents, found.scores, found.counts)]
                for n in range(batch):
                    tree = build_tree(
                        7, ids[n], logprobs[n], width - 1, builder, fitted if calibrated else None
                    )
                    trees += 1
                    same = right_bits and int(host[3][n]) == tree.width
                    same = same and (host[0][n, : tree.width] == tree.tokens).all()
                    same = same and (host[1][n, : tree.width] == tree.parents).all()
                    same = same and (host[2][n, : tree.width] == tree.scores.astype(np.float32)).all()
                    if not same:
                        differing.append(
                            {"kind": kind, "width": width, "builder": builder.value, "request": n}
                        )
    report = {"ok": not differing, "trees": trees, "differing": len(differing), "first": differing[:5]}
    write(path, report)
    return report


def benchmark(options: argparse.Namespace, seconds: float) -> int:
    from ddtree_kernels import bench

    arguments = ["--out", str(options.out), "--budget-s", str(max(seconds, 1.0))]
    if options.tiny:
        arguments += ["--tiny", "--budget-s", "600"]
    elif options.sweep:
        arguments.append("--sweep")
    if options.sglang_site:
        arguments += ["--sglang-site", str(options.sglang_site)]
    return bench.main(arguments)


def sanitizer(options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Small launches of every kernel under compute-sanitizer's memcheck."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [
        tool,
        "--tool",
        "memcheck",
        sys.executable,
        __file__,
        "--sanitize-body",
        "--out",
        str(options.out),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds - 3, 5))
    except subprocess.TimeoutExpired:
        report = {"ok": False, "why": "time used up"}
    else:
        text = done.stdout + done.stderr
        # The first error is the one that counts: what follows it is often its echo.
        (options.out / "sanitizer.log").write_text(text, encoding="utf-8")
        report = {"ok": done.returncode == 0 and "ERROR SUMMARY: 0 errors" in text, "head": text[:3000]}
    write(options.out / "sanitizer.json", report)
    return report


def small_launches(tiny: bool) -> None:
    """Every kernel once on small and odd shapes."""
    import torch
    from ddtree_kernels import bench_inputs
    from ddtree_kernels.accept_walk.triton import accept_walk
    from ddtree_kernels.commit.triton import commit
    from ddtree_kernels.tree_build.triton import tree_build
    from ddtree_kernels.tree_conv.triton import tree_conv
    from ddtree_kernels.tree_gdn.triton import tree_gdn_verify

    device = torch.device("cpu" if tiny else "cuda")
    shape = bench_inputs.Shape(layers=2, heads=1, value_heads=2, key_dim=128, value_dim=128)
    for width in (5, 16, 33, 64, 100):
        inputs = bench_inputs.random_inputs(shape, 2, width, device)
        for exact in (False, True):
            tree_gdn_verify(*inputs.verify_args(0), inputs.parents, exact=exact)
        tree_conv(inputs.x[0], inputs.conv_pool[0], inputs.slots, inputs.weight[0], None, inputs.parents)
        path = torch.arange(5, device=device).expand(2, 5).contiguous()
        counts = torch.tensor([5, 2], device=device)
        commit(
            inputs.x, inputs.a, inputs.b, inputs.A_log, inputs.dt_bias, inputs.weight, None, inputs.conv_pool,
            inputs.state_pool, inputs.slots, path, counts, key_heads=shape.heads,
        )  # fmt: skip
        logprobs = torch.randn(2, 15, 16, device=device).log_softmax(-1).sort(-1, descending=True).values
        ids = torch.arange(16, device=device).expand(2, 15, 16).contiguous()
        ones = torch.ones(2, dtype=torch.int64, device=device)
        trees = tree_build(ones, ids, logprobs, width, ones)
        accept_walk(trees.tokens, trees.parents, trees.tokens, 16)
    if not tiny:
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
