"""Does every service fit on its cards? Asked before anything is touched."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree_ops.errors import BadInput
from ddtree_ops.memory.planner import Verdict, cluster_services, knobs, plan_memory
from ddtree_ops.memory.shapes import KNOWN_DRAFTERS, KNOWN_TARGETS, drafter_shape, target_shape
from ddtree_ops.schemas.cluster import Checkpoint, Cluster, EngineKind


@dataclass(frozen=True)
class Fit:
    """A service's verdict; null where the models' shapes are not known on this machine."""

    service: str
    verdict: Verdict | None
    reason: str
    knobs: tuple[str, ...] = ()


def memory_of(cluster: Cluster) -> list[Fit]:
    """A verdict for each service; empty for the CPU engine."""
    if cluster.engine is EngineKind.REFERENCE:
        return []
    unknown = _unknown(cluster.model, KNOWN_TARGETS) or _unknown(cluster.drafter, KNOWN_DRAFTERS)
    if unknown is not None or cluster.model is None:
        reason = f"not planned: the shape of {unknown} is not known here (see `ddtree plan memory --model`)"
        return [Fit(service.name, None, reason) for service in cluster.services]
    target = target_shape(str(cluster.model.repo))
    drafter = None if cluster.drafter is None else drafter_shape(str(cluster.drafter.repo))
    found = []
    for name, wanted in cluster_services(cluster, weights=target.dtype).items():
        plan = plan_memory(target, drafter, wanted)
        ways = knobs(target, drafter, wanted) if plan.verdict is Verdict.NO else []
        found.append(Fit(name, plan.verdict, plan.reason, tuple(ways)))
    return found


def require_fit(fits: list[Fit]) -> None:
    """Raise BadInput naming each service that does not fit, and the keys that would make it."""
    bad = [fit for fit in fits if fit.verdict is Verdict.NO]
    if not bad:
        return
    lines = [
        f"services.{fit.service}: does not fit on its card: {fit.reason}; allowed: "
        + ("; or ".join(fit.knobs) or "no single change: see `ddtree plan memory`")
        for fit in bad
    ]
    raise BadInput(
        "\n  ".join(lines), remedy="`ddtree plan memory --cluster FILE` shows where the memory goes"
    )


def _unknown(model: Checkpoint | None, known: object) -> str | None:
    if model is None:
        return None
    name = model.repo or str(model.path)
    assert isinstance(known, dict)
    return None if name in known else name
