"""Seconds of a step from answers whose times are known, and what is refused before anything is sent."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from ddtree_engine.tree.policy import load_costs

from ddtree_ops.bench import costs
from ddtree_ops.bench.client import Answer
from ddtree_ops.cli.app import run

URL = "http://127.0.0.1:1"
PREFILL_S = 0.2


def step_s(budget, batch):
    return (20 + budget / 10 + batch) / 1e3


@pytest.fixture
def server(monkeypatch):
    """A server of two widths; counts requests by budget."""
    info = {"model_path": "models/target", "ddtree": {"arm": "ddtree", "budgets": [15, 31]}}
    asked = Counter()
    open_now = Counter()

    async def generate(session, url, request, *, timeout_s):
        sampling = request["sampling_params"]
        budget = sampling["custom_params"]["ddtree_budget"]
        asked[budget] += 1
        open_now[budget] += 1
        await costs.asyncio.sleep(0)  # every request of a batch is sent before one is answered
        batch = open_now[budget]
        await costs.asyncio.sleep(0)
        open_now[budget] -= 1
        steps = -(-(sampling["max_new_tokens"] - 1) // 4)
        return Answer(
            sent_at=0.0,
            e2e_s=PREFILL_S + steps * step_s(budget, batch),
            meta_info={"spec_verify_ct": steps},
        )

    monkeypatch.setattr(costs, "fetch_server_info", lambda url: info)
    monkeypatch.setattr(costs, "generate", generate)
    return info, asked


def test_a_step_is_the_difference_of_a_long_and_a_short_answer(server, tmp_path, capsys):
    out = tmp_path / "costs.json"
    assert run(["bench", "costs", URL, "--concurrency", "1,4", "--out", str(out), "--json"]) == 0
    table = load_costs(out)
    for budget in (15, 31):
        for batch in (1, 4):
            assert table.seconds(budget + 1, batch) == pytest.approx(step_s(budget, batch), abs=1e-6)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["file"] == str(out)
    assert result["seconds"]["32"]["4"] == pytest.approx(step_s(31, 4), abs=1e-6)


def test_only_the_budgets_that_are_asked_for_are_timed(server, tmp_path, capsys):
    _, asked = server
    out = tmp_path / "costs.json"
    command = ["bench", "costs", URL, "--budget", "31", "--concurrency", "2", "--rounds", "3"]
    assert run([*command, "--out", str(out)]) == 0
    # Three rounds and one that warms up, a short and a long answer each, two in flight.
    assert asked == {31: 16}
    assert "budget" in capsys.readouterr().out


def test_a_dry_run_sends_nothing(server, tmp_path, capsys):
    _, asked = server
    out = tmp_path / "costs.json"
    assert run(["bench", "costs", URL, "--concurrency", "1,4", "--out", str(out), "--dry-run", "--json"]) == 0
    assert not asked
    assert not out.exists()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["requests"] == 2 * 6 * (1 + 4) * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "63"], "--budget: found 63, allowed: 15, 31"),
        (["--concurrency", "0"], "--concurrency: found 0, allowed: whole numbers, 1 to 256"),
        (["--max-tokens", "12"], "too few to time"),
    ],
)
def test_what_cannot_be_timed_is_named(options, message, server, tmp_path, capsys):
    out = tmp_path / "costs.json"
    assert run(["bench", "costs", URL, "--out", str(out), *options]) == (1 if "few" in message else 2)
    assert message in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


@pytest.mark.parametrize("block", [None, {"arm": "ddtree", "budget": 31, "per_request_budget": False}])
def test_a_server_of_one_width_is_refused_with_the_remedy(block, server, tmp_path, capsys):
    info, _ = server
    info["ddtree"] = block
    assert run(["bench", "costs", URL, "--out", str(tmp_path / "costs.json")]) == 2
    assert "widths" in capsys.readouterr().err


def test_a_failed_request_ends_it_and_leaves_an_older_table(server, tmp_path, monkeypatch, capsys):
    async def refuse(session, url, request, *, timeout_s):
        return Answer(sent_at=0.0, error="HTTP 503: full")

    monkeypatch.setattr(costs, "generate", refuse)
    out = tmp_path / "costs.json"
    out.write_text("older")
    assert run(["bench", "costs", URL, "--out", str(out)]) == 1
    assert "HTTP 503: full" in capsys.readouterr().err
    assert out.read_text() == "older"
