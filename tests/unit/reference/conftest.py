"""One tiny pair for the whole run, and engines on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ddtree_engine.reference import pair_path
from ddtree_engine.reference.engine import Arm, Engine
from ddtree_engine.reference.requests import GenerateRequest
from ddtree_engine.reference.sampling import Sampler
from ddtree_engine.reference.text import TextCodec
from ddtree_engine.tree import Builder

from tests.support.tiny_pair import write_pair


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def codec(tiny: Path) -> TextCodec:
    return TextCodec.load(tiny / "target")


@pytest.fixture(scope="session")
def engines(tiny: Path) -> Callable[[str], Engine]:
    """Engines by arm on the tiny pair, loaded once."""
    loaded: dict[str, Engine] = {}

    def get(arm: str) -> Engine:
        if arm not in loaded:
            loaded[arm] = Engine.load(Arm(arm), tiny / "target", tiny / "drafter", context_length=512)
        return loaded[arm]

    return get


@pytest.fixture(scope="session")
def shipped(request: pytest.FixtureRequest) -> Path:
    """The shipped pair."""
    if not (pair_path() / "target" / "config.json").is_file():
        pytest.skip("the test pair is not in the package")
    return pair_path()


def make_request(prompt, tokens=40, *, budget=None, builder=Builder.BEST_FIRST, sampler=None, **more):
    return GenerateRequest(
        "r", tuple(prompt), tokens, sampler or Sampler(), budget=budget, builder=builder, **more
    )


def generate(engine, prompt, tokens=40, **more):
    """Output of exactly `tokens` tokens and the finished request."""
    running = engine.start(make_request(prompt, tokens, **more))
    while len(running.output) < tokens:
        engine.advance(running)
    return running.output[:tokens], running


def random_prompt(length, seed=0, low=4, high=260):
    make = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (length,), generator=make).tolist()
