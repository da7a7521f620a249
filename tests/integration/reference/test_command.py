"""Start-up: wrong input is one line on stderr and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .conftest import command, process


def run(pair, *options):
    return subprocess.run(command(pair, *options), capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--arm", "unsafe"), "--allow-hybrid-unsafe"),
        (("--arm", "eagle"), "--arm"),
        (("--budget", "0"), "--budget"),
        (("--budget", "128"), "--budget"),
        (("--budget", "many"), "--budget"),
        (("--topk", "0"), "--topk"),
        (("--max-running", "0"), "--max-running"),
        (("--threads", "0"), "--threads"),
        (("--port", "70000"), "--port"),
        (("--host", "256.0.0.1"), "--host"),
        (("--context-length", "100000"), "--context-length"),
        (("--builder", "calibrated"), "--calibration"),
        (("--builder", "calibrated", "--calibration", "/nowhere.json"), "/nowhere.json"),
        (("--model", "/nowhere"), "/nowhere"),
        (("--drafter", "/nowhere"), "/nowhere"),
        (("--log-file", "/nowhere/log"), "--log-file"),
    ],
)
def test_wrong_options_end_with_2_and_name_the_option(tiny, options, word):
    ended = run(tiny, *options, *(() if "--port" in options else ("--port", "0")))
    assert ended.returncode == 2
    assert word in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


def test_help_needs_no_torch():
    script = (
        "import sys\nsys.modules['torch'] = None\n"
        "from ddtree_engine.reference.__main__ import main\nmain(['--help'])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert "--allow-hybrid-unsafe" in ended.stdout


def test_a_machine_without_torch_ends_with_3(tiny):
    script = (
        "import sys\nsys.modules['torch'] = None\n"
        "from ddtree_engine.reference.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    )
    options = command(tiny, "--port", "0")[3:]
    ended = subprocess.run(
        [sys.executable, "-c", script, *options], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 3
    assert "torch" in ended.stderr


def test_a_fitted_calibration_is_used(tiny, tmp_path):
    side = {"depth": [2.0] * 7, "rank": [-0.3 * rank for rank in range(16)], "slope": 0.5}
    fitted = {
        "schema": 1,
        "kind": "ddtree-calibration",
        "block": 8,
        "topk": 16,
        "logprob_floor": -12.0,
        "on": side,
        "off": side,
        "fit": {},
    }
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(fitted))
    options = ("--builder", "calibrated", "--calibration", str(path), "--log-file", str(tmp_path / "log"))
    with process_with_log(tiny, tmp_path / "log", *options) as client:
        body = {"text": "abc", "sampling_params": {"temperature": 0, "max_new_tokens": 20}}
        answers = {}
        for builder in ("calibrated", "best-first"):
            body["sampling_params"]["custom_params"] = {"ddtree_builder": builder}
            answers[builder] = client.post("/generate", json=body).json()
        assert answers["calibrated"]["meta_info"]["ddtree"]["builder"] == "calibrated"
        assert answers["calibrated"]["output_ids"] == answers["best-first"]["output_ids"]


def test_a_calibration_for_another_block_is_refused_at_start(tiny, tmp_path):
    side = {"depth": [0.0] * 15, "rank": [0.0] * 16, "slope": 1.0}
    fitted = {
        "schema": 1,
        "kind": "ddtree-calibration",
        "block": 16,
        "topk": 16,
        "logprob_floor": -12.0,
        "on": side,
        "off": side,
        "fit": {},
    }
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(fitted))
    ended = run(tiny, "--port", "0", "--builder", "calibrated", "--calibration", str(path))
    assert ended.returncode == 2
    assert "--calibration" in ended.stderr


def process_with_log(pair, log, *options):
    """The log goes to a file, so the address is read from there."""
    import re
    import time
    from contextlib import contextmanager

    import httpx

    @contextmanager
    def running():
        started = subprocess.Popen(command(pair, "--port", "0", *options))
        try:
            deadline = time.monotonic() + 120
            while not (found := re.search(r"listening on (\S+)", log.read_text() if log.exists() else "")):
                assert started.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            with httpx.Client(base_url=found[1], timeout=60) as client:
                yield client
        finally:
            started.terminate()
            started.wait(timeout=60)

    return running()


__all__ = ["process"]
