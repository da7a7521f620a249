"""From a sweep's arms to the services that it needs: argv, environment, labels, and what they must say of
themselves.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddtree_ops.errors import BadInput
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.results import ReplicaAt
from ddtree_ops.schemas.sweep import ArmChoice, LocalEngine, Sweep
from ddtree_ops.services.base import Identity, ServiceSpec
from ddtree_ops.services.checkpoints import checkpoint_sha256, find_checkpoint, pair_path

ENGINE_MODULE = "ddtree_engine.reference"
LOCALHOST = "localhost"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Models:
    """The checkpoints of a local engine, with their hashes."""

    target: Path
    drafter: Path
    target_sha256: str
    drafter_sha256: str


def find_models(engine: LocalEngine) -> Models:
    """Locate and hash the engine's checkpoints.

    Raises BadInput for a missing, gated or broken one, BadEnvironment where the shipped pair is not
    installed.
    """
    if (engine.model is None) != (engine.drafter is None):
        raise BadInput(
            "engine: model and drafter belong together: give both, or neither for the shipped pair",
            remedy="add the missing one of --model and --drafter",
        )
    if engine.model is None or engine.drafter is None:
        pair = pair_path()
        target, drafter = pair / "target", pair / "drafter"
    else:
        target = find_checkpoint(engine.model, what="engine.model")
        drafter = find_checkpoint(engine.drafter, what="engine.drafter")
    return Models(target.resolve(), drafter.resolve(), checkpoint_sha256(target), checkpoint_sha256(drafter))


def local_services(sweep: Sweep, models: Models, version: str) -> list[ServiceSpec]:
    """One process, or as many as there are replicas, for each arm and builder; budgets go with each request.

    version  the engine's version, for the cells' keys
    Raises BadInput when the calibration file cannot be read.
    """
    assert isinstance(sweep.engine, LocalEngine)
    engine = sweep.engine
    services = [_local_service(sweep, engine, choice, models, version) for choice in sweep.arms]
    if engine.replicas == 1:
        return services
    seats = [ReplicaAt(number=number, host=LOCALHOST) for number in range(engine.replicas)]
    return [replace(service, at=seat) for service in services for seat in seats]


def choice_builder(engine: LocalEngine, choice: ArmChoice) -> Builder | None:
    """The builder that an arm's trees are grown with; null for arms without trees."""
    return (choice.builder or engine.builder) if choice.arm.takes_budget else None


def serve_argv(
    arm: Arm,
    *,
    command: Sequence[str] | None = None,
    budget: int | None = None,
    topk: int | None = None,
    builder: Builder | None = None,
    calibration: Path | None = None,
    model: Path | None = None,
    drafter: Path | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    max_running: int | None = None,
    allow_hybrid_unsafe: bool = False,
) -> list[str]:
    """The command line of the CPU engine, without host and port. What is null is left to the engine."""
    options: list[tuple[str, Any]] = [
        ("--budget", budget),
        ("--topk", topk),
        ("--builder", builder.value if builder else None),
        ("--calibration", calibration),
        ("--dtype", dtype),
        ("--threads", threads),
        ("--max-running", max_running),
        ("--model", model),
        ("--drafter", drafter),
    ]
    argv = [*(command or [sys.executable, "-m", ENGINE_MODULE]), "--arm", arm.value]
    for name, value in options:
        if value is not None:
            argv += [name, str(value)]
    if allow_hybrid_unsafe:
        argv.append("--allow-hybrid-unsafe")
    return argv


def _local_service(
    sweep: Sweep, engine: LocalEngine, choice: ArmChoice, models: Models, version: str
) -> ServiceSpec:
    arm, tree = choice.arm, choice.arm.takes_budget
    builder = choice_builder(engine, choice)
    calibration = engine.calibration if builder is Builder.CALIBRATED else None
    concurrency = max(sweep.concurrencies)
    argv = serve_argv(
        arm,
        command=engine.command,
        budget=max(choice.budgets or sweep.budgets) if tree else None,
        topk=engine.topk if tree else None,
        builder=builder,
        calibration=calibration,
        model=models.target,
        drafter=None if arm is Arm.AR else models.drafter,
        dtype=engine.dtype,
        threads=engine.threads,
        max_running=concurrency if concurrency > 1 else None,
        allow_hybrid_unsafe=arm is Arm.UNSAFE,
    )
    drafter_sha256 = None if arm is Arm.AR else models.drafter_sha256
    expected: dict[str, Any] = {"arm": arm.value, "dtype": engine.dtype, "model_sha256": models.target_sha256}
    if drafter_sha256:
        expected["drafter_sha256"] = drafter_sha256
    if builder:
        expected |= {"topk": engine.topk, "builder": builder.value, "per_request_budget": True}
    if arm is Arm.UNSAFE:
        expected["allow_hybrid_unsafe"] = True
    identity = Identity(
        engine="reference",
        engine_version=version,
        model_sha256=models.target_sha256,
        drafter_sha256=drafter_sha256,
        dtype=engine.dtype,
        topk=engine.topk if tree else None,
        builder=builder,
        argv=tuple(_key_argv(argv, own_command=engine.command is not None, calibration=calibration)),
    )
    name = service_name(arm, builder if builder is not engine.builder else None)
    return ServiceSpec(
        name=name,
        arm=arm,
        budget=None,
        identity=identity,
        argv=tuple(argv),
        env={**dict.fromkeys(THREAD_VARIABLES, str(engine.threads)), "PYTHONUNBUFFERED": "1"},
        expected=expected,
        labels={"ddtree.arm": arm.value, "ddtree.sweep": sweep.name},
    )


def service_name(arm: Arm, builder: Builder | None = None, budget: int | None = None) -> str:
    return "-".join(str(part) for part in (arm.value, builder and builder.value, budget) if part is not None)


def _key_argv(argv: Sequence[str], *, own_command: bool, calibration: Path | None) -> Iterator[str]:
    """The arguments that can change a number, less paths; files count by their content.

    Budgets travel with requests and are part of the cell; the models have hashes of their own there.
    """
    start = 0 if own_command else argv.index("--arm")
    skip = {"--budget", "--model", "--drafter"}
    items = iter(argv[start:])
    for item in items:
        if item in skip:
            next(items)
        elif item == "--calibration":
            assert calibration is not None
            yield item
            yield f"sha256:{_file_sha256(calibration)}"
            next(items)
        else:
            yield item


def _file_sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise BadInput(f"engine.calibration: {path} cannot be read: {error.strerror}") from error
