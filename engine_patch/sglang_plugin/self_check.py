"""Start-up proof that the server's own kernels, graphs and buffers give a node the logits of its path.

On the running model, before the first request: a random prefix, random trees behind it, and

1. node = path: the logits of leaves against a plain prefill of prefix + path, which shares no tree code;
2. siblings don't leak: other branches get other tokens, the logits on the path must not move;
3. the kernels ran: parent rows as the recurrent layers rebuilt them equal the tree's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from ddtree_engine.sglang_plugin.errors import SelfCheckError
from ddtree_engine.sglang_plugin.tree_build import TreeBatch
from ddtree_engine.tree.samples import leaves_of, path_of, random_tree
from numpy.typing import NDArray
from torch import Tensor

PREFIX = 48
LEAVES = 4
# Share of the logits' range. A state taken from a sibling moves logits by tens of percent.
TOLERANCE = {4: 2e-3, 2: 8e-2, 1: 2e-1}

Ints = NDArray[np.int64]


@dataclass
class Report:
    """What was measured, over all trees."""

    trees: int = 0
    nodes: int = 0
    leaves: int = 0
    max_error: float = 0.0
    max_relative_error: float = 0.0
    argmax_equal: int = 0
    max_sibling_change: float = 0.0
    kernel_trees: int = 0
    graph: bool = False
    tolerance: float = 0.0
    max_sibling_diff: float = 0.0
    dtype: str = ""
    errors: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The figures, and under the names that every engine gives them in /server_info."""
        return {
            **vars(self),
            "node_path_max_diff": self.max_error,
            "relative_to_range": self.max_relative_error,
            "sibling_leak_max_diff": self.max_sibling_diff,
            "sibling_leak_relative": self.max_sibling_change,
            # Wrong numbers stop the server: where the report can be read, they were right.
            "passed": self.trees > 0,
        }


def run(worker: Any, trees: int, seed: int = 0) -> dict[str, Any]:
    """Check `trees` random trees on this worker's target. Raises `SelfCheckError` on wrong numbers."""
    # SGLang captures its graphs without gradients and serves without them, but this lies in between.
    with torch.no_grad():
        return _run(worker, trees, seed)


def _run(worker: Any, trees: int, seed: int) -> dict[str, Any]:
    width, depth = worker.verify_width, worker.depth
    rng = np.random.default_rng(seed)
    runner = worker.model_runner
    needed = PREFIX + max(width, depth) + 1
    if getattr(getattr(runner, "token_to_kv_pool", None), "post_capture_active", False):
        return {
            "skipped": "the KV cache gets its memory after this point (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING)"
        }
    if int(runner.max_total_num_tokens) < 2 * needed:
        return {"skipped": f"{runner.max_total_num_tokens} tokens of KV cache, the check needs {2 * needed}"}
    report = Report(tolerance=TOLERANCE[_bytes(runner)], dtype=str(runner.dtype).removeprefix("torch."))
    vocabulary = int(runner.model_config.vocab_size)
    with _Seat(runner, tokens=needed) as seat:
        for _ in range(trees):
            prefix = rng.integers(0, vocabulary, PREFIX)
            parents, depths = random_tree(rng, width, depth)
            tokens = rng.integers(0, vocabulary, width)
            leaves = leaves_of(parents, LEAVES)
            path = path_of(parents, leaves[0])
            swapped = np.where(np.isin(np.arange(width), path), tokens, rng.integers(0, vocabulary, width))
            seat.prefill(prefix)
            logits, seen = _verify(worker, seat, tokens, parents, depths)
            # Verify moves the convolution windows on and leaves it to the commit to put them right.
            seat.prefill(prefix)
            again, _ = _verify(worker, seat, swapped, parents, depths)
            report.trees += 1
            report.nodes += width
            report.kernel_trees += int(
                seen is not None and bool((seen[1:].cpu().numpy() == parents[1:]).all())
            )
            change = float((again[path] - logits[path]).abs().max())
            report.max_sibling_diff = _larger(report.max_sibling_diff, change)
            report.max_sibling_change = _larger(report.max_sibling_change, change / _range(logits[path]))
            for leaf in leaves:
                plain = seat.prefill(np.concatenate([prefix, tokens[path_of(parents, leaf)]]))
                _compare(report, logits[leaf], plain)
        report.graph = seat.used_graph
    _judge(report, worker)
    return report.as_dict()


def _bytes(runner: Any) -> int:
    """Of the coarsest numbers between a token and its logits: activations, quantised weights, the KV cache.

    A prefill reads its own keys before the cache rounds them, a verify pass reads the cached ones.
    """
    if runner.model_config.quantization is not None:
        return 1
    return min(4, int(runner.dtype.itemsize), int(runner.kv_cache_dtype.itemsize))


def _compare(report: Report, node: Tensor, plain: Tensor) -> None:
    error = float((node - plain).abs().max())
    report.leaves += 1
    report.max_error = _larger(report.max_error, error)
    relative = error / _range(plain)
    report.errors.append(round(relative, 8))
    report.max_relative_error = _larger(report.max_relative_error, relative)
    report.argmax_equal += int(node.argmax() == plain.argmax())


