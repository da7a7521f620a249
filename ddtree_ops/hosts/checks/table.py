"""How the checks' table is written: a row, and the words that rows share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ddtree_ops.hosts.checks.expectations import Expectations
from ddtree_ops.hosts.checks.findings import Status
from ddtree_ops.hosts.facts import GpuFacts, HostFacts

Verdict = tuple[Status, str]
Judge = Callable[[HostFacts, Expectations], Verdict]


@dataclass(frozen=True)
class Check:
    """A row of the table: what is checked, what passes, and what to do when it does not."""

    id: str
    wanted: str
    otherwise: str
    remedy: str
    judge: Judge
    gpu: bool


Register = Callable[[Judge], Judge]


def into(checks: dict[str, Check]) -> Callable[..., Register]:
    """A decorator that makes a function the judge of a row of these checks."""

    def check(id: str, *, wanted: str, otherwise: str, remedy: str, gpu: bool = True) -> Register:
        def register(judge: Judge) -> Judge:
            checks[id] = Check(id, wanted, otherwise, remedy, judge, gpu)
            return judge

        return register

    return check


def of_cards(judge: Callable[[tuple[GpuFacts, ...], HostFacts, Expectations], Verdict]) -> Judge:
    """A check that needs nvidia-smi's answer."""

    def judged(host: HostFacts, want: Expectations) -> Verdict:
        return judge(host.gpus, host, want) if host.gpus else skip("nvidia-smi shows no card")

    return judged


def judged(good: bool, found: str, otherwise: Status = Status.FAIL) -> Verdict:
    return (Status.PASS if good else otherwise), found


def skip(why: str) -> Verdict:
    return Status.SKIP, why


def by_tp(want: Expectations) -> Status:
    return Status.FAIL if want.tp > 1 else Status.WARN


def equal(values: Mapping[int, str], otherwise: Status = Status.FAIL) -> Verdict:
    """Whether all GPUs show one value; else who shows what."""
    kinds: dict[str, list[int]] = {}
    for index, value in values.items():
        kinds.setdefault(value, []).append(index)
    if len(kinds) == 1:
        return Status.PASS, next(iter(kinds))
    return otherwise, "; ".join(f"{kind}: GPU {numbers(gpus)}" for kind, gpus in kinds.items()) or "unknown"


def numbers(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))
