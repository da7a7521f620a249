"""What a headline run may measure, most important first, how long each part takes, and what fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.headline_arms import BESIDE, TREES

ALL = ("7", "15", "31", "63", "127", "auto")
MIDDLE = ("15", "31", "63", "auto")
FIXED = ("15", "31", "63")

# Steps that a step's time is taken over, alone and for several requests.
STEPS, STEPS_TOGETHER = 64, 32
# Tokens of an answer, of a long prompt, and of the long answers.
TOKENS, LONG_PROMPT, LONG_ANSWER = 128, 8000, 4000

# Seconds known from answers on an H200: milliseconds of a step alone and what every further request adds,
# tokens a step, and how much longer the longest of a group runs. Nodes 8 and 128, what 8 and 16 requests
# take, and the servers that have not run are guesses; they are used to plan with, and by budget auto until
# its server starts again with what was measured.
STEP_MS = {"7": (19.2, 0.8), "15": (19.3, 1.1), "31": (20.0, 1.5), "63": (21.2, 2.5), "127": (25.0, 5.0)}
STEP_MS |= {"auto": (20.0, 1.2), "ar": (14.6, 0.15), "dflash": (19.6, 1.4), "chain": (19.2, 1.1)}
STEP_MS |= {"snapshot": (24.0, 0.0), "snapshot-15": (20.5, 0.0), "unsafe": (22.0, 0.0), "shadow": (21.0, 1.4)}
STEP_MS |= {"dflash-fp8": (19.6, 1.4), "dflash-alone": (19.6, 1.4)}
ACCEPT = {"7": 4.2, "15": 4.66, "31": 5.05, "63": 5.3, "127": 5.4, "auto": 5.06, "ar": 1.0}
LINEAR_ACCEPT, LONG_ACCEPT = 4.05, 2.5
TAIL = {1: 1.0, 2: 1.15, 4: 1.25, 8: 1.35, 16: 1.45}
PREFILL, LONG_PREFILL, ANSWER = 0.05, 1.2, 0.04
# Everything is expected to take so much longer; a section may take so many times what is expected, where
# nothing more important waits; and what the end takes.
SLACK, PATIENCE, CLOSING = 1.1, 1.5, 20.0
# From nothing to two servers, the second starting when the first has its memory; and what comes before.
FIRST_PAIR, PREPARING = 175.0, 35.0
# A trees' server that starts again while the arm beside it does.
TREES_AGAIN = 35.0


@dataclass(frozen=True)
class Section:
    """One part: `kind` says what is done (`headline_asking`), `beside` which server stands beside the trees.

    size     requests in flight
    count    groups of prompts, rounds of step times, or long texts
    ways     budgets asked, beside `linear`
    length   of the prompts in tokens, 0 for the pair's own
    """

    part: str
    beside: str
    kind: str
    size: int = 1
    count: int = 1
    ways: tuple[str, ...] = ALL
    length: int = 0
    temperature: float = 0.0

    @property
    def workload(self) -> str:
        """What its answers are called."""
        if self.kind == "steps":
            name = "steps" if self.size == 1 else f"steps-{self.size}"
        elif self.kind == "texts":
            name = f"in-flight-{self.size}"
        else:
            name = self.kind
        name += f"-{self.length // 1000}k" if self.length else ""
        return name + (f"-t{self.temperature:g}" if self.temperature else "")

    @property
    def name(self) -> str:
        return f"{self.beside}.{self.workload}"

    @property
    def steps(self) -> int:
        """Steps that a step's time is taken over."""
        return STEPS if self.size == 1 else STEPS_TOGETHER

    def seconds(self) -> float:
        """What it is expected to take, starts apart."""
        known = {
            "steps": self._steps,
            "texts": self._texts,
            "differences": self._differences,
            "long": self._long,
            "traces": self._traces,
        }
        return SLACK * known[self.kind]()

    def _steps(self) -> float:
        # Before the rounds, some steps of every way.
        return (self.count + 0.6) * sum(
            (self.steps + 12) * self._step(way) + 2 * self._prefill() for way in self._asked()
        )

    def _texts(self) -> float:
        return (self.count + 1) * sum(self._answer(way) for way in self._asked())

    def _differences(self) -> float:
        return 25.0 if self.beside == "ar" else 10.0

    def _long(self) -> float:
        return self.count * (LONG_ANSWER / 3.5 * 2 * self._step("31") + 16 * 0.5)

    def _traces(self) -> float:
        return 6.0 * len(self._asked())

    def _asked(self) -> list[str]:
        more = [f"{self.beside}-{budget}" for budget in BESIDE[self.beside].budgets[1:]]
        return [self.beside, *more, *self.ways]

    def _step(self, way: str) -> float:
        return expected_step(way, self.size)

    def _prefill(self) -> float:
        return LONG_PREFILL if self.length else PREFILL * self.size

    def _answer(self, way: str) -> float:
        accept = ACCEPT.get(way, LINEAR_ACCEPT)
        if self.length and way != "ar":
            accept = LONG_ACCEPT
        return ANSWER + self._prefill() + TOKENS / accept * TAIL[self.size] * self._step(way)


