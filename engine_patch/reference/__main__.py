"""`python -m ddtree_engine.reference`: serve one arm on CPU.

Exit codes: 0 ended by a signal after draining, 1 failed while serving, 2 wrong input, 3 wrong environment.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from ddtree_engine.reference import pair_path
from ddtree_engine.reference.config import (
    DrafterConfig,
    TargetConfig,
    read_drafter_config,
    read_target_config,
)
from ddtree_engine.reference.errors import EngineError, EnvironmentFault, InputError
from ddtree_engine.tree import Calibration, TreeInputError, load_calibration

ARMS = ("ar", "dflash", "shadow", "ddtree", "unsafe")
BUILDERS = ("best-first", "spine-first", "calibrated")
MAX_BUDGET, MAX_TOPK, DEFAULT_CONTEXT = 127, 64, 8192

log = logging.getLogger("ddtree_engine.reference")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, load, serve. Every expected failure is one line on stderr and an exit code."""
    options = _parser().parse_args(argv)
    try:
        _check(options)
        _log_to(options.log_file)
        return _serve(options)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        if os.environ.get("DDTREE_DEBUG") == "1":
            raise
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddtree_engine.reference",
        description="Serve one decoding arm of a small hybrid model on CPU, with SGLang's HTTP routes.",
    )
    add = parser.add_argument
    add("--arm", choices=ARMS, default="ddtree", help="what is drafted and verified (default: ddtree)")
    add("--budget", type=int, default=31, help="tree nodes without the root, 1..127 (default: 31)")
    add("--topk", type=int, default=16, help="candidates per drafted position (default: 16)")
    add("--builder", choices=BUILDERS, default="best-first", help="how trees are grown (default: best-first)")
    add("--calibration", type=Path, help="calibration file; needed by, and only for, --builder calibrated")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="weights and activations")
    add("--model", type=Path, help="target folder (default: the shipped pair's)")
    add("--drafter", type=Path, help="drafter folder (default: the shipped pair's)")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=30000, help="port to listen on; 0 takes a free one and logs it")
    add("--max-running", type=int, default=4, help="requests stepped in turn (default: 4)")
    add("--max-queue", type=int, default=64, help="requests that may wait; past that 503 (default: 64)")
    add("--context-length", type=int, help="prompt and output tokens (default: the model's, at most 8192)")
    add("--self-check", type=int, default=2, help="random trees checked at start, 0 for none (default: 2)")
    add("--threads", type=int, default=1, help="CPU threads of one tensor operation (default: 1)")
    add(
        "--drain-seconds",
        type=float,
        default=30.0,
        help="time for running requests after SIGTERM (default: 30)",
    )
    add("--served-model-name", help="name in answers (default: the target folder's name)")
    add("--log-file", type=Path, help="write the log there instead of stderr")
    add("--allow-hybrid-unsafe", action="store_true", help="permit --arm unsafe, whose output is wrong")
    return parser


def _check(options: argparse.Namespace) -> None:
    def need(holds: bool, name: str, found: object, allowed: str) -> None:
        if not holds:
            raise InputError(f"--{name}: found {found}, allowed is {allowed}")

    need(1 <= options.budget <= MAX_BUDGET, "budget", options.budget, f"a whole number in [1, {MAX_BUDGET}]")
    need(1 <= options.topk <= MAX_TOPK, "topk", options.topk, f"a whole number in [1, {MAX_TOPK}]")
    need(0 <= options.port <= 65535, "port", options.port, "a port in [0, 65535]")
    for name in ("max_running", "threads"):
        need(getattr(options, name) >= 1, name.replace("_", "-"), getattr(options, name), "1 or more")
    need(0 <= options.self_check <= 1000, "self-check", options.self_check, "a whole number in [0, 1000]")
    need(options.max_queue >= 0, "max-queue", options.max_queue, "0 or more")
    need(options.drain_seconds >= 0, "drain-seconds", options.drain_seconds, "0 or more")
    if options.context_length is not None:
        need(options.context_length >= 2, "context-length", options.context_length, "2 or more")
    if options.arm == "unsafe" and not options.allow_hybrid_unsafe:
        raise InputError(
            "--arm unsafe: its recurrent layers share states between siblings, so its output is wrong; "
            "give --allow-hybrid-unsafe to run it as the labelled ablation"
        )
    if (options.builder == "calibrated") != (options.calibration is not None):
        raise InputError("--calibration belongs to --builder calibrated, and that needs it")


def _log_to(path: Path | None) -> None:
    pattern = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    try:
        handler = logging.FileHandler(path) if path else logging.StreamHandler()
    except OSError as error:
        raise InputError(f"--log-file: {path} cannot be written ({error.strerror or error})") from error
    logging.basicConfig(level=logging.INFO, format=pattern, handlers=[handler], force=True)


def _serve(options: argparse.Namespace) -> int:
    # Everything that can be wrong cheaply comes before torch's import.
    model, drafter = options.model or pair_path() / "target", options.drafter or pair_path() / "drafter"
    target_config = read_target_config(model)
    drafter_config = None if options.arm == "ar" else read_drafter_config(drafter, target_config)
    context_length = _context_length(options.context_length, target_config)
    calibration = _calibration(options.calibration, drafter_config, options.topk)
    listener = _bind(options.host, options.port)
    try:
        import torch
    except ImportError as error:
        raise EnvironmentFault(f"torch cannot be imported ({error}); install the extra 'local'") from error
    torch.set_num_threads(options.threads)
    torch.set_num_interop_threads(1)
    from ddtree_engine.reference.launch import serve

    return serve(
        listener,
        arm=options.arm,
        budget=options.budget,
        builder=options.builder,
        topk=options.topk,
        calibration=calibration,
        dtype=options.dtype,
        model=model,
        drafter=drafter,
        max_running=options.max_running,
        max_queue=options.max_queue,
        context_length=context_length,
        threads=options.threads,
        self_check=options.self_check,
        drain_seconds=options.drain_seconds,
        served_model_name=options.served_model_name,
        allow_hybrid_unsafe=options.allow_hybrid_unsafe,
    )


def _context_length(asked: int | None, config: TargetConfig) -> int:
    if asked is not None and asked > config.max_positions:
        raise InputError(
            f"--context-length: found {asked}, allowed is at most the model's {config.max_positions}"
        )
    return asked or min(config.max_positions, DEFAULT_CONTEXT)


def _calibration(path: Path | None, config: DrafterConfig | None, topk: int) -> Calibration | None:
    """Read a calibration and let one for another block or topk fail now, not at the first request."""
    if path is None:
        return None
    try:
        fitted = load_calibration(path)
    except TreeInputError as error:
        raise InputError(f"--calibration: {error}") from error
    if config is not None and (fitted.block != config.block_size or fitted.topk < topk):
        raise InputError(
            f"--calibration: {path}: found block {fitted.block} and topk {fitted.topk}, "
            f"allowed is block {config.block_size} and topk {topk} or more"
        )
    return fitted


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--host {host} --port {port}: cannot be listened on ({reason})") from error
    return listener


if __name__ == "__main__":
    sys.exit(main())
