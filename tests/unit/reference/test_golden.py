"""The target against transformers' implementation (see tools/make_reference_golden.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ddtree_engine.reference.cache import TargetCache
from ddtree_engine.reference.target import PREFILL_CHUNK, Target
from safetensors.torch import load_file

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def golden():
    target = Target.load(GOLDEN, torch.float32, 256)
    target.capture = tuple(range(len(target.layers)))
    return target, load_file(GOLDEN / "expected.safetensors")


def assert_matches(found, expected, tolerance=1e-5):
    assert (found - expected).abs().max() <= tolerance * (expected.max() - expected.min())


@torch.inference_mode()
def test_prefill_gives_transformers_logits_and_layer_outputs(golden):
    target, expected = golden
    cache = TargetCache.empty(target.config, 16, torch.float32)
    passes = [target.prefill(chunk, cache) for chunk in expected["prompt"].split(PREFILL_CHUNK)]
    assert_matches(torch.cat([target.logits(part.hidden) for part in passes]), expected["logits"])
    layers = torch.cat([part.features for part in passes]).unflatten(1, (len(target.layers), -1))
    # transformers reports the last layer's output after the final norm, so the fixture lacks it.
    for index in range(len(target.layers) - 1):
        assert_matches(layers[:, index], expected["layers"][index])


@torch.inference_mode()
def test_decoding_token_by_token_gives_the_same_logits(golden):
    target, expected = golden
    cache = TargetCache.empty(target.config, 16, torch.float32)
    steps = [target.logits(target.step(token, cache).hidden) for token in expected["prompt"].tolist()]
    # transformers ran in chunks: another order of the same sums, 150 tokens long.
    assert_matches(torch.cat(steps), expected["logits"], tolerance=1e-4)
