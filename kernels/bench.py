"""Time and check the tree kernels on this machine's CUDA card, beside SGLang's own where it can be imported.

    python -m ddtree_kernels.bench [--out DIR] [--sweep] [--no-stock] [--budget-s 240]

Writes `bench.json` (every measurement) and `summary.json` (the targets). Times are medians of a CUDA graph
that holds all 48 layers of Qwen3.6-27B's shape; errors are RMS of the float32 result against a float64
recurrence, relative. SGLang's tree kernel chooses its tile by card (4 value channels on sm_90, 32 elsewhere),
so a ratio to it belongs to the card it was taken on.

`--tiny` with TRITON_INTERPRET=1 rehearses everything on the CPU; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from ddtree_kernels import interpreting
from ddtree_kernels.bench_inputs import (
    QWEN36_27B,
    TINY,
    Inputs,
    Shape,
    adversarial_inputs,
    random_inputs,
    random_parents,
)
from torch import Tensor

FAST_ERROR, EXACT_ERROR = 3e-3, 1e-4
REPEATS = 20
MIB = 2**20

# id -> (what the figure is, target, direction, allowed error or None)
TARGETS: dict[str, tuple[str, float, str, float | None]] = {
    "verify-n1-q64": ("times faster than stock", 12, "min", FAST_ERROR),
    "verify-n4-q64": ("times faster than stock", 12, "min", FAST_ERROR),
    "verify-n8-q64": ("times faster than stock", 12, "min", FAST_ERROR),
    "verify-n1-q16": ("times faster than stock", 4, "min", FAST_ERROR),
    "verify-exact-n1-q64": ("times faster than stock", 6, "min", EXACT_ERROR),
    "verify-adversarial": ("worst relative error", FAST_ERROR, "max", FAST_ERROR),
    "verify-adversarial-exact": ("worst relative error", EXACT_ERROR, "max", EXACT_ERROR),
    "conv-n1-q64": ("times faster than stock", 10, "min", None),
    "commit-n8": ("times the floor", 2, "max", None),
    "build-walk": ("microseconds", 60, "max", None),
    "memory-q64": ("MiB", 64, "max", None),
}


def main(arguments: list[str] | None = None) -> int:
    """Measure what fits into the time budget, most wanted first; 0 when every measurement was made."""
    options = _options(arguments)
    if options.dry_run:
        print(
            "\n".join(
                f"{name:<26} {what}: {sign(way)} {target}" for name, (what, target, way, _) in TARGETS.items()
            )
        )
        return 0
    if options.tiny:
        interpreting.prepare()
        shape, device = TINY, torch.device("cpu")
    elif torch.cuda.is_available():
        shape, device = QWEN36_27B, torch.device("cuda")
    else:
        print("no CUDA card here: run this on a GPU host", file=sys.stderr)
        return 3
    if options.sglang_site:
        sys.path.append(str(options.sglang_site))
    bench = Bench(shape, device, options)
    bench.run()
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "bench.json", bench.report())
    write_json(options.out / "summary.json", summary(bench))
    return 1 if bench.failures else 0


def sign(direction: str) -> str:
    """How a target reads."""
    return ">=" if direction == "min" else "<="


def write_json(path: Path, data: Any) -> None:
    """One file, readable."""
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def summary(bench: Bench) -> dict[str, Any]:
    """The targets with what was measured; a figure that could not be taken is null."""
    rows = []
    for name, (what, target, direction, error_target) in TARGETS.items():
        found = bench.results.get(name, {})
        rows.append(
            {
                "id": name,
                "what": what,
                "figure": found.get("figure"),
                "target": target,
                "direction": direction,
                "error": found.get("error"),
                "error_target": error_target,
                "milliseconds": found.get("milliseconds"),
                "stock_milliseconds": found.get("stock_milliseconds"),
                "floor_milliseconds": found.get("floor_milliseconds"),
                "raw": "bench.json",
            }
        )
    return {"schema": 1, **bench.environment(), "targets": rows}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ddtree_kernels.bench", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("kernel-bench"), help="folder for bench.json and summary.json")
    add("--budget-s", type=float, default=600, help="start no further measurement after so many seconds")
    add("--no-stock", dest="stock", action="store_false", help="leave SGLang's kernels out")
    add("--sglang-site", type=Path, help="folder to import SGLang from")
    add("--sweep", action="store_true", help="time other launch configurations of the verify kernel as well")
    add("--dry-run", action="store_true", help="list the targets and stop")
    add("--tiny", action="store_true", help="rehearsal on the CPU, with TRITON_INTERPRET=1")
    return parser.parse_args(arguments)


class Bench:
    """Runs measurements in order, keeps results and failures, and stops when the time is used up."""

    def __init__(self, shape: Shape, device: torch.device, options: argparse.Namespace) -> None:
        self.shape, self.device, self.options = shape, device, options
        self.results: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        self.bandwidth = 0.0
        self.stock: Any = None
        self.stock_conv: Any = None
        self.started = time.perf_counter()

    def run(self) -> None:
        """Every measurement, most wanted first."""
        small = self.options.tiny
        wide, narrow = (8, 4) if small else (64, 16)
        batches = (1, 1, 2) if small else (1, 4, 8)
        self.step("bandwidth", self.measure_bandwidth)
        if self.options.stock and not small:
            self.step("stock-import", self.import_stock)
        self.step("numerics", lambda: self.numerics(wide))
        self.step("verify-n1-q64", lambda: self.verify(1, wide))
        self.step("verify-exact-n1-q64", lambda: self.verify(1, wide, exact=True))
        self.step("verify-n1-q16", lambda: self.verify(1, narrow))
        self.step("verify-n4-q64", lambda: self.verify(batches[1], wide))
        self.step("verify-n8-q64", lambda: self.verify(batches[2], wide))
        self.step("verify-adversarial", lambda: self.adversarial(wide, exact=False))
        self.step("verify-adversarial-exact", lambda: self.adversarial(wide, exact=True))
        self.step("commit-n8", lambda: self.commit(batches[2], wide))
        self.step("build-walk", lambda: self.build_walk(batches[2], wide))
        self.step("memory-q64", lambda: self.memory(wide))
        if self.options.sweep:
            for batch in batches[:2]:
                self.step(f"sweep-n{batch}", lambda batch=batch: self.sweep(batch, wide))  # type: ignore[misc]
        self.step("conv-n1-q64", lambda: self.conv(wide))
        for batch, width in ((1, wide // 2), (4, narrow), (4, wide // 2)):
            if not small:
                self.step(
                    f"verify-n{batch}-q{width}",
                    lambda batch=batch, width=width: self.verify(batch, width),  # type: ignore[misc]
                )

    def step(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Take one measurement; a failure is recorded and the next one goes on."""
        elapsed = time.perf_counter() - self.started
        if elapsed > self.options.budget_s:
            self.failures[name] = "not measured: time used up"
            return
        try:
            result = measure()
        except Exception as error:  # a benchmark of many parts loses the part, not the run
            self.failures[name] = f"{type(error).__name__}: {str(error)[-600:]}"
            print(f"{name}: {self.failures[name]}", file=sys.stderr, flush=True)
            return
        result["took_seconds"] = round(time.perf_counter() - self.started - elapsed, 2)
        self.results[name] = result
        shown = {key: value for key, value in result.items() if not isinstance(value, list | dict)}
        print(f"{name}: {json.dumps(shown)}", flush=True)

    def report(self) -> dict[str, Any]:
        """Everything that was measured."""
        return {
            "schema": 1,
            **self.environment(),
            "shape": asdict(self.shape),
            "bandwidth_bytes_per_second": self.bandwidth,
            "results": self.results,
            "failures": self.failures,
        }

    def environment(self) -> dict[str, Any]:
        """Card and versions."""
        import triton

        on_card = self.device.type == "cuda"
        capability = torch.cuda.get_device_capability() if on_card else (0, 0)
        sglang = getattr(sys.modules.get("sglang"), "__version__", None)
        return {
            "hardware": torch.cuda.get_device_name() if on_card else "CPU, interpreted",
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "triton": triton.__version__,
                "cuda": torch.version.cuda,
                "capability": f"sm_{capability[0]}{capability[1]}",
                "sglang": sglang,
            },
        }

    # -- timing ---------------------------------------------------------------------------------------------

    def milliseconds(self, work: Callable[[], Any]) -> float:
        """Median time of `work` as a CUDA graph; one plain call where there is no card."""
        work()
        if self.device.type != "cuda":
            start = time.perf_counter()
            work()
            return (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        times = []
        for _ in range(REPEATS + 3):
            before, after = self.event(), self.event()
            before.record()
            graph.replay()
            after.record()
            torch.cuda.synchronize()
            times.append(before.elapsed_time(after))
        del graph
        return float(statistics.median(times[3:]))

    def event(self) -> Any:
        """A CUDA event with a time stamp."""
        make: Any = torch.cuda.Event
        return make(enable_timing=True)

    def floor(self, size: float) -> float:
        """Milliseconds to move so many bytes at the measured bandwidth."""
        return size / self.bandwidth * 1e3

    def measure_bandwidth(self) -> dict[str, Any]:
        """Bytes read and written a second by a device copy."""
        size = 4 * MIB if self.device.type == "cpu" else 4096 * MIB
        source = torch.ones(size // 4, dtype=torch.float32, device=self.device)
        target = torch.empty_like(source)
        taken = self.milliseconds(lambda: target.copy_(source))
        self.bandwidth = 2 * size / (taken / 1e3)
        return {"bytes_per_second": self.bandwidth, "milliseconds": taken}

    def import_stock(self) -> dict[str, Any]:
        """SGLang's tree verify and convolution."""
        ops = "sglang.kernels.ops"
        recurrent = import_module(f"{ops}.attention.linear.fused_sigmoid_gating_recurrent")
        self.stock = recurrent.fused_sigmoid_gating_delta_rule_update
        self.stock_conv = import_module(f"{ops}.mamba.causal_conv1d_triton").causal_conv1d_update
        return {"found": True}

    # -- verify ---------------------------------------------------------------------------------------------

    def verify(self, batch: int, width: int, exact: bool = False, config: Any = None) -> dict[str, Any]:
        """All layers' verify against stock; the error of one layer's float32 result."""
        from ddtree_kernels.ancestry.triton import ancestor_bits
        from ddtree_kernels.tree_gdn import triton as gdn

        shape = self.shape
        inputs = random_inputs(shape, batch, width, self.device)
        bits = ancestor_bits(inputs.parents)
        config = config or gdn.verify_config(width, shape.key_dim, shape.value_dim, exact)
        out = torch.empty_like(inputs.qkv(0)[2].contiguous())
        scratch = None if config.fused else gdn.verify_scratch(out, shape.key_dim)
        scale = shape.key_dim**-0.5

        def work() -> None:
            for layer in range(shape.layers):
                gdn.tree_gdn_verify_unchecked(*inputs.verify_args(layer), bits, out, scratch, scale, config)

        result: dict[str, Any] = {
            "milliseconds": self.milliseconds(work),
            "floor_milliseconds": self.floor(batch * shape.state_bytes),
            "error": self.verify_error(inputs, config),
            "config": asdict(config),
        }
        if self.stock is not None:
            result["stock_milliseconds"] = self.milliseconds(self.stock_verify(inputs))
            result["figure"] = result["stock_milliseconds"] / result["milliseconds"]
        return result

    def verify_error(self, inputs: Inputs, config: Any) -> float:
        """RMS error of layer 0's float32 output against the float64 recurrence."""
        from ddtree_kernels.tree_gdn.triton import tree_gdn_verify

        expected = self.exact_outputs(inputs)
        out = torch.full(expected.shape, torch.nan, dtype=torch.float32, device=self.device)
        tree_gdn_verify(*inputs.verify_args(0), inputs.parents, out=out, config=config)
        return relative_error(out, expected)

    def exact_outputs(self, inputs: Inputs) -> Tensor:
        """The float64 recurrence of layer 0."""
        from ddtree_kernels.tree_gdn.naive import tree_gdn_verify_naive

        a, b, A_log, dt_bias, q, k, v, pool, slots = inputs.verify_args(0)
        gates = a.double(), b.double(), A_log.double(), dt_bias.double()
        return tree_gdn_verify_naive(
            *gates, q.double(), k.double(), v.double(), pool.double(), slots, inputs.parents
        )

    def stock_verify(self, inputs: Inputs) -> Callable[[], None]:
        """SGLang's tree kernel over all layers; one scratch serves all, which makes no difference."""
        shape = self.shape
        _, batch, width, _ = inputs.x.shape
        rows = batch * width
        states = torch.empty(
            batch,
            width,
            shape.value_heads,
            shape.value_dim,
            shape.key_dim,
            dtype=torch.float32,
            device=self.device,
        )
        starts = torch.arange(0, rows + 1, width, dtype=torch.int32, device=self.device)
        slots, own = inputs.slots.int(), torch.arange(batch, dtype=torch.int32, device=self.device)
        parents = inputs.parents.clamp_min(0).int()

        def work() -> None:
            for layer in range(shape.layers):
                q, k, v = (t.reshape(1, rows, *t.shape[2:]) for t in inputs.qkv(layer))
                self.stock(
                    A_log=inputs.A_log[layer],
                    a=inputs.a[layer].view(rows, -1),
                    dt_bias=inputs.dt_bias[layer],
                    softplus_beta=1.0,
                    softplus_threshold=20.0,
                    q=q,
                    k=k,
                    v=v,
                    b=inputs.b[layer].view(rows, -1),
                    initial_state_source=inputs.state_pool[layer],
                    initial_state_indices=slots,
                    use_qk_l2norm_in_kernel=True,
                    cu_seqlens=starts,
                    disable_state_update=True,
                    intermediate_states_buffer=states,
                    intermediate_state_indices=own,
                    cache_steps=width,
                    retrieve_parent_token=parents,
                )

        return work

    def numerics(self, width: int) -> dict[str, Any]:
        """Fresh random inputs through every kernel once, against the references, on the card itself."""
        from ddtree_kernels.ancestry import ancestor_bits_naive
        from ddtree_kernels.ancestry.triton import ancestor_bits
        from ddtree_kernels.tree_gdn import triton as gdn

        shape = self.shape
        errors: dict[str, float] = {}
        for batch, nodes in ((2, width), (2, width // 2), (1, 5), (1, 2 * width)):
            inputs = random_inputs(shape, batch, nodes, self.device, layers=1, seed=nodes)
            expected_bits = ancestor_bits_naive(inputs.parents)
            if not torch.equal(ancestor_bits(inputs.parents), expected_bits):
                raise AssertionError(f"ancestor bits differ at Q={nodes}")
            for exact in (False, True):
                config = gdn.verify_config(nodes, shape.key_dim, shape.value_dim, exact)
                name = f"verify-n{batch}-q{nodes}{'-exact' if exact else ''}"
                errors[name] = self.verify_error(inputs, config)
                errors[f"{name}-repeat"] = self.repeat_difference(inputs, config)
            errors[f"conv-n{batch}-q{nodes}"] = self.conv_error(inputs)
        errors["commit"] = self.commit_error()
        errors["build"] = self.build_difference(width)
        return {"errors": errors}

    def conv_error(self, inputs: Inputs) -> float:
        """Error of layer 0's convolution, rounded to bfloat16 as it is used."""
        from ddtree_kernels.tree_conv.naive import tree_conv_naive
        from ddtree_kernels.tree_conv.triton import tree_conv

        x, pool, weight = inputs.x[0], inputs.conv_pool[0], inputs.weight[0]
        found = tree_conv(x, pool, inputs.slots, weight, None, inputs.parents)
        expected = tree_conv_naive(
            x.double(), pool.double(), inputs.slots, weight.double(), None, inputs.parents
        )
        return relative_error(found, expected)

    def repeat_difference(self, inputs: Inputs, config: Any) -> float:
        """Largest difference between two runs: anything but 0 is a race."""
        from ddtree_kernels.tree_gdn.triton import tree_gdn_verify

        once, again = (
            tree_gdn_verify(*inputs.verify_args(0), inputs.parents, config=config) for _ in range(2)
        )
        return float((once.float() - again.float()).abs().max())

    def adversarial(self, width: int, exact: bool) -> dict[str, Any]:
        """Correlated keys, strong writes, weak to strong decay, deep trees and chains: the worst error."""
        from ddtree_kernels.tree_gdn.triton import verify_config

        shape = self.shape
        trees = {
            f"tree{width}": random_parents(1, width, shape.block - 1),
            f"chain{width}": torch.arange(width)[None] - 1,
            f"chain{2 * width}": torch.arange(2 * width)[None] - 1,
        }
        grid = product((0.5, 0.9, 0.99), (0.9, 0.98), (-0.001, -0.1, -1.0, -20.0))
        if self.options.tiny:
            grid = product((0.5, 0.99), (0.98,), (-0.001, -20.0))
        points = list(grid)
        rows: list[dict[str, Any]] = []
        for label, parents in trees.items():
            config = verify_config(parents.shape[1], shape.key_dim, shape.value_dim, exact)
            for cosine, beta, decay in points:
                inputs = adversarial_inputs(shape, parents.to(self.device), cosine, beta, decay, self.device)
                error = self.verify_error(inputs, config)
                rows.append({"tree": label, "cosine": cosine, "beta": beta, "decay": decay, "error": error})
        # NaN counts as worst: max() alone would pass it over.
        worst = max(rows, key=lambda row: row["error"] if row["error"] == row["error"] else float("inf"))
        return {"figure": worst["error"], "error": worst["error"], "worst": worst, "rows": rows}

    def sweep(self, batch: int, width: int) -> dict[str, Any]:
        """Other launch configurations, for choosing the shipped ones."""
        from ddtree_kernels.tree_gdn.triton import EXACT, FAST

        stock, self.stock = self.stock, None
        rows: list[dict[str, Any]] = []
        try:
            for base, changes in (
                (
                    FAST,
                    (
                        {},
                        {"block_v": 32},
                        {"num_warps": 4},
                        {"num_warps": 4, "block_v": 32},
                        {"num_stages": 1},
                    ),
                ),
                (FAST, ({"fused": False}, {"fused": False, "num_warps": 4}, {"fused": False, "block_v": 32})),
                (FAST, ({"solve_precision": "bf16x3"}, {"solve_precision": "bf16x3", "fused": False})),
                (EXACT, ({}, {"fused": True}, {"state_precision": "tf32"}, {"num_warps": 4})),
                (EXACT, ({"fused": True, "state_precision": "tf32"}, {"state_precision": "tf32x3"})),
            ):
                for change in changes:
                    config = replace(base, **change)
                    try:
                        row = self.verify(batch, width, config=config)
                    except Exception as error:  # a configuration too large for the card
                        row = {
                            "config": asdict(config),
                            "failed": f"{type(error).__name__}: {str(error)[:200]}",
                        }
                    rows.append(row)
                    print(f"  sweep n{batch}: {json.dumps(row)}", flush=True)
        finally:
            self.stock = stock
        return {"rows": rows}

    # -- convolution, commit, build -------------------------------------------------------------------------

    def conv(self, width: int) -> dict[str, Any]:
        """All layers' tree convolution for one request; the first call's time with its compilation."""
        from ddtree_kernels.tree_conv.triton import tree_conv_unchecked

        shape = self.shape
        inputs = random_inputs(shape, 1, width, self.device)
        out = torch.empty_like(inputs.x[0])

        def ours() -> None:
            for layer in range(shape.layers):
                tree_conv_unchecked(
                    inputs.x[layer], inputs.conv_pool[layer], inputs.slots, inputs.weight[layer], None,
                    inputs.parents, True, out,
                )  # fmt: skip

        start = time.perf_counter()
        ours()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        first = time.perf_counter() - start
        result: dict[str, Any] = {"milliseconds": self.milliseconds(ours), "first_call_seconds": first}
        if self.stock_conv is not None:
            start = time.perf_counter()
            stock = self.stock_convolution(inputs)
            stock()
            torch.cuda.synchronize()
            result["stock_first_call_seconds"] = time.perf_counter() - start
            result["stock_milliseconds"] = self.milliseconds(stock)
            result["figure"] = result["stock_milliseconds"] / result["milliseconds"]
        return result

    def stock_convolution(self, inputs: Inputs) -> Callable[[], None]:
        """SGLang's tree convolution over all layers, with the windows it keeps for every node."""
        shape = self.shape
        _, batch, width, channels = inputs.x.shape
        windows = torch.empty(
            batch, width, channels, shape.window - 1, dtype=inputs.x.dtype, device=self.device
        )
        first_child = torch.full((batch, width), -1, dtype=torch.int64)
        sibling = first_child.clone()
        parents = inputs.parents.cpu()
        for request in range(batch):
            for node in range(width - 1, 0, -1):
                parent = int(parents[request, node])
                sibling[request, node] = first_child[request, parent]
                first_child[request, parent] = node
        links = [links.to(self.device) for links in (first_child, sibling, parents.clamp_min(0))]
        own = torch.arange(batch, dtype=torch.int32, device=self.device)

        def work() -> None:
            for layer in range(shape.layers):
                self.stock_conv(
                    inputs.x[layer].transpose(1, 2),
                    inputs.conv_pool[layer],
                    inputs.weight[layer],
                    None,
                    "silu",
                    conv_state_indices=inputs.slots.int(),
                    intermediate_conv_window=windows,
                    intermediate_state_indices=own,
                    retrieve_next_token=links[0],
                    retrieve_next_sibling=links[1],
                    retrieve_parent_token=links[2],
                )

        return work

    def commit(self, batch: int, width: int) -> dict[str, Any]:
        """Every request accepts a whole block, against reading and writing all states once."""
        from ddtree_kernels.commit.triton import commit_unchecked

        shape = self.shape
        inputs = random_inputs(shape, batch, width, self.device)
        path = torch.arange(shape.block, device=self.device).expand(batch, shape.block).contiguous()
        counts = torch.full((batch,), shape.block, device=self.device)

        def work() -> None:
            commit_unchecked(
                inputs.x, inputs.a, inputs.b, inputs.A_log, inputs.dt_bias, inputs.weight, None,
                inputs.conv_pool, inputs.state_pool, inputs.slots, path, counts, shape.heads, True,
                None, None,
            )  # fmt: skip

        taken = self.milliseconds(work)
        floor = self.floor(2 * batch * shape.state_bytes)
        return {"milliseconds": taken, "floor_milliseconds": floor, "figure": taken / floor}

    def commit_error(self) -> float:
        """The kernel's state after a commit, and its windows, against the reference."""
        from ddtree_kernels.commit.naive import commit_naive
        from ddtree_kernels.commit.triton import commit

        shape = self.shape
        inputs = random_inputs(shape, 2, shape.block, self.device, layers=1)
        path = torch.arange(shape.block, device=self.device).expand(2, shape.block).contiguous()
        counts = torch.tensor([shape.block, 3], device=self.device)
        naive_conv, naive_state = inputs.conv_pool[0].clone(), inputs.state_pool[0].clone()
        commit(
            inputs.x, inputs.a, inputs.b, inputs.A_log, inputs.dt_bias, inputs.weight, None,
            inputs.conv_pool, inputs.state_pool, inputs.slots, path, counts, key_heads=shape.heads,
        )  # fmt: skip
        commit_naive(
            inputs.x[0], inputs.a[0], inputs.b[0], inputs.A_log[0], inputs.dt_bias[0], inputs.weight[0], None,
            naive_conv, naive_state, inputs.slots, path, counts, key_heads=shape.heads,
        )  # fmt: skip
        if not torch.equal(naive_conv, inputs.conv_pool[0]):
            raise AssertionError("committed convolution windows differ")
        return relative_error(inputs.state_pool[0], naive_state.double())

    def candidates(self, batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Roots, ids, sorted log-probabilities [N, F-1, 16] and prefix lengths."""
        generator = torch.Generator(device=self.device).manual_seed(0)
        size = (batch, self.shape.block - 1, 16)
        raw = torch.randn(size, generator=generator, device=self.device) * 2
        logprobs = raw.log_softmax(-1).sort(-1, descending=True).values
        ids = torch.arange(16, device=self.device).expand(size).contiguous()
        zeros = torch.zeros(batch, dtype=torch.int64, device=self.device)
        return zeros, ids, logprobs, zeros + 100

    def build_walk(self, batch: int, width: int) -> dict[str, Any]:
        """Tree build and accept walk of a batch, one graph of both."""
        from ddtree_kernels.accept_walk.triton import accept_walk_unchecked, empty_walks
        from ddtree_kernels.tree_build.triton import empty_trees, tree_build_unchecked

        roots, ids, logprobs, prefix = self.candidates(batch)
        trees = empty_trees(batch, width, self.device)
        walks = empty_walks(batch, self.shape.block, self.device)
        choices = torch.zeros(batch, width, dtype=torch.int64, device=self.device)

        def work() -> None:
            tree_build_unchecked(roots, ids, logprobs, prefix, "best-first", None, None, trees)
            accept_walk_unchecked(trees.tokens, trees.parents, choices, walks)

        taken = self.milliseconds(work)
        return {"milliseconds": taken, "figure": taken * 1e3}

    def build_difference(self, width: int) -> float:
        """1.0 unless the card's tree has parents first, descending scores and right ancestor bits."""
        from ddtree_kernels.ancestry import ancestor_bits_naive
        from ddtree_kernels.tree_build.triton import tree_build

        roots, ids, logprobs, prefix = self.candidates(2)
        trees = tree_build(roots, ids, logprobs, width, prefix)
        rows = torch.arange(width, device=self.device)
        right = bool((trees.parents < rows).all() and (trees.scores.diff(dim=1) <= 0).all())
        return 0.0 if right and torch.equal(trees.bits, ancestor_bits_naive(trees.parents)) else 1.0

    def memory(self, width: int) -> dict[str, Any]:
        """What one request's verify keeps until its commit, and the scratch that all layers share."""
        shape = self.shape
        stash = shape.layers * width * (shape.channels + 2 * shape.value_heads) * 2
        scratch = shape.value_heads * width * (width + shape.key_dim) * 4
        snapshots = width * shape.state_bytes
        return {
            "figure": (stash + scratch) / MIB,
            "stash_mib": stash / MIB,
            "scratch_mib": scratch / MIB,
            "stock_mib": snapshots / MIB,
        }


def relative_error(found: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of the expected; NaN where anything is NaN."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


if __name__ == "__main__":
    sys.exit(main())
