"""What the CPU engine's image holds beside ddtree: installed here, for the image's Python and not for ours.

Every version is pinned, so nothing is resolved: what the list says is what the image holds. Installed once on
the operator's machine, the packages are one layer of the image; wheels that a build would install there first
would be two. torch is taken as a CPU build, in the order of `tools/setup_env.py`: the index in
DDTREE_TORCH_INDEX_URL; what pip would take anyway, if that needs no CUDA; the index that `uv --torch-backend
cpu` knows.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from ddtree_ops.errors import BadEnvironment, JobFailed
from ddtree_ops.images.pip import run_pip, run_tool, would_install

TORCH_INDEX = "DDTREE_TORCH_INDEX_URL"
CUDA_NAMES = ("nvidia-", "cuda-", "triton")
#: The image's Python and the C libraries (Debian 12 has glibc 2.36) that a wheel may have been built for.
PYTHON = "3.11"
GLIBC = ("2_36", "2_35", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17")
PLATFORMS = (*(f"manylinux_{version}_x86_64" for version in GLIBC), "manylinux2014_x86_64", "linux_x86_64")
ABIS = ("cp311", "abi3", "none")
#: A quarter of what pip installs, and serving needs none of it: headers, tests, compilers. Scripts would name
#: this machine's Python, and the records of what was installed name them.
LEFT_OUT = (
    "bin",
    "*.dist-info/RECORD",
    "torch/include",
    "torch/share",
    "torch/test",
    "torch/bin/protoc*",
)
Note = Callable[[str], None]


def requirements_of(text: str) -> list[str]:
    """The pins of a requirements file, sorted. Raises ValueError for a line that pins no version."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pins = sorted(line for line in lines if line)
    for pin in pins:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!_-]*", pin):
            raise ValueError(f"{pin}: found no NAME==VERSION")
    return pins


def installed_packages(
    pins: Sequence[str], cache: Path, *, note: Note = lambda text: None, timeout_s: float = 3600.0
) -> Path:
    """A folder with exactly the pinned packages, as on an import path; made once and kept in `cache`.

    Raises JobFailed (with pip's own words, or naming the lock that is held) and BadEnvironment.
    """
    ends = time.monotonic() + timeout_s
    folder = cache / "packages" / _key(pins)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder.with_suffix(".lock"), timeout=timeout_s):
            if not folder.is_dir():
                _fill(pins, folder, note, ends)
    except Timeout as error:
        raise JobFailed(f"another ddtree still fills {folder}", remedy="wait for it, or end it") from error
    return folder


def _fill(pins: Sequence[str], folder: Path, note: Note, ends: float) -> None:
    """Into a draft that gets its name when it is whole."""
    note(f"{len(pins)} packages for Python {PYTHON}")
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        torch = [pin for pin in pins if pin.startswith("torch==")]
        others = [pin for pin in pins if pin not in torch]
        if others:
            _install(others, draft, [], ends)
        for pin in torch:
            note(f"{pin}, CPU build")
            _install([pin], draft, _torch_index(pin, ends), ends)
        _leave_out(draft)
        draft.chmod(0o755)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _install(pins: Sequence[str], folder: Path, options: Sequence[str], ends: float) -> None:
    command = ["install", "--no-deps", "--no-compile", "--target", str(folder), *_target(), *options, *pins]
    run_pip(command, f"install of {', '.join(pins)}", timeout_s=_left(ends))


def _leave_out(folder: Path) -> None:
    for pattern in LEFT_OUT:
        for path in folder.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _torch_index(pin: str, ends: float) -> list[str]:
    """pip's options under which torch is a CPU build."""
    chosen = os.environ.get(TORCH_INDEX)
    if chosen:
        return ["--index-url", chosen]
    if not needs_cuda(would_install(pin, _target(), timeout_s=_left(ends))):
        return []
    return ["--index-url", _index_known_to_uv(pin, _left(ends))]


def needs_cuda(metadata: Mapping[str, object]) -> bool:
    """A CUDA build requires NVIDIA's packages or Triton; `metadata` is a distribution's, as pip reports."""
    requires = metadata.get("requires_dist")
    found = [str(item) for item in requires] if isinstance(requires, list) else []
    return any(item.lower().startswith(CUDA_NAMES) for item in found if "extra ==" not in item)


def _index_known_to_uv(pin: str, timeout_s: float) -> str:
    uv = [sys.executable, "-m", "uv"] if importlib.util.find_spec("uv") else [shutil.which("uv") or ""]
    remedy = f"pip install uv, or set {TORCH_INDEX} to an index that has CPU builds of torch"
    if not uv[0]:
        raise BadEnvironment(f"{pin}: pip would take a CUDA build, several gigabytes", remedy=remedy)
    options = ["--torch-backend", "cpu", "--no-deps", "--emit-index-annotation", "--no-header", "--quiet"]
    target = ["--python-version", PYTHON, "--python-platform", "x86_64-manylinux_2_28"]
    command = [*uv, "pip", "compile", *options, *target, "-"]
    answer = run_tool(command, f"look for {pin}", timeout_s=timeout_s, stdin=pin)
    found = index_in(answer)
    if found is None:
        raise BadEnvironment(f"{pin}: uv names no index with a CPU build", remedy=remedy)
    return found


def index_in(answer: str) -> str | None:
    """The index that `uv pip compile --emit-index-annotation` names below a requirement."""
    found = re.search(r"^\s+# from (\S+)", answer, re.MULTILINE)
    return found.group(1) if found else None


def _target() -> list[str]:
    abis = [word for abi in ABIS for word in ("--abi", abi)]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    wheels_only = ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON]
    return [*wheels_only, *abis, *platforms]


def _key(pins: Sequence[str]) -> str:
    return hashlib.sha256("\n".join([PYTHON, *PLATFORMS, *LEFT_OUT, *sorted(pins)]).encode()).hexdigest()[:32]


def _left(ends: float) -> float:
    return max(1.0, ends - time.monotonic())
