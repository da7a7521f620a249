#!/usr/bin/env python3
"""One GPU call for the kernels: memory check, builders against numpy, the benchmark, a picture.

    python3 tools/gpu/kernels_plan.py --out "$OUT" [--parts check builders bench] [--budget-s 280]
                                      [--sglang-site DIR]
    TRITON_INTERPRET=1 python3 tools/gpu/kernels_plan.py --tiny --out /tmp/plan    # rehearsal on the CPU
    python3 tools/gpu/kernels_plan.py --picture results/h200-kernels/bench.json    # bench.svg beside it
    python3 tools/gpu/kernels_plan.py --capture kernels/pair_inputs.npz            # inputs of the small pair

The run needs torch, triton and numpy only. `check` runs every kernel on small shapes under compute-sanitizer;
where that finds something, each launch again in a process of its own, and variants of it. Writes check.json
with a log for every failing launch, builders.json, bench.json, summary.json, dispatch.json and plan.json into
`--out`, each as soon as it is known. A part that fails is named in plan.json and the others go on. Exits 1 if
one failed.
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
PARTS = ("check", "builders", "bench")


def main() -> int:
    options = parse()
    use_checkout()
    if options.picture:
        picture(options.picture)
        return 0
    if options.capture:
        capture(options.capture)
        return 0
    if options.launch:
        if options.tiny:
            from ddtree_kernels import interpreting

            interpreting.prepare()
        for name in options.launch:
            launches(options.tiny)[name]()
            if not options.tiny:
                import torch

                torch.cuda.synchronize()
        return 0
    return run(options)


def run(options: argparse.Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    plan: dict[str, Any] = {"schema": 1, "parts": {}}

    def part(name: str, work: Callable[[], int | dict[str, Any]]) -> None:
        if name not in options.parts:
            return
        begun = time.perf_counter()
        try:
            outcome: Any = work()
        except Exception as error:
            outcome = {"failed": f"{type(error).__name__}: {str(error)[-1500:]}"}
        plan["parts"][name] = {"outcome": outcome, "seconds": round(time.perf_counter() - begun, 1)}
        print(f"== {name}: {json.dumps(plan['parts'][name])[:3000]}", flush=True)
        write(options.out / "plan.json", plan)

    def left() -> float:
        return options.budget_s - (time.perf_counter() - started)

    part("check", lambda: check(options, left))
    part("builders", lambda: builders(options.out / "builders.json", options.tiny))
    part("bench", lambda: benchmark(options, left()))
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
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="these parts alone")
    add("--only", nargs="+", default=[], help="these measurements of the benchmark alone")
    add("--budget-s", type=float, default=280, help="seconds for everything")
    add("--sglang-site", type=Path, help="folder to import SGLang from; without it there is no stock time")
    add("--no-sweep", dest="sweep", action="store_false", help="leave other launch configurations out")
    add("--tiny", action="store_true", help="rehearse on the CPU with TRITON_INTERPRET=1")
    add("--picture", type=Path, metavar="BENCH_JSON", help="draw a finished run")
    add("--capture", type=Path, metavar="NPZ", help="write layer inputs of the small pair, on the CPU")
    add("--launch", nargs="+", help=argparse.SUPPRESS)
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


def launches(tiny: bool) -> dict[str, Callable[[], Any]]:
    """Small launches of every kernel by name, and variants of verify that tell one cause from another."""
    import torch
    from ddtree_kernels import bench_inputs
    from ddtree_kernels.accept_walk.triton import accept_walk
    from ddtree_kernels.ancestry.triton import ancestor_bits, depth_first
    from ddtree_kernels.commit.triton import commit
    from ddtree_kernels.tree_build.triton import tree_build
    from ddtree_kernels.tree_conv.triton import tree_conv
    from ddtree_kernels.tree_gdn.triton import VerifyConfig, config_of, tree_gdn_verify

    device = torch.device("cpu" if tiny else "cuda")
    shape = bench_inputs.Shape(layers=2, heads=1, value_heads=2, key_dim=128, value_dim=128)

    def inputs_of(width: int) -> bench_inputs.Inputs:
        return bench_inputs.random_inputs(shape, 2, width, device)

    def verify(width: int, **options: Any) -> None:
        inputs = inputs_of(width)
        tree_gdn_verify(*inputs.verify_args(0), inputs.parents, **options)

    def conv() -> None:
        inputs = inputs_of(33)
        tree_conv(inputs.x[0], inputs.conv_pool[0], inputs.slots, inputs.weight[0], None, inputs.parents)

    def commit_all() -> None:
        inputs = inputs_of(16)
        path = torch.arange(5, device=device).expand(2, 5).contiguous()
        counts = torch.tensor([5, 2], device=device)
        commit(
            inputs.x, inputs.a, inputs.b, inputs.A_log, inputs.dt_bias, inputs.weight, None, inputs.conv_pool,
            inputs.state_pool, inputs.slots, path, counts, key_heads=shape.heads,
        )  # fmt: skip

    def build() -> None:
        logprobs = torch.randn(2, 15, 16, device=device).log_softmax(-1).sort(-1, descending=True).values
        ids = torch.arange(16, device=device).expand(2, 15, 16).contiguous()
        ones = torch.ones(2, dtype=torch.int64, device=device)
        trees = tree_build(ones, ids, logprobs, 64, ones)
        accept_walk(trees.tokens, trees.parents, trees.tokens, 16)
        depth_first(trees.parents, ancestor_bits(trees.parents))

    named: dict[str, Callable[[], Any]] = {"conv": conv, "commit": commit_all, "build": build}
    for width in (5, 16, 33, 64, 100):
        named[f"verify-{width}"] = lambda width=width: verify(width)
    for width in (5, 16, 33, 64):
        for heads in (192, 384)[: 2 if width <= 16 else 1]:
            many = config_of(width, 128, 128, heads=heads, device=device)
            named[f"verify-{width}-{heads}-heads"] = lambda width=width, many=many: verify(width, config=many)
    named["scan-16"] = lambda: verify(16, form="scan")
    for label, config in (
        ("ieee", VerifyConfig(precision="ieee")),
        ("one-stage", VerifyConfig(num_stages=1)),
    ):
        named[f"variant-{label}"] = lambda config=config: verify(70, config=config)
    return named


def check(options: argparse.Namespace, left: Callable[[], float]) -> dict[str, Any]:
    """Every launch plainly in its own process, then all under memcheck, then apart if something is found."""
    names = list(launches(options.tiny))
    first = [name for name in names if not name.startswith("variant")]
    if options.tiny:
        names = first = ["verify-5", "scan-16", "build"]
    report: dict[str, Any] = {"plain": plain(options, names, min(left(), 120))}
    faults = [name for name, said in report["plain"].items() if said]
    write(options.out / "check.json", report)
    whole = sanitized(options, first, min(left(), 150))
    report |= {"ok": whole["ok"] and not faults, "all": whole}
    write(options.out / "check.json", report)
    if report["ok"]:
        return {"ok": True, "launches": len(first)}
    report["apart"] = {}
    names.sort(key=lambda name: name not in faults)
    for name in first if options.tiny else names:
        if left() < 20:
            report["apart"][name] = {"ok": False, "why": "time used up"}
            continue
        report["apart"][name] = sanitized(options, [name], min(left(), 60))
        write(options.out / "check.json", report)
    bad = [name for name, row in report["apart"].items() if not row["ok"]]
    return {"ok": False, "faults": faults, "bad": bad}


def plain(options: argparse.Namespace, names: list[str], seconds: float) -> dict[str, str]:
    """What each launch said last if it failed, all at once: this also fills the compiler's cache."""
    until = time.perf_counter() + max(seconds, 5)
    tiny = ["--tiny"] if options.tiny else []
    running = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--launch", name, *tiny],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    }
    said = {}
    for name, process in running.items():
        try:
            _, errors = process.communicate(timeout=max(until - time.perf_counter(), 1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            errors = "time used up"
        said[name] = errors[-600:] if process.returncode else ""
    return said


def sanitized(options: argparse.Namespace, names: list[str], seconds: float) -> dict[str, Any]:
    """These launches in one process under memcheck; the first error is the one that counts."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [sys.executable, __file__, "--launch", *names]
    command = [*command, "--tiny"] if options.tiny else [tool, "--tool", "memcheck", *command]
    begun = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 5))
    except subprocess.TimeoutExpired:
        return {"ok": False, "why": "time used up", "seconds": round(seconds, 1)}
    text = done.stdout + done.stderr
    ok = done.returncode == 0 and (options.tiny or "ERROR SUMMARY: 0 errors" in text)
    if not ok:
        (options.out / f"check-{names[0]}{'' if len(names) == 1 else '-all'}.log").write_text(
            text, encoding="utf-8"
        )
    found = {} if ok else {"head": text[:2500]}
    return {"ok": ok, "seconds": round(time.perf_counter() - begun, 1)} | found


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

    arguments = ["--out", str(options.out), "--budget-s", str(600 if options.tiny else max(seconds, 1.0))]
    if options.only:
        arguments += ["--only", *options.only]
    if options.tiny:
        arguments.append("--tiny")
    elif options.sweep:
        arguments.append("--sweep")
    if options.sglang_site:
        arguments += ["--sglang-site", str(options.sglang_site)]
    return bench.main(arguments)


def picture(path: Path) -> None:
    """Time of every verify measurement: stock, ours and the floor, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("svg")
    from ddtree_kernels.bench_targets import floor_milliseconds
    from matplotlib import pyplot

    report = json.loads(path.read_text(encoding="utf-8"))
    results = report["results"]
    names = sorted(n for n in results if n.startswith("verify-") and "milliseconds" in results[n])
    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(names) + 1.6), layout="constrained")
    for row, name in enumerate(names):
        stock = results.get("stock", {}).get(name, {}).get("milliseconds")
        for label, value, colour, offset in (
            ("SGLang's tree kernel", stock, "#9aa0a6", -0.27),
            ("this kernel", results[name]["milliseconds"], "#1a73e8", 0.0),
            ("reading the states once", floor_milliseconds(results[name], results), "#202124", 0.27),
        ):
            if value:
                axes.barh(row + offset, value, 0.25, color=colour, label=label if row == 0 else None)
                axes.text(value * 1.05, row + offset, f"{value:.2f}", va="center", fontsize=7)
    axes.set_yticks(range(len(names)), [name.removeprefix("verify-") for name in names])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(f"milliseconds for 48 layers, {report['hardware']}")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    figure.savefig(path.with_suffix(".svg"))


