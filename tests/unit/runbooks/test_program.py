"""The program that plays run on a host: what it makes of what commands say."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_ops.hosts.checks import FATAL_XIDS
from ddtree_ops.hosts.runner import playbooks_folder
from ddtree_ops.redact import DDTREE_FIELDS, SERVER_INFO_FIELDS, redact_text

FILE = playbooks_folder() / "runbooks" / "files" / "ddtree_runbook.py"
spec = importlib.util.spec_from_file_location("ddtree_runbook", FILE)
assert spec is not None
assert spec.loader is not None
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)


def host(tmp_path: Path, smi: str = "exit 1", docker: str = "exit 1") -> Any:
    """A host with these shell scripts as its nvidia-smi and docker."""
    for name, script in (("nvidia-smi", smi), ("docker", docker)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    return program.Host(
        SimpleNamespace(
            docker=str(tmp_path / "docker"),
            nvidia_smi=str(tmp_path / "nvidia-smi"),
            timeout=5.0,
            cluster="lab",
            service="",
        )
    )


def arguments(**values: Any) -> Any:
    return SimpleNamespace(**{"seconds": 0.0, "kernel_log": "", "path": [], "lines": 10, **values})


def row(index: int, *, heat: int = 60, cap: int = 600, busy: int = 99, reasons: str = "0x0") -> str:
    where = f"{index}, GPU-{index}, 00000000:4{index}:00.0, card"
    return f"{where}, {heat}, {cap - 12}, {cap}, 2500, 3090, 13365, {busy}, 1, 2, {reasons}"


def answering(*rows: str) -> str:
    lines = "\n".join(rows)
    return f'case "$1" in --query-gpu=*) cat <<END\n{lines}\nEND\n;; esac'


def test_it_runs_on_the_oldest_python_that_hosts_have() -> None:
    ast.parse(FILE.read_text(), feature_version=(3, 8))


def test_hardware_xids_are_those_of_the_check() -> None:
    assert program.FATAL_XIDS == FATAL_XIDS


def test_settings_that_leave_the_host_are_those_that_may_be_stored() -> None:
    assert set(program.SERVER_INFO) - {"disable_flashinfer_autotune"} <= SERVER_INFO_FIELDS
    assert set(program.DDTREE_INFO) <= DDTREE_FIELDS


@pytest.mark.parametrize(
    "text",
    [
        "api_key=sk-12345678",
        '"hf_token": "abcdefgh"',
        "Authorization: Bearer abc.def",
        "hf_abcdefghijk",
        "PASSWORD: hunter22",
    ],
)
def test_what_is_taken_out_of_logs_here_is_taken_out_there(text: str) -> None:
    assert program.redact(text) == redact_text(text) != text


def test_a_key_among_arguments_is_taken_out() -> None:
    assert program.redact("serve --api-key s3cret --port 1") == "serve --api-key [redacted] --port 1"


def test_cards_are_judged_at_work_only(tmp_path: Path) -> None:
    smi = answering(row(0), row(1, busy=0), row(2, heat=91, reasons="0x48"), row(3, cap=450, reasons="0x4"))
    found = program.gpus(host(tmp_path, smi), arguments(), {})
    text = "\n".join(found)
    assert "GPU 0: up to 60 C, cap 600 W, 2500 of 3090 MHz, 588 W at work" in found
    assert "GPU 1: up to 60 C, cap 600 W, idle" in text
    assert (
        "91 C, cap 600 W, 2500 of 3090 MHz, 588 W at work; slowed by hardware slowdown, hardware thermal"
        in text
    )
    assert "slowed by power cap" in text
    assert "power caps differ: 450 W, 600 W" in found


def test_cards_that_do_not_answer_are_no_cards_without_trouble(tmp_path: Path) -> None:
    found = program.gpus(host(tmp_path), arguments(), {})
    assert found == ["nvidia-smi gives no answer; 0 cards on the PCI bus"]


def test_a_driver_that_hangs_is_given_up(tmp_path: Path) -> None:
    slow = host(tmp_path, "exec sleep 30")
    slow.timeout = 0.2
    assert "no answer" in program.gpus(slow, arguments(), {})[0]


def test_kernel_lines_become_findings(tmp_path: Path) -> None:
    log = tmp_path / "dmesg"
    log.write_text(
        "[1] NVRM: Xid (PCI:0000:41:00): 79, pid=1, GPU has fallen off the bus.\n" * 2
        + "[2] usb 1-1: new device\n"
        + "[3] Out of memory: Killed process 4711 (python3) total-vm:1kB\n"
        + "[4] INFO: task python3:99 blocked for more than 120 seconds.\n"
    )
    result: dict[str, Any] = {}
    one = host(tmp_path)
    found = program.kernel(one, arguments(kernel_log=str(log)), result)
    assert found[0] == "Xid 79 on 0000:41:00, 2 times: hardware"
    assert "the kernel ended process 4711 (python3) for lack of memory" in found
    assert "1 tasks hung" in found[2]
    assert result["fatal_buses"] == ["0000:41:00"]
    assert "usb" not in one.files["kernel.txt"]


def test_a_program_s_own_fault_drains_nothing(tmp_path: Path) -> None:
    log = tmp_path / "dmesg"
    log.write_text("[1] NVRM: Xid (PCI:0000:41:00): 31, pid=1, MMU fault\n")
    result: dict[str, Any] = {"uuids": {"GPU-0": "00000000:41:00.0"}}
    program.kernel(host(tmp_path), arguments(kernel_log=str(log)), result)
    assert program.affected([container("a", "GPU-0")], result) == []


def container(name: str, *gpus: str, state: str = "running") -> dict[str, Any]:
    return {"name": name, "gpus": list(gpus), "state": state}


def test_addresses_of_one_card_are_one_however_they_are_written() -> None:
    assert program.place("0000:C1:00") == program.place("00000000:c1:00.0") == (0, "c1", "00")
    assert program.place("0001:c1:00.0") != program.place("0000:c1:00.0")


def test_only_running_services_on_a_bad_or_missing_card_are_affected() -> None:
    result = {
        "uuids": {"GPU-0": "00000000:41:00.0", "GPU-1": "00000000:42:00.0"},
        "fatal_buses": ["0000:41:00"],
    }
    ours = [
        container("bad", "GPU-0"),
        container("good", "GPU-1"),
        container("gone", "GPU-9"),
        container("stopped", "GPU-0", state="exited"),
        container("cpu"),
        container("both", "GPU-1", "GPU-0"),
    ]
    assert program.affected(ours, result) == ["bad", "gone", "both"]


def test_where_nvidia_smi_hangs_no_card_counts_as_gone() -> None:
    assert program.affected([container("any", "GPU-0")], {"fatal_buses": []}) == []


def test_environments_of_containers_are_never_read() -> None:
    answer = {
        "Name": "/lab-tree-0",
        "Config": {"Env": ["SGLANG_API_KEY=sk-1"], "Labels": {"ddtree.service": "tree"}},
        "State": {"Status": "exited", "ExitCode": 137, "OOMKilled": True},
        "Path": "sglang",
        "Args": ["serve", "--port=30001", "--host", "0.0.0.0"],
        "HostConfig": {"DeviceRequests": [{"DeviceIDs": ["nvidia.com/gpu=GPU-0"]}]},
    }
    one = program.described(answer)
    assert "sk-1" not in json.dumps(one)
    assert (one["url"], one["gpus"]) == ("http://127.0.0.1:30001", ["GPU-0"])
    assert program.ended(one) == "exited with code 137, killed for lack of memory"


@pytest.mark.parametrize(
    ("argv", "url"),
    [
        (["--host", "127.0.0.1", "--port", "1"], "http://127.0.0.1:1"),
        (["--host=::", "--port=1"], "http://[::1]:1"),
        (["--host", "10.0.0.1", "--port", "1"], "http://10.0.0.1:1"),
        (["serve"], ""),
        (["--port"], ""),
    ],
)
def test_a_server_is_asked_where_its_arguments_say(argv: list[str], url: str) -> None:
    assert program.url_of(argv) == url


def metrics(tokens: int, steps: int, *, asked: int = 0, forked: int = 0) -> str:
    return (
        "# HELP sglang:generation_tokens_total tokens\n"
        f'sglang:generation_tokens_total{{model_name="m"}} {tokens}.0\n'
        f'sglang:spec_verify_calls_total{{model_name="m"}} {steps}.0\n'
        f'ddtree_requests_total{{mode="tree",tp_rank="0"}} {asked}\n'
        f"ddtree_tree_kernel_requests_total {forked}\n"
        "process_resident_memory_bytes 1e9\n"
    )


def test_accept_length_is_tokens_by_steps_in_total_and_over_the_watch() -> None:
    before, after = program.counters(metrics(1000, 500)), program.counters(metrics(1340, 600))
    lines = program.speeds(before, after, 10.0)
    assert lines == [
        "accept length 2.23 since its start (1340 tokens in 600 verify steps)",
        "accept length 3.40 over 10 s (340 tokens in 100 verify steps)",
    ]


def test_a_tree_path_that_does_not_run_is_shouted() -> None:
    lines = program.speeds({}, program.counters(metrics(10, 5, asked=5, forked=0)), 0.0)
    assert "the forked kernels ran for 0 of 5 tree steps: OUTPUT MAY BE WRONG" in lines
    lines = program.speeds({}, program.counters(metrics(10, 5, asked=5, forked=5)), 0.0)
    assert not any("WRONG" in line for line in lines)


def test_metrics_that_are_missing_are_no_accept_length() -> None:
    assert program.speeds({}, {}, 0.0) == ["no metrics: was it started with --enable-metrics?"]
    assert "no verify step" in program.speeds({}, program.counters(metrics(0, 0)), 0.0)[0]


def test_settings_are_compared_but_not_those_of_the_arm() -> None:
    info = {
        "attention_backend": "triton",
        "api_key": "sk-1",
        "ddtree": {"arm": "ddtree", "dtype": "bfloat16", "budget": 31},
    }
    one = program.allowed(json.dumps(info))
    assert "sk-1" not in json.dumps(one)
    other = {**one, "attention_backend": "flashinfer", "ddtree.arm": "dflash", "ddtree.budget": None}
    assert program.differences({"tree": one, "chain": other}) == [
        "settings differ: attention_backend: chain flashinfer, tree triton"
    ]
    assert program.differences({"tree": one}) == []
    assert program.allowed("not json") == {}


def test_old_logs_are_logs_and_old(tmp_path: Path) -> None:
    names = ["a.log", "a.log.1", "a.log.2.gz", "a.txt", "catalog", "a.log.d"]
    for name in names[:-1]:
        (tmp_path / name).write_text("")
    (tmp_path / names[-1]).mkdir()
    later = (tmp_path / "a.log").stat().st_mtime + 60
    assert [name for name in names if program.is_old_log(tmp_path / name, later)] == names[:3]
    assert not program.is_old_log(tmp_path / "a.log", later - 3600)
    (tmp_path / "link.log").symlink_to(tmp_path / "a.log")
    assert not program.is_old_log(tmp_path / "link.log", later)


def test_a_docker_that_does_not_answer_is_said_and_files_can_still_go(tmp_path: Path) -> None:
    one = host(tmp_path, docker="echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    assert program.containers(one, arguments(), {}) == ["docker: Cannot connect to the Docker daemon"]
    answer = program.wasted(one, arguments(logs=str(tmp_path), models=str(tmp_path), days=1))
    assert answer["found"] == ["docker: Cannot connect to the Docker daemon"]
    assert "error" not in answer


def test_nothing_is_removed_while_a_docker_that_is_there_does_not_answer(tmp_path: Path) -> None:
    paths = {"state": "/srv/ddtree", "models": "/srv/ddtree/models", "logs": "/srv/logs/ddtree"}
    asked = arguments(**paths, root="", file=[], weights=False)
    silent = host(tmp_path, docker='[ "$1" = --version ] || { echo "no daemon" >&2; exit 1; }')
    assert (
        program.remaining(silent, asked)["refused"]
        == "whether services run cannot be said (docker: no daemon)"
    )
    bare = host(tmp_path, docker="exit 1")
    assert program.remaining(bare, asked)["refused"] == "", "a host without docker serves nothing"
