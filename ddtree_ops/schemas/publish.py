"""Write the published JSON Schemas beside the models: ``python -m ddtree_ops.schemas.publish``."""

from __future__ import annotations

import json
from pathlib import Path

import pydantic

from ddtree_ops.schemas.acceptance import AcceptanceSummary
from ddtree_ops.schemas.cluster import Cluster
from ddtree_ops.schemas.images import ImagesLock
from ddtree_ops.schemas.results import CellRecord, RequestRow, RunRecord, StoreHeader
from ddtree_ops.schemas.sweep import Sweep

FOLDER = Path(__file__).parent
PUBLISHED: dict[str, type[pydantic.BaseModel]] = {
    "acceptance.schema.json": AcceptanceSummary,
    "cluster.schema.json": Cluster,
    "images-lock.schema.json": ImagesLock,
    "sweep.schema.json": Sweep,
    "results-store.schema.json": StoreHeader,
    "results-run.schema.json": RunRecord,
    "results-cell.schema.json": CellRecord,
    "results-row.schema.json": RequestRow,
}


def json_schema(model: type[pydantic.BaseModel]) -> str:
    """The model's JSON Schema (draft 2020-12) as the text of its file."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **model.model_json_schema(by_alias=True),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    for name, model in PUBLISHED.items():
        (FOLDER / name).write_text(json_schema(model), encoding="utf-8")


if __name__ == "__main__":
    main()
