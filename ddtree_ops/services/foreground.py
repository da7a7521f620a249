"""The CPU engine in place of this process: everything that can be checked first is."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from ddtree_ops.errors import BadEnvironment, BadInput
from ddtree_ops.output import Output
from ddtree_ops.schemas.arms import BUDGETS, Arm, Builder
from ddtree_ops.services.argv import serve_argv
from ddtree_ops.services.checkpoints import find_checkpoint
from ddtree_ops.services.local import require_free_port

DTYPES = ("float32", "bfloat16")


def serve_local(
    out: Output,
    *,
    arm: Arm,
    budget: int | None,
    host: str,
    port: int,
    model: Path | None,
    drafter: Path | None,
    topk: int | None,
    builder: Builder | None,
    calibration: Path | None,
    dtype: str | None,
    threads: int | None,
    allow_hybrid_unsafe: bool,
    dry_run: bool,
) -> None:
    """Check the options, then become the engine (or print its command line). Does not return when it serves.

    Raises BadInput for wrong options or checkpoints, BadEnvironment for a port in use or a missing torch.
    """
    if budget is not None and budget not in BUDGETS:
        raise BadInput.at(file=None, key="--budget", found=budget, allowed=", ".join(map(str, BUDGETS)))
    if dtype is not None and dtype not in DTYPES:
        raise BadInput.at(file=None, key="--dtype", found=dtype, allowed=" or ".join(DTYPES))
    if arm is Arm.UNSAFE and not allow_hybrid_unsafe:
        raise BadInput(
            "--arm unsafe shares recurrent states between siblings and gives wrong output",
            remedy="add --allow-hybrid-unsafe if that is what you want to see",
        )
    if builder is Builder.CALIBRATED and calibration is None:
        raise BadInput(
            "--builder calibrated needs --calibration FILE", remedy="`ddtree bench calibrate` makes one"
        )
    argv = serve_argv(
        arm,
        budget=budget if arm.takes_budget else None,
        topk=topk,
        builder=builder,
        calibration=calibration,
        model=find_checkpoint(model, what="--model") if model else None,
        drafter=find_checkpoint(drafter, what="--drafter") if drafter else None,
        dtype=dtype,
        threads=threads,
        allow_hybrid_unsafe=allow_hybrid_unsafe,
    )
    argv += ["--host", host, "--port", str(port)]
    if dry_run:
        out.result({"argv": argv}, summary=" ".join(argv))
        return
    require_engine()
    require_free_port(port, host)
    out.note(f"serving {arm.value} on http://{host}:{port}")
    os.execv(argv[0], argv)


def require_engine() -> None:
    """Raise BadEnvironment when the CPU engine's packages are not installed."""
    if importlib.util.find_spec("torch") is None:
        raise BadEnvironment(
            "the CPU engine needs torch, which is not installed",
            remedy="pip install 'ddtree[local]' (a CPU build of torch is enough)",
        )
