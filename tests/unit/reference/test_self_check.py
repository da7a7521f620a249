import math

import pytest
import torch
from ddtree_engine.reference import self_check
from ddtree_engine.reference.engine import Arm, Engine
from ddtree_engine.reference.errors import SelfCheckError
from ddtree_engine.reference.shape import tree_shape, unsafe_shape

KEYS = {
    "trees", "nodes", "width", "node_path_max_diff", "relative_to_range", "sibling_leak_max_diff",
    "sibling_leak_relative", "noise_max_diff", "noise_relative", "tolerance", "dtype", "passed", "seconds",
}  # fmt: skip


def test_forked_states_give_every_node_the_logits_of_its_path(engines):
    found = self_check.run(engines("ddtree"), trees=3, budget=31)
    assert (found.trees, found.width, found.passed) == (3, 32, True)
    assert found.nodes > 6
    assert 0 < found.relative_to_range < 1e-5
    assert found.sibling_leak_max_diff == 0
    assert 0 < found.noise_relative < 1e-5
    assert set(found.as_dict()) == KEYS
    self_check.require_passed(found)


def test_states_shared_in_row_order_are_seen_by_both_figures(engines):
    found = self_check.run(engines("unsafe"), trees=2, budget=31)
    assert not found.passed
    assert found.relative_to_range > 0.01
    assert found.sibling_leak_relative > 0.01


def test_a_server_whose_states_leak_is_stopped(engines, monkeypatch):
    monkeypatch.setattr(Engine, "shape_of", lambda self, tree: unsafe_shape(tree, 4))
    found = self_check.run(engines("ddtree"), trees=1, budget=31)
    with pytest.raises(SelfCheckError, match="node and path differ by"):
        self_check.require_passed(found)


def test_attention_that_sees_siblings_is_caught_too(engines, monkeypatch):
    """Only the mask leaks; the recurrent layers are right."""

    def leaking(self, tree):
        shape = tree_shape(tree, 4)
        return type(shape)(**{**vars(shape), "bias": torch.zeros_like(shape.bias)})

    monkeypatch.setattr(Engine, "shape_of", leaking)
    found = self_check.run(engines("ddtree"), trees=1, budget=15)
    assert found.sibling_leak_relative > 1e-3
    assert not found.passed


def test_not_a_number_is_not_a_pass(engines, monkeypatch):
    engine = engines("ddtree")
    monkeypatch.setattr(engine.target, "logits", lambda hidden: torch.full((len(hidden), 300), math.nan))
    found = self_check.run(engine, trees=1, budget=7)
    assert not found.passed
    assert found.as_dict()["relative_to_range"] is None


@pytest.mark.parametrize("arm", ["ar", "dflash", "shadow"])
def test_arms_that_verify_no_tree_have_nothing_to_check(engines, arm):
    assert self_check.run(engines(arm), trees=2, budget=31) is None


def test_bfloat16_is_held_to_what_rounding_can_do(tiny):
    engine = Engine.load(
        Arm.DDTREE, tiny / "target", tiny / "drafter", context_length=512, dtype=torch.bfloat16
    )
    found = self_check.run(engine, trees=2, budget=31)
    assert (found.dtype, found.tolerance, found.passed) == ("bfloat16", 0.08, True)
    assert max(found.relative_to_range, found.noise_relative) < 0.05
