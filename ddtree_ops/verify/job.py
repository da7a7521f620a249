"""`ddtree verify`: gates, kernel table, short sweep, bundle; whoever runs the services."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ddtree_ops import __version__
from ddtree_ops.bench.dataset import PAIR, Dataset, load_dataset
from ddtree_ops.bench.environment import capture_environment
from ddtree_ops.errors import BadEnvironment, BadInput
from ddtree_ops.output import Output
from ddtree_ops.redact import allowed_server_info
from ddtree_ops.schemas.acceptance import (
    AcceptanceSummary,
    GateResult,
    HostFacts,
    KernelTable,
    ServiceFacts,
    StageStatus,
    SweepResult,
    Verdict,
)
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.results import Environment, GateStatus
from ddtree_ops.verify import bundle, gates
from ddtree_ops.verify.kernels import KernelBench, NoKernels
from ddtree_ops.verify.measure import Findings, Load, answers_to_expect, measure
from ddtree_ops.verify.scrub import Scrubber
from ddtree_ops.verify.subjects import Address, Subject, meet
from ddtree_ops.verify.sweep import copy_store, short_sweep

SUFFIX = ".tar.gz"
STAGES = ("kernels", "sweep")
PROMPTS, MAX_TOKENS = 8, 64


@dataclass(frozen=True)
class VerifyOptions:
    """out  the bundle; its name ends in .tar.gz and it does not exist yet"""

    out: Path = Path(f"ddtree-acceptance{SUFFIX}")
    skip: frozenset[str] = frozenset()
    prompts: int = PROMPTS
    max_tokens: int = MAX_TOKENS
    dataset: str = PAIR
    timeout_s: float = 300.0

    @property
    def work(self) -> Path:
        """Beside the bundle until that is written: an interrupted sweep goes on from here."""
        return self.out.with_name(self.out.name.removesuffix(SUFFIX) + ".work")


@dataclass(frozen=True)
class Place:
    """What is known of where the services run.

    hosts    facts by label, from a cluster.yaml
    names    host names and addresses, and the labels that stand for them in the bundle
    secrets  values that must not get into the bundle
    fingerprint  of the hosts, for the cells' keys; null where the services run on this machine
    """

    hosts: Sequence[HostFacts] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = field(default=(), repr=False)
    fingerprint: str | None = None


def check_options(options: VerifyOptions) -> Dataset:
    """Everything that can be wrong before a service is asked. Raises BadInput, BadEnvironment."""
    if not options.out.name.endswith(SUFFIX) or options.out.name == SUFFIX:
        allowed = f"a name that ends in {SUFFIX}"
        raise BadInput.at(file=None, key="--out", found=str(options.out), allowed=allowed)
    if options.out.exists():
        raise BadInput(f"{options.out} exists already", remedy="move it away, or give another --out")
    if not options.out.resolve().parent.is_dir():
        raise BadInput(f"--out: {options.out.parent}: no such folder")
    unknown = sorted(options.skip - set(STAGES))
    if unknown:
        raise BadInput.at(file=None, key="--skip", found=unknown[0], allowed=", ".join(STAGES))
    return load_dataset(options.dataset, options.prompts)


def run_verify(
    addresses: Sequence[Address],
    options: VerifyOptions,
    out: Output,
    *,
    place: Place = Place(),
    kernels: KernelBench | None = None,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> AcceptanceSummary:
    """Examine services that run, and write the bundle whatever comes out.

    kernels  null: no table, nothing was said of where
    Raises BadInput and BadEnvironment before anything was examined, Interrupted on Ctrl-C.
    """
    dataset, started, created = check_options(options), clock(), now()
    scrub = Scrubber.here(_known(addresses, place), place.secrets)
    subjects = asyncio.run(meet(addresses))
    require_comparable(subjects)
    environment = capture_environment()
    findings = _measure(subjects, Load(dataset.prompts, options.max_tokens, options.timeout_s), out)
    judged = gates.judge(findings)
    show_gates(judged, out)
    staging = _fresh(options.work / "bundle")
    table = _kernel_table(kernels, options, staging, scrub, out)
    where = place.fingerprint or environment.host_fingerprint
    measured = environment.model_copy(update={"host_fingerprint": where})
    swept = _sweep(subjects, dataset, measured, options, staging, scrub, out)
    verdict = gates.verdict(judged)
    if StageStatus.FAILED in {table.status, swept.status}:
        verdict = Verdict.FAILED
    summary = AcceptanceSummary(
        created=created.isoformat(timespec="seconds"),
        ddtree_version=__version__,
        verdict=verdict,
        seconds=round(clock() - started, 1),
        prompts=len(dataset.prompts),
        max_tokens=options.max_tokens,
        dataset={"name": dataset.name, "sha256": dataset.sha256},
        environment=environment,
        hosts=list(place.hosts),
        services=[_facts(subject, findings) for subject in subjects],
        gates=judged,
        kernels=table,
        sweep=swept,
        files=bundle.hashes(staging),
    )
    clean = AcceptanceSummary.model_validate(scrub.data(summary.model_dump(mode="json")))
    (staging / "summary.json").write_text(clean.model_dump_json(indent=1) + "\n", encoding="utf-8")
    bundle.pack(staging, options.out)
    shutil.rmtree(options.work, ignore_errors=True)
    return clean


def require_comparable(subjects: Sequence[Subject]) -> None:
    """Raise BadInput unless there is a tree to judge and a chain, or plain decoding, to judge it by."""
    arms = {subject.arm for subject in subjects}
    if not arms & {Arm.DDTREE, Arm.UNSAFE}:
        raise BadInput("--service: found no ddtree, allowed: at least one, it is what is verified")
    if not arms & {Arm.DFLASH, Arm.AR}:
        raise BadInput("--service: found no dflash and no ar, allowed: one of them, for parity")


def show_gates(judged: Sequence[GateResult], out: Output) -> None:
    """One line a gate; the remedies of those that failed."""
    rows = [
        (
            gate.id.value,
            gate.service,
            f"{gate.status.value}{' (control)' if gate.control else ''}",
            gate.detail,
        )
        for gate in judged
    ]
    out.table("Gates", ("gate", "service", "status", "found"), rows)
    for gate in judged:
        out.event("gate", **gate.model_dump(mode="json", exclude={"evidence"}))
        if gate.status is GateStatus.FAIL and not gate.control:
            out.line(f"  fail {gate.id.value} on {gate.service}: {gate.detail}")
            out.line(f"    try: {gate.remedy}")
        elif gate.status is GateStatus.SKIP and not gate.control:
            out.warning(f"{gate.id.value} on {gate.service} was not judged: {gate.detail}")
    for gate in gates.blind(judged):
        out.warning(
            f"{gate.id.value} passes on {gate.service}, which has to fail it: the gate sees nothing here"
        )


def _measure(subjects: Sequence[Subject], load: Load, out: Output) -> Findings:
    with out.progress("gates", answers_to_expect(subjects, len(load.prompts))) as advance:
        return asyncio.run(measure(subjects, load, lambda name: advance(1, name)))


def _kernel_table(
    kernels: KernelBench | None, options: VerifyOptions, staging: Path, scrub: Scrubber, out: Output
) -> KernelTable:
    if "kernels" in options.skip:
        kernels = NoKernels("--skip kernels")
    kernels = kernels or NoKernels("no card was named")
    out.note("kernel table")
    table = kernels.run(_fresh(options.work / "kernels"))
    table = KernelTable.model_validate(scrub.data(table.model_dump(mode="json")))
    if table.targets:
        (staging / "kernels.json").write_text(table.model_dump_json(indent=1) + "\n", encoding="utf-8")
    out.note(f"kernel table: {table.status.value}{f': {table.reason}' if table.reason else ''}")
    return table


def _sweep(
    subjects: Sequence[Subject],
    dataset: Dataset,
    environment: Environment,
    options: VerifyOptions,
    staging: Path,
    scrub: Scrubber,
    out: Output,
) -> SweepResult:
    if "sweep" in options.skip:
        return SweepResult(status=StageStatus.SKIPPED, reason="--skip sweep")
    store = options.work / "results"
    result = short_sweep(
        subjects,
        dataset,
        environment,
        store,
        scrub,
        out,
        max_tokens=options.max_tokens,
        timeout_s=options.timeout_s,
    )
    if result.run_id is None:
        return result
    copy_store(store, staging / "results", result.run_id, scrub)
    # pandas and matplotlib take seconds to import: only now, when nothing is timed any more.
    from ddtree_ops.compare.report import write_report

    files = write_report(staging / "results", options.work / "report", title="ddtree acceptance")
    shutil.copyfile(files.index, staging / "report.html")
    return result.model_copy(update={"headline": files.headline})


def _facts(subject: Subject, findings: Findings) -> ServiceFacts:
    return ServiceFacts(
        name=subject.name,
        arm=subject.arm,
        budget=subject.budget,
        builder=subject.builder,
        engine=subject.engine,
        dtype=subject.dtype,
        host=subject.address.host,
        server=allowed_server_info(subject.info),
        self_check=subject.self_check,
        noise=findings.noise.get(subject.dtype),
    )


def _known(addresses: Sequence[Address], place: Place) -> dict[str, str]:
    """Host names and addresses of the services, by the label that stands for each."""
    found: dict[str, str] = {}
    for address in addresses:
        name = urlsplit(address.url).hostname
        if name and name not in {"localhost", "127.0.0.1", "::1"}:
            found.setdefault(name, address.host or f"service-host-{len(found) + 1}")
    return {**found, **place.names}


def _fresh(folder: Path) -> Path:
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise BadEnvironment(f"{folder} could not be made: {error.strerror}") from error
    return folder


def result_data(summary: AcceptanceSummary, out: Path) -> dict[str, Any]:
    """What `--json` ends with."""
    return {
        "bundle": str(out),
        "verdict": summary.verdict.value,
        "gates": [gate.model_dump(mode="json") for gate in summary.gates],
        "kernels": summary.kernels.model_dump(mode="json"),
        "sweep": summary.sweep.model_dump(mode="json"),
        "seconds": summary.seconds,
    }
