"""What a bundle shows of a cluster's hosts, and where the kernel table is made."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_ops.hosts.facts import HostFacts, parse_facts, read_capture
from ddtree_ops.schemas.acceptance import StageStatus
from ddtree_ops.verify.cluster import MARK, SCRIPT, idle_card_of, kernels_spec, shown_facts, table_of
from ddtree_ops.verify.scrub import Scrubber
from tests.unit.verify.test_kernels import summary

CAPTURES = Path(__file__).parents[1] / "hosts" / "captures"


@pytest.fixture
def facts() -> HostFacts:
    return parse_facts(read_capture(CAPTURES / "good.json"), name="gpu-a.example.org")


def test_facts_are_allow_listed_and_cards_have_no_serial(facts: HostFacts) -> None:
    shown = Scrubber({}).data(shown_facts("host-1", facts).model_dump(mode="json"))
    assert shown["name"] == "host-1"
    assert shown["facts"]["driver"] == facts.driver
    assert [gpu["power_cap"] for gpu in shown["gpus"]] == [gpu.power_cap for gpu in facts.gpus]
    text = json.dumps(shown)
    for secret in (
        "gpu-a",
        *facts.cmdline,
        *(gpu.uuid for gpu in facts.gpus),
        *facts.disks,
        *facts.containers,
    ):
        assert secret not in text
    assert len({gpu["uuid"] for gpu in shown["gpus"]}) == len(facts.gpus) > 0


def test_the_kernel_table_takes_an_idle_card_or_none(facts: HostFacts) -> None:
    idle = [replace(gpu, used=3, processes=()) for gpu in facts.gpus]
    busy = [replace(gpu, used=90000, processes=(1,)) for gpu in facts.gpus]
    mixed = replace(facts, gpus=(busy[0], *idle[1:]))
    assert idle_card_of({"a": None, "b": mixed}) == ("b", idle[1].uuid, None)
    host, card, reason = idle_card_of({"b": replace(facts, gpus=tuple(busy))})
    assert (host, card) == (None, None)
    assert f"all {len(busy)} are in use" in str(reason)
    starting = replace(facts, gpus=(replace(idle[0], processes=(7,)), replace(idle[0], used=None)))
    assert idle_card_of({"b": starting})[0] is None
    assert idle_card_of({})[2] == "no CUDA card is known on the hosts"


def test_the_benchmark_s_container_sees_one_card_and_nothing_of_the_host() -> None:
    spec = kernels_spec("lab", "sha256:1", "GPU-1")
    assert (spec.gpus, spec.mounts, spec.secret_env, spec.env) == (("GPU-1",), (), (), {})
    assert spec.argv == ("sh", "-c", SCRIPT)


def test_the_table_comes_back_through_the_output(tmp_path: Path) -> None:
    """The script is run for real, with a stand-in for the benchmark."""
    program = tmp_path / "python3"
    out = tmp_path / "kernels"
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then exec {Path("/usr/bin/env")} -S python3.real "$@"; fi\n'
        f"mkdir -p {out}; cp {tmp_path}/made.json {out}/summary.json; echo 'verify-n1-q64: done'; exit 1\n"
    )
    program.chmod(0o755)
    import sys

    (tmp_path / "python3.real").symlink_to(sys.executable)
    (tmp_path / "made.json").write_text(summary("verify-n1-q64"))
    script = SCRIPT.replace("/tmp/kernels", str(out))
    done = subprocess.run(
        ["sh", "-c", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert MARK in done.stdout
    table = table_of(done.returncode, done.stdout)
    assert (table.status, table.targets[0].figure) == (StageStatus.FAILED, 13.5)
    lost = table_of(1, "Traceback\nRuntimeError: no kernel image")
    assert lost.reason == "exit code 1, no table: Traceback / RuntimeError: no kernel image"
