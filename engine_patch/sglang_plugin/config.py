"""The plugin's one configuration variable, `SGLANG_DDTREE_CONFIG`: a JSON object.

    SGLANG_DDTREE_CONFIG='{"mode": "tree", "topk": 16, "builder": "spine-first"}'

| key | allowed | default |
|---|---|---|
| mode | tree, shadow, unsafe | tree |
| budget | 1..127, nodes without the root | --speculative-num-draft-tokens - 1; 63 in shadow mode |
| widths | ascending widths Q, the last one --speculative-num-draft-tokens; mode tree only | null: one width |
| costs | path of a table of step seconds; needed by budget "auto", with widths only | null |
| topk | 1..32 candidates per position | 16 |
| builder | best-first, spine-first, calibrated | best-first |
| calibration | path of a calibration file; needed by, and only with, calibrated | null |
| build_kernel | triton, torch: what grows the trees on the card; they are the same trees | triton |
| state | snapshot, wy: how a tree's recurrent states are kept; wy in mode tree only | snapshot |
| metrics | true, false: step counters in /server_info and, with --enable-metrics, Prometheus | true |
| step_log | folder for one JSON line a step; slows serving, for tests | null |
| self_check | 0..1000 random trees checked at start-up | 2 |
| allow_hybrid_unsafe | true, false: the switch that mode unsafe needs | false |

With `widths` every one of them is captured at start, and `budget` (one of theirs, or "auto") is what a batch
runs at when none of its requests asks for another with `custom_params.ddtree_budget`.

Server arguments hold the rest: `--speculative-num-draft-tokens` is Q (nodes with the root),
`--speculative-dflash-block-size` is F (the drafter's block).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar

from ddtree_engine.sglang_plugin.errors import ConfigError
from ddtree_engine.tree.build import Builder
from ddtree_engine.tree.calibration import Calibration, load_calibration
from ddtree_engine.tree.errors import TreeInputError
from ddtree_engine.tree.policy import StepCosts, load_costs

VARIABLE = "SGLANG_DDTREE_CONFIG"
MAX_WIDTH = 128
MAX_TOPK = 32
DEFAULT_SHADOW_BUDGET = 63
AUTO: Literal["auto"] = "auto"

E = TypeVar("E", bound=StrEnum)


class Mode(StrEnum):
    """What a decode step verifies."""

    TREE = "tree"
    SHADOW = "shadow"
    UNSAFE = "unsafe"


class StateStore(StrEnum):
    """How a verify pass keeps the recurrent states of the nodes.

    SNAPSHOT  SGLang's own: a copy of every layer's state for every node
    WY        our kernels: none; the commit replays the accepted path from the layers' stashed inputs
    """

    SNAPSHOT = "snapshot"
    WY = "wy"


class BuildKernel(StrEnum):
    """What grows the trees on the card."""

    TRITON = "triton"
    TORCH = "torch"


@dataclass(frozen=True)
class Config:
    """A validated `SGLANG_DDTREE_CONFIG`; see the module's table."""

    mode: Mode = Mode.TREE
    budget: int | Literal["auto"] | None = None
    widths: tuple[int, ...] = ()
    costs: StepCosts | None = None
    topk: int = 16
    builder: Builder = Builder.BEST_FIRST
    calibration: Calibration | None = None
    build_kernel: BuildKernel = BuildKernel.TRITON
    state: StateStore = StateStore.SNAPSHOT
    metrics: bool = True
    step_log: Path | None = None
    self_check: int = 2
    allow_hybrid_unsafe: bool = False

    @property
    def verifies_tree(self) -> bool:
        """Whether the target sees the tree (modes tree and unsafe)."""
        return self.mode is not Mode.SHADOW

    @property
    def shadow_budget(self) -> int:
        """Nodes without the root of the tree that shadow mode scores."""
        return self.budget if isinstance(self.budget, int) else DEFAULT_SHADOW_BUDGET

    @property
    def budgets(self) -> tuple[int, ...]:
        """Budgets that a request may ask for, ascending; empty where the tree is fixed at start."""
        return tuple(width - 1 for width in self.widths)


def load_config(environ: Mapping[str, str] | None = None) -> Config:
    """The configuration of this process. Raises `ConfigError`."""
    text = (os.environ if environ is None else environ).get(VARIABLE, "").strip()
    return parse_config(text) if text else Config()


