"""Captured hosts: a whole capture, or the changes that make it out of another (`from`)."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from ddtree_ops.hosts.facts import HostFacts, parse_facts

FOLDER = Path(__file__).parent / "captures"
NAMES = sorted(file.stem for file in FOLDER.glob("*.json"))


def capture(name: str) -> dict[str, Any]:
    """A capture as the probe would print it.

    from       the capture that this one is made of
    set        values at dotted keys (a key that holds a path is matched whole)
    smi, gpus  texts of nvidia-smi's XML, for the host and by GPU index;  drop_gpus  cards that are gone
    """
    data: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    if "from" not in data:
        return data
    base = copy.deepcopy(capture(data["from"]))
    smi = base["commands"]["nvidia_smi"]
    smi["stdout"] = edit(smi["stdout"], data)
    for key, value in data.get("set", {}).items():
        put(base, key, value)
    return base


def facts(name: str) -> HostFacts:
    return parse_facts(capture(name), name=name)


def edit(xml: str, data: dict[str, Any]) -> str:
    root = ET.fromstring(xml)
    gpus = root.findall("gpu")
    for path, text in data.get("smi", {}).items():
        write(root, path, text)
    for index, texts in data.get("gpus", {}).items():
        for path, text in texts.items():
            write(gpus[int(index)], path, text)
    for index in data.get("drop_gpus", []):
        root.remove(gpus[index])
    return ET.tostring(root, encoding="unicode")


def write(node: ET.Element, path: str, text: str) -> None:
    found = node.find(path)
    assert found is not None, path
    found.text = text


def put(data: dict[str, Any], key: str, value: Any) -> None:
    parts = key.split(".")
    for part in parts[:-1]:
        data = data[part]
    data[parts[-1]] = value
