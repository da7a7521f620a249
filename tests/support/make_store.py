"""A results store without an engine: seeded requests from a simple model of tree acceptance.

A step of the chain accepts drafts until the first miss; the chance of a hit differs from prompt to prompt
and falls with depth. A tree of B nodes has a higher chance, growing with log B. Times follow from steps: a
pass costs a fixed time and a little for each node, with log-normal noise of the request and of the moment
(shared by the arms of a round, as interleaving makes it). Everything is written through the schemas.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.results import (
    CellRecord,
    CellRotation,
    CellSpec,
    CellState,
    Environment,
    Gate,
    GateStatus,
    Parity,
    ParityClass,
    ParityFinding,
    RequestRow,
    RequestStatus,
    RunRecord,
    StageSeconds,
    StoreHeader,
)

BLOCK = 16
CellName = tuple[str, int | None]
START = 1_780_000_000.0


@dataclass(frozen=True)
class StorePlan:
    """What to make. Arms without budgets get one cell, the others one for each budget."""

    arms: Sequence[str] = ("ar", "dflash", "shadow", "ddtree", "unsafe")
    budgets: Sequence[int] = (7, 15, 31, 63)
    unsafe_budgets: Sequence[int] = (31,)
    prompts: int = 10
    repeats: int = 1
    concurrencies: Sequence[int] = (1,)
    temperatures: Sequence[float] = (0.0,)
    max_tokens: int = 96
    builder: str = "best-first"
    seed: int = 0
    engine: str = "reference"
    engine_version: str = "0.1.0"
    host: str = "host-a"
    pass_ms: float = 9.0
    node_ms: float = 0.25
    gain: float = 1.0
    noise: float = 0.05
    failed: Mapping[CellName, str] = field(default_factory=dict)
    invalid: Mapping[CellName, str] = field(default_factory=dict)
    unsealed: Sequence[CellName] = ()
    near_ties: Mapping[CellName, int] = field(default_factory=dict)
    different: Mapping[CellName, int] = field(default_factory=dict)
    #: Prompts, the last ones, that the reference was never asked.
    unasked: Mapping[CellName, int] = field(default_factory=dict)
    idle_kernels: Sequence[CellName] = ()
    below_spine: Sequence[CellName] = ()
    #: Starts of every service, one for each repeat; each is faster or slower by `start_noise` as a whole.
    positions: int = 1
    start_noise: float = 0.0
    run_id: str = "20260101-000000-test"


def make_store(path: Path, plan: StorePlan | None = None, **changes: Any) -> Path:
    """Write a store with one run and return its folder. ``changes`` override fields of the plan."""
    plan = replace(plan or StorePlan(), **changes)
    if plan.positions > 1:
        plan = replace(plan, repeats=plan.positions)
    path.mkdir(parents=True, exist_ok=True)
    if not (path / "store.json").exists():
        header = StoreHeader(created="2026-01-01T00:00:00Z", ddtree_version="0.1.0")
        _write(path / "store.json", header.model_dump(mode="json"))
    keys, seconds = [], 0.0
    for concurrency in plan.concurrencies:
        for temperature in plan.temperatures:
            for name in cell_names(plan):
                spec = _spec(plan, name, concurrency, temperature)
                keys.append(spec.key())
                if name in plan.unsealed:
                    continue
                rows = _rows(plan, spec)
                seconds += sum(row.e2e_s or 0 for row in rows)
                _seal(path, plan, spec, rows)
    run = RunRecord(
        run_id=plan.run_id,
        name="laptop",
        started="2026-01-01T00:00:00Z",
        ended="2026-01-01T00:02:00Z",
        seconds=round(seconds, 3),
        sweep={"schema": 1, "name": "laptop", "prompts": plan.prompts, "max_tokens": plan.max_tokens},
        environment=_environment(plan),
        cells=keys,
        dataset={"name": "pair", "sha256": "d" * 64, "prompts": plan.prompts},
    )
    folder = path / "runs" / plan.run_id
    folder.mkdir(parents=True)
    _write(folder / "run.json", run.model_dump(mode="json"))
    return path


def cell_names(plan: StorePlan) -> list[CellName]:
    names: list[CellName] = []
    for arm in plan.arms:
        if arm in {"ar", "dflash"}:
            names.append((arm, None))
        else:
            names += [(arm, b) for b in (plan.unsafe_budgets if arm == "unsafe" else plan.budgets)]
    return names


def truth(plan: StorePlan, prompt: int) -> list[int]:
    """The target's greedy continuation of a prompt."""
    return [int(token) for token in _rng(plan, "truth", prompt).integers(5, 8000, plan.max_tokens)]


