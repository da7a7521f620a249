"""Raw answers of a finished run, and what gates are made of: shares, accept lengths, first differences."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from pathlib import Path
from typing import Any

from engine import ties


class Missing(Exception):
    """A gate's arms did not run."""


class Raw:
    """The unpacked answers, by arm and workload."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, name: str) -> Path:
        """A file by its name without the compression's suffix."""
        for file in (self.folder / f"{name}.xz", self.folder / name):
            if file.is_file():
                return file
        raise Missing(name)

    def named(self, name: str) -> str:
        """A file's path inside the results folder."""
        file = self.file(name)
        top = next(parent for parent in file.parents if parent.name == "raw")
        return str(file.relative_to(top.parent))

    def load(self, name: str) -> Any:
        file = self.file(name)
        content = file.read_bytes()
        return json.loads(lzma.decompress(content) if file.suffix == ".xz" else content)

    def read(self, arm: str, workload: str) -> Any:
        return self.load(f"{arm}.{workload}.json")

    def has(self, arm: str, workload: str) -> bool:
        return any((self.folder / f"{arm}.{workload}.json{suffix}").is_file() for suffix in ("", ".xz"))

    def outputs(self, arm: str) -> list[list[int]]:
        return [row["output_ids"] for row in self.read(arm, "greedy")]

    def judgement(self, where: str) -> tuple[str, list[dict[str, Any]]]:
        """(file, first differences) of one comparison, from the last run that made it."""
        names = {file.name.removesuffix(".xz") for file in self.folder.glob("judge-*.differences.json*")}
        for name in sorted(names, reverse=True):
            run = self.load(name)
            if where in run["compared"]:
                return name, [question for question in run["questions"] if question["where"] == where]
        raise Missing(f"comparison {where!r}")

    def differences(self, where: str) -> list[dict[str, Any]]:
        return self.judgement(where)[1]

    def noise(self, referee: str = "ar") -> float:
        measured = ties.noise(self.read(referee, "ties"))
        if measured is None:
            raise Missing(f"a prefix in {referee}.ties")
        return measured

    def described(self, arm: str) -> dict[str, Any]:
        described = self.read(arm, "info").get("ddtree")
        if not described:
            raise Missing(f"{arm}.info has no ddtree")
        return dict(described)


def gate(
    id_: str, title: str, figure: float, target: float, direction: str, detail: Any, raw: str
) -> dict[str, Any]:
    return {
        "id": id_,
        "title": title,
        "figure": figure,
        "target": target,
        "direction": direction,
        "detail": detail,
        "raw": raw,
    }


def verdict(item: dict[str, Any]) -> str:
    figure, target = item["figure"], item["target"]
    holds = {"min": figure >= target, "max": figure <= target, "equal": figure == target}[item["direction"]]
    return "ok  " if holds else "FAIL"


def share_identical(raw: Raw, arm: str, reference: str) -> tuple[float, dict[str, Any]]:
    mine, theirs = raw.outputs(arm), raw.outputs(reference)
    # An arm may have been asked fewer prompts.
    same = [one == other for one, other in zip(mine, theirs, strict=False)]
    return sum(same) / len(same), {"identical": sum(same), "prompts": len(same), "reference": reference}


def accept_length(raw: Raw, arm: str) -> float:
    rows = raw.read(arm, "greedy")
    steps = sum(row["meta"]["spec_verify_ct"] for row in rows)
    return sum(len(row["output_ids"]) for row in rows) / steps


def chain_accept_length(raw: Raw, arm: str) -> float:
    """What the top-1 chain alone would have accepted in the same steps."""
    matched, steps = 0, 0
    for row in raw.read(arm, "greedy"):
        for drafts, count in enumerate(row["meta"]["spec_cap_lens_histogram"]):
            matched, steps = matched + drafts * count, steps + count
    return 1 + matched / steps


def parity(raw: Raw, arm: str, reference: str, prefix: str, referee: str = "ar") -> dict[str, Any]:
    """First differences of one arm from a reference that are no near-ties by the noise of `referee`."""
    share, detail = share_identical(raw, arm, reference)
    if any("spec_verify_ct" in row["meta"] for row in raw.read(arm, "greedy")):
        detail["accept_length"] = accept_length(raw, arm)
    title = f"{arm}: first differences from {reference} that are no near-ties"
    comparison = f"{arm} against {reference}"
    found = no_near_ties(raw, [comparison], f"{prefix}-{arm}-{reference}", title, referee)
    found["detail"] |= {"identical_share": share} | detail
    return found


def no_near_ties(
    raw: Raw, comparisons: list[str], id_: str, title: str, referee: str = "ar"
) -> dict[str, Any]:
    """A gate on first differences; every one of them is in its raw file, with the referee's best tokens."""
    noise = raw.noise(referee)
    judged = [raw.judgement(where) for where in comparisons]
    asked = [question for _, questions in judged for question in questions]
    far = [question for question in asked if not ties.is_near(question, noise)]
    gaps = Counter(str(ties.gap(question["best"], question["tokens"])) for question in asked)
    detail = {
        "divergences": len(asked),
        "gaps": dict(sorted(gaps.items())),
        "tie_noise": noise,
        "tie_noise_raw": raw.named(f"{referee}.ties.json"),
    }
    return gate(id_, title, len(far), 0, "equal", detail, raw.named(judged[0][0]))
