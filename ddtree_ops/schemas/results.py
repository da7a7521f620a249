"""What a run leaves behind: request rows, sealed cells, runs. The contract between ``bench`` and ``compare``.

On disk::

    STORE/store.json                      StoreHeader: literal schema version
    STORE/runs/<run-id>/run.json          RunRecord: the plan, the environment, the cells' keys
    STORE/cells/<key[:16]>/cell.json      CellRecord: sealed once, never rewritten
    STORE/cells/<key[:16]>/rows.jsonl     RequestRow a line, in the order sent
    STORE/cells/<key[:16]>/logs/          the tail of its service's log, where something failed

Times are seconds; token ids are ints; budgets count nodes without the root.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ddtree_ops.schemas.arms import Arm, Builder

RESULTS_SCHEMA = 1
#: Parts of a cell's spec that cells of older stores lack.
LATER_KEYS = ("rotation", "replicas", "beside")


class Record(BaseModel):
    """Written by this version only with known keys; instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StoreHeader(Record):
    kind: Literal["ddtree-results"] = "ddtree-results"
    schema_version: Literal[1] = 1
    created: str = Field(description="UTC, ISO 8601")
    ddtree_version: str


class ReplicaAt(Record):
    """One replica of a service, and where it runs."""

    number: int = Field(0, description="counts over the service's replicas")
    host: str
    endpoint: str | None = Field(None, description="address and port that it listens on, on its host")
    gpus: list[str] = Field([], description="UUIDs, in the order of ranks; empty where they are not known")
    cards: list[int] = Field([], description="the same GPUs by their index on the host")

    @property
    def place(self) -> str:
        """`gpu-a/GPU-1234...`, `gpu-a/GPU-1...+GPU-2...`; the host alone where no GPU is known."""
        return f"{self.host}/{'+'.join(self.gpus)}" if self.gpus else self.host


class CellRotation(Record):
    """A cell that was measured at several positions, each a fresh start of its service in the next place."""

    positions: int = Field(description="fresh starts; each measures every prompt once")
    places: list[str] = Field(description="all places that the service has over the positions, sorted")


class CellSpec(Record):
    """Everything that could change the cell's number. Its canonical JSON is hashed into the key."""

    arm: Arm
    budget: int | None = Field(description="nodes without the root; null for ar and dflash")
    builder: Builder | None = Field(description="null for ar and dflash")
    topk: int | None
    concurrency: int
    temperature: float
    max_tokens: int
    ignore_eos: bool
    prompts: int
    repeats: int
    warmup: int
    seed: int
    dataset_sha256: str = Field(description="over the prompts that are used, in order")
    model_sha256: str
    drafter_sha256: str | None
    engine: str = Field(description="'reference' or 'sglang'")
    engine_version: str
    dtype: str
    argv: list[str] = Field(description="the service's arguments, less port and paths")
    image_digest: str | None = None
    host_fingerprint: str
    rotation: CellRotation | None = Field(None, description="null: one start of the service, in one place")
    replicas: list[str] | None = Field(
        None,
        description="where each replica is (with a rotation, its host alone), each measured at the cell's "
        "concurrency at the same time; null: one replica",
    )
    beside: list[str] | None = Field(
        None, description="the other cells that were loaded at the same time, with their replicas; null: none"
    )

    @property
    def positions(self) -> int:
        return self.rotation.positions if self.rotation else 1

    @property
    def copies(self) -> int:
        """Replicas that are measured: each answers every prompt in every repeat."""
        return len(self.replicas) if self.replicas else 1

    def key(self) -> str:
        """sha256 (hex) of canonical JSON, less the null ones of LATER_KEYS: older cells keep their keys."""
        absent = {name for name in LATER_KEYS if getattr(self, name) is None}
        data = self.model_dump(mode="json", exclude=absent or None)
        canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


class RequestStatus(StrEnum):
    OK = "ok"
    FAILED = "failed"


class StageSeconds(Record):
    """Wall time of a request by stage; ``commit`` includes KV compaction and state replay."""

    draft: float = 0.0
    build: float = 0.0
    verify: float = 0.0
    commit: float = 0.0


