"""The probe as it runs on a host: a process of its own, with stand-in programs where the host has none."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ddtree_ops.hosts.facts import parse_facts

from .captured import capture

PROBE = Path(__file__).parents[3] / "playbooks" / "roles" / "facts" / "files" / "ddtree_probe.py"


def run(programs: Path, *arguments: str) -> dict[str, Any]:
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-I", str(PROBE), *arguments],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def program(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ddtree_probe", PROBE)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_this_machine_is_captured_and_read(tmp_path: Path) -> None:
    answer = run(tmp_path, "--path", str(tmp_path / "not" / "there"), "--path", "/")
    host = parse_facts(answer, name="here")
    assert host.python >= (3, 8)
    assert host.kernel == os.uname().release
    assert host.root == (os.getuid() == 0)
    space = os.statvfs(tmp_path)
    assert host.disks[str(tmp_path / "not" / "there")].total == space.f_blocks * space.f_frsize
    assert host.disks["/"].fstype


def test_programs_answers_become_facts(tmp_path: Path) -> None:
    good = capture("good")
    (tmp_path / "smi.xml").write_text(good["commands"]["nvidia_smi"]["stdout"])
    program(tmp_path, "nvidia-smi", f'[ "$1" = -q ] && cat {tmp_path}/smi.xml')
    program(tmp_path, "nvidia-ctk", "echo NVIDIA Container Toolkit CLI version 1.18.0")
    info = json.dumps(
        {**good["docker"]["info"], "Runtimes": {"nvidia": {}}, "HttpProxy": "http://u:secret@proxy"}
    )
    program(
        tmp_path,
        "docker",
        f"""case "$1" in
info) echo '{info}' ;;
ps) echo 'ddtree-tree-0 running' ;;
image) exit 0 ;;
run) echo 'GPU 0: X (UUID: GPU-1)' ;;
esac""",
    )
    answer = run(tmp_path, "--image", "engine:1")
    host = parse_facts(answer, name="fake")
    assert [gpu.memory for gpu in host.gpus] == [97887] * 8
    assert (host.toolkit, host.docker, host.runtimes) == ("1.18.0", "28.2.2", ("nvidia",))
    assert (host.containers, host.container_gpus) == (("ddtree-tree-0 running",), 1)
    assert "secret" not in json.dumps(answer)


def test_a_program_that_hangs_is_given_up(tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", "exec sleep 30")
    answer = run(tmp_path, "--timeout", "0.3")
    assert parse_facts(answer, name="hung").smi_error == "no answer (hung)"


def test_an_image_that_is_not_there_is_not_run(tmp_path: Path) -> None:
    program(tmp_path, "docker", f'[ "$1" = run ] && touch {tmp_path}/ran; exit 1')
    assert run(tmp_path, "--image", "engine:1")["container"] is None
    assert not (tmp_path / "ran").exists()


def capability(identity: int, following: int, control: int) -> bytes:
    return struct.pack("<IHH", identity | 1 << 16 | following << 20, 0x5F, control)


@pytest.mark.parametrize(
    ("space", "control"),
    [
        (capability(0x000D, 0, 0x1D), 0x1D),
        (capability(0x0001, 0x140, 7) + bytes(56) + capability(0x000D, 0, 0x11), 0x11),
        (capability(0x0001, 0, 7), None),
        (capability(0x0001, 0x100, 7), None),  # a loop
        (capability(0x0001, 0xFFC, 7), None),  # beyond the end
        (b"\xff" * 64, None),
        (b"", None),
    ],
)
def test_acs_is_found_in_configuration_space(space: bytes, control: int | None) -> None:
    assert module().acs_control(bytes(0x100) + space) == control


def test_the_probe_runs_on_an_old_python() -> None:
    """No syntax newer than 3.8: hosts bring their own Python."""
    import ast

    ast.parse(PROBE.read_text(), feature_version=(3, 8))