def _spec(plan: StorePlan, name: CellName, concurrency: int, temperature: float) -> CellSpec:
    arm, budget = Arm(name[0]), name[1]
    return CellSpec(
        arm=arm,
        budget=budget,
        builder=Builder(plan.builder) if arm.takes_budget else None,
        topk=16 if arm.takes_budget else None,
        concurrency=concurrency,
        temperature=temperature,
        max_tokens=plan.max_tokens,
        ignore_eos=True,
        prompts=plan.prompts,
        repeats=plan.repeats,
        warmup=1,
        seed=plan.seed,
        dataset_sha256="d" * 64,
        model_sha256="a" * 64,
        drafter_sha256=None if arm is Arm.AR else "b" * 64,
        engine=plan.engine,
        engine_version=plan.engine_version,
        dtype="float32",
        argv=["--arm", arm.value, *([] if budget is None else ["--budget", str(budget)])],
        host_fingerprint=plan.host,
        rotation=CellRotation(positions=plan.positions, places=_places(plan)) if plan.positions > 1 else None,
    )


def _places(plan: StorePlan) -> list[str]:
    return [f"{plan.host}/GPU-{number:08x}-0000" for number in range(plan.positions)]


def _rows(plan: StorePlan, spec: CellSpec) -> list[RequestRow]:
    rows = []
    for repeat in range(plan.repeats):
        for prompt in range(plan.prompts):
            rows.append(_row(plan, spec, prompt, repeat, len(rows)))
    name = (spec.arm.value, spec.budget)
    if name in plan.failed:
        for index in range(0, len(rows), 4):
            rows[index] = _failed(rows[index], plan.failed[name])
    return rows


def _row(plan: StorePlan, spec: CellSpec, prompt: int, repeat: int, order: int) -> RequestRow:
    name: CellName = (spec.arm.value, spec.budget)
    output = _output(plan, name, prompt)
    rng = _rng(plan, name, prompt, repeat, spec.concurrency, spec.temperature)
    steps, chunks = _steps(plan, name, prompt)
    stages, ttft, e2e, arrivals = _times(plan, spec, prompt, repeat, chunks, rng)
    speculative = spec.arm is not Arm.AR
    tree = spec.arm in {Arm.DDTREE, Arm.UNSAFE}
    histogram = np.bincount(steps, minlength=BLOCK).tolist() if speculative else []
    shadow = _steps(plan, ("ddtree", spec.budget), prompt)[0] if spec.arm is Arm.SHADOW else []
    shadow_histogram = np.bincount([_upper(x, i) for i, x in enumerate(shadow)], minlength=BLOCK).tolist()
    return RequestRow(
        prompt_id=f"p{prompt:03d}",
        prompt_index=prompt,
        repeat=repeat,
        round=repeat * plan.prompts + prompt,
        order=order,
        position=repeat if plan.positions > 1 else 0,
        place=_places(plan)[repeat] if plan.positions > 1 else None,
        sent_at=START + order,
        status=RequestStatus.OK,
        prompt_tokens=200 + prompt,
        completion_tokens=len(output),
        finish_reason="length",
        output_ids=output,
        ttft_s=ttft,
        e2e_s=e2e,
        chunk_s=arrivals,
        chunk_tokens=chunks,
        verify_steps=len(steps) if speculative else None,
        correct_drafts=int(sum(steps)) if speculative else None,
        proposed_drafts=len(steps) * (BLOCK - 1) if speculative else None,
        accept_histogram=histogram,
        stages=stages,
        tree_nodes=len(steps) * ((spec.budget or 0) + 1) if tree else None,
        tree_steps=(0 if name in plan.idle_kernels else len(steps)) if tree else None,
        steps_below_spine=_below_spine(plan, name, len(steps)) if tree else None,
        steps_scored=len(steps) if tree else None,
        spine_accept_length=_spine(plan, prompt) if tree else None,
        shadow_accept_length=_mean(shadow_histogram) if shadow else None,
        shadow_histogram=shadow_histogram if shadow else [],
        loop=spec.arm is Arm.UNSAFE and prompt % 3 == 0,
    )


