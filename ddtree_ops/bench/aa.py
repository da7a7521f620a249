"""A/A: one service of a cluster, measured as if its starts were arms of their own.

It is a rotating sweep of that service alone. What its starts differ by is the floor below which a difference
between two arms, each measured on one start, says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddtree_ops.bench.config import load_sweep
from ddtree_ops.bench.runner import SweepOutcome
from ddtree_ops.bench.store import Store
from ddtree_ops.config_file import load_config
from ddtree_ops.errors import BadInput
from ddtree_ops.output import Output
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.cluster import Cluster
from ddtree_ops.schemas.sweep import ArmChoice, Sweep

NAME = "aa"


def aa_sweep(file: Path, service: str, options: Mapping[str, Any]) -> Sweep:
    """The rotating sweep of one service of a cluster.yaml.

    options  keys of a sweep; nulls are not given
    Raises BadInput for a file or an option that is wrong, and for a service that is not there or is unsafe.
    """
    known = {one.name: one for one in load_config(file, Cluster).services if one.arm is not Arm.UNSAFE}
    if service not in known:
        raise BadInput.at(file=file, key="--service", found=service, allowed=", ".join(known))
    chosen = known[service]
    budgets = None if chosen.budget is None else [chosen.budget]
    builder = (chosen.builder or Builder.BEST_FIRST) if chosen.arm.takes_budget else None
    arm = ArmChoice(arm=chosen.arm, builder=builder, budgets=budgets)
    sweep = load_sweep(
        None, {**options, "name": NAME, "cluster": file, "rotate": True, "arms": [chosen.arm.value]}
    )
    return sweep.model_copy(update={"arms": [arm]})


def show_floors(store: Store, outcome: SweepOutcome, out: Output) -> None:
    """A line for each metric of each cell whose starts give a floor."""
    from ddtree_ops.compare.analysis import SEED
    from ddtree_ops.compare.floor import floors_of

    keys = {cell.key for cell in outcome.cells}
    for floor in floors_of(store.root, [cell.spec for cell in outcome.cells], seed=SEED):
        if floor.cell.record.key in keys:
            out.line(floor.text)
            out.event(
                "floor", cell=floor.cell.label, metric=floor.metric.value, low=floor.low, high=floor.high
            )
