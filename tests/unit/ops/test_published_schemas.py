from __future__ import annotations

import json

import pytest

from ddtree_ops.schemas.publish import FOLDER, PUBLISHED, json_schema


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_schema_is_the_model_s(name: str) -> None:
    """Regenerate with `python -m ddtree_ops.schemas.publish`."""
    assert (FOLDER / name).read_text(encoding="utf-8") == json_schema(PUBLISHED[name])


def test_files_carry_a_literal_schema_version() -> None:
    for name, key in (
        ("sweep", "schema"),
        ("results-store", "schema_version"),
        ("results-cell", "schema_version"),
    ):
        schema = json.loads((FOLDER / f"{name}.schema.json").read_text(encoding="utf-8"))
        assert schema["properties"][key]["const"] == 1
