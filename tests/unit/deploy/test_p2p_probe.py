"""The all-reduce between GPUs, on CPUs here: it ends well, it tells of a rank that fails, it never hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from ddtree_ops.deploy.p2p import PROGRAM

TEXT = PROGRAM.read_text()


def probe(*arguments: str, text: str = TEXT) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", text, *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env=env)


def test_ranks_that_talk_end_with_one_object_and_code_0() -> None:
    done = probe("2", "90")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["ranks"], answer["right"]) == (2, True)


def test_ranks_that_hang_are_killed_at_the_limit() -> None:
    hanging = TEXT.replace("    import torch\n", "    time.sleep(600)\n    import torch\n", 1)
    assert hanging != TEXT
    started = time.monotonic()
    done = probe("2", "1", text=hanging)
    assert (done.returncode, time.monotonic() - started < 60) == (1, True)
    assert "all-reduce over 2 GPUs hung: exit codes [-9, -9]" in done.stdout


def test_a_wrong_sum_fails() -> None:
    wrong = TEXT.replace("ranks * (ranks + 1) / 2", "0")
    assert wrong != TEXT
    done = probe("2", "90", text=wrong)
    assert done.returncode == 1
    assert "all-reduce over 2 GPUs failed: exit codes [1, 1]" in done.stdout
