"""Stores that several test modules read; each is made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.make_store import make_store


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What quickstart makes, in small: all arms, one failed and one invalid cell, a near-tie, two repeats."""
    return make_store(
        tmp_path_factory.mktemp("stores") / "mixed",
        prompts=10,
        repeats=2,
        failed={("shadow", 15): "connection reset by the server"},
        invalid={("ddtree", 7): "12 prompt tokens came from the prefix cache"},
        near_ties={("ddtree", 63): 1},
    )


@pytest.fixture(scope="session")
def clean_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every cell complete, every output equal to ar's, 20 prompts."""
    return make_store(tmp_path_factory.mktemp("stores") / "clean", prompts=20)
