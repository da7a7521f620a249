"""Make a virtual environment in which SGLang's own source imports and resolves its arguments, without a GPU.

    python3 tools/make_sglang_venv.py [--venv .venv-sglang] [--torch-index-url URL]

SGLang 0.5.23 comes from its wheel without its dependencies (those need several gigabytes of CUDA packages);
what its serving path imports is installed beside it, with the same CPU build of torch as `.venv`. Packages
that only make sense on a GPU host are stood in for by the tests themselves (tests/integration/sglang).
Standard library only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from setup_env import ROOT, install_torch, pip, run, say, torch_requirement

# Exact where SGLang is exact or where a later release is known to break its imports.
WHEELS_ALONE = ["sglang==0.5.23", "compressed-tensors==0.18.0"]
PACKAGES = [
    "aiohttp",
    "apache-tvm-ffi==0.1.11",
    "dill",
    "distro",
    "einops",
    "fastapi",
    "gguf==0.19.0",
    "huggingface-hub",
    "ipython",
    "jinja2",
    "jiter",
    "jsonschema",
    "loguru",
    "msgspec",
    "numpy<2.4",  # Triton 3.6's interpreter turns one-element arrays into numbers
    "nvidia-ml-py",
    "openai==2.8.0",
    "opentelemetry-api",
    "orjson",
    "packaging",
    "partial-json-parser",
    "pillow",
    "prometheus-client",
    "psutil",
    "pybase64",
    "pydantic",
    "pytest",
    "pytest-timeout",
    "python-multipart",
    "pyzmq",
    "regex",
    "requests",
    "safetensors",
    "sentencepiece",
    "setproctitle",
    "starlette",
    "tiktoken",
    "tokenizers",
    "tqdm",
    "transformers==5.17.0",
    "triton==3.6.0",
    "uvicorn",
    "uvloop",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-sglang", help="default: %(default)s")
    parser.add_argument("--torch-index-url", default="", help="take torch from this index only")
    arguments = parser.parse_args()
    try:
        make(arguments.venv, arguments.torch_index_url)
    except subprocess.CalledProcessError as error:
        print(f"error: set-up failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 3
    return 0


def make(venv: Path, torch_index_url: str) -> None:
    python = venv / "bin" / "python"
    if not python.exists():
        say(f"making {venv}")
        run(sys.executable, "-m", "venv", str(venv))
    install_torch(python, torch_requirement(), torch_index_url)
    say("installing SGLang's source and what it imports")
    pip(python, "install", "--quiet", "--no-deps", *WHEELS_ALONE)
    pip(python, "install", "--quiet", *PACKAGES)
    pip(python, "install", "--quiet", "--no-deps", "--editable", str(ROOT))


if __name__ == "__main__":
    raise SystemExit(main())
