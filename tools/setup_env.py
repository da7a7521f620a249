"""Make the virtual environment that the Makefile uses, with a CPU build of torch.

    python3 tools/setup_env.py --venv .venv [--torch-index-url URL] [--extras local,dev]

Standard library only; Python 3.11 or newer. On Linux a plain `pip install torch` takes a CUDA build of
several gigabytes. To end up with a CPU build instead:

1. with `--torch-index-url URL`, torch comes from that index and nowhere else;
2. otherwise pip is asked what it would install (metadata only, nothing is downloaded): a build that needs
   no CUDA packages is taken as it is (macOS, or a pip configured with a CPU build);
3. otherwise `uv pip install --torch-backend cpu` takes it from PyTorch's own CPU index, which uv knows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CUDA_NAMES = ("nvidia-", "cuda-", "triton")


def main() -> int:
    arguments = parse_arguments()
    if sys.version_info < (3, 11):  # noqa: UP036 - this script is what tells the user
        print(f"error: Python 3.11 or newer is needed, this is {sys.version.split()[0]}", file=sys.stderr)
        print("  try: make PYTHON=python3.12 ...", file=sys.stderr)
        return 3
    try:
        set_up(arguments.venv, arguments.extras, arguments.torch_index_url)
    except subprocess.CalledProcessError as error:
        print(f"error: set-up failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 3
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the virtual environment with a CPU build of torch.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="default: %(default)s")
    parser.add_argument("--extras", default="local,dev", help="default: %(default)s")
    parser.add_argument("--torch-index-url", default="", help="take torch from this index only")
    return parser.parse_args()


def set_up(venv: Path, extras: str, torch_index_url: str) -> None:
    python = venv / "bin" / "python"
    if not python.exists():
        say(f"making {venv}")
        run(sys.executable, "-m", "venv", str(venv))
    if "local" in extras.split(","):
        install_torch(python, torch_requirement(), torch_index_url)
    say(f"installing ddtree[{extras}]")
    pip(python, "install", "--quiet", "--editable", f"{ROOT}[{extras}]")


def torch_requirement() -> str:
    """The exact pin of the extra `local`, so that it is written down once."""
    import tomllib  # new in 3.11: at the top it would fail before the version check speaks

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return next(item for item in project["optional-dependencies"]["local"] if item.startswith("torch=="))


def install_torch(python: Path, requirement: str, index_url: str) -> None:
    if installed(python, requirement):
        return
    say(f"installing {requirement} (CPU)")
    if index_url:
        pip(python, "install", "--quiet", "--index-url", index_url, requirement)
    elif sys.platform == "linux" and needs_cuda(python, requirement):
        pip(python, "install", "--quiet", "uv")
        uv = str(python.with_name("uv"))
        run(uv, "pip", "install", "--python", str(python), "--torch-backend", "cpu", requirement)
    else:
        pip(python, "install", "--quiet", requirement)


def installed(python: Path, requirement: str) -> bool:
    code = "import importlib.metadata as m; print(m.version('torch').split('+')[0])"
    answer = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return answer.stdout.strip() == requirement.removeprefix("torch==")


def needs_cuda(python: Path, requirement: str) -> bool:
    """Ask pip what it would install for torch itself; a CUDA build requires NVIDIA's packages or Triton."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--dry-run", "--no-deps", "--quiet", "--ignore-installed", "--report", str(report)]
        pip(python, "install", *options, requirement)
        metadata = json.loads(report.read_text())["install"][0]["metadata"]
    requires = [item for item in metadata.get("requires_dist", []) if "extra ==" not in item]
    return any(item.lower().startswith(CUDA_NAMES) for item in requires)


def pip(python: Path, *arguments: str) -> None:
    run(str(python), "-m", "pip", "--disable-pip-version-check", *arguments)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
