"""Step times at a 27B's shape: dummy weights, one server at a time, alone on the card."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from engine.arms import BLOCK, Arm, launch_argv, tree
from engine.host import Context
from engine.servers import START_LIMIT, Server

STEP_ARMS = ("step-ar", "step-dflash", "step-tree8", "step-tree16", "step-tree32", "step-tree64")
# For the stage `step-wy`: the arm on SGLang's kernels, then on ours. `chain` is the chain as a tree.
STEP_WY_ARMS = (
    *("step-dflash", "step-chain", "step-chain-wy"),
    *("step-tree16", "step-tree16-wy", "step-tree32", "step-tree32-wy", "step-tree64", "step-tree64-wy"),
)
QWEN36_27B = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DRAFTER_27B = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000000,
    "max_position_embeddings": 32768,
    "vocab_size": 248320,
    "layer_types": ["full_attention"] * 5,
    "block_size": BLOCK,
    "num_target_layers": 64,
    "dflash_config": {"mask_token_id": 248319, "target_layer_ids": [1, 16, 31, 46, 61]},
    "dtype": "bfloat16",
}
STEP_SERVER = """
--host 127.0.0.1 --attention-backend triton --sampling-backend pytorch --linear-attn-backend triton
--grammar-backend none --skip-tokenizer-init --load-format dummy --context-length 4096 --random-seed 1
--max-running-requests 2 --cuda-graph-bs-decode 1 2 --mem-fraction-static 0.85 --disable-radix-cache
--mamba-ssm-dtype float32 --disable-prefill-cuda-graph --watchdog-timeout 900
""".split()  # noqa: SIM905


def step_arm(name: str) -> Arm:
    kind = name.removeprefix("step-")
    if kind == "ar":
        return Arm()
    if kind == "dflash":
        return Arm("DFLASH")
    state = "wy" if kind.endswith("-wy") else "snapshot"
    kind = kind.removesuffix("-wy")
    if kind == "chain":
        return tree(BLOCK, topk=1, state=state)
    return tree(int(kind.removeprefix("tree")), state=state)


def step_argv(folder: Path, arm: Arm, port: int) -> list[str]:
    return launch_argv(folder, arm, port, STEP_SERVER)


def step_times(context: Context, arms: tuple[str, ...] = STEP_ARMS) -> list[str]:
    """One server at a time, alone on the card: seconds a step takes, and its stages, at batch 1 and 2."""
    folder = write_step_checkpoints(context.site)
    failures: list[str] = []
    port = 31000
    for name in arms:
        if context.seconds_left() < 170:
            context.left_over.append(name)
            continue
        port += 7
        arm = step_arm(name)
        server = Server(context, name, arm, port, step_argv(folder, arm, port))
        try:
            failures += serve_steps(context, server)
        except (
            OSError,
            ValueError,
            KeyError,
        ) as error:  # its server broke; the others are asked all the same
            print(f"{name}: FAILED {type(error).__name__}: {error}\n{server.why()}", flush=True)
            failures.append(name)
        finally:
            server.stop()
            context.save()
    return failures


def write_step_checkpoints(site: Path) -> Path:
    folder = site / "shapes"
    for name, config in (("target", QWEN36_27B), ("drafter", DRAFTER_27B)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def serve_steps(context: Context, server: Server) -> list[str]:
    if not server.wait(min(START_LIMIT, context.seconds_left() - 30)):
        print(f"{server.name}: NOT READY\n{server.why()}", flush=True)
        return [server.name]
    rng = random.Random(0)
    prompt = [rng.randrange(1000, 200000) for _ in range(200)]
    server.generate(prompt, 64)
    rows: dict[str, Any] = {"ready_seconds": server.ready_after}
    for batch in (1, 2):
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(batch) as pool:
            jobs = [pool.submit(server.generate, prompt, 256) for _ in range(batch)]
            answers = [job.result() for job in jobs]
        seconds = time.monotonic() - began
        # Random weights accept next to nothing: a step is a verify pass, or a token without speculation.
        passes = max(answer["meta_info"].get("spec_verify_ct") or 256 for answer in answers)
        rows[f"batch_{batch}"] = {"seconds": seconds, "steps": passes, "ms_per_step": 1e3 * seconds / passes}
    state = json.loads(server.get("/server_info"))["internal_states"][0]
    rows["ddtree"], rows["memory_usage"] = state.get("ddtree"), state.get("memory_usage")
    with contextlib.suppress(OSError, ValueError):
        rows["profile"] = profile(context, server, prompt)
    context.keep(server.name, "steps", rows)
    print(
        f"{server.name}: {json.dumps({k: v for k, v in rows.items() if k.startswith('batch')})}", flush=True
    )
    return []


def profile(context: Context, server: Server, prompt: list[int]) -> Any:
    """Ask SGLang for a kernel trace of some steps and add up time by kernel name."""
    folder = context.site / f"{server.name}.profile"
    server.post("/start_profile", {"output_dir": str(folder), "num_steps": 12, "activities": ["GPU"]})
    server.generate(prompt, 48)
    deadline = time.monotonic() + 30
    traces: list[Path] = []
    while not traces and time.monotonic() < deadline:
        time.sleep(1)
        traces = list(folder.rglob("*.json.gz"))
    if not traces:
        return None
    import gzip

    time.sleep(1)
    with gzip.open(traces[0], "rt") as file:
        events = json.load(file)["traceEvents"]
    totals: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    spans = []
    for event in events:
        if event.get("cat") == "kernel":
            totals[event["name"][:120]] += event["dur"]
            calls[event["name"][:120]] += 1
            spans.append((event["ts"], event["ts"] + event["dur"]))
    busy, reach = 0.0, 0.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    whole = max((end for _, end in spans), default=0.0) - min((start for start, _ in spans), default=0.0)
    kernels = [[name, calls[name], microseconds] for name, microseconds in totals.most_common(60)]
    return {"steps": 12, "busy_us": busy, "span_us": whole, "kernels": kernels}
