"""The HTTP side over loopback, against real engine processes."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import threading
import time

import httpx
import pytest

from .conftest import process

PROMPT = "def parse(line):\n    return line.strip().split(',')\n\n\ndef main"
GREEDY = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 900, "ignore_eos": True}


def generate(client, prompt=PROMPT, **params):
    body = {"text": prompt, "sampling_params": {**GREEDY, **params}}
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(response):
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def stream(client, path, body):
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response)


def metric(client, name):
    """Sum of a metric over its labels."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def wait_for(holds, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("arm", ["dflash", "shadow", "ddtree"])
def test_lossless_arms_answer_what_ar_answers(served, arm):
    plain, other = generate(served["ar"]), generate(served[arm])
    assert other["output_ids"] == plain["output_ids"]
    assert other["text"] == plain["text"]
    sampled = {"temperature": 0.9, "top_p": 0.95, "sampling_seed": 11}
    assert generate(served[arm], **sampled)["text"] == generate(served["ar"], **sampled)["text"]


def test_unsafe_answers_something_else(served):
    assert generate(served["unsafe"])["output_ids"] != generate(served["ar"])["output_ids"]


def test_meta_info_is_shaped_like_sglangs(served):
    answer = generate(served["ddtree"])
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 40}
    assert (meta["completion_tokens"], meta["cached_tokens"]) == (40, 0)
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["spec_accept_length"] == 40 / meta["spec_verify_ct"]
    histogram = meta["spec_correct_drafts_histogram"]
    assert sum(histogram) == meta["spec_verify_ct"]
    assert sum(count * steps for count, steps in enumerate(histogram)) == meta["spec_num_correct_drafts"] > 0
    assert meta["spec_num_proposed_drafts"] == 31 * meta["spec_verify_ct"]
    own = meta["ddtree"]
    assert (own["arm"], own["budget"], own["builder"], own["block"]) == ("ddtree", 31, "best-first", 8)
    assert own["tree_steps"] == own["steps_scored"] == meta["spec_verify_ct"]
    assert own["steps_below_spine"] <= own["steps_scored"]
    assert set(own["stage_seconds"]) == {"draft", "build", "verify", "commit"}
    assert 0 < sum(own["stage_seconds"].values()) <= meta["e2e_latency"]
    assert "steps" not in own


def test_arms_without_a_tree_say_so(served):
    plain = generate(served["ar"])["meta_info"]
    assert not any(key.startswith("spec_") for key in plain)
    assert plain["ddtree"]["budget"] is None
    chain = generate(served["dflash"])["meta_info"]
    assert chain["ddtree"]["budget"] is None
    assert chain["ddtree"]["tree_steps"] == 0
    assert chain["spec_num_proposed_drafts"] == 7 * chain["spec_verify_ct"]
    assert chain["spec_accept_length"] == pytest.approx(chain["ddtree"]["spine_accept_length"], rel=0.1)


def test_shadow_reports_what_its_trees_would_have_accepted(served):
    own = generate(served["shadow"])["meta_info"]["ddtree"]
    assert own["shadow_accept_length"] >= own["spine_accept_length"] >= 1
    assert sum(own["shadow_histogram"]) == own["steps_scored"]
    assert own["tree_steps"] == 0


def test_budget_and_builder_can_be_set_per_request(served):
    sizes = {}
    for budget in (7, 63):
        meta = generate(served["ddtree"], custom_params={"ddtree_budget": budget})["meta_info"]
        assert meta["ddtree"]["budget"] == budget
        assert meta["ddtree"]["tree_nodes"] == (budget + 1) * meta["spec_verify_ct"]
        sizes[budget] = meta["spec_verify_ct"]
    assert sizes[63] <= sizes[7]
    spine = generate(served["ddtree"], custom_params={"ddtree_builder": "spine-first", "ddtree_budget": 15})
    assert spine["meta_info"]["ddtree"]["steps_below_spine"] == 0


