"""A decode step of the real worker through SGLang's real verify code, on the CPU.

What has to come out is what the CPU tree core says.
"""

from __future__ import annotations

from types import SimpleNamespace

import harness
import numpy as np
import pytest
import torch
from ddtree_engine.tree import accept
from ddtree_engine.tree.build import Builder, build_tree
from harness import BLOCK, PREFIXES, ROOTS, TOPK, VOCABULARY, next_token


@pytest.fixture
def step(published, monkeypatch):
    """Run one step of a worker; returns what came out and what was written where."""
    harness.patch_sglang(monkeypatch)

    def run(width, builder=Builder.BEST_FIRST, topk=TOPK, temperature=None, seed=0, mirrored=True):
        rng = np.random.default_rng(seed)
        logits = np.stack([harness.candidate_logits(rng, root) for root in ROOTS])
        runner, recorded = harness.make_runner(monkeypatch, len(ROOTS))
        worker = harness.make_worker(runner, recorded, logits, width, builder, topk)
        batch = harness.make_batch(runner, width, temperature, mirrored)
        with harness.configured(width):
            result = worker.forward_batch_generation(batch, on_publish=recorded.published.append)
        best = torch.log_softmax(torch.from_numpy(logits), -1).topk(topk, dim=-1)
        trees = [
            build_tree(root, best.indices[row].numpy(), best.values[row].numpy(), width - 1, builder)
            for row, root in enumerate(ROOTS)
        ]
        expected = [harness.expected_path(tree) for tree in trees]
        return SimpleNamespace(
            result=result, batch=batch, worker=worker, trees=trees, expected=expected, **vars(recorded)
        )

    return run


WIDTHS = [4, 8, 16]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("builder", [Builder.BEST_FIRST, Builder.SPINE_FIRST])
def test_a_step_accepts_what_the_tree_core_accepts(width, builder, step):
    for seed in range(3):
        done = step(width, builder, seed=seed)
        lengths = [walked.accept_length for walked in done.expected]
        assert done.result.accept_lens.tolist() == lengths
        assert done.result.next_draft_input.bonus_tokens.tolist() == [walk.bonus for walk in done.expected]
        emitted = done.result.next_token_ids.view(-1, width)
        for row, (tree, walked) in enumerate(zip(done.trees, done.expected, strict=True)):
            tokens = [int(tree.tokens[node]) for node in walked.path[1:]] + [walked.bonus]
            assert emitted[row, : len(tokens)].tolist() == tokens
        assert done.result.speculative_num_draft_tokens == width


@pytest.mark.parametrize("width", WIDTHS)
def test_kv_of_the_accepted_path_moves_to_the_front(width, step):
    done = step(width)
    ((targets, sources),) = done.moved
    wanted = []
    for row, (prefix, walked) in enumerate(zip(PREFIXES, done.expected, strict=True)):
        slots = done.table[row + 1, prefix : prefix + width].tolist()
        wanted += [(slots[place], slots[node]) for place, node in enumerate(walked.path)]
    assert list(zip(targets.tolist(), sources.tolist(), strict=True))[: len(wanted)] == wanted
    # What is left over moves padding onto itself.
    assert not targets[len(wanted) :].any()
    assert not sources[len(wanted) :].any()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_recurrent_state_of_the_last_accepted_node_is_committed(width, step):
    done = step(width)
    (commit,) = done.committed
    assert commit["last_correct_step_indices"].tolist() == [walked.path[-1] for walked in done.expected]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_drafter_gets_the_hidden_states_of_the_accepted_path_at_their_positions(width, step):
    done = step(width)
    (written,) = done.injected
    depth = done.worker.depth
    hidden = written["target_hidden"].view(3, depth, -1)[..., 0]
    for row, (prefix, walked) in enumerate(zip(PREFIXES, done.expected, strict=True)):
        length = walked.accept_length
        assert hidden[row, :length].tolist() == [row * width + node for node in walked.path]
        assert written["cache_loc_2d"][row].tolist() == done.table[row + 1, prefix : prefix + depth].tolist()
        assert written["positions"].view(3, depth)[row].tolist() == list(range(prefix, prefix + depth))
    assert written["commit_lens"].tolist() == [walked.accept_length for walked in done.expected]
    assert done.result.logits_output.hidden_states is None


