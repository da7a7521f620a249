"""`python3 -m ddtree_engine.sglang_plugin.serve`: SGLang's server with its API key from the environment.

SGLang 0.5.23 reads a key from `--api-key` or from a YAML file that `--config` names. The first is shown to
everyone who lists processes, so the key in `DDTREE_API_KEY` becomes such a file (0600) and leaves the
environment; everything else goes to `sglang.launch_server` as it is.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "DDTREE_API_KEY"
SERVER = "sglang.launch_server"


def main(arguments: Sequence[str]) -> None:
    """Become the server; does not return."""
    argv = [sys.executable, "-m", SERVER, *key_options(os.environ.pop(VARIABLE, "")), *arguments]
    os.execv(sys.executable, argv)


def key_options(key: str, folder: Path | None = None) -> list[str]:
    """`--config FILE` with the key in it, or nothing where there is none. JSON is YAML."""
    if not key:
        return []
    handle, name = tempfile.mkstemp(suffix=".yaml", prefix="ddtree-", dir=folder)  # 0600
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump({"api-key": key}, file)
    return ["--config", name]


if __name__ == "__main__":
    main(sys.argv[1:])