def test_steps_come_back_when_asked_for(served):
    answer = generate(served["ddtree"], custom_params={"ddtree_return_steps": True})
    steps = answer["meta_info"]["ddtree"]["steps"]
    assert len(steps) == answer["meta_info"]["spec_verify_ct"]
    assert all(len(step["ids"]) == len(step["logprobs"]) == 7 for step in steps)
    assert [step["anchor"] for step in steps] == sorted(step["anchor"] for step in steps)


def test_a_stream_adds_up_to_the_whole_answer(served):
    for arm in ("ar", "ddtree"):
        whole = generate(served[arm])
        parts = stream(served[arm], "/generate", {"text": PROMPT, "sampling_params": GREEDY})
        assert parts[-1]["text"] == whole["text"]
        assert parts[-1]["output_ids"] == whole["output_ids"]
        assert all(part["meta_info"]["finish_reason"] is None for part in parts[:-1])
        for before, after in itertools.pairwise(parts):
            assert after["text"].startswith(before["text"])
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    several = [len(b["output_ids"]) - len(a["output_ids"]) for a, b in itertools.pairwise(parts)]
    assert max(several) > 1
    assert len(parts) == 1 + whole["meta_info"]["spec_verify_ct"]


def test_streams_never_show_part_of_a_stop_string(served):
    text = generate(served["ddtree"])["text"]
    stop = text[9:12]
    parts = stream(
        served["ddtree"], "/generate", {"text": PROMPT, "sampling_params": {**GREEDY, "stop": stop}}
    )
    expected = text[: text.index(stop)]
    assert parts[-1]["text"] == expected
    assert parts[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert all(expected.startswith(part["text"]) for part in parts)


def test_logprobs_follow_the_output(served):
    body = {
        "text": PROMPT,
        "sampling_params": GREEDY,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    found = {arm: served[arm].post("/generate", json=body).json() for arm in ("ar", "ddtree")}
    for answer in found.values():
        meta = answer["meta_info"]
        assert [row[1] for row in meta["output_token_logprobs"]] == answer["output_ids"]
        assert [top[0][1] for top in meta["output_top_logprobs"]] == answer["output_ids"]
        assert all(first[0] >= second[0] for first, second in meta["output_top_logprobs"])
        assert "".join(row[2] for row in meta["output_token_logprobs"]) == answer["text"]
    plain, tree = ([row[0] for row in a["meta_info"]["output_token_logprobs"]] for a in found.values())
    assert tree == pytest.approx(plain, abs=1e-4)


def test_prompt_logprobs_start_where_asked(served):
    ids = [70, 71, 72, 73, 74]
    body = {
        "input_ids": ids,
        "sampling_params": {**GREEDY, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 2,
        "top_logprobs_num": 1,
    }
    meta = served["ddtree"].post("/generate", json=body).json()["meta_info"]
    rows = meta["input_token_logprobs"]
    assert [row[1] for row in rows] == ids[2:]
    assert rows[0][0] is None
    assert all(row[0] < 0 for row in rows[1:])
    assert [top is None for top in meta["input_top_logprobs"]] == [True, False, False]


def test_completions_and_chat_answer_in_openais_shape(served):
    client = served["ddtree"]
    body = {"model": "target", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    completion = client.post("/v1/completions", json={**body, "prompt": PROMPT}).json()
    assert completion["object"] == "text_completion"
    assert completion["choices"][0]["text"] == generate(client, max_new_tokens=12)["text"]
    assert completion["choices"][0]["finish_reason"] == "length"
    assert completion["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 12,
        "total_tokens": len(PROMPT) + 12,
    }
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    chat_body = {**body, "messages": messages, "return_spec_tokens_details": True}
    chat = client.post("/v1/chat/completions", json=chat_body).json()
    assert chat["object"] == "chat.completion"
    details = chat["sglext"]["spec_tokens_details"]
    assert details["spec_accept_length"] == 12 / details["spec_verify_ct"]
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat["choices"][0]["message"]["content"] == generate(client, rendered, max_new_tokens=12)["text"]


def test_openai_streams_add_up(served):
    client = served["ddtree"]
    body = {
        "temperature": 0,
        "max_tokens": 20,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        "custom_params": {"ddtree_budget": 63},
        "return_spec_tokens_details": True,
    }
    parts = stream(client, "/v1/completions", {**body, "prompt": PROMPT})
    text = "".join(part["choices"][0]["text"] for part in parts if part["choices"])
    assert text == generate(client, max_new_tokens=20)["text"]
    assert parts[-1]["usage"]["completion_tokens"] == 20
    assert parts[-2]["choices"][0]["finish_reason"] == "length"
    assert parts[-2]["sglext"]["ddtree"]["budget"] == 63
    chat = stream(client, "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "x"}]})
    assert chat[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chat[0]["object"] == "chat.completion.chunk"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"text": "x", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ("/generate", {"text": "x", "sampling_params": []}, "sampling_params"),
        ("/generate", {"text": "x", "sampling_params": "hot"}, "sampling_params"),
        ("/generate", {"sampling_params": {}}, "text"),
        ("/generate", {"text": "x", "input_ids": [1]}, "text"),
        ("/generate", {"text": ["a", "b"]}, "text"),
        ("/generate", {"text": ""}, "text"),
        ("/generate", {"input_ids": [[5]]}, "input_ids"),
        ("/generate", {"text": "x", "image_data": "y"}, "image_data"),
        (
            "/generate",
            {"text": "x", "sampling_params": {"custom_params": {"ddtree_budget": 1000}}},
            "custom_params.ddtree_budget",
        ),
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "seed": "s"}, "seed"),
        ("/v1/completions", {"prompt": "x", "n": 2}, "n"),
        ("/v1/completions", {"prompt": "x", "logprobs": 3}, "logprobs"),
        (
            "/v1/completions",
            {"prompt": "x", "custom_params": {"ddtree_bugdet": 7}},
            "custom_params.ddtree_bugdet",
        ),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages[0]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/abort_request", {}, "rid"),
    ],
)
def test_bad_requests_get_400_with_the_fields_name(served, path, body, param):
    response = served["ddtree"].post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[-1] in error["message"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json_object_gets_400(served, content):
    response = served["ddtree"].post("/generate", content=content)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "body"


def test_unknown_routes_and_methods_get_json(served):
    assert served["ar"].get("/nothing").status_code == 404
    assert served["ar"].get("/generate").status_code == 405
    assert "no such route" in served["ar"].get("/nothing").json()["error"]["message"]


def test_information_routes(served):
    client = served["ddtree"]
    for route in ("/health", "/ready", "/health_generate"):
        assert client.get(route).status_code == 200
    assert client.get("/v1/models").json()["data"][0]["id"] == "target"
    assert client.get("/model_info").json()["is_generation"] is True
    assert client.post("/flush_cache").status_code == client.get("/flush_cache").status_code == 200
    info = {arm: served[arm].get("/server_info").json() for arm in served}
    for arm, found in info.items():
        assert found["ddtree"]["arm"] == found["arm"] == arm
        assert found["ddtree"]["engine"] == "reference"
        assert found["ddtree"]["per_request_budget"] == (arm in ("shadow", "ddtree", "unsafe"))
        assert found["ddtree"]["allow_hybrid_unsafe"] == (arm == "unsafe")
        assert len(found["ddtree"]["model_sha256"]) == 64
    assert info["ddtree"]["ddtree"]["budget"] == 31
    assert info["ar"]["ddtree"]["budget"] is None
    assert len({found["ddtree"]["model_sha256"] for found in info.values()}) == 1


def test_metrics_count_the_tree_path(served):
    before = {
        name: metric(served["ddtree"], name)
        for name in ("ddtree_tree_steps_total", "ddtree_tree_nodes_total")
    }
    meta = generate(served["ddtree"])["meta_info"]
    steps = meta["spec_verify_ct"]
    assert metric(served["ddtree"], "ddtree_tree_steps_total") - before["ddtree_tree_steps_total"] == steps
    assert (
        metric(served["ddtree"], "ddtree_tree_nodes_total") - before["ddtree_tree_nodes_total"] == 32 * steps
    )
    assert metric(served["ddtree"], "sglang:spec_accept_length") == meta["spec_accept_length"]
    assert metric(served["dflash"], "ddtree_tree_steps_total") == 0


def test_concurrent_requests_answer_what_each_answers_alone(served):
    client = served["ddtree"]
    prompts = [PROMPT[:-n] for n in range(1, 7)]
    alone = [generate(client, prompt)["text"] for prompt in prompts]
    together = [None] * len(prompts)

    def ask(index):
        with httpx.Client(base_url=client.base_url, timeout=60) as own:
            together[index] = generate(own, prompts[index])["text"]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_a_client_that_leaves_frees_its_place(served):
    client = served["ar"]
    finished = metric(client, "ddtree_requests_total")
    with client.stream(
        "POST", "/generate", json={"text": "x", "stream": True, "sampling_params": LONG}
    ) as response:
        next(response.iter_lines())
    wait_for(lambda: metric(client, "sglang:num_running_reqs") == 0)
    assert metric(client, "ddtree_requests_total") == finished + 1
    with pytest.raises(httpx.ReadTimeout):
        client.post("/generate", json={"text": "x", "sampling_params": LONG}, timeout=0.3)
    wait_for(lambda: metric(client, "sglang:num_running_reqs") == 0)
    assert metric(client, "ddtree_requests_total") == finished + 2


def test_a_request_can_be_aborted_by_id(served):
    client = served["ar"]
    body = {"text": "x", "rid": "mine", "stream": True, "sampling_params": LONG}
    with client.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        with httpx.Client(base_url=client.base_url) as other:
            assert other.post("/abort_request", json={"rid": "mine"}).status_code == 200
        last = [line for line in lines if line.startswith("data: {")][-1]
    meta = json.loads(last.removeprefix("data: "))["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["id"] == "mine"


def test_a_full_queue_gets_503_with_retry_after_and_then_drains(tiny):
    with process(tiny, "--arm", "ar", "--max-running", "1", "--max-queue", "1") as (client, _):
        answers, busy = [], {**LONG, "max_new_tokens": 250}

        def ask():
            with httpx.Client(base_url=client.base_url, timeout=60) as own:
                answers.append(own.post("/generate", json={"text": "x", "sampling_params": busy}))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: metric(client, "sglang:num_queue_reqs") == 1)
        refused = client.post("/generate", json={"text": "x", "sampling_params": GREEDY})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert metric(client, "ddtree_rejected_total") == 1
        assert client.get("/health").status_code == 200
        for thread in threads:
            thread.join()
        assert [answer.json()["meta_info"]["completion_tokens"] for answer in answers] == [250, 250]


def test_sigterm_lets_the_running_request_end_and_exits_0(tiny):
    with process(tiny, "--arm", "ddtree") as (client, running):
        body = {"text": "x", "stream": True, "sampling_params": {**LONG, "max_new_tokens": 150}}
        with client.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            running.send_signal(signal.SIGTERM)
            with httpx.Client(base_url=client.base_url) as other:
                wait_for(lambda: other.get("/ready").status_code == 503)
                late = other.post("/generate", json={"text": "x", "sampling_params": GREEDY})
                assert late.status_code == 503
            rest = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert rest[-1] == "[DONE]"
        assert json.loads(rest[-2])["meta_info"]["completion_tokens"] == 150
        assert running.wait(timeout=60) == 0


def test_sigterm_cancels_what_outlasts_the_drain(tiny):
    with process(tiny, "--arm", "ar", "--drain-seconds", "0.2") as (client, running):
        body = {"text": "x", "stream": True, "sampling_params": LONG}
        with client.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            running.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data: {")]
        assert json.loads(rest[-1].removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"
        assert running.wait(timeout=60) == 0


def test_a_port_in_use_shows_before_the_model_is_loaded(tiny):
    import subprocess

    from .conftest import command

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = subprocess.run(command(tiny, "--port", port), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert f"--port {port}" in ended.stderr
    assert "Traceback" not in ended.stderr
