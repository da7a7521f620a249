"""A sweep's way around the cards of a cluster, planned before anything moves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.bench.aa import aa_sweep
from ddtree_ops.cli import app
from ddtree_ops.containers.found import Found
from ddtree_ops.deploy.layout import Replica, lay_out
from ddtree_ops.deploy.lockfile import LockFile, write_lock
from ddtree_ops.deploy.rotation import (
    ClusterMover,
    count_places,
    plan_rotation,
    rotating,
)
from ddtree_ops.deploy.session import open_cluster
from ddtree_ops.errors import BadInput
from ddtree_ops.schemas.cluster import Cluster
from ddtree_ops.schemas.results import ReplicaAt
from ddtree_ops.schemas.sweep import ClusterEngine, Sweep
from tests.unit.deploy.clusters import cards, cluster, rehearsal

SINGLE = [
    {"name": "linear", "arm": "dflash", "port": 30001},
    {"name": "shadow", "arm": "shadow", "budget": 31, "port": 30011},
    {"name": "tree", "arm": "ddtree", "budget": 31, "port": 30021},
]


def measured(made: Any, there: dict[str, Any]) -> dict[str, list[Replica]]:
    found: dict[str, list[Replica]] = {}
    for one in lay_out(made, ["a"], there):
        found.setdefault(one.service.name, []).append(one)
    return found


def places_of(made: Any, there: dict[str, Any], positions: int) -> dict[str, list[str]]:
    rotation = plan_rotation(made, measured(made, there), there, positions)
    return {name: rotation.places(name) for name in rotation.seats}


def test_over_all_positions_every_arm_is_on_every_card_and_never_two_on_one() -> None:
    made, there = cluster(SINGLE), {"a": cards(4)}
    positions = count_places(made, ["a"], there)
    assert positions == 4
    places = places_of(made, there, positions)
    every = {f"a/GPU-a{number}" for number in range(4)}
    assert all(set(found) == every for found in places.values())
    for position in range(positions):
        assert len({found[position] for found in places.values()}) == len(SINGLE)
    assert places["linear"][:2] == ["a/GPU-a0", "a/GPU-a1"]


def test_a_service_with_cards_of_its_own_stays_and_the_others_go_around_it() -> None:
    services = [{**SINGLE[0], "gpus": [1]}, *SINGLE[1:]]
    made, there = cluster(services), {"a": cards(4)}
    assert count_places(made, ["a"], there) == 3
    places = places_of(made, there, 3)
    assert set(places["linear"]) == {"a/GPU-a1"}
    assert set(places["tree"]) == {"a/GPU-a0", "a/GPU-a2", "a/GPU-a3"}


def test_all_replicas_of_a_service_go_around_and_each_says_which_card_it_has() -> None:
    made, there = cluster([{**SINGLE[0], "replicas": 2}, SINGLE[1]]), {"a": cards(4)}
    rotation = plan_rotation(made, measured(made, there), there, 4)
    seats = rotation.seats["linear"]
    assert [[at.cards for at in position] for position in seats] == [
        [[0], [1]],
        [[1], [2]],
        [[2], [3]],
        [[3], [0]],
    ]
    assert [(at.number, at.endpoint) for at in seats[1]] == [(0, "127.0.0.1:30001"), (1, "127.0.0.1:30002")]
    assert rotation.places("linear")[3] == "a/GPU-a3, a/GPU-a0"
    assert rotation.of("linear").places == [f"a/GPU-a{number}" for number in range(4)]


def test_services_over_several_cards_move_as_groups() -> None:
    made, there = cluster([{**one, "tp": 2} for one in SINGLE]), {"a": cards(8)}
    positions = count_places(made, ["a"], there)
    assert positions == 4
    rotation = plan_rotation(made, measured(made, there), there, positions)
    for name in ("linear", "shadow", "tree"):
        seats = [at for (at,) in rotation.seats[name]]
        assert sorted(at.cards for at in seats) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rotation.of("tree").places[0] == "a/GPU-a0+GPU-a1"


def test_a_rotation_of_groups_that_cannot_be_exchanged_is_refused_before_anything_moves() -> None:
    made, there = cluster([{**SINGLE[0], "tp": 4}, {**SINGLE[1], "replicas": 2}]), {"a": cards(6)}
    assert len(lay_out(made, ["a"], there)) == 3
    with pytest.raises(BadInput, match=r"services\.shadow: its cards cannot be exchanged with a group of 4"):
        turned(made, there)


def test_the_host_with_most_cards_sets_the_number_of_places() -> None:
    assert count_places(cluster(SINGLE), ["a", "b"], {"a": cards(3), "b": cards(6, host="b")}) == 6


def test_the_cpu_engine_has_one_place_on_a_host() -> None:
    made = rehearsal(SINGLE)
    assert count_places(made, ["a"], {}) == 1
    assert places_of(made, {}, 2)["tree"] == ["a", "a"]
    assert ReplicaAt(host="a", gpus=["GPU-1", "GPU-2"]).place == "a/GPU-1+GPU-2"


def write(folder: Path, **keys: Any) -> Path:
    file = folder / "cluster.yaml"
    data = {
        "schema": 1,
        "name": "lab",
        "engine": "reference",
        "hosts": {"inline": {"here": {"vars": {"ansible_connection": "local"}}}},
        "image": {"base": "debian:12"},
        "services": SINGLE,
        **keys,
    }
    file.write_text(yaml.safe_dump(data), encoding="utf-8")
    return file


def turned(made: Cluster, there: dict[str, Any], **keys: Any) -> tuple[int, list[str]]:
    notes: list[str] = []
    sweep = Sweep.model_validate({"engine": {"kind": "cluster", "file": "x", "rotate": True}, **keys})
    found = rotating(
        sweep,
        made,
        [one for some in measured(made, there).values() for one in some],
        there,
        note=notes.append,
    )
    return found.repeats, notes


def test_a_sweep_has_a_repeat_for_each_place_unless_it_names_them() -> None:
    made, there = cluster(SINGLE), {"a": cards(4), "b": cards(2, host="b")}
    assert turned(made, there) == (4, [])  # host b, with too few cards, is not measured
    assert turned(made, there, repeats=8) == (8, [])
    repeats, (note,) = turned(made, there, repeats=6)
    assert repeats == 6
    assert "6 repeats over 4 places" in note


@pytest.mark.parametrize("keys", [{}, {"repeats": 1}], ids=["one place", "one repeat"])
def test_fewer_than_two_positions_are_no_rotation(keys: dict[str, int]) -> None:
    with pytest.raises(BadInput) as caught:
        turned(rehearsal(SINGLE), {}, **keys)
    assert "repeats: found 1, allowed: 2 or more" in caught.value.message


@dataclass
class Containers:
    """Stands in for a link to a host and for its engine: what `find` is to answer."""

    found: Found | None

    def engine(self) -> Containers:
        return self

    def find(self, name: str) -> Found | None:
        return self.found


@pytest.mark.parametrize(
    ("change", "there"),
    [
        ({}, True),
        ({"gpus": ("GPU-a3",)}, False),
        ({"image": "sha256:other"}, False),
        ({"state": "exited"}, False),
        ({"turn": 0}, False),
        (None, False),
    ],
    ids=["as planned", "another card", "another image", "ended", "another turn", "no container"],
)
def test_a_service_stands_at_a_position_only_on_its_card_with_its_image(
    tmp_path: Path, change: dict[str, Any] | None, there: bool
) -> None:
    made, on = cluster(SINGLE), {"a": cards(4)}
    replicas = measured(made, on)["tree"]
    rotation = plan_rotation(made, {"tree": replicas}, on, 4)
    keys: dict[str, Any] = {"image": "sha256:ours", "state": "running", "gpus": ("GPU-a1",), "turn": 3}
    keys |= change or {}
    turn = keys.pop("turn")
    found = Found("lab-tree-0", "1", "lab", "tree", 0, "hash", keys.pop("image"), keys.pop("state"), **keys)
    with open_cluster(write(tmp_path), connect=False) as session:
        session.cluster = made
        session.links = {"a": Containers(None if change is None else found)}  # type: ignore[dict-item]
        write_lock(session.file, LockFile(turn=turn))
        mover = ClusterMover(session, rotation, {"tree": replicas}, {"tree": "sha256:ours"})
        assert mover.stands_at(3) is there
        session.links = {}


def test_a_cluster_that_forbids_to_move_services_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any host is asked."""
    file = write(tmp_path, rotation={"enabled": False})
    assert app.run(["--json", "bench", "sweep", "--cluster", str(file), "--rotate", "--dry-run"]) == 2
    (error,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert error["message"].startswith(f"{file}: rotation.enabled: found False, allowed: true")


@pytest.mark.parametrize(
    "engine", [None, {"kind": "external", "services": [{"arm": "ar", "url": "http://127.0.0.1:1"}]}]
)
def test_only_the_services_of_a_cluster_can_be_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: dict[str, Any] | None
) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({"schema": 1} | ({"engine": engine} if engine else {})))
    assert app.run(["--json", "bench", "sweep", str(file), "--rotate", "--dry-run"]) == 2
    (error,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = engine["kind"] if engine else "local"
    assert f"{file}: engine.kind: found '{found}', allowed: cluster, for --rotate" in error["message"]


def test_a_service_against_itself_is_a_rotation_of_that_service_alone(tmp_path: Path) -> None:
    sweep = aa_sweep(write(tmp_path), "tree", {"repeats": 2, "prompts": None, "concurrencies": [4]})
    assert isinstance(sweep.engine, ClusterEngine)
    assert sweep.engine.rotate
    assert [(one.arm.value, one.budgets) for one in sweep.arms] == [("ddtree", [31])]
    assert (sweep.name, sweep.repeats, sweep.concurrencies) == ("aa", 2, [4])
    assert {"arms", "repeats"} <= sweep.model_fields_set


@pytest.mark.parametrize("name", ["nobody", "wrong"])
def test_a_service_that_is_not_there_or_unsafe_is_not_measured_against_itself(
    tmp_path: Path, name: str
) -> None:
    unsafe = {"name": "wrong", "arm": "unsafe", "budget": 15, "allow_hybrid_unsafe": True, "port": 30041}
    file = write(tmp_path, services=[*SINGLE, unsafe])
    with pytest.raises(BadInput) as caught:
        aa_sweep(file, name, {})
    assert f"{file}: --service: found '{name}', allowed: linear, shadow, tree" in caught.value.message
