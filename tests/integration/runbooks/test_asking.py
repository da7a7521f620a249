"""What changes a host is shown and asked about first: the real command with a terminal before it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import yaml


def test_a_plan_is_shown_and_only_a_yes_carries_it_out(tmp_path: Path) -> None:
    log = tmp_path / "log" / "old.log"
    log.parent.mkdir()
    log.write_text("x")
    os.utime(log, (time.time() - 30 * 86400,) * 2)
    cluster = write_cluster(tmp_path)

    refused = answered("n\n", cluster)
    assert f"gpu-a: would delete {log}" in refused.stdout
    assert "nothing was changed" in refused.stdout
    assert (refused.returncode, log.exists()) == (0, True)

    agreed = answered("y\n", cluster)
    assert (agreed.returncode, log.exists()) == (0, False), agreed.stderr
    assert "disk-full: 1 steps; evidence and log: " in agreed.stdout
    logs = list((tmp_path / "ddtree-logs" / "lab" / "runbooks").glob("*-disk-full/*.log"))
    assert len(logs) >= 2, "a redacted log of each run is kept"


def write_cluster(folder: Path) -> Path:
    """This machine as the one host, without docker: files can go all the same."""
    variables = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "ddtree_docker_socket": str(folder / "none.sock"),
    }
    file = folder / "cluster.yaml"
    data = {
        "schema": 1,
        "name": "lab",
        "engine": "reference",
        "hosts": {"inline": {"gpu-a": {"vars": variables}}},
        "ssh": {"become": False},
        "paths": {
            "state": str(folder / "state"),
            "models": str(folder / "models"),
            "logs": str(folder / "log"),
        },
        "services": [{"name": "tree", "arm": "ddtree", "budget": 31, "port": 30001}],
    }
    file.write_text(yaml.safe_dump(data))
    return file


def answered(answer: str, cluster: Path) -> subprocess.CompletedProcess[str]:
    """The command with a terminal on which somebody types the answer."""
    typist, terminal = pty.openpty()
    os.write(typist, answer.encode())
    program = Path(sys.executable).with_name("ddtree")
    try:
        return subprocess.run(
            [str(program), "runbook", "run", "disk-full", "-f", str(cluster)],
            stdin=terminal,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    finally:
        os.close(typist)
        os.close(terminal)
