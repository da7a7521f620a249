"""Servers on the cards of one host: which cards each has, how ranks talk, and which layouts cannot be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.arms import Arm, launch_argv, tree

WIDTHS = (2, 4, 8)
# Requests in flight that a card can be given; a server over several cards takes theirs together.
RUNNING = 4
SERVER = """
--host 127.0.0.1 --attention-backend triton --sampling-backend pytorch --linear-attn-backend triton
--grammar-backend none --skip-tokenizer-init --context-length 2048 --random-seed 1 --disable-radix-cache
--mem-fraction-static 0.88 --max-total-tokens 32768 --mamba-ssm-dtype float32 --disable-prefill-cuda-graph
--watchdog-timeout 900
""".split()  # noqa: SIM905 - as it is typed
# NVLink multicast stays off: in NCCL, in torch's symmetric memory, in NVSHMEM; and nothing in SGLang that
# would turn it on. NCCL's log says what it did.
NCCL = (
    ("NCCL_NVLS_ENABLE", "0"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
    ("NCCL_IB_DISABLE", "1"),
    ("NCCL_DEBUG", "INFO"),
    # Other servers are on the cards, not the same on each.
    ("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0"),
)
RANKS = ["--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"]
ARMS: dict[str, Arm] = {
    "ar": Arm(),
    "dflash": Arm("DFLASH"),
    "shadow": Arm("DDTREE", None, {"mode": "shadow", "budget": 31}),
    "ddtree": tree(32, state="wy"),
}


@dataclass(frozen=True)
class Seat:
    """A server's name, arm and cards; ranks are in the cards' order."""

    name: str
    arm: str
    cards: tuple[int, ...]

    @property
    def tp(self) -> int:
        return len(self.cards)

    def served(self, environment: Sequence[tuple[str, str]] = ()) -> Arm:
        """The arm on these cards and no other; multicast is off for one rank, too."""
        visible = ("CUDA_VISIBLE_DEVICES", ",".join(map(str, self.cards)))
        return replace(ARMS[self.arm], environment=(*environment, *NCCL, visible))

    def argv(self, folder: Path, port: int) -> list[str]:
        """SGLang's command line; the port after `port` is its ranks'."""
        running = RUNNING * self.tp
        batches = [size for size in (1, 2, 4, 8, 16, 32) if size <= running]
        options = [*SERVER, "--tp-size", str(self.tp), "--nccl-port", str(port + 1)]
        options += ["--max-running-requests", str(running), "--max-mamba-cache-size", str(3 * running)]
        options += ["--cuda-graph-bs-decode", *map(str, batches), *(RANKS if self.tp > 1 else [])]
        return launch_argv(folder, ARMS[self.arm], port, options)


def single_seats(arms: Sequence[str], gpus: int) -> list[Seat]:
    """Every arm on every card, one rank each."""
    return [Seat(f"{arm}-c{card}", arm, (card,)) for arm in arms for card in range(gpus)]


def wide_seats(arm: str, tp: int, gpus: int) -> list[Seat]:
    """As many replicas of `tp` ranks as fit, of neighbouring cards."""
    groups = [tuple(range(first, first + tp)) for first in range(0, gpus - tp + 1, tp)]
    return [Seat(f"{arm}-tp{tp}-{index}", arm, cards) for index, cards in enumerate(groups)]


def side_by_side(arms: Sequence[str], gpus: int, position: int) -> list[str]:
    """Names of the servers that serve at a position: over `len(arms)` of them a card has every arm once."""
    return [f"{arms[(card + position) % len(arms)]}-c{card}" for card in range(gpus)]


def obstacle(folder: Path, tp: int) -> str | None:
    """Why the target or drafter in `folder` cannot be split over `tp` ranks; None where it can."""
    for part in ("target", "drafter"):
        config: Mapping[str, Any] = json.loads((folder / part / "config.json").read_text())
        config = config.get("text_config", config)
        whole = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
        for key in whole:
            if key in config and config[key] % tp:
                return f"{part}: {config[key]} {key} do not divide over {tp} ranks"
        kv = config["num_key_value_heads"]
        # Fewer heads than ranks are copied.
        if kv % tp and tp % kv:
            return (
                f"{part}: {kv} num_key_value_heads neither divide over {tp} ranks nor are a divisor of them"
            )
    return None
