"""Traces of a server's kernels by SGLang's own profiler, cut down to what a breakdown of its steps needs."""

from __future__ import annotations

import concurrent.futures
import gzip
import json
import time
from pathlib import Path
from typing import Any

from engine.servers import Server

# Categories of a trace that occupy the card.
ON_CARD = ("kernel", "gpu_memcpy", "gpu_memset")
# Forward passes of a trace; requests that outlast them; and how long a trace may take to be written.
PASSES, OUTLASTING, WRITING_SECONDS = 8, 400, 60


def take(
    server: Server,
    folder: Path,
    prompts: list[list[int]],
    sampling: dict[str, Any],
    passes: int = PASSES,
    tokens: int = OUTLASTING,
) -> dict[str, Any]:
    """A trace of `passes` verify passes (without speculation: tokens) while all prompts are in flight.

    `tokens` of every prompt have to outlast the profiler's start; where they don't, all are asked again.
    Returns {"names": [kernel], "events": [[name's index, start, duration]]}, nanoseconds from the first
    event's start, in the order of their starts. Raises OSError or ValueError when the server writes no trace.
    """
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:

        def ask() -> list[concurrent.futures.Future[Any]]:
            return [pool.submit(server.generate, ids, tokens, sampling=sampling) for ids in prompts]

        jobs = ask()
        time.sleep(0.4)  # past prefill; the requests last for seconds
        body = {"output_dir": str(folder), "num_steps": passes, "activities": ["GPU"], "with_stack": False}
        server.post("/start_profile", body)
        deadline = time.monotonic() + WRITING_SECONDS
        size = -1
        while time.monotonic() < deadline:
            for job in jobs:
                job.result()
            time.sleep(1)
            found = next(iter(folder.rglob("*.json.gz")), None)
            if found is None:
                jobs = ask()
            elif found.stat().st_size == size:
                return compact(json.loads(gzip.decompress(found.read_bytes()))["traceEvents"])
            else:
                size = found.stat().st_size
    raise OSError(f"{folder}: no whole trace after {WRITING_SECONDS} s")


def compact(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A Chrome trace's events on the card (microseconds there) as names and integers."""
    found = sorted(
        (float(event["ts"]), float(event["dur"]), str(event["name"]))
        for event in events
        if event.get("cat") in ON_CARD
    )
    if not found:
        raise ValueError("a trace without kernels")
    names = list(dict.fromkeys(name for _, _, name in found))
    places = {name: place for place, name in enumerate(names)}
    began = found[0][0]
    rows = [[places[name], round(1e3 * (at - began)), round(1e3 * lasted)] for at, lasted, name in found]
    return {"names": [name[:160] for name in names], "events": rows}
