"""Paired bootstrap intervals over prompts.

A prompt is the unit that is resampled; repeats of a prompt stay together (they are clustered, not
independent), and all arms of a comparison are resampled with the same draw, so that what makes a prompt
easy or hard cancels in a ratio. Rates are ratios of sums (tokens over steps, tokens over seconds): a
mean of per-request ratios would weigh a short answer like a long one.

Where a cell has several positions (fresh starts of its service, each in the next place), positions are drawn
as well, the same for all arms of a comparison. Every position answers the same prompts, so one draw of
prompts holds for all positions (A. Owen, "The pigeonhole bootstrap", 2007): drawn apart for each, what makes
a prompt hard would average out over positions that share it. Positions are few: what a draw of them moves a
figure by is stretched by Student's quantile over the normal one and by sqrt(p / (p - 1)), 9 times for two
positions, 2.7 for three, 1.3 for eight. Positions that agree leave the interval that prompts alone give.

Intervals are percentile intervals with expanded tails: the percentile bootstrap is too narrow for few
prompts, and taking its tails at Phi(-sqrt(n / (n - 1)) * t) instead of 2.5 % repairs most of that
(T. Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, section 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
#: One number for each prompt, or one such row for each position.
Values = Sequence[float] | Sequence[Sequence[float]]
#: From a way to sum values over a draw to the numerators and denominators of all draws.
Fraction = Callable[[Callable[[Array], Array]], tuple[Array, Array]]

#: With fewer prompts a bootstrap has too few distinct resamples to say anything.
MIN_PROMPTS = 5
CONFIDENCE = 0.95
RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """A figure over ``n`` prompts; ``low`` and ``high`` are None where ``n`` is too small to give them.

    ``positions`` are the starts of the services that the interval covers; 1 says nothing of other starts.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    positions: int = 1

    @property
    def known(self) -> bool:
        return self.low is not None and self.high is not None

    def divided(self, by: float) -> Interval:
        """The same of a part, where all parts are alike."""
        low = None if self.low is None else self.low / by
        high = None if self.high is None else self.high / by
        return Interval(self.value / by, low, high, self.n, self.positions)


class Direction(StrEnum):
    """Where a ratio's interval lies. Names say what it means for a rate; more is faster."""

    FASTER = "faster"
    SLOWER = "slower"
    CANT_TELL = "can't tell"


def direction(ratio: Interval | None) -> Direction:
    """``faster`` only if the whole interval is above 1, ``slower`` only if it is all below."""
    if ratio is None or ratio.low is None or ratio.high is None:
        return Direction.CANT_TELL
    if ratio.low > 1.0:
        return Direction.FASTER
    if ratio.high < 1.0:
        return Direction.SLOWER
    return Direction.CANT_TELL


