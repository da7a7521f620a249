from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ddtree_kernels.commit import commit_naive
from ddtree_kernels.tree_conv import tree_conv_naive
from ddtree_kernels.tree_gdn import recurrence, tree_gdn_naive

from .cases import layer, path_to, relative_error


def commit(case, path, counts, **track):
    commit_naive(
        case.x,
        case.a,
        case.b,
        case.A_log,
        case.dt_bias,
        case.weight,
        case.bias,
        case.conv_pool,
        case.state_pool,
        case.slots,
        path,
        counts,
        key_heads=case.key_heads,
        **track,
    )


def verified_states(case):
    """The forked state after every node, as the verify pass sees it."""
    mixed = tree_conv_naive(case.x, case.conv_pool, case.slots, case.weight, case.bias, case.parents)
    return tree_gdn_naive(*recurrence(*case.verify_args(mixed)[:-1]), case.parents)[1]


def padded_paths(case, leaves):
    """Accepted paths to these leaves, padded with rows that must not be read."""
    width = case.parents.shape[1]
    path = torch.full((len(leaves), width), width + 100)
    counts = torch.zeros(len(leaves), dtype=torch.int64)
    for n, leaf in enumerate(leaves):
        rows = path_to(case.parents[n], leaf) if leaf >= 0 else []
        path[n, : len(rows)] = torch.tensor(rows, dtype=torch.int64)
        counts[n] = len(rows)
    return path, counts


@pytest.mark.parametrize("shape", ["random", "chain", "star"])
@pytest.mark.parametrize("leaves", [(0, 11), (11, 5), (-1, 7), (-1, -1)])
def test_replay_gives_the_state_that_was_verified(shape, leaves):
    case = layer(shape)
    pool = case.state_pool.clone()
    states = verified_states(case)
    commit(case, *padded_paths(case, leaves))
    for request, (slot, leaf) in enumerate(zip(case.slots.tolist(), leaves, strict=True)):
        expected = states[request, leaf] if leaf >= 0 else pool[slot]
        assert relative_error(case.state_pool[slot], expected) < 1e-13
    bystanders = [row for row in range(len(pool)) if row not in case.slots.tolist()]
    assert torch.equal(case.state_pool[bystanders], pool[bystanders])


def test_two_commits_equal_one_long_commit():
    """The window and the state carry over: a chain committed in two halves, through real pools."""
    whole, halves = layer("chain"), layer("chain")
    rows = torch.arange(12).expand(2, 12)
    commit(whole, rows, torch.tensor([12, 12]))
    commit(halves, rows[:, :5], torch.tensor([5, 5]))
    commit(halves, rows[:, 5:], torch.tensor([7, 7]))
    assert relative_error(halves.state_pool, whole.state_pool) < 1e-14
    assert torch.equal(halves.conv_pool, whole.conv_pool)


def test_a_padded_request_writes_nothing():
    case = layer("chain", slots=[1, -1])
    states, windows = case.state_pool.clone(), case.conv_pool.clone()
    commit(case, torch.arange(12).expand(2, 12), torch.tensor([3, 12]))
    others = [0, 2, 3, 4]
    assert torch.equal(case.state_pool[others], states[others])
    assert torch.equal(case.conv_pool[others], windows[others])
    assert not torch.equal(case.state_pool[1], states[1])


@pytest.mark.parametrize("depth", [0, 2, 5])
def test_a_snapshot_holds_the_state_at_its_depth(depth):
    case, shorter = layer("chain"), layer("chain")
    rows = torch.arange(12).expand(2, 12)
    commit(
        case,
        rows,
        torch.tensor([5, 5]),
        track_counts=torch.tensor([depth, -1]),
        track_slots=torch.tensor([0, -1]),
    )
    commit(shorter, rows, torch.tensor([depth, 5]))
    slot = case.slots[0]
    assert relative_error(case.state_pool[0], shorter.state_pool[slot]) < 1e-14
    assert torch.equal(case.conv_pool[0], shorter.conv_pool[slot])


def test_a_half_precision_pool_is_rounded_once_not_at_every_node():
    case = layer("chain", batch=1, dtype=torch.float32)
    rounded = case.state_pool.to(torch.bfloat16)
    low = replace(case, state_pool=rounded, conv_pool=case.conv_pool.clone())
    wide = replace(case, state_pool=rounded.float(), conv_pool=case.conv_pool.clone())
    rows, counts = torch.arange(12)[None], torch.tensor([12])
    commit(low, rows, counts)
    commit(wide, rows, counts)
    slot = case.slots[0]
    assert torch.equal(low.state_pool[slot], wide.state_pool[slot].to(torch.bfloat16))
