"""The kernels of one launch for bfloat16 inputs, in Triton's interpreter, against the float64 recurrence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ddtree_kernels.errors import KernelInputError
from ddtree_kernels.tree_gdn import tree_gdn_verify_naive
from ddtree_kernels.tree_gdn.triton import WritesConfig, config_of, tree_gdn_verify, writes_config

from .cases import SHAPES, layer, relative_error

SIZES = {"heads": 1, "value_heads": 2, "key_dim": 128, "value_dim": 128}
# By nodes: what few and what many heads take.
CONFIGS = [(16, writes_config(16, heads)) for heads in (48, 192, 384)] + [(64, writes_config(64))]


def case_of(shape="random", batch=1, width=16, **options):
    case = layer(shape, batch=batch, width=width, **SIZES | options, dtype=torch.float32)
    return replace(case, x=case.x.bfloat16(), a=case.a.bfloat16(), b=case.b.bfloat16())


def run(case, config):
    """The float32 output; what is not written stays NaN."""
    v = case.qkv(case.x)[2]
    out = torch.full(v.shape, torch.nan)
    return tree_gdn_verify(*case.verify_args(case.x), out=out, config=config)


def check(case, config, bound=3e-5):
    exact = case.to(torch.float64)
    out = run(case, config)
    assert relative_error(out, tree_gdn_verify_naive(*exact.verify_args(exact.x))) < bound
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("width", "config"), [CONFIGS[0], CONFIGS[1], CONFIGS[3]])
def test_outputs_equal_forked_states(shape, width, config):
    check(case_of(shape, width=width - 3), config)


@pytest.mark.parametrize(("nodes", "config"), [(1, CONFIGS[0][1]), (1, CONFIGS[1][1]), (33, CONFIGS[3][1])])
def test_widths_at_the_edges(nodes, config):
    check(case_of(width=nodes), config)


@pytest.mark.parametrize("decay", [-1e-3, -20.0, -80.0])
@pytest.mark.parametrize(("width", "config"), [CONFIGS[0], CONFIGS[2], CONFIGS[3]])
def test_correlated_keys_and_extreme_decays(decay, width, config):
    check(case_of("chain", width=width, value_heads=1, decay=decay, correlation=0.99), config, bound=1e-4)


@pytest.mark.parametrize(("width", "config"), [CONFIGS[0], CONFIGS[2], CONFIGS[3]])
def test_requests_without_a_slot_start_from_nothing(width, config):
    check(case_of(batch=2, width=width, value_heads=1, slots=[4, -1]), config)


@pytest.mark.parametrize(("width", "config"), [CONFIGS[0], CONFIGS[1], CONFIGS[3]])
def test_runs_are_equal_wherever_the_states_lie_and_leave_the_pool(width, config):
    case = case_of(batch=2, width=width, value_heads=1)
    pool = case.state_pool.clone()
    order = torch.tensor([4, 2, 0, 1, 3])
    moved = replace(case, state_pool=case.state_pool[order], slots=torch.argsort(order)[case.slots])
    once = run(case, config)
    assert torch.equal(once, run(case, config))
    assert torch.equal(once, run(moved, config))
    assert torch.equal(pool, case.state_pool)


@pytest.mark.parametrize(("width", "config"), [CONFIGS[0], CONFIGS[1], CONFIGS[3]])
def test_a_bfloat16_state_is_read_as_it_is(width, config):
    case = case_of(width=width, value_heads=1)
    check(replace(case, state_pool=case.state_pool.bfloat16()), config)


@pytest.mark.parametrize(
    ("width", "dim", "heads", "dtype", "taken"),
    [
        (16, 128, 384, torch.bfloat16, True),
        (64, 128, 64, torch.bfloat16, True),
        (64, 128, 65, torch.bfloat16, False),
        (17, 128, 48, torch.bfloat16, False),
        (32, 128, 48, torch.bfloat16, False),
        (16, 64, 48, torch.bfloat16, False),
        (16, 128, 48, torch.float16, False),
    ],
)
def test_only_what_they_serve_takes_them(width, dim, heads, dtype, taken):
    config = config_of(width, dim, dim, heads=heads, device=torch.device("cpu"), dtype=dtype)
    assert isinstance(config, WritesConfig) is taken


def test_they_are_refused_for_other_inputs():
    case = layer("random", width=8, dtype=torch.float32)
    with pytest.raises(KernelInputError, match="config: found WritesConfig, allowed is FusedConfig for"):
        tree_gdn_verify(*case.verify_args(case.x), config=writes_config(8))
