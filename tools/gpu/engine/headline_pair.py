"""The two servers of a headline run: which of them goes on, and what step seconds the trees' goes by."""

from __future__ import annotations

import contextlib
import re
import statistics
import subprocess
from pathlib import Path

from engine.headline_arms import (
    BESIDE,
    NARROWER,
    SERVED,
    SIZES,
    TREES,
    WIDTHS,
    command,
    read_costs,
    table,
    with_costs,
)
from engine.headline_asking import information
from engine.headline_sections import CLOSING, Up, expected_step
from engine.host import Context
from engine.servers import START_LIMIT, Server

LITTLE_MEMORY = re.compile(r"out of memory|OutOfMemoryError|not enough memory", re.IGNORECASE)


class NotReady(Exception):
    """A server that did not start."""

    def __init__(self, server: Server) -> None:
        super().__init__(f"{server.name}: NOT READY\n{server.why()}")
        self.name = server.name


class Pair:
    """The trees' server and the one beside it; each goes on until another has to take its place."""

    def __init__(self, context: Context, folder: Path) -> None:
        self.context, self.folder = context, folder
        self.servers: dict[str, Server] = {}
        # Whether the trees' server goes by step seconds that were not measured.
        self.estimated = not measured_costs(context)
        # Arms that are served with fewer widths.
        self.narrowed: set[str] = set()
        self._ports = iter(range(30300, 32000, 30))

    @property
    def up(self) -> Up:
        beside = next((name for name in self.servers if name not in TREES), None)
        trees = next((name for name in self.servers if name in TREES), None)
        return Up(trees, beside, self.estimated)

    def needs(self, beside: str, name: str) -> bool:
        """Whether a section beside this arm needs that server."""
        return name in (beside, SERVED[beside].trees)

    def serve(self, beside: str) -> tuple[Server, Server]:
        """Both servers ready, `beside` and its trees; twice the first where it is to be alone.

        Raises `NotReady`, that server stopped.
        """
        trees = SERVED[beside].trees
        wanted = (beside, trees) if trees else (beside,)
        if self.up.beside != beside:
            self._make_room(beside, trees)
        for name in wanted:
            if name not in self.servers:
                self._start(name)
        for server in [self.servers[name] for name in wanted]:
            if server.ready_after is not None:
                continue
            limit = min(START_LIMIT, self.context.seconds_left() - CLOSING)
            if not server.wait(limit):
                self._stop(server.name)
                self._narrow(server, trees)
                return self.serve(beside)
            print(f"{server.name}: ready after {server.ready_after:.0f} s", flush=True)
            self._memory(f"{' and '.join(self.servers)} ready")
        about = {"linear": beside, "trees": trees, "running": SERVED[beside].running}
        self.context.keep(beside, "about", about)
        return self.servers[beside], self.servers[wanted[-1]]

    def stop(self) -> None:
        if self.up.beside is not None:
            self._stop(self.up.beside)
        if self.up.trees is not None:
            self._memory(f"{self.up.trees} alone")
            self._stop(self.up.trees)

    def forget_ended(self) -> None:
        """Stop servers that have ended by themselves, so that they start again."""
        for name, server in list(self.servers.items()):
            if server.ended:
                self._stop(name)

    def _narrow(self, failed: Server, trees: str) -> None:
        """Go on without the widest trees, which may be to blame; raises `NotReady` where they cannot be."""
        to_blame = failed.name == trees or LITTLE_MEMORY.search(failed.why())
        if trees not in NARROWER or trees in self.narrowed or not to_blame:
            raise NotReady(failed)
        print(f"{NotReady(failed)}\nonce more without the widest trees", flush=True)
        self.context.left_over.append(f"{max(WIDTHS)} nodes: {failed.name} did not start")
        self.narrowed.add(trees)
        if trees in self.servers:
            self._stop(trees)

    def _make_room(self, beside: str, trees: str) -> None:
        if self.up.beside is not None:
            self._stop(self.up.beside)
        if self.up.trees is not None:
            self._memory(f"{self.up.trees} alone")
            if self.up.trees != trees or (self.estimated and measured_costs(self.context)):
                self._stop(self.up.trees)

    def _start(self, name: str) -> None:
        """Start a server once the last one has its memory: it looks how much is left."""
        for other in self.servers.values():
            if other.ready_after is None:
                other.settle(START_LIMIT)
        arm = NARROWER[name] if name in self.narrowed else SERVED[name].arm
        arm = with_costs(arm, self._costs(name))
        port = next(self._ports)
        argv = command(self.folder, arm, SERVED[name].running, port)
        self.servers[name] = Server(self.context, name, arm, port, argv)

    def _costs(self, name: str) -> Path:
        if name != next(iter(TREES)):
            return Path()
        measured = measured_costs(self.context)
        self.estimated = not measured
        label = "costs-estimated" if self.estimated else "costs-measured"
        self.context.keep(name, label, table(estimated_costs(self.context.options.costs) | measured))
        return self.context.raw / f"{name}.{label}.json"

    def _stop(self, name: str) -> None:
        server = self.servers.pop(name)
        if not server.ended:
            with contextlib.suppress(OSError, ValueError, KeyError):
                self.context.keep(name, "info", information(server))
        server.stop()

    def _memory(self, when: str) -> None:
        """What is taken on the card, by nvidia-smi in MiB."""
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        with contextlib.suppress(OSError):
            said = subprocess.run(query, capture_output=True, text=True, check=False).stdout
            rows = self.context.results.get("host", {}).get("memory", [])
            self.context.keep("host", "memory", [*rows, {"when": when, "used_mib": said.split()}])


def estimated_costs(path: Path | None) -> dict[str, dict[str, float]]:
    """Seconds that are expected, and in their place those of a file."""
    known = {} if path is None else read_costs(path)
    return {
        str(width): {str(size): expected_step(str(width - 1), size) for size in SIZES}
        | known.get(str(width), {})
        for width in WIDTHS
    }


def measured_costs(context: Context) -> dict[str, dict[str, float]]:
    """Seconds by width and requests in flight, from short prompts; empty before several sizes are known.

    Widths that were never asked are not in it.
    """
    found: dict[str, dict[str, float]] = {str(width): {} for width in WIDTHS}
    arms = [name for name, served in BESIDE.items() if served.trees == next(iter(TREES))]
    for size in SIZES:
        workload = "steps" if size == 1 else f"steps-{size}"
        rows = [row for arm in arms for row in context.results.get(arm, {}).get(workload, [])]
        for width in WIDTHS:
            times = [row[str(width - 1)] for row in rows if str(width - 1) in row]
            if times:
                found[str(width)][str(size)] = statistics.median(times) / 1e3
    known = {width: row for width, row in found.items() if row}
    return known if all(len(row) > 1 for row in known.values()) else {}
