"""The judge of penalised answers, on servers that are right, one token behind, a step behind, and noisy."""

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

from engine import penalties, workloads

VOCABULARY, PROMPT, STOP, END = 200, [3, 1, 4], 11, 10
NOISE = 0.01


class Server:
    """Answers as SGLang does; `behind` of a place says how many of the newest tokens it does not count."""

    def __init__(self, behind=lambda place: 0, noise=0.0):
        self.behind, self.noise = behind, noise

    def logits(self, text):
        logits = np.random.default_rng(abs(hash(tuple(text)))).normal(2.0, 2.0, VOCABULARY)
        # A few tokens are likely everywhere, so that texts repeat themselves.
        logits[5:12] += 4.0
        logits[STOP] += 2.0
        return logits

    def generate(self, ids, tokens, *, sampling=None, logprob_start_len=None, **_):
        sampling = sampling or {}
        output, tops = [], []
        while len(output) < tokens and (not output or output[-1] not in sampling.get("stop_token_ids", [])):
            counted = Counter(output[: max(0, len(output) - self.behind(len(output)))])
            logits = self.logits(ids + output)
            logits += np.random.default_rng(len(output)).normal(0, 1, VOCABULARY) * self.noise
            for token, times in counted.items():
                logits[token] = penalties.penalised(logits[token], times, sampling)
            if len(output) - self.behind(len(output)) < sampling.get("min_new_tokens", 0):
                logits[[END, *sampling.get("stop_token_ids", [])]] = -np.inf
            tops.append(best(logits))
            output.append(int(logits.argmax()))
        meta = {"output_top_logprobs": tops}
        if logprob_start_len is not None:
            rows = [self.logits(ids[:place]) for place in range(logprob_start_len + 1, len(ids))]
            meta["input_top_logprobs"] = [None, *map(best, rows)]
            told = [
                [logprobs(row)[token], token, None]
                for row, token in zip(rows, ids[-len(rows) :], strict=True)
            ]
            meta["input_token_logprobs"] = [[None, ids[logprob_start_len], None], *told]
        return {"output_ids": output, "meta_info": meta}


def logprobs(logits):
    return logits - np.logaddexp.reduce(logits)


def best(logits):
    values = logprobs(logits)
    return [[float(values[token]), int(token), None] for token in np.argsort(-values)[: penalties.BEST]]


def judged(server, case):
    found = Counter()
    for first in range(8):
        found += penalties.verdicts(penalties.ask(server, case, [first, *PROMPT], STOP, [END]), NOISE)
    return found


@pytest.mark.parametrize("case", penalties.CASES)
def test_a_server_that_counts_right_has_no_wrong_token(case):
    found = judged(Server(), case)
    assert found[penalties.WRONG] == found[penalties.NEAR] == 0
    assert found[penalties.EQUAL] > 9 * found[penalties.OPEN]


@pytest.mark.parametrize("case", penalties.CASES)
@pytest.mark.parametrize(
    "behind", [lambda place: min(1, place), lambda place: place % 5], ids=["one late", "of the step's start"]
)
def test_a_server_that_counts_late_has_wrong_tokens(behind, case):
    assert judged(Server(behind), case)[penalties.WRONG] > 0


def test_an_answer_that_ends_too_soon_has_a_wrong_token():
    found = judged(Server(lambda place: -2), "min_new_tokens")
    assert found[penalties.WRONG] > 0


def test_noise_makes_near_ties_and_not_wrong_tokens():
    found = Counter()
    for seed in range(20):
        row = penalties.ask(Server(noise=0.02), "presence_penalty", [seed, *PROMPT], STOP, [END])
        found += penalties.verdicts(row, noise=0.04)
    assert found[penalties.WRONG] == 0
    assert found[penalties.NEAR] > 0


def test_a_choice_that_is_not_in_the_list_is_judged_by_its_own_log_probability():
    row = {
        "sampling": {"presence_penalty": 1.0},
        "output_ids": [7, 9],
        "answered": [[], []],
        "plain": [[[-0.1, 7, None], [-3.0, 8, None]], [[-0.1, 7, None], [-1.0, 8, None]]],
        "plain_tokens": [[-0.1, 7, None], [-1.05, 9, None]],
    }
    gaps = list(penalties.places(row))
    assert gaps == [{"place": 0, "gap": 0.0, "unlisted": False}, {"place": 1, "gap": 0.05, "unlisted": True}]
    assert penalties.verdict(gaps[1], 0.01) == penalties.WRONG
    # Within the noise it may still be that a third token, below the list, was the best.
    assert penalties.verdict(gaps[1], 0.1) == penalties.OPEN
    row["plain_tokens"][1][1] = 8
    with pytest.raises(ValueError, match="place 1: asked about token 9, told about 8"):
        list(penalties.places(row))


@pytest.mark.parametrize("offset", [12.0, -1.5])
def test_logits_are_found_behind_log_probabilities(offset):
    sampling = {"repetition_penalty": 1.3, "presence_penalty": 0.2}
    plain = {1: -0.5, 2: -1.0, 3: -2.0, 4: -4.0}
    before = Counter({2: 1, 4: 2})
    answered = {
        token: penalties.penalised(value + offset, before[token], sampling) - 3
        for token, value in plain.items()
    }
    assert penalties.offset_of(plain, answered, before, sampling) == pytest.approx(offset)
    # Nothing of what has been penalised is in sight.
    assert penalties.offset_of(plain, {1: answered[1]}, before, sampling) is None


def test_the_workload_asks_every_case_alone_and_with_the_others(tmp_path, capsys):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps({"eos_token_id": END}))
    prompts = [[first, *PROMPT] for first in range(9)]
    context = SimpleNamespace(prompts=prompts, pair_of=lambda arm: tmp_path)
    server = Server()
    server.name, server.arm = "right", None
    rows = workloads.penalised(context, server)
    assert Counter(row["case"] for row in rows) == dict.fromkeys(penalties.CASES, 6)
    assert sum(row["together"] for row in rows) == 20
    found = penalties.summary(rows, NOISE)
    assert found[penalties.WRONG] == found["largest_gap"] == 0
    assert "right.features: penalised tokens" in capsys.readouterr().out
    late = Server(lambda place: min(1, place))
    late.name, late.arm = "late", None
    assert penalties.summary(workloads.penalised(context, late), NOISE)[penalties.WRONG] > 0


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        ({"eos_token_id": 2}, [2]),
        ({"eos_token_id": [2, 3]}, [2, 3]),
        ({"text_config": {"eos_token_id": 4}}, [4]),
        ({}, []),
    ],
)
def test_a_targets_own_end_tokens(config, ends, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert penalties.end_tokens(tmp_path) == ends
