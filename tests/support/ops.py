"""What tests of the operator's side share: stand-in checkpoints, prompts, sweep files, and real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.results import CellSpec, RequestRow, RequestStatus

ROOT = Path(__file__).resolve().parents[2]
STUB = [sys.executable, str(ROOT / "tests" / "support" / "stub_server.py")]
DDTREE = [sys.executable, "-c", "from ddtree_ops.cli.app import main; main()"]


def write_checkpoint(folder: Path, content: bytes = b"weights") -> Path:
    """A folder that looks like a checkpoint to everything but an engine."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(content)
    return folder


def write_prompts(path: Path, count: int = 4) -> Path:
    lines = [json.dumps({"id": f"p{n}", "text": f"def f{n}(a, b):\n"}) for n in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def stub_sweep(folder: Path, *faults: str, prompts: int = 4, **changes: Any) -> Path:
    """A sweep.yaml over stub servers with these faults; `changes` are top-level keys."""
    write_checkpoint(folder / "target")
    write_checkpoint(folder / "drafter", b"draft")
    write_prompts(folder / "prompts.jsonl", prompts)
    command = [*STUB, *(word for fault in faults for word in ("--fault", fault))]
    sweep: dict[str, Any] = {
        "schema": 1,
        "name": "stub",
        "engine": {
            "kind": "local",
            "command": command,
            "model": "target",
            "drafter": "drafter",
            "allow_hybrid_unsafe": True,
        },
        "arms": ["ar", "ddtree"],
        "budgets": [7],
        "dataset": "prompts.jsonl",
        "max_tokens": 24,
        "start_timeout_s": 30,
    }
    engine = changes.pop("engine", {})
    sweep |= changes
    sweep["engine"] |= engine
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep), encoding="utf-8")
    return path


def start_ddtree(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """The console script as a process of its own."""
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.Popen(
        [*DDTREE, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def cell_spec(**changes: Any) -> CellSpec:
    fields: dict[str, Any] = {
        "arm": Arm.DDTREE,
        "budget": 31,
        "builder": Builder.BEST_FIRST,
        "topk": 16,
        "concurrency": 1,
        "temperature": 0.0,
        "max_tokens": 8,
        "ignore_eos": True,
        "prompts": 4,
        "repeats": 1,
        "warmup": 1,
        "seed": 0,
        "dataset_sha256": "d",
        "model_sha256": "m",
        "drafter_sha256": "f",
        "engine": "reference",
        "engine_version": "0.1.0",
        "dtype": "float32",
        "argv": ["--arm", "ddtree"],
        "host_fingerprint": "h",
    }
    return CellSpec(**{**fields, **changes})


def request_row(
    index: int = 0, output: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8), **changes: Any
) -> RequestRow:
    """A sound row of an arm with trees: eight tokens, one from the prefill, seven from three steps."""
    fields: dict[str, Any] = {
        "prompt_id": f"p{index}",
        "prompt_index": index,
        "repeat": 0,
        "round": index,
        "order": index,
        "sent_at": 1000.0 + index,
        "status": RequestStatus.OK,
        "completion_tokens": len(output),
        "output_ids": list(output),
        "e2e_s": 1.0,
        "ttft_s": 0.1,
        "chunk_s": [0.1, 0.4, 0.7, 1.0],
        "chunk_tokens": [1, 2, 2, 3],
        "verify_steps": 3,
        "accept_histogram": [0, 2, 1],
        "tree_steps": 3,
        "steps_below_spine": 0,
        "steps_scored": 3,
    }
    return RequestRow(**{**fields, **changes})
