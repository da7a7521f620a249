"""The gates that engine_summary.py makes of raw answers."""

import io
import json
import random
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
sys.path.insert(0, str(REPOSITORY / "tools" / "gpu"))

import engine_summary as summary  # noqa: E402 - the folder has to be found first
from engine import answers, gates, serving_gates  # noqa: E402


@pytest.fixture
def raw(tmp_path):
    """A folder of answers of two agreeing arms and of one whose kernels idled in a step."""
    folder = tmp_path / "raw"
    folder.mkdir()

    def keep(name, value):
        (folder / f"{name}.json").write_text(json.dumps(value))

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
    return folder


def test_gates_that_hold_fail_and_did_not_run(raw):
    document, missing = summary.summarise(answers.Raw(raw))
    verdicts = {gate["id"]: answers.verdict(gate).strip() for gate in document["gates"]}
    assert verdicts == {"a": "ok", "b": "FAIL", "g": "FAIL"}
    others = {"h", "h_load", "h_pages", "features", "penalties", "checkpoints", "fp8", "kv8"}
    assert {"c", "d", "d_float32", "e", "f", "i", "j", "k", "wy"} | others == set(missing)
    assert document["hardware"]["cards"] == ["a card"]
    assert all((raw / Path(gate["raw"]).name).is_file() for gate in document["gates"])


def test_the_last_run_that_made_a_comparison_is_the_one_that_counts(raw):
    found = {"where": "x against ar", "gap": 1.0}
    (raw / "judge-100.differences.json").write_text(
        json.dumps({"compared": ["x against ar"], "questions": [found]})
    )
    assert answers.Raw(raw).differences("x against ar") == [found]
    (raw / "judge-200.differences.json").write_text(
        json.dumps({"compared": ["x against ar"], "questions": []})
    )
    assert answers.Raw(raw).differences("x against ar") == []
    with pytest.raises(answers.Missing):
        answers.Raw(raw).differences("y against ar")


def question(tokens, *values):
    best = [[value, token, None] for token, value in enumerate(values, 1)]
    return {"where": "tree8 against ar", "tokens": tokens, "best": best}


def judged(raw, *questions):
    best = [[-0.5, 1, None], [-1.5, 2, None]]
    moved = [[-0.5, 1, None], [-1.625, 2, None]]
    (raw / "ar.ties.json").write_text(json.dumps([{"decode": best, "prefill": moved, "batched": [best]}]))
    asked = {"compared": ["tree8 against ar"], "questions": list(questions)}
    (raw / "judge-100.differences.json").write_text(json.dumps(asked))
    return answers.no_near_ties(answers.Raw(raw), ["tree8 against ar"], "d", "t")


def test_a_first_difference_beyond_twice_the_noise_is_counted(raw):
    near, far = question([2, 1], -0.5, -0.75), question([2, 1], -0.5, -0.8125)
    found = judged(raw, near, far)
    assert (found["figure"], found["detail"]["divergences"]) == (1, 2)
    assert found["detail"]["gaps"] == {"0.25": 1, "0.3125": 1}
    assert found["raw"] == "raw/judge-100.differences.json"


def test_a_token_that_is_not_among_the_best_is_no_near_tie(raw):
    assert judged(raw, question([9, 1], -0.5, -0.5))["figure"] == 1


def test_a_tree_that_is_noisier_than_plain_decoding_is_seen(raw):
    rng = random.Random(0)

    def errors(scale, count):
        return [[1 + scale * rng.gauss(0, 1), 1] for _ in range(count)]

    for scale, fine in ((1, True), (2, False)):
        rows = {"tree": errors(scale, 500), "decode": errors(1, 80), "prefill": errors(1, 80)}
        (raw / "float32-distances.json").write_text(json.dumps(rows))
        (found,) = gates.gate_d_float32(answers.Raw(raw))
        assert (answers.verdict(found).strip() == "ok") is fine


def test_an_arm_of_other_numbers_is_judged_by_the_noise_of_its_own_referee(raw):
    judged(raw, question([2, 1], -0.5, -0.8125))
    still = [[-0.5, 1, None], [-1.5, 2, None]]
    (raw / "ar-fp8.ties.json").write_text(json.dumps([{"decode": still, "prefill": [[-0.5, 1], [-1.7, 2]]}]))
    found = answers.no_near_ties(answers.Raw(raw), ["tree8 against ar"], "d", "t", "ar-fp8")
    assert (found["figure"], found["detail"]["tie_noise"]) == (0, 0.2)
    assert found["detail"]["tie_noise_raw"] == "raw/ar-fp8.ties.json"


