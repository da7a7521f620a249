"""The probe between GPUs through a real engine that has none: every way to fail ends in one message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddtree_ops.containers.spec import ContainerSpec
from ddtree_ops.deploy.p2p import require_peers
from ddtree_ops.deploy.steps import Action, Step
from ddtree_ops.errors import JobFailed

from .conftest import Lab

pytestmark = [pytest.mark.docker, pytest.mark.root]


def step(image: str) -> Step:
    spec = ContainerSpec("lab-wide-0", "lab", "wide", 0, image, ("python3", "-c", "0"), shm_gib=1)
    return Step("here", spec.name, Action.CREATE, "it is not there", None, spec)


def test_an_engine_without_gpus_is_told_and_nothing_is_left(lab: Lab, image: str) -> None:
    one = step(image)
    assert one.spec is not None
    wide = replace(one, spec=replace(one.spec, gpus=("GPU-a", "GPU-b")))
    with pytest.raises(
        JobFailed, match=r"the GPUs GPU-a, GPU-b do not talk: .*could not select device"
    ) as told:
        require_peers(lab.engine, "lab", wide, image)
    assert "tp: 1" in str(told.value.remedy)
    assert lab.ids() == {}


def test_a_probe_that_fails_inside_is_told_in_its_own_words(lab: Lab, image: str) -> None:
    with pytest.raises(JobFailed, match="No module named 'torch'"):
        require_peers(lab.engine, "lab", two_ranks(step(image)), image)
    assert lab.ids() == {}


def two_ranks(one: Step) -> Step:
    """Wide in count only: this engine could not start a container with GPUs."""
    assert one.spec is not None

    class Wide(tuple[str, ...]):
        def __len__(self) -> int:
            return 2

        def __bool__(self) -> bool:
            return False

    return replace(one, spec=replace(one.spec, gpus=Wide()))