class RequestRow(Record):
    """One request as the client saw it, with what the server said of it."""

    prompt_id: str
    prompt_index: int
    repeat: int
    round: int = Field(description="requests of one round were interleaved; pairs: (prompt_id, repeat)")
    order: int = Field(description="position in the run's order of sending")
    position: int = Field(
        0, description="which start of the service answered; more than one by rotation only"
    )
    place: str | None = Field(None, description="where the service ran: its host and GPUs; rotation only")
    replica: ReplicaAt | None = Field(
        None, description="which replica answered, and where; null for one process of our own"
    )
    sent_at: float = Field(description="Unix time")
    status: RequestStatus
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    output_ids: list[int] = []
    ttft_s: float | None = None
    e2e_s: float | None = None
    chunk_s: list[float] = Field([], description="arrival of each chunk, seconds after sending")
    chunk_tokens: list[int] = Field([], description="tokens in each chunk")
    verify_steps: int | None = Field(None, description="spec_verify_ct; null for ar")
    correct_drafts: int | None = None
    proposed_drafts: int | None = None
    accept_histogram: list[int] = Field([], description="steps by number of accepted drafts (0, 1, ...)")
    stages: StageSeconds | None = None
    tree_nodes: int | None = Field(None, description="nodes verified in all, roots included")
    tree_steps: int | None = Field(
        None, description="steps verified by the forked tree path: proof that it ran"
    )
    steps_below_spine: int | None = None
    steps_scored: int | None = None
    spine_accept_length: float | None = Field(None, description="what the top-1 chains would have accepted")
    shadow_accept_length: float | None = Field(None, description="what the logged trees would have accepted")
    shadow_histogram: list[int] = []
    loop: bool = False
    empty: bool = False

    @property
    def number(self) -> int:
        """Which of the service's replicas answered."""
        return self.replica.number if self.replica else 0

    @property
    def tokens_per_second(self) -> float | None:
        """Completion tokens over the whole request, prefill included."""
        return self.completion_tokens / self.e2e_s if self.e2e_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first chunk."""
        if self.e2e_s is None or self.ttft_s is None or not self.chunk_tokens:
            return None
        later = self.completion_tokens - self.chunk_tokens[0]
        return (self.e2e_s - self.ttft_s) / later if later > 0 else None


class ParityClass(StrEnum):
    IDENTICAL = "identical"
    NEAR_TIE = "near_tie"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


class ParityFinding(Record):
    """One prompt's greedy output beside the reference's."""

    prompt_id: str
    parity: ParityClass
    first_difference: int | None = Field(None, description="index of the first differing output token")
    token: int | None = None
    reference_token: int | None = None
    gap: float | None = Field(None, description="the reference's top-1 minus top-2 logit at that place")
    threshold: float | None = Field(None, description="gaps up to here are near-ties")


class Parity(Record):
    """Counts over prompts against one reference arm, with what lies behind every difference."""

    reference: Arm
    identical: int
    near_tie: int
    different: int
    unknown: int = 0
    findings: list[ParityFinding] = Field([], description="prompts that are not identical")


class GateStatus(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    FIGURE = "figure"  # reported, not judged
    SKIP = "skip"


class Gate(Record):
    """A correctness check of a cell, with a stable id."""

    id: str
    status: GateStatus
    value: float | None = None
    limit: float | None = None
    detail: str = ""


class CellState(StrEnum):
    COMPLETE = "complete"
    FAILED = "failed"  # requests failed, or the service died before one was answered
    INVALID = "invalid"  # numbers exist but must not be used


class CardUse(Record):
    """What one GPU did while it answered requests of a cell. Null: the card does not say."""

    host: str
    gpu: str = Field(description="UUID")
    card: int | None = Field(None, description="its index on the host")
    samples: int = Field(description="samples that fell into its requests")
    requests: int = Field(description="requests of the cell that it answered")
    requests_before: int = Field(
        0, description="of these, over before anybody looked: those of an interrupted sweep"
    )
    utilization: float | None = Field(None, description="percent, mean")
    power_w: float | None = Field(None, description="mean")
    power_max_w: float | None = None
    sm_clock_mhz: float | None = Field(None, description="mean")
    sm_clock_min_mhz: float | None = None
    temperature_max_c: float | None = None
    memory_max_mib: float | None = None
    slowed: dict[str, int] = Field({}, description="samples by why the card held its clocks down")
    reasons_known: bool = Field(description="false: the card does not say whether it was slowed down")


class CellRecord(Record):
    """A sealed cell."""

    schema_version: Literal[1] = 1
    key: str
    spec: CellSpec
    run_id: str
    state: CellState
    reason: str | None = None
    started: str
    ended: str
    requests: int
    failed_requests: int
    rows_sha256: str
    parity: list[Parity] = []
    gates: list[Gate] = []
    server: dict[str, Any] = Field({}, description="allow-listed fields of /server_info")
    cards: list[CardUse] | None = Field(None, description="by GPU; null: not sampled")
    cards_missing: str | None = Field(None, description="why not")


class Environment(Record):
    """Where the run was made; secrets never get here. What is not known is null, never empty or zero."""

    ddtree_version: str
    git_commit: str | None
    python: str
    platform: str
    cpu: str | None = None
    cores: int | None = None
    memory_gib: float | None = None
    gpus: list[dict[str, Any]] = []
    packages: dict[str, str] = {}
    host_fingerprint: str


class Origin(Record):
    """How a run was made that `ddtree bench sweep` did not make; the report of such a run shows it."""

    how: str = Field(description="what was run, on what, in a sentence or two")
    commands: list[str] = Field([], description="shell lines that make the run, its store and its report")
    notes: list[str] = Field([], description="what has to be known before a figure is read, a sentence each")


class RunRecord(Record):
    """One invocation of a sweep: its plan, where it ran, which cells it needed."""

    schema_version: Literal[1] = 1
    run_id: str
    name: str
    started: str
    ended: str | None = None
    seconds: float | None = None
    sweep: dict[str, Any] = Field(description="the resolved sweep.yaml")
    environment: Environment
    cells: list[str] = Field(description="keys in plan order")
    reused: list[str] = Field([], description="keys that were sealed before this run")
    dataset: dict[str, Any] = Field({}, description="name, sha256, prompts")
    origin: Origin | None = Field(None, description="null: a sweep of `sweep`'s file made the run")
