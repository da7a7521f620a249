"""A small image with this machine's Python and, under the CPU engine's name, its stand-in."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from ddtree_ops.containers.engine import Engine

TAG = "ddtree-test/double:1"
ENV = Path("/usr/bin/env").resolve()
DOUBLE = Path(__file__).with_name("double.py")
LEFT_OUT = {
    "site-packages", "dist-packages", "test", "__pycache__", "idlelib", "tkinter", "ensurepip", "lib2to3",
    "pydoc_data", "turtledemo", "unittest", "distutils",
}  # fmt: skip


def import_double(engine: Engine) -> str:
    """Make the image on an engine and return its id."""
    python, stdlib = Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))
    libraries = _libraries([python, ENV, *(stdlib / "lib-dynload").glob("*.so")])
    # There is no cache of the loader's in the image, and libpython may lie anywhere.
    folders = sorted({str(Path(library).parent) for library in libraries})
    changes = ["ENV PATH=/usr/bin:/bin", "ENV PYTHONPATH=/opt/double"]
    changes.append(f"ENV LD_LIBRARY_PATH={':'.join(folders)}")
    rootfs = _rootfs(python, stdlib, libraries)
    return engine.import_rootfs(io.BytesIO(rootfs), TAG, changes=changes)


def _rootfs(python: Path, stdlib: Path, libraries: set[str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("tmp", "usr/bin"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(entry)
        for library in sorted(libraries):
            tar.add(Path(library).resolve(), library.lstrip("/"))
        for program in (python, ENV):
            tar.add(program, str(program).lstrip("/"))
        for name in ("python3", "env"):
            target = python if name == "python3" else ENV
            if f"/usr/bin/{name}" != str(target):
                entry = tarfile.TarInfo(f"usr/bin/{name}")
                entry.type, entry.linkname = tarfile.SYMTYPE, str(target)
                tar.addfile(entry)
        tar.add(stdlib, str(stdlib).lstrip("/"), filter=_wanted)
        for package in ("ddtree_engine/__init__.py", "ddtree_engine/reference/__init__.py"):
            tar.addfile(tarfile.TarInfo(f"opt/double/{package}"))
        tar.add(DOUBLE, "opt/double/ddtree_engine/reference/__main__.py")
    return buffer.getvalue()


def _wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if LEFT_OUT & set(Path(entry.name).parts) else entry


def _libraries(programs: list[Path]) -> set[str]:
    found: set[str] = set()
    for program in programs:
        done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
        found |= set(re.findall(r"(/\S+\.so\S*)", done.stdout))
    return found
