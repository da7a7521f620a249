"""Throughput by layout: what a service gives on a host, on each GPU, and where a card is slow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ddtree_ops.bench.store import Store
from ddtree_ops.compare.analysis import analyse
from ddtree_ops.compare.layout_view import layout_pictures, layout_view
from ddtree_ops.compare.layouts import HostRate, Layout, layouts_of, side_by_side
from ddtree_ops.compare.report import write_report
from ddtree_ops.compare.statistics import Bootstrap
from ddtree_ops.compare.summary import build_summary
from ddtree_ops.schemas.results import CellRecord, CellRotation, CellSpec, CellState, ReplicaAt, RequestRow
from tests.support.make_store import make_store
from tests.support.ops import cell_spec, request_row

PROMPTS = 6
TOKENS = 8


def seal(store: Store, spec: CellSpec, rows: Sequence[RequestRow], **changes: Any) -> CellSpec:
    fields: dict[str, Any] = {
        "key": spec.key(),
        "spec": spec,
        "run_id": "other",
        "state": CellState.COMPLETE,
        "started": "2026-01-01T00:00:00Z",
        "ended": "2026-01-01T00:01:00Z",
        "requests": len(rows),
        "failed_requests": 0,
        "rows_sha256": "",
    }
    store.seal(CellRecord(**{**fields, **changes}), rows, {})
    return spec


def at(number: int, *cards: int, host: str = "a") -> ReplicaAt:
    return ReplicaAt(
        number=number, host=host, gpus=[f"GPU-{host}{card}" for card in cards], cards=list(cards)
    )


def answers(seat: ReplicaAt, seconds: float, position: int = 0) -> list[RequestRow]:
    """A replica answers each prompt once, one after the other, each in so many seconds and a little more."""
    rows = []
    for index in range(PROMPTS):
        spent = seconds * (1 + 0.01 * index)
        begin = 1000 * position + 100.0 * index
        rows.append(
            request_row(index, sent_at=begin, e2e_s=spent, replica=seat, position=position, repeat=position)
        )
    return rows


def measured(path: Path, cells: dict[str, list[tuple[ReplicaAt, float]]]) -> dict[str, list[HostRate]]:
    """Cells by name; each replica with the seconds that it takes for a prompt."""
    store = Store.create_or_open(path, now="2026-01-01T00:00:00Z")
    specs = {}
    for name, replicas in cells.items():
        places = [seat.place for seat, _ in replicas] if len(replicas) > 1 else None
        rows = [row for seat, seconds in replicas for row in answers(seat, seconds)]
        specs[name] = seal(store, cell_spec(replicas=places, argv=[name], prompts=PROMPTS), rows)
    found = layouts_of(path, specs.values())
    return {name: [rate for rate in found if rate.cell.spec == spec] for name, spec in specs.items()}


def test_a_host_gives_the_sum_of_its_replicas_and_a_slow_card_shows(tmp_path: Path) -> None:
    found = measured(tmp_path, {"two": [(at(0, 0), 1.0), (at(1, 3), 2.0)], "one": [(at(0, 0), 1.0)]})
    (two,), (one,) = found["two"], found["one"]
    whole = TOKENS * PROMPTS / sum(1 + 0.01 * index for index in range(PROMPTS))
    assert one.rate.value == pytest.approx(whole)
    assert two.rate.value == pytest.approx(1.5 * whole)
    assert two.each.value == pytest.approx(0.75 * whole)
    assert (str(two.layout), str(one.layout)) == ("2 x 1 GPU", "1 x 1 GPU")
    assert [place.rate.value for place in two.places] == [pytest.approx(whole), pytest.approx(whole / 2)]
    view = layout_view([one, two])
    assert view is not None
    assert view.places is not None
    assert [(row[5], row[7]) for row in view.places.rows] == [("0", "100 %"), ("3", "50 %")]


def test_a_replica_over_several_gpus_is_divided_by_them(tmp_path: Path) -> None:
    found = measured(tmp_path, {"tp": [(at(0, 0, 1), 0.5)], "single": [(at(0, 0), 1.0)]})
    (tp,), (single,) = found["tp"], found["single"]
    assert tp.layout == Layout(1, 2)
    assert tp.rate.value == pytest.approx(2 * single.rate.value)
    assert tp.each.value == pytest.approx(single.each.value)


def test_replicas_on_two_hosts_are_two_figures(tmp_path: Path) -> None:
    found = measured(tmp_path, {"far": [(at(0, 0), 1.0), (at(1, 1), 1.0), (at(2, 0, host="b"), 1.0)]})
    assert [(rate.host, rate.layout) for rate in found["far"]] == [("a", Layout(2, 1)), ("b", Layout(1, 1))]
    on_a, on_b = found["far"]
    assert on_a.rate.value == pytest.approx(2 * on_b.rate.value)


def test_replicas_share_the_draws_of_prompts() -> None:
    """Two replicas that are alike give exactly twice the interval of one; drawn apart, less."""
    tops, bottoms = [8.0] * PROMPTS, [1.0, 1.2, 0.7, 2.0, 1.1, 0.9]
    bootstrap = Bootstrap(PROMPTS, seed=1)
    one, two = bootstrap.ratio_of_sums(tops, bottoms), bootstrap.sum_of_rates([(tops, bottoms, 1.0)] * 2)
    assert one is not None
    assert two is not None
    half = two.divided(2)
    assert (half.value, half.low, half.high) == (
        pytest.approx(one.value),
        pytest.approx(one.low),
        pytest.approx(one.high),
    )


def test_a_service_that_moved_has_a_figure_for_each_card_it_was_on(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path, now="2026-01-01T00:00:00Z")
    rotation = CellRotation(positions=2, places=["a/GPU-a0", "a/GPU-a1"])
    spec = cell_spec(replicas=["a", "a"], rotation=rotation, repeats=2, prompts=PROMPTS)
    rows = [
        row
        for position in (0, 1)
        for number in (0, 1)
        for card in [(number + position) % 2]
        for row in answers(at(number, card), 1.0 + card, position)
    ]
    (rate,) = layouts_of(tmp_path, [seal(store, spec, rows)])
    fast, slow = rate.places
    assert (fast.at.cards, slow.at.cards) == ([0], [1])
    assert fast.rate.value == pytest.approx(2 * slow.rate.value)
    assert rate.rate.positions == 2
    assert fast.requests == slow.requests == 2 * PROMPTS


def test_only_complete_cells_of_the_same_work_are_set_side_by_side(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path, now="2026-01-01T00:00:00Z")
    pair = [*answers(at(0, 0), 1.0), *answers(at(1, 1), 1.0)]
    places = ["a/GPU-a0", "a/GPU-a1"]
    mine = seal(store, cell_spec(replicas=places, prompts=PROMPTS), pair)
    for change in ({"max_tokens": 9}, {"dataset_sha256": "e"}, {"engine_version": "2"}, {"arm": "unsafe"}):
        seal(store, CellSpec.model_validate({**mine.model_dump(), **change}), pair)
    seal(store, mine.model_copy(update={"seed": 1}), pair, state=CellState.INVALID)
    broken = tmp_path / "cells" / "broken"
    broken.mkdir()
    (broken / "cell.json").write_text("{")
    assert [rate.cell.spec for rate in layouts_of(tmp_path, [mine])] == [mine]


def test_a_cell_of_an_older_store_says_in_its_arguments_where_it_was(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path, now="2026-01-01T00:00:00Z")
    specs = [
        seal(
            store,
            cell_spec(argv=["host=gpu-a", f"gpus={gpus}"], prompts=PROMPTS),
            [row.model_copy(update={"replica": None}) for row in answers(at(0), 1.0)],
        )
        for gpus in ("GPU-1", "GPU-1,GPU-2")
    ]
    assert [(rate.host, str(rate.layout)) for rate in layouts_of(tmp_path, specs)] == [
        ("gpu-a", "1 x 1 GPU"),
        ("gpu-a", "1 x 2 GPUs"),
    ]


def side(name: str, *beside: str, **changes: Any) -> CellSpec:
    arm: dict[str, Any] = {"arm": name, "budget": None, "builder": None, "topk": None}
    tree = {} if name == "ddtree" else arm
    return cell_spec(**{**tree, "beside": list(beside), "prompts": PROMPTS, **changes})


def test_services_that_were_loaded_side_by_side_have_a_sum_for_the_host(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path, now="2026-01-01T00:00:00Z")
    two = ["a/GPU-a0", "a/GPU-a1"]
    tree = seal(
        store,
        side("ddtree", "1 x ar", replicas=two),
        [row for number in (0, 1) for row in answers(at(number, number), 1.0)],
    )
    plain = seal(store, side("ar", "2 x ddtree 31"), answers(at(0, 2), 2.0))
    rates = layouts_of(tmp_path, [tree, plain])
    (whole,) = side_by_side(rates)
    one = TOKENS * PROMPTS / sum(1 + 0.01 * index for index in range(PROMPTS))
    assert whole.rate.value == pytest.approx(2.5 * one)
    assert whole.each.value == pytest.approx(2.5 * one / 3)
    assert (whole.host, whole.units, whole.services) == ("a", 3, ("1 x ar", "2 x ddtree 31"))
    assert whole.rate.low is not None
    view = layout_view(rates, [whole])
    assert view is not None
    assert view.together is not None
    assert [row[:5] for row in view.together.rows] == [("1 x ar, 2 x ddtree 31", "1", "0", "a", "3 GPUs")]
    assert [row[3] for row in view.rates.rows] == [
        "1 x 1 GPU, beside 2 x ddtree 31",
        "2 x 1 GPU, beside 1 x ar",
    ]
    (picture,) = layout_pictures(rates, [whole])
    assert "all side by side, of the host" in picture.description


def test_no_sum_is_given_where_a_neighbour_has_no_complete_cell(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path, now="2026-01-01T00:00:00Z")
    tree = seal(store, side("ddtree", "1 x ar"), answers(at(0, 0), 1.0))
    seal(store, side("ar", "1 x ddtree 31"), answers(at(0, 1), 1.0), state=CellState.INVALID)
    rates = layouts_of(tmp_path, [tree])
    assert len(rates) == 1
    assert side_by_side(rates) == []


def test_a_store_with_one_layout_on_one_card_has_no_such_section(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", prompts=PROMPTS)
    assert analyse(store).layouts == ()
    files = write_report(store, tmp_path / "report")
    assert "Throughput by layout" not in files.index.read_text()
    assert not list(tmp_path.glob("report/layouts*"))


def test_a_report_shows_the_layouts_of_all_runs_of_its_store(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store", prompts=PROMPTS, budgets=(31,))
    store = Store(folder)
    (cell,) = [one for one in analyse(folder).results.cells if one.arm.value == "ddtree"]
    seats = [at(0, 0), at(1, 1)]
    rows = [row.model_copy(update={"replica": seat}) for seat in seats for row in cell.rows]
    seal(store, cell.spec.model_copy(update={"replicas": [seat.place for seat in seats]}), rows)
    files = write_report(folder, tmp_path / "report")
    page = files.index.read_text()
    assert "Throughput by layout" in page
    assert "2 x 1 GPU" in page
    assert [file.name for file in files.images if "layouts" in file.name] == ["layouts-c1-t0.png"]
    table = pd.read_csv(tmp_path / "report" / "layouts.csv")
    assert set(table[table["replicas"] == 2]["place"]) == {"a/GPU-a0", "a/GPU-a1"}
    layouts = [one for one in build_summary(folder)["layouts"] if one["replicas"] == 2]
    assert [(one["host"], one["gpus_each"], one["run_id"]) for one in layouts] == [("a", 1, "other")]
    assert json.dumps(layouts)
    assert write_report(folder, tmp_path / "again").index.read_bytes() == files.index.read_bytes()
    (picture,) = layout_pictures(analyse(folder).layouts)
    assert "ddtree 31, 2 x 1 GPU on a, of the host" in picture.description
