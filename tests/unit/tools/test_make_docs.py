"""Tables of the documentation follow the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "make_docs.py"
spec = importlib.util.spec_from_file_location("make_docs", TOOL)
assert spec is not None
assert spec.loader is not None
make_docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_docs)


@pytest.mark.parametrize("page", make_docs.PAGES)
def test_the_tables_are_current(page: str) -> None:
    text = (make_docs.DOCS / page).read_text(encoding="utf-8")
    assert "<!-- made: " in text
    assert make_docs.filled(text) == text, "run python tools/make_docs.py"