def _below_spine(plan: StorePlan, name: CellName, steps: int) -> int:
    if name in plan.below_spine:
        return 1
    return 0 if plan.builder == "spine-first" else steps // 20


def _steps(plan: StorePlan, name: CellName, prompt: int) -> tuple[list[int], list[int]]:
    """Accepted drafts of each step, and the tokens of each chunk (the first comes from the prefill)."""
    arm, budget = name
    if arm == "ar":
        return [0] * (plan.max_tokens - 1), [1] * plan.max_tokens
    hit = float(_rng(plan, "difficulty", prompt).beta(8, 7))
    tree = arm in {"ddtree", "unsafe"}
    if tree:
        hit = 1 - (1 - hit) * 0.925 ** (plan.gain * math.log2((budget or 0) + 1))
    if arm == "unsafe":
        hit *= 0.75
    rng = _rng(plan, "steps", "dflash" if not tree else f"{arm}{budget}", prompt)
    left, steps, chunks = plan.max_tokens - 1, [], [1]
    while left > 0:
        accepted = 0
        while accepted < min(BLOCK - 1, left - 1) and rng.random() < hit * 0.985**accepted:
            accepted += 1
        steps.append(accepted)
        chunks.append(accepted + 1)
        left -= accepted + 1
    return steps, chunks


def _times(
    plan: StorePlan, spec: CellSpec, prompt: int, repeat: int, chunks: list[int], rng: np.random.Generator
) -> tuple[StageSeconds, float, float, list[float]]:
    moment = _rng(plan, "moment", prompt, repeat).lognormal(0, plan.noise)
    width = (
        1 if spec.arm is Arm.AR else BLOCK if spec.arm in {Arm.DFLASH, Arm.SHADOW} else (spec.budget or 0) + 1
    )
    slow = 1 + 0.15 * (spec.concurrency - 1)
    verify = (plan.pass_ms + plan.node_ms * width) / 1e3 * slow
    draft = 0.0 if spec.arm is Arm.AR else 0.0035 * slow
    build = (0.0004 + 0.00001 * (spec.budget or 0)) if spec.arm.takes_budget else 0.0
    commit = 0.0009 if spec.arm in {Arm.DDTREE, Arm.UNSAFE} else 0.0002
    factor = moment * rng.lognormal(0, plan.noise / 2)
    if plan.start_noise:
        factor *= _rng(plan, "start", spec.arm.value, spec.budget, repeat).lognormal(0, plan.start_noise)
    ttft = 0.04 * factor * slow
    gaps = (draft + verify + build + commit) * factor * rng.lognormal(0, plan.noise, len(chunks) - 1)
    arrivals = [float(x) for x in np.concatenate([[ttft], ttft + np.cumsum(gaps)])]
    steps = len(chunks) - 1
    seconds = {"draft": draft, "build": build, "verify": verify, "commit": commit}
    stages = StageSeconds(**{stage: value * factor * steps for stage, value in seconds.items()})
    return stages, float(ttft), arrivals[-1] + 0.001, arrivals


def _output(plan: StorePlan, name: CellName, prompt: int) -> list[int]:
    output = truth(plan, prompt)
    if name[0] == "unsafe" or prompt < plan.different.get(name, 0) + plan.near_ties.get(name, 0):
        at = _first_difference(plan, name, prompt)
        other = _rng(plan, "wrong", name, prompt).integers(8000, 8192, plan.max_tokens - at)
        return output[:at] + [int(token) for token in other]
    return output


def _first_difference(plan: StorePlan, name: CellName, prompt: int) -> int:
    return min(int(_rng(plan, "at", name, prompt).geometric(0.06)), plan.max_tokens - 2)


def _parity(plan: StorePlan, spec: CellSpec, reference: Arm) -> Parity:
    name: CellName = (spec.arm.value, spec.budget)
    findings = []
    compared = plan.prompts - plan.unasked.get(name, 0)
    for prompt in range(compared):
        ours, theirs = _output(plan, name, prompt), truth(plan, prompt)
        if ours == theirs:
            continue
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        near = name[0] != "unsafe" and prompt >= plan.different.get(name, 0)
        findings.append(
            ParityFinding(
                prompt_id=f"p{prompt:03d}",
                parity=ParityClass.NEAR_TIE if near else ParityClass.DIFFERENT,
                first_difference=at,
                token=ours[at],
                reference_token=theirs[at],
                gap=3e-5 if near else 1.7 + prompt / 10,
                threshold=1e-4,
            )
        )
    near_ties = sum(item.parity is ParityClass.NEAR_TIE for item in findings)
    return Parity(
        reference=reference,
        identical=compared - len(findings),
        near_tie=near_ties,
        different=len(findings) - near_ties,
        unknown=plan.prompts - compared,
        findings=findings,
    )


