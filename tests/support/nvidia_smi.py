"""Stands in for nvidia-smi: `--query-gpu=... --format=csv,noheader,nounits [-lms N]`, in its format.

`install` writes it as a program into a folder, with the cards that it is to show; they may change while it
runs. Without a folder in PATH there is no nvidia-smi, as on a host without NVIDIA's driver.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

#: What the driver of an H200 printed, idle.
CARD: dict[str, str] = {
    "index": "0",
    "uuid": "GPU-6e1c1a7c-0000-4000-8000-000000000000",
    "utilization.gpu": "0",
    "power.draw": "76.40",
    "clocks.sm": "345",
    "temperature.gpu": "31",
    "memory.used": "0",
    "clocks_event_reasons.active": "0x0000000000000001",
}


def busy(index: int, uuid: str, **changes: str) -> dict[str, str]:
    """A card at work, at its power cap; `changes` have `_` for `.` in their names."""
    named = {name.replace("_", ".", 1): value for name, value in changes.items() if name != "reasons"}
    reasons = changes.get("reasons", "0x0000000000000004")
    return {
        **CARD,
        "index": str(index),
        "uuid": uuid,
        "utilization.gpu": "97",
        "power.draw": "598.20",
        "clocks.sm": "1755",
        "temperature.gpu": "64",
        "memory.used": "61440",
        "clocks_event_reasons.active": reasons,
        **named,
    }


def install(folder: Path, *cards: dict[str, str]) -> Path:
    """Write the program and its cards into a folder for PATH; returns the file of the cards."""
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "cards.json"
    show(state, *cards)
    program = folder / "nvidia-smi"
    program.write_text(f"#!{sys.executable}\n{Path(__file__).read_text()}", encoding="utf-8")
    program.chmod(0o755)
    return state


def show(state: Path, *cards: dict[str, str]) -> None:
    """Show these cards from now on."""
    draft = state.with_suffix(".new")
    draft.write_text(json.dumps(cards), encoding="utf-8")
    draft.replace(state)


def main(argv: list[str]) -> int:
    options: dict[str, Any] = {"fields": [], "format": "", "period": None}
    words = iter(argv)
    for word in words:
        name, _, value = word.partition("=")
        if name == "--query-gpu":
            options["fields"] = value.split(",")
        elif name == "--format":
            options["format"] = value
        elif name == "-lms":
            options["period"] = int(next(words))
    if unknown := [field for field in options["fields"] if field not in CARD]:
        print(f'Field "{unknown[0]}" is not a valid field to query.')
        return 2
    if options["format"] != "csv,noheader,nounits":
        print("Invalid combination of input arguments.")
        return 2
    state = Path(__file__).with_name("cards.json")
    state.with_name("pid").write_text(str(os.getpid()), encoding="utf-8")
    while True:
        for card in json.loads(state.read_text(encoding="utf-8")):
            print(", ".join(card[field] for field in options["fields"]), flush=True)
        if options["period"] is None:
            return 0
        time.sleep(options["period"] / 1000)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
