"""The benchmark's measurements of the commit: speed, error, launch configurations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from ddtree_kernels.bench_inputs import Inputs, random_inputs
from ddtree_kernels.bench_timing import Place, relative_error, timed

# block_v, num_warps, pieces and stages of a replay. With 64 floats of a state a thread, 16 warps fit on a
# multiprocessor; with 32 more, with 128 fewer.
REPLAYS = (
    (32, 2, 4, 4),
    (32, 2, 8, 4),
    (16, 1, 8, 4),
    (16, 1, 4, 4),
    (16, 1, 4, 8),
    (64, 4, 8, 4),
    (128, 8, 8, 4),
    (32, 2, 8, 2),
    (32, 2, 8, 6),
    (32, 2, 2, 4),
    (32, 2, 16, 4),
    (64, 4, 4, 4),
)


def commit(place: Place) -> dict[str, Any]:
    """Every request accepts a whole block, against reading and writing all states once."""
    work = Work(place)
    return timed(place, work.both, work.restore) | work.floor | {"error": commit_error(place)}


def commit_sweep(place: Place) -> dict[str, Any]:
    """Both launches alone by configuration with their errors, then the fastest of each together."""
    from ddtree_kernels.commit.triton import DEFAULT

    work = Work(place)
    replays = [
        replace(DEFAULT, block_v=block_v, num_warps=num_warps, pieces=pieces, stages=stages)
        for block_v, num_warps, pieces, stages in REPLAYS
    ]
    convolutions = [replace(DEFAULT, conv_warps=conv_warps) for conv_warps in (1, 2, 4)]
    if place.tiny:
        replays, convolutions = replays[:2], convolutions[:2]
    rows = [work.measure("convolution", config, work.convolve, work.restore) for config in convolutions]
    conv = _fastest(rows)
    # The replay reads what the convolution wrote: once is enough.
    work.config = DEFAULT
    work.restore()
    work.convolve()
    rows += [work.measure("replay", config, work.replay, None) for config in replays]
    replay = _fastest([row for row in rows if row["launch"] == "replay"])
    best = replace(replay, conv_warps=conv.conv_warps)
    rows.append(work.measure("both", best, work.both, work.restore))
    return {key: rows[-1][key] for key in ("milliseconds", "error")} | {
        "best": asdict(best),
        "rows": rows,
        **work.floor,
    }


class Work:
    """The bench shape's stash with a path of a block a request, and the launches over it."""

    def __init__(self, place: Place) -> None:
        from ddtree_kernels.commit import triton as kernels

        self.place, self.kernels, self.config = place, kernels, kernels.DEFAULT
        shape, batch = place.shape, place.batches(8)
        self.inputs = inputs = random_inputs(shape, batch, place.widths(64), place.device)
        # A commit overwrites the rows of its path: every one gets fresh ones, as after a verify pass.
        self.kept = inputs.x[:, :, : shape.block].clone()
        self.path = torch.arange(shape.block, device=place.device).expand(batch, shape.block).contiguous()
        self.counts = torch.full((batch,), shape.block, device=place.device)
        self.facts = kernels.commit_facts(inputs.x, self.path, shape.value_heads)
        self.floor = {"floor_bytes": 2 * batch * shape.state_bytes}

    def both(self) -> None:
        """The whole commit."""
        self.kernels.commit_unchecked(*self._arguments())

    def convolve(self) -> None:
        """The first launch."""
        self.kernels.convolve_unchecked(*self._arguments())

    def replay(self) -> None:
        """The second launch."""
        inputs = self.inputs
        self.kernels.replay_unchecked(
            inputs.x, inputs.state_pool, inputs.slots, self.counts, self.place.shape.heads, None, None,
            self.facts, self.config,
        )  # fmt: skip

    def restore(self) -> None:
        """The stash as a verify pass leaves it."""
        self.inputs.x[:, :, : self.place.shape.block].copy_(self.kept)

    def measure(
        self, launch: str, config: Any, run: Callable[[], Any], restore: Callable[[], Any] | None
    ) -> dict[str, Any]:
        """One row of a sweep; what a card cannot run is a row with its reason."""
        self.config = config
        row = {"launch": launch, "config": asdict(config)}
        try:
            return row | timed(self.place, run, restore) | {"error": commit_error(self.place, config)}
        except Exception as error:  # a configuration too large for the card
            return row | {"failed": f"{type(error).__name__}: {str(error)[:200]}"}

    def _arguments(self) -> tuple[Any, ...]:
        inputs = self.inputs
        return (
            inputs.x, inputs.a, inputs.b, inputs.A_log, inputs.dt_bias, inputs.weight, None, inputs.conv_pool,
            inputs.state_pool, inputs.slots, self.path, self.counts, self.place.shape.heads, True, None, None,
            self.facts, self.config,
        )  # fmt: skip


def commit_error(place: Place, config: Any = None) -> float:
    """The kernels' state after a commit, and its windows, against the reference."""
    from ddtree_kernels.commit.naive import commit_naive
    from ddtree_kernels.commit.triton import DEFAULT
    from ddtree_kernels.commit.triton import commit as commit_all

    shape = place.shape
    inputs: Inputs = random_inputs(shape, 2, shape.block, place.device, layers=1)
    path = torch.arange(shape.block, device=place.device).expand(2, shape.block).contiguous()
    counts = torch.tensor([shape.block, 3], device=place.device)
    naive_conv, naive_state = inputs.conv_pool[0].clone(), inputs.state_pool[0].clone()
    commit_naive(
        inputs.x[0], inputs.a[0], inputs.b[0], inputs.A_log[0], inputs.dt_bias[0], inputs.weight[0], None,
        naive_conv, naive_state, inputs.slots, path, counts, key_heads=shape.heads,
    )  # fmt: skip
    commit_all(
        inputs.x, inputs.a, inputs.b, inputs.A_log, inputs.dt_bias, inputs.weight, None, inputs.conv_pool,
        inputs.state_pool, inputs.slots, path, counts, key_heads=shape.heads, config=config or DEFAULT,
    )  # fmt: skip
    if not torch.equal(naive_conv, inputs.conv_pool[0]):
        raise AssertionError("committed convolution windows differ")
    return relative_error(inputs.state_pool[0], naive_state.double())


def _fastest(rows: list[dict[str, Any]]) -> Any:
    from ddtree_kernels.commit.triton import CommitConfig

    measured = [row for row in rows if "milliseconds" in row]
    if not measured:
        raise RuntimeError(f"no configuration ran: {rows[-1]['failed']}")
    return CommitConfig(**min(measured, key=lambda row: row["milliseconds"])["config"])
