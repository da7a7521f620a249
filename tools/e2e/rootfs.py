"""A Debian root file system made once by debootstrap: for test hosts and for the base image of containers.

    python tools/e2e/rootfs.py --folder CACHE [PACKAGE ...]

prints the folder of the tree. Needs root, debootstrap, and the mirror that this machine's own apt uses. Trees
are cached by what is in them: take copies or overlays of a tree, never change it. Standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SUITE = "bookworm"
#: In every tree: what an Ansible host and the CPU engine's image both need.
BASE_PACKAGES = ("ca-certificates", "python3")
#: A tree is thrown away when it is not whole, so waiting for the disk after each file buys nothing.
FAST_DPKG = {"DPKG_FORCE": "unsafe-io", "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
#: Mounts and processes of a step end with it, also when we are killed.
APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
Say = Callable[[str], None]


class RootfsError(RuntimeError):
    """The tree could not be made; the message says which step failed, with the end of its output."""


@dataclass(frozen=True)
class Mirror:
    """Where packages come from, as this machine's apt has it."""

    url: str
    keyring: str | None


def debootstrap_tree(folder: Path, packages: Iterable[str] = (), say: Say = lambda text: None) -> Path:
    """The root of a Debian with BASE_PACKAGES and `packages`, made in `folder` unless it is there already.

    Packages beyond the base are installed on a copy of the base tree, so that two trees cost little more than
    one. Services are not started. Raises RootfsError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    extra = sorted(set(packages) - set(BASE_PACKAGES))
    with _locked(folder):
        mirror = find_mirror()
        base = _ready(folder, BASE_PACKAGES, lambda tree: _bootstrap(tree, folder, mirror, say))
        if not extra:
            return base
        return _ready(folder, (*BASE_PACKAGES, *extra), lambda tree: _extend(tree, base, folder, extra, say))


def pack(tree: Path) -> Path:
    """The tree as a tar file beside it, sorted, owners as numbers: what `docker import` takes."""
    archive = tree.with_suffix(".tar")
    with _locked(tree.parent):
        if not archive.exists():
            draft = archive.with_suffix(".tar.partial")
            _run("tar", "--sort=name", "--numeric-owner", "--one-file-system", "-C", tree, "-cf", draft, ".")
            draft.rename(archive)
    return archive


def find_mirror(root: Path = Path("/")) -> Mirror:
    """The mirror of SUITE's main archive in the sources of the machine's apt. Raises RootfsError."""
    sources = root / "etc/apt"
    for file in [sources / "sources.list", *sorted((sources / "sources.list.d").glob("*"))]:
        if file.suffix not in {".list", ".sources"} or not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        for mirror, suites in _stanzas(text) if file.suffix == ".sources" else _lines(text):
            if SUITE in suites:
                return mirror
    raise RootfsError(f"no source of Debian {SUITE} in {sources}")


def _stanzas(text: str) -> Iterator[tuple[Mirror, list[str]]]:
    """Of a file in deb822 format."""
    uncommented = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", uncommented):
        fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.*)$", stanza, re.MULTILINE))
        if fields.get("Enabled", "yes").lower() == "no" or "deb" not in fields.get("Types", "").split():
            continue
        for url in fields.get("URIs", "").split():
            yield Mirror(url, fields.get("Signed-By") or None), fields.get("Suites", "").split()


def _lines(text: str) -> Iterator[tuple[Mirror, list[str]]]:
    """Of a file with a source a line."""
    for options, url, suite in re.findall(
        r"^\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s", text, re.MULTILINE
    ):
        keyring = re.search(r"signed-by=(\S+)", options)
        yield Mirror(url, keyring.group(1) if keyring else None), [suite]


def _bootstrap(tree: Path, folder: Path, mirror: Mirror, say: Say) -> None:
    say(f"debootstrap {SUITE}")
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(BASE_PACKAGES)}"]
    debs = (folder / "debs").absolute()
    debs.mkdir(exist_ok=True)
    command.append(f"--cache-dir={debs}")
    if mirror.keyring:
        command.append(f"--keyring={mirror.keyring}")
    _run(*APART, *command, SUITE, tree, mirror.url)
    _tidy(tree)


def _extend(tree: Path, base: Path, folder: Path, packages: list[str], say: Say) -> None:
    say(f"packages {' '.join(packages)}")
    _run("cp", "-a", "--reflink=auto", base, tree)
    policy = tree / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")  # no service is started in the tree
    policy.chmod(0o755)
    shutil.copy("/etc/resolv.conf", tree / "etc/resolv.conf")
    debs = (folder / "debs").absolute()
    # apt's own cache is outside the tree: a second tree downloads nothing twice.
    script = """
        mount --bind "$1" "$2/var/cache/apt/archives"
        mount -t proc proc "$2/proc"
        tree=$2; shift 2
        chroot "$tree" apt-get -q -o APT::Sandbox::User=root update
        chroot "$tree" apt-get -q -o APT::Sandbox::User=root install -y --no-install-recommends "$@"
    """
    _run(*APART, "sh", "-ec", script, "sh", debs, tree, *packages)
    policy.unlink()
    _tidy(tree)


def _tidy(tree: Path) -> None:
    """Nothing of this machine, and nothing that apt can fetch again."""
    for pattern in (
        "var/cache/apt/archives/*.deb",
        "var/cache/apt/*.bin",
        "var/lib/apt/lists/*",
        "var/log/*",
    ):
        for path in tree.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    for name in ("etc/hostname", "etc/resolv.conf", "etc/machine-id"):
        (tree / name).write_text("")


def _ready(folder: Path, packages: tuple[str, ...], make: Callable[[Path], None]) -> Path:
    """The tree of these packages; it gets its name only when it is whole."""
    key = hashlib.sha256(" ".join([SUITE, *sorted(packages)]).encode()).hexdigest()[:12]
    tree = folder / f"{SUITE}-{key}"
    if tree.is_dir():
        return tree
    draft = folder / f"{SUITE}-{key}.partial"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        make(draft)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return draft.rename(tree)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time makes trees in a folder."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(*command: str | Path) -> None:
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **FAST_DPKG},
            check=False,
        )
    except FileNotFoundError as error:
        raise RootfsError(f"{words[0]} is not installed") from error
    if done.returncode != 0:
        tail = "\n".join(done.stdout.decode(errors="replace").strip().splitlines()[-10:])
        raise RootfsError(f"{shlex.join(words)} failed with status {done.returncode}\n{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a Debian root file system by debootstrap.")
    parser.add_argument("--folder", type=Path, required=True, help="where trees are cached")
    parser.add_argument("packages", nargs="*", help="beyond " + ", ".join(BASE_PACKAGES))
    arguments = parser.parse_args()
    try:
        tree = debootstrap_tree(
            arguments.folder, arguments.packages, say=lambda text: print(f"rootfs: {text}", file=sys.stderr)
        )
    except RootfsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(tree)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
