"""The verify kernels in Triton's interpreter against float64: with float32 products, and as shipped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ddtree_kernels.ancestry import ancestor_bits_naive, depth_first_naive
from ddtree_kernels.ancestry.triton import ancestor_bits, depth_first
from ddtree_kernels.errors import KernelInputError
from ddtree_kernels.tree_gdn import tree_gdn_verify_naive
from ddtree_kernels.tree_gdn.triton import (
    FUSED_WIDTH,
    SMALL_WIDTH,
    fused_config,
    tree_gdn_verify,
    verify_config,
)

from .cases import SHAPES, layer, parents_of, relative_error


def plain_products(case, widest=FUSED_WIDTH):
    """The configuration of this case with float32 products, which show an algorithm's own error."""
    _, _, key_dim, value_dim = case.sizes
    width = case.x.shape[1]
    if width <= widest:
        config = fused_config(width, key_dim, value_dim, case.x.element_size())
    else:
        config = verify_config(key_dim, value_dim)
    return replace(config, precision="ieee")


def check(case, bound=2e-6, **options):
    exact = case.to(torch.float64)
    expected = tree_gdn_verify_naive(*exact.verify_args(exact.x))
    options = {"config": plain_products(case)} | options
    out = tree_gdn_verify(*case.verify_args(case.x), **options)
    assert relative_error(out, expected) < bound
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [1, 8, 16, 31, 64])
def test_outputs_equal_forked_states(shape, width):
    check(layer(shape, width=width, heads=1, value_heads=2, dtype=torch.float32))


@pytest.mark.parametrize("width", [33, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_three_launches_equal_forked_states_where_one_is_not_taken(shape, width):
    case = layer(shape, width=width, heads=1, value_heads=2, dtype=torch.float32)
    check(case, config=plain_products(case, widest=SMALL_WIDTH))


@pytest.mark.parametrize(
    ("shape", "width"), [("random", 65), ("chain", 128), ("padded", 100), ("random", 128)]
)
def test_wide_trees_continue_over_four_blocks(shape, width):
    check(layer(shape, batch=1, width=width, heads=1, value_heads=1, dtype=torch.float32))


@pytest.mark.parametrize("decay", [-1e-3, -1.0, -20.0, -80.0])
@pytest.mark.parametrize("shape", ["random", "chain"])
def test_extreme_decays(shape, decay):
    check(layer(shape, batch=1, width=64, heads=1, value_heads=1, decay=decay, dtype=torch.float32))


@pytest.mark.parametrize("width", [64, 128])
def test_weak_decays_after_strong_ones(width):
    case = layer("chain", batch=1, width=width, heads=1, value_heads=1, dtype=torch.float32)
    case.a[:, : width // 2] = 200.0
    case.a[:, width // 2 :] = -5.0
    check(case)


@pytest.mark.parametrize("correlation", [0.5, 0.9, 0.99])
@pytest.mark.parametrize(("shape", "width"), [("random", 64), ("chain", 128)])
def test_correlated_keys_with_weak_decay(correlation, shape, width):
    sizes = {"batch": 1, "width": width, "heads": 1, "value_heads": 1, "key_dim": 32}
    check(layer(shape, **sizes, decay=-1e-3, correlation=correlation, dtype=torch.float32), bound=1e-5)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 8), (24, 40), (128, 128), (256, 256)])
@pytest.mark.parametrize(("heads", "value_heads"), [(1, 1), (2, 6)])
def test_head_shapes(key_dim, value_dim, heads, value_heads):
    check(
        layer(
            "random",
            batch=1,
            width=20,
            heads=heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=torch.float32,
        )
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_inputs_are_exact_in_the_products(dtype):
    """Written as float32, the result has no trace of 16-bit intermediate rounding."""
    case = layer("random", batch=1, width=40, dtype=torch.float32)
    low = replace(case, x=case.x.to(dtype), a=case.a.to(dtype), b=case.b.to(dtype))
    exact = replace(case.to(torch.float64), x=low.x.double(), a=low.a.double(), b=low.b.double())
    expected = tree_gdn_verify_naive(*exact.verify_args(exact.x))
    out = torch.empty(expected.shape, dtype=torch.float32)
    tree_gdn_verify(*low.verify_args(low.x), out=out, config=plain_products(low))
    assert relative_error(out, expected) < 1e-5
    assert tree_gdn_verify(*low.verify_args(low.x)).dtype == dtype


def test_a_bfloat16_state_is_read_as_it_is():
    case = layer("random", width=20, dtype=torch.float32)
    case = replace(case, state_pool=case.state_pool.to(torch.bfloat16))
    check(case, bound=1e-5)


def test_requests_without_a_slot_start_from_nothing():
    check(layer("random", batch=3, dtype=torch.float32, slots=[4, -1, 0]))


def test_strided_views_of_the_convolution_output_pass_without_copies():
    """q, k, v as views into one [N * Q, C] tensor with spare columns, parents and slots strided as well."""
    case = layer("random", width=20, dtype=torch.float32)
    wide = torch.full((*case.x.shape[:2], case.x.shape[2] + 32), torch.nan)
    wide[..., :-32] = case.x
    gates = torch.full((*case.a.shape[:2], 3 * case.a.shape[2]), torch.nan)
    heads = case.a.shape[2]
    gates[..., :heads], gates[..., heads : 2 * heads] = case.a, case.b
    slots, parents = torch.stack([case.slots, case.slots * 0 - 1], dim=1)[:, 0], case.parents.T.contiguous().T
    strided = replace(
        case,
        x=wide[..., :-32],
        a=gates[..., :heads],
        b=gates[..., heads : 2 * heads],
        slots=slots.int(),
        parents=parents.int(),
    )
    assert not strided.x.is_contiguous()
    assert torch.equal(check(strided), check(case))


def test_pools_with_a_pitch_between_slots_pass():
    case = layer("random", dtype=torch.float32)
    pitched = torch.full((case.state_pool.shape[0], 3, *case.state_pool.shape[1:]), torch.nan)
    pitched[:, 1] = case.state_pool
    check(replace(case, state_pool=pitched[:, 1]))


def test_a_permutation_of_slots_changes_nothing():
    case = layer("random", batch=2, dtype=torch.float32)
    order = torch.tensor([4, 2, 0, 1, 3])
    moved = replace(case, state_pool=case.state_pool[order], slots=torch.argsort(order)[case.slots])
    once, again = (tree_gdn_verify(*c.verify_args(c.x)) for c in (case, moved))
    assert torch.equal(once, again)


@pytest.mark.parametrize("width", [8, 40, 70])
def test_other_tile_sizes_change_nothing(width):
    sizes = {"batch": 1, "heads": 1, "value_heads": 2, "key_dim": 40, "value_dim": 48}
    case = layer("random", width=width, **sizes, dtype=torch.float32)
    config = plain_products(case)
    whole = check(case, config=config)
    for change in ({"block_v": 16}, {"block_k": 16}, {"block_k": 128, "block_v": 64}):
        assert relative_error(check(case, config=replace(config, **change)), whole) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 70])
