"""What running servers say of themselves: their identity for the cells' keys and the check of their
arguments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import tenacity

from ddtree_ops.errors import BadEnvironment, BadInput
from ddtree_ops.redact import allowed_server_info
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.results import ReplicaAt
from ddtree_ops.schemas.sweep import ExternalEngine, ExternalService
from ddtree_ops.services.argv import service_name
from ddtree_ops.services.base import Identity, ServiceSpec

TRIES = 3
TIMEOUT_S = 5.0
#: An argument that follows from how much memory was free on the card.
MEASURED = "max_total_num_tokens="
#: SGLang's own name of the algorithm behind an arm, for servers without a `ddtree` block.
ALGORITHMS = {None: Arm.AR, "": Arm.AR, "DFLASH": Arm.DFLASH}


def external_services(engine: ExternalEngine) -> list[ServiceSpec]:
    """Ask every server of the sweep what it is.

    Raises BadEnvironment for a server that cannot be reached, BadInput for one that is not what the sweep
    says.
    """
    found: dict[str, list[ServiceSpec]] = {}
    for entry in engine.services:
        spec = describe_service(entry, fetch_server_info(str(entry.url)))
        found.setdefault(spec.name, []).append(spec)
    return [one for replicas in found.values() for one in _numbered(replicas)]


def _numbered(replicas: Sequence[ServiceSpec]) -> list[ServiceSpec]:
    """Servers of one service as its replicas. Raises BadInput for two that are not the same."""
    require_alike(replicas)
    addresses = [urlsplit(spec.url or "") for spec in replicas]
    if len({address.netloc for address in addresses}) < len(replicas):
        name, urls = replicas[0].name, ", ".join(str(spec.url) for spec in replicas)
        raise BadInput(f"engine.services: a server of {name} is named twice: {urls}")
    return [
        replace(spec, at=ReplicaAt(number=number, host=address.hostname or "", endpoint=address.netloc))
        for number, (spec, address) in enumerate(zip(replicas, addresses, strict=True))
    ]


def require_alike(replicas: Sequence[ServiceSpec]) -> None:
    """Raise BadInput where replicas of one service are not the same but for their place."""
    first = replicas[0]
    for other in replicas[1:]:
        for field in fields(Identity):
            ours, theirs = getattr(first.identity, field.name), getattr(other.identity, field.name)
            if isinstance(ours, tuple):
                ours, theirs = _chosen(ours, theirs), _chosen(theirs, ours)
            if ours == theirs:
                continue
            raise BadInput(
                f"{first.url} and {other.url} both serve {first.name}, but are no replicas: "
                f"{field.name} is {ours} and {theirs}",
                remedy="start both alike, or leave one of them out",
            )


def _chosen(words: Sequence[str], others: Sequence[str]) -> list[str]:
    """Arguments that only one of two servers has, less those that a server finds out at its start."""
    return sorted(word for word in words if word not in others and not word.startswith(MEASURED))


def fetch_server_info(
    url: str,
    sleep: Callable[[float], None] = time.sleep,
    *,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """`/server_info` of a running server. Raises BadEnvironment when there is no such answer."""
    waiting = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(TRIES),
        wait=tenacity.wait_fixed(0.5),
        retry=tenacity.retry_if_exception_type(httpx.TransportError),
        reraise=True,
        sleep=sleep,
    )
    address = f"{url.rstrip('/')}/server_info"
    try:
        answer = waiting(httpx.get, address, timeout=TIMEOUT_S, trust_env=False, headers=headers)
        info = answer.raise_for_status().json()
    except httpx.HTTPStatusError as error:
        raise BadEnvironment(f"{address} answers {error.response.status_code}") from error
    except httpx.HTTPError as error:
        raise BadEnvironment(
            f"{address} cannot be reached: {error}", remedy="is the server up, and is the address right?"
        ) from error
    except ValueError as error:
        raise BadEnvironment(f"{address} is not JSON: is this an SGLang or ddtree server?") from error
    if not isinstance(info, dict):
        raise BadEnvironment(f"{address} is no JSON object: is this an SGLang or ddtree server?")
    return info


def describe_service(entry: ExternalService, info: Mapping[str, Any]) -> ServiceSpec:
    """A running server as a sweep sees it, from its `/server_info`. Raises BadInput as above."""
    block = info.get("ddtree") if isinstance(info.get("ddtree"), Mapping) else None
    if block is None:
        _check_algorithm(entry, info)
        block = {}
    elif block.get("arm") != entry.arm.value:
        raise BadInput(
            f"engine.services: {entry.url} serves arm {block.get('arm')!r}, not {entry.arm.value!r}"
        )
    tree = entry.arm.takes_budget
    if tree and entry.budget is None and not block.get("per_request_budget"):
        raise BadInput(
            f"engine.services: {entry.url} takes its budget at start only",
            remedy=f"say which with budget: {block.get('budget', 'N')}",
        )
    expected: dict[str, Any] = {"arm": entry.arm.value} if block else {}
    if entry.budget is not None:
        expected["budget"] = entry.budget
    builder = block.get("builder") if tree else None
    identity = Identity(
        engine=str(block.get("engine", "sglang")),
        engine_version=str(info.get("version", "unknown")),
        model_sha256=str(block.get("model_sha256") or f"path:{info.get('model_path')}"),
        drafter_sha256=_drafter(entry.arm, block, info),
        dtype=str(block.get("dtype") or info.get("dtype") or "unknown"),
        topk=block.get("topk") if tree else None,
        builder=Builder(builder) if builder else None,
        argv=tuple(_arguments(info)),
    )
    name = service_name(entry.arm, identity.builder if tree else None, entry.budget)
    return ServiceSpec(
        name=name,
        arm=entry.arm,
        budget=entry.budget,
        identity=identity,
        expected=expected,
        url=str(entry.url).rstrip("/"),
    )


def _check_algorithm(entry: ExternalService, info: Mapping[str, Any]) -> None:
    algorithm = info.get("speculative_algorithm")
    if ALGORITHMS.get(algorithm) is not entry.arm:
        raise BadInput(
            f"engine.services: {entry.url}: speculative_algorithm {algorithm!r} is not {entry.arm.value!r}"
        )


def _drafter(arm: Arm, block: Mapping[str, Any], info: Mapping[str, Any]) -> str | None:
    if arm is Arm.AR:
        return None
    return str(block.get("drafter_sha256") or f"path:{info.get('speculative_draft_model_path')}")


def _arguments(info: Mapping[str, Any]) -> Sequence[str]:
    """The storable arguments of a running server, as the key of its cells sees them."""
    kept = allowed_server_info(info)
    block = kept.pop("ddtree", {})
    block.pop("budget", None)  # the cell's own
    flat = {**kept, **{f"ddtree.{key}": value for key, value in block.items()}}
    return [f"{key}={value}" for key, value in sorted(flat.items())]
