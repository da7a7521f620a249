"""A key in the environment: what is open, what is not, and that it stays out of sight."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from .conftest import process

KEY = "a-key-for-tests"
PROMPT = {"text": "a", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}


@pytest.fixture(scope="module")
def client(tiny) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDTREE_API_KEY", KEY)
        with process(tiny, "--arm", "ar") as (running, _):
            yield running


@pytest.mark.parametrize("route", ["/health", "/health_generate", "/ready", "/metrics"])
def test_probes_and_prometheus_need_no_key(client: httpx.Client, route: str) -> None:
    assert client.get(route).status_code == 200


@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer ä"])
def test_everything_else_is_refused_without_the_key(client: httpx.Client, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    for answer in (
        client.get("/server_info", headers=headers),
        client.get("/v1/models", headers=headers),
        client.post("/generate", json=PROMPT, headers=headers),
        client.post("/flush_cache", headers=headers),
    ):
        assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})


def test_the_key_opens_and_is_shown_nowhere(client: httpx.Client) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    assert len(client.post("/generate", json=PROMPT, headers=headers).json()["output_ids"]) == 1
    for route in ("/server_info", "/metrics"):
        assert KEY not in client.get(route, headers=headers).text
