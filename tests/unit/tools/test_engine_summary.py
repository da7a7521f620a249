"""The gates that engine_summary.py makes of raw answers."""

import importlib.util
import json
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools" / "gpu" / "engine_summary.py"


@pytest.fixture(scope="module")
def summary():
    spec = importlib.util.spec_from_file_location("engine_summary", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["engine_summary"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def raw(tmp_path):
    """A folder of answers of two agreeing arms and of one whose kernels idled in a step."""

    def keep(name, value):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))

    rows = [{"output_ids": [1, 2, 3, 4], "meta": {"spec_verify_ct": 2}}]
    other = [{"output_ids": [1, 2, 9, 9], "meta": {"spec_verify_ct": 2}}]
    keep("host.facts", {"cards": ["a card"], "versions": {"sglang": "0.5.23"}, "argv": []})
    keep("host.prompts", [[5, 6]])
    for arm in ("dflash", "shadow", "ar"):
        keep(f"{arm}.greedy", rows)
    keep("chain.greedy", other)
    for arm in ("shadow", "chain"):
        keep(f"{arm}.info", {"ddtree": {"arm": arm}})
    described = {"requests": 10, "tree_kernel_requests": 9}
    keep("tree32.info", {"ddtree": described, "disable_overlap_schedule": False, "disable_cuda_graph": False})
    return tmp_path


def test_gates_that_hold_fail_and_did_not_run(summary, raw):
    document, missing = summary.summarise(summary.Raw(raw))
    verdicts = {gate["id"]: summary.verdict(gate).strip() for gate in document["gates"]}
    assert verdicts == {"a": "ok", "b": "FAIL", "g": "FAIL"}
    assert {"c", "d", "e", "f", "h", "i", "j", "k"} == set(missing)
    assert document["hardware"]["cards"] == ["a card"]
    assert all((raw / Path(gate["raw"]).name).is_file() for gate in document["gates"])


def test_the_last_run_that_made_a_comparison_is_the_one_that_counts(summary, raw):
    found = {"where": "x against ar", "gap": 1.0}
    (raw / "judge-100.differences.json").write_text(
        json.dumps({"compared": ["x against ar"], "questions": [found]})
    )
    assert summary.Raw(raw).differences("x against ar") == [found]
    (raw / "judge-200.differences.json").write_text(
        json.dumps({"compared": ["x against ar"], "questions": []})
    )
    assert summary.Raw(raw).differences("x against ar") == []
    with pytest.raises(summary.Missing):
        summary.Raw(raw).differences("y against ar")


def draw(seed, weights, count=1000):
    return Counter(
        random.Random(seed).choices([str(token) for token in range(len(weights))], weights, k=count)
    )


def test_equal_samplers_pass_and_a_biased_one_fails(summary):
    weights = [30, 20, 20, 10, 10, 5, 3, 1, 1]
    pairs = [(draw(seed, weights), draw(seed + 100, weights)) for seed in range(20)]
    assert summary.same_distribution(pairs) > 0.001
    assert summary.same_distribution([(summary.bias(one), other) for one, other in pairs]) < 0.001


def test_samples_of_one_outcome_say_nothing(summary):
    assert summary.same_distribution([(Counter({"7": 100}), Counter({"7": 90}))]) == 1.0


def test_the_second_token_is_counted_after_its_first(summary):
    counts = {"1,2,3": 4, "1,2,9": 1, "2,2,3": 5}
    assert summary.by_place(counts, 0) == {"1": 5, "2": 5}
    assert summary.by_place(counts, 1) == {"1,2": 5, "2,2": 5}
