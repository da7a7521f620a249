"""What a host's containers need, from what is wanted and what is there."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.containers.found import Found
from ddtree_ops.containers.spec import ContainerSpec
from ddtree_ops.deploy.layout import Replica, lay_out
from ddtree_ops.deploy.render import Surroundings, render
from ddtree_ops.deploy.steps import Action, Step, spec_diff, steps_of

from .clusters import rehearsal

SERVICES = [
    {"name": "plain", "arm": "ar", "port": 30001},
    {"name": "tree", "arm": "ddtree", "budget": 31, "port": 30011, "replicas": 2},
]
IMAGE = "sha256:" + "1" * 64


def wanted(services: list[dict[str, Any]] = SERVICES) -> list[tuple[Replica, ContainerSpec]]:
    cluster = rehearsal(services)
    around = Surroundings(IMAGE, Path())
    return [(replica, render(cluster, replica, around)) for replica in lay_out(cluster, ["a"])]


def found(spec: ContainerSpec, **changes: Any) -> Found:
    data = json.loads(json.dumps(asdict(spec), default=dict))
    one = Found(
        spec.name, "id", "lab", spec.service, spec.replica, spec.config_hash, spec.image, "running", spec=data
    )
    return replace(one, **changes)


def steps(
    there: list[Found], pairs: list[tuple[Replica, ContainerSpec]] | None = None, **options: Any
) -> dict[str, Action]:
    pairs = wanted() if pairs is None else pairs
    options = {"known": ["plain", "tree"], **options}
    return {step.name: step.action for step in steps_of("a", pairs, there, **options)}


def test_nothing_there_means_create_and_all_equal_means_nothing() -> None:
    assert set(steps([]).values()) == {Action.CREATE}
    assert set(steps([found(spec) for _, spec in wanted()]).values()) == {Action.UNCHANGED}


@pytest.mark.parametrize(
    ("changes", "action"),
    [
        ({"config_hash": "other"}, Action.REPLACE),
        ({"config_hash": None, "spec": None}, Action.REPLACE),
        ({"config_hash": "other", "state": "exited", "exit_code": 1}, Action.REPLACE),
        ({"state": "created"}, Action.CREATE),
        ({"state": "exited", "exit_code": 137}, Action.START),
        ({"health": "unhealthy"}, Action.RESTART),
        ({"health": "starting"}, Action.UNCHANGED),
    ],
)
def test_each_state_has_its_step(changes: dict[str, Any], action: Action) -> None:
    first, *others = [found(spec) for _, spec in wanted()]
    result = steps([replace(first, **changes), *others])
    assert result["lab-plain-0"] is action
    assert {result[name] for name in ("lab-tree-0", "lab-tree-1")} == {Action.UNCHANGED}


def test_recreate_replaces_what_is_equal() -> None:
    assert set(steps([found(spec) for _, spec in wanted()], recreate=True).values()) == {Action.REPLACE}


def test_what_the_file_no_longer_names_goes_and_what_is_not_ours_to_judge_stays() -> None:
    everything = [found(spec) for _, spec in wanted()]
    there = [
        *everything,
        replace(everything[0], name="lab-old-0", service="old"),
        replace(everything[1], name="lab-tree-2", replica=2),
        replace(everything[0], name="lab-plain-0.previous", previous=True),
        replace(everything[0], name="lab-p2p-probe", one_shot=True),
        replace(everything[0], name="lab-door-0", service="door"),
    ]
    result = steps(there, known=["plain", "tree", "door"])
    assert {name for name, action in result.items() if action is Action.REMOVE} == {"lab-old-0", "lab-tree-2"}
    assert set(result) == {"lab-old-0", "lab-tree-2", "lab-plain-0", "lab-tree-0", "lab-tree-1"}


def test_a_limit_to_one_service_touches_no_other() -> None:
    pairs = [(replica, spec) for replica, spec in wanted() if replica.service.name == "tree"]
    stray = replace(found(pairs[0][1]), name="lab-old-0", service="old")
    extra = replace(found(pairs[0][1]), name="lab-tree-2", replica=2)
    assert steps([stray, extra], pairs, services=["tree"]) == {
        "lab-tree-2": Action.REMOVE, "lab-tree-0": Action.CREATE, "lab-tree-1": Action.CREATE,
    }  # fmt: skip


def test_a_difference_names_options_with_their_values() -> None:
    pairs = wanted()
    old = found(pairs[1][1])
    spec = replace(
        pairs[1][1],
        image="sha256:" + "2" * 64,
        env={**pairs[1][1].env, "NEW": "1"},
        argv=tuple("63" if part == "31" else part for part in pairs[1][1].argv),
    )
    assert spec_diff(old.spec, spec) == (
        f"- image {IMAGE}", f"+ image sha256:{'2' * 64}", "- argv --budget 31", "+ argv --budget 63",
        "+ env NEW=1",
    )  # fmt: skip
    assert spec_diff(old.spec, pairs[1][1]) == ()
    assert spec_diff(None, spec) == ()
    step = steps_of("a", [(pairs[1][0], spec)], [old], known=["tree"])[0]
    assert step.reason == "changed: image, argv, env"


def test_a_step_says_in_json_what_would_run() -> None:
    replica, spec = wanted()[1]
    data = Step("a", spec.name, Action.CREATE, "it is not there", replica, spec).as_json()
    assert (data["service"], data["config_hash"], data["image"]) == ("tree", spec.config_hash, IMAGE)
    assert data["argv"][:3] == ["python3", "-m", "ddtree_engine.reference"]