def expected_step(way: str, size: int) -> float:
    """Seconds of a step of `size` requests."""
    alone, further = STEP_MS[way]
    return (alone + further * (size - 1)) / 1e3


SECTIONS = (
    Section("plain", "ar", "steps", count=3),
    Section("plain", "ar", "texts", count=40, ways=("31", "63", "auto")),
    Section("plain", "ar", "differences", ways=()),
    # Seconds of every width, for budget auto.
    Section("plain", "ar", "steps", 4),
    Section("plain", "ar", "steps", 16),
    Section("dflash", "dflash", "steps", count=3),
    Section("dflash", "dflash", "texts", count=40, ways=MIDDLE),
    Section("dflash", "dflash", "differences", ways=()),
    Section("dflash", "dflash", "texts", 4, count=8, ways=("7", *MIDDLE)),
    Section("dflash", "dflash", "texts", 2, count=10, ways=MIDDLE),
    Section("dflash", "dflash", "steps", 4, ways=FIXED),
    Section("chain", "chain", "steps", count=3, ways=FIXED),
    Section("chain", "chain", "texts", count=16, ways=("7", "15", "31", "127")),
    Section("chain", "chain", "texts", 8, count=6, ways=("7", *MIDDLE)),
    Section("chain", "chain", "texts", 16, count=5, ways=("7", "15", "31", "auto")),
    Section("chain", "chain", "differences", ways=()),
    Section("gaps", "dflash", "traces", ways=FIXED),
    Section("context", "dflash", "steps", count=2, ways=FIXED, length=LONG_PROMPT),
    Section("context", "dflash", "texts", count=6, ways=("31", "63", "auto"), length=LONG_PROMPT),
    Section("sampled", "dflash", "texts", count=14, ways=("31", "63", "auto"), temperature=0.7),
    Section("snapshot", "snapshot", "steps", count=3, ways=("15", "31")),
    Section("snapshot", "snapshot", "texts", count=12, ways=("15", "31")),
    Section("snapshot", "snapshot", "long", ways=()),
    # Not in turns with anything; four at once were asked in turns, too, which tells what that is worth.
    Section("alone", "dflash-alone", "texts", 8, count=6, ways=()),
    Section("alone", "dflash-alone", "texts", 16, count=5, ways=()),
    Section("alone", "dflash-alone", "texts", 4, count=8, ways=()),
    Section("fp8", "dflash-fp8", "steps", count=3, ways=FIXED),
    Section("fp8", "dflash-fp8", "texts", count=16, ways=FIXED),
    Section("ablations", "unsafe", "steps", count=2, ways=("31",)),
    Section("ablations", "unsafe", "texts", count=12, ways=("31",)),
    Section("ablations", "shadow", "texts", count=12, ways=("31", "63")),
)
PARTS = tuple(dict.fromkeys(section.part for section in SECTIONS))


@dataclass(frozen=True)
class Up:
    """The servers that are there; `estimated` while the trees' step seconds were not measured."""

    trees: str | None = None
    beside: str | None = None
    estimated: bool = True

    def starting(self, beside: str) -> float:
        """Seconds until `beside` and its trees are there."""
        if beside == self.beside:
            return 0.0
        served = BESIDE[beside]
        if not served.trees:
            return served.start
        if self.trees is None:
            return FIRST_PAIR
        if served.trees != self.trees:
            return served.start + TREES[served.trees].start
        return served.start + (TREES_AGAIN if self.estimated else 0.0)

    def then(self, beside: str) -> Up:
        """When `beside` has started; the trees' server starts again once, with what was measured."""
        return Up(BESIDE[beside].trees or None, beside, self.estimated and self.trees is None)


def schedule(waiting: Sequence[Section], seconds: float, up: Up) -> list[Section]:
    """What fits into so many seconds, the most important first to be taken, in the order of asking."""
    taken: list[Section] = []
    for section in waiting:
        if cost(in_order([*taken, section], up), up) <= seconds:
            taken.append(section)
    return in_order(taken, up)


def in_order(sections: Iterable[Section], up: Up) -> list[Section]:
    """Every server starts once: the one that is there comes first, other trees last."""
    found = sorted(sections, key=SECTIONS.index)
    servers = list(dict.fromkeys(section.beside for section in found))
    trees = up.trees or next(iter(TREES))
    servers.sort(key=lambda name: (BESIDE[name].trees != trees, name != up.beside))
    return sorted(found, key=lambda section: servers.index(section.beside))


def cost(sections: Iterable[Section], up: Up) -> float:
    """Seconds of these sections in their order, with the starts that they need."""
    total = 0.0
    for section in sections:
        total += up.starting(section.beside) + section.seconds()
        if section.beside != up.beside:
            up = up.then(section.beside)
    return total


def floor(section: Section, planned: Sequence[Section], seconds: float, up: Up) -> float:
    """Seconds left below which a section ends: what is more important and still to come keeps its time."""
    rank = SECTIONS.index(section)
    important = [one for one in planned if SECTIONS.index(one) < rank]
    return max(CLOSING + cost(important, up), seconds - PATIENCE * section.seconds())
