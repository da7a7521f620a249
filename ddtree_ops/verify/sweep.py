"""The short sweep over the services that are examined, into a store that is fit to be shown."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import HttpUrl

from ddtree_ops.bench.dataset import Dataset
from ddtree_ops.bench.plan import Plan, cell_name, make_plan
from ddtree_ops.bench.runner import SweepOutcome, run_sweep
from ddtree_ops.bench.store import KEY_CHARS, Store
from ddtree_ops.errors import BadEnvironment, BadInput, Interrupted, JobFailed
from ddtree_ops.output import Output
from ddtree_ops.schemas.acceptance import StageStatus, SweepResult
from ddtree_ops.schemas.arms import BUDGETS, Arm
from ddtree_ops.schemas.results import CellRecord, Environment, RunRecord
from ddtree_ops.schemas.sweep import ArmChoice, ExternalEngine, ExternalService, Sweep
from ddtree_ops.services.base import ServiceSpec
from ddtree_ops.services.discover import describe_service
from ddtree_ops.services.external import ExternalLauncher
from ddtree_ops.verify.scrub import Scrubber
from ddtree_ops.verify.subjects import Subject

NAME = "acceptance"
#: They answered a moment ago.
START_TIMEOUT_S = 20.0
#: Where requests carry their budget, these are measured.
LADDER = (15, 31, 63)


def short_sweep(
    subjects: Sequence[Subject],
    dataset: Dataset,
    environment: Environment,
    store: Path,
    scrub: Scrubber,
    out: Output,
    *,
    max_tokens: int,
    timeout_s: float,
) -> SweepResult:
    """Measure and seal. What goes wrong with it is in the result; only Ctrl-C and a full disk are raised."""
    try:
        plan = sweep_plan(subjects, dataset, environment, scrub, max_tokens=max_tokens, timeout_s=timeout_s)
        opened = Store.create_or_open(store, now=datetime.now(UTC).isoformat(timespec="seconds"))
        outcome = run_sweep(
            plan, opened, lambda run_id: ExternalLauncher(), environment, out, retry_failed=True
        )
    except Interrupted:
        raise
    except (JobFailed, BadInput, BadEnvironment) as error:
        return SweepResult(status=StageStatus.FAILED, reason=error.message)
    return _result(outcome)


def sweep_plan(
    subjects: Sequence[Subject],
    dataset: Dataset,
    environment: Environment,
    scrub: Scrubber,
    *,
    max_tokens: int,
    timeout_s: float,
) -> Plan:
    """One service for each arm and budget; a second replica of the same would measure the same."""
    chosen: dict[tuple[Arm, int | None], Subject] = {}
    for subject in subjects:
        if subject.arm.lossless:
            chosen.setdefault((subject.arm, subject.budget), subject)
    services = [_service(subject, scrub) for subject in chosen.values()]
    entries = [
        ExternalService(arm=one.arm, budget=one.budget, url=HttpUrl(one.url)) for one in chosen.values()
    ]
    sweep = Sweep(
        name=NAME,
        engine=ExternalEngine(kind="external", services=entries),
        arms=_choices(list(chosen.values())),
        dataset=dataset.name,
        prompts=len(dataset.prompts),
        max_tokens=max_tokens,
        request_timeout_s=timeout_s,
        start_timeout_s=START_TIMEOUT_S,
    )
    return make_plan(sweep, dataset, services, host_fingerprint=environment.host_fingerprint)


def _choices(subjects: Sequence[Subject]) -> list[ArmChoice]:
    choices = []
    for arm in dict.fromkeys(subject.arm for subject in subjects):
        budgets = [one.budget for one in subjects if one.arm is arm and one.budget is not None]
        if not arm.takes_budget:
            choices.append(ArmChoice(arm=arm))
        elif any(one.per_request for one in subjects if one.arm is arm):
            choices.append(ArmChoice(arm=arm, budgets=list(LADDER)))
        else:
            choices.append(ArmChoice(arm=arm, budgets=budgets))
    return choices


def _service(subject: Subject, scrub: Scrubber) -> ServiceSpec:
    """As a sweep sees it, with an identity that may be shown: it becomes part of the cells' keys."""
    if subject.budget is not None and subject.budget not in BUDGETS:
        raise BadInput(f"{subject.name}: budget {subject.budget} is none that a sweep measures")
    entry = ExternalService(arm=subject.arm, budget=subject.budget, url=HttpUrl(subject.url))
    spec = describe_service(entry, subject.info)
    identity = replace(
        spec.identity,
        model_sha256=_without_path(spec.identity.model_sha256),
        drafter_sha256=spec.identity.drafter_sha256 and _without_path(spec.identity.drafter_sha256),
        argv=tuple(scrub.text(word) for word in spec.identity.argv),
    )
    return replace(spec, identity=identity, headers=subject.address.headers)


def _without_path(name: str) -> str:
    """`path:/home/...` where a server has no hash: a path that is told apart, and not told."""
    if not name.startswith("path:"):
        return name
    return f"path-sha256:{hashlib.sha256(name.encode()).hexdigest()}"


def _result(outcome: SweepOutcome) -> SweepResult:
    cells = {cell_name(cell.spec): cell.state.value for cell in outcome.cells}
    bad = [f"{cell_name(cell.spec)}: {cell.reason}" for cell in outcome.bad]
    bad += [f"{name}: not run" for name in outcome.not_run]
    return SweepResult(
        status=StageStatus.FAILED if bad else StageStatus.DONE,
        reason="; ".join(bad) or None,
        run_id=outcome.run.run_id,
        seconds=outcome.run.seconds,
        cells=cells,
    )


def copy_store(source: Path, target: Path, run_id: str, scrub: Scrubber) -> None:
    """One run of a store with its cells, scrubbed; logs, other runs and leftovers stay behind."""
    run = _read(source / "runs" / run_id / "run.json")
    record = RunRecord.model_validate({**run, "sweep": scrub.data(run["sweep"])})
    clean = RunRecord.model_validate(scrub.data(record.model_dump(mode="json")))
    _write(target / "store.json", _read(source / "store.json"))
    _write(target / "runs" / run_id / "run.json", clean.model_dump(mode="json"))
    for key in record.cells:
        folder = source / "cells" / key[:KEY_CHARS]
        if folder.is_dir():
            _copy_cell(folder, target / "cells" / key[:KEY_CHARS], scrub)


def _copy_cell(source: Path, target: Path, scrub: Scrubber) -> None:
    """Rows are hashed anew: an error message in them may have lost an address."""
    lines = (source / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    rows = "".join(json.dumps(scrub.data(json.loads(line))) + "\n" for line in lines).encode()
    target.mkdir(parents=True)
    (target / "rows.jsonl").write_bytes(rows)
    cell = _read(source / "cell.json")
    # The spec is what the key was made of, and was scrubbed before it was.
    clean = {name: value if name in {"spec", "key"} else scrub.data(value) for name, value in cell.items()}
    clean["rows_sha256"] = hashlib.sha256(rows).hexdigest()
    _write(target / "cell.json", CellRecord.model_validate(clean).model_dump(mode="json"))


def _read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def _write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
