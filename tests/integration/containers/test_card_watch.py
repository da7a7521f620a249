"""Looking at a host's GPUs through its link: here, over a real sshd, and when there is no nvidia-smi."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from ddtree_ops.containers.card_watch import CardWatch
from ddtree_ops.containers.connection import HostLink
from ddtree_ops.containers.ssh import SshTarget
from tests.support.nvidia_smi import busy, install, show
from tests.support.ssh_host import NetnsHost

from .test_engine import until

GPUS = ("GPU-aaaa", "GPU-bbbb")
CARDS = [busy(number, uuid) for number, uuid in enumerate(GPUS)]


def watch_of(target: SshTarget) -> tuple[HostLink, CardWatch]:
    link = HostLink("gpu-a", target, patience_s=0)
    return link, CardWatch({"gpu-a": link}, period_ms=20, again_s=0.05)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this machine's nvidia-smi, if there is one."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def seen(watch: CardWatch, gpu: str) -> int:
    return len(watch.samples().get(gpu, ()))


def test_every_card_of_this_machine_is_sampled_until_the_end(here: Path) -> None:
    state = install(here, *CARDS)
    link, watch = watch_of(SshTarget("here", local=True))
    with link:
        watch.start()
        until(lambda: all(seen(watch, gpu) >= 3 for gpu in GPUS))
        show(state, busy(0, GPUS[0], temperature_gpu="88"), CARDS[1])
        until(lambda: watch.samples()[GPUS[0]][-1].temperature == 88.0)
        pid = int((here / "pid").read_text())
        watch.stop()
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    first = watch.samples()[GPUS[1]][0]
    assert (first.host, first.card, first.power, first.reasons) == ("gpu-a", 1, 598.2, 4)
    assert [one.at for one in watch.samples()[GPUS[1]]] == sorted(one.at for one in watch.samples()[GPUS[1]])
    watch.stop()


def test_a_query_that_ends_is_begun_anew(here: Path) -> None:
    install(here, *CARDS)
    link, watch = watch_of(SshTarget("here", local=True))
    with link:
        watch.start()
        until(lambda: seen(watch, GPUS[0]) > 0)
        pid = int((here / "pid").read_text())
        os.kill(pid, signal.SIGKILL)
        until(lambda: int((here / "pid").read_text() or 0) not in {0, pid})
        before = seen(watch, GPUS[0])
        until(lambda: seen(watch, GPUS[0]) > before)
        assert watch.trouble("gpu-a") is None
        watch.stop()


def test_a_machine_without_cards_has_no_samples_and_says_why(here: Path) -> None:
    link, watch = watch_of(SshTarget("here", local=True))
    with link:
        watch.start()
        until(lambda: watch.trouble("gpu-a") is not None)
        watch.stop()
    assert watch.samples() == {}
    assert "nvidia-smi" in str(watch.trouble("gpu-a"))
    assert "not found" in str(watch.trouble("gpu-a"))


@pytest.mark.root
@pytest.mark.sshd
def test_a_remote_host_is_looked_at_through_its_ssh_and_one_that_is_lost_costs_samples_only(
    netns_host: NetnsHost,
) -> None:
    install(netns_host.programs, *CARDS)
    link, watch = watch_of(netns_host.target())
    with link:
        link.connect(patience_s=60)
        watch.start()
        until(lambda: all(seen(watch, gpu) >= 3 for gpu in GPUS))
        netns_host.end_sessions()
        until(lambda: watch.trouble("gpu-a") is not None)
        before = seen(watch, GPUS[1])
        link.connect(patience_s=60)
        until(lambda: seen(watch, GPUS[1]) > before)
        watch.stop()
    assert not [one for one in threading.enumerate() if one.name == "ddtree-cards-gpu-a"]
    pid = int((netns_host.programs / "pid").read_text())
    until(lambda: not psutil.pid_exists(pid))
