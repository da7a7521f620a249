"""A run, analysed once: what the summary, the report and the console table are all written from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddtree_ops.compare.checks import Check, run_checks
from ddtree_ops.compare.floor import Floor, above_floor, floors_of
from ddtree_ops.compare.layouts import HostRate, Together, layouts_of, side_by_side
from ddtree_ops.compare.load import Results, load_results
from ddtree_ops.compare.measures import Measures, measure
from ddtree_ops.compare.verdicts import BestBudget, Verdict, best_budgets, judge_all

#: Of the bootstrap draws and of the split into halves; fixed, so that a store always gives one report.
SEED = 20260412


@dataclass(frozen=True)
class Analysis:
    results: Results
    measures: tuple[Measures, ...]
    verdicts: tuple[Verdict, ...]
    best: tuple[BestBudget, ...]
    checks: dict[str, Check]
    floors: tuple[Floor, ...] = ()
    layouts: tuple[HostRate, ...] = ()
    together: tuple[Together, ...] = ()

    @property
    def on_cpu_engine(self) -> bool:
        """The embedded engine: its seconds say how fast a CPU runs a small model, and nothing of a GPU."""
        return any(item.cell.spec.engine == "reference" for item in self.measures)


def analyse(results: Path, run_id: str | None = None) -> Analysis:
    """Load a store's run (default: the latest) and compute everything that is reported of it.

    Raises:
        BadInput: see :func:`ddtree_ops.compare.load.load_results`.
    """
    loaded = load_results(results, run_id)
    measures = tuple(measure(cell, seed=SEED) for cell in loaded.cells)
    specs = [cell.spec for cell in loaded.cells]
    floors = floors_of(loaded.path, specs, seed=SEED)
    layouts = layouts_of(loaded.path, specs, seed=SEED)
    return Analysis(
        results=loaded,
        measures=measures,
        verdicts=tuple(above_floor(verdict, floors) for verdict in judge_all(measures, seed=SEED)),
        best=tuple(above_floor(best, floors) for best in best_budgets(measures, seed=SEED)),
        checks=run_checks(loaded, measures, seed=SEED),
        floors=tuple(floors),
        layouts=tuple(layouts),
        together=tuple(side_by_side(layouts, seed=SEED)),
    )