def parse_config(text: str) -> Config:
    """Read and check the JSON text. Raises `ConfigError` naming key, found and allowed."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: found no JSON ({error}), allowed is a JSON object") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{VARIABLE}: found {type(data).__name__}, allowed is a JSON object")
    known = [field.name for field in fields(Config)]
    for key in data:
        if key not in known:
            raise ConfigError(f"{VARIABLE}: unknown key {key!r}, allowed are {', '.join(known)}")
    mode = _choice(data, "mode", Mode, Mode.TREE)
    builder = _choice(data, "builder", Builder, Builder.BEST_FIRST)
    topk = _integer(data, "topk", 1, MAX_TOPK, 16)
    assert topk is not None
    self_check = _integer(data, "self_check", 0, 1000, 2)
    assert self_check is not None
    widths = _widths(data, mode)
    config = Config(
        mode=mode,
        budget=_budget(data, widths),
        widths=widths,
        costs=_costs(data, widths),
        topk=topk,
        builder=builder,
        calibration=_calibration(data, builder, topk),
        build_kernel=_choice(data, "build_kernel", BuildKernel, BuildKernel.TRITON),
        state=_choice(data, "state", StateStore, StateStore.SNAPSHOT),
        metrics=_boolean(data, "metrics", True),
        step_log=_path(data, "step_log"),
        self_check=self_check,
        allow_hybrid_unsafe=_boolean(data, "allow_hybrid_unsafe", False),
    )
    if config.mode is Mode.UNSAFE and not config.allow_hybrid_unsafe:
        raise ConfigError(
            f"{VARIABLE}: mode 'unsafe' gives wrong text on hybrid models (siblings share recurrent state) "
            'and serves to price the forking only; if that is what you want, add "allow_hybrid_unsafe": true'
        )
    if config.state is StateStore.WY and config.mode is not Mode.TREE:
        raise _wrong("state", "wy", f"snapshot in mode {config.mode}: wy replaces what mode tree does")
    return config


def _wrong(key: str, found: Any, allowed: str) -> ConfigError:
    return ConfigError(f"{VARIABLE}: {key}: found {json.dumps(found)}, allowed is {allowed}")


def _choice(data: dict[str, Any], key: str, choices: type[E], default: E) -> E:
    found = data.get(key, default)
    if found not in list(choices):
        raise _wrong(key, found, "one of " + ", ".join(choices))
    return choices(found)


def _integer(data: dict[str, Any], key: str, least: int, most: int, default: int | None) -> int | None:
    found = data.get(key)
    if found is None:
        return default
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
        raise _wrong(key, found, f"a whole number in {least}..{most}")
    return found


def _widths(data: dict[str, Any], mode: Mode) -> tuple[int, ...]:
    found = data.get("widths")
    if found is None:
        return ()
    if mode is not Mode.TREE:
        raise _wrong("widths", found, f"null in mode {mode}: several widths are for mode tree")
    allowed = f"two or more whole numbers in 2..{MAX_WIDTH}, ascending, each once"
    if not isinstance(found, list) or len(found) < 2:
        raise _wrong("widths", found, allowed)
    if not all(type(width) is int and 2 <= width <= MAX_WIDTH for width in found):
        raise _wrong("widths", found, allowed)
    if found != sorted(set(found)):
        raise _wrong("widths", found, allowed)
    return tuple(found)


def _budget(data: dict[str, Any], widths: tuple[int, ...]) -> int | Literal["auto"] | None:
    found = data.get("budget")
    if not widths:
        if found == AUTO:
            raise _wrong("budget", found, 'a number, or auto with several widths in "widths"')
        return _integer(data, "budget", 1, MAX_WIDTH - 1, None)
    if found == AUTO:
        return AUTO
    budgets = [width - 1 for width in widths]
    if found is not None and (type(found) is not int or found not in budgets):
        named = ", ".join(map(str, budgets))
        raise _wrong("budget", found, f"one of {named} (the widths, less the root), auto or null")
    return found


def _costs(data: dict[str, Any], widths: tuple[int, ...]) -> StepCosts | None:
    path = _path(data, "costs")
    if path is None:
        if data.get("budget") == AUTO:
            raise _wrong("costs", None, "the path of a table of step seconds with budget auto")
        return None
    if not widths:
        raise _wrong("costs", str(path), "null without widths")
    try:
        costs = load_costs(path)
    except TreeInputError as error:
        raise ConfigError(f"{VARIABLE}: costs: {error}") from error
    missing = [width for width in widths if width not in costs.table]
    if missing:
        raise _wrong("costs", str(path), f"a table with seconds for every width; it has none for {missing}")
    return costs


def _boolean(data: dict[str, Any], key: str, default: bool) -> bool:
    found = data.get(key, default)
    if not isinstance(found, bool):
        raise _wrong(key, found, "true or false")
    return found


def _path(data: dict[str, Any], key: str) -> Path | None:
    found = data.get(key)
    if found is None:
        return None
    if not isinstance(found, str) or not found:
        raise _wrong(key, found, "a path or null")
    return Path(found)


def _calibration(data: dict[str, Any], builder: Builder, topk: int) -> Calibration | None:
    path = _path(data, "calibration")
    if (builder is Builder.CALIBRATED) != (path is not None):
        raise _wrong("calibration", data.get("calibration"), "a path with builder 'calibrated', else null")
    if path is None:
        return None
    try:
        calibration = load_calibration(path)
    except TreeInputError as error:
        raise ConfigError(f"{VARIABLE}: calibration: {error}") from error
    if calibration.topk < topk:
        raise _wrong("topk", topk, f"at most {calibration.topk}, what {path} was fitted for")
    return calibration
