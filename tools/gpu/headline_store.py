#!/usr/bin/env python3
"""A results store from the raw answers of results/h200-27b, so that `ddtree compare report` can show them.

    .venv/bin/python tools/gpu/headline_store.py results/h200-27b STORE [--beside ar]
    .venv/bin/ddtree compare report STORE --out results/h200-27b/report

A store holds what was asked in turns beside one linear arm, so that every cell has the same prompts. The plan
kept no time of sending; `sent_at` is its run's start. Budget `auto` is no budget of a store and is left out.
Only one request in flight: the latency is the server's own.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.ties import gap, is_near, noise
from headline_summary import Results, newest

from ddtree_ops import __version__
from ddtree_ops.bench.dataset import PAIR, load_dataset
from ddtree_ops.bench.store import Store
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.results import (
    CellRecord,
    CellSpec,
    CellState,
    Environment,
    Parity,
    ParityClass,
    ParityFinding,
    RequestRow,
    RequestStatus,
    RunRecord,
)
from ddtree_ops.services.checkpoints import checkpoint_sha256, pair_path

NAME = "27B-cost bed"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--beside", choices=("dflash", "ar"), default="dflash", help="the linear arm")
    options = parser.parse_args()
    write_store(newest(options.folder / "raw"), options.beside, options.store)
    return 0


def write_store(results: Results, linear: str, root: Path) -> None:
    """Seal a cell for the linear arm and every budget beside it."""
    facts = results["host"]["facts"]
    started = datetime.fromtimestamp(facts["time"], UTC).isoformat(timespec="milliseconds")
    run_id = f"{datetime.fromtimestamp(facts['time'], UTC):%Y%m%dT%H%M%SZ}-bed"
    cells = cells_of(results, linear)
    dataset = load_dataset(PAIR, max(row.prompt_index for rows in cells.values() for row in rows) + 1)
    store = Store.create_or_open(root, now=started)
    records = []
    for (arm, budget), rows in cells.items():
        spec = spec_of(arm, budget, rows, facts, dataset.sha256)
        record = CellRecord(
            key=spec.key(),
            spec=spec,
            run_id=run_id,
            state=CellState.COMPLETE,
            started=started,
            ended=started,
            requests=len(rows),
            failed_requests=0,
            rows_sha256="",
            parity=parity_of(results["ar"], arm, budget, len(rows)),
        )
        records.append(store.seal(record, rows, {}))
    card = facts["cards"][0]
    environment = Environment(
        ddtree_version=__version__,
        git_commit=None,
        python=facts["python"],
        platform="Linux",
        cpu="",
        cores=0,
        memory_gib=0.0,
        gpus=[{"name": card}],
        packages={name: version for name, version in facts["versions"].items() if version},
        host_fingerprint=fingerprint(facts),
    )
    record_run = RunRecord(
        run_id=run_id,
        name=NAME,
        started=started,
        ended=started,
        sweep={"name": NAME, "plan": "tools/gpu/headline_plan.py", "argv": facts["argv"]},
        environment=environment,
        cells=[record.key for record in records],
        dataset={"name": dataset.name, "sha256": dataset.sha256, "prompts": len(dataset.prompts)},
    )
    store.write_run(record_run)


def cells_of(results: Results, linear: str) -> dict[tuple[Arm, int | None], list[RequestRow]]:
    """(arm, budget) -> its rows, in the order of asking."""
    cells: dict[tuple[Arm, int | None], list[RequestRow]] = {}
    sent_at = results["host"]["facts"]["time"]
    rows = [row for row in results[linear]["in-flight-1"] if row["way"] != "auto"]
    for order, found in enumerate(rows):
        way, group = found["way"], found["group"]
        key = (Arm(linear), None) if way == "linear" else (Arm.DDTREE, int(way))
        cells.setdefault(key, []).append(
            RequestRow(
                prompt_id=f"prompts-{group:02d}",
                prompt_index=group,
                repeat=0,
                round=group,
                order=order,
                sent_at=sent_at,
                status=RequestStatus.OK,
                prompt_tokens=len(results["host"]["prompts"][group]),
                completion_tokens=found["tokens"],
                finish_reason="length",
                output_ids=found["output_ids"][0],
                e2e_s=found["seconds"],
                verify_steps=found["steps"] or None,
            )
        )
    return cells


def spec_of(
    arm: Arm, budget: int | None, rows: list[RequestRow], facts: dict[str, Any], dataset_sha256: str
) -> CellSpec:
    tree = arm is Arm.DDTREE
    pair = pair_path()
    return CellSpec(
        arm=arm,
        budget=budget,
        builder=Builder.BEST_FIRST if tree else None,
        topk=16 if tree else None,
        concurrency=1,
        temperature=0.0,
        max_tokens=max(row.completion_tokens for row in rows),
        ignore_eos=True,
        prompts=len(rows),
        repeats=1,
        warmup=1,
        seed=0,
        dataset_sha256=dataset_sha256,
        model_sha256=checkpoint_sha256(pair / "target"),
        drafter_sha256=None if arm is Arm.AR else checkpoint_sha256(pair / "drafter"),
        engine="sglang",
        engine_version=facts["versions"]["sglang"],
        dtype="bfloat16",
        argv=["27B-cost bed", *(["state: wy, widths: 16, 32, 64"] if tree else [])],
        host_fingerprint=fingerprint(facts),
    )


def parity_of(plain: dict[str, Any], arm: Arm, budget: int | None, prompts: int) -> list[Parity]:
    """Against plain decoding, where it was asked the same prompt."""
    if arm is Arm.AR:
        return []
    way = arm.value if budget is None else str(budget)
    measured = noise(plain["noise"]) or 0.0
    rows = [row for row in plain["differences"] if row["way"] == way]
    findings = list(findings_of(rows, measured))
    near = sum(finding.parity is ParityClass.NEAR_TIE for finding in findings)
    return [
        Parity(
            reference=Arm.AR,
            identical=len(rows) - len(findings),
            near_tie=near,
            different=len(findings) - near,
            unknown=prompts - len(rows),
            findings=findings,
        )
    ]


def findings_of(rows: list[dict[str, Any]], measured: float) -> Iterator[ParityFinding]:
    for row in rows:
        if row["place"] is None:
            continue
        yield ParityFinding(
            prompt_id=f"prompts-{row['group']:02d}",
            parity=ParityClass.NEAR_TIE if is_near(row, measured) else ParityClass.DIFFERENT,
            first_difference=row["place"],
            token=row["tokens"][1],
            reference_token=row["tokens"][0],
            gap=gap(row["best"], row["tokens"]),
            threshold=2 * measured,
        )


def fingerprint(facts: dict[str, Any]) -> str:
    return hashlib.sha256(str(facts["nvidia_smi"]).encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
