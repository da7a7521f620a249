"""Tokenizer and token streams: BPE on the corpus, one uint16 stream to train on, held-out files apart."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pair.corpus import SourceFile

SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
EOS = 2
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Streams:
    """`train`: ids of all training files, each ended by EOS. `held_out`: one array per held-out file."""

    train: np.ndarray
    held_out: list[np.ndarray]
    held_out_sources: list[dict[str, str]]


def train_tokenizer(texts: Iterable[str], vocab: int) -> Any:
    """Byte-level BPE; the specials take the first ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def encode(tokenizer: Any, files: Sequence[SourceFile], batch: int = 500) -> Streams:
    train: list[np.ndarray] = []
    held_out: list[np.ndarray] = []
    sources: list[dict[str, str]] = []
    for i in range(0, len(files), batch):
        part = files[i : i + batch]
        for file, encoding in zip(part, tokenizer.encode_batch_fast([f.text for f in part]), strict=True):
            ids = np.array([*encoding.ids, EOS], dtype=np.uint16)
            if file.held_out:
                held_out.append(ids)
                sources.append({"package": file.package, "path": file.path, "licence": file.licence})
            else:
                train.append(ids)
    return Streams(np.concatenate(train), held_out, sources)


def pack(streams: Streams, path: Path) -> None:
    """Write an xz file: a JSON line with the sizes, then the little-endian uint16 ids."""
    header = {
        "train": len(streams.train),
        "held_out": [len(x) for x in streams.held_out],
        "sources": streams.held_out_sources,
    }
    body = np.concatenate([streams.train, *streams.held_out]).astype("<u2").tobytes()
    # Two-byte items: tell the match finder and the literal coder so.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "pb": 1, "lp": 1, "lc": 3, "dict_size": 1 << 27}]
    with lzma.open(path, "wb", filters=filters) as f:
        f.write(json.dumps(header).encode() + b"\n")
        f.write(body)


def unpack(path: Path) -> Streams:
    with lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb") as f:
        header = json.loads(f.readline())
        ids = np.frombuffer(f.read(), dtype="<u2")
    cuts = np.cumsum([header["train"], *header["held_out"]])
    if len(ids) != cuts[-1]:
        raise ValueError(f"{path.name}: {len(ids)} tokens, the header says {cuts[-1]}")
    pieces = np.split(ids, cuts[:-1])
    return Streams(pieces[0], pieces[1:], header["sources"])