def served(raw, **changed):
    """A folder with what the gate of features reads."""
    cases = [f"tree32-grammar features {case}" for case in serving_gates.FEATURES]
    judged(raw)
    (raw / "judge-200.differences.json").write_text(json.dumps({"compared": cases, "questions": []}))
    kept = {
        "tree32-grammar.features": {},
        "tree32-grammar.grammar": [{"text": "yes 123"}, {"text": "perhaps 000"}],
        "tree32-grammar.refusals": {"ddtree_budget": {"status": 400}},
        "shadow.refusals": {"ddtree_budget": {"status": 400}},
        "tree32-grammar.kinds": {"alone": {"greedy": None}, "together": {"greedy": None}},
    }
    for name, value in (kept | changed).items():
        (raw / f"{name}.json").write_text(json.dumps(value))
    return [answers.verdict(one).strip() for one in serving_gates.gate_features(answers.Raw(raw))]


def test_features_that_are_served_pass(raw):
    assert served(raw) == ["ok"] * 4


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("tree32-grammar.grammar", [{"text": "yes 123"}, {"text": "yes 1234"}], 1),
        ("shadow.refusals", {"ddtree_budget": {"status": 200}}, 2),
        ("tree32-grammar.kinds", {"alone": {"greedy": None}, "together": {"greedy": "stuck"}}, 3),
    ],
)
def test_a_feature_that_is_not_served_right_fails_its_gate(raw, name, value, place):
    assert served(raw, **{name: value})[place] == "FAIL"


@pytest.mark.parametrize(("second", "verdict"), [(8, "ok"), (7, "FAIL")])
def test_a_penalised_token_that_is_not_what_its_penalties_choose_fails_the_gate(raw, second, verdict):
    best = [[-0.5, 7, None], [-1.0, 8, None], [-3.0, 9, None]]

    def answer(token):
        values = {one: value for value, one, _ in best}
        return {
            "sampling": {"presence_penalty": 1.5},
            "output_ids": [7, token],
            "plain": [best, best],
            "answered": [best, best],
            "plain_tokens": [[values[7], 7, None], [values[token], token, None]],
        }

    judged(raw)
    # SGLang's own plain decoding counts late under overlap: told, not judged.
    for arm, token in (("ar", 7), ("tree32-grammar", second)):
        (raw / f"{arm}.features.json").write_text(json.dumps({"penalties": [answer(token)]}))
    (found,) = serving_gates.gate_penalties(answers.Raw(raw))
    assert answers.verdict(found).strip() == verdict
    assert (found["detail"]["ar"]["wrong"], found["detail"]["ar"]["largest_gap"]) == (1, 1.0)
    (raw / "ar.features.json").write_text("{}")
    with pytest.raises(answers.Missing):
        serving_gates.gate_penalties(answers.Raw(raw))


def archive(path, **files):
    with tarfile.open(path, "w:xz") as tar:
        for name, text in files.items():
            content = text.encode()
            entry = tarfile.TarInfo(name.replace("__", "."))
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def test_archives_leave_their_answers_and_no_logs(tmp_path):
    folder = tmp_path / "raw"
    first = archive(tmp_path / "1", ar__greedy__json="[1]", ar__log="x", ar__diagnosis__json="{}")
    summary.unpack(first, folder)
    summary.unpack(archive(tmp_path / "2", ar__greedy__json="[2]"), folder)
    assert [file.name for file in folder.iterdir()] == ["ar.greedy.json.xz"]
    assert answers.Raw(folder).read("ar", "greedy") == [2]


def test_committed_figures_are_what_the_raw_files_give():
    folder = REPOSITORY / "results" / "h200-engine"
    committed = json.loads((folder / "summary.json").read_text())
    made, _ = summary.summarise(answers.Raw(folder / "raw"))
    assert made == committed
    assert all((folder / gate["raw"]).is_file() for gate in committed["gates"])


def draw(seed, weights, count=1000):
    return Counter(
        random.Random(seed).choices([str(token) for token in range(len(weights))], weights, k=count)
    )


def test_equal_samplers_pass_and_a_biased_one_fails():
    weights = [30, 20, 20, 10, 10, 5, 3, 1, 1]
    pairs = [(draw(seed, weights), draw(seed + 100, weights)) for seed in range(20)]
    assert serving_gates.same_distribution(pairs) > 0.001
    assert serving_gates.same_distribution([(serving_gates.bias(one), other) for one, other in pairs]) < 0.001


def test_samples_of_one_outcome_say_nothing():
    assert serving_gates.same_distribution([(Counter({"7": 100}), Counter({"7": 90}))]) == 1.0


def test_the_second_token_is_counted_after_its_first():
    counts = {"1,2,3": 4, "1,2,9": 1, "2,2,3": 5}
    assert serving_gates.by_place(counts, 0) == {"1": 5, "2": 5}
    assert serving_gates.by_place(counts, 1) == {"1,2": 5, "2,2": 5}