class Bootstrap:
    """Draws of prompts with replacement, shared by everything that is compared over those prompts.

    Values are one for each prompt, or with several positions a row of them for each position.
    """

    def __init__(
        self,
        prompts: int,
        *,
        positions: int = 1,
        seed: int = 0,
        resamples: int = RESAMPLES,
        confidence: float = CONFIDENCE,
    ) -> None:
        self.prompts = prompts
        self.positions = positions
        self._tail = expanded_tail(prompts, confidence)
        rng = np.random.default_rng(seed)
        self._picks = rng.integers(0, max(prompts, 1), size=(resamples, prompts))
        self._weights = _draws_of_positions(positions, resamples, seed)
        self._stretch = position_stretch(positions, confidence)

    def ratio_of_sums(self, numerator: Values, denominator: Values) -> Interval | None:
        """``sum(numerator) / sum(denominator)``. None where the denominator is 0."""
        top, bottom = self._check(numerator), self._check(denominator)
        if not bottom.sum() > 0:
            return None
        return self._interval(_divide(top.sum(), bottom.sum()), lambda sums: (sums(top), sums(bottom)))

    def ratio_of_rates(
        self, candidate: tuple[Values, Values], baseline: tuple[Values, Values]
    ) -> Interval | None:
        """How many times the baseline's rate the candidate's is; each is (numerators, denominators)."""
        top_a, bottom_a = self._check(candidate[0]), self._check(candidate[1])
        top_b, bottom_b = self._check(baseline[0]), self._check(baseline[1])
        if not (bottom_a.sum() > 0 and top_b.sum() > 0):
            return None
        value = _divide(top_a.sum() * bottom_b.sum(), bottom_a.sum() * top_b.sum())
        return self._interval(
            value, lambda sums: (sums(top_a) * sums(bottom_b), sums(bottom_a) * sums(top_b))
        )

    def sum_of_rates(self, parts: Sequence[tuple[Values, Values, float]]) -> Interval | None:
        """Sum over the parts of ``factor * sum(numerator) / sum(denominator)``, all from the same draws.

        None without parts, or where a denominator is 0.
        """
        checked = [(self._check(top), self._check(bottom), factor) for top, bottom, factor in parts]
        if not checked or any(not bottom.sum() > 0 for _, bottom, _ in checked):
            return None
        value = sum(factor * _divide(top.sum(), bottom.sum()) for top, bottom, factor in checked)

        def fraction(sums: Callable[[Array], Array]) -> tuple[Array, Array]:
            rates: Array = sum(
                (factor * sums(top) / sums(bottom) for top, bottom, factor in checked), start=np.zeros(1)
            )
            return rates, np.ones_like(rates)

        return self._interval(value, fraction)

    def median(self, values: Sequence[Sequence[float]]) -> Interval | None:
        """Median over all values of all prompts; a prompt brings its values (repeats) together."""
        if len(values) != self.prompts:
            raise ValueError(f"{len(values)} prompts for a bootstrap over {self.prompts}")
        width = max((len(item) for item in values), default=0)
        if width == 0:
            return None
        table = np.full((self.prompts, width), np.nan)
        for index, item in enumerate(values):
            table[index, : len(item)] = item
        value = float(np.nanmedian(table))
        if self.prompts < MIN_PROMPTS:
            return Interval(value, None, None, self.prompts)
        drawn = table[self._picks].reshape(len(self._picks), -1)
        medians = np.nanmedian(drawn[~np.isnan(drawn).all(axis=1)], axis=1)
        low, high = np.quantile(medians, [self._tail, 1 - self._tail])
        return Interval(value, float(low), float(high), self.prompts)

    def _check(self, values: Values) -> Array:
        """As an array of positions by prompts."""
        array = np.atleast_2d(np.asarray(values, dtype=np.float64))
        if array.shape != (self.positions, self.prompts):
            wanted = f"{self.prompts} prompts at {self.positions} positions"
            raise ValueError(f"{np.shape(values)} values for a bootstrap over {wanted}")
        return array

    def _sums(self, values: Array) -> Array:
        """Sums over the drawn prompts at all positions."""
        sums: Array = values.sum(axis=0)[self._picks].sum(axis=1)
        return sums

    def _sums_of_draws(self, values: Array) -> Array:
        """Sums over the drawn prompts at the drawn positions."""
        sums: Array = np.take_along_axis(self._weights @ values, self._picks, axis=1).sum(axis=1)
        return sums

    def _interval(self, value: float, fraction: Fraction) -> Interval:
        if self.prompts < MIN_PROMPTS:
            return Interval(value, None, None, self.prompts, self.positions)
        tops, bottoms = fraction(self._sums)
        usable = bottoms > 0
        if self.positions > 1:
            drawn_tops, drawn_bottoms = fraction(self._sums_of_draws)
            usable &= (tops > 0) & (drawn_tops > 0) & (drawn_bottoms > 0)
        ratios = tops[usable] / bottoms[usable]
        if self.positions > 1:
            moved = np.log(drawn_tops[usable] / drawn_bottoms[usable]) - np.log(ratios)
            ratios = ratios * np.exp(self._stretch * moved)
        low, high = np.quantile(ratios, [self._tail, 1 - self._tail])
        # Identical inputs must give exactly their ratio, not one that rounding moved off 1.
        if math.isclose(low, high, rel_tol=1e-12):
            return Interval(value, value, value, self.prompts, self.positions)
        return Interval(value, float(low), float(high), self.prompts, self.positions)


def expanded_tail(prompts: int, confidence: float = CONFIDENCE) -> float:
    """Tail probability at which to read the bootstrap distribution; below (1 - confidence) / 2."""
    if prompts < 2:
        return (1 - confidence) / 2
    t = student_quantile(1 - (1 - confidence) / 2, prompts - 1)
    return NormalDist().cdf(-math.sqrt(prompts / (prompts - 1)) * t)


def position_stretch(positions: int, confidence: float = CONFIDENCE) -> float:
    """How far draws of so few positions are spread, over what their figures move by; 1 for one position."""
    if positions < 2:
        return 1.0
    tail = 1 - (1 - confidence) / 2
    student = student_quantile(tail, positions - 1)
    return math.sqrt(positions / (positions - 1)) * student / NormalDist().inv_cdf(tail)


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t by the Cornish-Fisher series (Abramowitz and Stegun 26.7.5).

    Within 1 % at the 97.5 % point; one degree of freedom, where the series fails, has a closed form.
    """
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(freedom) ** (power + 1) for power, term in enumerate(terms))


def split_halves(prompts: int, seed: int = 0) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Two disjoint halves of the prompts' indices, in a seeded order: one to pick on, one to judge on."""
    order = np.random.default_rng(seed).permutation(prompts)
    return np.sort(order[: prompts // 2]), np.sort(order[prompts // 2 :])


def _draws_of_positions(positions: int, resamples: int, seed: int) -> Array:
    """How often each draw holds each position: resamples by positions."""
    picks = np.random.default_rng([seed, positions]).integers(0, positions, size=(resamples, positions))
    weights: Array = (picks[:, :, None] == np.arange(positions)).sum(axis=1).astype(np.float64)
    return weights


def _divide(top: float, bottom: float) -> float:
    return float(top) / float(bottom)
