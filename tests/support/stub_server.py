"""An SGLang-shaped server with the CPU engine's command line, a made-up model, and faults on demand.

Run as a real process: ``python stub_server.py --arm ddtree --port N [--fault ARM:NAME[:VALUE]]...``; ARM may
be ``*``. The next token is a hash of all tokens before it, so every lossless arm gives the same text;
candidate tables hold the true token at a random rank, and acceptance comes from real trees over them.

Faults: slow-start:S  never-ready  exit-at-start:CODE  dies-after:N  refuse-after:N[:FILE] (503)  cut:N (the
Nth stream) hang:N  delay:MS (each step)  no-spec  wrong-topk  args-drift:N  cached:N  diverge:POS  near-tie
simulate  loop  empty
incremental  secret  below-spine:N  idle-tree  no-steps  ignore-sigterm  nondeterministic
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from ddtree_engine.tree import Builder, build_tree, chain_accept, tree_accept

from ddtree_ops.services.checkpoints import checkpoint_sha256

VOCAB = 512
BLOCK = 16
TIE_GAP = 5e-5
CLEAR_GAP = 2.0
BF16_NOISE = 0.01


def digest(tokens: list[int], salt: str = "") -> int:
    """A number that depends on all tokens."""
    data = salt.encode() + np.asarray(tokens, dtype=np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def next_token(context: list[int]) -> int:
    return 2 + digest(context) % (VOCAB - 2)


def runner_up(context: list[int]) -> int:
    return 2 + (next_token(context) - 2 + 1 + digest(context, "second") % (VOCAB - 3)) % (VOCAB - 2)


def is_tie(context: list[int]) -> bool:
    return digest(context, "tie") % 5 == 0


def top_logprobs(context: list[int], count: int, noise: float) -> list[list[Any]]:
    gap = TIE_GAP if is_tie(context) else CLEAR_GAP
    first, second = next_token(context), runner_up(context)
    entries = [[-0.3 + noise, first, None], [-0.3 - gap, second, None]]
    others = [token for token in range(2, VOCAB) if token not in {first, second}]
    entries += [[-8.0 - 0.1 * n, token, None] for n, token in enumerate(others[: max(count - 2, 0)])]
    return entries[:count]


class Stub:
    """One server: arm, options and faults."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.faults = dict(self._faults(options.fault))
        self.started = time.monotonic()
        self.requests = 0

    def _faults(self, wishes: list[str]) -> Any:
        for wish in wishes:
            arm, _, rest = wish.partition(":")
            name, _, value = rest.partition(":")
            if arm in {"*", self.options.arm}:
                yield name, value

    def number(self, fault: str) -> float | None:
        return float(self.faults[fault]) if fault in self.faults else None

    def refuses_after(self) -> float | None:
        """`refuse-after:N[:FILE]`: the fault is mended once FILE exists."""
        limit, _, file = self.faults.get("refuse-after", "").partition(":")
        return float(limit) if limit and not (file and Path(file).exists()) else None

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/ready", self.ready),
                web.get("/health", self.ready),
                web.get("/server_info", self.server_info),
                web.post("/flush_cache", self.flush),
                web.post("/generate", self.generate),
            ]
        )
        return app

    async def ready(self, _: web.Request) -> web.Response:
        slow = self.number("slow-start") or 0.0
        ready = "never-ready" not in self.faults and time.monotonic() - self.started >= slow
        return web.Response(status=200 if ready else 503)

    async def flush(self, _: web.Request) -> web.Response:
        return web.Response(text="flushed")

    async def server_info(self, _: web.Request) -> web.Response:
        options, tree = self.options, self.options.arm in {"shadow", "ddtree", "unsafe"}
        drift = self.number("args-drift")
        wrong = "wrong-topk" in self.faults or (drift is not None and self.requests > drift)
        info: dict[str, Any] = {
            "version": "0.1.0",
            "model_path": str(options.model),
            "ddtree": {
                "engine": "reference",
                "arm": options.arm,
                "budget": options.budget if tree else None,
                "builder": options.builder if tree else None,
                "topk": (options.topk + 1 if wrong else options.topk) if tree else None,
                "block": BLOCK,
                "dtype": options.dtype,
                "allow_hybrid_unsafe": options.allow_hybrid_unsafe,
                "per_request_budget": tree,
                "model_sha256": checkpoint_sha256(options.model),
                "drafter_sha256": checkpoint_sha256(options.drafter) if options.drafter else None,
            },
        }
        if "simulate" in self.faults:
            info["internal_states"] = [{"env": {"SGLANG_SIMULATE_ACC_LEN": "3.5"}}]
        if "secret" in self.faults:
            info |= {
                "api_key": "sk-very-secret-value",
                "launch_command": "serve --api-key sk-very-secret-value",
            }
        return web.json_response(info)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests += 1
        dies, refuses = self.number("dies-after"), self.refuses_after()
        if dies is not None and self.requests > dies:
            print("CUDA error: an illegal memory access was encountered (scripted)", flush=True)
            os._exit(7)
        if refuses is not None and self.requests > refuses:
            return web.json_response(
                {"error": {"message": "queue full"}}, status=503, headers={"Retry-After": "1"}
            )
        if self.requests == self.number("hang"):
            await asyncio.sleep(3600)
        prompt = body.get("input_ids") or [2 + byte for byte in body["text"].encode()]
        chunks, meta = self.decode(prompt, body)
        if not body.get("stream"):
            return web.json_response(
                {"text": "", "output_ids": [token for chunk in chunks for token in chunk], "meta_info": meta}
            )
        return await self.stream(request, chunks, meta)

    async def stream(
        self, request: web.Request, chunks: list[list[int]], meta: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        cut, delay = self.requests == self.number("cut"), (self.number("delay") or 0.0) / 1000
        so_far: list[int] = []
        for number, chunk in enumerate(chunks):
            await asyncio.sleep(delay)
            so_far += chunk
            last = number == len(chunks) - 1
            partial = {"completion_tokens": len(so_far), "finish_reason": None}
            event = {
                "text": "",
                "output_ids": chunk if "incremental" in self.faults else so_far,
                "meta_info": meta if last else partial,
            }
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            if cut and number >= 1:
                assert request.transport is not None
                request.transport.close()
                return response
        await response.write(b"data: [DONE]\n\n")
        return response

    def decode(self, prompt: list[int], body: dict[str, Any]) -> tuple[list[list[int]], dict[str, Any]]:
        """Chunks of new tokens and the final meta_info of one request."""
        sampling = body["sampling_params"]
        output = self.output(prompt, sampling)
        custom = sampling.get("custom_params") or {}
        budget = custom.get("ddtree_budget", self.options.budget)
        steps, chunks = self.steps(prompt, output, budget)
        meta: dict[str, Any] = {
            "id": "stub",
            "finish_reason": {"type": "length", "length": len(output)},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(output),
            "cached_tokens": int(self.number("cached") or 0),
            "ddtree": self.figures(steps, budget, custom),
        }
        if self.options.arm != "ar" and "no-spec" not in self.faults and steps:
            accepted = [step["accepted"] for step in steps]
            meta |= {
                "spec_verify_ct": len(steps),
                "spec_num_correct_drafts": sum(accepted),
                "spec_num_proposed_drafts": len(steps) * (BLOCK - 1),
                "spec_correct_drafts_histogram": np.bincount(accepted).tolist(),
            }
        if body.get("return_logprob"):
            count = body.get("top_logprobs_num", 0)
            meta["output_top_logprobs"] = [
                top_logprobs([*prompt, *output[:n]], count, self.noise(n)) for n in range(len(output))
            ]
            if body.get("logprob_start_len") == 0:
                meta["input_token_logprobs"] = [[None, token, None] for token in prompt]
        return chunks, meta

    def noise(self, position: int) -> float:
        return BF16_NOISE if self.options.dtype == "bfloat16" and position else 0.0

    def output(self, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
        output: list[int] = []
        if "empty" in self.faults:
            return output
        diverge = self.number("diverge")
        diverge = 3 if diverge is None and self.options.arm == "unsafe" else diverge
        tie_open = "near-tie" in self.faults
        salt = f"{sampling.get('sampling_seed')}" if sampling["temperature"] > 0 else ""
        salt += str(self.requests) if "nondeterministic" in self.faults else ""
        for position in range(sampling["max_new_tokens"]):
            context = [*prompt, *output]
            token = next_token(context) if not salt else 2 + digest(context, salt) % (VOCAB - 2)
            if "loop" in self.faults:
                token = 5 + position % 3
            if tie_open and is_tie(context):
                token, tie_open = runner_up(context), False
            if diverge is not None and position >= diverge and not is_tie(context):
                token, diverge = runner_up(context), None
            output.append(token)
        return output

    def steps(
        self, prompt: list[int], output: list[int], budget: int
    ) -> tuple[list[dict[str, Any]], list[list[int]]]:
        """Verify steps over an output, and the chunks in which it is sent."""
        if self.options.arm == "ar":
            return [], [[token] for token in output] or [[]]
        steps, at = [], 1
        chunks = [output[:1]]
        while at < len(output):
            ids, logprobs = self.table(prompt, output, at)
            tree = build_tree(output[at - 1], ids, logprobs, budget, Builder(self.options.builder))
            truth = output[at:]
            chain, in_tree = chain_accept(ids[:, 0].tolist(), truth), tree_accept(tree, truth)
            verified = in_tree if self.options.arm in {"ddtree", "unsafe"} else chain
            accepted = min(verified, len(truth) - 1)
            steps.append(
                {
                    "accepted": accepted,
                    "chain": min(chain, len(truth) - 1),
                    "tree": min(in_tree, len(truth) - 1),
                    "nodes": tree.width,
                    "table": {"anchor": at - 1, "ids": ids.tolist(), "logprobs": logprobs.tolist()},
                }
            )
            chunks.append(output[at : at + accepted + 1])
            at += accepted + 1
        return steps, chunks

    def table(self, prompt: list[int], output: list[int], at: int) -> tuple[Any, Any]:
        """Candidates [F-1, K] after output[at - 1]: the truth at a random rank, mostly the first."""
        rng = np.random.default_rng(digest([*prompt, *output[:at]], "draft"))
        topk = self.options.topk
        ids = np.stack([rng.choice(VOCAB, topk, replace=False) for _ in range(BLOCK - 1)]).astype(np.int64)
        for depth in range(BLOCK - 1):
            if at + depth < len(output):
                truth = output[at + depth]
                rank = int(rng.choice([0, 1, 2, topk], p=[0.65, 0.15, 0.1, 0.1]))
                ids[depth][ids[depth] == truth] = 1
                if rank < topk:
                    ids[depth, rank] = truth
        fall = rng.uniform(1.0, 2.0, (BLOCK - 1, topk)).cumsum(axis=1)
        return ids, (-1.2 - (fall - fall[:, :1])).astype(np.float32)

    def figures(self, steps: list[dict[str, Any]], budget: int, custom: dict[str, Any]) -> dict[str, Any]:
        arm, tree = self.options.arm, self.options.arm in {"ddtree", "unsafe"}
        figures: dict[str, Any] = {
            "arm": arm,
            "budget": budget if arm not in {"ar", "dflash"} else None,
            "stage_seconds": {"draft": 0.001, "build": 0.001, "verify": 0.002, "commit": 0.001},
            "tree_nodes": sum(step["nodes"] for step in steps) if tree else 0,
            "tree_steps": len(steps) if tree and "idle-tree" not in self.faults else 0,
        }
        if arm == "ar":
            return figures
        below = sum(tree and step["tree"] < step["chain"] for step in steps) + int(
            self.number("below-spine") or 0
        )
        figures |= {
            "steps_below_spine": below,
            "steps_scored": len(steps),
            "spine_accept_length": float(np.mean([step["chain"] + 1 for step in steps])) if steps else None,
        }
        if arm == "shadow" and steps:
            trees = [step["tree"] for step in steps]
            figures["shadow_accept_length"] = float(np.mean(trees)) + 1
            figures["shadow_histogram"] = np.bincount(trees).tolist()
        if custom.get("ddtree_return_steps") and "no-steps" not in self.faults:
            figures["steps"] = [step["table"] for step in steps]
        return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("arm", "ddtree"), ("host", "127.0.0.1"), ("dtype", "float32")):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--builder", default="best-first")
    for name, default in (("port", 0), ("budget", 31), ("topk", 16), ("threads", 1), ("max-running", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("model", "drafter", "calibration"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--allow-hybrid-unsafe", action="store_true")
    parser.add_argument("--fault", action="append", default=[])
    stub = Stub(parser.parse_args())
    if "exit-at-start" in stub.faults:
        print("stub: cannot load the model (scripted)", file=sys.stderr, flush=True)
        sys.exit(int(stub.faults["exit-at-start"]))
    if "secret" in stub.faults:
        print("server_args: api_key='sk-very-secret-value' HF_TOKEN=hf_abcdefgh12345678", flush=True)
    if "ignore-sigterm" in stub.faults:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    handle = "ignore-sigterm" not in stub.faults
    print(f"stub {stub.options.arm} listening on {stub.options.port}", flush=True)
    web.run_app(
        stub.app(),
        host=stub.options.host,
        port=stub.options.port,
        print=None,
        handle_signals=handle,
        shutdown_timeout=1.0,
    )


if __name__ == "__main__":
    main()
