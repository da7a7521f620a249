"""What the report's template needs, as text: tables of formatted cells and the facts of the run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ddtree_ops.compare.ablation import Leak, ShadowBias, leaks, shadow_biases
from ddtree_ops.compare.analysis import SEED, Analysis
from ddtree_ops.compare.card_view import cards_notes, cards_table
from ddtree_ops.compare.checks import Check
from ddtree_ops.compare.floor import Floor
from ddtree_ops.compare.frames import by_position
from ddtree_ops.compare.headline import CPU_NOTE, headline
from ddtree_ops.compare.load import Load
from ddtree_ops.compare.measures import STAGES, Measures, Quantiles
from ddtree_ops.compare.parity import prompts_of
from ddtree_ops.compare.statistics import Interval
from ddtree_ops.compare.table import DASH, Table
from ddtree_ops.compare.verdicts import BASELINES, Answer, BestBudget, Metric, Verdict
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import CellSpec, Environment, Gate, GateStatus, ParityFinding
from ddtree_ops.services.rotation import short_place

CHECK_TEXTS = {
    "all_cells_complete": "Every planned cell is sealed and complete",
    "shadow_equals_dflash": "shadow's output is dflash's, token for token",
    "dflash_equals_ar": "dflash's greedy output is ar's, counted near-ties apart",
    "ddtree_equals_ar": "ddtree's greedy output is ar's, counted near-ties apart",
    "spine_first_steps_below_spine_zero": "With spine-first trees no step accepts less than its top-1 chain",
    "unsafe_fails_parity": "unsafe, whose states leak, is caught by the parity check",
    "tree_kernels_ran": "The forked tree path ran: its counter moved on every ddtree request",
    "greedy_output_stable": "Greedy output in float32 is the same in every repeat",
}

ANSWER_MARKS = {Answer.FASTER: "▲", Answer.SLOWER: "▼", Answer.CANT_TELL: "≈", Answer.NO_VERDICT: "○"}


@dataclass(frozen=True)
class Chip:
    """An answer as shown: a mark and a word, so that colour is never the only sign."""

    kind: str
    mark: str
    word: str


@dataclass(frozen=True)
class VerdictRow:
    label: str
    figures: tuple[tuple[Chip, str], ...]
    prompts: str
    reason: str


@dataclass(frozen=True)
class LoadView:
    """Everything of one load point."""

    name: str
    anchor: str
    verdicts: dict[str, list[VerdictRow]]
    best: tuple[str, ...]
    floors: Table | None
    cells: Table
    quality: Table
    findings: Table | None
    shadow: Table | None
    stages: Table | None
    latency: Table | None
    positions: Table | None
    cards: Table | None
    cards_notes: tuple[str, ...]
    unsafe: Table | None
    gates: Table | None


def build_view(analysis: Analysis, title: str | None) -> dict[str, Any]:
    """The template's variables, pictures apart."""
    run = analysis.results.run
    return {
        "title": title or "ddtree comparison report",
        "headline": headline(analysis),
        "cpu_note": CPU_NOTE if analysis.on_cpu_engine else None,
        "facts": _facts(analysis),
        "loads": [_load(analysis, load) for load in analysis.results.loads()],
        "checks": _checks(analysis.checks),
        "troubles": _troubles(analysis),
        "environment": _environment(analysis),
        "origin": run.origin,
        "sweep_yaml": yaml.safe_dump(run.sweep, sort_keys=False, allow_unicode=True),
        "services": _services(analysis),
        "seed": SEED,
        "positions": min(item.cell.spec.positions for item in analysis.measures),
        "side_by_side": any(item.cell.spec.beside for item in analysis.measures),
    }


