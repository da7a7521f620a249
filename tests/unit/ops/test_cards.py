"""Lines of nvidia-smi, and what a cell's GPUs did: only while its requests ran, and no zero for nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ddtree_ops.bench.gates import Evidence, Uses, judge
from ddtree_ops.schemas.results import CardUse, Gate, ReplicaAt, RequestRow
from ddtree_ops.services.cards import CardSample, card_uses, faults, parse_sample
from tests.support.ops import cell_spec, request_row

GPU = "GPU-6e1c1a7c-0000-4000-8000-000000000000"
BUSY = f"{GPU}, 3, 97, 598.20, 1755, 64, 61440, 0x0000000000000004"


class Seen:
    """A sampler that has ended."""

    def __init__(self, *samples: CardSample, trouble: str | None = None) -> None:
        self._samples: dict[str, list[CardSample]] = {}
        self._trouble = trouble
        for sample in samples:
            self._samples.setdefault(sample.gpu, []).append(sample)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def samples(self) -> Mapping[str, Sequence[CardSample]]:
        return self._samples

    def trouble(self, host: str) -> str | None:
        return self._trouble


def sample(line: str = BUSY, at: float = 0.0) -> CardSample:
    found = parse_sample(line, host="a", at=at)
    assert found is not None
    return found


def row(begin: float, seconds: float, *gpus: str, **changes: Any) -> RequestRow:
    at = ReplicaAt(host="a", gpus=list(gpus or [GPU]))
    return request_row(sent_at=begin, e2e_s=seconds, replica=at, **changes)


def test_a_line_is_read_with_all_that_it_says() -> None:
    found = sample(at=5.0)
    assert (found.gpu, found.card, found.at) == (GPU, 3, 5.0)
    assert (found.utilization, found.power, found.clock) == (97.0, 598.2, 1755.0)
    assert (found.temperature, found.memory, found.reasons) == (64.0, 61440.0, 4)


def test_what_a_card_does_not_say_is_null_and_no_zero() -> None:
    found = sample(f"{GPU}, 0, [N/A], [Not Supported], 1755, 64, [N/A], [N/A]")
    assert (found.utilization, found.power, found.memory, found.reasons) == (None, None, None, None)
    (use,), why = card_uses([row(0, 1)], Seen(found))
    assert why is None
    assert (use.utilization, use.power_w, use.power_max_w, use.memory_max_mib) == (None, None, None, None)
    assert (use.reasons_known, use.slowed) == (False, {})


@pytest.mark.parametrize("line", ["", "GPU-1, 0, 97", "No devices were found", BUSY.replace("GPU", "XPU")])
def test_lines_that_are_none_are_passed_by(line: str) -> None:
    assert parse_sample(line, host="a", at=0.0) is None


def test_only_samples_during_the_cells_own_requests_count() -> None:
    """Requests from 10 to 12 and 20 to 21; the card was cold and another arm's turn before and between."""
    idle = f"{GPU}, 3, 0, 80, 345, 31, 0, 0x1"
    seen = [
        sample(idle, 9.9),
        sample(at=10.0),
        sample(BUSY.replace("1755", "1500"), 11.9),
        sample(idle, 15.0),
    ]
    seen += [sample(at=20.5), sample(idle, 21.1)]
    (use,), _ = card_uses([row(10, 1.5), row(11, 1), row(20, 1)], Seen(*seen))
    assert (use.samples, use.requests, use.requests_before) == (3, 3, 0)
    assert (use.sm_clock_min_mhz, use.sm_clock_mhz) == (1500.0, pytest.approx(1670.0))
    assert (use.utilization, use.temperature_max_c) == (97.0, 64.0)
    assert use.slowed == {"power cap": 3}


def test_requests_from_before_anybody_looked_are_counted() -> None:
    (use,), _ = card_uses([row(10, 1), row(20, 1)], Seen(sample(at=20.5)))
    assert (use.samples, use.requests, use.requests_before) == (1, 2, 1)


def test_a_card_that_was_not_seen_is_named_with_the_reason() -> None:
    rows = [row(0, 1, GPU, "GPU-other")]
    (use,), why = card_uses(rows, Seen(sample(at=0.5), trouble="the host is gone"))
    assert use.gpu == GPU
    assert why == "nothing was seen of a/GPU-other; a: the host is gone"
    assert card_uses(rows, None) == (None, f"nothing was seen of a/{GPU}, a/GPU-other; a: nobody looked")
    assert card_uses([request_row()], Seen(sample())) == (None, "no GPU of the service is known")


def throttled(reasons: str, rows: Sequence[RequestRow] = (row(0, 1),)) -> Gate:
    uses = Uses(*card_uses(rows, Seen(sample(BUSY.replace("0x0000000000000004", reasons), 0.5))))
    return next(gate for gate in judge(Evidence(cell_spec(), rows, cards=uses)) if gate.id == "throttled")


def test_heat_and_faults_spoil_a_cell_and_a_power_cap_does_not() -> None:
    assert throttled("0x4").status == "pass"
    assert throttled("0x1").status == "pass"
    for bit, word in (
        (0x8, "hardware slowdown"),
        (0x20, "by software"),
        (0x40, "by hardware"),
        (0x80, "brake"),
    ):
        gate = throttled(hex(bit | 0x4))
        assert gate.status == "fail"
        assert word in gate.detail
        assert "in 1 of 1 samples" in gate.detail


def test_a_cell_that_was_not_sampled_is_not_judged_by_its_cards() -> None:
    assert throttled("[N/A]").status == "skip"
    unseen = Evidence(cell_spec(), [row(0, 1)], cards=Uses(*card_uses([row(0, 1)], None)))
    (gate,) = [gate for gate in judge(unseen) if gate.id == "throttled"]
    assert (gate.status, "not sampled: nothing was seen" in gate.detail) == ("skip", True)
    assert not [gate for gate in judge(Evidence(cell_spec(), [request_row()])) if gate.id == "throttled"]


def test_faults_are_told_card_by_card() -> None:
    uses = [
        CardUse(host="a", gpu=f"GPU-{number}", samples=9, requests=1, slowed=slowed, reasons_known=True)
        for number, slowed in enumerate(({"power cap": 9}, {"thermal, by hardware": 2}))
    ]
    assert faults(uses) == ["a/GPU-1: thermal, by hardware in 2 of 9 samples"]
