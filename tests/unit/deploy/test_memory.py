"""What does not fit is refused before anything is touched, with the keys that would make it fit."""

from __future__ import annotations

import pytest

from ddtree_ops.deploy.memory import memory_of, require_fit
from ddtree_ops.errors import BadInput
from ddtree_ops.memory.planner import Verdict

from .clusters import cluster, rehearsal


def test_a_service_that_does_not_fit_is_refused_with_keys_that_the_engine_has() -> None:
    service = {"name": "tree", "arm": "ddtree", "budget": 63, "port": 30001, "max_running_requests": 8}
    fits = memory_of(cluster([service, {"name": "plain", "arm": "ar", "port": 30011}]))
    assert [(fit.service, fit.verdict is Verdict.NO) for fit in fits] == [("tree", True), ("plain", False)]
    with pytest.raises(BadInput) as error:
        require_fit(fits)
    assert error.value.message.startswith("services.tree: does not fit on its card: ")
    assert "max_running_requests: " in error.value.message
    assert "scratch: stash" in error.value.message
    assert "plain" not in error.value.message


def test_an_unknown_shape_is_told_and_stops_nothing() -> None:
    fits = memory_of(cluster(model={"path": "/srv/target"}))
    assert {fit.verdict for fit in fits} == {None}
    assert "/srv/target is not known here" in fits[0].reason
    require_fit(fits)


def test_the_cpu_engine_needs_no_plan() -> None:
    assert memory_of(rehearsal()) == []
