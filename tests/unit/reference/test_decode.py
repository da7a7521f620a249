"""The decode loops: every lossless arm emits what plain decoding emits."""

from __future__ import annotations

import pytest
from ddtree_engine.reference.engine import Arm, Engine
from ddtree_engine.reference.errors import InputError
from ddtree_engine.reference.sampling import Sampler
from ddtree_engine.reference.stats import score, tables
from ddtree_engine.tree import Builder

from .conftest import generate, make_request, random_prompt

PROMPTS = [random_prompt(length, seed=length) for length in (1, 30, 64, 65, 140)]
LOSSLESS = [("dflash", None), ("shadow", 31)] + [("ddtree", budget) for budget in (1, 7, 15, 31, 63, 127)]


@pytest.fixture(scope="module")
def plain(engines):
    """What `ar` emits, greedily."""
    return [generate(engines("ar"), prompt)[0] for prompt in PROMPTS]


@pytest.mark.parametrize(("arm", "budget"), LOSSLESS)
def test_greedy_output_is_that_of_plain_decoding(engines, plain, arm, budget):
    found = [generate(engines(arm), prompt, budget=budget)[0] for prompt in PROMPTS]
    assert found == plain


def test_trees_are_walked_several_nodes_deep(engines):
    """Otherwise the parity above would prove little."""
    matched = [
        step.matched for p in PROMPTS for step in generate(engines("ddtree"), p, budget=63)[1].stats.steps
    ]
    assert max(matched) >= 3
    assert sum(matched) / len(matched) > 0.5


def test_unsafe_output_is_wrong(engines, plain):
    found = [generate(engines("unsafe"), prompt, budget=63)[0] for prompt in PROMPTS]
    assert found != plain


@pytest.mark.parametrize("arm", ["dflash", "ddtree"])
@pytest.mark.parametrize(
    "sampler", [Sampler(0.8, seed=5), Sampler(1.0, top_k=5, seed=6), Sampler(0.9, top_p=0.7, seed=7)]
)
def test_sampled_output_is_that_of_plain_decoding_with_the_same_seed(engines, arm, sampler):
    for prompt in PROMPTS[1:4]:
        expected, _ = generate(engines("ar"), prompt, sampler=sampler)
        found, _ = generate(engines(arm), prompt, sampler=sampler, budget=31)
        assert found == expected


def test_another_seed_gives_another_output(engines):
    first, second = (generate(engines("ar"), PROMPTS[1], sampler=Sampler(0.8, seed=s))[0] for s in (1, 2))
    assert first != second


def test_shadow_takes_the_chains_steps_and_builds_trees_beside_them(engines):
    _, chain = generate(engines("dflash"), PROMPTS[1])
    _, shadow = generate(engines("shadow"), PROMPTS[1], budget=31)
    assert [s.matched for s in shadow.stats.steps] == [s.matched for s in chain.stats.steps]
    assert all(step.tree is not None and step.tree.budget == 31 for step in shadow.stats.steps)
    assert shadow.stats.tree_steps == 0


def test_tree_steps_are_counted(engines):
    _, running = generate(engines("ddtree"), PROMPTS[1], budget=15)
    assert running.stats.tree_steps == running.stats.verify_steps
    assert running.stats.tree_nodes == 16 * running.stats.verify_steps
    assert running.stats.proposed == 15 * running.stats.verify_steps


def test_spine_first_never_falls_below_its_own_chain(engines):
    scored = 0
    for prompt in PROMPTS:
        output, running = generate(engines("ddtree"), prompt, budget=15, builder=Builder.SPINE_FIRST)
        scores = score(running.stats.steps, output)
        scored += scores.scored
        assert scores.below_spine == 0
    assert scored > 50


def test_best_first_at_a_small_budget_can_fall_below_it(engines):
    """So that the zero above says something."""
    below = 0
    for prompt in PROMPTS:
        output, running = generate(engines("ddtree"), prompt, budget=1)
        below += score(running.stats.steps, output).below_spine
    assert below > 0


