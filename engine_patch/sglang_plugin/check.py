"""Can this SGLang host the plugin?  `python -m ddtree_engine.sglang_plugin.check [--json]`

Looks at the installed release, the private code that the plugin leans on, the entry point, the configuration
variable, and then registers for real. Needs no GPU; `--no-import` leaves out the last step, which imports
SGLang. Exit code 0: yes; 2: the configuration is wrong; 3: this SGLang cannot host it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ddtree_engine.sglang_plugin import pin
from ddtree_engine.sglang_plugin.config import VARIABLE, load_config
from ddtree_engine.sglang_plugin.errors import ConfigError, PinError
from ddtree_engine.sglang_plugin.names import ENTRY_POINT, ENTRY_POINT_GROUP

OK, WRONG_INPUT, WRONG_ENVIRONMENT = 0, 2, 3


@dataclass(frozen=True)
class Finding:
    """One question and its answer; `code` is the exit code that it asks for."""

    check: str
    ok: bool
    detail: str
    code: int = OK


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ddtree_engine.sglang_plugin.check", description="Can this SGLang host DDTREE?"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--no-import", action="store_true", help="do not import SGLang")
    options = parser.parse_args(argv)
    findings = examine(import_sglang=not options.no_import)
    sys.stdout.write(as_json(findings) if options.json else as_text(findings))
    return max(finding.code for finding in findings)


def examine(*, import_sglang: bool = True) -> list[Finding]:
    """Every finding, in order."""
    questions: list[Callable[[], Finding]] = [release, private_code, entry_point, configuration]
    if import_sglang:
        questions.append(registration)
    return [question() for question in questions]


def release() -> Finding:
    expected, _ = pin.load_pins()
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return Finding("release", False, f"no sglang installed, expected {expected}", WRONG_ENVIRONMENT)
    ok = found == expected
    return Finding("release", ok, f"found {found}, expected {expected}", OK if ok else WRONG_ENVIRONMENT)


def private_code() -> Finding:
    try:
        root = pin.package_root()
    except PinError as error:
        return Finding("private-code", False, str(error), WRONG_ENVIRONMENT)
    _, sources = pin.load_pins()
    differing = [name for name, expected in sources.items() if pin.source_hash(name, root) != expected]
    if differing:
        return Finding("private-code", False, f"differs: {', '.join(differing)}", WRONG_ENVIRONMENT)
    return Finding("private-code", True, f"{len(sources)} sources as expected")


def entry_point() -> Finding:
    found = [
        point.value for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT)
    ]
    if not found:
        return Finding(
            "entry-point",
            False,
            f"no entry point {ENTRY_POINT!r} in {ENTRY_POINT_GROUP}: install the package `ddtree` with pip",
            WRONG_ENVIRONMENT,
        )
    return Finding("entry-point", True, found[0])


def configuration() -> Finding:
    try:
        config = load_config()
    except ConfigError as error:
        return Finding("configuration", False, str(error), WRONG_INPUT)
    return Finding(
        "configuration", True, f"{VARIABLE}: mode {config.mode}, topk {config.topk}, {config.builder}"
    )


def registration() -> Finding:
    """Load plugins as a server process does and ask for the algorithm by name."""
    try:
        from ddtree_engine.sglang_plugin.algorithm import DDTreeAlgorithm
        from sglang.srt.plugins import load_plugins
        from sglang.srt.speculative import spec_registry

        load_plugins()
        names = [
            name
            for name, algorithm in spec_registry._REGISTRY.items()
            if isinstance(algorithm, DDTreeAlgorithm)
        ]
    except Exception as error:  # whatever importing or registering raises is the answer
        return Finding("registration", False, f"{type(error).__name__}: {error}", WRONG_ENVIRONMENT)
    if not names:
        return Finding("registration", False, "not registered: see the log above", WRONG_ENVIRONMENT)
    return Finding("registration", True, f"--speculative-algorithm {names[0]}")


def as_text(findings: list[Finding]) -> str:
    lines = [f"{'ok  ' if finding.ok else 'FAIL'}  {finding.check}: {finding.detail}" for finding in findings]
    return "\n".join(lines) + "\n"


def as_json(findings: list[Finding]) -> str:
    document = {
        "ok": all(finding.ok for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(document, indent=2) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
