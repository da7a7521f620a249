"""The API key's way into SGLang: by a private file, never by argv or environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml
from ddtree_engine.sglang_plugin.serve import key_options

#: Stands where SGLang would be found and says what it was started with.
SERVER = """
import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "key": os.environ.get("DDTREE_API_KEY")}))
"""


def run(folder: Path, key: str | None) -> dict[str, object]:
    package = folder / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SERVER)
    env = {key: value for key, value in os.environ.items() if key != "DDTREE_API_KEY"}
    env |= {"PYTHONPATH": str(folder), "TMPDIR": str(folder)} | ({"DDTREE_API_KEY": key} if key else {})
    argv = [sys.executable, "-m", "ddtree_engine.sglang_plugin.serve", "--port", "1"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_a_key_reaches_the_server_through_a_private_file_only(tmp_path: Path) -> None:
    found = run(tmp_path, "a: key # of 'odd' characters")
    argv = found["argv"]
    assert isinstance(argv, list)
    assert (argv[0], argv[2:], found["key"]) == ("--config", ["--port", "1"], None)
    file = Path(argv[1])
    assert file.suffix == ".yaml"
    assert file.stat().st_mode & 0o777 == 0o600
    assert yaml.safe_load(file.read_text()) == {"api-key": "a: key # of 'odd' characters"}


def test_without_a_key_the_server_starts_as_asked(tmp_path: Path) -> None:
    assert run(tmp_path, None) == {"argv": ["--port", "1"], "key": None}
    assert key_options("") == []
