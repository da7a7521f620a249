"""What clients get through the gateway, and what becomes of their requests when a replica goes."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ddtree_ops.gateway.check import GatewayNotReady, check_golden, gateway_state
from ddtree_ops.hosts.runner import playbooks_folder
from tests.support.tiny_pair import write_pair

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools" / "e2e"))
from gateway_load import Load

from .conftest import GOLDEN, HEADERS, KEY, ROUTED, Stack, client, engine, gateway, settings, wait_for

CHAT = {
    "model": "target",
    "messages": [{"role": "user", "content": "parse a line"}],
    "max_tokens": 8,
    "temperature": 0,
    "return_spec_tokens_details": True,
    "custom_params": {"ddtree_budget": 15},
}
COMPLETION = {key: value for key, value in CHAT.items() if key != "messages"} | {"prompt": GOLDEN["text"]}
GENERATE = {
    **GOLDEN,
    "sampling_params": {
        "temperature": 0,
        "max_new_tokens": 8,
        "ignore_eos": True,
        "custom_params": {"ddtree_budget": 15},
    },
}
ROUTES = {"/generate": GENERATE, "/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
#: What differs between two answers to one greedy request: ids and times.
VARYING = {"id", "created", "e2e_latency", "stage_seconds"}


def steady(value: Any) -> Any:
    """The value without what differs from one request to the next."""
    if isinstance(value, dict):
        return {key: steady(inner) for key, inner in value.items() if key not in VARYING}
    return [steady(inner) for inner in value] if isinstance(value, list) else value


def events(base: str, path: str, body: dict[str, Any]) -> list[Any]:
    with client() as http, http.stream("POST", base + path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("path", ROUTES)
def test_answers_are_those_of_a_replica_down_to_the_accept_figures(stack: Stack, path: str) -> None:
    with client() as http:
        through, direct = (
            http.post(base + path, json=ROUTES[path]) for base in (stack.url, stack.workers[0])
        )
    assert through.status_code == direct.status_code == 200
    assert steady(through.json()) == steady(direct.json())
    assert through.headers[ROUTED] in stack.workers
    assert '"spec_verify_ct"' in through.text
    assert '"budget":15' in through.text


@pytest.mark.parametrize("path", ROUTES)
def test_streams_are_those_of_a_replica_chunk_by_chunk(stack: Stack, path: str) -> None:
    through, direct = (events(base, path, ROUTES[path]) for base in (stack.url, stack.workers[0]))
    assert len(through) > 2
    assert steady(through) == steady(direct)
    assert "spec_verify_ct" in json.dumps(through[-1])


def test_a_bad_request_gets_the_engines_own_words(stack: Stack) -> None:
    body = {**GENERATE, "sampling_params": {"custom_params": {"ddtree_budget": 9999}}}
    with client() as http:
        through, direct = (http.post(f"{base}/generate", json=body) for base in (stack.url, stack.workers[0]))
        assert (through.status_code, through.json()) == (direct.status_code, direct.json())
        assert through.status_code == 400
        # What is not of the right type does not reach an engine.
        body = {**GENERATE, "sampling_params": {"max_new_tokens": -1}}
        assert http.post(f"{stack.url}/generate", json=body).status_code == 422


def test_what_the_dashboard_and_the_alerts_ask_for_is_there(stack: Stack) -> None:
    with client() as http:
        assert http.post(f"{stack.url}/generate", json=GENERATE).status_code == 200
        there = http.get(f"{stack.metrics}/metrics").text
    folder = playbooks_folder() / "roles" / "monitoring" / "files"
    asked = {
        name
        for file in ("dashboard.json", "alerts.yml")
        for name in re.findall(r"\bsmg_\w+", (folder / file).read_text(encoding="utf-8"))
    }
    assert len(asked) >= 8
    assert {name for name in asked if not re.search(rf"^{name}[ {{]", there, re.MULTILINE)} == set()
    labels = ('smg_worker_health{worker="', 'smg_http_responses_total{path="/generate",status_code="200"')
    assert [one for one in labels if one not in there] == []


def test_new_prompts_are_spread_and_a_known_one_stays(stack: Stack) -> None:
    def ask(text: str) -> str:
        body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
        with client() as http:
            return str(http.post(f"{stack.url}/generate", json=body).raise_for_status().headers[ROUTED])

    prompts = [f"{number} {chr(97 + number) * 40}" for number in range(9)]
    with ThreadPoolExecutor(6) as pool:
        spread = list(pool.map(ask, prompts))
    assert set(spread) == set(stack.workers), Counter(spread)
    known = "class Store:\n    def __init__(self, path):\n        self.path = path\n"
    homes = {ask(known + f"\n    def m{number}(self):\n") for number in range(4)}
    assert len(homes) == 1


def test_a_replica_too_many_or_too_few_is_told(stack: Stack) -> None:
    first, second, third = stack.workers
    stranger = "http://127.0.0.1:9"
    found = gateway_state(stack.url, stack.metrics, [second, stranger, first])
    assert found.problems == (f"{stranger}: not known to the gateway", f"{third}: not in cluster.yaml")
    assert [worker.url for worker in found.workers] == [second, first, third]


def test_a_gateway_that_is_not_there_is_a_state_and_no_crash() -> None:
    found = gateway_state("http://127.0.0.1:9", "http://127.0.0.1:9", [])
    assert not found.answers
    assert len(found.problems) == 2


def test_without_the_key_nothing_is_served_and_the_control_plane_is_closed_to_all(stack: Stack) -> None:
    with httpx.Client(trust_env=False, timeout=30) as http:
        for path, body in ROUTES.items():
            assert http.post(stack.url + path, json=body).status_code == 401
            wrong = {"Authorization": "Bearer other"}
            assert http.post(stack.url + path, json=body, headers=wrong).status_code == 401
        added = {"url": "http://127.0.0.1:9"}
        assert http.post(f"{stack.url}/workers", json=added, headers=HEADERS).status_code == 401
        assert http.get(f"{stack.url}/workers", headers=HEADERS).status_code == 401
        assert http.post(f"{stack.url}/flush_cache", headers=HEADERS).status_code == 401
        # Open, so the engine must not show the key there.
        shown = http.get(f"{stack.url}/get_server_info")
        assert KEY not in shown.text


def test_the_key_is_neither_in_argv_nor_in_a_log(stack: Stack) -> None:
    assert stack.gateway.running is not None
    argv = Path(f"/proc/{stack.gateway.running.pid}/cmdline").read_bytes()
    assert KEY.encode() not in argv
    for process in (stack.gateway, *stack.replicas):
        assert KEY not in process.log.read_text(errors="replace")


def test_a_replica_killed_under_load_loses_the_streams_that_it_had_begun_and_no_other(stack: Stack) -> None:
    victim = stack.replicas[1]
    load = Load(stack.url, HEADERS)
    with load.running():
        # Frozen first, so that what it had begun is known exactly when it dies.
        wait_for(lambda: load.streams_on(victim.url))
        assert victim.running is not None
        victim.running.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        begun = load.streams_on(victim.url)
        victim.kill()
        killed_at = len(load.requests)
        wait_for(lambda: not state_of(stack, victim.url).healthy)
        wait_for(lambda: len(load.requests) >= killed_at + 12)
    later = [one for one in load.requests if one.number >= killed_at]
    assert load.lost == begun, [one for one in load.requests if not one.whole]
    assert 1 <= len(begun) <= 6
    assert victim.url not in {one.worker for one in later}
    assert f"{victim.url}: unhealthy, gets no requests" in stack.state().problems
    assert gateway_state(stack.url, stack.metrics, stack.workers, tolerated=[victim.url]).problems == ()

    victim.start()
    wait_for(lambda: not stack.state().problems)
    again = Load(stack.url, HEADERS)
    with again.running():
        wait_for(lambda: victim.url in {one.worker for one in again.requests})
    assert again.lost == set()


def test_a_replica_that_ends_in_order_loses_nothing(stack: Stack) -> None:
    """SIGTERM is what a replaced container gets: it finishes what it has, and the others get the rest."""
    leaver = stack.replicas[2]
    load = Load(stack.url, HEADERS)
    with load.running():
        wait_for(lambda: load.streams_on(leaver.url))
        assert leaver.end() == 0
        ended_at = len(load.requests)
        wait_for(lambda: len(load.requests) >= ended_at + 6)
    assert load.lost == set(), [one for one in load.requests if not one.whole]
    leaver.start()
    wait_for(lambda: not stack.state().problems)


def test_a_gateway_told_to_stop_finishes_its_streams(stack: Stack, tmp_path: Path) -> None:
    front = gateway(tmp_path, stack.workers, settings(stop_timeout_s=120))
    front.start()
    try:
        wait_for(lambda: answers(front.url))
        body = {**GENERATE, "sampling_params": {**GENERATE["sampling_params"], "max_new_tokens": 20}}
        with (
            client() as http,
            http.stream("POST", f"{front.url}/generate", json={**body, "stream": True}) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            assert front.running is not None
            front.running.terminate()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert front.running.wait(150) == 0
    finally:
        if front.running is not None and front.running.poll() is None:
            front.kill()


def test_a_door_to_another_model_or_without_a_lock_is_not_taken_for_ready(
    stack: Stack, tmp_path: Path
) -> None:
    pair = write_pair(tmp_path)
    models = ("--model", str(pair / "target"), "--drafter", str(pair / "drafter"))
    other = replace(engine(tmp_path, "--arm", "ar", *models), env={"OMP_NUM_THREADS": "1"})
    other.start()
    try:
        wait_for(lambda: is_up(other.url))
        with pytest.raises(GatewayNotReady, match=f"the golden prompt gives .* at {other.url}"):
            check_golden(stack.url, other.url, GOLDEN, HEADERS)
        with pytest.raises(GatewayNotReady, match="/generate without the API key: 200, not 401"):
            check_golden(other.url, stack.workers[0], GOLDEN, HEADERS)
    finally:
        other.kill()


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def answers(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/readiness", trust_env=False).json().get("healthy_workers") == 3)
    except (httpx.HTTPError, ValueError):
        return False


def state_of(stack: Stack, url: str):
    return next(worker for worker in stack.state().workers if worker.url == url)
