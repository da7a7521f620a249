"""Reads `sweep.yaml` and lays the command line's wishes over it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic
import yaml

from ddtree_ops.errors import BadInput, from_validation
from ddtree_ops.schemas.sweep import Sweep

#: Keys of `engine` that are paths, relative to the file that names them.
ENGINE_PATHS = ("model", "drafter", "calibration", "file")


def load_sweep(path: Path | None, overrides: Mapping[str, Any]) -> Sweep:
    """The sweep of a file (or of the defaults) with options of the command line on top.

    overrides  sweep keys; `engine` holds keys of a local engine, `cluster` a cluster.yaml instead of any
               engine, `rotate` whether its services move, and `replicas` how many are measured of each
               service, of a local engine or a cluster; nulls are not given. `arms` are names.
    Raises BadInput naming the file and key, or the option.
    """
    data = read_yaml(path) if path else {}
    if path:
        _resolve_paths(data, path.parent)
    apart = {"engine", "cluster", "rotate", "replicas"}
    given = {key: value for key, value in overrides.items() if value is not None and key not in apart}
    engine = {key: value for key, value in (overrides.get("engine") or {}).items() if value is not None}
    if "arms" in given:
        given["arms"] = _choose_arms(data.get("arms"), given["arms"], drop_budgets="budgets" in given)
    cluster = overrides.get("cluster")
    if cluster is not None:
        data = {**data, "engine": {"kind": "cluster", "file": str(cluster)}}
    if overrides.get("rotate"):
        data = {**data, "engine": _rotating(data.get("engine"), path)}
    if overrides.get("replicas") is not None:
        data = {**data, "engine": _replicated(data.get("engine"), path, overrides["replicas"])}
    if engine:
        base = data.get("engine") or {"kind": "local"}
        if isinstance(base, dict) and base.get("kind") in {"external", "cluster"}:
            options = ", ".join(sorted(engine))
            raise BadInput(
                f"{options}: options of a local engine; {cluster or path} uses running services",
                remedy="leave these options out",
            )
        given["engine"] = {**base, **engine} if isinstance(base, dict) else base
    try:
        return Sweep.model_validate({**data, **given})
    except pydantic.ValidationError as error:
        raise from_validation(error, file=path or "command line") from None


def _rotating(engine: Any, path: Path | None) -> dict[str, Any]:
    """A cluster's engine with `rotate` on. Raises BadInput for any other: its services have one place."""
    kind = engine.get("kind") if isinstance(engine, dict) else None
    if kind != "cluster":
        allowed = "cluster, for --rotate: only the services of a cluster.yaml can be moved"
        raise BadInput.at(file=path, key="engine.kind", found=kind or "local", allowed=allowed)
    return {**engine, "rotate": True}


def _replicated(engine: Any, path: Path | None, replicas: int) -> dict[str, Any]:
    """An engine with so many replicas. Raises BadInput for running servers, which are named one by one."""
    base = engine or {"kind": "local"}
    kind = base.get("kind", "local") if isinstance(base, dict) else None
    if kind not in {"local", "cluster"}:
        allowed = "local, cluster, for --replicas: name each server in engine.services"
        raise BadInput.at(file=path, key="engine.kind", found=kind, allowed=allowed)
    return {**base, "replicas": replicas}


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file whose top level is a mapping, with no key twice. Raises BadInput naming file and line."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text: {error.reason}") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise BadInput(f"{path}{line}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise BadInput(f"{path}: not YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise BadInput(f"{path}: found {type(data).__name__}, allowed: a mapping of sweep keys")
    return data


def _choose_arms(in_file: Any, names: list[str], *, drop_budgets: bool) -> list[Any]:
    """The named arms, each as the file describes it if it does."""
    described = [item for item in in_file or [] if isinstance(item, dict) and "arm" in item]
    if drop_budgets:  # --budget overrides what the file says for single arms, too
        described = [{key: value for key, value in item.items() if key != "budgets"} for item in described]
    chosen: list[Any] = []
    for name in names:
        chosen += [item for item in described if item["arm"] == name] or [name]
    return chosen


def _resolve_paths(data: dict[str, Any], folder: Path) -> None:
    """Make paths in a file relative to the file, where they exist there (a Hub id stays a Hub id)."""
    engine = data.get("engine")
    if isinstance(engine, dict):
        for key in ENGINE_PATHS:
            if isinstance(engine.get(key), str) and (folder / engine[key]).exists():
                engine[key] = str(folder / engine[key])
    if isinstance(data.get("dataset"), str) and (folder / data["dataset"]).is_file():
        data["dataset"] = str(folder / data["dataset"])


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, where YAML would take the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} twice", problem_mark=key_node.start_mark)
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep=deep)
