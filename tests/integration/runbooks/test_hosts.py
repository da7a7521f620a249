"""Plays that look at a host or set it up: a real engine, a real sshd, roles below a temporary root."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.ssh_host import PORT, NetnsHost, run_sshd

from .conftest import Lab, free_port

pytestmark = [pytest.mark.root, pytest.mark.docker]

SLEEP = "exec sleep 600"


@contextmanager
def engine(folder: Path, arm: str, *options: str) -> Iterator[int]:
    """The CPU engine on a port of this machine."""
    port = free_port()
    argv = [sys.executable, "-m", "ddtree_engine.reference", "--arm", arm, "--port", str(port), *options]
    with (folder / f"{arm}.log").open("wb") as log:
        process = subprocess.Popen([*argv, "--threads", "1"], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                break
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def generate(port: int) -> None:
    sampling = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"text": "def add(a, b):", "sampling_params": sampling}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def test_accept_length_and_settings_come_from_what_real_engines_say(lab: Lab) -> None:
    """The container stands for the service; the engine that answers at its port is real."""
    with (
        engine(lab.folder, "ddtree", "--budget", "15") as tree,
        engine(lab.folder, "dflash", "--dtype", "bfloat16") as chain,
    ):
        lab.start("lab-tree-0", "tree", script=SLEEP, port=tree)
        lab.start("lab-chain-0", "chain", script=SLEEP, port=chain)
        generate(tree)
        found = lab.host("output-differs", "--set", "seconds=0")["found"]
    text = "\n".join(found)
    assert "lab-tree-0: ready" in found
    assert "lab-tree-0: accept length" in text, text
    assert "(24 tokens in " in text or "(23 tokens in " in text, text
    assert "lab-chain-0: 0 tokens and no verify step" in text
    assert "settings differ: ddtree.dtype: lab-chain-0 bfloat16, lab-tree-0 float32" in found
    assert "ddtree.budget" not in text, "arms may differ in what makes them arms"


@pytest.mark.slow
def test_a_driver_upgrade_drains_sets_up_reads_again_and_starts_again(lab: Lab) -> None:
    root = lab.folder / "root"
    root.mkdir()
    lab.cards(["0, GPU-aaaa, 00000000:41:00.0"])
    lab.variables.update(
        nvidia_driver_root=str(root),
        nvidia_driver_packages=[],
        nvidia_driver_loaded_file=str(root / "none"),
        nvidia_driver_update_initramfs=False,
        container_runtime_root=str(root),
        container_runtime_toolkit_packages=[],
        gpu_settings_root=str(root),
        gpu_settings_cpu_governor="",
        gpu_settings_update_grub=False,
    )
    lab.keys.update(
        engine="sglang",
        model={"repo": "lab/model"},
        drafter={"repo": "lab/drafter"},
        gpu={"count": 3, "power_cap_w": 450},
        runtime={"manage": False, "socket": str(lab.docker.socket)},
    )
    lab.start("lab-tree-0", "tree")
    lab.start("lab-tree-1", "tree")
    lab.call("stop", "-t", "1", "lab-tree-1")
    before = lab.started("lab-tree-0")

    answer = lab.run("driver-upgrade", "--limit", "gpu-a", "--yes")
    plan = answer["hosts"]["gpu-a"]["plan"]
    assert plan[:2] == ["drain and stop lab-tree-0", "install the driver of branch 580"]
    assert plan[-1] == "start lab-tree-0"
    assert (root / "etc" / "modprobe.d" / "ddtree-nouveau.conf").exists()
    assert (lab.folder / "caps").read_text() == "450\n", "caps are reset by a driver change"
    assert lab.state("lab-tree-0") == "running"
    assert lab.started("lab-tree-0") > before
    assert lab.state("lab-tree-1") == "exited", "it was stopped before, and not by us"
    assert any(line.startswith("lab-tree-0: ready") for line in answer["hosts"]["gpu-a"]["found"])
    assert "driver.answers" in {one["id"] for one in answer["findings"]}, "the host was not read again"


def test_hosts_without_cards_are_spared_a_driver(lab: Lab) -> None:
    failed = lab.host("driver-upgrade", "--limit", "gpu-a", "--check", code=1)["failed"]
    assert "hosts of the CPU engine need no driver" in failed


def test_throttled_cards_are_seen_and_caps_set_again_when_asked(lab: Lab) -> None:
    lab.cards(["0, GPU-aaaa, 00000000:41:00.0"], rest="card, 91, 300, 600, 900, 3000, 13365, 99, 1, 2, 0x40")
    lab.variables.update(gpu_settings_root=str(lab.folder / "root"), gpu_settings_cpu_governor="")
    lab.keys.update(gpu={"power_cap_w": 450})
    found = lab.host("gpu-throttling", "--set", "seconds=0")
    assert any("GPU 0: up to 91 C" in line and "hardware thermal slowdown" in line for line in found["found"])
    assert (found["changed"], (lab.folder / "caps").read_text()) == (0, "600.00\n")
    lab.host("gpu-throttling", "--set", "seconds=0", "--set", "apply=true", "--yes")
    assert (lab.folder / "caps").read_text() == "450\n"


@pytest.fixture
def netns_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetnsHost]:
    with run_sshd(tmp_path_factory.mktemp("sshd")) as host:
        yield host


@pytest.mark.sshd
def test_evidence_comes_over_ssh_and_nothing_stays_on_the_host(lab: Lab, netns_host: NetnsHost) -> None:
    lab.connection = {"address": netns_host.address, "port": PORT, "user": "root"}
    keys = netns_host.folder
    lab.keys["ssh"] = {
        "become": False, "private_key": str(keys / "user_key"), "known_hosts": str(keys / "known_hosts"),
    }  # fmt: skip
    lab.variables["ansible_remote_tmp"] = str(lab.folder / "remote")
    lab.start("lab-tree-0", "tree")
    answer = lab.host("nccl-hang", "--set", "seconds=0", "--service", "tree")
    assert any(line.startswith("lab-tree-0: running") for line in answer["found"])
    assert "nvidia-smi gives no answer" in "\n".join(answer["found"])
    assert (lab.out / "gpu-a" / "logs" / "lab-tree-0.txt").exists()
    assert not (lab.out / "gpu-a.tar.gz").exists()
    for place in (netns_host.temporary, lab.folder / "remote"):
        assert list(place.iterdir()) == [], "something stayed on the host"
