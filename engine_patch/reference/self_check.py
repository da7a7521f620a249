"""Start-up proof that the engine's own verify pass gives a node the logits of its path.

On the loaded model, before the first request: random trees behind a random prefix, run by the pass that
serves, and

1. node = path: the logits of every node on some paths against a prefill of prefix and path from nothing;
2. siblings don't leak: all other nodes get other tokens, the logits on the path must not move;
3. the yardstick: how far two valid executions of one path, prefill and decoding, are apart by themselves.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from ddtree_engine.reference.cache import TargetCache
from ddtree_engine.reference.engine import Engine
from ddtree_engine.reference.errors import SelfCheckError
from ddtree_engine.reference.target import PREFILL_CHUNK
from ddtree_engine.tree.nodes import Ints
from ddtree_engine.tree.samples import leaves_of, path_of, random_tree, tree_with
from torch import Tensor

PREFIX = 24
LEAVES = 2
FLOAT32_TOLERANCE = 1e-4
# A start is refused for what rounding cannot do: a state taken from a sibling moves logits by tens of
# percent. Who accepts an engine holds bfloat16 to its measured noise, which is reported beside.
BFLOAT16_TOLERANCE = 8e-2
DEFAULT_BLOCK = 16


@dataclass
class SelfCheck:
    """The largest differences over all trees; `relative` ones are shares of the range of the row's logits.

    tolerance  what `relative_to_range` and `sibling_leak_relative` may be
    """

    trees: int = 0
    nodes: int = 0
    width: int = 0
    node_path_max_diff: float = 0.0
    relative_to_range: float = 0.0
    sibling_leak_max_diff: float = 0.0
    sibling_leak_relative: float = 0.0
    noise_max_diff: float = 0.0
    noise_relative: float = 0.0
    tolerance: float = FLOAT32_TOLERANCE
    dtype: str = "float32"
    passed: bool = False
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For `/server_info`; JSON has no NaN, so that is null."""
        values = asdict(self)
        return {key: None if value != value else value for key, value in values.items()}

    def judge(self) -> None:
        """Set `tolerance` and `passed`. A NaN anywhere fails."""
        self.tolerance = FLOAT32_TOLERANCE if self.dtype == "float32" else BFLOAT16_TOLERANCE
        worst = (self.relative_to_range, self.sibling_leak_relative)
        self.passed = self.trees > 0 and all(value <= self.tolerance for value in worst)


@torch.inference_mode()
def run(engine: Engine, *, trees: int, budget: int, seed: int = 0) -> SelfCheck | None:
    """Check `trees` random trees of `budget` nodes and a root; None where no tree is checked or verified."""
    if not engine.arm.verifies_tree or trees == 0:
        return None
    started = time.perf_counter()
    rng = np.random.default_rng(seed)
    block = engine.drafter.config.block_size if engine.drafter else DEFAULT_BLOCK
    found = SelfCheck(dtype=str(engine.dtype).removeprefix("torch."), width=budget + 1)
    for _ in range(trees):
        _check_tree(engine, rng, budget + 1, block, found)
    found.judge()
    found.seconds = round(time.perf_counter() - started, 3)
    return found


def require_passed(found: SelfCheck | None) -> None:
    """Raise `SelfCheckError` for numbers with which serving would give wrong text."""
    if found is None or found.passed:
        return
    raise SelfCheckError(
        f"start-up self-check over {found.trees} trees: node and path differ by "
        f"{found.relative_to_range:.2g} of the logits' range, another branch moved them by "
        f"{found.sibling_leak_relative:.2g}; allowed is {found.tolerance:.2g}. "
        "Serving would give wrong text; please report it"
    )


def _check_tree(engine: Engine, rng: np.random.Generator, width: int, depth: int, found: SelfCheck) -> None:
    vocabulary = engine.target.config.vocab_size
    prefix = rng.integers(0, vocabulary, PREFIX)
    parents, depths = random_tree(rng, width, depth)
    tokens = rng.integers(0, vocabulary, width)
    paths = [path_of(parents, leaf) for leaf in leaves_of(parents, LEAVES)]
    swapped = np.where(np.isin(np.arange(width), paths[0]), tokens, rng.integers(0, vocabulary, width))
    cache = TargetCache.empty(engine.target.config, PREFIX + width, engine.dtype)
    _prefill(engine, prefix, cache)
    logits = _verify(engine, tokens, parents, depths, cache)
    again = _verify(engine, swapped, parents, depths, cache)
    found.trees += 1
    leak, leak_share = _apart(again[paths[0]], logits[paths[0]])
    found.sibling_leak_max_diff = _larger(found.sibling_leak_max_diff, leak)
    found.sibling_leak_relative = _larger(found.sibling_leak_relative, leak_share)
    for path in paths:
        plain = _standalone(engine, prefix, tokens[path])
        error, share = _apart(logits[path], plain)
        found.nodes += len(path)
        found.node_path_max_diff = _larger(found.node_path_max_diff, error)
        found.relative_to_range = _larger(found.relative_to_range, share)
        if engine.dtype is torch.float32 and found.noise_max_diff:
            continue  # there it is a figure that judges nothing, and decoding is what takes time
        noise, noise_share = _apart(_decoded(engine, tokens[path], cache), plain)
        found.noise_max_diff = _larger(found.noise_max_diff, noise)
        found.noise_relative = _larger(found.noise_relative, noise_share)


def _verify(engine: Engine, tokens: Ints, parents: Ints, depths: Ints, cache: TargetCache) -> Tensor:
    """Logits float32 [Q, V] by the pass that serves; the cache's states stay where the prefix ended."""
    shape = engine.shape_of(tree_with(tokens, parents, depths))
    return engine.target.logits(engine.target.verify(torch.from_numpy(tokens), shape, cache).hidden)


def _standalone(engine: Engine, prefix: Ints, path: Ints) -> Tensor:
    """Logits float32 [P, V] of the path's tokens, prefilled from nothing."""
    cache = TargetCache.empty(engine.target.config, PREFIX + len(path), engine.dtype)
    hidden = _prefill(engine, np.concatenate([prefix, path]), cache)
    return engine.target.logits(hidden[-len(path) :])


def _decoded(engine: Engine, path: Ints, prefix: TargetCache) -> Tensor:
    """The same, decoded token by token behind a prefilled prefix."""
    cache = replace(prefix, keys=prefix.keys.clone(), values=prefix.values.clone())
    cache.states, cache.windows = prefix.states.clone(), prefix.windows.clone()
    rows = [engine.target.step(int(token), cache).hidden for token in path]
    return engine.target.logits(torch.cat(rows))


def _prefill(engine: Engine, tokens: Ints, cache: TargetCache) -> Tensor:
    """Commit tokens chunk by chunk; hidden states [T, hidden]."""
    chunks = torch.split(torch.from_numpy(tokens), PREFILL_CHUNK)
    return torch.cat([engine.target.prefill(chunk, cache).hidden for chunk in chunks])


def _apart(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """The largest difference between rows of logits, plain and as a share of its row's range."""
    rows = (found - expected).abs().amax(dim=-1)
    ranges = (expected.amax(dim=-1) - expected.amin(dim=-1)).clamp_min(1e-6)
    return float(rows.max()), float((rows / ranges).max())


def _larger(one: float, other: float) -> float:
    """The larger one; NaN stays, where `max` would lose it."""
    return float(np.maximum(one, other))
