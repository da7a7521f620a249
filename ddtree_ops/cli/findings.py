"""Shows findings of checks: a table, the remedies, and the result with `--json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddtree_ops.errors import ExitCode

if TYPE_CHECKING:
    from ddtree_ops.hosts.checks import Finding
    from ddtree_ops.output import Output

ORDER = ("fail", "warn", "skip", "pass")


def show_findings(out: Output, title: str, findings: Sequence[Finding]) -> int:
    """Print findings and return the exit code: 1 when a check failed, else 0 (warnings do not fail)."""
    hosts = {one.host for one in findings}
    shown = [one for one in findings if len(hosts) == 1 or one.status.value != "pass"]
    out.table(
        title if len(shown) == len(findings) else f"{title}: what does not pass on {len(hosts)} hosts",
        ("check", "host", "status", "found"),
        [(one.id, one.host, one.status.value, one.found) for one in shown],
    )
    for status in ("fail", "warn"):
        for one in findings:
            if one.status.value == status:
                out.line(f"  {status} {one.id} on {one.host}: {one.found}")
                out.line(f"    try: {one.remedy}")
    counts = Counter(one.status.value for one in findings)
    summary = ", ".join(f"{counts[status]} {status}" for status in ORDER if counts[status])
    failed = counts["fail"] > 0
    out.result(
        {"ok": not failed, "counts": dict(counts), "findings": [one.as_json() for one in findings]},
        summary=summary,
    )
    return ExitCode.JOB_FAILED if failed else ExitCode.DONE
