"""A page: its front matter as a model, its text, and how it is found."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated

import pydantic
import yaml
from pydantic import Field

from ddtree_ops.errors import BadInput
from ddtree_ops.schemas.sweep import StrictModel

FOLDER = Path(__file__).parent / "pages"
FRONT_MATTER = re.compile(r"\A---\n(?P<fields>.*?)\n---\n+(?P<text>.*)\Z", re.DOTALL)
SECTIONS = ("Symptom", "Check", "Action", "Rollback", "How to know that it worked")


class Severity(StrEnum):
    PAGE = "page"  # somebody gets up for it
    WARN = "warn"  # today, not tonight
    PLANNED = "planned"  # work that somebody chose to do


class Need(StrEnum):
    """An option that `ddtree runbook run` must be given for this page."""

    LIMIT = "limit"
    SERVICE = "service"


class Setting(StrictModel):
    """A variable of the play that the user may set with `--set NAME=VALUE`; the default gives its type."""

    default: bool | int
    means: str


class Page(StrictModel):
    """One runbook.

    checks     ids of `ddtree deploy check` that point here
    alerts     names of the monitoring role's alerts that point here
    metrics    series to look at
    play       whether an Ansible play stands behind it
    changes    what the play changes on a host, or what the page's commands do; null: nothing
    deadline_s seconds that the play may take on one host
    """

    id: Annotated[str, Field(pattern=r"^[a-z][a-z-]+$")]
    title: str
    severity: Severity
    checks: tuple[str, ...] = ()
    alerts: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    play: bool
    needs: tuple[Need, ...] = ()
    changes: str | None = None
    settings: Mapping[str, Setting] = Field({})
    deadline_s: Annotated[int, Field(ge=1)] = 300
    text: str

    @property
    def playbook(self) -> str:
        """The play's name in the folder of the playbooks."""
        return f"runbooks/{self.id}.yml"

    @property
    def sections(self) -> dict[str, str]:
        """The text below each heading of the second level."""
        parts = re.split(r"^## (.+)$", self.text, flags=re.MULTILINE)[1:]
        return {title.strip(): text.strip() for title, text in zip(parts[::2], parts[1::2], strict=True)}

    @property
    def pointers(self) -> dict[str, tuple[str, ...]]:
        """What points here, by kind."""
        return {"checks": self.checks, "alerts": self.alerts, "metrics": self.metrics}

    def names(self, word: str) -> bool:
        """Whether a check, an alert or a metric of this name points here."""
        return any(word in names for names in self.pointers.values())


def load_page(file: Path) -> Page:
    """The page in a file. Raises ValueError for one without front matter or with a wrong one."""
    found = FRONT_MATTER.match(file.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{file.name}: no front matter")
    page = Page.model_validate({**yaml.safe_load(found["fields"]), "text": found["text"]})
    if page.id != file.stem:
        raise ValueError(f"{file.name}: its id is {page.id}")
    return page


@cache
def all_pages() -> dict[str, Page]:
    """Every page by id, what somebody gets up for first."""
    try:
        pages = [load_page(file) for file in FOLDER.glob("*.md")]
    except pydantic.ValidationError as error:  # ours, not the user's
        raise ValueError(f"a runbook's front matter is wrong: {error}") from error
    order = list(Severity)
    pages.sort(key=lambda page: (order.index(page.severity), page.id))
    return {page.id: page for page in pages}


def find_page(id: str) -> Page:
    """The page of that id. Raises BadInput that names the closest ids or those an alert points to."""
    pages = all_pages()
    if id in pages:
        return pages[id]
    about = [page.id for page in pages.values() if page.names(id)]
    close = about or difflib.get_close_matches(id, pages, n=3, cutoff=0.5)
    remedy = " or ".join(f"ddtree runbook show {one}" for one in close) or "ddtree runbook list"
    raise BadInput.at(file=None, key="ID", found=id, allowed=", ".join(pages), remedy=remedy)


def pages_about(word: str) -> list[Page]:
    """Pages that a check, an alert or a metric of this name points to, else those that speak of the word."""
    named = [page for page in all_pages().values() if page.names(word)]
    if named:
        return named
    lower = word.lower()
    return [page for page in all_pages().values() if lower in f"{page.id} {page.title}\n{page.text}".lower()]
