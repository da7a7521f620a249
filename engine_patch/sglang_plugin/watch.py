"""The host's view of steps: the step log of any mode and the scores of mode shadow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

import torch
from ddtree_engine.sglang_plugin.config import Config, Mode
from ddtree_engine.sglang_plugin.draft_sampler import TreeDraftSampler
from ddtree_engine.sglang_plugin.metrics import HostTap, StepOutcome
from ddtree_engine.sglang_plugin.shadow import ShadowScorer
from ddtree_engine.sglang_plugin.tree_build import TreeBatch
from ddtree_engine.tree.nodes import Tree
from torch import Tensor


class Watch:
    """Queues what a step did and, once it is on the host, scores and logs it. Rank 0 only."""

    def __init__(self, config: Config, shadow_positions: int | None, first_rank: bool) -> None:
        self.active = first_rank and (config.mode is Mode.SHADOW or config.step_log is not None)
        self.scorer = (
            None if shadow_positions is None else ShadowScorer(shadow_positions, config.shadow_budget)
        )
        # The batch that is in the works, for the stock code path, which does not pass it on.
        self.batch: Any = None
        self._tap = HostTap()
        self._steps = 0
        self._ended: list[tuple[int, str]] = []
        self._scored_steps = 0
        self._log: TextIO | None = None
        if config.step_log is not None and first_rank:
            self._log = _open(config.step_log)

    def log_tree_step(
        self, batch: Any, outcome: StepOutcome, sampler: TreeDraftSampler, logits: Tensor
    ) -> None:
        """One verified tree step of N requests, with the target's two best tokens at every node."""
        if not self.active:
            return
        requests, width = outcome.tree.tokens.shape
        rows = logits[: requests * width].float()
        best, best_ids = rows.topk(2, dim=-1)
        best = best - rows.logsumexp(-1, keepdim=True)
        self._put(
            [request.rid for request in batch.reqs],
            {
                **_drafted(outcome.tree, sampler, requests),
                "prefix": batch.seq_lens,
                "path": outcome.path,
                "accepted": outcome.accepted,
                "bonus": outcome.bonus,
                "best_ids": best_ids.view(requests, width, 2),
                "best_logprobs": best.view(requests, width, 2),
            },
        )

    def log_chain_step(
        self, tree: TreeBatch, sampler: TreeDraftSampler, commit_lens: Tensor, out_tokens: Tensor
    ) -> None:
        """One DFLASH step of N requests and the trees that were built beside it."""
        if not self.active or self.batch is None:
            return
        requests = len(commit_lens)
        self._put(
            [request.rid for request in self.batch.reqs],
            {
                **_drafted(tree, sampler, requests),
                "prefix": self.batch.seq_lens,
                "accepted": commit_lens,
                "out_tokens": out_tokens,
            },
        )

    def drain(self) -> None:
        """Take in the steps that have arrived on the host."""
        for label, tensors in self._tap.arrived():
            self._scored_steps = label["step"]
            for row, rid in enumerate(label["rids"]):
                self._take(rid, label["step"], {name: tensor[row] for name, tensor in tensors.items()})
        while self._ended and self._ended[0][0] <= self._scored_steps and self.scorer is not None:
            self.scorer.finish(self._ended.pop(0)[1])
        if self._log is not None:
            self._log.flush()

    def finish(self, rid: str) -> None:
        """The request ended: close it after the steps that are still on their way."""
        if self.scorer is not None:
            self._ended.append((self._steps, rid))
        self.drain()

    def read(self) -> dict[str, Any]:
        """The scorer's totals; empty in other modes."""
        self.drain()
        return {} if self.scorer is None else self.scorer.read()

    def _put(self, rids: list[str], tensors: dict[str, Tensor]) -> None:
        self._steps += 1
        self._tap.put({"step": self._steps, "rids": rids}, tensors)

    def _take(self, rid: str, step: int, row: dict[str, Tensor]) -> None:
        if self.scorer is not None:
            committed = row["out_tokens"][: int(row["accepted"])].tolist()
            self.scorer.step(rid, _tree(row), committed)
        if self._log is not None:
            values = {name: _plain(tensor) for name, tensor in row.items()}
            self._log.write(json.dumps({"rid": rid, "step": step, **values}) + "\n")


def _drafted(tree: TreeBatch, sampler: TreeDraftSampler, requests: int) -> dict[str, Tensor]:
    return {
        "ids": sampler.ids[:requests],
        "logprobs": sampler.logprobs[:requests],
        "tokens": tree.tokens,
        "parents": tree.parents,
        "depths": tree.depths,
        "ranks": tree.ranks,
        "scores": tree.scores,
    }


def _tree(row: dict[str, Tensor]) -> Tree:
    tokens, parents, depths, ranks = (row[name].numpy() for name in ("tokens", "parents", "depths", "ranks"))
    return Tree(tokens, parents, depths, row["scores"].double().numpy(), ranks)


def _plain(tensor: Tensor) -> Any:
    if not tensor.is_floating_point():
        return tensor.tolist()
    # JSON has no -inf.
    return torch.nan_to_num(tensor, neginf=-1e30).tolist()


def _open(folder: Path) -> TextIO:
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / "steps.jsonl").open("a", encoding="utf-8")
