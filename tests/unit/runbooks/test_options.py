"""What `ddtree runbook run` refuses before a host is touched, and what a play is given."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.cli import app
from ddtree_ops.config_file import load_config
from ddtree_ops.errors import BadInput, JobFailed
from ddtree_ops.runbooks.page import find_page
from ddtree_ops.runbooks.play import RunbookPlay, unpack
from ddtree_ops.schemas.cluster import Cluster

HOST: dict[str, Any] = {"vars": {"ansible_connection": "local"}}
CLUSTER: dict[str, Any] = {
    "schema": 1,
    "name": "lab",
    "engine": "reference",
    "hosts": {"inline": {"gpu-a": HOST, "gpu-b": HOST, "gpu-c": HOST}},
    "paths": {"state": "/srv/ddtree"},
    "services": [
        {"name": "tree", "arm": "ddtree", "budget": 31, "port": 30001, "hosts": ["gpu-a", "gpu-b"]},
        {"name": "chain", "arm": "dflash", "port": 30011, "stop_timeout_s": 300},
    ],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(CLUSTER))
    return path


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["image-upgrade"], "image-upgrade has no play"),
        (["image-upgrad"], "allowed: gpu-throttling"),
        (["arm-restart"], "arm-restart: --service: found nothing"),
        (["gpu-xid"], "gpu-xid: --limit: found nothing"),
        (["arm-restart", "--service", "tre"], "--service: found 'tre', allowed: tree, chain"),
        (["gpu-xid", "--limit", "gpu-z"], "--limit: found 'gpu-z', allowed: gpu-a, gpu-b, gpu-c"),
        (
            ["arm-restart", "--service", "tree", "--limit", "gpu-c"],
            "--limit: found 'gpu-c', allowed: gpu-a, gpu-b",
        ),
        (["disk-full", "--set", "days"], "--set: found 'days', allowed: NAME=VALUE"),
        (["disk-full", "--set", "hours=3"], "--set: found 'hours', allowed: days"),
        (["nccl-hang", "--set", "seconds=-1"], "--set seconds: found '-1', allowed: a whole number"),
        (
            ["gpu-xid", "--limit", "gpu-a", "--set", "drain=no"],
            "--set drain: found 'no', allowed: true, false",
        ),
        (["stuck-start", "--set", "x=1"], "allowed: nothing: stuck-start has no settings"),
    ],
)
def test_wrong_options_are_named_and_no_host_is_touched(
    file: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert app.run(["runbook", "run", *argv, "-f", str(file), "--yes"]) == 2
    assert message in capsys.readouterr().err
    assert [entry.name for entry in file.parent.iterdir()] == ["cluster.yaml"]


def test_a_page_without_a_play_says_where_its_steps_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Also to somebody who has no cluster.yaml at hand."""
    assert app.run(["runbook", "run", "rotate-keys", "-f", "nowhere.yaml"]) == 2
    assert "ddtree runbook show rotate-keys" in capsys.readouterr().err


def make(file: Path, id: str, **options: Any) -> RunbookPlay:
    return RunbookPlay(find_page(id), load_config(file, Cluster), file.parent, **options)


def test_a_service_limits_the_play_to_its_hosts(file: Path) -> None:
    assert make(file, "arm-restart", service="tree").inventory.names == ["gpu-a", "gpu-b"]
    assert make(file, "arm-restart", service="chain").inventory.names == ["gpu-a", "gpu-b", "gpu-c"]
    assert make(file, "arm-restart", service="tree", limit=["gpu-b", "gpu-c"]).inventory.names == ["gpu-b"]
    assert make(file, "disk-full").inventory.names == ["gpu-a", "gpu-b", "gpu-c"]


def test_a_play_gets_the_paths_the_patience_and_the_typed_settings_of_the_user(file: Path) -> None:
    play = make(file, "disk-full", settings={"days": "3"})
    given = play.play_variables(file.parent / "out")
    assert given["runbook_cluster"] == "lab"
    assert given["runbook_state"] == "/srv/ddtree"
    assert given["runbook_days"] == 3
    assert given["runbook_stop_seconds"] == 300, "the most patient service decides where all are meant"
    one = make(file, "arm-restart", service="tree", settings={"start": "false"}).play_variables(file.parent)
    assert (one["runbook_stop_seconds"], one["runbook_start"]) == (120, False)
    assert given["ddtree_gpus"] is False, "roles must know that no card is there"


def test_a_broken_bundle_is_named(tmp_path: Path) -> None:
    bundle = tmp_path / "gpu-a.tar.gz"
    bundle.write_bytes(b"not a bundle")
    with pytest.raises(JobFailed, match=r"gpu-a\.tar\.gz: the evidence cannot be unpacked"):
        unpack(bundle, tmp_path / "gpu-a")


def test_a_bundle_cannot_write_beside_its_folder(tmp_path: Path) -> None:
    bundle = tmp_path / "gpu-a.tar.gz"
    with tarfile.open(bundle, "w:gz") as archive:
        entry = tarfile.TarInfo("../stolen")
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(JobFailed):
        unpack(bundle, tmp_path / "gpu-a")
    assert not (tmp_path / "stolen").exists()


def test_a_file_that_is_no_cluster_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("schema: 1\n")
    with pytest.raises(BadInput):
        load_config(tmp_path / "cluster.yaml", Cluster)
    assert app.run(["runbook", "run", "disk-full", "-f", str(tmp_path / "cluster.yaml"), "--check"]) == 2