def _seal(path: Path, plan: StorePlan, spec: CellSpec, rows: list[RequestRow]) -> None:
    name: CellName = (spec.arm.value, spec.budget)
    folder = path / "cells" / spec.key()[:16]
    if folder.exists():
        return
    folder.mkdir(parents=True)
    raw = "".join(row.model_dump_json() + "\n" for row in rows).encode()
    (folder / "rows.jsonl").write_bytes(raw)
    state, reason = CellState.COMPLETE, None
    if name in plan.failed:
        state, reason = CellState.FAILED, plan.failed[name]
    if name in plan.invalid:
        state, reason = CellState.INVALID, plan.invalid[name]
    references = [Arm(arm) for arm in ("ar", "dflash") if arm in plan.arms and arm != spec.arm.value]
    if spec.arm is Arm.AR or spec.temperature > 0:
        references = []
    record = CellRecord(
        key=spec.key(),
        spec=spec,
        run_id=plan.run_id,
        state=state,
        reason=reason,
        started="2026-01-01T00:00:00Z",
        ended="2026-01-01T00:01:00Z",
        requests=len(rows),
        failed_requests=sum(row.status is RequestStatus.FAILED for row in rows),
        rows_sha256=hashlib.sha256(raw).hexdigest(),
        parity=[_parity(plan, spec, reference) for reference in references],
        gates=_gates(spec, rows),
        server={"version": plan.engine_version},
    )
    _write(folder / "cell.json", record.model_dump(mode="json"))


def _gates(spec: CellSpec, rows: list[RequestRow]) -> list[Gate]:
    loops = sum(row.loop for row in rows)
    gates = [
        Gate(id="loops", status=GateStatus.FAIL if loops else GateStatus.PASS, value=loops, limit=0),
        Gate(id="empty", status=GateStatus.PASS, value=0, limit=0),
    ]
    if spec.arm in {Arm.DDTREE, Arm.UNSAFE}:
        below = sum(row.steps_below_spine or 0 for row in rows)
        strict = spec.builder is Builder.SPINE_FIRST and (spec.budget or 0) >= BLOCK - 1
        status = (GateStatus.FAIL if below else GateStatus.PASS) if strict else GateStatus.FIGURE
        gates.append(Gate(id="steps-below-spine", status=status, value=below))
    return gates


def _failed(row: RequestRow, error: str) -> RequestRow:
    """A request that broke off half way: it has tokens, steps and seconds, and none of them may count."""
    half = len(row.output_ids) // 2
    changes = {
        "status": RequestStatus.FAILED,
        "error": error,
        "finish_reason": None,
        "completion_tokens": half,
        "output_ids": row.output_ids[:half],
        "e2e_s": (row.e2e_s or 0) * 5,
    }
    return row.model_copy(update=changes)


def _environment(plan: StorePlan) -> Environment:
    return Environment(
        ddtree_version="0.1.0",
        git_commit="0123456789abcdef0123456789abcdef01234567",
        python="3.11.7",
        platform="Linux-6.1-x86_64",
        cpu="Example CPU 2.4 GHz",
        cores=2,
        memory_gib=24.0,
        packages={"torch": "2.13.0", "numpy": "2.4.6"},
        host_fingerprint=plan.host,
    )


def _upper(accepted: int, index: int) -> int:
    """The chain's anchors flatter a tree a little."""
    return min(accepted + (index % 9 == 0), BLOCK - 1)


def _spine(plan: StorePlan, prompt: int) -> float:
    steps = _steps(plan, ("dflash", None), prompt)[0]
    return sum(step + 1 for step in steps) / len(steps)


def _mean(histogram: list[int]) -> float:
    return sum((drafts + 1) * count for drafts, count in enumerate(histogram)) / sum(histogram)


def _rng(plan: StorePlan, *names: object) -> np.random.Generator:
    digest = hashlib.sha256(repr((plan.seed, names)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def _write(file: Path, data: dict[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
