"""Our wheel: equal sources, equal bytes; nothing of an earlier build; the same from an installed package."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ddtree_ops.errors import JobFailed
from ddtree_ops.images import wheel as module
from ddtree_ops.images.wheel import FILES, Wheel, find_checkout, our_wheel

PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "ddtree"
version = "0.1.0"
license-files = ["LICENSE"]
[project.scripts]
ddtree = "ddtree_ops:main"
"""
SETUP = (
    "from setuptools import setup\nsetup(packages=['ddtree_ops'], package_dir={'ddtree_ops': 'ddtree_ops'})\n"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small project with the files of ours."""
    root = tmp_path / "checkout"
    (root / "ddtree_ops").mkdir(parents=True)
    for name in FILES:
        (root / name).write_text("words\n")
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "setup.py").write_text(SETUP)
    (root / "ddtree_ops/__init__.py").write_text("def main(): print('hello')\n")
    return root


def names(wheel: Wheel) -> set[str]:
    with zipfile.ZipFile(wheel.path) as archive:
        return set(archive.namelist())


def test_equal_sources_give_equal_bytes(checkout: Path, tmp_path: Path) -> None:
    first = our_wheel(tmp_path / "one", checkout=checkout)
    for path in checkout.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    (checkout / "ddtree_ops/__init__.py").chmod(0o600)
    (checkout / "ddtree_ops/__pycache__").mkdir()
    (checkout / "ddtree_ops/__pycache__/x.pyc").write_bytes(b"x")
    before = os.umask(0o077)
    try:
        second = our_wheel(tmp_path / "two", checkout=checkout)
    finally:
        os.umask(before)
    assert first.path != second.path
    assert first.sha256 == second.sha256
    assert first.version == "0.1.0"


def test_a_changed_file_gives_another_wheel_and_an_unchanged_one_is_not_built_again(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = our_wheel(tmp_path, checkout=checkout)
    (checkout / "ddtree_ops/__init__.py").write_text("def main(): print('other')\n")
    second = our_wheel(tmp_path, checkout=checkout)
    assert first.sha256 != second.sha256

    def unexpected(*arguments: object, **options: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(module, "run_pip", unexpected)
    assert our_wheel(tmp_path, checkout=checkout) == second


def test_what_an_earlier_build_left_in_the_checkout_does_not_go_in(checkout: Path, tmp_path: Path) -> None:
    stale = checkout / "build/lib/ddtree_ops/removed_long_ago.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    assert "ddtree_ops/removed_long_ago.py" not in names(our_wheel(tmp_path, checkout=checkout))
    assert not (checkout / "ddtree.egg-info").exists(), "the checkout is left as it was"


def test_a_build_that_fails_says_why_and_leaves_nothing(checkout: Path, tmp_path: Path) -> None:
    (checkout / "setup.py").write_text("raise SystemExit('no such luck')\n")
    with pytest.raises(JobFailed, match="no such luck"):
        our_wheel(tmp_path / "cache", checkout=checkout)
    assert list((tmp_path / "cache/wheels").iterdir()) == []


def test_an_installed_package_is_packed_again_and_can_be_installed(checkout: Path, tmp_path: Path) -> None:
    """In processes of their own, whose only ddtree is the one under test."""
    built = our_wheel(tmp_path, checkout=checkout)
    site, again = tmp_path / "site", tmp_path / "again"
    pip_install(built.path, site)
    code = (
        "import importlib.metadata as m, sys, types; from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(module.__file__).parents[2])!r})\n"
        "import ddtree_ops.images.wheel as wheel\n"
        f"m.distribution = lambda name: next(iter(m.distributions(name=name, path=[{str(site)!r}])))\n"
        "wheel.find_checkout = lambda: None\n"
        f"print(wheel.our_wheel(Path({str(again)!r})).path)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    repacked = Wheel.of(Path(done.stdout.strip()))
    assert names(repacked) == names(built)
    pip_install(repacked.path, tmp_path / "third")
    assert (tmp_path / "third/ddtree_ops/__init__.py").read_text() == (
        checkout / "ddtree_ops/__init__.py"
    ).read_text()


def pip_install(wheel: Path, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target"]
    subprocess.run([*command, str(target), str(wheel)], check=True)


def test_this_package_knows_its_checkout() -> None:
    root = find_checkout()
    assert root is not None
    assert (root / "engine_patch").is_dir()