def test_steps_carry_the_candidate_tables(engines):
    output, running = generate(engines("ddtree"), PROMPTS[1], budget=7)
    steps = tables(running.stats.steps)
    block, topk = 8, 16
    assert len(steps) == running.stats.verify_steps
    assert steps[0]["anchor"] == 0
    for before, after, step in zip(steps, steps[1:], running.stats.steps, strict=False):
        assert after["anchor"] == before["anchor"] + step.matched + 1
        assert len(before["ids"]) == block - 1
        assert all(len(row) == topk and row == sorted(row, reverse=True) for row in before["logprobs"])
    # A chain that agrees must be found in the output right after its anchor.
    hits = [s for s, step in zip(steps, running.stats.steps, strict=True) if step.matched]
    assert any(s["ids"][0][0] == output[s["anchor"] + 1] for s in hits if s["anchor"] + 1 < len(output))


def test_one_candidate_per_position_makes_the_tree_a_chain(tiny, plain):
    engine = Engine.load(Arm.DDTREE, tiny / "target", tiny / "drafter", context_length=512, topk=1)
    output, running = generate(engine, PROMPTS[1], budget=63)
    assert output == plain[1]
    assert all(step.tree.width == 8 for step in running.stats.steps)


def test_more_candidates_than_tokens_is_no_error(tiny, plain):
    engine = Engine.load(Arm.DDTREE, tiny / "target", tiny / "drafter", context_length=512, topk=1000)
    assert generate(engine, PROMPTS[1], budget=31)[0] == plain[1]


def test_bfloat16_runs_and_stays_close(tiny, plain):
    import torch

    engine = Engine.load(
        Arm.DDTREE, tiny / "target", tiny / "drafter", context_length=512, dtype=torch.bfloat16
    )
    output, running = generate(engine, PROMPTS[1], budget=15)
    assert running.target_cache.states.dtype == torch.float32
    assert len(output) == len(plain[1])


def test_caches_grow_with_a_long_output(engines):
    prompt = PROMPTS[1]
    expected, _ = generate(engines("ar"), prompt, 450)
    found, running = generate(engines("ddtree"), prompt, 450, budget=63)
    assert found == expected
    assert running.target_cache.keys.shape[2] >= 30 + 450


def test_logprobs_agree_between_arms(engines):
    requests = {"ar": None, "dflash": None, "ddtree": 31}
    found = {}
    for arm, budget in requests.items():
        engine = engines(arm)
        running = engine.start(make_request(PROMPTS[1], budget=budget, return_logprob=True, top_logprobs=3))
        emitted = []
        while len(emitted) < 30:
            emitted += engine.advance(running).logprobs
        assert [entry.top[0][1] for entry in emitted[:30]] == running.output[:30]
        found[arm] = [entry.logprob for entry in emitted[:30]]
    assert found["dflash"] == pytest.approx(found["ar"], abs=1e-4)
    assert found["ddtree"] == pytest.approx(found["ar"], abs=1e-4)


def test_prompt_logprobs_are_those_of_decoding_the_prompt(engines):
    engine = engines("ar")
    output, _ = generate(engine, PROMPTS[1], 20, return_logprob=True)
    running = engine.start(make_request(PROMPTS[1], 20, return_logprob=True))
    decoded = []
    while len(decoded) < 20:
        decoded += engine.advance(running).logprobs
    start = len(PROMPTS[1])
    forced = engine.start(make_request(PROMPTS[1] + output, 1, return_logprob=True, logprob_start=start - 1))
    while forced.in_prefill:
        engine.advance(forced)
    assert [entry.logprob for entry in forced.prompt_logprobs] == pytest.approx(
        [entry.logprob for entry in decoded], abs=1e-4
    )


def test_a_drafting_arm_needs_a_drafter(tiny):
    with pytest.raises(InputError, match="needs a drafter"):
        Engine.load(Arm.DDTREE, tiny / "target", None, context_length=64)


@pytest.mark.parametrize(("arm", "budget"), [("dflash", None), ("ddtree", 63)])
def test_the_shipped_pair_is_lossless_too(shipped, arm, budget):
    plain = Engine.load(Arm.AR, shipped / "target", None, context_length=512)
    other = Engine.load(Arm(arm), shipped / "target", shipped / "drafter", context_length=512)
    for prompt in (random_prompt(40, seed=1, high=2000), random_prompt(100, seed=2, high=2000)):
        assert generate(other, prompt, 32, budget=budget)[0] == generate(plain, prompt, 32)[0]
