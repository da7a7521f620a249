"""The page: one self-contained file that says what happened, escaped, complete and always the same."""

from __future__ import annotations

import csv
import errno
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ddtree_ops.compare.analysis import analyse
from ddtree_ops.compare.report import render, write_report
from ddtree_ops.errors import BadEnvironment, BadInput
from tests.support.make_store import make_store

VOID = {"meta", "link", "br", "img", "use"}
PNG = b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """Checks nesting and collects ids, references and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.wrong: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(attrs)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    def _note(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in {"href", "src", "xlink:href", "srcset"} and value:
                self.references.append(value)


@pytest.fixture(scope="module")
def folder(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "deep" / "report"
    write_report(store, out)
    return out


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return (folder / "index.html").read_text()


def words(text: str) -> str:
    return re.sub(r"\s+", " ", " ".join(Page(text).words))


def test_the_page_is_well_formed_and_its_ids_are_unique(text: str) -> None:
    page = Page(text)
    assert page.wrong == []
    assert page.open == []
    assert len(page.ids) == len(set(page.ids)), (
        "two pictures share an id, so one may use the other's clip path"
    )


def test_nothing_is_fetched_from_elsewhere(text: str, folder: Path) -> None:
    references = Page(text).references
    local = [reference for reference in references if not reference.startswith(("#", "data:"))]
    assert all((folder / reference).is_file() for reference in local)
    assert "<script" not in text
    assert "@import" not in text
    assert re.findall(r"url\((?!#)[^)]*\)", text) == []
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)


def test_every_reference_into_the_page_has_a_target(text: str) -> None:
    page = Page(text)
    wanted = {reference[1:] for reference in page.references if reference.startswith("#")}
    wanted |= set(re.findall(r"url\(#([^)]+)\)", text))
    assert wanted <= set(page.ids)


def test_the_page_says_what_the_run_showed(text: str) -> None:
    said = words(text)
    assert "The tree yields" in said
    assert "not the point" in said
    assert "shadow 15, concurrency 1, temperature 0 is failed: connection reset by the server" in said
    assert "12 prompt tokens came from the prefix cache" in said
    assert "unsafe: wrong output" in said
    assert "How far shadow's estimate can be trusted" in said
    for part in (
        "Verdicts against dflash",
        "TTFT",
        "verify",
        "Environment",
        "How to reproduce",
        "ddtree bench sweep",
    ):
        assert part in said


def with_run(path: Path, **changes: object) -> str:
    """The page of a store whose run record is changed."""
    (file,) = path.glob("runs/*/run.json")
    run = json.loads(file.read_text())
    run["environment"] |= changes.pop("environment", {})
    file.write_text(json.dumps(run | changes))
    return words(render(analyse(path)))


def test_a_run_that_no_sweep_made_says_how_it_was_made(tmp_path: Path) -> None:
    origin = {
        "how": "Two servers were asked in turns.",
        "commands": ["python plan.py --out OUT"],
        "notes": ["These are not the target's accept lengths."],
    }
    said = with_run(make_store(tmp_path / "s", arms=("ar", "dflash", "ddtree")), origin=origin)
    assert "Two servers were asked in turns. python plan.py --out OUT" in said
    assert said.index(origin["notes"][0]) < said.index("Checks")
    assert "bench sweep" not in said
    assert "sweep.yaml" not in said


@pytest.mark.parametrize(
    ("unknown", "shown"),
    [
        ({"cpu": None, "cores": None, "memory_gib": None}, None),
        ({"cpu": "", "cores": 0, "memory_gib": 0.0}, None),
        ({"cpu": None}, "processor 2 cores, 24.0 GiB"),
        ({}, "processor Example CPU 2.4 GHz, 2 cores, 24.0 GiB"),
    ],
)
def test_hardware_that_is_not_known_is_left_out(tmp_path: Path, unknown: dict, shown: str | None) -> None:
    said = with_run(make_store(tmp_path / "s", arms=("ar", "dflash"), prompts=5), environment=unknown)
    assert shown in said if shown else "processor" not in said


def test_pictures_are_labelled_for_screen_readers(text: str) -> None:
    svgs = re.findall(r"<svg[^>]*>.{0,400}", text, flags=re.DOTALL)
    assert len(svgs) == 6
    for svg in svgs:
        assert 'role="img"' in svg
        assert "<title id=" in svg
        assert "<desc id=" in svg


def test_pictures_take_their_colours_from_the_page(text: str) -> None:
    pictures = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    fixed = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", pictures))
    assert fixed == set(), "a fixed colour would not follow the dark scheme"
    assert "var(--c-ddtree)" in pictures


def test_beside_the_page_lie_pictures_and_tables(store: Path, tmp_path: Path) -> None:
    files = write_report(store, tmp_path)
    assert files.index == tmp_path / "index.html"
    assert len(files.images) == 6
    assert all(image.read_bytes().startswith(PNG) for image in files.images)
    rows = {table.name: list(csv.DictReader(table.open())) for table in files.tables}
    assert len(rows["requests.csv"]) == 11 * 20
    assert len(rows["cells.csv"]) == 11
    assert {row["verdict"] for row in rows["verdicts.csv"]} >= {"faster", "no verdict"}
    assert sum(row["status"] == "failed" for row in rows["requests.csv"]) == 5


def test_one_store_gives_one_page_to_the_byte(store: Path, folder: Path, tmp_path: Path) -> None:
    write_report(store, tmp_path)
    for file in sorted(folder.iterdir()):
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_text_from_outside_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    path = make_store(tmp_path / "s", arms=("ar", "dflash"), prompts=5, failed={("dflash", None): evil})
    page = render(analyse(path), title="<b>& co")
    assert evil not in page
    assert html.escape(evil) in page
    assert "<title>&lt;b&gt;&amp; co</title>" in page


def test_loads_get_sections_of_their_own_and_a_picture_over_concurrency(tmp_path: Path) -> None:
    path = make_store(
        tmp_path / "s",
        arms=("ar", "dflash", "ddtree"),
        budgets=(15, 63),
        concurrencies=(1, 8),
        temperatures=(0, 0.7),
    )
    page = Page(render(analyse(path)))
    assert {"load-c1-t0", "load-c8-t0", "load-c1-t0_7", "load-c8-t0_7", "concurrency"} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    figures = {name for name in page.ids if name.endswith("-figure")}
    assert {"concurrency-t0-figure", "accept-length-c8-t0_7-figure", "parity-c8-t0-figure"} <= figures
    assert "parity-c8-t0_7-figure" not in figures, "above temperature 0 outputs are draws"


@pytest.mark.parametrize(
    "changes",
    [
        {"arms": ("ar",)},
        {"arms": ("dflash",)},
        {"arms": ("ddtree",), "budgets": (127,)},
        {"arms": ("unsafe",)},
        {"prompts": 1},
        {"max_tokens": 2},
        {"engine": "sglang", "builder": "spine-first"},
        {"failed": {("ar", None): "x", ("dflash", None): "y"}},
    ],
)
def test_a_lopsided_run_still_gets_a_page(tmp_path: Path, changes: dict[str, object]) -> None:
    path = make_store(tmp_path / "s", **({"prompts": 5, "max_tokens": 24} | changes))
    page = Page(render(analyse(path)))
    assert page.wrong == []


def test_a_folder_that_is_a_file_is_bad_input(store: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(BadInput, match="taken"):
        write_report(store, tmp_path / "taken")


def test_a_full_disk_is_named(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BadEnvironment, match="the disk is full"):
        write_report(store, tmp_path / "out")
