"""The services that are examined: what they say of themselves, and how they are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pydantic

from ddtree_ops.bench.client import new_session
from ddtree_ops.bench.gates import DEFAULT_BLOCK
from ddtree_ops.errors import BadEnvironment, BadInput
from ddtree_ops.schemas.acceptance import SelfCheckFigures
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.services.counters import tree_states
from ddtree_ops.services.discover import ALGORITHMS

TIMEOUT_S = 30.0
TREE_ARMS = (Arm.DDTREE, Arm.UNSAFE)


@dataclass(frozen=True)
class Address:
    """Where a service is and what it is meant to be.

    host     a label for the bundle ('host-1'), null for this machine or unknown
    headers  of every request, such as an API key; never shown
    """

    arm: Arm
    url: str
    host: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Subject:
    """A service with what it said of itself when it was first asked.

    name    unique and the same in every run: arm, budget, builder where it is not best-first, a number
    budget  nodes without the root; null where the arm takes none or requests carry their own
    block   F, the drafter's block with its root
    """

    name: str
    address: Address
    info: Mapping[str, Any] = field(repr=False)
    budget: int | None
    builder: Builder | None
    per_request: bool
    engine: str
    dtype: str
    block: int

    @property
    def arm(self) -> Arm:
        return self.address.arm

    @property
    def url(self) -> str:
        return self.address.url

    @property
    def default_budget(self) -> int | None:
        """Of a request that names none."""
        return _whole(_block(self.info).get("budget"))

    @property
    def self_check(self) -> SelfCheckFigures | None:
        return self_check_of(self.info)

    def session(self) -> aiohttp.ClientSession:
        """For requests to it."""
        return new_session(4, self.address.headers)


async def meet(addresses: Sequence[Address]) -> list[Subject]:
    """Ask every service what it is.

    Raises BadEnvironment for one that does not answer, BadInput for one that serves another arm.
    """
    infos = await asyncio.gather(*(server_info(address) for address in addresses))
    taken: dict[str, int] = {}
    subjects = []
    for address, info in zip(addresses, infos, strict=True):
        subject = _subject(address, info)
        taken[subject.name] = number = taken.get(subject.name, 0) + 1
        if number > 1:
            subject = Subject(**{**vars(subject), "name": f"{subject.name}#{number}"})
        subjects.append(subject)
    return subjects


async def server_info(address: Address) -> dict[str, Any]:
    """`/server_info` as it is now; nothing of it may be stored but through an allow-list."""
    where = f"{address.url}/server_info"
    try:
        async with new_session(1, address.headers) as session:
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            async with session.get(where, timeout=timeout) as answer:
                if answer.status != 200:
                    hint = "set DDTREE_API_KEY" if answer.status == 401 else "is it a server of ours?"
                    raise BadEnvironment(f"{where} answers {answer.status}", remedy=hint)
                info = await answer.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise BadEnvironment(
            f"{where} cannot be read: {error or type(error).__name__}",
            remedy="is the server up, and is the address right?",
        ) from error
    if not isinstance(info, dict):
        raise BadEnvironment(f"{where} is no JSON object: is this an SGLang or ddtree server?")
    return info


def self_check_of(info: Mapping[str, Any]) -> SelfCheckFigures | None:
    """The start-up self-check's figures, wherever an engine shows them; null where none was run."""
    found = [block.get("self_check") for block in (_block(info), *tree_states(info))]
    for one in found:
        if isinstance(one, Mapping):
            known = {key: value for key, value in one.items() if key in SelfCheckFigures.model_fields}
            try:
                return SelfCheckFigures.model_validate(known)
            except pydantic.ValidationError:
                return SelfCheckFigures(skipped="its report is not of a form that is known here")
    return None


def _subject(address: Address, info: Mapping[str, Any]) -> Subject:
    block, arm = _block(info), address.arm
    said = block.get("arm")
    if said is None:
        algorithm = info.get("speculative_algorithm")
        said = ALGORITHMS.get(algorithm, f"speculative_algorithm {algorithm!r}")
    if said != arm.value:
        raise BadInput(
            f"{address.url}: found arm {said!s}, allowed: {arm.value}, as it was named",
            remedy="name what it serves, or give the right address",
        )
    tree = arm.takes_budget
    per_request = bool(block.get("per_request_budget"))
    budget = _whole(block.get("budget")) if tree and not per_request else None
    builder = Builder(block["builder"]) if tree and block.get("builder") else None
    named = builder if builder not in {None, Builder.BEST_FIRST} else None
    return Subject(
        name="-".join(str(part) for part in (arm.value, budget, named) if part is not None),
        address=address,
        info=info,
        budget=budget,
        builder=builder,
        per_request=tree and per_request,
        engine=str(block.get("engine") or "sglang"),
        dtype=_dtype(info),
        block=_whole(block.get("block")) or DEFAULT_BLOCK,
    )


def _dtype(info: Mapping[str, Any]) -> str:
    """SGLang's own field says `auto` where nobody chose; its self-check knows what that came to."""
    checked = self_check_of(info)
    said = (_block(info).get("dtype"), checked and checked.dtype, info.get("dtype"))
    return next((str(one) for one in said if one and one != "auto"), "unknown")


def _block(info: Mapping[str, Any]) -> Mapping[str, Any]:
    block = info.get("ddtree")
    return block if isinstance(block, Mapping) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
