"""The plugin leans on private code of one SGLang release; this module says whether that code is there.

`pins.json` holds the release and, for every function, method or class that the plugin hooks, subclasses or
whose behaviour it relies on, a hash of its source. Sources are read from the installed files and parsed:
nothing of SGLang is imported, so this works in any process and without a GPU.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ddtree_engine.sglang_plugin.errors import PinError

PINS = Path(__file__).with_name("pins.json")
OVERRIDE = "SGLANG_DDTREE_SKIP_PIN"


@dataclass(frozen=True)
class Mismatch:
    """One thing that differs from what the plugin was written against."""

    name: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.name}: found {self.found}, expected {self.expected}"


def load_pins() -> tuple[str, dict[str, str]]:
    """(SGLang version, {dotted name: sha256 of its source})."""
    data = json.loads(PINS.read_text(encoding="utf-8"))
    return data["sglang"], data["sources"]


@cache
def mismatches() -> tuple[Mismatch, ...]:
    """Everything in the installed SGLang that differs from the pins; empty when all is as expected."""
    version, sources = load_pins()
    found: list[Mismatch] = []
    try:
        installed = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return (Mismatch("sglang", "no installation", version),)
    if installed != version:
        found.append(Mismatch("sglang", f"version {installed}", version))
    root = package_root()
    for name, expected in sources.items():
        actual = source_hash(name, root)
        if actual != expected:
            shown = "nothing of that name" if actual is None else f"source {actual[:12]}"
            found.append(Mismatch(name, shown, expected[:12]))
    return tuple(found)


def require_pinned(environ: Mapping[str, str] | None = None) -> tuple[Mismatch, ...]:
    """Raise `PinError` on a mismatch, unless the override is set; returns the overridden mismatches."""
    found = mismatches()
    if found and (os.environ if environ is None else environ).get(OVERRIDE) != "1":
        raise PinError(
            "this SGLang differs from the one that the DDTREE plugin was written against, and on private "
            "code a difference can mean silently wrong text: "
            + "; ".join(map(str, found))
            + f". Install the expected release, or set {OVERRIDE}=1 to go on at your own risk"
        )
    return found


def package_root() -> Path:
    """The folder of the installed `sglang` package. Raises `PinError` when there is none."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise PinError("sglang: found no installation, expected the package on this Python's path")
    return Path(next(iter(spec.submodule_search_locations)))


def source_hash(name: str, root: Path) -> str | None:
    """sha256 of the source of `sglang.module.path:Qualified.name`, None when it is not there."""
    source = source_of(name, root)
    return None if source is None else hashlib.sha256(source.encode()).hexdigest()


def source_of(name: str, root: Path) -> str | None:
    """The source text of a pinned name, decorators included, indentation removed."""
    module, _, qualified = name.partition(":")
    file = root.joinpath(*module.split(".")[1:]).with_suffix(".py")
    if not file.is_file():
        file = file.with_suffix("") / "__init__.py"
        if not file.is_file():
            return None
    text, tree = _parsed(file)
    scope: ast.AST = tree
    for part in qualified.split("."):
        inner = next(
            (
                node
                for node in ast.walk(scope)
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
                and node.name == part
            ),
            None,
        )
        if inner is None:
            return None
        scope = inner
    assert isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    first = min([scope.lineno, *(decorator.lineno for decorator in scope.decorator_list)])
    lines = text.splitlines()[first - 1 : scope.end_lineno]
    return textwrap.dedent("\n".join(lines))


@cache
def _parsed(file: Path) -> tuple[str, ast.Module]:
    text = file.read_text(encoding="utf-8")
    return text, ast.parse(text)
