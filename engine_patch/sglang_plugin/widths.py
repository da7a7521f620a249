"""Several verify widths in one server: what each needs of its own, and how a step runs at one of them.

The drafter's side and the memory pools are made for the widest. A narrower step takes the first nodes of the
same trees, a target attention backend and verify graphs of its own, and with state `wy` a stash of its own in
the same memory; with snapshots the widest's serve, since SGLang's kernels go by the pool's real strides.
SGLang keeps the widths of adaptive speculation in one process in the same way.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ddtree_engine.sglang_plugin.metrics import StageTimes
from ddtree_engine.sglang_plugin.names import MARKER
from ddtree_engine.sglang_plugin.wy import hooks as wy
from ddtree_engine.sglang_plugin.wy.stash import Stash

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Captured:
    """What the target verifies one width with.

    backend  its attention backend;  graphs  SGLang's graph runner, None without graphs
    stash    what its recurrent layers leave for the commit, None with snapshots and without such layers
    """

    backend: Any
    graphs: Any
    stash: Stash | None


class Widths:
    """The captured widths of a worker. Outside of `at` a server is one of the widest alone."""

    def __init__(self, worker: Any, widths: tuple[int, ...], widest_times: StageTimes) -> None:
        self.worker = worker
        self.all = widths
        self.times = {width: StageTimes(widest_times.enabled) for width in widths[:-1]}
        self.times[widths[-1]] = widest_times
        self._captured: dict[int, Captured] = {}

    def capture(self) -> None:
        """Build backends and graphs of the narrower widths, once those of the widest are there."""
        runner = self.worker.model_runner
        recurrent = wy.recurrent_of(runner)
        for width in self.all[:-1]:
            stash = None if recurrent is None else recurrent.narrower[width]
            begin = Captured(runner.attn_backend, runner.decode_cuda_graph_runner, stash)
            with self._with(width, begin):
                self._captured[width] = self._build(width, begin)
            logger.info("%s: captured verify width %d", MARKER, width)

    @contextlib.contextmanager
    def at(self, width: int) -> Iterator[None]:
        """Verify at this width inside."""
        if width == self.worker.verify_width:
            yield
            return
        with self._with(width, self._captured[width]):
            yield

    def _build(self, width: int, widest: Captured) -> Captured:
        """As SGLang builds the states of adaptive speculation; `widest` with this width's own stash."""
        runner = self.worker.model_runner
        workspace = runner.init_new_workspace
        try:
            runner.attn_backend = runner._get_attention_backend(init_new_workspace=True)
        finally:
            runner.init_new_workspace = workspace
        runner.kv_index_translator.bind_and_verify_backends([runner.attn_backend])
        self.worker.prepare_recurrent_layers()
        graphs = widest.graphs
        if graphs is not None and graphs is not runner.eager_runner:
            graphs = type(graphs)(
                runner, attn_backend=runner.attn_backend, speculative_num_draft_tokens=width
            )
        return Captured(runner.attn_backend, graphs, widest.stash)

    @contextlib.contextmanager
    def _with(self, width: int, captured: Captured) -> Iterator[None]:
        from sglang.srt.runtime_context import get_spec

        worker, runner = self.worker, self.worker.model_runner
        saved = worker.verify_width, worker.times, runner.attn_backend, runner.decode_cuda_graph_runner
        with (
            get_spec().override(speculative_num_draft_tokens=width),
            _stash_in_place(runner, captured.stash),
        ):
            worker.verify_width = worker.speculative_num_draft_tokens = width
            worker.times = self.times[width]
            runner.attn_backend, runner.decode_cuda_graph_runner = captured.backend, captured.graphs
            try:
                yield
            finally:
                worker.verify_width, worker.times, runner.attn_backend, runner.decode_cuda_graph_runner = (
                    saved
                )
                worker.speculative_num_draft_tokens = worker.verify_width


@contextlib.contextmanager
def _stash_in_place(runner: Any, stash: Stash | None) -> Iterator[None]:
    recurrent = wy.recurrent_of(runner)
    if stash is None or recurrent is None:
        yield
        return
    widest, recurrent.stash = recurrent.stash, stash
    try:
        yield
    finally:
        recurrent.stash = widest
