"""Which servers there are, what each stage asks of them, and their command lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

BLOCK = 16
SERVER = """
--host 127.0.0.1 --attention-backend triton --sampling-backend pytorch --linear-attn-backend triton
--max-running-requests 8 --cuda-graph-bs-decode 1 2 4 8 --context-length 2048 --random-seed 1
--mamba-ssm-dtype float32 --disable-prefill-cuda-graph --enable-metrics --watchdog-timeout 900
""".split()  # noqa: SIM905 - as it is typed
SMALL_POOLS = "--mem-fraction-static 0.88 --max-total-tokens 32768 --max-mamba-cache-size 96".split()  # noqa: SIM905
DRAFTING = ["--speculative-draft-attention-backend", "triton"]


@dataclass(frozen=True)
class Arm:
    """One way of serving: `algorithm` None is plain decoding; `config` is SGLANG_DDTREE_CONFIG."""

    algorithm: str | None = None
    width: int | None = None
    config: dict[str, Any] | None = None
    flags: tuple[str, ...] = ("--disable-radix-cache", "--grammar-backend", "none")
    environment: tuple[tuple[str, str], ...] = ()
    # Of the small pair, the folders that `checkpoints` writes; None is the pair as it is.
    kind: str | None = None
    # How many of the plan's prompts it is asked; None for all.
    prompts: int | None = None


def tree(
    width: int,
    builder: str = "best-first",
    *,
    topk: int = 16,
    flags: tuple[str, ...] = Arm.flags,
    **config: Any,
) -> Arm:
    keys = {"mode": "tree", "topk": topk, "builder": builder, "state": "snapshot", "self_check": 0, **config}
    return Arm("DDTREE", width, keys, flags)


CACHED = ("--grammar-backend", "none")
# SGLang's own attention for towers: the default needs kernels that a bundle does not carry.
PICTURES = (*Arm.flags, "--mm-attention-backend", "triton_attn")
LONG_OPTIONS = "--context-length 40000 --max-total-tokens 98304 --chunked-prefill-size 8192".split()  # noqa: SIM905
LONG = (*Arm.flags, *LONG_OPTIONS)
FP8 = (*Arm.flags, "--quantization", "fp8")
# As long as FP8 is asked for on the command line, the drafter takes it from the target.
FP8_TARGET = (*FP8, "--speculative-draft-model-quantization", "unquant")
FP8_CACHE = (*Arm.flags, "--kv-cache-dtype", "fp8_e4m3")
# Widths of 12 and 320 columns, and a bundle's few kernels: SGLang's FP8 product in Triton takes all of them.
TRITON_FP8 = (("USE_TRITON_W8A8_FP8_KERNEL", "1"),)
# SGLang's norms and activations know 16 bits only; in torch they take any.
PLAIN_OPS = (("SGLANG_FORCE_FUSED_OP_BACKEND", "torch"),)
EAGER = (*Arm.flags, "--disable-cuda-graph")
PAGES = (*CACHED, "--page-size", "16")
GRAMMAR = ("--disable-radix-cache", "--grammar-backend", "xgrammar")
# Enough where an arm differs from a gate's in one thing.
FEW = 16
ARMS: dict[str, Arm] = {
    "ar": Arm(),
    "dflash": Arm("DFLASH"),
    "shadow": Arm("DDTREE", None, {"mode": "shadow", "budget": 63}),
    "chain": tree(BLOCK, topk=1),
    "tree16-eager": tree(16, flags=EAGER),
    "tree8": tree(8),
    "tree16": tree(16),
    "tree16-torch": tree(16, build_kernel="torch"),
    # With the cache on, as it is served, and with the start-up self-check, as users start it.
    "tree16-cached": tree(16, flags=CACHED, self_check=2),
    "tree32": tree(32),
    "tree64": tree(64),
    "tree16-check": tree(16, self_check=100),
    "tree32-check": tree(32, self_check=100),
    "tree64-check": tree(64, self_check=25),
    "tree32-spine": tree(32, "spine-first"),
    "tree64-spine": tree(64, "spine-first"),
    "tree32-log": tree(32, step_log="@steps"),
    "tree32-log-float32": replace(
        tree(32, step_log="@steps", flags=(*Arm.flags, "--dtype", "float32")), environment=PLAIN_OPS
    ),
    "tree32-fused-move": Arm(
        "DDTREE",
        32,
        tree(32).config,
        environment=(("SGLANG_NATIVE_MOVE_KV_CACHE", "0"),),
    ),
    "tree32-cached": tree(32, flags=CACHED),
    "tree32-pages": tree(32, flags=PAGES),
    "tree32-grammar": tree(32, flags=GRAMMAR, state="wy"),
    "unsafe32": tree(32, mode="unsafe", allow_hybrid_unsafe=True),
    # States replayed at commit instead of kept for every node; each beside the arm without `-wy`.
    "chain-wy": tree(BLOCK, topk=1, state="wy"),
    "tree16-wy": tree(16, state="wy"),
    "tree32-wy": tree(32, state="wy"),
    "tree64-wy": tree(64, state="wy"),
    "tree64-wy-check": tree(64, state="wy", self_check=25),
    "tree32-cached-wy": tree(32, flags=CACHED, state="wy"),
    "tree32-pages-wy": tree(32, flags=PAGES, state="wy"),
    # Three widths in one server, forced by requests; picked by the policy from what the first one measured.
    # The start-up self-check looks at every width.
    "tree64-widths": tree(64, widths=[16, 32, 64], self_check=4),
    "tree64-widths-wy": tree(64, widths=[16, 32, 64], state="wy", self_check=4),
    "tree64-auto": tree(64, widths=[16, 32, 64], budget="auto", costs="@tree64-widths.costs.json"),
    # The same pair as the checkpoints that users have.
    **{
        name: replace(arm, prompts=FEW)
        for name, arm in {
            "tree32-text": replace(tree(32, state="wy", self_check=4), kind="text"),
            "tree32-vision": replace(tree(32, flags=PICTURES, self_check=4), kind="vision"),
            "tree32-vision-wy": replace(tree(32, flags=PICTURES, state="wy", self_check=4), kind="vision"),
            "ar-vision": Arm(flags=PICTURES, kind="vision"),
            "dflash-window": Arm("DFLASH", kind="window"),
            "tree32-window": replace(tree(32, state="wy"), kind="window"),
            "tree32-long": replace(tree(32, flags=LONG, state="wy", self_check=4), kind="long"),
            "dflash-long": Arm("DFLASH", flags=LONG, kind="long"),
            "ar-long": Arm(flags=LONG, kind="long"),
            "ar-fp8": Arm(flags=FP8, environment=TRITON_FP8),
            "tree32-fp8": replace(tree(32, flags=FP8_TARGET, self_check=4), environment=TRITON_FP8),
            "tree32-fp8-wy": replace(
                tree(32, flags=FP8_TARGET, state="wy", self_check=4), environment=TRITON_FP8
            ),
            "tree32-fp8-drafter": replace(tree(32, flags=FP8), environment=TRITON_FP8),
            "ar-kv8": Arm(flags=FP8_CACHE),
            "tree32-kv8": tree(32, flags=FP8_CACHE, state="wy", self_check=4),
        }.items()
    },
    "ar-tp2": Arm(flags=(*Arm.flags, "--tp-size", "2")),
    "tree32-tp2": tree(32, flags=(*Arm.flags, "--tp-size", "2")),
}

# Stage -> arms and what each has to serve. `ar` is the reference and answers questions about ties.
STAGES: dict[str, dict[str, list[str]]] = {
    # What fails to start here is started again in simpler ways, which says where to look (diagnosis.py).
    "smoke": {
        "ar": ["greedy"],
        "dflash": ["greedy"],
        "shadow": ["greedy", "info"],
        "chain": ["greedy", "info"],
        "tree16": ["greedy", "padded", "kinds", "info"],
        "tree16-cached": ["greedy", "cache", "info"],
        "tree32": ["greedy", "info"],
    },
    # Plain decoding alone, to be asked about the ties of an earlier run (`--earlier`).
    "referee": {"ar": []},
    # The same trees without graphs, and from the builder in torch.
    "paths": {
        "tree16": ["greedy", "info"],
        "tree16-eager": ["greedy", "info"],
        "tree16-torch": ["greedy", "info"],
    },
    "a": {"dflash": ["greedy"], "shadow": ["greedy", "info"]},
    "b": {"dflash": ["greedy"], "chain": ["greedy", "info"]},
    "c": {"tree16-check": ["info"], "tree32-check": ["info"], "tree64-check": ["info"]},
    "d": {
        "ar": ["greedy", "ties"],
        "dflash": ["greedy"],
        "tree8": ["greedy", "info"],
        "tree16": ["greedy", "info"],
        "tree32": ["greedy", "info"],
        "tree64": ["greedy", "info"],
        "tree32-fused-move": ["greedy", "info"],
    },
    "e": {"tree32-log": ["greedy", "info", "steps"]},
    # The same without bfloat16's rounding: compare_steps.py --arm tree32-log-float32.
    "e-float32": {"tree32-log-float32": ["greedy", "info", "steps"]},
    "f": {
        "tree32-spine": ["greedy", "info"],
        "tree64-spine": ["greedy", "info"],
        "tree32": ["greedy", "info"],
    },
    "g": {"tree32": ["greedy", "info"]},
    "h": {
        "ar": ["greedy", "ties"],
        "tree32-cached-wy": ["greedy", "cache", "lengths", "batches", "aborts", "load", "info"],
        "tree32-pages-wy": ["greedy", "cache", "lengths", "info"],
        "tree32-cached": ["greedy", "cache", "lengths", "batches", "aborts", "info"],
        "tree32-pages": ["greedy", "cache", "lengths", "info"],
    },
    "features": {
        "ar": ["greedy", "features", "ties"],
        "tree32-grammar": ["greedy", "features", "grammar", "refusals", "fixtures", "kinds", "info"],
        "shadow": ["greedy", "refusals"],
    },
    # What is counted comes before the draws, which would be counted too.
    "i": {
        "ar": ["draws"],
        "tree32": ["greedy", "info", "draws"],
        "tree32-wy": ["greedy", "info", "draws"],
        "dflash": ["greedy", "draws"],
    },
    "j": {"ar": ["greedy", "ties"], "tree32": ["greedy", "info"], "unsafe32": ["greedy", "info"]},
    # Stored states and replayed ones in one run: tokens, accept lengths, seconds a step, bytes.
    "wy": {
        "ar": ["greedy", "ties"],
        "dflash": ["greedy"],
        "chain": ["greedy", "info"],
        "chain-wy": ["greedy", "info"],
        "tree16": ["greedy", "padded", "info"],
        "tree16-wy": ["greedy", "padded", "info"],
        "tree32": ["greedy", "info"],
        "tree32-wy": ["greedy", "info"],
        "tree64": ["greedy", "info"],
        "tree64-wy": ["greedy", "info"],
        "tree64-wy-check": ["info"],
        "tree32-cached": ["greedy", "cache", "lengths", "batches", "info"],
        "tree32-cached-wy": ["greedy", "cache", "lengths", "batches", "load", "info"],
    },
    # Gate d of replayed states.
    "d-wy": {
        "ar": ["greedy", "ties"],
        "dflash": ["greedy"],
        "chain-wy": ["greedy", "info"],
        "tree16-wy": ["greedy", "padded", "info"],
        "tree32-wy": ["greedy", "info"],
        "tree64-wy": ["greedy", "info"],
        "tree64-wy-check": ["info"],
    },
    # Not in one group with the arm that it reads from: `tree64-auto` comes last.
    "widths": {
        "ar": ["greedy", "ties"],
        "tree64-widths": ["widths", "info"],
        "tree16": ["greedy"],
        "tree32": ["greedy"],
        "tree64": ["greedy"],
        "tree64-auto": ["auto", "info"],
    },
    "widths-wy": {
        "ar": ["greedy", "ties"],
        "tree64-widths-wy": ["widths", "info"],
        "tree16-wy": ["greedy"],
        "tree32-wy": ["greedy"],
        "tree64-wy": ["greedy"],
    },
    "checkpoints": {
        "ar": ["greedy", "ties"],
        "tree32": ["greedy", "info"],
        "tree32-text": ["greedy", "info"],
        "tree32-vision": ["greedy", "images", "info"],
        "ar-vision": ["images"],
        "tree32-vision-wy": ["greedy", "images", "info"],
        "dflash-window": ["greedy"],
        "tree32-window": ["greedy", "info"],
        "ar-long": ["long"],
        "tree32-long": ["long", "info"],
        "dflash-long": ["long"],
    },
    "fp8": {
        "ar-fp8": ["greedy", "ties"],
        "tree32-fp8": ["greedy", "info"],
        "tree32-fp8-wy": ["greedy", "info"],
        "tree32-fp8-drafter": ["greedy", "info"],
    },
    "kv8": {"ar-kv8": ["greedy", "ties"], "tree32-kv8": ["greedy", "info"]},
    "k": {"ar-tp2": ["greedy", "ties"], "tree32-tp2": ["greedy", "info"]},
}
# Not an arm's workloads: servers of their own, asked when all others have ended.
EXTRA_STAGES = ("profile",)


def plan_of(stages: list[str]) -> dict[str, list[str]]:
    """Arm -> its workloads, in the order of the stages."""
    allowed = [*STAGES, *EXTRA_STAGES]
    unknown = [stage for stage in stages if stage not in allowed]
    if unknown:
        raise SystemExit(f"--stages: found {', '.join(unknown)}, allowed are {', '.join(allowed)}")
    work: dict[str, list[str]] = {}
    for stage in stages:
        for arm, workloads in STAGES.get(stage, {}).items():
            mine = work.setdefault(arm, [])
            mine += [name for name in workloads if name not in mine]
    return work


def argv_of(pair: Path, arm: Arm, port: int) -> list[str]:
    """SGLang's command line for an arm on the small pair in folder `pair`."""
    return launch_argv(pair, arm, port, [*SERVER, *SMALL_POOLS, *arm.flags])


def launch_argv(folder: Path, arm: Arm, port: int, options: Sequence[str]) -> list[str]:
    """SGLang's command line for an arm on `folder`'s target and drafter, with the server's own options."""
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder / "target")]
    argv += ["--port", str(port), *options]
    if arm.algorithm is not None:
        argv += ["--speculative-algorithm", arm.algorithm, *DRAFTING]
        argv += ["--speculative-draft-model-path", str(folder / "drafter")]
    if arm.width is not None:
        argv += ["--speculative-num-draft-tokens", str(arm.width)]
    return argv
