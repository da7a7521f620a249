"""Plays that handle containers, on a real Docker engine."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import pytest

from .conftest import Lab

pytestmark = [pytest.mark.root, pytest.mark.docker]

#: Serves once; after a restart it ends at once, as a service does whose configuration went bad.
ONCE = (
    'if [ -e /tmp/been ]; then echo "cannot bind: port in use"; exit 3; fi; '
    'echo > /tmp/been; exec httpd -f -p 127.0.0.1:"$1" -h /www'
)


def test_a_restart_takes_one_service_and_leaves_every_other_container(lab: Lab) -> None:
    lab.start("lab-tree-0", "tree")
    lab.start("lab-tree-1", "tree")
    lab.start("lab-tree-0.previous", "tree")
    lab.start("lab-chain-0", "chain")
    lab.call("stop", "-t", "1", "lab-tree-0.previous")
    names = ("lab-tree-0", "lab-tree-1", "lab-chain-0")
    before = {name: lab.started(name) for name in names}

    plan = lab.host("arm-restart", "--service", "tree", "--check")
    assert plan["plan"] == [
        "drain and stop lab-tree-0", "drain and stop lab-tree-1", "start lab-tree-0", "start lab-tree-1",
    ]  # fmt: skip
    assert {name: lab.started(name) for name in names} == before

    done = lab.host("arm-restart", "--service", "tree", "--yes")
    assert done["changed"] == 4
    assert [line.partition(" after")[0] for line in done["found"][-2:]] == [
        "lab-tree-0: ready", "lab-tree-1: ready",
    ]  # fmt: skip
    assert lab.started("lab-chain-0") == before["lab-chain-0"]
    assert lab.started("lab-tree-0") > before["lab-tree-0"]
    assert lab.started("lab-tree-1") > lab.started("lab-tree-0"), "both were away at the same time"
    assert lab.state("lab-tree-0.previous") == "exited", "what is kept for a rollback was started"


def test_a_drained_service_stays_stopped_and_draining_again_changes_nothing(lab: Lab) -> None:
    lab.start("lab-tree-0", "tree")
    argv = ("arm-restart", "--service", "tree", "--set", "start=false", "--yes")
    assert lab.host(*argv)["changed"] == 1
    assert lab.state("lab-tree-0") == "exited"
    assert lab.host(*argv)["changed"] == 0
    back = lab.host("arm-restart", "--service", "tree", "--yes")
    assert (back["plan"], back["changed"]) == (["start lab-tree-0"], 1), "what had stopped was stopped again"


def test_a_replica_that_ends_is_reported_at_once_and_the_next_one_goes_on_serving(lab: Lab) -> None:
    lab.start("lab-tree-0", "tree", script=ONCE)
    lab.start("lab-tree-1", "tree")
    before = lab.started("lab-tree-1")
    failed = lab.host("arm-restart", "--service", "tree", "--yes", code=1)["failed"]
    assert "lab-tree-0 exited with code 3" in failed, "it waited for a container that had ended"
    assert "cannot bind: port in use" in failed
    assert lab.started("lab-tree-1") == before


def test_nothing_is_changed_where_nobody_can_be_asked(lab: Lab) -> None:
    lab.start("lab-tree-0", "tree")
    before = lab.started("lab-tree-0")
    answer = lab.run("arm-restart", "--service", "tree", code=2)
    assert "nobody here to ask" in answer["message"]
    assert lab.started("lab-tree-0") == before


def test_evidence_has_logs_and_states_and_no_key(lab: Lab) -> None:
    lab.start("lab-tree-0", "tree", env=["SGLANG_API_KEY=sk-from-the-environment"])
    lab.call("stop", "-t", "1", "lab-tree-0")
    answer = lab.host("stuck-start", "--service", "tree")
    assert any(line.startswith("lab-tree-0: exited with code") for line in answer["found"])
    assert answer["changed"] == 0
    texts = {file.name: file.read_text() for file in (lab.out / "gpu-a").rglob("*") if file.is_file()}
    assert {"lab-tree-0.txt", "containers.json", "processes.txt", "df.txt"} <= texts.keys()
    assert "api_key=[redacted]" in texts["lab-tree-0.txt"]
    for name, text in texts.items():
        assert "sk-not-to-be-seen" not in text, name
        assert "sk-from-the-environment" not in text, name
    for file in [*lab.out.rglob("*.txt"), *lab.out.glob("*.log")]:
        assert file.stat().st_mode & 0o077 == 0, f"{file} can be read by others"


def test_a_faulty_card_drains_its_own_service_only(lab: Lab) -> None:
    (lab.folder / "dmesg").write_text(
        "[1.0] NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
        "[2.0] NVRM: Xid (PCI:0000:61:00): 31, pid=4711, name=python3, MMU fault\n"
    )
    lab.cards(["0, GPU-aaaa, 00000000:41:00.0", "1, GPU-bbbb, 00000000:61:00.0"])
    lab.variables["runbook_kernel_log"] = str(lab.folder / "dmesg")
    lab.start("lab-tree-0", "tree", labels=['ddtree.spec={"gpus": ["GPU-aaaa"]}'])
    lab.start("lab-tree-1", "tree", labels=['ddtree.spec={"gpus": ["GPU-bbbb"]}'])
    lab.start("lab-chain-0", "chain", labels=['ddtree.spec={"gpus": ["GPU-cccc"]}'])

    answer = lab.host("gpu-xid", "--limit", "gpu-a", "--check")
    assert "Xid 79 on 0000:41:00, 1 times: hardware" in answer["found"]
    # Its card has a fault; the other's does not answer at all.
    assert answer["plan"] == ["drain and stop lab-chain-0", "drain and stop lab-tree-0"]
    assert lab.state("lab-tree-0") == "running"

    lab.host("gpu-xid", "--limit", "gpu-a", "--yes")
    states = [lab.state(name) for name in ("lab-tree-0", "lab-chain-0", "lab-tree-1")]
    assert states == ["exited", "exited", "running"]
    assert "fallen off the bus" in (lab.out / "gpu-a" / "kernel.txt").read_text()


def test_a_full_disk_loses_only_what_is_ours_unused_and_old(lab: Lab) -> None:
    logs, models = lab.folder / "var" / "log", lab.folder / "var" / "state" / "models"
    old = [logs / "tree" / "tree.log.1", logs / "tree.log.2.gz", models / "blobs" / "abc.incomplete"]
    kept = [
        logs / "tree" / "tree.log",
        models / "blobs" / "weights",
        logs / "notes.txt",
        models / "new.incomplete",
    ]
    for file in (*old, *kept):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    for file in (*old, kept[1], kept[2]):
        os.utime(file, (time.time() - 30 * 86400,) * 2)
    ours, used, others = (imported(lab, *labels) for labels in (OURS, [*OURS, "LABEL n=2"], ["LABEL n=3"]))
    lab.call(
        "create", "--name", "lab-tree-0.previous", "--label", f"ddtree.cluster={'lab'}", used, "/bin/true"
    )
    for volume in ("lab-jit-old", "lab-jit-used", "other-jit-old", "data"):
        lab.call("volume", "create", volume)
    lab.call("create", "--volume", "lab-jit-used:/x", lab.docker.image, "/bin/true")

    freed = lab.host("disk-full", "--yes")
    assert (len(freed["plan"]), freed["changed"]) == (5, 3), freed  # three tasks: images, caches, files
    assert ours not in images(lab)
    assert {used, others} <= images(lab)
    assert set(lab.call("volume", "ls", "--quiet").split()) == {"lab-jit-used", "other-jit-old", "data"}
    assert [file.exists() for file in old] == [False] * 3
    assert [file.exists() for file in kept] == [True] * 4
    again = lab.host("disk-full", "--yes")
    assert (again["plan"], again["changed"]) == ([], 0)


def test_removal_refuses_while_something_is_served(lab: Lab) -> None:
    lab.start("lab-tree-0", "tree")
    failed = lab.host("remove-all", "--yes", "--set", "remove_user=false", code=1)["failed"]
    assert "services still run: lab-tree-0" in failed
    assert lab.state("lab-tree-0") == "running"


def test_removal_refuses_on_a_host_of_another_cluster(lab: Lab) -> None:
    lab.call("create", "--label", "ddtree.cluster=other", lab.docker.image, "/bin/true")
    assert "the host also serves other" in left(lab, "/var/lib/ddtree")["refused"]


def test_a_folder_near_the_root_is_not_deleted(lab: Lab) -> None:
    assert "/srv: too near the root" in left(lab, "/srv")["refused"]
    assert left(lab, "/srv/ddtree")["refused"] == ""


@pytest.mark.slow
def test_removal_leaves_the_weights_and_everything_of_others(lab: Lab) -> None:
    root, state, logs = (lab.folder / part for part in ("root", "var/state", "var/log"))
    ours = [
        "etc/modprobe.d/ddtree-nouveau.conf",
        "etc/logrotate.d/ddtree",
        "etc/systemd/system/ddtree-grafana.service",
    ]
    for name in (*ours, "etc/docker/daemon.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    for file in (
        state / "models" / "weights",
        state / "secrets" / "key",
        state / "files" / "a",
        logs / "a.log",
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    image = imported(lab, *OURS, tag="ddtree/lab-engine:1")
    other = imported(lab, "LABEL n=3", tag="somebody/else:1")
    lab.call("create", "--name", "lab-tree-0.previous", "--label", "ddtree.cluster=lab", image, "/bin/true")
    lab.call("volume", "create", "lab-jit-1")
    lab.call("volume", "create", "data")

    lab.host("remove-all", "--yes", "--set", "remove_user=false")
    assert [str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()] == [
        "etc/docker/daemon.json"
    ]
    assert [entry.name for entry in state.iterdir()] == ["models"]
    assert not logs.exists()
    assert lab.call("ps", "--all", "--quiet") == ""
    assert image not in images(lab)
    assert other in images(lab)
    assert lab.call("volume", "ls", "--quiet") == "data"
    again = lab.host("remove-all", "--yes", "--set", "remove_user=false")
    assert (again["plan"], again["changed"]) == ([], 0)
    paths = ("--state", str(state), "--models", str(state / "models"), "--logs", str(logs))
    assert lab.ask("left", *paths)["folders"] == []
    assert lab.ask("left", *paths, "--weights")["folders"] == [str(state)]


def left(lab: Lab, state: str) -> dict[str, Any]:
    return lab.ask("left", "--state", state, "--models", f"{state}/models", "--logs", "/var/log/ddtree-none")


OURS = ["LABEL ddtree.context-hash=abc"]


def imported(lab: Lab, *changes: str, tag: str | None = None) -> str:
    """An image of one small file of its own, untagged unless a tag is given; its id."""
    tree = lab.folder / f"tree-{time.monotonic_ns()}"
    tree.mkdir()
    (tree / "file").write_text(tree.name)
    archive = tree.with_suffix(".tar")
    subprocess.run(["tar", "-C", str(tree), "-cf", str(archive), "file"], check=True)
    flags = [word for change in changes for word in ("--change", change)]
    return lab.call("import", *flags, str(archive), *([tag] if tag else []))


def images(lab: Lab) -> set[str]:
    return set(lab.call("images", "--all", "--quiet", "--no-trunc").split())
