"""Why an arm does not serve: the same arm again in simpler ways, side by side.

What still fails without graphs is not the graphs' fault, and so on; with blocking launches the log names the
kernel that faulted. One arm stands for all that ended with the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from engine.arms import ARMS, Arm, argv_of
from engine.host import Context
from engine.servers import START_LIMIT, Server

MOST_ARMS = 2
SECONDS = 150


def simpler(arm: Arm) -> dict[str, Arm]:
    """The arm without graphs, overlap or self-check, with blocking launches, with fewer kernels of ours."""
    eager = (
        arm
        if "--disable-cuda-graph" in arm.flags
        else replace(arm, flags=(*arm.flags, "--disable-cuda-graph"))
    )
    variants = {
        "no-graphs": eager,
        "no-overlap": replace(arm, flags=(*arm.flags, "--disable-overlap-schedule")),
        "blocking": replace(eager, environment=(*arm.environment, ("CUDA_LAUNCH_BLOCKING", "1"))),
    }
    config = arm.config or {}
    if config and config.get("build_kernel") != "torch":
        variants["torch-builder"] = replace(arm, config={**config, "build_kernel": "torch"})
    if config.get("state") == "wy":
        variants["snapshots"] = replace(arm, config={**config, "state": "snapshot"})
    if config.get("self_check"):
        variants["no-self-check"] = replace(arm, config={**config, "self_check": 0})
    return variants


def representatives(broken: Mapping[str, str]) -> list[str]:
    """One arm for each cause, the first that had it."""
    firsts: dict[str, str] = {}
    for name, cause in broken.items():
        firsts.setdefault(cause, name)
    return list(firsts.values())


def diagnose(context: Context, broken: Mapping[str, str], port: Callable[[], int]) -> None:
    """Start the simpler ways of each representative; kept as `<arm>.diagnosis` and told in a line each."""
    for name in representatives(broken)[:MOST_ARMS]:
        if context.seconds_left() < SECONDS:
            context.left_over.append(f"diagnosis of {name}")
            continue
        servers = {}
        found = {"as it is": broken[name]}
        try:
            for way, arm in simpler(ARMS[name]).items():
                at = port()
                argv = argv_of(context.pair_of(arm), arm, at)
                servers[way] = Server(context, f"{name}.{way}", arm, at, argv)
            for way, server in servers.items():
                ready = server.wait(min(START_LIMIT, max(10.0, context.seconds_left() - 25)))
                found[way] = "serves" if ready else server.why()
                print(f"diagnosis of {name}, {way}: {found[way]}", flush=True)
        finally:
            for server in servers.values():
                server.stop()
            context.keep(name, "diagnosis", found)
            context.save()
