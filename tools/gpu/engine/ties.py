"""Near-ties: when two executions that should agree may choose differently, and how far apart is too far.

Distances of two tokens' log-probabilities are distances of their logits: the sum over the vocabulary that a
single log-probability carries cancels out. In bfloat16 they are whole steps of the format.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

# [log-probability, token, text] of a distribution's best tokens, best first, as SGLang answers.
Best = list[list[Any]]
DIGITS = 5  # what float32 leaves of a distance; a bfloat16 step near zero is larger


def noise(rows: Iterable[dict[str, Any]]) -> float | None:
    """Largest change of the two best tokens' distance between valid executions of one prefix.

    rows  one a prefix: `decode` names the two tokens; every other entry is one execution, `batched` several
    """
    changes = []
    for row in rows:
        (_, first, *_), (_, second, *_), *_ = row["decode"]
        distances = [distance(best, first, second) for best in executions(row)]
        known = [one for one in distances if one is not None]
        changes += [abs(one - other) for one, other in combinations(known, 2)]
    return round(max(changes), DIGITS) if changes else None


def executions(row: dict[str, Any]) -> list[Best]:
    single = [row[name] for name in ("decode", "together", "prefill") if name in row]
    return [*single, *row.get("batched", ())]


def distance(best: Best, first: int, second: int) -> float | None:
    """How far `first` lies above `second`; None where one of them is not among the best."""
    values = {token: logprob for logprob, token, *_ in best}
    if first not in values or second not in values:
        return None
    return float(values[first] - values[second])


def gap(best: Best, tokens: list[int]) -> float | None:
    """How far the worse of two chosen tokens lies below the best; None where it is not among the best."""
    gaps = [distance(best, best[0][1], token) for token in tokens]
    known = [one for one in gaps if one is not None]
    return round(max(known), DIGITS) if len(known) == len(gaps) else None


def is_near(question: dict[str, Any], measured: float) -> bool:
    """Whether a first difference lies within twice the noise (`best` and `tokens` of the question)."""
    found = gap(question["best"], question["tokens"])
    return found is not None and found <= 2 * measured
