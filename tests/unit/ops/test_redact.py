from __future__ import annotations

import pytest

from ddtree_ops.containers.failures import DockerFailure, refused
from ddtree_ops.redact import allowed_server_info, plain_text, redact_text
from ddtree_ops.services.readiness import argument_mismatch, simulated_acceptance


def test_only_allowed_scalars_of_a_server_info_are_kept() -> None:
    info = {
        "version": "0.5.23",
        "api_key": "sk-secret",
        "launch_command": "serve --api-key sk-secret",
        "attention_backend": {"nested": "sk-secret"},
        "tp_size": 1,
        "ddtree": {"arm": "ar", "budget": None, "token": "sk-secret", "block": ["sk-secret"]},
    }
    kept = allowed_server_info(info)
    assert kept == {"version": "0.5.23", "tp_size": 1, "ddtree": {"arm": "ar", "budget": None}}


@pytest.mark.parametrize(
    "text",
    [
        "api_key='sk-123456789'",
        '"api_key": "sk-123456789"',
        "--api-key=sk-123456789",
        "Authorization: Bearer sk-123456789",
        "HF_TOKEN=sk-123456789",
        "using hf_sk123456789abc",
        "password: sk-123456789",
    ],
)
def test_what_looks_like_a_secret_leaves_a_log(text: str) -> None:
    assert "123456789" not in redact_text(text)
    assert "[redacted]" in redact_text(text)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\x1b[1;31mERROR\x1b[0m: no space", "ERROR: no space"),
        ("\x1b[38;2;255;0;0mred\x1b[m", "red"),
        ("\x1b[2K\x1b[1Gstep 3\x9b0m", "step 3"),
        ("\x1b]8;;http://x\x1b\\a link\x1b]8;;\x07!", "a link!"),
        ("\x1b]0;a title that does not end\nnext", "0;a title that does not end\nnext"),
        ("\x1b(Bplain\x1b7", "plain"),
        ("cut off \x1b[31", "cut off "),
        ("cut off \x1b", "cut off "),
        ("array[0m] stays, and\ttabs\n", "array[0m] stays, and\ttabs\n"),
    ],
)
def test_colours_and_cursors_leave_a_text(text: str, plain: str) -> None:
    assert plain_text(text) == plain


def test_what_an_image_prints_in_colour_is_told_without() -> None:
    assert DockerFailure("gpu-a: \x1b[31mnot\x1b[0m there").message == "gpu-a: not there"
    failure = refused("gpu-a", "build", "\x1b[31mno space\x1b[0m left on device")
    assert failure.message == "gpu-a: build: no space left on device"
    assert failure.remedy is not None
    assert redact_text("api_key=\x1b[31msk-123456789") == "api_key=[redacted]"


@pytest.mark.parametrize(
    "text", ["max_new_tokens=128", "api_key=None, port=30000", "mask_token 3", "RuntimeError: out of memory"]
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact_text(text) == text


def test_the_first_argument_that_differs_is_named() -> None:
    info = {"ddtree": {"arm": "ddtree", "topk": 8}}
    assert argument_mismatch({"arm": "ddtree"}, info) is None
    assert argument_mismatch({"arm": "ddtree", "topk": 16}, info) == (
        "/server_info: ddtree.topk: found 8, asked for 16"
    )
    assert argument_mismatch({"arm": "ar"}, {}) == "/server_info: ddtree.arm: found None, asked for 'ar'"


@pytest.mark.parametrize(
    "info",
    [
        {"SGLANG_SIMULATE_ACC_LEN": "2.5"},
        {"internal_states": [{"env": {"SGLANG_SIMULATE_ACC_LEN": 3}}]},
        {"launch_command": "SGLANG_SIMULATE_ACC_LEN=3 sglang serve"},
    ],
)
def test_simulated_acceptance_is_found_wherever_it_is(info: dict[str, object]) -> None:
    assert simulated_acceptance(info)


@pytest.mark.parametrize("value", [None, "", 0, -1, "-1"])
def test_simulation_that_is_off_is_no_simulation(value: object) -> None:
    assert simulated_acceptance({"SGLANG_SIMULATE_ACC_LEN": value, "other": ["x", 1]}) is None
