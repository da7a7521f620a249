"""What the parity of a cell shows: that its greedy output is the reference's, that it is not, or neither.

A prompt counts as unknown where it was never asked of the reference, where an answer failed, or where two
answers differ and the target could not say how close the two tokens are. Unknown is no difference and no
equality: it proves nothing, and it earns no verdict.
"""

from __future__ import annotations

from ddtree_ops.schemas.results import Parity, ParityClass


def prompts_of(parity: Parity) -> int:
    """The prompts that the parity counts, the unknown ones included."""
    return parity.identical + parity.near_tie + parity.different + parity.unknown


def shown(parity: Parity) -> bool | None:
    """Whether every prompt is identical or differs first at a near-tie; None: no difference, and no proof."""
    if parity.different:
        return False
    return None if parity.unknown or not prompts_of(parity) else True


def shortfall(parity: Parity) -> str | None:
    """Why the output is not shown to be the reference's, in words; None where it is."""
    if shown(parity):
        return None
    name, whole = parity.reference.value, prompts_of(parity)
    unknown = [finding for finding in parity.findings if finding.parity is ParityClass.UNKNOWN]
    apart = sum(finding.first_difference is not None for finding in unknown)
    missing = parity.unknown - apart
    broken = len(unknown) > apart
    parts = []
    if parity.different:
        parts.append(f"output differs from {name} on {parity.different} of {whole} prompts")
    if apart:
        parts.append(f"parts from {name} on {apart} of {whole} prompts, and how near a tie could not be told")
    if missing or not whole:
        why = "an answer failed or is missing" if broken else f"{name} was not asked"
        parts.append(f"not compared with {name} on {missing} of {whole} prompts ({why})")
    return "; ".join(parts)
