"""Start-up proof that a replayed commit leaves the state that a prefill of the same tokens leaves.

The verify pass's own check is `ddtree_engine.sglang_plugin.self_check`; it commits nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from ddtree_engine.sglang_plugin import self_check
from ddtree_engine.sglang_plugin.errors import SelfCheckError
from ddtree_engine.sglang_plugin.wy import hooks
from ddtree_engine.tree.samples import path_of, random_tree
from torch import Tensor

# Of the change that the path made to a layer's state; a state that was not committed, or along another path,
# is off by about all of it. By bytes of an activation: deep layers see how verify and prefill round.
TOLERANCE = {4: 5e-2, 2: 0.5}


def run(worker: Any, trees: int, seed: int = 1) -> dict[str, Any]:
    """Commit the deepest path of `trees` random trees. Raises `SelfCheckError` on a wrong state or window."""
    runner = worker.model_runner
    tolerance = TOLERANCE[min(4, runner.dtype.itemsize)]
    rng = np.random.default_rng(seed)
    vocabulary = int(runner.model_config.vocab_size)
    state_error = window_error = 0.0
    needed = self_check.PREFIX + max(worker.verify_width, worker.depth) + 1
    with torch.no_grad(), self_check._Seat(runner, tokens=needed) as seat:
        for _ in range(trees):
            prefix = rng.integers(0, vocabulary, self_check.PREFIX)
            parents, depths = random_tree(rng, worker.verify_width, worker.depth)
            tokens = rng.integers(0, vocabulary, worker.verify_width)
            path = path_of(parents, int(np.argmax(depths)))
            seat.prefill(prefix)
            before = _slot(runner, seat.row)
            self_check._verify(worker, seat, tokens, parents, depths)
            _commit(worker, seat, path)
            committed = _slot(runner, seat.row)
            seat.prefill(np.concatenate([prefix, tokens[path]]))
            plain = _slot(runner, seat.row)
            state, window = (_error(*layers) for layers in zip(committed, plain, before, strict=True))
            state_error = self_check._larger(state_error, state)
            window_error = self_check._larger(window_error, window)
    if not (state_error <= tolerance and window_error <= tolerance):
        raise SelfCheckError(
            f"start-up self-check over {trees} commits: states are off by {state_error:.2g} and convolution "
            f"windows by {window_error:.2g} of what a path changes; allowed is at most {tolerance}. Serving "
            'would give wrong text; serve with "state": "snapshot", and please report it'
        )
    return {
        "commits": trees,
        "state_error": state_error,
        "window_error": window_error,
        "tolerance": tolerance,
    }


def _commit(worker: Any, seat: Any, path: Any) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    device = worker.model_runner.device
    index = torch.full((1, worker.depth), -1, dtype=torch.int32)
    index[0, : len(path)] = torch.from_numpy(np.asarray(path, dtype=np.int32))
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        seq_lens=torch.tensor([seat.length], dtype=torch.int64, device=device),
        mamba_track_indices=None,
    )
    lens = torch.tensor([len(path)], dtype=torch.int32, device=device)
    hooks.commit_states(
        _unreachable, worker.target_worker, batch, lens, index.to(device), worker.verify_width
    )


def _unreachable(*_: Any) -> None:
    raise AssertionError("a commit of snapshots where there are none")


def _slot(runner: Any, row: int) -> tuple[Tensor, Tensor]:
    """A copy of a slot's states and windows, float32 [L, elements] each."""
    cache = runner.req_to_token_pool.mamba_pool.mamba_cache
    states, windows = (pool[:, row].flatten(1) for pool in (cache.temporal, cache.conv[0]))
    return states.to(torch.float32, copy=True), windows.to(torch.float32, copy=True)


def _error(committed: Tensor, plain: Tensor, before: Tensor) -> float:
    """The largest error of a layer, as a share of what the path changed in it; NaN stays."""
    change = (plain - before).norm(dim=1).clamp(min=1e-12)
    return float(((committed - plain).norm(dim=1) / change).amax())
