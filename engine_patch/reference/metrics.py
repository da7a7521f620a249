"""Prometheus metrics: SGLang's names where it has them, `ddtree_*` for the rest."""

from __future__ import annotations

from ddtree_engine.reference.answers import spec_figures
from ddtree_engine.reference.engine import Arm
from ddtree_engine.reference.scheduler import Ticket, Update
from ddtree_engine.reference.stats import STAGES, score
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
LENGTH = tuple(range(1, 17))


class Metrics:
    """One engine's metrics, in a registry of its own."""

    def __init__(self, arm: Arm, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._arm = arm
        labels = {"arm": arm.value, "model_name": model_name}

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, [*labels, *more], registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, list(labels), registry=self.registry).labels(**labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, text, list(labels), buckets=buckets, registry=self.registry)
            return made.labels(**labels)

        self.running = gauge("sglang:num_running_reqs", "Running requests")
        self.waiting = gauge("sglang:num_queue_reqs", "Waiting requests")
        self.accept_length = gauge("sglang:spec_accept_length", "Accept length of the last finished request")
        self.accept_rate = gauge("sglang:spec_accept_rate", "Accept rate of the last finished request")
        self.prompt_tokens = counter("sglang:prompt_tokens", "Prefilled tokens").labels(**labels)
        self.generated = counter("sglang:generation_tokens", "Generated tokens").labels(**labels)
        self.ttft = histogram("sglang:time_to_first_token_seconds", "Time to first token", LATENCY)
        self.itl = histogram("sglang:inter_token_latency_seconds", "Seconds per token between steps", ITL)
        self.e2e = histogram("sglang:e2e_request_latency_seconds", "Request latency", LATENCY)
        self.verify_calls = counter("sglang:spec_verify_calls", "Verify passes").labels(**labels)
        requests = counter("ddtree_requests", "Finished requests by finish reason", "reason")
        self.requests = {
            reason: requests.labels(**labels, reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }
        self.rejected = counter("ddtree_rejected", "Requests refused because the queue was full").labels(
            **labels
        )
        stage = counter("ddtree_stage_seconds", "Seconds spent by stage", "stage")
        self.stages = {name: stage.labels(**labels, stage=name) for name in STAGES}
        self.correct = counter("ddtree_accepted_drafts", "Accepted drafts").labels(**labels)
        self.proposed = counter("ddtree_proposed_drafts", "Proposed drafts").labels(**labels)
        self.tree_nodes = counter("ddtree_tree_nodes", "Verified tree nodes, roots included").labels(**labels)
        self.tree_steps = counter("ddtree_tree_steps", "Steps verified by the tree path").labels(**labels)
        self.scored = counter("ddtree_steps_scored", "Steps scored against the output").labels(**labels)
        self.below = counter(
            "ddtree_steps_below_spine", "Steps that accepted less than their own chain"
        ).labels(**labels)
        self.length = histogram("ddtree_accept_length", "Accepted drafts + 1 per verify step", LENGTH)

    def render(self) -> bytes:
        """The text format."""
        return generate_latest(self.registry)

    def queued(self, waiting: int, running: int) -> None:
        """See `Observer`."""
        self.waiting.set(waiting)
        self.running.set(running)

    def tokens(self, ticket: Ticket, count: int, now: float) -> None:
        """See `Observer`."""
        self.generated.inc(count)
        if ticket.last_token is None:
            self.prompt_tokens.inc(len(ticket.request.prompt_ids))
            self.ttft.observe(now - ticket.submitted)
            return
        for _ in range(count):
            self.itl.observe((now - ticket.last_token) / count)

    def finished(self, ticket: Ticket, update: Update, now: float) -> None:
        """See `Observer`."""
        reason = "error" if update.error is not None else str((update.finish or {}).get("type"))
        self.requests[reason].inc()
        self.e2e.observe(now - ticket.submitted)
        if update.running is None:
            return
        stats = update.running.stats
        for stage, seconds in stats.stage_seconds.items():
            self.stages[stage].inc(seconds)
        if not self._arm.drafts:
            return
        figures = spec_figures(update.running, len(update.output_ids))
        if figures:
            self.accept_length.set(figures["spec_accept_length"])
            self.accept_rate.set(figures["spec_accept_rate"])
        self.verify_calls.inc(stats.verify_steps)
        self.correct.inc(stats.accepted)
        self.proposed.inc(stats.proposed)
        self.tree_nodes.inc(stats.tree_nodes)
        self.tree_steps.inc(stats.tree_steps)
        scores = score(stats.steps, update.output_ids)
        self.scored.inc(scores.scored)
        self.below.inc(scores.below_spine)
        for step in stats.steps:
            self.length.observe(step.matched + 1)
