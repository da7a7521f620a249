"""ansible-runner for real, over a local connection: what an outcome says, and what is left behind."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from ddtree_ops.errors import BadEnvironment, Interrupted, JobFailed
from ddtree_ops.hosts.facts import parse_facts
from ddtree_ops.hosts.inventory import Host, Inventory
from ddtree_ops.hosts.runner import Ansible, Event, RunStatus, SshOptions

from .conftest import LOCAL, local, play


@pytest.fixture(autouse=True)
def private_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the runner's private folders come and must go."""
    folder = tmp_path / "private"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_the_facts_of_this_machine_come_back_and_nothing_is_left(private_folders: Path) -> None:
    events: list[Event] = []
    outcome = local().run("facts.yml", variables={"facts_paths": ["/"]}, on_event=events.append)
    outcome.require_ok()
    host = parse_facts(outcome.facts["here"]["facts_capture"], name="here")
    assert host.kernel == os.uname().release
    assert outcome.changes == []
    assert [event.status for event in events] == ["ok", "ok"]
    assert list(private_folders.iterdir()) == []


def test_what_would_change_is_shown_then_done_then_not_done_again(tmp_path: Path) -> None:
    file = tmp_path / "made"
    book = play(
        tmp_path, f"- name: Make it\n  ansible.builtin.copy: {{content: hello, dest: {file}, mode: '0600'}}"
    )
    plan = local().run(book, check=True)
    assert [(change.host, change.task) for change in plan.changes] == [("here", "Make it")]
    assert "+hello" in plan.changes[0].diff
    assert not file.exists()
    first, second = local().run(book), local().run(book)
    assert (first.hosts["here"].changed, second.hosts["here"].changed) == (1, 0)
    assert file.read_text() == "hello"


def test_a_failed_task_is_named_with_its_message_and_secrets_are_hidden(
    tmp_path: Path, private_folders: Path
) -> None:
    book = play(
        tmp_path,
        """
- name: Say it
  ansible.builtin.debug: {msg: "the token is {{ lookup('ansible.builtin.env', 'TOKEN') }}"}
- name: Break
  ansible.builtin.fail: {msg: "no such thing as {{ secret_token }}"}
""",
    )
    ansible = local(tmp_path / "logs", {"TOKEN": "hunter2hunter2"}, secret_token="swordfish")
    outcome = ansible.run(book, deadline_s=60)
    assert outcome.status is RunStatus.FAILED
    assert outcome.failed["here"].startswith("Break: no such thing as")
    with pytest.raises(JobFailed, match=r"play\.yml failed: here: Break: no such thing") as caught:
        outcome.require_ok()
    assert outcome.log is not None
    assert str(outcome.log) in str(caught.value.remedy)
    text = outcome.log.read_text()
    assert "hunter2" not in text
    assert "swordfish" not in text
    assert "the token is [hidden]" in text
    assert outcome.log.stat().st_mode & 0o777 == 0o600
    assert list(private_folders.iterdir()) == []


def test_a_failed_command_is_shown_with_its_own_words(tmp_path: Path) -> None:
    book = play(tmp_path, "- ansible.builtin.command: {argv: [sh, -c, 'echo so what >&2; exit 3']}")
    assert local().run(book).failed["here"].endswith("non-zero return code: so what")


def test_a_run_without_statistics_is_a_failure(tmp_path: Path) -> None:
    book = tmp_path / "broken.yml"
    book.write_text("- hosts: all\n  nonsense: true\n")
    outcome = local(tmp_path / "logs").run(book)
    assert outcome.status is RunStatus.FAILED
    assert "without statistics" in outcome.reason
    assert "nonsense" in outcome.reason


def test_a_play_that_reaches_no_host_is_a_failure(tmp_path: Path) -> None:
    outcome = local().run(play(tmp_path, "- ansible.builtin.debug: {}", hosts="nobody"))
    assert outcome.status is RunStatus.FAILED
    assert "here" in outcome.reason


def test_the_deadline_ends_a_play(tmp_path: Path) -> None:
    book = play(tmp_path, "- ansible.builtin.command: {argv: [sleep, '600']}")
    started = time.monotonic()
    outcome = local().run(book, deadline_s=3)
    assert outcome.status is RunStatus.TIMED_OUT
    assert time.monotonic() - started < 300


def test_ctrl_c_ends_a_play_and_is_said(tmp_path: Path, private_folders: Path) -> None:
    started = tmp_path / "started"
    book = play(
        tmp_path,
        f"- ansible.builtin.file: {{path: {started}, state: touch, mode: '0600'}}\n"
        "- ansible.builtin.command: {argv: [sleep, '60']}",
    )

    def press() -> None:
        deadline = time.monotonic() + 60
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(Interrupted, match="what it had done by then stays"):
        local().run(book)
    thread.join()
    assert list(private_folders.iterdir()) == []


def test_variables_and_inventory_are_readable_by_their_owner_only(
    tmp_path: Path, private_folders: Path
) -> None:
    book = play(
        tmp_path,
        f"- ansible.builtin.command: {{argv: [find, {private_folders}, -perm, /077, -not, -type, l]}}\n"
        "  register: found\n"
        "- ansible.builtin.set_fact: {open_files: '{{ found.stdout_lines }}', word: '{{ word }}'}",
    )
    ansible = Ansible(
        Inventory((Host("here", LOCAL),)), ssh=SshOptions(become=False, become_password="unused")
    )
    outcome = ansible.run(book, variables={"word": "x"})
    outcome.require_ok()
    inside = [name for name in outcome.facts["here"]["open_files"] if name != str(private_folders)]
    inside = [name for name in inside if Path(name).name in {"variables.json", "hosts.json"}]
    assert inside == []
    assert outcome.facts["here"]["word"] == "x"


def test_host_keys_are_checked_whatever_the_operators_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANSIBLE_HOST_KEY_CHECKING", "False")
    setting = "{{ lookup('ansible.builtin.config', 'HOST_KEY_CHECKING') }}"
    book = play(tmp_path, f'- ansible.builtin.set_fact: {{checked: "{setting}"}}')
    outcome = local().run(book)
    outcome.require_ok()
    assert outcome.facts["here"]["checked"] is True


def test_a_missing_playbook_is_said() -> None:
    with pytest.raises(BadEnvironment, match="no such playbook"):
        local().run("nothing.yml")