def _load(analysis: Analysis, load: Load) -> LoadView:
    here = [item for item in analysis.measures if item.cell.load == load]
    names = {id(item.cell) for item in here}
    verdicts = [verdict for verdict in analysis.verdicts if id(verdict.cell) in names]
    leaky = leaks(here, seed=SEED)
    biases = shadow_biases(here, seed=SEED)
    return LoadView(
        name=str(load),
        anchor=f"c{load.concurrency}-t{load.temperature:g}".replace(".", "_"),
        verdicts={arm.value: rows for arm in BASELINES if (rows := _verdict_rows(verdicts, arm))},
        best=tuple(_best_text(best) for best in analysis.best if best.load == load),
        floors=_floors_table([floor for floor in analysis.floors if floor.cell.load == load]),
        cells=_cells_table(here),
        quality=_quality_table(here),
        findings=_findings_table(here),
        shadow=_shadow_table(biases) if biases else None,
        stages=_stage_table(here),
        latency=_latency_table(here),
        positions=_positions_table(here),
        cards=cards_table(here),
        cards_notes=tuple(cards_notes(here)),
        unsafe=_unsafe_table(leaky) if leaky else None,
        gates=_gates_table(here),
    )


def _verdict_rows(verdicts: Sequence[Verdict], baseline: Arm) -> list[VerdictRow]:
    """The two metrics of a cell share a row."""
    grouped: dict[int, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.baseline is baseline:
            grouped.setdefault(id(verdict.cell), []).append(verdict)
    rows = []
    for group in grouped.values():
        by_metric = {verdict.metric: verdict for verdict in group}
        figures = tuple((_chip(by_metric[metric]), interval(by_metric[metric].ratio)) for metric in Metric)
        ratio = by_metric[Metric.ACCEPT_LENGTH].ratio
        prompts = str(ratio.n) if ratio else DASH
        rows.append(VerdictRow(group[0].cell.label, figures, prompts, _reasons(by_metric)))
    return rows


def _chip(verdict: Verdict) -> Chip:
    kinds = {Answer.FASTER: "up", Answer.SLOWER: "down", Answer.CANT_TELL: "even", Answer.NO_VERDICT: "none"}
    answer = verdict.answer
    return Chip(kinds[answer], ANSWER_MARKS[answer], verdict.metric.word(answer))


def _reasons(by_metric: dict[Metric, Verdict]) -> str:
    accept, speed = by_metric[Metric.ACCEPT_LENGTH].reason, by_metric[Metric.TOKENS_PER_SECOND].reason
    if accept == speed:
        return accept
    accept, speed = accept.removeprefix("interval "), speed.removeprefix("interval ")
    return f"passes: {accept}; seconds: {speed}"


def _best_text(best: BestBudget) -> str:
    picks = best.picks[0] if best.picks[0] == best.picks[1] else " and ".join(best.picks)
    return (
        f"Best for {best.metric.words}: {best.cell.label} of {len(best.candidates)} trees. Each half of the "
        f"prompts judged with the tree that was best on the other half ({picks}): {interval(best.ratio)} "
        f"times dflash ({best.metric.word(best.answer)})."
    )


def _floors_table(floors: Sequence[Floor]) -> Table | None:
    if not floors:
        return None
    rows = tuple(
        (
            floor.cell.label,
            floor.metric.words,
            str(floor.positions),
            interval(floor.ratio, digits=3),
            f"{floor.low:.3f} to {floor.high:.3f}",
        )
        for floor in floors
    )
    columns = ("service", "metric", "starts", "two starts furthest apart", "floor")
    return Table("A/A: the same service against itself, start by start", columns, rows, frozenset({0, 1}))


def _cells_table(here: Sequence[Measures]) -> Table:
    rows = []
    for item in here:
        record = item.cell.record
        rows.append(
            (
                item.cell.label,
                record.state.value,
                str(item.prompts),
                _out_of(len(item.cell.ok_rows), len(item.cell.rows)),
                f"{item.completion_tokens:,}",
                _count(item.verify_steps),
                interval(item.accept_length),
                interval(item.tokens_per_second, digits=1),
            )
        )
    columns = ("arm", "state", "prompts", "requests", "tokens", "verify steps", "accept length", "tokens/s")
    return Table("Cells: what was measured", columns, tuple(rows), frozenset({0, 1}))


def _quality_table(here: Sequence[Measures]) -> Table:
    rows = []
    for item in here:
        parity, chain = item.parity(Arm.AR), item.parity(Arm.DFLASH)
        counts: tuple[str, ...] = (DASH,) * 4
        if parity is not None:
            whole = prompts_of(parity)
            counts = (
                _out_of(parity.identical, whole),
                *map(str, (parity.near_tie, parity.different, parity.unknown)),
            )
        rows.append(
            (
                item.cell.label,
                *counts,
                _out_of(chain.identical, prompts_of(chain)) if chain is not None else DASH,
                str(item.loops),
                str(item.empty),
                str(item.unstable),
                _share(item.steps_below_spine, item.steps_scored),
                _count(item.tree_steps),
            )
        )
    columns = (
        "arm",
        "same as ar",
        "near-tie",
        "different",
        "unknown",
        "same as dflash",
        "loops",
        "empty",
        "unstable",
        "below spine",
        "tree steps",
    )
    return Table("Greedy parity by prompt, and quality counters", columns, tuple(rows))


def _gates_table(here: Sequence[Measures]) -> Table | None:
    """A row for each gate: how many cells passed it, and where it failed, with the detail sealed."""
    ids = list(dict.fromkeys(gate.id for item in here for gate in item.cell.record.gates))
    if not ids:
        return None
    rows = []
    for gate_id in ids:
        found = [(item, gate) for item in here for gate in item.cell.record.gates if gate.id == gate_id]
        counts = (str(sum(gate.status is status for _, gate in found) or DASH) for status in GateStatus)
        failed = [
            f"{item.cell.label}: {gate.detail or _count_of(gate)}"
            for item, gate in found
            if gate.status is GateStatus.FAIL
        ]
        rows.append((gate_id, *counts, "; ".join(failed) or DASH))
    columns = ("gate", *(status.value for status in GateStatus), "failed where")
    return Table("Gates: cells by outcome", columns, tuple(rows), frozenset({0, len(columns) - 1}))


def _count_of(gate: Gate) -> str:
    return f"{gate.value:g}" if gate.value is not None else "failed"


def _findings_table(here: Sequence[Measures]) -> Table | None:
    rows = [
        (
            item.cell.label,
            parity.reference.value,
            finding.prompt_id,
            finding.parity.value.replace("_", "-"),
            _count(finding.first_difference),
            _tokens(finding),
            _gap(finding.gap),
            _gap(finding.threshold),
        )
        for item in here
        for parity in item.cell.record.parity
        for finding in parity.findings
    ]
    if not rows:
        return None
    columns = ("arm", "beside", "prompt", "class", "first differing token", "ids", "gap", "near-tie up to")
    return Table("Every prompt that is not identical", columns, tuple(rows), frozenset({0, 1, 2, 3}))


def _shadow_table(biases: Sequence[ShadowBias]) -> Table:
    rows = tuple(
        (
            str(bias.shadow.cell.budget),
            interval(bias.shadow.shadow_estimate),
            interval(bias.measured),
            interval(bias.ratio),
            f"{100 * (bias.ratio.value - 1):+.1f} %",
        )
        for bias in biases
    )
    columns = ("budget", "shadow's estimate", "ddtree measured", "estimate / measured", "bias")
    return Table("Accepted drafts + 1 in a step: shadow's estimate and what ddtree did", columns, rows)


def _stage_table(here: Sequence[Measures]) -> Table | None:
    rows = tuple(
        (
            item.cell.label,
            *(f"{item.stage_ms[stage]:.2f}" for stage in STAGES),
            f"{sum(item.stage_ms.values()):.2f}",
        )
        for item in here
        if item.stage_ms is not None
    )
    if not rows:
        return None
    return Table("Stages: mean milliseconds per target pass", ("arm", *STAGES, "sum"), rows)


def _latency_table(here: Sequence[Measures]) -> Table | None:
    found = [item.latency for item in here]
    if not any(latency.ttft or latency.tpot or latency.itl for latency in found):
        return None
    rows = []
    for item in here:
        latency = item.latency
        chunk = f"{latency.tokens_per_chunk:.2f}" if latency.tokens_per_chunk is not None else DASH
        rows.append(
            (
                item.cell.label,
                *_milliseconds(latency.ttft),
                *_milliseconds(latency.tpot),
                *_milliseconds(latency.itl),
                chunk,
            )
        )
    columns = (
        "arm",
        "TTFT median",
        "p90",
        "max",
        "TPOT median",
        "p90",
        "max",
        "ITL median",
        "p90",
        "max",
        "tokens/chunk",
    )
    return Table("Request latency in milliseconds", columns, tuple(rows))


def _positions_table(here: Sequence[Measures]) -> Table | None:
    """Tokens per second at each start of a service, and how far the starts lie apart."""
    most = max(item.cell.spec.positions for item in here)
    if most < 2:
        return None
    rows = []
    for item in here:
        places: dict[int, set[str]] = {}
        for row in item.cell.rows:
            places.setdefault(row.position, set()).add(short_place(row.place or DASH))
        speeds = {
            position: float(part["completion_tokens"].sum() / part["e2e_s"].sum())
            for position, part in by_position(item.frame).items()
            if len(part) and part["e2e_s"].sum() > 0
        }
        shown = [
            f"{speeds[number]:.1f} ({', '.join(sorted(places[number]))})" if number in speeds else DASH
            for number in range(most)
        ]
        spread = f"{100 * (max(speeds.values()) / min(speeds.values()) - 1):.1f} %" if speeds else DASH
        rows.append((item.cell.label, *shown, spread))
    columns = ("arm", *(f"position {number + 1}" for number in range(most)), "largest / smallest - 1")
    return Table("Tokens per second at each start of the service (and where it ran)", columns, tuple(rows))


def _unsafe_table(leaky: Sequence[Leak]) -> Table:
    rows = tuple(
        (
            str(leak.unsafe.cell.budget),
            _out_of(leak.wrong, leak.prompts),
            f"{leak.first_difference:g}" if leak.first_difference is not None else DASH,
            _out_of(leak.unsafe.loops, len(leak.unsafe.cell.ok_rows)),
            interval(leak.accept_length),
            interval(leak.pass_time),
        )
        for leak in leaky
    )
    columns = (
        "budget",
        "wrong outputs",
        "first wrong token (median)",
        "loops",
        "accept length / ddtree",
        "time per pass / ddtree",
    )
    return Table("unsafe beside ddtree at its budget (wrong output, no verdict)", columns, rows)


def _facts(analysis: Analysis) -> list[tuple[str, str]]:
    run, spec = analysis.results.run, analysis.measures[0].cell.spec
    cells = len(analysis.results.cells)
    planned = cells + len(analysis.results.missing)
    facts = [
        ("cells", f"{cells} of {planned} sealed"),
        ("prompts", f"{spec.prompts}, {_often(spec)}"),
        ("answers", f"{spec.max_tokens} tokens{'' if spec.ignore_eos else ' at most'}"),
        ("builder", ", ".join(builder.value for builder in analysis.results.builders()) or DASH),
        ("engine", f"{spec.engine} {spec.engine_version}, {spec.dtype}"),
    ]
    facts.append(("run", f"{run.run_id}, {_minute(run.started)}"))
    if run.seconds is not None or run.ended is None:
        facts.append(("took", f"{run.seconds:.0f} s" if run.seconds is not None else "not finished"))
    return facts


def _often(spec: CellSpec) -> str:
    if spec.positions > 1:
        return f"once at each of {spec.positions} positions"
    return f"{spec.repeats} repeat{'s' if spec.repeats != 1 else ''} each"


def _checks(checks: dict[str, Check]) -> list[tuple[str, str, str]]:
    """(kind, text, id) of each yes-or-no check."""
    marks = {True: "pass", False: "fail", None: "unknown"}
    return [
        (marks[bool_or_none(checks[name])], text, name)
        for name, text in CHECK_TEXTS.items()
        if name in checks
    ]


def bool_or_none(value: Check) -> bool | None:
    return value if isinstance(value, bool) else None


def _troubles(analysis: Analysis) -> list[tuple[str, str, str]]:
    """(cell, state, reason) of every cell that is not complete, the missing ones included."""
    troubles = []
    for item in analysis.measures:
        record = item.cell.record
        if not item.cell.complete:
            errors = sorted({row.error for row in item.cell.rows if row.error})
            reason = record.reason or "; ".join(errors) or "no reason was recorded"
            troubles.append((f"{item.cell.label}, {item.cell.load}", record.state.value, reason))
    troubles += [
        (f"cell {key[:16]}", "not run", "planned, but never sealed: run the same sweep again to finish it")
        for key in analysis.results.missing
    ]
    return troubles


def _environment(analysis: Analysis) -> list[tuple[str, str]]:
    run, spec = analysis.results.run, analysis.measures[0].cell.spec
    facts = [
        ("target sha256", spec.model_sha256),
        (
            "drafter sha256",
            next((m.cell.spec.drafter_sha256 for m in analysis.measures if m.cell.spec.drafter_sha256), DASH),
        ),
        ("dataset sha256", spec.dataset_sha256),
        ("image digest", spec.image_digest or "none (local processes)"),
    ]
    environment = run.environment
    described = [
        ("ddtree", environment.ddtree_version),
        ("commit", environment.git_commit or ("" if run.origin else "not a git checkout")),
        ("processor", _processor(environment)),
        ("platform", environment.platform),
        ("Python", environment.python),
        (
            "packages",
            ", ".join(f"{name} {version}" for name, version in sorted(environment.packages.items())) or DASH,
        ),
        ("host fingerprint", environment.host_fingerprint),
    ]
    described += [
        (f"GPU {index}", ", ".join([str(gpu.get("name", "GPU")), *_but_name(gpu)]))
        for index, gpu in enumerate(environment.gpus)
    ]
    return [(name, value) for name, value in described if value] + facts


def _but_name(gpu: dict[str, Any]) -> list[str]:
    return [f"{key} {value}" for key, value in gpu.items() if key != "name"]


def _processor(environment: Environment) -> str:
    """What is known of it; older stores hold an empty name and zeros for what is not."""
    parts = [
        environment.cpu or "",
        f"{environment.cores} cores" if environment.cores else "",
        f"{environment.memory_gib:.1f} GiB" if environment.memory_gib else "",
    ]
    return ", ".join(part for part in parts if part)


def _services(analysis: Analysis) -> list[tuple[str, str, str]]:
    """(arm, argv, what the server said of itself), once for each distinct argv."""
    seen: dict[str, tuple[str, str, str]] = {}
    for item in analysis.measures:
        argv = shlex.join(item.cell.spec.argv)
        server = (
            json.dumps(item.cell.record.server, indent=1, sort_keys=True) if item.cell.record.server else ""
        )
        seen.setdefault(argv, (item.cell.label, argv, server))
    return list(seen.values())


def interval(value: Interval | None, digits: int = 2) -> str:
    """``2.24 [2.01, 2.49]``."""
    if value is None:
        return DASH
    text = f"{value.value:.{digits}f}"
    if value.low is None or value.high is None:
        return f"{text} [n = {value.n}]"
    return f"{text} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def _milliseconds(quantiles: Quantiles | None) -> tuple[str, str, str]:
    if quantiles is None:
        return DASH, DASH, DASH
    median, p90, largest = (
        f"{1e3 * value:.1f}" for value in (quantiles.median, quantiles.p90, quantiles.largest)
    )
    return median, p90, largest


def _minute(stamp: str) -> str:
    """An ISO 8601 time in UTC, to the minute."""
    return f"{stamp[:16].replace('T', ' ')} UTC"


def _count(value: int | None) -> str:
    return DASH if value is None else f"{value:,}"


def _out_of(part: int, whole: int) -> str:
    return f"{part} of {whole}"


def _share(part: int | None, whole: int | None) -> str:
    if part is None or not whole:
        return DASH
    return f"{part} ({100 * part / whole:.1f} %)"


def _tokens(finding: ParityFinding) -> str:
    if finding.token is None and finding.reference_token is None:
        return DASH
    return f"{_plain(finding.token)} for {_plain(finding.reference_token)}"


def _plain(token: int | None) -> str:
    return "end" if token is None else str(token)


def _gap(value: float | None) -> str:
    return DASH if value is None else f"{value:.2g}"