def _judge(report: Report, worker: Any) -> None:
    wrong = []
    if not report.max_relative_error <= report.tolerance:
        wrong.append(f"node and path differ by {report.max_relative_error:.2g} of the logits' range")
    if not report.max_sibling_change <= report.tolerance:
        wrong.append(f"another branch moved the logits by {report.max_sibling_change:.2g} of their range")
    if worker.has_recurrent_layers and report.kernel_trees != report.trees:
        wrong.append(f"the recurrent tree kernels ran for {report.kernel_trees} of {report.trees} trees")
    if wrong:
        raise SelfCheckError(
            f"start-up self-check over {report.trees} trees: {'; '.join(wrong)}; allowed is at most "
            f"{report.tolerance:.2g} of the range. Serving would give wrong text; please report it"
        )


def _larger(one: float, other: float) -> float:
    """The larger one; NaN stays, where `max` would lose it."""
    return float(np.maximum(one, other))


def _range(logits: Tensor) -> float:
    return max(float(logits.max() - logits.min()), 1e-6)


class _Seat:
    """A request row, its KV slots and its recurrent state, borrowed while nothing else is running."""

    row = 1  # row 0, page 0 and state 0 are padding

    def __init__(self, runner: Any, tokens: int) -> None:
        self.runner = runner
        self.used_graph = False
        first = int(runner.page_size or 1)
        self._slots = torch.arange(first, first + tokens, device=runner.device)
        self.rows = torch.tensor([self.row], dtype=torch.int64, device=runner.device)
        self._recurrent = hasattr(runner.req_to_token_pool, "req_index_to_mamba_index_mapping")
        self.length = 0

    def __enter__(self) -> _Seat:
        pool = self.runner.req_to_token_pool
        pool.req_to_token[self.row, : len(self._slots)] = self._slots.to(pool.req_to_token.dtype)
        mapping = getattr(pool, "req_index_to_mamba_index_mapping", None)
        if mapping is not None:
            mapping[self.row] = self.row
        return self

    def __exit__(self, *_: object) -> None:
        pool = self.runner.req_to_token_pool
        pool.req_to_token[self.row].zero_()
        mapping = getattr(pool, "req_index_to_mamba_index_mapping", None)
        if mapping is not None:
            mapping[self.row] = 0
            cache = pool.mamba_pool.mamba_cache
            cache.temporal[:, self.row].zero_()
            for conv in cache.conv:
                conv[:, self.row].zero_()

    def prefill(self, tokens: Ints) -> Tensor:
        """Run a prompt from scratch; returns its last logits float32[V]."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

        runner, count = self.runner, len(tokens)
        self.length = count
        one = torch.tensor([count], dtype=torch.int32, device=runner.device)
        positions = torch.arange(count, device=runner.device)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            input_ids=torch.from_numpy(tokens).to(runner.device),
            req_pool_indices=self.rows,
            seq_lens=one.long(),
            out_cache_loc=self._slots[:count],
            seq_lens_sum=count,
            seq_lens_cpu=torch.tensor([count]),
            orig_seq_lens=one,
            positions=positions,
            mrope_positions=_mrope(runner, positions),
            extend_num_tokens=count,
            extend_seq_lens=one,
            extend_prefix_lens=torch.zeros_like(one),
            extend_start_loc=torch.zeros_like(one),
            extend_prefix_lens_cpu=[0],
            extend_seq_lens_cpu=[count],
            extend_logprob_start_lens_cpu=[count],
            return_logprob=False,
            spec_algorithm=runner.spec_algorithm,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            # A prefill goes on from whatever its slot holds; SGLang clears a slot when it hands one out.
            mamba_clear_indices=self.rows if self._recurrent else None,
        )
        runner.kv_index_translator.bind_own_plan(forward_batch)
        out = runner.forward(forward_batch)
        logits: Tensor = out.logits_output.next_token_logits[0].float().clone()
        return logits

    @contextmanager
    def batch(self) -> Iterator[Any]:
        """The part of a scheduler's batch that a verify input is made from."""
        yield SimpleNamespace(
            seq_lens=torch.tensor([self.length], dtype=torch.int64, device=self.runner.device),
            req_pool_indices=self.rows,
            seq_lens_cpu=torch.tensor([self.length], dtype=torch.int64),
        )


def _verify(
    worker: Any, seat: _Seat, tokens: Ints, parents: Ints, depths: Ints
) -> tuple[Tensor, Tensor | None]:
    """One verify pass; (logits float32[Q, V], parent rows as the kernels rebuilt them int[Q] or None)."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    runner, width = worker.model_runner, worker.verify_width

    def device(values: Ints) -> Tensor:
        return torch.from_numpy(values)[None].to(runner.device)

    tree = TreeBatch(
        tokens=device(tokens),
        parents=device(parents),
        depths=device(depths),
        ranks=device(np.zeros(width, dtype=np.int64)),
        scores=torch.zeros(1, width, device=runner.device),
    )
    with seat.batch() as batch:
        verify_input, plan = worker.verify_input(batch, tree, batch.seq_lens_cpu)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=1,
            input_ids=verify_input.draft_token,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=None,
            seq_lens_sum=seat.length + width,
            seq_lens_cpu=batch.seq_lens_cpu + width,
            positions=verify_input.positions,
            mrope_positions=_mrope(runner, verify_input.positions),
            spec_algorithm=runner.spec_algorithm,
            spec_info=verify_input,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        plan.bind(forward_batch, runner.kv_index_translator)
        out = worker.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )
    seat.used_graph = bool(out.can_run_cuda_graph)
    seen = worker.parents_seen(1)
    logits: Tensor = out.logits_output.next_token_logits[:width].float().clone()
    return logits, None if seen is None else seen[0].clone()


def _mrope(runner: Any, positions: Tensor) -> Tensor | None:
    return positions[None].repeat(3, 1) if runner.model_config.model_is_mrope else None
