"""An image that is too new for a driver is refused before anything is pulled, with a way out."""

from __future__ import annotations

import pytest

from ddtree_ops.errors import BadEnvironment, BadInput
from ddtree_ops.images.build import ensure_image
from ddtree_ops.images.cuda import require_cuda, version
from ddtree_ops.schemas.cluster import Cluster


@pytest.mark.parametrize(
    ("image", "driver"), [("13.0", "13.0"), ("12.9", "13.0"), ("13.0", "13.10"), ("13.9", "13.10")]
)
def test_a_driver_runs_its_own_cuda_and_older(image: str, driver: str) -> None:
    require_cuda(image, {"gpu-a": driver})


@pytest.mark.parametrize(("image", "driver"), [("13.2", "13.0"), ("13.0", "12.9"), ("13.10", "13.9")])
def test_a_newer_image_is_refused_and_the_host_named(image: str, driver: str) -> None:
    with pytest.raises(BadEnvironment, match=f"gpu-a has a driver for CUDA up to {driver}") as caught:
        require_cuda(image, {"gpu-a": driver, "gpu-b": image})
    assert "gpu-b" not in caught.value.message
    assert caught.value.remedy is not None
    assert f"CUDA {driver} or older" in caught.value.remedy


def test_the_remedy_names_the_branch_and_an_image_that_runs_everywhere() -> None:
    with pytest.raises(BadEnvironment) as caught:
        require_cuda("13.0", {"gpu-a": "12.9", "gpu-b": "12.8"})
    assert caught.value.remedy is not None
    assert "branch 580" in caught.value.remedy
    assert "CUDA 12.8 or older" in caught.value.remedy


def test_a_driver_that_is_not_known_does_not_hold_a_host_up() -> None:
    require_cuda("13.0", {"gpu-a": None})


@pytest.mark.parametrize("text", ["", "13", "13.x", "thirteen.0"])
def test_what_is_no_version_is_bad_input(text: str) -> None:
    with pytest.raises(BadInput, match=r"allowed: MAJOR\.MINOR"):
        version(text)


def test_nothing_is_asked_of_a_host_whose_driver_is_too_old(tmp_path) -> None:
    class Untouchable:
        def engine(self):
            raise AssertionError("the host was asked before the driver was compared")

    cluster = Cluster.model_validate(
        {
            "schema": 1,
            "name": "lab",
            "hosts": {"inline": {"gpu-a": {}}},
            "model": {"repo": "a/b"},
            "services": [{"name": "ar", "arm": "ar", "port": 30000}],
        }
    )
    links = {"gpu-a": Untouchable()}
    with pytest.raises(BadEnvironment, match="error 804"):
        ensure_image(cluster, links, folder=tmp_path, drivers={"gpu-a": "12.8"})
    assert not list(tmp_path.iterdir())