def capture(path: Path) -> None:
    """What a verify sees in the small pair's first and last delta net: a run of newlines, and a prompt."""
    import numpy as np
    import torch
    from ddtree_engine.reference import pair_path
    from ddtree_engine.reference.cache import TargetCache
    from ddtree_engine.reference.deltanet import convolve_chain, split_heads
    from ddtree_engine.reference.target import PREFILL_CHUNK, Target
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pair_path() / "target" / "tokenizer.json"))
    prompts = (pair_path() / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = {"newlines": "\n" * 4096, "prompt": " ".join(prompts)}
    target = Target.load(pair_path() / "target", torch.float32, 4 * PREFILL_CHUNK)
    last = len(target.config.linear_layers) - 1
    found: dict[str, Any] = {}
    rule = target._tree_rule
    for label, text in texts.items():
        ids = tokenizer.encode(text).ids
        ids = (ids * PREFILL_CHUNK)[: 2 * PREFILL_CHUNK]
        cache = TargetCache.empty(target.config, 4 * PREFILL_CHUNK, torch.float32)

        def recording(layer: Any, qkv: Any, a: Any, b: Any, state: Any, window: Any, *rest: Any) -> Any:
            if layer.index in (0, last) and cache.length:  # noqa: B023
                mixed = convolve_chain(torch.cat([window, qkv]), layer.weights.conv)
                key_heads = split_heads(mixed, target.heads)[1].shape[1]
                arrays = {
                    "x": mixed.half(), "a": a.half(), "b": b.half(), "state": state.half(),
                    "A_log": layer.weights.A_log.float(), "dt_bias": layer.weights.dt_bias.float(),
                    "parents": torch.arange(len(a)) - 1, "heads": torch.tensor([key_heads, a.shape[1]]),
                }  # fmt: skip
                for name, tensor in arrays.items():
                    found[f"{label}-{layer.index}/{name}"] = tensor.numpy()  # noqa: B023
            return rule(layer, qkv, a, b, state, window, *rest)

        target._tree_rule = recording  # type: ignore[method-assign]
        with torch.inference_mode():
            for start in (0, PREFILL_CHUNK):
                target.prefill(torch.tensor(ids[start : start + PREFILL_CHUNK]), cache)
    np.savez_compressed(path, **found)
    print(f"{path}: {len(found)} arrays, {path.stat().st_size} bytes")


if __name__ == "__main__":
    sys.exit(main())
