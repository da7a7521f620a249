#!/usr/bin/env python3
"""A results store from the raw answers of results/h200-27b, so that `ddtree compare report` can show them.

    .venv/bin/python tools/gpu/headline_store.py results/h200-27b STORE [--beside ar]
    .venv/bin/ddtree compare report STORE --out results/h200-27b/report

A store holds what was asked in turns beside one linear arm, so that every cell has the same prompts. The plan
kept no time of sending; `sent_at` is its run's start. Budget `auto` is no budget of a store and is left out.
Only one request in flight, and the pair's own prompts: the latency is the server's own. What the plan did not
look at (the processor, say) is not in the store, and the run says how it was made.
"""

from __future__ import annotations

import argparse
import hashlib
import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.parting import parting
from engine.ties import gap, is_near, noise
from headline_summary import Results, load, newest

from ddtree_ops import __version__
from ddtree_ops.bench.dataset import PAIR, load_dataset
from ddtree_ops.bench.store import Store
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.results import (
    CellRecord,
    CellSpec,
    CellState,
    Environment,
    Origin,
    Parity,
    ParityClass,
    ParityFinding,
    RequestRow,
    RequestStatus,
    RunRecord,
)
from ddtree_ops.services.checkpoints import checkpoint_sha256, pair_path

NAME = "27B-cost bed"
RAW = "results/h200-27b"
# What a report of these answers has to say before any figure.
WHOSE = (
    "Every accept length here is the small pair's, not that of Qwen3.6-27B and its drafter: the bed has the "
    "27B's shape and costs, and the small pair's weights inside. What carries over is how long a step takes."
)

NO_SAMPLES = "the plan kept no samples of the card"

Cells = dict[tuple[Arm, int | None, float], list[RequestRow]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--beside", choices=("dflash", "ar"), default="dflash", help="the linear arm")
    options = parser.parse_args()
    write_store(answers(options.folder / "raw", options.beside), options.beside, options.store)
    return 0


def answers(raw: Path, linear: str) -> Results:
    """The newest answers, with the host that the linear arm's come from."""
    runs = [run for run in map(load, raw.iterdir()) if run.get(linear, {}).get("in-flight-1")]
    host = max((run["host"] for run in runs), key=lambda host: host["facts"]["time"])
    return newest(raw) | {"host": host}


def write_store(results: Results, linear: str, root: Path) -> None:
    """Seal a cell for the linear arm and every budget beside it."""
    facts = results["host"]["facts"]
    started = datetime.fromtimestamp(facts["time"], UTC).isoformat(timespec="milliseconds")
    run_id = f"{datetime.fromtimestamp(facts['time'], UTC):%Y%m%dT%H%M%SZ}-bed"
    cells = cells_of(results, linear)
    dataset = load_dataset(PAIR, max(row.prompt_index for rows in cells.values() for row in rows) + 1)
    store = Store.create_or_open(root, now=started)
    records = []
    for (arm, budget, temperature), rows in cells.items():
        spec = spec_of(arm, budget, temperature, rows, facts, dataset.sha256)
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
            parity=[] if temperature else parity_of(results["ar"], arm, rows),
            cards_missing=NO_SAMPLES,
        )
        records.append(store.seal(record, rows, {}))
    record_run = RunRecord(
        run_id=run_id,
        name=NAME,
        started=started,
        ended=started,
        sweep={"name": NAME, "plan": "tools/gpu/headline_plan.py", "argv": shlex.join(facts["argv"])},
        environment=environment_of(facts),
        cells=[record.key for record in records],
        dataset={"name": dataset.name, "sha256": dataset.sha256, "prompts": len(dataset.prompts)},
        origin=origin_of(facts, linear),
    )
    store.write_run(record_run)


def environment_of(facts: dict[str, Any]) -> Environment:
    """What the plan saw of its host; it did not look at the processor."""
    return Environment(
        ddtree_version=facts["versions"]["ddtree"] or __version__,
        git_commit=None,
        python=facts["python"],
        platform="Linux",
        gpus=cards_of(facts["nvidia_smi"]),
        packages={name: version for name, version in facts["versions"].items() if version},
        host_fingerprint=fingerprint(facts),
    )


