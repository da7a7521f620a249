"""``sweep.yaml``: which arms to run, at which budgets and loads, over which prompts.

Example::

    schema: 1
    name: laptop
    engine: {kind: local}
    arms: [ar, dflash, shadow, ddtree, {arm: unsafe, budgets: [31]}]
    budgets: [7, 15, 31, 63]
    dataset: pair
    prompts: 10
    max_tokens: 96
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, HttpUrl, field_validator, model_validator

from ddtree_ops.schemas.arms import BUDGETS, Arm, Builder

SWEEP_SCHEMA = 1


class StrictModel(BaseModel):
    """Unknown keys are errors and instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class LocalEngine(StrictModel):
    """The embedded CPU engine: one process of our own for each arm, budgets set request by request."""

    kind: Literal["local"] = "local"
    model: Path | None = Field(None, description="target checkpoint; default: the shipped pair")
    drafter: Path | None = Field(None, description="drafter checkpoint; default: the shipped pair")
    dtype: Literal["float32", "bfloat16"] = "float32"
    topk: int = Field(16, ge=1, le=64, description="K, candidates per position")
    builder: Builder = Builder.BEST_FIRST
    calibration: Path | None = Field(None, description="needed by the calibrated builder")
    threads: int = Field(1, ge=1, le=256, description="torch threads for each service")
    replicas: int = Field(1, ge=1, le=64, description="processes for each service, loaded at the same time")
    allow_hybrid_unsafe: bool = Field(False, description="needed by the arm 'unsafe', whose output is wrong")
    command: list[str] | None = Field(
        None,
        min_length=1,
        description="the engine's program; default: this Python with -m ddtree_engine.reference",
    )


class ExternalService(StrictModel):
    """A server that already runs. ``budget`` is null where the arm takes none or the request sets it.

    Several servers of one arm and budget are replicas of one service.
    """

    arm: Arm
    budget: int | None = None
    url: HttpUrl


class ExternalEngine(StrictModel):
    """Services that somebody else started and stops."""

    kind: Literal["external"]
    services: Annotated[list[ExternalService], Field(min_length=1)]


class ClusterEngine(StrictModel):
    """The services that `ddtree deploy` brought up. Without arms in the sweep, all of them are measured."""

    kind: Literal["cluster"]
    file: Path = Field(description="the cluster.yaml")
    limit: list[str] = Field([], description="only these hosts")
    replicas: int | None = Field(
        None, ge=1, description="at most so many replicas of each service, the first ones; default: all"
    )
    rotate: bool = Field(
        False,
        description="services move on to the next place between repeats, each time freshly started; "
        "repeats are as many as there are places unless they are named",
    )


Engine = Annotated[LocalEngine | ExternalEngine | ClusterEngine, Field(discriminator="kind")]


class ArmChoice(StrictModel):
    """An arm with budgets or a builder of its own; without them the sweep's apply.

    Two choices of one arm must differ in their builder: that compares builders in one interleaved sweep.
    """

    arm: Arm
    budgets: Annotated[list[int], Field(min_length=1)] | None = None
    builder: Builder | None = None

    @field_validator("budgets")
    @classmethod
    def _known_budgets(cls, value: list[int] | None) -> list[int] | None:
        return None if value is None else check_budgets(value)


class Sweep(StrictModel):
    """A whole sweep. The grid is arms x budgets x concurrencies x temperatures."""

    schema_version: Literal[1] = Field(1, alias="schema")
    name: str = Field("sweep", pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    engine: Engine = LocalEngine()
    arms: Annotated[list[ArmChoice], Field(min_length=1)] = Field(
        default_factory=lambda: [ArmChoice(arm=arm) for arm in (Arm.AR, Arm.DFLASH, Arm.SHADOW, Arm.DDTREE)]
    )
    budgets: Annotated[list[int], Field(min_length=1)] = [7, 15, 31, 63]
    concurrencies: Annotated[list[Annotated[int, Field(ge=1, le=256)]], Field(min_length=1)] = [1]
    temperatures: Annotated[list[Annotated[float, Field(ge=0, le=2)]], Field(min_length=1)] = [0.0]
    dataset: str = Field("pair", description="'pair' (the shipped prompts) or the path of a JSONL file")
    prompts: int | None = Field(None, ge=1, description="how many prompts, from the start; default: all")
    max_tokens: int = Field(128, ge=1, le=32768)
    ignore_eos: bool = Field(True, description="decode max_tokens always, so that arms do equal work")
    repeats: int = Field(1, ge=1, le=100)
    warmup: int = Field(1, ge=0, le=100, description="requests per cell that are sent first and dropped")
    seed: int = Field(0, ge=0, lt=2**31)
    side_by_side: bool = Field(
        False, description="load all services of a load point at the same time, not one after the other"
    )
    request_timeout_s: float = Field(300, gt=0, le=7200)
    start_timeout_s: float = Field(120, gt=0, le=7200)

    @field_validator("arms", mode="before")
    @classmethod
    def _arm_names(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [{"arm": item} if isinstance(item, str) else item for item in value]

    @field_validator("budgets")
    @classmethod
    def _known_budgets(cls, value: list[int]) -> list[int]:
        return check_budgets(value)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [choice.arm for choice in self.arms]
        default = self.engine.builder if isinstance(self.engine, LocalEngine) else None
        if len({(choice.arm, choice.builder or default) for choice in self.arms}) != len(names):
            raise ValueError("arms: an arm is named twice (with the same builder)")
        for key in ("concurrencies", "temperatures"):
            if len(set(getattr(self, key))) != len(getattr(self, key)):
                raise ValueError(f"{key}: a value is named twice")
        for choice in self.arms:
            if choice.budgets is not None and not choice.arm.takes_budget:
                raise ValueError(f"arms: {choice.arm.value!r} drafts no tree and takes no budgets")
            if choice.builder is not None and not choice.arm.takes_budget:
                raise ValueError(f"arms: {choice.arm.value!r} drafts no tree and takes no builder")
        if isinstance(self.engine, LocalEngine):
            if Arm.UNSAFE in names and not self.engine.allow_hybrid_unsafe:
                raise ValueError(
                    "arms: 'unsafe' gives wrong output and needs engine.allow_hybrid_unsafe: true "
                    "(--allow-hybrid-unsafe)"
                )
            builders = {choice.builder or default for choice in self.arms if choice.arm.takes_budget}
            if Builder.CALIBRATED in builders and self.engine.calibration is None:
                raise ValueError("engine.calibration: the calibrated builder needs a calibration file")
        return self


def check_budgets(budgets: list[int]) -> list[int]:
    """Budgets count nodes without the root and are one less than a verify width."""
    wrong = [budget for budget in budgets if budget not in BUDGETS]
    if wrong:
        raise ValueError(f"budget {wrong[0]} is not one of {', '.join(map(str, BUDGETS))}")
    if len(set(budgets)) != len(budgets):
        raise ValueError("a budget is named twice")
    return budgets
