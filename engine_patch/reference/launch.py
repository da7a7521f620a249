"""Put the parts together and serve until a signal asks to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import uvicorn
from ddtree_engine.reference.answers import Answers
from ddtree_engine.reference.auth import VARIABLE, RequireKey
from ddtree_engine.reference.checkpoint import fingerprint
from ddtree_engine.reference.engine import Arm, Engine
from ddtree_engine.reference.metrics import Metrics
from ddtree_engine.reference.requests import Limits
from ddtree_engine.reference.scheduler import Scheduler
from ddtree_engine.reference.self_check import require_passed
from ddtree_engine.reference.self_check import run as run_self_check
from ddtree_engine.reference.server import Service
from ddtree_engine.reference.text import TextCodec
from ddtree_engine.tree import Builder, Calibration

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def serve(
    listener: socket.socket,
    *,
    arm: str,
    budget: int,
    builder: str,
    topk: int,
    calibration: Calibration | None,
    dtype: str,
    model: Path,
    drafter: Path,
    max_running: int,
    max_queue: int,
    context_length: int,
    threads: int,
    self_check: int,
    drain_seconds: float,
    served_model_name: str | None,
    allow_hybrid_unsafe: bool,
) -> int:
    """Load, warm up and serve on the bound socket `listener`; 0 after SIGTERM or SIGINT and a drain.

    Raises `InputError` for checkpoints and options that don't fit.
    """
    started = time.monotonic()
    kind = Arm(arm)
    engine = Engine.load(
        kind,
        model,
        drafter,
        context_length=context_length,
        topk=topk,
        calibration=calibration,
        dtype=DTYPES[dtype],
    )
    block = engine.drafter.config.block_size if engine.drafter else None
    checked = run_self_check(engine, trees=self_check, budget=budget)
    if checked is not None:
        log.info("self-check: %s", checked.as_dict())
    if kind is not Arm.UNSAFE:  # whose figures are the ablation's and are wrong by construction
        require_passed(checked)
    codec = TextCodec.load(model)
    name = served_model_name or model.resolve().name
    eos = frozenset(engine.target.config.eos_token_ids) | (
        {codec.eos_id} if codec.eos_id is not None else set()
    )
    limits = Limits(
        context_length=context_length,
        vocab_size=engine.target.config.vocab_size,
        arm=kind.value,
        per_request=kind.builds_tree,
        default_budget=budget if kind.builds_tree else None,
        default_builder=Builder(builder) if kind.builds_tree else None,
        calibrated=calibration is not None,
        eos_ids=eos,
    )
    info: dict[str, Any] = {
        "version": _version(),
        "model_path": str(model),
        "tokenizer_path": str(model),
        "served_model_name": name,
        "arm": kind.value,
        "context_length": context_length,
        "max_running_requests": max_running,
        "max_queued_requests": max_queue,
        "dtype": dtype,
        "speculative_algorithm": None if kind is Arm.AR else "DFLASH" if kind is Arm.DFLASH else "DDTREE",
        "speculative_draft_model_path": str(drafter) if kind.drafts else None,
        "ddtree": {
            "engine": "reference",
            "arm": kind.value,
            "budget": limits.default_budget,
            "builder": builder if kind.builds_tree else None,
            "topk": topk if kind.drafts else None,
            "block": block,
            "dtype": dtype,
            "threads": threads,
            "allow_hybrid_unsafe": allow_hybrid_unsafe,
            "per_request_budget": kind.builds_tree,
            "model_sha256": fingerprint(model),
            "drafter_sha256": fingerprint(drafter) if kind.drafts else None,
            "self_check": checked.as_dict() if checked is not None else None,
        },
    }
    metrics = Metrics(kind, name)
    scheduler = Scheduler(engine, codec, metrics, max_running=max_running, max_queue=max_queue)
    service = Service(scheduler, codec, Answers(kind, codec, name, topk, block), metrics, limits, info)
    if kind is Arm.UNSAFE:
        log.warning("arm unsafe: recurrent states leak between siblings, OUTPUT IS WRONG")
    scheduler.start()
    log.info("loaded in %.1f s: arm %s, model %s, %s", time.monotonic() - started, kind.value, model, dtype)
    try:
        asyncio.run(_run(service, scheduler, listener, drain_seconds))
    finally:
        scheduler.stop()
        listener.close()
    log.info("stopped")
    return 0


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: it would end the process by the signal instead of by exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run(service: Service, scheduler: Scheduler, listener: socket.socket, drain_seconds: float) -> None:
    key = os.environ.pop(VARIABLE, "")  # not for children, and not for a debugger's dump of the environment
    config = uvicorn.Config(
        RequireKey(service.app(), key) if key else service.app(),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop() -> None:
        if stopping.is_set():
            scheduler.abort(None)  # asked twice: don't wait for running requests
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    asked = asyncio.create_task(stopping.wait())
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    await asyncio.wait({serving, asked}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        log.info("draining for up to %.0f s", drain_seconds)
        # Health turns 503 and new requests are refused while connections stay open for the running ones.
        await asyncio.to_thread(scheduler.drain, drain_seconds)
        server.should_exit = True
    await serving
    asked.cancel()


def _version() -> str:
    try:
        return version("ddtree")
    except PackageNotFoundError:
        return "unknown"
