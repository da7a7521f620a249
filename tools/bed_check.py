#!/usr/bin/env python3
"""Check the shipped pair's embedding at full width on a CPU: logits, features and drafts.

    python tools/bed_check.py                             # 16 layers, hidden 5120, all heads of the 27B
    python tools/bed_check.py --layers 64                 # the whole depth
    python tools/bed_check.py --layers 12 --inner 2048 --keep

A prompt, and a tree that the pair itself drafts after it. Layers are made when a pass comes to them and
dropped behind it: 12 GB with the drafter, and some minutes on two idle cores. The vocabulary is cut to 8192
rows, of which the pair has 4096. Prints one JSON line with the largest differences, float32 against float32.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from ddtree_engine.bed.embed import Filling
from ddtree_engine.bed.folders import beds_of, write_folders
from ddtree_engine.bed.shapes import DFLASH_27B, QWEN36_27B
from ddtree_engine.bed.source import BedSource
from ddtree_engine.reference import pair_path
from ddtree_engine.reference.cache import DrafterCache, TargetCache
from ddtree_engine.reference.config import read_drafter_config, read_target_config
from ddtree_engine.reference.drafter import Drafter
from ddtree_engine.reference.engine import Arm, Engine
from ddtree_engine.reference.layers import Rotary, columns
from ddtree_engine.reference.target import Target, TargetLayer, load_layer
from ddtree_engine.reference.text import TextCodec
from ddtree_engine.tree import build_tree
from torch import Tensor

POSITIONS, TOKENS, BUDGET, VOCABULARY = 512, 64, 31, 8192
CAPTURED = {12: (1, 4, 7, 9, 10), 16: (1, 5, 7, 9, 13), 64: DFLASH_27B.captured}


class Repeated(Filling):
    """Random numbers repeated from one block: drawing them takes time, and what they are changes nothing."""

    block = torch.empty(1 << 20).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))

    def tensor(self, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if kind != "random":
            return super().tensor(kind, name, shape, dtype)
        bound = (3 / shape[-1]) ** 0.5 if len(shape) > 1 else 1.0
        flat = torch.empty(math.prod(shape), dtype=dtype)
        for part in flat.split(len(self.block)):
            torch.mul(self.block[: len(part)], bound, out=part)
        return flat.view(shape)


def source_of(folder: Path) -> BedSource:
    """The wide weights of a folder, with those fillings."""
    source = BedSource.of_folder(folder)
    source.filling = Repeated(source.filling.seed, source.filling.dtype)
    return source


class Streamed:
    """The layers of a wide target, each made when it is reached; kept for the next pass if there is room."""

    def __init__(self, folder: Path, keep: bool) -> None:
        self.folder = folder
        self.keep = keep
        self.config = read_target_config(folder)
        self.made: list[TargetLayer] = []

    def __iter__(self) -> Iterator[TargetLayer]:
        if self.made:
            yield from self.made
            return
        source = source_of(self.folder)
        for index in range(len(self.config.layer_types)):
            layer = load_layer(source, self.config, "model.", index)
            if self.keep:
                self.made.append(layer)
            yield layer
            print(f"layer {index}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, choices=sorted(CAPTURED), default=16)
    parser.add_argument("--inner", type=int, default=QWEN36_27B.inner, help="FFN rows")
    parser.add_argument("--keep", action="store_true", help="keep made layers in memory for the second pass")
    options = parser.parse_args()
    began = time.monotonic()
    wide = replace(QWEN36_27B, layers=QWEN36_27B.layers[: options.layers], vocabulary=VOCABULARY)
    wide = replace(wide, inner=options.inner)
    wide_drafter = replace(
        DFLASH_27B, captured=CAPTURED[options.layers], target_layers=options.layers, vocabulary=VOCABULARY
    )
    wide_drafter = replace(wide_drafter, inner=options.inner)
    beds = beds_of(pair_path(), wide, wide_drafter)
    small = load_small(pair_path())
    tokens = prompt()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        write_folders(Path(folder), pair_path(), beds)
        expected = run(*small, tokens, None)
        found = run(*load_wide(Path(folder), options.keep), tokens, expected["tree"])
    result = {
        "layers": options.layers,
        "inner": options.inner,
        "places": beds.target.places,
        "prompt_tokens": len(tokens),
        "tree_nodes": len(expected["tree"].tokens),
        "seconds": round(time.monotonic() - began),
        "range": float(expected["verify"].max() - expected["verify"].min()),
    }
    print(json.dumps(result | compare(expected, found, wide.hidden)))
    return 0


def prompt() -> list[int]:
    """The first tokens of the pair's first prompt."""
    line = (pair_path() / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[0]
    return TextCodec.load(pair_path() / "target").encode(json.loads(line)["text"])[:TOKENS]


def load_small(pair: Path) -> tuple[Target, Drafter]:
    target = Target.load(pair / "target", torch.float32, POSITIONS)
    return target, Drafter.load(pair / "drafter", target.config, torch.float32, POSITIONS)


def load_wide(folder: Path, keep: bool) -> tuple[Target, Drafter]:
    source, layers = source_of(folder / "target"), Streamed(folder / "target", keep)
    config = layers.config
    shape = (config.vocab_size, config.hidden_size)
    target = Target(
        config,
        layers,  # type: ignore[arg-type]
        source.take("model.embed_tokens.weight", shape),
        1 + source.take("model.norm.weight", (config.hidden_size,)),
        columns(source.take("lm_head.weight", shape)),
        Rotary.of(config.rope_theta, config.rotary_dim, POSITIONS),
    )
    drafter_config = read_drafter_config(folder / "drafter", config)
    return target, Drafter.of(drafter_config, source_of(folder / "drafter"), POSITIONS)


def run(target: Target, drafter: Drafter, tokens: list[int], tree) -> dict:  # noqa: ANN001
    """A prefill, a draft after it and a pass over a tree: the draft's own, unless one is given."""
    engine = Engine(Arm.DDTREE, target, drafter)
    cache = TargetCache.empty(target.config, 2 * TOKENS, torch.float32)
    drafter_cache = DrafterCache.empty(drafter.config, 2 * TOKENS, torch.float32)
    prefilled = target.prefill(torch.tensor(tokens), cache)
    drafter.extend(prefilled.features, drafter_cache)
    logits = target.logits(prefilled.hidden)
    block = torch.full((drafter.config.block_size,), drafter.config.mask_token_id)
    block[0] = logits[-1].argmax()
    drafted = target.logits(drafter.hidden(target.embed(block), drafter_cache))
    if tree is None:
        values, ids = drafted[1:].log_softmax(dim=-1).topk(16)
        tree = build_tree(int(block[0]), ids.numpy(), values.numpy(), BUDGET)
    verified = target.verify(torch.from_numpy(tree.tokens), engine.shape_of(tree), cache)
    return {
        "tree": tree,
        "prefill": logits,
        "verify": target.logits(verified.hidden),
        "draft": drafted,
        "features": verified.features,
    }


def compare(expected: dict, found: dict, hidden: int) -> dict:
    """Largest differences of logits and log-probabilities; features against r times the small ones."""
    result: dict = {}
    for name in ("prefill", "verify", "draft"):
        mine, theirs = expected[name], found[name]
        known = theirs[:, : mine.shape[1]]
        result[name] = {
            "logits": float((mine - known).abs().max()),
            "log_probabilities": float(
                (mine.log_softmax(-1) - theirs.log_softmax(-1)[:, : mine.shape[1]]).abs().max()
            ),
            "unused_at_most": float(theirs[:, mine.shape[1] :].max()),
            "same_argmax": bool((mine.argmax(-1) == theirs.argmax(-1)).all()),
        }
    small = expected["features"].unflatten(1, (5, -1))
    features = found["features"].unflatten(1, (5, hidden))
    width = small.shape[-1]
    result["features"] = float((features[..., :width] / (hidden / width) ** 0.5 - small).abs().max())
    result["features_range"] = float(small.max() - small.min())
    result["features_elsewhere"] = float(features[..., width:].abs().max())
    return result


if __name__ == "__main__":
    raise SystemExit(main())
