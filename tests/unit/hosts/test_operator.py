"""The operator's machine, secrets and the Hub: real files, real ports, a real HTTP server."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.cli import app
from ddtree_ops.errors import BadInput
from ddtree_ops.hosts.checks import Status
from ddtree_ops.hosts.hub import Access, probe_revision
from ddtree_ops.hosts.operator import ROWS, check_operator
from ddtree_ops.hosts.secrets import resolve_secret
from ddtree_ops.schemas.cluster import Secret

from .captured import FOLDER, capture


class Hub(http.server.BaseHTTPRequestHandler):
    """A Hub with an open model, one that is gated and one whose server is broken."""

    def do_HEAD(self) -> None:
        repo = "/".join(self.path.split("/")[1:3])
        token = self.headers.get("Authorization")
        status, code = {
            "open/model": (302, ""),
            "gated/model": (200, "") if token == "Bearer good" else (403, "GatedRepo"),
            "broken/model": (500, ""),
        }.get(repo, (404, "RepoNotFound"))
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if status < 400:
            self.send_header("X-Repo-Commit", "c" * 40)
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("repo", "token", "access"),
    [
        ("open/model", None, Access.OK),
        ("gated/model", None, Access.GATED),
        ("gated/model", "bad", Access.GATED),
        ("gated/model", "good", Access.OK),
        ("no/model", "good", Access.MISSING),
        ("broken/model", "good", Access.UNREACHABLE),
    ],
)
def test_the_hub_is_asked_for_a_file(hub: str, repo: str, token: str | None, access: Access) -> None:
    answer = probe_revision(repo, "main", token=token, endpoint=hub)
    assert answer.access is access
    assert answer.commit == ("c" * 40 if access is Access.OK else None)


def test_a_hub_that_is_not_there_is_not_a_refusal() -> None:
    answer = probe_revision("open/model", "main", token=None, endpoint="http://127.0.0.1:9")
    assert answer.access is Access.UNREACHABLE


def secret_file(folder: Path, text: str, mode: int = 0o600) -> Secret:
    file = folder / "secret"
    file.write_text(text)
    file.chmod(mode)
    return Secret(file=Path("secret"))


def test_a_secret_comes_from_its_file_or_variable(tmp_path: Path) -> None:
    assert resolve_secret(secret_file(tmp_path, "hunter2\n"), key="k", folder=tmp_path) == "hunter2"
    found = resolve_secret(Secret(env="T"), key="k", folder=tmp_path, environment={"T": "hunter2"})
    assert found == "hunter2"
    assert resolve_secret(None, key="k", folder=tmp_path) is None


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("hunter2", 0o640, "found mode 0640, allowed: 0600"),
        ("hunter2", 0o604, "found mode 0604"),
        ("", 0o600, "found nothing, allowed: one line"),
        ("hunter2\nmore", 0o600, "found several lines"),
    ],
)
def test_a_secret_that_others_read_or_that_is_none_is_refused(
    text: str, mode: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        resolve_secret(secret_file(tmp_path, text, mode), key="secrets.k", folder=tmp_path)
    assert "hunter2" not in caught.value.message


def test_an_unset_variable_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"secrets\.k: found no variable NOT_SET"):
        resolve_secret(Secret(env="NOT_SET"), key="secrets.k", folder=tmp_path, environment={})
    with pytest.raises(BadInput, match=r"secrets.k: .*gone cannot be read"):
        resolve_secret(Secret(file=Path("gone")), key="secrets.k", folder=tmp_path)


def cluster_file(folder: Path, **changes: Any) -> Path:
    data = {
        "schema": 1,
        "name": "lab",
        "hosts": {"inline": {"good": {}, "xid": {}}},
        "model": {"repo": "open/model", "revision": "c" * 40},
        "drafter": {"repo": "gated/model", "revision": "d" * 40},
        "image": {"digest": "sha256:" + "0" * 64},
        "secrets": {"hf_token": {"file": "secret"}},
        "services": [{"name": "tree", "arm": "ddtree", "budget": 31, "port": 30001}],
        **changes,
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def statuses(folder: Path, **changes: Any) -> dict[str, Status]:
    found = check_operator(cluster_file=cluster_file(folder, **changes), ports=(), folder=folder)
    return {one.id: one.status for one in found}


def test_a_good_cluster_file_passes_with_a_token_that_may(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub)
    secret_file(tmp_path, "good")
    found = statuses(tmp_path)
    ids = ("config.file", "config.secrets", "config.pins", "hub.model", "hub.drafter", "operator.ansible")
    assert {id: found[id] for id in ids} == dict.fromkeys(ids, Status.PASS)


def test_each_fault_of_a_cluster_file_is_found(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub)
    secret_file(tmp_path, "bad", 0o644)
    found = statuses(tmp_path, image={}, ssh={"known_hosts": str(tmp_path / "none")})
    assert found["config.secrets"] is Status.FAIL
    assert found["hub.drafter"] is Status.FAIL
    assert found["config.pins"] is Status.WARN
    assert found["operator.known_hosts"] is Status.WARN
    assert statuses(tmp_path, surprise=1)["config.file"] is Status.FAIL


def test_offline_says_nothing_about_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    secret_file(tmp_path, "good")
    found = statuses(tmp_path)
    assert (found["hub.model"], found["hub.drafter"]) == (Status.SKIP, Status.SKIP)


def test_a_port_in_use_is_found(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = {one.id: one for one in check_operator(ports=(port,), folder=tmp_path)}["operator.ports"]
    assert (found.status, found.found) == (Status.WARN, f"{port} in use")
    assert found.remedy == ROWS["operator.ports"].remedy


def test_every_row_is_looked_at_and_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    secret_file(tmp_path, "good")
    assert set(statuses(tmp_path)) == set(ROWS)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = app.run([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_doctor_exits_0_1_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run(capsys, "doctor", "--port", "1023,1")
    assert (code, answer["ok"]) == (0, True)
    code, answer = run(capsys, "doctor", "--cluster", str(tmp_path / "none.yaml"))
    assert (code, answer["ok"]) == (1, False)
    code, answer = run(capsys, "doctor", "--port", "70000")
    assert code == 2
    assert "--port: found 70000" in answer["message"]


def test_check_judges_captured_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name in ("good", "xid"):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(capture(name)))
        files += ["--facts", str(file)]
    cluster = str(cluster_file(tmp_path))
    code, answer = run(capsys, "deploy", "check", "-f", cluster, *files)
    failed = {(one["host"], one["id"]) for one in answer["findings"] if one["status"] == "fail"}
    assert (code, failed) == (1, {("xid", "kernel.xid"), ("xid", "gpu.count")})
    code, answer = run(capsys, "deploy", "check", "-f", cluster, *files[:2])
    assert (code, answer["ok"]) == (0, True)


def test_people_see_what_does_not_pass_and_what_to_try(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "no-runtime.json"
    file.write_text(json.dumps(capture("no-runtime")))
    assert app.run(["deploy", "check", "-f", str(cluster_file(tmp_path)), "--facts", str(file)]) == 1
    text = capsys.readouterr().out
    assert "capabilities: [[gpu]]" in text
    assert "try: install nvidia-container-toolkit" in text


def test_a_file_that_is_no_capture_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = FOLDER / "x8-slot.json"  # changes to a capture are none
    code, answer = run(capsys, "deploy", "check", "-f", str(cluster_file(tmp_path)), "--facts", str(file))
    assert code == 2
    assert "found no capture of schema 1" in answer["message"]


def test_init_writes_a_file_that_loads_and_overwrites_only_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ddtree_ops.config_file import load_config
    from ddtree_ops.schemas.cluster import Cluster

    file = tmp_path / "cluster.yaml"
    assert run(capsys, "deploy", "init", str(file))[0] == 0
    load_config(file, Cluster)
    assert run(capsys, "deploy", "init", str(file))[0] == 2
    assert run(capsys, "deploy", "init", str(file), "--force")[0] == 0
    assert run(capsys, "deploy", "init", str(tmp_path / "no" / "c.yaml"))[0] == 2
