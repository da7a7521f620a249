"""Which of a server's verify widths a step runs at, and what the steps of each did."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ddtree_engine.sglang_plugin.config import AUTO, Config
from ddtree_engine.sglang_plugin.metrics import HostTap, StepOutcome
from ddtree_engine.sglang_plugin.requests import asked_budget
from ddtree_engine.tree.policy import WidthPolicy
from torch import Tensor


class WidthChooser:
    """Which width a batch runs at, and what the steps of every width did.

    On every rank alike: it goes by the requests and by steps in the order in which their results are
    processed, never by what has happened to arrive.
    """

    def __init__(self, config: Config) -> None:
        self.widths = config.widths
        self.default = self.widths[-1] - 1 if config.budget is None else config.budget
        self.policy = None if config.costs is None else WidthPolicy(self.widths, config.costs)
        self.steps = dict.fromkeys(self.widths, 0)
        self.requests = dict.fromkeys(self.widths, 0)
        self.tokens = dict.fromkeys(self.widths, 0)
        self._last = self.widths[-1]
        self._tap = HostTap()

    def choose(self, requests: list[Any]) -> int:
        """The width of a batch's next step: the largest that a request asks for, else the default's."""
        asked = [asked_budget(request) for request in requests]
        budgets = [budget for budget in asked if isinstance(budget, int)]
        if budgets:
            width = max(budgets) + 1
        elif self.policy is not None and AUTO in (self.default, *asked):
            width = self.policy.choose(len(requests))
        else:
            assert isinstance(self.default, int)
            width = self.default + 1
        self.steps[width] += 1
        self._last = width
        return width

    def note(self, width: int, outcome: StepOutcome) -> None:
        """Send a step's accept lengths, at its own and every narrower width, on their way to the host."""
        shown = [one for one in self.widths if one <= width]
        self._tap.put({"width": width}, {"lengths": accept_lengths(outcome, shown)})

    def processed(self) -> None:
        """A step's result is on the host: take in the oldest step that is not."""
        taken = self._tap.take()
        if taken is None:
            return
        label, tensors = taken
        lengths = tensors["lengths"].numpy()
        self.requests[label["width"]] += len(lengths)
        self.tokens[label["width"]] += int(lengths[:, -1].sum())
        if self.policy is not None:
            self.policy.observe(lengths)

    def read(self) -> dict[str, Any]:
        """For /server_info: totals of every width, and the policy's present choices by batch size."""
        widths = {
            str(width): {"steps": self.steps[width], "requests": self.requests[width]}
            | ({"accept_length": self.tokens[width] / self.requests[width]} if self.requests[width] else {})
            for width in self.widths
        }
        read: dict[str, Any] = {"last_width": self._last, "by_width": widths}
        if self.policy is not None:
            read["policy"] = {
                "present": {str(batch): width for batch, width in self.policy.present().items()},
                "estimated_accept_length": dict(
                    zip(
                        map(str, self.widths),
                        np.round(self.policy.estimates.read(), 4).tolist(),
                        strict=True,
                    )
                ),
            }
        return read


def accept_lengths(outcome: StepOutcome, widths: list[int]) -> Tensor:
    """int64[N, W]: what the trees' first `width` nodes alone would have accepted, the bonus token included.

    A path's nodes ascend, so the narrower tree's walk is the path up to its last node that is there.
    """
    places = torch.arange(outcome.path.shape[1], device=outcome.path.device)
    taken = places < outcome.accepted[:, None]
    return torch.stack([(taken & (outcome.path < width)).sum(1) for width in widths], dim=1)