def cards_of(table: str) -> list[dict[str, Any]]:
    """The rows of nvidia-smi's CSV by its column names, whose units the values carry as well."""
    names, *rows = ([cell.strip() for cell in line.split(",")] for line in table.strip().splitlines())
    columns = [name.partition(" [")[0] for name in names]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def origin_of(facts: dict[str, Any], linear: str) -> Origin:
    return Origin(
        how=f"A plan for a GPU host started {linear} and DDTREE with several widths as two servers on one "
        f"card, asked both every prompt in turns and kept the answers in {RAW}/raw; this store was made of "
        "those. Seconds are the servers' own. Several requests at once, budget auto and long prompts are in "
        f"{RAW}/summary.json only.",
        commands=[
            f"python3 tools/gpu/headline_plan.py {shlex.join(facts['argv'])}",
            f"python tools/gpu/headline_summary.py {RAW} RUN=OUT/headline.tar.xz",
            f"python tools/gpu/headline_store.py {RAW} STORE --beside {linear}",
            f"ddtree compare report STORE --out {RAW}/report --title '{NAME}, beside {linear}'",
        ],
        notes=[WHOSE],
    )


def cells_of(results: Results, linear: str) -> Cells:
    """(arm, budget, temperature) -> its rows, as asked; the linear arm first, then by budget."""
    cells: Cells = {}
    sent_at = results["host"]["facts"]["time"]
    for workload, temperature in workloads(results[linear]):
        for order, found in enumerate(results[linear][workload]):
            way, group = found["way"], found["group"]
            if way != "linear" and not way.isdigit():
                continue
            arm, budget = (Arm(linear), None) if way == "linear" else (Arm.DDTREE, int(way))
            row = RequestRow(
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
            cells.setdefault((arm, budget, temperature), []).append(row)
    return dict(sorted(cells.items(), key=lambda cell: (cell[0][2], cell[0][1] or 0)))


def workloads(asked: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """One request in flight with the pair's own prompts: what it is called, and its temperature."""
    for workload, rows in asked.items():
        rest = workload.removeprefix("in-flight-1")
        if rest != workload and rows and (not rest or rest.startswith("-t")):
            yield workload, float(rest.removeprefix("-t") or 0)


def spec_of(
    arm: Arm,
    budget: int | None,
    temperature: float,
    rows: list[RequestRow],
    facts: dict[str, Any],
    dataset_sha256: str,
) -> CellSpec:
    tree = arm is Arm.DDTREE
    pair = pair_path()
    return CellSpec(
        arm=arm,
        budget=budget,
        builder=Builder.BEST_FIRST if tree else None,
        topk=16 if tree else None,
        concurrency=1,
        temperature=temperature,
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
        argv=[NAME, *(["state: wy"] if tree else [])],
        host_fingerprint=fingerprint(facts),
    )


def parity_of(plain: dict[str, Any], arm: Arm, rows: list[RequestRow]) -> list[Parity]:
    """Against plain decoding, where it was asked the same prompt; others are unknown."""
    if arm is Arm.AR:
        return []
    truths = {row["group"]: row["output_ids"][0] for row in plain["in-flight-1"] if row["way"] == "linear"}
    asked = [row for row in rows if row.prompt_index in truths]
    findings = list(findings_of(plain, {row.prompt_index: row for row in asked}, truths))
    counts = {kind: sum(finding.parity is kind for finding in findings) for kind in ParityClass}
    return [
        Parity(
            reference=Arm.AR,
            identical=len(asked) - len(findings),
            near_tie=counts[ParityClass.NEAR_TIE],
            different=counts[ParityClass.DIFFERENT],
            unknown=len(rows) - len(asked) + counts[ParityClass.UNKNOWN],
            findings=findings,
        )
    ]


def findings_of(
    plain: dict[str, Any], rows: dict[int, RequestRow], truths: dict[int, list[int]]
) -> Iterator[ParityFinding]:
    """The answers that part from plain decoding's, with what the target said of that very place and pair."""
    measured = noise(plain["noise"]) or 0.0
    judged = {
        (row["group"], row["place"], *row["tokens"]): row
        for row in plain["differences"]
        if row["place"] is not None
    }
    for group, row in rows.items():
        truth = truths[group]
        place = parting(truth, row.output_ids)
        if place is None:
            continue
        tokens = truth[place], row.output_ids[place]
        question = judged.get((group, place, *tokens))
        parity = ParityClass.UNKNOWN
        if question is not None:
            parity = ParityClass.NEAR_TIE if is_near(question, measured) else ParityClass.DIFFERENT
        yield ParityFinding(
            prompt_id=row.prompt_id,
            parity=parity,
            first_difference=place,
            token=tokens[1],
            reference_token=tokens[0],
            gap=None if question is None else gap(question["best"], question["tokens"]),
            threshold=2 * measured,
        )


def fingerprint(facts: dict[str, Any]) -> str:
    return hashlib.sha256(str(facts["nvidia_smi"]).encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
