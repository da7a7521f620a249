"""The assembler of kernels with warp-group products: which it is, that it is used, and where they run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import triton
from ddtree_kernels import toolchain
from ddtree_kernels.errors import KernelInputError
from ddtree_kernels.tree_gdn.triton import (
    FusedConfig,
    VerifyConfig,
    WritesConfig,
    config_of,
    fused_config,
    tree_gdn_verify,
)

from .cases import layer

HOPPER = torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch):
    """A card whose capability and whose newest ptxas are given."""

    def be(capability, ptxas=("ptxas", "12.9")):
        monkeypatch.setattr(toolchain, "_capability", lambda index: capability)
        monkeypatch.setattr(toolchain, "right_ptxas", lambda: ptxas)
        return HOPPER

    return be


def test_this_tritons_own_ptxas_is_passed_over_for_a_newer_one():
    path, version = toolchain.right_ptxas()
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    assert f"release {version}" in said
    assert tuple(map(int, version.split("."))) >= toolchain.RIGHT_SINCE


@pytest.mark.parametrize("before", [None, "/elsewhere/ptxas"])
def test_the_users_own_choice_of_ptxas_is_put_back(before, monkeypatch):
    monkeypatch.delenv(toolchain.VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(toolchain.VARIABLE, before)
    inside = []

    def fail():
        with toolchain.assembled_by("/new/ptxas"):
            inside.append(os.environ[toolchain.VARIABLE])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside == ["/new/ptxas"]
    assert os.environ.get(toolchain.VARIABLE) == before


def test_a_choice_in_code_that_no_variable_undoes_leaves_none():
    tools = triton.knobs.nvidia
    with tools.scope():
        tools.ptxas = tools.ptxas.path
        assert toolchain.right_ptxas.__wrapped__() is None


COMPILE = """
import sys
from dataclasses import replace
from ddtree_kernels import aot, toolchain
case = next(case for case in aot.cases() if case.warp_groups)
toolchain.right_ptxas = lambda: (sys.argv[1], "12.9")
print(aot.compile_case(case, aot.HOPPER))
"""


def test_what_is_compiled_for_warp_groups_is_assembled_by_it(tmp_path):
    path, _ = toolchain.right_ptxas()
    script, calls = tmp_path / "ptxas", tmp_path / "calls"
    script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {path} "$@"\n')
    script.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, "-c", COMPILE, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "wgmma=False" in done.stdout
    # Once to compile it and once to read its registers.
    assert sum("sm_90a" in line for line in calls.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("capability", "ptxas", "expected"),
    [(9, ("ptxas", "12.9"), WritesConfig), (9, None, VerifyConfig), (12, ("ptxas", "12.9"), VerifyConfig)],
)
def test_one_launch_above_32_nodes_is_for_hopper_with_a_right_ptxas(capability, ptxas, expected, card):
    device = card(capability, ptxas)
    assert type(config_of(64, 128, 128, device=device)) is expected
    assert type(config_of(32, 128, 128, device=device)) is FusedConfig
    assert type(config_of(16, 128, 128, device=device)) is WritesConfig
    assert type(config_of(65, 128, 128, device=device)) is VerifyConfig


@pytest.mark.parametrize("sizes", [{"element_size": 4}, {"key_dim": 256}, {"value_dim": 256}])
def test_shapes_that_nobody_has_compiled_for_warp_groups_take_three_launches(sizes, card):
    sizes = {"key_dim": 128, "value_dim": 128} | sizes
    assert type(config_of(64, **sizes, device=card(9))) is VerifyConfig


def test_more_heads_give_a_program_more_value_channels():
    assert [config_of(64, 128, 128, heads=h, device=torch.device("cpu")).block_v for h in (48, 192)] == [
        32,
        128,
    ]


def test_hopper_without_a_right_ptxas_refuses_the_one_launch_of_more_than_32_nodes(card, monkeypatch):
    card(9, None)
    monkeypatch.setattr(toolchain, "is_hopper", lambda device: True)
    case = layer("random", batch=1, width=40, heads=1, value_heads=1, dtype=torch.float32)
    with pytest.raises(KernelInputError, match=r"allowed on Hopper only with ptxas 12\.9 or newer"):
        tree_gdn_verify(*case.verify_args(case.x), config=fused_config(40, 16, 16))
