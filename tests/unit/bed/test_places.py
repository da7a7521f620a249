"""Where the pair's layers go, and which shapes are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ddtree_engine.bed.embed import DrafterBed, TargetBed
from ddtree_engine.bed.places import layer_places
from ddtree_engine.bed.shapes import DFLASH_27B, QWEN36_27B, full_attention_interval, scale
from ddtree_engine.reference.config import FULL, LINEAR
from ddtree_engine.reference.errors import InputError

from tests.support.bed_pair import CONSTANT, SMALL, SMALL_DRAFTER, WIDE, WIDE_DRAFTER

L, F = LINEAR, FULL
PAIR = (L, L, L, F) * 2


def test_the_shipped_pairs_captured_layers_fall_on_those_of_a_27b_drafter():
    places = layer_places(PAIR, QWEN36_27B.layers, (1, 2, 3, 5, 6), DFLASH_27B.captured)
    assert places == (0, 1, 16, 31, 32, 46, 61, 63)
    assert [places[index] for index in (1, 2, 3, 5, 6)] == [1, 16, 31, 46, 61]


@pytest.mark.parametrize(
    ("small", "wide", "captured", "expected"),
    [
        ((L, F), (L, L, F), ((), ()), (0, 2)),
        ((L, L, F), (L, L, L, F), ((0,), (2,)), None),  # no second linear layer after the capture
        ((L, F), (L, F, L, F), ((0,), (1,)), (0, 3)),  # falls short of its place; the next one is past it
        ((L, L), (L, F, L, F, L), ((0,), (3,)), (2, 4)),
        ((F, L), (L, L, F), ((), ()), None),
    ],
)
def test_layers_keep_their_type_and_order_and_what_a_capture_sees(small, wide, captured, expected):
    if expected is None:
        with pytest.raises(InputError, match="is left in"):
            layer_places(small, wide, *captured)
        return
    assert layer_places(small, wide, *captured) == expected


@pytest.mark.parametrize(("layers", "interval"), [(PAIR, 4), ((L, F), 2), ((F, F), 1), ((L, F, L), 2)])
def test_every_nth_layer_is_full_attention(layers, interval):
    assert full_attention_interval(layers) == interval


@pytest.mark.parametrize("layers", [(L, L), (L, F, F), (L, F, L, L), (F, L)])
def test_layers_that_sglang_would_read_otherwise_are_refused(layers):
    with pytest.raises(InputError, match="every n-th"):
        full_attention_interval(layers)


@pytest.mark.parametrize(("wide", "root"), [(320, 1), (1280, 2), (5120, 4), (20480, 8)])
def test_the_scale_is_the_root_of_the_hidden_ratio(wide, root):
    assert scale(320, wide) == root


@pytest.mark.parametrize("wide", [640, 2880, 5121, 80])
def test_a_ratio_whose_root_rounds_is_refused(wide):
    with pytest.raises(InputError, match="hidden"):
        scale(320, wide)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"head_dim": 32}, "head_dim"),
        ({"taps": 3}, "taps"),
        ({"inner": 40}, "inner"),
        ({"vocabulary": 200}, "vocabulary"),
        ({"kv_heads": 1}, "kv_heads"),
        ({"kv_heads": 9}, "q_heads for each of kv_heads"),
        ({"key_heads": 9}, "value_heads for each of key_heads"),
        ({"q_heads": 10}, "q_heads"),
    ],
)
def test_a_target_that_the_pair_does_not_fit_into_is_refused_by_the_size(change, name):
    with pytest.raises(InputError, match=name):
        TargetBed.of(SMALL, replace(WIDE, **change), CONSTANT)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"captured": (1, 5)}, "captured"),
        ({"hidden": 512}, "drafter's hidden"),
        ({"target_layers": 11}, "target_layers"),
        ({"vocabulary": 1801}, "vocabulary"),
    ],
)
def test_a_drafter_that_does_not_fit_pair_or_target_is_refused(change, name):
    captured = (SMALL_DRAFTER.captured, WIDE_DRAFTER.captured)
    target = TargetBed.of(SMALL, WIDE, CONSTANT, captured)
    with pytest.raises(InputError, match=name):
        DrafterBed.of(SMALL_DRAFTER, replace(WIDE_DRAFTER, **change), target)
