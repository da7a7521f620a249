import json

import pytest
from ddtree_engine.sglang_plugin.config import AUTO, VARIABLE, Mode, load_config, parse_config
from ddtree_engine.sglang_plugin.errors import ConfigError
from ddtree_engine.tree.build import Builder


def test_nothing_set_gives_a_tree_of_sixteen_candidates():
    config = load_config({})
    assert (config.mode, config.topk, config.builder) == (Mode.TREE, 16, Builder.BEST_FIRST)
    assert config.verifies_tree


def test_every_key_is_read(tmp_path):
    calibration = tmp_path / "calibration.json"
    side = {"depth": [0.0] * 15, "rank": [0.0] * 8, "slope": 1.0}
    calibration.write_text(
        json.dumps(
            {
                "schema": 1,
                "kind": "ddtree-calibration",
                "block": 16,
                "topk": 8,
                "logprob_floor": -12.0,
                "on": side,
                "off": side,
            }
        )
    )
    keys = {
        "mode": "unsafe",
        "budget": 31,
        "topk": 8,
        "builder": "calibrated",
        "calibration": str(calibration),
        "state": "snapshot",
        "metrics": False,
        "step_log": str(tmp_path),
        "self_check": 5,
        "allow_hybrid_unsafe": True,
    }
    config = load_config({VARIABLE: json.dumps(keys)})
    assert (config.mode, config.budget, config.topk, config.metrics) == (Mode.UNSAFE, 31, 8, False)
    assert config.calibration is not None
    assert (config.step_log, config.self_check) == (tmp_path, 5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no JSON"),
        ("[]", "list"),
        ('{"modes": "tree"}', r"unknown key 'modes', allowed are mode, budget"),
        ('{"mode": "trees"}', r'mode: found "trees", allowed is one of tree, shadow, unsafe'),
        ('{"topk": 0}', r"topk: found 0, allowed is a whole number in 1\.\.32"),
        ('{"topk": true}', "topk: found true"),
        ('{"budget": 128}', r"budget: found 128, allowed is a whole number in 1\.\.127"),
        ('{"builder": "greedy"}', "builder: found"),
        ('{"builder": "calibrated"}', "calibration: found null"),
        ('{"calibration": "x.json"}', "calibration: found"),
        ('{"builder": "calibrated", "calibration": "/nowhere.json"}', "nowhere.json: cannot be read"),
        ('{"metrics": 1}', "metrics: found 1, allowed is true or false"),
        ('{"state": "wy2"}', 'state: found "wy2", allowed is one of snapshot, wy'),
        ('{"state": "wy", "mode": "shadow"}', 'state: found "wy", allowed is snapshot in mode shadow'),
        (
            '{"state": "wy", "mode": "unsafe", "allow_hybrid_unsafe": true}',
            'state: found "wy", allowed is snapshot in mode unsafe',
        ),
        ('{"build_kernel": "cuda"}', 'build_kernel: found "cuda", allowed is one of triton, torch'),
        ('{"self_check": -1}', "self_check: found -1"),
        ('{"widths": 16}', r"widths: found 16, allowed is two or more whole numbers in 2\.\.128, ascending"),
        ('{"widths": [16]}', r"widths: found \[16\], allowed is two or more"),
        ('{"widths": [32, 16]}', r"widths: found \[32, 16\], allowed is .* ascending, each once"),
        ('{"widths": [16, 16]}', "each once"),
        ('{"widths": [1, 16]}', r"widths: found \[1, 16\]"),
        ('{"widths": [16, 129]}', r"widths: found \[16, 129\]"),
        ('{"widths": [true, 16]}', "widths: found"),
        ('{"widths": [16, 32], "mode": "shadow"}', "widths: found .*allowed is null in mode shadow"),
        (
            '{"widths": [16, 32], "budget": 16}',
            r"budget: found 16, allowed is one of 15, 31 \(the widths, less",
        ),
        ('{"widths": [16, 32], "budget": "auto"}', "costs: found null, allowed is the path of a table"),
        ('{"widths": [16, 32], "budget": "fast"}', 'budget: found "fast"'),
        ('{"budget": "auto"}', 'budget: found "auto", allowed is a number, or auto with several widths'),
        ('{"costs": "x.json"}', 'costs: found "x.json", allowed is null without widths'),
        ('{"widths": [16, 32], "costs": "/nowhere.json"}', "costs: /nowhere.json: cannot be read"),
        ('{"mode": "unsafe"}', "allow_hybrid_unsafe"),
    ],
)
def test_an_error_names_the_variable_the_key_the_finding_and_the_remedy(text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        parse_config(text)
    assert VARIABLE in str(caught.value)


def test_shadow_scores_a_tree_of_its_own():
    assert parse_config('{"mode": "shadow"}').shadow_budget == 63
    assert parse_config('{"mode": "shadow", "budget": 7}').shadow_budget == 7
    assert not parse_config('{"mode": "shadow"}').verifies_tree


def test_several_widths_their_default_and_their_costs(tmp_path):
    config = parse_config('{"widths": [16, 32, 64]}')
    assert (config.widths, config.budgets, config.budget) == ((16, 32, 64), (15, 31, 63), None)
    assert parse_config('{"widths": [16, 32], "budget": 15}').budget == 15
    path = tmp_path / "costs.json"
    rows = {"16": {"1": 0.01}, "32": {"1": 0.02}}
    path.write_text(json.dumps({"schema": 1, "kind": "ddtree-step-costs", "seconds": rows}))
    auto = parse_config(json.dumps({"widths": [16, 32], "budget": "auto", "costs": str(path)}))
    assert auto.budget == AUTO
    assert auto.costs is not None
    assert auto.costs.seconds(32, 1) == 0.02
    with pytest.raises(ConfigError, match=r"costs: found .*it has none for \[64\]"):
        parse_config(json.dumps({"widths": [16, 64], "costs": str(path)}))


def test_one_width_has_no_budgets_to_choose_from():
    assert parse_config('{"budget": 31}').budgets == ()
