"""Accept lengths of the shipped pair in the CPU engine's decode loop, fp32, with parity to plain decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from ddtree_engine.reference.engine import Arm, Engine
from ddtree_engine.reference.requests import GenerateRequest
from ddtree_engine.reference.sampling import Sampler
from ddtree_engine.tree import Builder
from pair.generate import loops
from tokenizers import Tokenizer

NEW_TOKENS = 64


def measure(
    pair: Path, prompts: Path, budgets: tuple[int, ...], builders: tuple[Builder, ...]
) -> dict[str, Any]:
    """Mean tokens per verify step (the prefill's token left out) per arm and budget over the prompts.

    `different` counts prompts whose output is not plain decoding's; `loops` those of plain decoding.
    """
    import torch

    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    with prompts.open(encoding="utf-8") as f:
        encoded = [tuple(tokenizer.encode(json.loads(line)["text"]).ids) for line in f]
    arms: list[tuple[str, Arm, int | None, Builder | None]] = [("ar", Arm.AR, None, None)]
    arms.append(("dflash", Arm.DFLASH, None, None))
    arms += [(f"{b.value} {n}", Arm.DDTREE, n, b) for b in builders for n in budgets]
    engines = {
        arm: Engine.load(arm, pair / "target", pair / "drafter", context_length=1024)
        for arm in {a[1] for a in arms}
    }
    truth: list[list[int]] = []
    out: dict[str, Any] = {"prompts": len(encoded), "new_tokens": NEW_TOKENS, "torch": torch.__version__}
    for name, arm, budget, builder in arms:
        lengths, different = [], 0
        for i, ids in enumerate(encoded):
            made, steps = decode(engines[arm], ids, budget, builder)
            if arm is Arm.AR:
                truth.append(made)
            different += made != truth[i]
            lengths.append((len(made) - 1) / steps)
        out[name] = {"accept_length": float(np.mean(lengths)), "different": different}
        print(name, out[name], flush=True)
    out["loops"] = sum(loops(x) for x in truth)
    return out


def decode(
    engine: Engine, ids: tuple[int, ...], budget: int | None, builder: Builder | None
) -> tuple[list[int], int]:
    """Greedy tokens, cut at NEW_TOKENS, and the number of steps after the prefill."""
    request = GenerateRequest(
        "measure", ids, NEW_TOKENS + 128, Sampler(temperature=0.0), budget=budget, builder=builder
    )
    sequence = engine.start(request)
    steps = 0
    while len(sequence.output) < NEW_TOKENS:
        prefill = sequence.in_prefill
        engine.advance(sequence)
        steps += not prefill
    return sequence.output[:NEW_TOKENS], steps
