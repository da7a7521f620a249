"""The small pair as the checkpoints that users have, and what is asked of them.

Same weights, other folders: the class of Qwen3.6-27B without and with a vision tower (tiny, of random
weights), a drafter whose window is short enough to matter, and configs that allow a long context.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
import struct
import urllib.error
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import ties

if TYPE_CHECKING:
    from engine.host import Context
    from engine.servers import Server

TEXT, VISION, WINDOW, LONG = "text", "vision", "window", "long"
# The pair's tokenizer has Qwen's names for them.
VISION_TOKENS = {
    "vision_start_token_id": 4,
    "vision_end_token_id": 5,
    "image_token_id": 6,
    "video_token_id": 7,
}
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
PATCH, MERGE, TOWER, GRID = 16, 2, 64, 8
INDEX = "model.safetensors.index.json"
# Shorter than the plan's prompts, and than what is drafted behind them.
SHORT_WINDOW = 64
LONG_POSITIONS = 40960
LONG_PROMPTS = (9_000, 33_000)
TOKENS = 64


def folder_of(kind: str, pair: Path, out: Path) -> Path:
    """`out`/`kind` with target/ and drafter/, written when it is not there yet."""
    folder = out / kind
    if not folder.is_dir():
        part = out / f"{kind}.part"
        shutil.rmtree(part, ignore_errors=True)
        WRITERS[kind](pair, part)
        part.replace(folder)
    return folder


def _write(pair: Path, out: Path, change: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
    """The pair's folders with their weights linked and every config through `change(name, config)`."""
    for name in ("target", "drafter"):
        folder = out / name
        folder.mkdir(parents=True)
        for path in (pair / name).iterdir():
            if path.name not in ("config.json", "tokenizer_config.json"):
                (folder / path.name).symlink_to(path.resolve())
        if name == "target":
            tokenizer = json.loads((pair / name / "tokenizer_config.json").read_text())
            tokenizer["model_max_length"] = LONG_POSITIONS
            (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        config = change(name, json.loads((pair / name / "config.json").read_text()))
        (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_text(pair: Path, out: Path) -> None:
    """`Qwen3_5ForConditionalGeneration` that declares itself text-only."""
    _write(pair, out, lambda name, config: conditional(config) if name == "target" else config)


def write_vision(pair: Path, out: Path) -> None:
    """The same class with a tower of one block, and what SGLang's image processor reads."""
    _write(pair, out, lambda name, config: conditional(config, vision=True) if name == "target" else config)
    target = out / "target"
    hidden = json.loads((target / "config.json").read_text())["vision_config"]["out_hidden_size"]
    write_tower(target, tower_shapes(hidden))
    side = PATCH * MERGE
    processor = {
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "size": {"shortest_edge": side * side, "longest_edge": 64 * side * side},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (target / "preprocessor_config.json").write_text(json.dumps(processor))
    video = processor | {"video_processor_type": "Qwen3VLVideoProcessor"}
    del video["image_processor_type"]
    (target / "video_preprocessor_config.json").write_text(json.dumps(video))


def write_window(pair: Path, out: Path) -> None:
    """A drafter whose sliding layers see `SHORT_WINDOW` tokens."""
    windows: dict[str, dict[str, Any]] = {"target": {}, "drafter": {"sliding_window": SHORT_WINDOW}}
    _write(pair, out, lambda name, config: config | windows[name])


def write_long(pair: Path, out: Path) -> None:
    """Configs that allow positions up to `LONG_POSITIONS`; the pair was trained on far fewer."""
    _write(pair, out, lambda _, config: config | {"max_position_embeddings": LONG_POSITIONS})


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    TEXT: write_text,
    VISION: write_vision,
    WINDOW: write_window,
    LONG: write_long,
}


def conditional(text: dict[str, Any], *, vision: bool = False) -> dict[str, Any]:
    """The config of `Qwen3_5ForConditionalGeneration` around a text config, as Qwen3.6-27B's is nested."""
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": text["dtype"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        **VISION_TOKENS,
    }
    if not vision:
        return config | {"language_model_only": True}
    return config | {
        "vision_config": {
            "model_type": "qwen3_5",
            "depth": 1,
            "hidden_size": TOWER,
            "num_heads": 1,
            "intermediate_size": TOWER,
            "in_channels": 3,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": GRID * GRID,
            "deepstack_visual_indexes": [],
            "hidden_act": "gelu_pytorch_tanh",
        }
    }


def tower_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """The tensors of the tower by their names in a checkpoint; `hidden` is the text model's width."""
    merged = TOWER * MERGE * MERGE
    linear = {
        "blocks.0.attn.qkv": (3 * TOWER, TOWER),
        "blocks.0.attn.proj": (TOWER, TOWER),
        "blocks.0.mlp.linear_fc1": (TOWER, TOWER),
        "blocks.0.mlp.linear_fc2": (TOWER, TOWER),
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (hidden, merged),
        "patch_embed.proj": (TOWER, 3, 2, PATCH, PATCH),
        "blocks.0.norm1": (TOWER,),
        "blocks.0.norm2": (TOWER,),
        "merger.norm": (TOWER,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.visual.pos_embed.weight": (GRID * GRID, TOWER)}
    for name, shape in linear.items():
        shapes[f"model.visual.{name}.weight"] = shape
        shapes[f"model.visual.{name}.bias"] = shape[:1]
    return shapes


def write_tower(target: Path, shapes: dict[str, tuple[int, ...]], seed: int = 0) -> None:
    """Add a safetensors file of random bfloat16 to a checkpoint, and to its index."""
    rng = random.Random(seed)
    header: dict[str, Any] = {}
    content = bytearray()
    for name, shape in shapes.items():
        start, count = len(content), 1
        for size in shape:
            count *= size
        middle = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        values = struct.pack(f"<{count}f", *(rng.gauss(middle, 0.1) for _ in range(count)))
        # The upper halves of float32.
        halves = bytearray(2 * count)
        halves[0::2], halves[1::2] = values[2::4], values[3::4]
        content += halves
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, len(content)]}
    said = json.dumps(header).encode()
    (target / "visual.safetensors").write_bytes(struct.pack("<Q", len(said)) + said + content)
    index = json.loads((target / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(shapes, "visual.safetensors")
    (target / INDEX).unlink()
    (target / INDEX).write_text(json.dumps(index))


def picture(seed: int, width: int = 96, height: int = 64) -> str:
    """A data URL of a PNG of coloured squares."""
    rng = random.Random(seed)
    colours = [
        [bytes(rng.randrange(256) for _ in range(3)) for _ in range(width // 16)] for _ in range(height // 16)
    ]
    rows = b"".join(b"\0" + b"".join(colour * 16 for colour in colours[y // 16]) for y in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()


# -- what is asked --------------------------------------------------------------------------------


def images(context: Context, server: Server) -> Any:
    """Prompts behind a picture, alone and beside text in one batch, greedy, with the best tokens of a place.

    A refusal is a row as well: its status and what it says.
    """
    from engine.workloads import at_once

    lines = (context.options.pair / "prompts.jsonl").read_text().splitlines()[:4]
    asked = [
        {"text": f"{IMAGE}\n{json.loads(line)['text'][:400]}", "image_data": [picture(number)]}
        for number, line in enumerate(lines)
    ]
    mixed: list[dict[str, Any]] = [*asked, *({"input_ids": ids} for ids in context.prompts[:4])]
    return {
        "alone": [_answer(server, body) for body in mixed],
        "together": at_once(lambda body: _answer(server, body), mixed),
    }


def long(context: Context, server: Server) -> Any:
    """Prompts of thousands of tokens, alone and then two at once; with a cache the second round hits it."""
    from engine.workloads import at_once

    text = [token for ids in context.prompts for token in ids]
    text *= 1 + max(LONG_PROMPTS) // len(text)
    bodies = [{"input_ids": text[:length]} for length in LONG_PROMPTS]
    return {
        "alone": [_answer(server, body) for body in bodies],
        "together": at_once(lambda body: _answer(server, body), bodies),
    }


def _answer(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    try:
        answer = server.post(
            "/generate",
            {**body, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 8},
        )
    except urllib.error.HTTPError as error:
        return {"status": error.code, "body": error.read().decode(errors="replace")[:600]}
    meta = answer["meta_info"]
    return {
        "output_ids": answer["output_ids"],
        "best": meta["output_top_logprobs"],
        "prompt_tokens": meta["prompt_tokens"],
        "spec_verify_ct": meta.get("spec_verify_ct"),
    }


# -- and how it is judged -------------------------------------------------------------------------


def against(mine: dict[str, list[Any]], theirs: dict[str, list[Any]]) -> dict[str, Any]:
    """Answers of `images` or `long` against those of plain decoding.

    `gaps` has one entry a first difference: how far the worse token lies below the reference's best one, None
    where it is not among the best eight. Both rounds are compared with the reference's answers alone.
    """
    gaps: list[float | None] = []
    refused: list[str] = []
    same = compared = 0
    for row, other in _rows(mine, theirs["alone"]):
        if "status" in row or "status" in other:
            refused.append(f"{row.get('status', 200)}, reference {other.get('status', 200)}")
            continue
        compared += 1
        parted = [
            place
            for place, pair in enumerate(zip(row["output_ids"], other["output_ids"], strict=True))
            if len(set(pair)) > 1
        ]
        same += not parted
        if parted:
            tokens = [answer["output_ids"][parted[0]] for answer in (row, other)]
            gaps.append(ties.gap(other["best"][parted[0]], tokens))
    steps = [row["spec_verify_ct"] for row in mine["alone"] if row.get("spec_verify_ct")]
    tokens_a_step = TOKENS * len(steps) / sum(steps) if steps else None
    return {
        "compared": compared,
        "identical": same,
        "gaps": gaps,
        "refused": refused,
        "accept_length": tokens_a_step,
    }


def _rows(mine: dict[str, list[Any]], reference: list[Any]) -> Iterable[tuple[Any, Any]]:
    for rows in mine.values():
        yield from zip(rows, reference, strict=True)
