"""What counts as an idle card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ddtree_ops.deploy.down import IDLE_MIB, busy_cards
from ddtree_ops.hosts.facts import parse_facts, read_capture

CAPTURES = Path(__file__).parents[1] / "hosts" / "captures"


def test_cards_with_memory_or_processes_are_named() -> None:
    facts = parse_facts(read_capture(CAPTURES / "good.json"), name="a")
    first, second, *rest = (replace(gpu, used=3, processes=()) for gpu in facts.gpus)
    assert busy_cards(replace(facts, gpus=(first, second, *rest))) == []
    held = replace(first, used=IDLE_MIB + 1)
    shared = replace(second, processes=(4711, 4712))
    assert busy_cards(replace(facts, gpus=(held, shared, *rest))) == [
        f"GPU 0 holds {IDLE_MIB + 1} MiB",
        "GPU 1 holds 3 MiB (processes 4711, 4712)",
    ]
