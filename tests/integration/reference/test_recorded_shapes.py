"""The CPU engine's answers have the keys and types of those that a real SGLang 0.5.23 gave."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from .conftest import process

RECORDED = Path(__file__).parents[2] / "fixtures" / "sglang-0.5.23"
ANSWERS = json.loads((RECORDED / "answers.json").read_text())
INFO = json.loads((RECORDED / "server_info.json").read_text())
TOKENS = {
    "input_ids": list(range(5, 25)),
    "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
}


def assert_shape(own, real, where="answer"):
    """Every key of `own` is in `real` with the same JSON type, but for the documented `ddtree`."""
    if isinstance(own, dict):
        assert isinstance(real, dict), where
        for key in own.keys() - {"ddtree"}:
            assert key in real, f"{where}.{key}"
            assert_shape(own[key], real[key], f"{where}.{key}")
    elif isinstance(own, list):
        assert isinstance(real, list), where
        if own and real:
            assert_shape(own[0], real[0], f"{where}[0]")
    elif own is not None and real is not None:
        number = (int, float)
        assert isinstance(own, number) == isinstance(real, number), where
        assert isinstance(own, str) == isinstance(real, str), where


def events(text):
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def test_answers_and_streams_have_the_shapes_of_the_real_server(tiny):
    with process(tiny, "--arm", "ddtree", "--budget", "31") as (client, _):
        assert_shape(client.post("/generate", json=TOKENS).json(), ANSWERS["generate"])
        asked = {**TOKENS, "return_logprob": True, "top_logprobs_num": 2}
        assert_shape(client.post("/generate", json=asked).json(), ANSWERS["generate_logprobs"])
        assert_shape(client.get("/model_info").json(), ANSWERS["model_info"])
        assert_shape(client.get("/v1/models").json(), ANSWERS["v1_models"])
        info = client.get("/server_info").json()
        assert info.pop("arm") == "ddtree"  # this engine's own
        assert_shape(info, INFO)
        both = info["ddtree"].keys() & INFO["ddtree"].keys()
        assert {"engine", "arm", "budget", "block", "topk", "builder", "per_request_budget"} <= both
        for key in both:
            assert type(info["ddtree"][key]) is type(INFO["ddtree"][key]), key
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8}
        assert_shape(client.post("/v1/chat/completions", json=chat).json(), ANSWERS["v1_chat_completions"])
        completion = {"prompt": TOKENS["input_ids"], "max_tokens": 8, "temperature": 0}
        assert_shape(client.post("/v1/completions", json=completion).json(), ANSWERS["v1_completions"])
        own = events(client.post("/generate", json={**TOKENS, "stream": True}).text)
        real = events(ANSWERS["generate_stream"])
        for stream in (own, real):
            for before, after in itertools.pairwise(stream):
                assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
                assert after["text"].startswith(before["text"])
                assert before["meta_info"]["finish_reason"] is None
            assert stream[-1]["meta_info"]["finish_reason"]["type"] == "length"
        assert_shape(own[0], real[0])
        assert_shape(own[-1], real[-1])
        refused = client.post("/generate", json={**TOKENS, "return_hidden_states": True})
        recorded = ANSWERS["refusals"]["return_hidden_states"]
        assert refused.status_code == recorded["status"]
        assert isinstance(json.loads(recorded["body"])["error"]["message"], str)
        assert isinstance(refused.json()["error"]["message"], str)
