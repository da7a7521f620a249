"""Is a host fit to serve and to be measured? One function a check, with a stable id and a one-line remedy.

A check looks at facts only: nothing here touches a host. `fail` means that services would not start, give
wrong numbers or give numbers that cannot be compared; `warn` means slower or riskier; `skip` says why nothing
can be said.
"""

from __future__ import annotations

from ddtree_ops.hosts.checks import cards, containers, driver, host, kernel
from ddtree_ops.hosts.checks.expectations import GIB, Expectations, expectations
from ddtree_ops.hosts.checks.findings import Finding, Status, unreachable_host, worst
from ddtree_ops.hosts.checks.kernel import FATAL_XIDS
from ddtree_ops.hosts.checks.table import Check
from ddtree_ops.hosts.facts import HostFacts

__all__ = [
    "CHECKS",
    "FATAL_XIDS",
    "GIB",
    "Expectations",
    "Finding",
    "Status",
    "check_host",
    "expectations",
    "unreachable_host",
    "worst",
]

#: The table, in the order in which it is shown.
CHECKS: dict[str, Check] = host.CHECKS | driver.CHECKS | containers.CHECKS | cards.CHECKS | kernel.CHECKS


def check_host(facts: HostFacts, want: Expectations) -> list[Finding]:
    """Every check on one host, in the order of the table."""
    return [_find(check, facts, want) for check in CHECKS.values()]


def _find(check: Check, facts: HostFacts, want: Expectations) -> Finding:
    if check.gpu and not want.gpus:
        return Finding(check.id, facts.name, Status.SKIP, "no GPU is wanted")
    status, found = check.judge(facts, want)
    remedy = check.remedy if status in {Status.WARN, Status.FAIL} else None
    return Finding(check.id, facts.name, status, found, remedy)
