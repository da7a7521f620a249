"""A sweep beside an nvidia-smi: cells say what their GPUs did, a hot one spoils its cell, none is no zero."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ddtree_ops.bench.config import load_sweep
from ddtree_ops.bench.runner import SweepOutcome, run_sweep
from ddtree_ops.bench.store import Store
from ddtree_ops.bench.sweep import prepare
from ddtree_ops.compare.report import write_report
from ddtree_ops.containers.card_watch import CardWatch
from ddtree_ops.containers.connection import HostLink
from ddtree_ops.containers.ssh import SshTarget
from ddtree_ops.output import Output, OutputMode
from ddtree_ops.schemas.results import CellRecord, CellState, ReplicaAt
from ddtree_ops.services.local import LocalLauncher
from tests.support.nvidia_smi import busy, install
from tests.support.ops import stub_sweep

HOST = "gpu-a"
GPUS = {"ar": "GPU-aaaa", "ddtree": "GPU-bbbb"}


@pytest.fixture
def watch() -> Iterator[CardWatch]:
    with HostLink(HOST, SshTarget("here", local=True)) as link:
        yield CardWatch({HOST: link}, period_ms=10)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "programs"
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def measured(folder: Path, watch: CardWatch | None) -> tuple[Path, dict[str, CellRecord]]:
    """A sweep of two services, each with a card of this machine; the store and its cells by arm."""
    file = stub_sweep(folder, "*:delay:20", prompts=3)
    with prepare(load_sweep(file, {})) as prepared:
        seats = {
            name: ReplicaAt(host=HOST, gpus=[gpu], cards=[number])
            for number, (name, gpu) in enumerate(GPUS.items())
        }
        services = tuple(replace(one, at=seats[one.name]) for one in prepared.plan.services)
        plan = replace(prepared.plan, services=services)
        environment = prepared.environment
    store = Store.create_or_open(folder / "results", now=datetime.now(UTC).isoformat(timespec="seconds"))
    outcome: SweepOutcome = run_sweep(
        plan,
        store,
        lambda run_id: LocalLauncher(folder / "logs"),
        environment,
        Output(OutputMode.QUIET),
        cards=watch,
    )
    return store.root, {cell.spec.arm.value: cell for cell in outcome.cells}


def test_each_cell_says_what_its_own_gpu_did(tmp_path: Path, smi: Path, watch: CardWatch) -> None:
    install(smi, busy(0, GPUS["ar"], power_draw="310.00"), busy(1, GPUS["ddtree"]), busy(2, "GPU-other"))
    store, cells = measured(tmp_path, watch)
    for number, (arm, gpu) in enumerate(GPUS.items()):
        cell = cells[arm]
        assert cell.state is CellState.COMPLETE, cell.reason
        assert cell.cards is not None
        (use,) = cell.cards
        assert (use.host, use.gpu, use.card, use.requests) == (HOST, gpu, number, 3)
        assert use.samples > 3
        assert (use.utilization, use.sm_clock_min_mhz, use.temperature_max_c) == (97.0, 1755.0, 64.0)
        assert use.slowed == {"power cap": use.samples}
        assert cell.cards_missing is None
    first = cells["ar"].cards or []
    assert first[0].power_max_w == 310.0
    page = write_report(store, tmp_path / "report").index.read_text()
    assert "What the GPUs did" in page
    assert "gpu-a/GPU-bbbb (1)" in page
    assert "not sampled" not in page


def test_a_gpu_that_is_too_hot_spoils_its_cell_and_no_other(
    tmp_path: Path, smi: Path, watch: CardWatch
) -> None:
    install(smi, busy(0, GPUS["ar"]), busy(1, GPUS["ddtree"], reasons="0x0000000000000044"))
    _, cells = measured(tmp_path, watch)
    assert cells["ar"].state is CellState.COMPLETE
    assert cells["ddtree"].state is CellState.INVALID
    assert "gate throttled: gpu-a/GPU-bbbb: thermal, by hardware in" in str(cells["ddtree"].reason)


def test_a_host_without_nvidia_smi_has_no_figures_and_the_report_says_so(
    tmp_path: Path, smi: Path, watch: CardWatch
) -> None:
    store, cells = measured(tmp_path, watch)
    for cell in cells.values():
        assert cell.state is CellState.COMPLETE, cell.reason
        assert cell.cards is None
        assert "nothing was seen of gpu-a/GPU-" in str(cell.cards_missing)
        assert "nvidia-smi" in str(cell.cards_missing)
    page = write_report(store, tmp_path / "report").index.read_text()
    assert "GPUs: not sampled for ar: nothing was seen of gpu-a/GPU-aaaa" in page
    assert "What the GPUs did while" not in page
