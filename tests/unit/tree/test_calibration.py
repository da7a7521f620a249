from __future__ import annotations

import json
import math

import numpy as np
import pytest
from ddtree_engine.tree import Builder, TreeInputError, build_tree, load_calibration
from ddtree_engine.tree.calibration import log_sigmoid

from .strategies import calibration, calibration_data, random_table


def write(tmp_path, data):
    path = tmp_path / "calibration.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_loaded_file_scores_as_the_formula_says(tmp_path):
    fitted = load_calibration(write(tmp_path, calibration_data()))
    logprobs = np.asarray([[-0.5, -3.0], [-2.0, -40.0]])
    for on_spine, base, slope in ((True, 2.0, 0.6), (False, -1.0, 0.4)):
        scores = fitted.edge_scores(logprobs, on_spine=on_spine)
        for d in range(2):
            for r in range(2):
                x = base - 0.1 * d - 0.7 * r + slope * max(logprobs[d, r], -12.0)
                assert scores[d, r] == pytest.approx(-math.log1p(math.exp(-x)), abs=2e-4)
    assert fitted.fit == {"steps": 1000}


def test_table_interpolation_is_close_monotone_and_never_positive():
    x = np.linspace(-40, 40, 20001, dtype=np.float32)
    scores = log_sigmoid(x)
    exact = -np.logaddexp(0.0, -np.clip(x.astype(np.float64), -32, 32))
    assert np.abs(scores - exact).max() < 1.5e-4
    assert (np.diff(scores) >= 0).all()
    assert scores.max() <= 0


def test_an_impossible_candidate_stays_impossible():
    scores = calibration().edge_scores(np.asarray([[-1.0, -np.inf]]), on_spine=True)
    assert scores[0, 1] == -np.inf


def test_the_off_spine_table_decides_below_a_sibling():
    """With off-spine edges made hopeless the tree is the spine and its siblings only."""
    hopeless = {"depth": [-30.0] * 15, "rank": [0.0] * 16, "slope": 0.0}
    ids, logprobs = random_table(np.random.default_rng(0), 15, 16)
    tree = build_tree(7, ids, logprobs, 63, Builder.CALIBRATED, calibration(off=hopeless))
    spine = set(tree.spine().tolist())
    assert len(spine) > 4
    assert set(tree.parents[1:].tolist()) <= spine


def test_a_table_larger_than_the_fit_is_refused():
    ids, logprobs = random_table(np.random.default_rng(0), 15, 16)
    for fitted in (calibration(block=8), calibration(topk=4)):
        with pytest.raises(TreeInputError, match=r"found a table of 15 x 16"):
            build_tree(7, ids, logprobs, 63, Builder.CALIBRATED, fitted)


def side(**changes):
    return {"depth": [0.0] * 15, "rank": [0.0] * 16, "slope": 1.0} | changes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema: found 2, allowed is 1"),
        ({"schema": True}, "schema: found True"),
        ({"kind": "other"}, "kind: found 'other', allowed is 'ddtree-calibration'"),
        ({"block": 1}, "block: found 1, allowed is a whole number >= 2"),
        ({"topk": 2.5}, "topk: found 2.5"),
        ({"logprob_floor": 3}, "logprob_floor: found 3.0, allowed is a number below 0"),
        ({"logprob_floor": None}, "logprob_floor: found None"),
        ({"on": 5}, "on: found int, allowed is an object"),
        ({"on": side(depth=[0.0] * 14)}, r"on.depth: found 'a list of 14', allowed is a list of 15"),
        ({"off": side(rank=[0.0] * 15 + ["x"])}, r"off.rank\[15\]: found 'x'"),
        ({"off": side(slope=math.nan)}, "off.slope: found nan, allowed is a finite number"),
        ({"fit": []}, "fit: found list"),
    ],
)
def test_a_wrong_key_is_named_with_the_file(tmp_path, change, message):
    path = write(tmp_path, calibration_data() | change)
    with pytest.raises(TreeInputError, match=message) as caught:
        load_calibration(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("key", ["schema", "kind", "block", "topk", "logprob_floor", "on", "off"])
def test_a_missing_key_is_named(tmp_path, key):
    data = calibration_data()
    del data[key]
    with pytest.raises(TreeInputError, match=f"{key}: missing, allowed is"):
        load_calibration(write(tmp_path, data))


def test_files_that_are_no_calibration_are_refused(tmp_path):
    with pytest.raises(TreeInputError, match="cannot be read"):
        load_calibration(tmp_path / "absent.json")
    with pytest.raises(TreeInputError, match="found no JSON"):
        load_calibration(write(tmp_path, "not json"))
    with pytest.raises(TreeInputError, match="found list, allowed is an object"):
        load_calibration(write(tmp_path, "[]"))
