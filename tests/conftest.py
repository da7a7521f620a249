"""What every test gets: the option ``--forbid-skips`` for CI, and no GPU tests unless asked for."""

from __future__ import annotations

import signal

import pytest

# A shell ignores SIGINT for what it starts in the background, and children inherit that: no test of Ctrl-C
# would then test anything.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forbid-skips", action="store_true", help="a skipped test fails the run (used by CI)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests are left out, not skipped, unless selected by ``-m gpu``."""
    if "gpu" in (config.option.markexpr or ""):
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say loudly what did not run."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section("NOT RUN")
        for report in skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            terminalreporter.line(f"{report.nodeid}: {reason}", yellow=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.getoption("--forbid-skips"):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and reporter.stats.get("skipped") and session.exitstatus == 0:
        reporter.write_line("skips are forbidden here", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