def test_the_shipped_configuration_keeps_its_bound(width, dtype):
    case = layer("random", batch=1, width=width, heads=1, value_heads=1, key_dim=32, dtype=dtype)
    expected = tree_gdn_verify_naive(*case.to(torch.float64).verify_args(case.x.double()))
    out = torch.empty(expected.shape, dtype=torch.float32)
    tree_gdn_verify(*case.verify_args(case.x), out=out)
    assert relative_error(out, expected) < 5e-5


def test_repeated_runs_are_equal_and_leave_the_pool():
    case = layer("random", dtype=torch.float32)
    pool = case.state_pool.clone()
    once, again = (tree_gdn_verify(*case.verify_args(case.x)) for _ in range(2))
    assert torch.equal(once, again)
    assert torch.equal(pool, case.state_pool)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [1, 16, 32, 33, 128])
def test_ancestor_bits_equal_the_mask(shape, width):
    parents = parents_of(shape, 2, width)
    parents[:, 0] = 0  # unset in SGLang's buffers
    assert torch.equal(ancestor_bits(parents.int()), ancestor_bits_naive(parents))


def cancelling_case(width):
    """A prefix state along a direction that queries and keys do not have: q' S0 cancels."""
    case = layer("random", batch=1, width=width, heads=1, value_heads=1, key_dim=32, dtype=torch.float32)
    along = torch.randn(32, generator=torch.Generator().manual_seed(0))
    along /= along.norm()
    x = case.x.clone()
    for part in (x[..., :32], x[..., 32:64]):
        part -= (part @ along)[..., None] * along
    return replace(case, x=x, state_pool=case.state_pool + 20 * along)


@pytest.mark.parametrize("width", [8, 70])
def test_a_state_product_that_cancels_keeps_its_digits(width):
    check(cancelling_case(width), bound=1e-4, config=None)


@pytest.mark.parametrize(
    ("width", "config", "allowed"),
    [(65, fused_config(64, 16, 16), "VerifyConfig"), (8, verify_config(16, 16), "FusedConfig")],
)
def test_a_configuration_of_the_other_kernels_is_refused(width, config, allowed):
    case = layer("random", width=width, dtype=torch.float32)
    with pytest.raises(KernelInputError, match=f"config: found .*Config, allowed is {allowed} for"):
        tree_gdn_verify(*case.verify_args(case.x), config=config)


def scan_case(shape, width=8):
    sizes = {"heads": 1, "value_heads": 2, "key_dim": 24, "value_dim": 20, "slots": [4, -1]}
    return layer(shape, width=width, **sizes, dtype=torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_scan_form_equals_forked_states(shape):
    check(scan_case(shape), form="scan", config=None)


def test_repeated_scans_are_equal():
    once, again = (check(scan_case("random", width=5), form="scan", config=None) for _ in range(2))
    assert torch.equal(once, again)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [1, 9, 64, 128])
def test_walks_go_depth_first(shape, width):
    parents = parents_of(shape, 2, width)
    parents[:, 0] = 0  # unset in SGLang's buffers
    found = depth_first(parents.int(), ancestor_bits_naive(parents))
    for name, expected in depth_first_naive(parents)._asdict().items():
        assert torch.equal(getattr(found, name), expected), name
    assert int(found.keep.max()) < max(1, width // 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(2, 12, 3)}, r"a: found shape \[2, 12, 3\], allowed is \[2, 12, 4\]"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, "slots: found shape"),
        ({"parents": torch.zeros(2, 11, dtype=torch.int64)}, "parents: found shape"),
        ({"state_pool": torch.zeros(5, 4, 8, 16, dtype=torch.float64)}, "state_pool: found torch.float64"),
        ({"state_pool": torch.zeros(5, 4, 16, 8).transpose(2, 3)}, "state_pool: found strides"),
        ({"x": torch.zeros(2, 12, 96, dtype=torch.float64)}, "q, k, v: found torch.float64"),
    ],
)
def test_wrong_tensors_are_named(change, message):
    case = replace(layer("random", dtype=torch.float32), **change)
    with pytest.raises(KernelInputError, match=message):
        tree_gdn_verify(*case.verify_args(case.x))


def test_a_tree_over_the_limit_is_refused():
    case = layer("chain", batch=1, width=129, dtype=torch.float32)
    with pytest.raises(KernelInputError, match="found Q 129"):
        tree_gdn_verify(*case.verify_args(case.x))
