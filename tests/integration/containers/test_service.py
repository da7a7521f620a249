"""Containers as services of a sweep, through a real sshd: dead ones, killed ones, and hosts out of reach."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_ops.containers.connection import HostLink
from ddtree_ops.containers.service import ContainerLauncher, ContainerService, Place
from ddtree_ops.errors import BadInput, JobFailed
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.services.base import Identity, Service, ServiceSpec
from ddtree_ops.services.readiness import ServiceDied, require_alive

from .conftest import Remote
from .test_engine import until
from .test_link import get

pytestmark = [pytest.mark.root, pytest.mark.docker, pytest.mark.sshd]
NAME = "lab-dflash-0"
PORT = 18432


def spec(name: str = "dflash") -> ServiceSpec:
    identity = Identity("reference", "1", "0" * 64, None, "float32", None, None, ())
    return ServiceSpec(name, Arm.DFLASH, None, identity)


@pytest.fixture
def link(remote: Remote) -> Iterator[HostLink]:
    with remote.link(probe_s=0.5) as link:
        yield link


@pytest.fixture
def place(remote: Remote, link: HostLink) -> Place:
    """A web server in a container that was created, not started."""
    address = remote.host.gateway
    script = f"echo serving at {PORT}; exec httpd -f -p {address}:{PORT} -h /www"
    link.engine().create(remote.docker.spec(NAME, script, network="host"))
    return Place(link, NAME, PORT, address)


def started(place: Place, **options: object) -> ContainerService:
    service = ContainerService(spec(), place, **options)  # type: ignore[arg-type]
    service.start()
    until(lambda: _answers(service))
    return service


def _answers(service: Service) -> bool:
    try:
        return get(service.url) == "ok"
    except OSError:
        return False


def test_a_container_is_started_reached_and_stopped(place: Place) -> None:
    service = started(place)
    assert service.alive()
    assert service.exit_code() is None
    assert service.death() is None
    assert service.condition() == "container lab-dflash-0 on gpu-a: running"
    assert service.log_tail() == f"serving at {PORT}"
    require_alive(service)
    service.stop()
    service.stop()
    until(lambda: not service.alive())
    assert service.exit_code() == -15


def test_a_container_that_ran_before_goes_on_after_the_sweep(place: Place, link: HostLink) -> None:
    started(place)
    second = started(place)
    second.stop()
    time.sleep(0.3)
    assert second.alive()
    found = link.engine().find(NAME)
    assert found is not None
    assert found.running


def test_a_killed_container_is_dead_at_once_with_its_signal_and_last_words(
    place: Place, link: HostLink
) -> None:
    service = started(place)
    with link.engine()._call("kill") as client:
        client.kill(NAME)
    time.sleep(0.3)
    assert not service.alive()
    assert service.exit_code() == -9
    with pytest.raises(ServiceDied, match=r"was killed by signal 9(?s:.*)serving at"):
        require_alive(service)


def test_a_container_that_somebody_removed_is_dead_and_says_so(place: Place, link: HostLink) -> None:
    service = started(place)
    link.engine()._remove(NAME, force=True)
    time.sleep(0.3)
    assert not service.alive()
    assert service.exit_code() is None
    assert service.log_tail() == ""
    with pytest.raises(ServiceDied, match="is not there any more"):
        require_alive(service)


def test_a_cut_network_is_no_death_within_the_grace_and_costs_little_to_ask(
    place: Place, remote: Remote
) -> None:
    notes: list[str] = []
    service = started(place, grace_s=600, wait_s=0.5, note=notes.append)
    remote.host.cut()
    time.sleep(0.3)
    begun = time.monotonic()
    for _ in range(8):
        assert service.alive()
        time.sleep(0.25)
    assert time.monotonic() - begun - 8 * 0.25 < 20
    assert "nothing is known for" in service.condition()
    assert "gpu-a" in service.condition()
    assert "nothing is known for" in service.log_tail()
    assert service.exit_code() is None
    until(lambda: service.alive() and any("counts as alive" in note for note in notes))
    remote.host.mend()
    until(lambda: service.alive() and notes[-1].endswith("answers again"))
    assert len(notes) == 2
    assert service.condition().endswith("running")
    assert _answers(service)


def test_a_host_out_of_reach_for_longer_than_the_grace_is_given_up_with_that_reason(
    place: Place, remote: Remote
) -> None:
    service = started(place, grace_s=2, wait_s=0.3)
    remote.host.cut()
    time.sleep(0.3)
    assert service.alive()
    until(lambda: not service.alive())
    with pytest.raises(ServiceDied, match="nothing is known for"):
        require_alive(service)


def test_a_killed_connection_is_mended_by_the_next_look(place: Place, remote: Remote) -> None:
    service = started(place)
    url = service.url
    remote.host.end_sessions()
    until(lambda: service.alive() and service.condition().endswith("running") and _answers(service))
    assert service.url == url


def test_a_service_without_a_container_is_named(place: Place, link: HostLink, tmp_path: Path) -> None:
    launcher = ContainerLauncher({("dflash", 0): place})
    assert launcher.create(spec()).place is place
    with pytest.raises(BadInput, match=r"'ddtree'.*allowed: dflash"):
        launcher.create(spec("ddtree"))
    missing = ContainerService(spec(), Place(link, "lab-nothing-0", PORT))
    with pytest.raises(JobFailed, match="no container lab-nothing-0 on gpu-a"):
        missing.start()