@pytest.mark.parametrize("mirrored", [True, False])
def test_the_drafter_sees_its_block_and_the_batch_keeps_its_lengths(mirrored, step):
    done = step(16, mirrored=mirrored)
    (forward_batch,) = done.drafted
    assert forward_batch.input_ids.view(3, BLOCK)[:, 0].tolist() == ROOTS
    assert forward_batch.input_ids.view(3, BLOCK)[:, 1:].unique().tolist() == [VOCABULARY - 1]
    assert forward_batch.positions.view(3, BLOCK)[:, 0].tolist() == PREFIXES
    assert forward_batch.out_cache_loc.view(3, BLOCK)[0].tolist() == done.table[1, 5 : 5 + BLOCK].tolist()
    assert (forward_batch.seq_lens_cpu >= torch.tensor(PREFIXES)).all()
    assert done.batch.seq_lens.tolist() == PREFIXES
    assert (done.batch.seq_lens_cpu is not None) == mirrored
    lengths = [walked.accept_length for walked in done.expected]
    assert done.published[0].tolist() == [p + n for p, n in zip(PREFIXES, lengths, strict=True)]
    assert done.result.next_draft_input.new_seq_lens.tolist() == done.published[0].tolist()


def test_positions_follow_depth_not_rows(step):
    done = step(16)
    seen = done.worker._target_worker.seen
    for row, (prefix, tree) in enumerate(zip(PREFIXES, done.trees, strict=True)):
        assert seen.positions.view(3, 16)[row].tolist() == (tree.depths + prefix).tolist()
        assert seen.input_ids.view(3, 16)[row].tolist() == tree.tokens.tolist()


def test_one_candidate_a_position_at_the_blocks_width_is_dflash(step):
    done = step(BLOCK, topk=1)
    chains = [accept.chain_accept(tree.tokens[1:], truth(tree.tokens[0])) for tree in done.trees]
    assert (done.result.accept_lens - 1).tolist() == chains


def truth(root):
    path = [int(root)]
    for _ in range(BLOCK - 1):
        path.append(next_token(path))
    return path[1:]


def test_a_near_zero_temperature_walks_like_greedy_through_the_sampling_path(step):
    greedy, sampled = step(16, seed=4), step(16, seed=4, temperature=1e-3)
    assert sampled.result.accept_lens.tolist() == greedy.result.accept_lens.tolist()
    for row, length in enumerate(greedy.result.accept_lens.tolist()):
        ours, theirs = (run.result.next_token_ids.view(3, 16)[row, :length] for run in (sampled, greedy))
        assert ours.tolist() == theirs.tolist()


def test_counters_know_the_chain_inside_the_tree(step):
    totals = {"accepted": 0, "chain_accepted": 0}
    for seed in range(4):
        done = step(32, Builder.SPINE_FIRST, seed=seed)
        read = dict(
            zip(
                ("requests", "accepted", "chain_accepted", "below_spine"),
                done.worker.counters._totals.tolist(),
                strict=False,
            )
        )
        chains = [
            accept.chain_accept([int(tree.tokens[node]) for node in tree.spine()[1:]], truth(tree.tokens[0]))
            for tree in done.trees
        ]
        assert read["requests"] == 3
        assert read["accepted"] == sum(walked.matched for walked in done.expected)
        assert read["chain_accepted"] == sum(chains)
        assert read["below_spine"] == 0
        assert done.result.cap_lens.tolist() == chains
        totals["accepted"] += read["accepted"]
        totals["chain_accepted"] += read["chain_accepted"]
    assert totals["accepted"] > totals["chain_accepted"]
