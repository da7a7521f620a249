"""Pages: whole, pointing at what exists, and with commands that the real command line takes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from ddtree_ops.cli import app
from ddtree_ops.errors import BadInput
from ddtree_ops.hosts.checks import CHECKS
from ddtree_ops.hosts.runner import playbooks_folder
from ddtree_ops.runbooks.page import FOLDER, SECTIONS, Severity, all_pages, find_page, load_page, pages_about

PAGES = all_pages()
MONITORING = playbooks_folder() / "roles" / "monitoring" / "files"
RULES = [
    rule
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
ROOT = typer.main.get_command(app.app)
IDS = {
    "accept-length", "add-host", "arm-restart", "disk-full", "driver-upgrade", "gpu-throttling", "gpu-xid",
    "image-upgrade", "nccl-hang", "out-of-memory", "output-differs", "remove-all", "rotate-keys",
    "stuck-start",
}  # fmt: skip


def test_ids_are_stable() -> None:
    """Scripts, alerts and people's notes name them."""
    assert PAGES.keys() == IDS


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
class TestPage:
    def test_has_every_section_in_order_and_something_in_each(self, page) -> None:
        assert tuple(page.sections) == SECTIONS
        assert all(len(text) > 60 for text in page.sections.values())

    def test_points_to_checks_and_alerts_that_exist(self, page) -> None:
        assert set(page.checks) <= CHECKS.keys()
        assert set(page.alerts) <= {rule["alert"] for rule in RULES}

    def test_names_metrics_that_are_collected(self, page) -> None:
        known = (MONITORING / "alerts.yml").read_text() + (MONITORING / "dashboard.json").read_text()
        exported = "sglang:num_retracted_reqs ddtree_chain_accepted_total"  # not drawn, but there
        for metric in page.metrics:
            assert re.search(rf"(?<![\w:]){metric}(?![\w:])", f"{known} {exported}"), metric

    def test_speaks_of_checks_that_exist(self, page) -> None:
        """Names like `gpu.pcie` in the text are ids, too."""
        groups = "|".join(sorted({id.partition(".")[0] for id in CHECKS}))
        keys = {
            "driver.branch",
            "driver.allow_reboot",
            "driver.manage",
            "gpu.count",
            "gpu.power_cap_w",
        }  # cluster.yaml
        for name in re.findall(rf"`((?:{groups})\.[a-z_0-9]+)`", page.text):
            assert name in CHECKS.keys() | keys, name

    def test_gives_commands_that_exist(self, page) -> None:
        found = list(commands(page.text))
        assert found
        for line in found:
            try:
                parse(shlex.split(line)[1:])
            except Exception as error:
                pytest.fail(f"{line}: {error}")

    def test_has_the_play_that_it_promises(self, page) -> None:
        file = playbooks_folder() / page.playbook
        assert file.is_file() == page.play
        if not page.play:
            assert (page.settings, page.needs) == ({}, ())
            return
        assert f"ddtree runbook run {page.id}" in page.text
        for name, setting in page.settings.items():
            defaults = {}
            for play in yaml.safe_load(file.read_text()):
                defaults.update(play.get("vars", {}))
            assert defaults[f"runbook_{name}"] == setting.default, (
                f"{name}: page and play have other defaults"
            )

    def test_refers_to_other_pages_by_ids_that_exist(self, page) -> None:
        listed = re.findall(r"\bpages? ((?:[a-z]+-[a-z-]+)(?:(?:, | and )[a-z]+-[a-z-]+)*)", page.text)
        for name in re.split(r", | and ", ", ".join(listed)) if listed else ():
            assert name in PAGES, name


def test_every_alert_has_a_page() -> None:
    pointed = {alert for page in PAGES.values() for alert in page.alerts}
    assert {rule["alert"] for rule in RULES} == pointed


def test_alerts_that_get_somebody_up_lead_to_pages_that_are_written_for_it() -> None:
    for rule in RULES:
        severities = [page.severity for page in PAGES.values() if rule["alert"] in page.alerts]
        if rule["labels"]["severity"] == "page":
            assert severities == [Severity.PAGE], rule["alert"]


def test_a_play_without_a_page_would_never_be_found() -> None:
    plays = {file.stem for file in (playbooks_folder() / "runbooks").glob("*.yml")}
    assert plays == {page.id for page in PAGES.values() if page.play}


def test_remedies_of_checks_name_runbooks_that_exist_and_point_back() -> None:
    named = [
        (check.id, name)
        for check in CHECKS.values()
        for name in re.findall(r"runbook ([\w-]+)", check.remedy)
    ]
    assert named
    for check, name in named:
        assert check in PAGES[name].checks


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ("gpu-xids", "ddtree runbook show gpu-xid"),
        ("disk", "ddtree runbook show disk-full"),
        ("GpuHot", "ddtree runbook show gpu-throttling"),
        ("zzz", "ddtree runbook list"),
    ],
)
def test_an_unknown_id_leads_to_the_closest(asked: str, remedy: str) -> None:
    with pytest.raises(BadInput) as caught:
        find_page(asked)
    assert (caught.value.remedy or "").split(" or ")[0] == remedy


def test_pages_are_found_by_alert_check_metric_and_word() -> None:
    assert [page.id for page in pages_about("DiskLow")] == ["disk-full"]
    assert [page.id for page in pages_about("driver.held")] == ["driver-upgrade"]
    assert [page.id for page in pages_about("up")] == ["stuck-start"], (
        "a metric's name is no word to search for"
    )
    assert "nccl-hang" in [page.id for page in pages_about("watchdog")]
    assert pages_about("kubernetes") == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("# A title\n", "no front matter"),
        ("---\nid: other\ntitle: t\nseverity: warn\nplay: false\n---\n\nx", "its id is"),
    ],
)
def test_a_broken_page_is_named(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "page.md"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"page.md: {reason}"):
        load_page(file)


def test_show_raw_is_the_page_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["runbook", "show", "disk-full", "--raw"]) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith(
        (FOLDER / "disk-full.md").read_text().partition("## Symptom")[2].rstrip()
    )


def test_show_renders_for_people_and_keeps_the_commands_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["runbook", "show", "gpu-xid"]) == 0
    printed = capsys.readouterr().out
    assert "ddtree runbook run gpu-xid --limit LIMIT" in printed
    assert "ddtree deploy check --limit gpu-a" in printed
    assert "##" not in printed


def test_list_as_json_has_what_scripts_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["runbook", "list", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {page["id"] for page in answer["pages"]} == IDS
    assert all("text" not in page for page in answer["pages"])


def commands(text: str) -> Iterator[str]:
    """Every line of ddtree in code blocks and in code spans, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    for line in "\n".join(blocks).splitlines():
        if line.strip().startswith("ddtree "):
            yield line.partition("#")[0].strip()
    spans = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from (" ".join(span.split()) for span in re.findall(r"`(ddtree [^`]+)`", spans))


def parse(words: list[str]) -> None:
    """Let the real command line read the words, without running anything. Raises its own errors."""
    command = ROOT
    context = command.make_context("ddtree", [], resilient_parsing=True)
    while hasattr(command, "resolve_command"):
        group = command.name
        _, command, words = command.resolve_command(context, words)
        assert command is not None, f"{group} has no such command"
        context = command.make_context(
            command.name, list(words), parent=context, resilient_parsing=hasattr(command, "resolve_command")
        )
