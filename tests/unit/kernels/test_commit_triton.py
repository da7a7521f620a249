"""The commit kernel against one naive commit a layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ddtree_kernels.commit import commit_naive
from ddtree_kernels.commit.triton import CommitConfig, commit
from ddtree_kernels.errors import KernelInputError
from ddtree_kernels.tree_conv import tree_conv_naive
from ddtree_kernels.tree_gdn.gates import l2_normalise

from .cases import layer, relative_error

STACKED = ("x", "a", "b", "A_log", "dt_bias", "weight", "bias", "conv_pool", "state_pool")


def stack(cases):
    """Layers of one batch as the kernel takes them."""
    first = cases[0]
    tensors = {
        name: None if getattr(first, name) is None else torch.stack([getattr(c, name) for c in cases])
        for name in STACKED
    }
    return tensors | {"slots": first.slots, "key_heads": first.key_heads}


def run_both(cases, path, counts, config=None, **track):
    """(kernel's pools, naive pools): conv [L, ...] and state [L, ...] each."""
    stacked = stack(cases)
    commit(**stacked, path=path, counts=counts, config=config or CommitConfig(), **track)
    for case in cases:
        arguments = {name: getattr(case, name) for name in STACKED}
        commit_naive(
            **arguments, slots=case.slots, path=path, counts=counts, key_heads=case.key_heads, **track
        )
    naive = stack(cases)
    return stacked, naive


def layers(count=2, **options):
    sizes = {"width": 7, "heads": 1, "value_heads": 2, "dtype": torch.float32}
    cases = [layer("chain", seed=n, **(sizes | options)) for n in range(count)]
    return [replace(case, slots=cases[0].slots) for case in cases]


def check(found, expected, bound=2e-6):
    assert torch.equal(found["conv_pool"], expected["conv_pool"])
    assert relative_error(found["state_pool"], expected["state_pool"]) < bound


@pytest.mark.parametrize("counts", [(0, 7), (1, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_all_layers_advance_past_their_accepted_rows(counts, bias):
    path = torch.tensor([list(range(7)), [0, 2, 3, 6, 1, 4, 5]])
    check(*run_both(layers(2, bias=bias), path, torch.tensor(counts)))


def test_rows_past_the_count_are_never_read():
    path = torch.full((2, 7), 10**6)
    path[:, :2] = torch.tensor([[0, 5], [0, 3]])
    check(*run_both(layers(), path, torch.tensor([2, 1])))


def test_a_padded_request_writes_nothing():
    path = torch.arange(7).expand(2, 7).contiguous()
    check(*run_both(layers(slots=[1, -1]), path, torch.tensor([3, 7])))


@pytest.mark.parametrize("depth", [0, 2, 5])
def test_a_snapshot_holds_window_and_state_at_its_depth(depth):
    path = torch.arange(7).expand(2, 7).contiguous()
    track = {"track_counts": torch.tensor([depth, -1]), "track_slots": torch.tensor([0, -1])}
    found, expected = run_both(layers(), path, torch.tensor([5, 5]), **track)
    check(found, expected)


def test_half_precision_stash_and_state_follow_a_decode():
    """The convolution rounds to the stash's dtype, as a decode's does; the update stays in float32."""
    cases = [case.to(torch.bfloat16) for case in layers()]
    path = torch.arange(7).expand(2, 7).contiguous()
    check(*run_both(cases, path, torch.tensor([7, 4])), bound=2e-3)
    cases = [replace(case.to(torch.bfloat16), state_pool=case.state_pool) for case in layers()]
    check(*run_both(cases, path, torch.tensor([7, 4])), bound=1e-3)


@pytest.mark.parametrize(("key_dim", "value_dim", "window"), [(24, 40, 3), (128, 128, 4)])
def test_other_head_shapes(key_dim, value_dim, window):
    path = torch.arange(4).expand(2, 4).contiguous()
    options = {"width": 4, "key_dim": key_dim, "value_dim": value_dim, "window": window, "value_heads": 2}
    check(*run_both(layers(1, **options), path, torch.tensor([4, 2])))


@pytest.mark.parametrize("track", [None, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_move_to_the_first_rows_whatever_their_order(dtype, track):
    """Step t is written to row t, which is another step's input as often as not."""
    path = torch.tensor([[6, 1, 5, 0, 4, 2, 3], [3, 6, 0, 5, 1, 2, 4]])
    slots = (
        {}
        if track is None
        else {"track_counts": torch.tensor([track, 1]), "track_slots": torch.tensor([0, 1])}
    )
    cases = [replace(case.to(dtype), state_pool=case.state_pool) for case in layers(slots=[4, 3])]
    bound = 2e-6 if dtype == torch.float32 else 2e-3
    check(*run_both(cases, path, torch.tensor([7, 5]), **slots), bound=bound)


@pytest.mark.parametrize(("block_v", "pieces"), [(2, 4), (16, 8), (128, 16)])
def test_every_cut_of_a_state_gives_the_same_state(block_v, pieces):
    path = torch.arange(7).expand(2, 7).contiguous()
    config = CommitConfig(block_v=block_v, pieces=pieces)
    check(*run_both(layers(1, value_dim=12), path, torch.tensor([7, 3]), config))


@pytest.mark.parametrize("decay", [None, -4.0, -200.0])
def test_decays_lose_nothing(decay):
    """From hardly any decay to states that vanish in a step."""
    path = torch.tensor([[0, 2, 3, 6, 1, 4, 5], list(range(7))])
    track = {"track_counts": torch.tensor([3, 5]), "track_slots": torch.tensor([0, 1])}
    cases = layers(1, decay=decay)
    check(*run_both(cases, path, torch.tensor([7, 5]), CommitConfig(), **track))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_commit_writes_to_as_many_first_rows_as_it_has_steps_and_nothing_else(dtype):
    """Rows off the path hold NaN: reading one shows in the state."""
    paths, counts = torch.tensor([[5, 0, 3, 6, 1], [2, 4, 6, 1, 3], [0, 1, 2, 3, 4]]), [3, 4, 5]
    made = [case.to(dtype) for case in layers(batch=3, width=8, slots=[2, 5, -1])]
    cases = [replace(case, state_pool=case.state_pool.float()) for case in made]
    for case in cases:
        for request, count in enumerate(counts):
            off = [row for row in range(8) if row not in paths[request, :count]]
            case.x[request, off] = torch.nan
    windows = [case.conv_pool.clone() for case in cases]
    found, expected = run_both(cases, paths, torch.tensor(counts))
    check(found, expected, bound=2e-6 if dtype == torch.float32 else 2e-3)
    width = cases[0].key_heads * 16
    for layer_, case in enumerate(cases):
        untouched = torch.ones(case.x.shape, dtype=torch.bool)
        for request, count in enumerate(counts[:2]):
            rows = paths[request, :count]
            chain = torch.arange(count)[None] - 1
            slot = case.slots[request : request + 1]
            mixed = case.x[request : request + 1, rows]
            convolved = tree_conv_naive(mixed, windows[layer_], slot, case.weight, case.bias, chain)[0]
            kept = found["x"][layer_][request, :count]
            close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
            torch.testing.assert_close(kept[:, 2 * width :], convolved[:, 2 * width :], **close)
            keys = kept[:, : 2 * width].contiguous().view(torch.float32)[:, -width:]
            expected_keys = l2_normalise(convolved[:, width : 2 * width].float().view(count, -1, 16))
            torch.testing.assert_close(keys.view(expected_keys.shape), expected_keys, **close)
            untouched[request, :count, width if dtype == torch.float32 else 0 :] = False
        assert found["x"][layer_][untouched].view(torch.int16).equal(case.x[untouched].view(torch.int16))


def test_nothing_accepted_changes_nothing_and_still_takes_a_snapshot():
    cases = layers(slots=[3, 4])
    before = stack(cases)
    track = {"track_counts": torch.tensor([0, 2]), "track_slots": torch.tensor([1, 2])}
    found, _ = run_both(cases, torch.full((2, 7), 10**6), torch.tensor([0, 0]), **track)
    for name in ("conv_pool", "state_pool"):
        wanted = before[name].clone()
        wanted[:, 1] = wanted[:, 3]
        assert torch.equal(found[name], wanted)
    assert torch.equal(found["x"], before["x"])


def test_a_snapshot_past_the_accepted_rows_is_not_taken():
    path = torch.arange(7).expand(2, 7).contiguous()
    track = {"track_counts": torch.tensor([4, 6]), "track_slots": torch.tensor([0, 1])}
    cases = layers()
    before = stack(cases)
    found, expected = run_both(cases, path, torch.tensor([3, 5]), **track)
    check(found, expected)
    for name in ("conv_pool", "state_pool"):
        assert torch.equal(found[name][:, :2], before[name][:, :2])


def test_a_16_bit_stash_of_odd_rows_has_no_room_for_float32_keys():
    stacked = stack([case.to(torch.bfloat16) for case in layers(key_dim=15)])
    path, counts = torch.arange(7).expand(2, 7).contiguous(), torch.tensor([1, 1])
    with pytest.raises(KernelInputError, match="x: found K 15, strides"):
        commit(**stacked, path=path, counts=counts)


def test_wrong_tensors_are_named():
    stacked = stack(layers())
    path, counts = torch.arange(7).expand(2, 7).contiguous(), torch.tensor([1, 1])
    for change, message in (
        ({"a": stacked["a"][:1]}, "a: found shape"),
        ({"x": stacked["x"][0]}, "found 3, 4 and 5 dimensions"),
        ({"key_heads": 2}, r"x: found C 48, allowed is 2 H K \+ HV V = 80"),
        ({"track_counts": counts}, "found one of them"),
        ({"state_pool": stacked["state_pool"].transpose(3, 4)}, "x: found C|state_pool: found"),
    ):
        with pytest.raises(KernelInputError, match=message):
            commit(**(stacked | {"path": path, "counts": counts} | change))
