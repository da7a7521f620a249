"""Can the GPUs of a wide replica talk to each other? Asked with a time limit before anything is loaded.

A broken way between GPUs (ACS, IOMMU, a P2P level that is too high) does not fail: NCCL hangs with all cards
at 100 %. The probe runs in a container like the service's and does what the service would: an all-reduce.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ddtree_ops.containers.connection import DockerFailure
from ddtree_ops.containers.engine import Engine
from ddtree_ops.deploy.steps import Step
from ddtree_ops.errors import JobFailed

#: From the first import to the last byte.
LIMIT_S = 60.0
#: For the container around it.
START_S = 30.0
PROGRAM = Path(__file__).with_name("p2p_probe.py")
REMEDY = "look at ACS and IOMMU (`ddtree deploy check`), set NCCL_P2P_DISABLE: '1' under env, or use tp: 1"


def require_peers(engine: Engine, cluster: str, step: Step, image: str) -> None:
    """Probe the GPUs of a wide replica. Raises JobFailed with the probe's words, HostUnreachable."""
    assert step.spec is not None
    program = PROGRAM.read_text(encoding="utf-8")
    spec = replace(
        step.spec,
        name=f"{cluster}-p2p-probe",
        image=image,
        argv=("python3", "-c", program, str(len(step.spec.gpus)), str(LIMIT_S)),
        secret_env=(),
        mounts=(),
        healthcheck=None,
        stop_timeout_s=5,
    )
    gpus = ", ".join(step.spec.gpus)
    try:
        probe = engine.run_once(spec, timeout_s=LIMIT_S + START_S)
    except DockerFailure as failure:
        message = f"{step.host}: {step.name}: the GPUs {gpus} do not talk: {failure.message}"
        raise JobFailed(message, remedy=REMEDY) from failure
    if probe.exit_code != 0:
        said = probe.output.strip()[-1000:]
        raise JobFailed(f"{step.host}: {step.name}: the GPUs {gpus} do not talk: {said}", remedy=REMEDY)
