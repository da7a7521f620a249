"""Bad fields are refused by name."""

from __future__ import annotations

import pytest
from ddtree_engine.reference.errors import RequestError
from ddtree_engine.reference.requests import Limits, parse_request
from ddtree_engine.tree import Builder

TREE = Limits(100, 50, "ddtree", True, 31, Builder.BEST_FIRST, False, frozenset({2}))
PLAIN = Limits(100, 50, "dflash", False, None, None, False, frozenset({2}))


def parse(limits=TREE, prompt=(5, 6), custom=None, top=None, **params):
    if custom is not None:
        params["custom_params"] = custom
    return parse_request(list(prompt), params, limits, **(top or {}))


def test_defaults_are_sglangs():
    request = parse(PLAIN, max_new_tokens=None)
    assert request.max_new_tokens == 98
    assert (request.sampler.temperature, request.sampler.top_k, request.sampler.top_p) == (1.0, 0, 1.0)
    assert request.stop_ids == {2}
    assert request.budget is None


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temprature": 0}, "sampling_params.temprature"),
        ({"temperature": -1}, "sampling_params.temperature"),
        ({"temperature": "hot"}, "sampling_params.temperature"),
        ({"temperature": float("nan")}, "sampling_params.temperature"),
        ({"top_p": 0}, "sampling_params.top_p"),
        ({"top_p": 1.5}, "sampling_params.top_p"),
        ({"top_k": 0}, "sampling_params.top_k"),
        ({"top_k": -2}, "sampling_params.top_k"),
        ({"top_k": 1.5}, "sampling_params.top_k"),
        ({"min_p": 2}, "sampling_params.min_p"),
        ({"sampling_seed": "x"}, "sampling_params.sampling_seed"),
        ({"sampling_seed": 2**63}, "sampling_params.sampling_seed"),
        ({"max_new_tokens": -1}, "sampling_params.max_new_tokens"),
        ({"max_new_tokens": True}, "sampling_params.max_new_tokens"),
        ({"max_new_tokens": 99}, "sampling_params.max_new_tokens"),
        ({"stop": ""}, "sampling_params.stop"),
        ({"stop": ["a", 3]}, "sampling_params.stop"),
        ({"stop": ["a"] * 33}, "sampling_params.stop"),
        ({"stop_token_ids": [50]}, "sampling_params.stop_token_ids"),
        ({"stop_token_ids": 3}, "sampling_params.stop_token_ids"),
        ({"ignore_eos": 1}, "sampling_params.ignore_eos"),
        ({"n": 2}, "sampling_params.n"),
        ({"regex": "a+"}, "sampling_params.regex"),
        ({"frequency_penalty": 0.5}, "sampling_params.frequency_penalty"),
        ({"repetition_penalty": 1.1}, "sampling_params.repetition_penalty"),
        ({"custom": []}, "custom_params"),
        ({"custom": {"budget": 7}}, "custom_params.budget"),
        ({"custom": {"ddtree_budget": 0}}, "custom_params.ddtree_budget"),
        ({"custom": {"ddtree_budget": 128}}, "custom_params.ddtree_budget"),
        ({"custom": {"ddtree_budget": "31"}}, "custom_params.ddtree_budget"),
        ({"custom": {"ddtree_budget": True}}, "custom_params.ddtree_budget"),
        ({"custom": {"ddtree_builder": "widest"}}, "custom_params.ddtree_builder"),
        ({"custom": {"ddtree_builder": "calibrated"}}, "custom_params.ddtree_builder"),
        ({"custom": {"ddtree_return_steps": 1}}, "custom_params.ddtree_return_steps"),
        ({"limits": PLAIN, "custom": {"ddtree_budget": 7}}, "custom_params.ddtree_budget"),
        ({"prompt": []}, "input_ids"),
        ({"prompt": [50]}, "input_ids"),
        ({"prompt": ["a"]}, "input_ids"),
        ({"prompt": [True]}, "input_ids"),
        ({"prompt": [1] * 100}, "input_ids"),
        ({"top": {"top_logprobs": 1000}}, "top_logprobs_num"),
        ({"top": {"logprob_start": -2}}, "logprob_start_len"),
        ({"top": {"stream": "yes"}}, "stream"),
        ({"top": {"rid": 5}}, "rid"),
        ({"top": {"return_logprob": 1}}, "return_logprob"),
    ],
)
def test_a_bad_field_is_named(params, param):
    # `custom_params` itself is a sampling parameter; its keys are named without the detour.
    with pytest.raises(RequestError) as caught:
        parse(**{"max_new_tokens": 10, **params})
    assert caught.value.param in (param, f"sampling_params.{param}")
    assert caught.value.status == 400
    assert "found" in caught.value.message


def test_unused_parameters_of_sglang_are_fine():
    request = parse(
        max_new_tokens=5, n=1, frequency_penalty=0.0, repetition_penalty=1.0, regex=None, logit_bias=None
    )
    assert request.max_new_tokens == 5


def test_custom_params_set_budget_and_builder():
    request = parse(
        max_new_tokens=5,
        custom={"ddtree_budget": 63, "ddtree_builder": "spine-first", "ddtree_return_steps": True},
    )
    assert (request.budget, request.builder, request.return_steps) == (63, Builder.SPINE_FIRST, True)


def test_ignore_eos_leaves_the_other_stop_ids():
    assert parse(max_new_tokens=5, ignore_eos=True, stop_token_ids=[7]).stop_ids == {7}
    assert parse(max_new_tokens=5, stop_token_ids=[7]).stop_ids == {2, 7}


def test_tiny_temperatures_mean_greedy():
    assert parse(max_new_tokens=5, temperature=0).sampler.greedy
    assert parse(max_new_tokens=5, temperature=1e-9).sampler.greedy
    assert not parse(max_new_tokens=5, temperature=0.1).sampler.greedy
