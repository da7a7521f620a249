from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from ddtree_ops.bench import environment
from ddtree_ops.bench.environment import capture_environment, engine_version


def test_the_fingerprint_stays_and_tells_machines_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    first = capture_environment()
    assert capture_environment().host_fingerprint == first.host_fingerprint
    assert first.cores >= 1
    assert first.packages["numpy"]
    with monkeypatch.context() as patch:
        patch.setattr(environment, "_cpu_model", lambda: "another CPU")
        assert capture_environment().host_fingerprint != first.host_fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(environment, "_gpus", lambda: [{"name": "card", "uuid": "GPU-1"}])
        assert capture_environment().host_fingerprint != first.host_fingerprint


def test_memory_that_the_kernel_counts_a_little_differently_is_the_same_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = capture_environment()

    class Memory:
        total = int((round(first.memory_gib) + 0.2) * 2**30)

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    assert capture_environment().host_fingerprint == first.host_fingerprint


def test_cards_are_read_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'RTX PRO 6000, GPU-1, 580.95, 98.02, 600.00, 97887'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (gpu,) = capture_environment().gpus
    assert (gpu["name"], gpu["uuid"], gpu["power.limit"]) == ("RTX PRO 6000", "GPU-1", "600.00")
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert capture_environment().gpus == []


def test_a_changed_checkout_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    file = tmp_path / "ddtree_ops" / "bench" / "environment.py"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.setattr(environment, "__file__", str(file))
    assert capture_environment().git_commit is None
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "x")
    commit = capture_environment().git_commit
    assert commit is not None
    assert len(commit) == 40
    file.write_text("changed")
    assert capture_environment().git_commit == f"{commit}-dirty"


def test_the_engine_version_follows_its_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "stand_in_engine"
    package.mkdir()
    (package / "__init__.py").write_text("a = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(environment, "ENGINE_PACKAGES", ("stand_in_engine",))
    engine_version.cache_clear()
    before = engine_version()
    (package / "__init__.py").write_text("a = 2")
    engine_version.cache_clear()
    after = engine_version()
    engine_version.cache_clear()
    assert before != after
