"""The one-launch verify of a GPU plan: right in the interpreter, so that a card judges the compiler."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from ddtree_kernels.bench_inputs import Shape

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

import one_launch

SHAPE = Shape(layers=1, heads=1, value_heads=2, key_dim=32, value_dim=48)


@pytest.mark.parametrize("width", [1, 5, 16, 20, 32, 33, 64])
def test_outputs_equal_forked_states(width):
    assert one_launch.error_of(width, (32, 16, 32, 1), torch.device("cpu"), SHAPE) < one_launch.RIGHT


def test_every_width_has_configurations_and_no_two_are_alike():
    tried = one_launch.configurations()
    assert {width for width, _ in tried} == set(one_launch.WIDTHS)
    assert len(set(tried)) == len(tried)


def test_a_configuration_that_faults_is_a_row_that_says_why(tmp_path):
    """Here without a card: the process of the check ends with an error."""
    row = one_launch.check(one_launch.OWN, 64, (64, 64, 32, 4), tmp_path)
    assert not row["right"]
    assert row["why"]
