"""Trees by debootstrap: the mirror is this machine's own, and only a whole tree gets its name."""

from __future__ import annotations

import importlib.util
import sys
import tarfile
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "e2e" / "rootfs.py"
spec = importlib.util.spec_from_file_location("rootfs", TOOL)
assert spec is not None
assert spec.loader is not None
rootfs = importlib.util.module_from_spec(spec)
sys.modules["rootfs"] = rootfs
spec.loader.exec_module(rootfs)

DEB822 = """\
# URIs: http://commented.example/debian
Types: deb
URIs: http://security.example/debian
Suites: bookworm-security
Components: main

Types: deb-src
URIs: http://source.example/debian
Suites: bookworm
Components: main

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main

Types: deb
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian.gpg
"""
LINES = """\
# deb http://commented.example/debian bookworm main
deb-src http://source.example/debian bookworm main
deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian bookworm main contrib
"""


def sources(root: Path, name: str, text: str) -> None:
    file = root / "etc/apt" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_mirror_of_a_file_in_the_new_format(tmp_path: Path) -> None:
    sources(tmp_path, "sources.list.d/debian.sources", DEB822)
    sources(tmp_path, "sources.list.d/other.list.bak", LINES)
    found = rootfs.find_mirror(tmp_path)
    assert (found.url, found.keyring) == ("http://mirror.example/debian", "/usr/share/keyrings/debian.gpg")


def test_the_mirror_of_a_file_in_the_old_format(tmp_path: Path) -> None:
    sources(tmp_path, "sources.list", LINES)
    found = rootfs.find_mirror(tmp_path)
    assert (found.url, found.keyring) == ("http://mirror.example/debian", "/k.gpg")


def test_a_machine_of_another_release_has_no_mirror(tmp_path: Path) -> None:
    sources(tmp_path, "sources.list", LINES.replace("bookworm", "trixie"))
    with pytest.raises(rootfs.RootfsError, match="no source of Debian bookworm"):
        rootfs.find_mirror(tmp_path)


def test_a_tree_that_fails_is_gone_and_the_next_try_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rootfs, "find_mirror", lambda: rootfs.Mirror("http://mirror.example", None))
    made: list[Path] = []

    def fail(tree: Path, *rest: object) -> None:
        (tree / "half").mkdir(parents=True)
        made.append(tree)
        rootfs._run("false")

    monkeypatch.setattr(rootfs, "_bootstrap", fail)
    for _ in range(2):
        with pytest.raises(rootfs.RootfsError, match="false failed with status 1"):
            rootfs.debootstrap_tree(tmp_path)
    assert len(made) == 2
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_tree_is_made_once_and_more_packages_go_on_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def bootstrap(tree: Path, *rest: object) -> None:
        calls.append("base")
        (tree / "etc").mkdir(parents=True)

    def extend(tree: Path, base: Path, folder: Path, packages: list[str], say: object) -> None:
        calls.append(" ".join(packages))
        assert (base / "etc").is_dir()
        tree.mkdir()

    monkeypatch.setattr(rootfs, "find_mirror", lambda: rootfs.Mirror("http://mirror.example", None))
    monkeypatch.setattr(rootfs, "_bootstrap", bootstrap)
    monkeypatch.setattr(rootfs, "_extend", extend)
    base = rootfs.debootstrap_tree(tmp_path)
    more = rootfs.debootstrap_tree(tmp_path, ["iproute2", "docker.io", "python3"])
    assert rootfs.debootstrap_tree(tmp_path, ["docker.io", "iproute2"]) == more != base
    assert calls == ["base", "docker.io iproute2"]


def test_a_packed_tree_is_a_tar_with_its_owners_as_numbers(tmp_path: Path) -> None:
    tree = tmp_path / "bookworm-1"
    (tree / "b").mkdir(parents=True)
    (tree / "a").write_text("x")
    archive = rootfs.pack(tree)
    first = archive.read_bytes()
    assert rootfs.pack(tree) == archive
    assert archive.read_bytes() == first
    with tarfile.open(archive) as tar:
        assert tar.getnames() == [".", "./a", "./b"]
        assert {entry.uname for entry in tar} == {""}
