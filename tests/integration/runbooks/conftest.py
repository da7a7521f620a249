"""A cluster of one host, this machine, with a Docker engine of the tests' own."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.cli import app
from ddtree_ops.hosts.runner import playbooks_folder
from tests.support.docker import Docker, require_docker, run_dockerd

CLUSTER = "lab"
PROGRAM = playbooks_folder() / "runbooks" / "files" / "ddtree_runbook.py"
SERVE = 'echo "api_key=sk-not-to-be-seen"; exec httpd -f -p 127.0.0.1:"$1" -h /www'


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    """An engine of this process. Its folder has a short name, for the sake of its sockets."""
    require_docker()
    folder = Path(tempfile.mkdtemp(prefix="ddt-runbook-"))
    try:
        with run_dockerd(folder) as engine:
            yield engine
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Lab:
    """A cluster.yaml and its one host, below a folder of its own."""

    folder: Path
    docker: Docker
    capsys: pytest.CaptureFixture[str]
    variables: dict[str, Any] = field(default_factory=dict)
    connection: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def write(self, **changes: Any) -> Path:
        variables = {
            "ansible_python_interpreter": sys.executable,
            "ddtree_docker_socket": str(self.docker.socket),
            "runbook_root": str(self.folder / "root"),
            **self.variables,
        }
        host = {"vars": {"ansible_connection": "local", **variables}}
        if self.connection:
            host = {**self.connection, "vars": variables}
        data = {
            "schema": 1,
            "name": CLUSTER,
            "engine": "reference",
            "hosts": {"inline": {"gpu-a": host}},
            "ssh": {"become": False},
            "paths": {
                "state": str(self.folder / "var" / "state"),
                "models": str(self.folder / "var" / "state" / "models"),
                "logs": str(self.folder / "var" / "log"),
            },
            "monitoring": {"enabled": False},
            "deadlines": {"ready": 120},
            "services": [
                {
                    "name": "tree",
                    "arm": "ddtree",
                    "budget": 31,
                    "port": 30001,
                    "replicas": 2,
                    "stop_timeout_s": 2,
                },
                {"name": "chain", "arm": "dflash", "port": 30011, "stop_timeout_s": 2},
            ],
            **self.keys,
            **changes,
        }
        file = self.folder / "cluster.yaml"
        file.write_text(yaml.safe_dump(data))
        return file

    def run(self, id: str, *options: str, code: int = 0) -> dict[str, Any]:
        """`ddtree runbook run ID`; its result, or its error."""
        file = self.write()
        argv = ["runbook", "run", id, "-f", str(file), "--out", str(self.out), "--json", *options]
        found = app.run(argv)
        lines = [json.loads(line) for line in self.capsys.readouterr().out.splitlines()]
        assert found == code, lines[-2:]
        results = [line for line in lines if line["event"] == "result"]
        return results[-1] if results else lines[-1]

    def host(self, id: str, *options: str, code: int = 0) -> dict[str, Any]:
        answer: dict[str, Any] = self.run(id, *options, code=code)["hosts"]["gpu-a"]
        return answer

    def ask(self, *argv: str) -> dict[str, Any]:
        """What the program of the plays answers on the host, without Ansible around it."""
        docker = f"docker --host unix://{self.docker.socket}"
        command = [sys.executable, str(PROGRAM), "--cluster", CLUSTER, "--docker", docker, *argv]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    # -- containers -----------------------------------------------------------------------------------------

    def call(self, *argv: str) -> str:
        command = ["docker", "--host", f"unix://{self.docker.socket}", *argv]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def start(
        self,
        name: str,
        service: str,
        *,
        script: str = SERVE,
        labels: Sequence[str] = (),
        port: int | None = None,
        env: Sequence[str] = (),
    ) -> int:
        """A container as `ddtree deploy` labels it, which serves /ready; returns its port."""
        number = port or free_port()
        flags = ["--label", f"ddtree.cluster={CLUSTER}", "--label", f"ddtree.service={service}"]
        flags += [word for label in labels for word in ("--label", label)]
        flags += [word for one in env for word in ("--env", one)]
        argv = ["/bin/sh", "-c", script, "sh", str(number), "--host", "127.0.0.1", "--port", str(number)]
        self.call(
            "run", "--detach", "--init", "--network=host", "--name", name, *flags, self.docker.image, *argv
        )
        return number

    def cards(
        self, cards: list[str], *, rest: str = "card, 60, 300, 450, 2500, 3000, 13365, 99, 1, 2, 0x0"
    ) -> None:
        """A program that takes nvidia-smi's place, since there is no card here."""
        program = self.folder / "nvidia-smi"
        (self.folder / "cards").write_text("".join(f"{card}, {rest}\n" for card in cards))
        program.write_text(
            '#!/bin/sh\ncase "$*" in\n'
            f"*--query-gpu=index*) cat {self.folder}/cards ;;\n"
            f"*--query-gpu=power.limit*) cat {self.folder}/caps ;;\n"
            f"--power-limit=*) echo ${{1#*=}} > {self.folder}/caps ;;\n"
            "esac\n"
        )
        program.chmod(0o755)
        (self.folder / "caps").write_text("600.00\n")
        self.variables["runbook_nvidia_smi"] = self.variables["gpu_settings_nvidia_smi"] = str(program)

    def state(self, name: str) -> str:
        return self.call("inspect", "--format", "{{.State.Status}}", name)

    def started(self, name: str) -> str:
        return self.call("inspect", "--format", "{{.State.StartedAt}}", name)

    def clean(self) -> None:
        for container in self.call("ps", "--all", "--quiet").split():
            self.call("rm", "--force", "--volumes", container)
        for volume in self.call("volume", "ls", "--quiet").split():
            self.call("volume", "rm", volume)
        for image in set(self.call("images", "--all", "--quiet", "--no-trunc").split()) - {self.docker.image}:
            self.call("image", "rm", "--force", image)


@pytest.fixture
def lab(docker: Docker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Lab]:
    one = Lab(tmp_path, docker, capsys)
    yield one
    one.clean()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
