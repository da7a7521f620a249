"""Does a service fit on a card? Parts, verdict, and the knobs that would make it fit. Bytes, per rank.

Pools follow SGLang 0.5.23's own allocation (`mem_cache/memory_pool.py`, `kv_cache_configurator.py`): state
slots for each running request and for the radix cache, per-node scratch for one request more than may run, KV
of target and drafter in one index space, 2 x width KV slots reserved ahead of each running request. What lies
outside the pools (graphs, activations, logits) is an estimate and is marked so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from ddtree_ops.errors import BadInput
from ddtree_ops.memory.shapes import DTYPE_BYTES, DrafterShape, TargetShape
from ddtree_ops.schemas.arms import BUDGETS, Arm
from ddtree_ops.schemas.cluster import Cluster, Scratch

MIB = 2**20
GIB = 2**30

#: Recurrent state slots for each running request: 3 of the radix cache and 2 of the `extra_buffer` strategy
#: with overlapped scheduling. The engine caps running requests at slots / this.
SLOTS_PER_REQUEST = 5
PREFILL_CHUNK = 2048
#: SGLang's own rules of thumb for what it leaves outside the pools.
RUNTIME_BYTES = 512 * MIB
ACTIVATION_BYTES_PER_TOKEN = int(1.5 * MIB)
GRAPH_BYTES_PER_BATCH = 2 * MIB


class Verdict(StrEnum):
    FITS = "fits"  # every running request may reach the full context
    TIGHT = "tight"  # one may; with more, requests wait or are retracted
    NO = "no"


@dataclass(frozen=True)
class Wanted:
    """A service as the planner sees it. `budget` is null for ar and dflash."""

    arm: Arm
    budget: int | None
    running: int
    context: int
    card: int
    tp: int = 1
    mem_fraction: float = 0.85
    weights: str = "bfloat16"
    kv: str = "bfloat16"
    ssm: str = "float32"
    scratch: Scratch = Scratch.STASH


@dataclass(frozen=True)
class Part:
    """One thing that takes memory, and how its size comes about."""

    name: str
    size: int
    how: str
    estimate: bool = False


@dataclass(frozen=True)
class Plan:
    """Where the memory of one card goes.

    static     pools and weights, which must fit into `limit` = card x mem_fraction
    reserve    the rest, which must fit into card - limit
    kv_tokens  tokens that the KV pools hold when they take what is left; 0 where nothing is left
    """

    wanted: Wanted
    static: tuple[Part, ...]
    reserve: tuple[Part, ...]
    limit: int
    token_bytes: int
    kv_tokens: int
    tokens_needed: int
    tokens_for_all: int
    verdict: Verdict
    reason: str

    @property
    def state_slots(self) -> int:
        """What to give the engine as --max-mamba-cache-size, so that it does not cap running requests."""
        return self.wanted.running * SLOTS_PER_REQUEST


def plan_memory(target: TargetShape, drafter: DrafterShape | None, wanted: Wanted) -> Plan:
    """Plan one service. Raises BadInput for a width, tp or drafter that cannot be."""
    target.check_ranks(wanted.tp)
    if wanted.arm is not Arm.AR and drafter is None:
        raise BadInput(f"drafter: found none, allowed: a drafter for the arm {wanted.arm.value}")
    if wanted.arm.takes_budget and wanted.budget not in BUDGETS:
        raise BadInput.at(file=None, key="budget", found=wanted.budget, allowed=", ".join(map(str, BUDGETS)))
    width = verify_width(drafter, wanted)
    static = tuple(_static(target, drafter, wanted, width))
    reserve = tuple(_reserve(target, wanted, width))
    limit = int(wanted.card * wanted.mem_fraction)
    token_bytes = _token_bytes(target, drafter, wanted)
    left = limit - sum(part.size for part in static)
    ahead = wanted.running * 2 * width
    tokens, needed = max(0, left // token_bytes), wanted.context + ahead
    everything = wanted.running * wanted.context + ahead
    outside = sum(part.size for part in reserve)
    if left < 0:
        verdict, reason = Verdict.NO, f"weights and states exceed the pools' share by {_gib(-left)}"
    elif tokens < needed:
        verdict, reason = Verdict.NO, f"KV for {tokens} tokens is left, one full request needs {needed}"
    elif outside > wanted.card - limit:
        verdict, reason = (
            Verdict.NO,
            f"{_gib(wanted.card - limit)} outside the pools, about {_gib(outside)} needed",
        )
    elif tokens < everything:
        verdict, reason = (
            Verdict.TIGHT,
            f"KV for {tokens} tokens; {wanted.running} full requests need {everything}",
        )
    else:
        verdict, reason = Verdict.FITS, f"KV for {tokens} tokens"
    return Plan(wanted, static, reserve, limit, token_bytes, tokens, needed, everything, verdict, reason)


def cluster_services(cluster: Cluster, *, weights: str) -> dict[str, Wanted]:
    """The services of a cluster.yaml as the planner sees them, by name."""
    return {
        service.name: Wanted(
            arm=service.arm,
            budget=service.budget,
            running=service.max_running_requests,
            context=service.context_length,
            card=int(cluster.gpu.memory_gib * GIB),
            tp=service.tp,
            mem_fraction=service.mem_fraction,
            weights=weights,
            ssm=service.ssm_dtype,
            scratch=service.scratch or Scratch.SNAPSHOTS,
        )
        for service in cluster.services
    }


def verify_width(drafter: DrafterShape | None, wanted: Wanted) -> int:
    """Nodes that a step of a request verifies: Q for trees, F for chains, 1 without a drafter."""
    if wanted.arm in {Arm.DDTREE, Arm.UNSAFE}:
        assert wanted.budget is not None
        return wanted.budget + 1
    return 1 if drafter is None or wanted.arm is Arm.AR else drafter.block


def largest_budget(target: TargetShape, drafter: DrafterShape | None, wanted: Wanted) -> int | None:
    """The largest budget that fits (tight included); null where none does."""
    tries = (replace(wanted, budget=budget) for budget in reversed(BUDGETS))
    return next((one.budget for one in tries if _fits(target, drafter, one)), None)


def largest_running(target: TargetShape, drafter: DrafterShape | None, wanted: Wanted) -> int | None:
    """The most running requests, up to those wanted, that fit; null where not even one does."""
    tries = (replace(wanted, running=running) for running in range(wanted.running, 0, -1))
    return next((one.running for one in tries if _fits(target, drafter, one)), None)


def knobs(target: TargetShape, drafter: DrafterShape | None, wanted: Wanted) -> list[str]:
    """Single changes that make a service fit, cheapest first, as keys of cluster.yaml."""
    return [text for text, one in _changes(target, drafter, wanted) if _fits(target, drafter, one)]


def _changes(
    target: TargetShape, drafter: DrafterShape | None, wanted: Wanted
) -> Iterator[tuple[str, Wanted]]:
    if wanted.arm is Arm.DDTREE and wanted.scratch is Scratch.SNAPSHOTS:
        yield "scratch: stash", replace(wanted, scratch=Scratch.STASH)
    outside = sum(part.size for part in _reserve(target, wanted, verify_width(drafter, wanted)))
    most = (wanted.card - max(outside, _floor(wanted.card))) * 100 // wanted.card / 100
    if most != wanted.mem_fraction and most > 0:
        yield f"mem_fraction: {most:.2f}", replace(wanted, mem_fraction=most)
    running = largest_running(target, drafter, wanted)
    if running is not None and running < wanted.running:
        yield f"max_running_requests: {running}", replace(wanted, running=running)
    if wanted.arm in {Arm.DDTREE, Arm.UNSAFE}:
        budget = largest_budget(target, drafter, wanted)
        if budget is not None and wanted.budget is not None and budget < wanted.budget:
            yield f"budget: {budget}", replace(wanted, budget=budget)
    context = wanted.context
    while context > 1024:
        context //= 2
        shorter = replace(wanted, context=context)
        if _fits(target, drafter, shorter):
            yield f"context_length: {context}", shorter
            break
    if wanted.ssm == "float32":
        yield "ssm_dtype: bfloat16 (loses precision along a path)", replace(wanted, ssm="bfloat16")
    for tp in (2, 4, 8):
        if tp > wanted.tp and not target.attention.heads % tp and not target.recurrent.key_heads % tp:
            yield f"tp: {tp}", replace(wanted, tp=tp)
            break
    if wanted.weights != "fp8":
        yield "model: an FP8 checkpoint", replace(wanted, weights="fp8")


def _floor(card: int) -> int:
    """What SGLang leaves outside the pools at least, by default."""
    return 10 * GIB if card > 60 * GIB else 0


def _fits(target: TargetShape, drafter: DrafterShape | None, wanted: Wanted) -> bool:
    return plan_memory(target, drafter, wanted).verdict is not Verdict.NO


def _static(target: TargetShape, drafter: DrafterShape | None, wanted: Wanted, width: int) -> Iterator[Part]:
    tp, running = wanted.tp, wanted.running
    ssm = DTYPE_BYTES[wanted.ssm]
    yield Part(
        "target weights", target.weight_bytes(tp=tp, dtype=wanted.weights), f"{wanted.weights}, / tp {tp}"
    )
    if drafter is not None and wanted.arm is not Arm.AR:
        yield Part("drafter weights", drafter.weight_bytes(tp=tp), f"bfloat16, / tp {tp}")
    state = target.recurrent.state_bytes(tp=tp, element=ssm)
    window = target.recurrent.window_bytes(tp=tp)
    slots = running * SLOTS_PER_REQUEST + 1
    how = f"({running} x {SLOTS_PER_REQUEST} + 1) slots x {(state + window) / MIB:.1f} MiB, {wanted.ssm}"
    yield Part("recurrent states", slots * (state + window), how)
    if wanted.arm is Arm.AR:
        return
    rows = running + 1
    if wanted.arm is Arm.DDTREE and wanted.scratch is Scratch.STASH:
        stash = target.recurrent.stash_bytes(tp=tp)
        how = f"({running} + 1) x {width} nodes x {stash / MIB:.2f} MiB"
        yield Part("tree scratch: stash", rows * width * stash, how)
        return
    how = f"({running} + 1) x {width} nodes x {state / MIB:.1f} MiB, {wanted.ssm}"
    yield Part("verify scratch: states", rows * width * state, how)
    if wanted.arm in {Arm.DDTREE, Arm.UNSAFE}:
        how = f"({running} + 1) x {width} nodes x {window / MIB:.2f} MiB"
        yield Part("verify scratch: conv", rows * width * window, how)
        return
    columns = width + target.recurrent.taps - 2
    shared = target.recurrent.window_bytes(tp=tp, columns=columns)
    yield Part("verify scratch: conv", rows * shared, f"({running} + 1) x {columns} shared columns")


def _reserve(target: TargetShape, wanted: Wanted, width: int) -> Iterator[Part]:
    rows = wanted.running * width
    yield Part("runtime", RUNTIME_BYTES, "CUDA context, workspaces", estimate=True)
    activations = max(PREFILL_CHUNK, rows) * ACTIVATION_BYTES_PER_TOKEN // wanted.tp
    yield Part("activations", activations, f"{max(PREFILL_CHUNK, rows)} tokens x 1.5 MiB", estimate=True)
    copies = 1 if wanted.arm is Arm.AR else 3  # logits, target probabilities, draft probabilities
    yield Part("logits", rows * target.vocab * 4 * copies, f"{rows} rows x {target.vocab} x 4 B x {copies}")
    graphs = rows * _graph_row_bytes(target) // wanted.tp + wanted.running * GRAPH_BYTES_PER_BATCH
    yield Part("CUDA graphs", graphs, f"widest of {wanted.running} batches: {rows} rows", estimate=True)
    if wanted.arm is Arm.AR:
        return
    indices = rows * (wanted.context + width) * 8
    mask = rows * (wanted.context + width) if wanted.arm in {Arm.DDTREE, Arm.UNSAFE} else 0
    yield Part("mask and indices", indices + mask, f"{rows} rows x ({wanted.context} + {width})")


def _graph_row_bytes(target: TargetShape) -> int:
    """Live bfloat16 activations of one row in the widest layer: hidden states, FFN, q, k, v, z."""
    return 2 * (4 * target.hidden + 3 * target.ffn + 2 * target.recurrent.channels)


def _token_bytes(target: TargetShape, drafter: DrafterShape | None, wanted: Wanted) -> int:
    element = DTYPE_BYTES[wanted.kv]
    own = target.attention.kv_bytes(tp=wanted.tp, element=element)
    if drafter is None or wanted.arm is Arm.AR:
        return own
    return own + drafter.attention.kv_bytes(tp=wanted.tp, element=element)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
