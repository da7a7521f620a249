"""Small images with this machine's Python: one with the CPU engine's stand-in as the engine, one with smg."""

from __future__ import annotations

import importlib.util
import io
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Mapping
from pathlib import Path

from ddtree_ops.containers.engine import Engine
from ddtree_ops.gateway import entry_point

TAG = "ddtree-test/double:1"
GATEWAY_TAG = "ddtree-test/gateway:1"
ENV = Path("/usr/bin/env").resolve()
PLACE = "/opt/ours"
DOUBLE = Path(__file__).with_name("double.py")
LEFT_OUT = {
    "site-packages", "dist-packages", "test", "__pycache__", "idlelib", "tkinter", "ensurepip", "lib2to3",
    "pydoc_data", "turtledemo", "unittest", "distutils",
}  # fmt: skip


def import_double(engine: Engine) -> str:
    """Make the engine's image on an engine of Docker and return its id."""
    modules = "ddtree_engine/__init__.py", "ddtree_engine/reference/__init__.py"
    files: dict[str, Path | None] = dict.fromkeys(modules)
    files["ddtree_engine/reference/__main__.py"] = DOUBLE
    return _import(engine, TAG, files)


def import_gateway(engine: Engine) -> str:
    """Make the gateway's image: the real smg with our entry point, as gateway.Dockerfile does."""
    files: dict[str, Path | None] = {"entry_point.py": Path(entry_point.__file__)}
    for package in ("smg", "setproctitle"):
        found = importlib.util.find_spec(package)
        assert found is not None
        assert found.origin is not None
        files[package] = Path(found.origin).parent
    return _import(engine, GATEWAY_TAG, files, f'ENTRYPOINT ["python3", "{PLACE}/entry_point.py"]')


def _import(engine: Engine, tag: str, files: Mapping[str, Path | None], *changes: str) -> str:
    python, stdlib = Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))
    ours = [so for path in files.values() if path is not None for so in path.glob("*.so")]
    libraries = _libraries([python, ENV, *(stdlib / "lib-dynload").glob("*.so"), *ours])
    # There is no cache of the loader's in the image, and libpython may lie anywhere.
    folders = sorted({str(Path(library).parent) for library in libraries})
    always = ["ENV PATH=/usr/bin:/bin", f"ENV PYTHONPATH={PLACE}"]
    always.append(f"ENV LD_LIBRARY_PATH={':'.join(folders)}")
    rootfs = _rootfs(python, stdlib, libraries, files)
    return engine.import_rootfs(io.BytesIO(rootfs), tag, changes=[*always, *changes])


def _rootfs(python: Path, stdlib: Path, libraries: set[str], files: Mapping[str, Path | None]) -> bytes:
    """`files` by their place below PLACE; null for an empty one."""
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
        for place, path in files.items():
            if path is None:
                tar.addfile(tarfile.TarInfo(f"{PLACE}/{place}".lstrip("/")))
            else:
                tar.add(path, f"{PLACE}/{place}".lstrip("/"), filter=_wanted)
    return buffer.getvalue()


def _wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if LEFT_OUT & set(Path(entry.name).parts) else entry


def _libraries(programs: list[Path]) -> set[str]:
    found: set[str] = set()
    for program in programs:
        done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
        found |= set(re.findall(r"(/\S+\.so\S*)", done.stdout))
    return found
