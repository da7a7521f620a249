"""`ddtree verify` on real engines: sound ones pass, each fault fails its gate, no bundle tells more."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.compare.summary import build_summary
from ddtree_ops.schemas.acceptance import StageStatus, Verdict
from ddtree_ops.services.checkpoints import pair_path
from ddtree_ops.verify import bundle, job, sweep
from tests.integration.verify.conftest import Start, Verifier
from tests.support.ops import write_prompts

FEW = ("--prompts", "2", "--max-tokens", "16")
GATES_ONLY = ("--skip", "kernels,sweep")
NAME = "ddtree-acceptance/"


@pytest.mark.slow
def test_sound_arms_pass_and_the_bundle_holds_what_it_says_and_no_secret(
    verify: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home" / "alice"
    prompts = home / "secret-project" / "prompts.jsonl"
    prompts.parent.mkdir(parents=True)
    prompts.write_bytes((pair_path() / "prompts.jsonl").read_bytes())
    secrets = {"HF_TOKEN": "hf_abcdefgh12345678", "OTHER_API_KEY": "a-plain-looking-value"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    arms = ("--arm", "dflash,ddtree,unsafe", "--allow-hybrid-unsafe", "--dataset", str(prompts))
    assert verify("--engine", "local", *arms, *FEW) == 0, verify.events[-1]

    found = verify.bundle
    summary = found.summary
    assert summary.verdict is Verdict.PASSED
    assert found.failed("ddtree") == set()
    # The control: leaking states are noticed by every gate that can.
    assert found.failed("unsafe") == {"node-path", "sibling-swap", "parity"}
    assert {gate.control for gate in summary.gates if gate.service == "unsafe"} == {True}
    (path,) = (gate for gate in summary.gates if (gate.id, gate.service) == ("node-path", "ddtree"))
    assert 0 < path.value < 1e-5
    assert summary.kernels.status is StageStatus.SKIPPED
    assert summary.sweep.status is StageStatus.DONE
    assert set(summary.sweep.cells) == {"dflash", "ddtree 15", "ddtree 31", "ddtree 63"}
    assert summary.sweep.headline
    assert (summary.dataset["name"], summary.prompts) == ("prompts.jsonl", 2)

    names = {name.removeprefix(NAME) for name in found.files}
    assert names == {"summary.json", *summary.files}
    assert {"report.html", "results/store.json"} < names
    for name, digest in summary.files.items():
        assert hashlib.sha256(found.files[NAME + name]).hexdigest() == digest
    for name, data in found.files.items():
        target = tmp_path / "unpacked" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    read = build_summary(tmp_path / "unpacked" / NAME / "results")
    assert [cell["state"] for cell in read["cells"]] == ["complete"] * 4

    for word in (*secrets.values(), "alice", "secret-project", str(tmp_path)):
        assert [name for name, data in found.files.items() if word.encode() in data] == [], word
    assert not verify.out.with_name("bundle.work").exists()

    before = verify.out.read_bytes()
    assert verify("--engine", "local", *FEW) == 2
    assert "bundle.tar.gz exists already" in verify.error
    assert verify.out.read_bytes() == before


@pytest.mark.slow
def test_each_fault_of_an_engine_fails_its_gates_and_no_other(
    verify: Verifier, mangled: Callable[..., list[str]]
) -> None:
    faults = ("leak", "chain", "biased", "short --self-check 0")
    dflash, *trees = mangled("none --arm dflash", *faults)
    services = [word for url in trees for word in ("--service", f"ddtree={url}")]
    assert verify("--service", f"dflash={dflash}", *services, *FEW, *GATES_ONLY) == 1
    found = verify.bundle
    assert found.summary.verdict is Verdict.FAILED
    assert {name: found.failed(name) for name in ("ddtree", *(f"ddtree#{n}" for n in range(2, 5)))} == {
        "ddtree": {"node-path", "sibling-swap", "parity"},
        "ddtree#2": {"kernel-counter"},
        "ddtree#3": {"parity"},
        "ddtree#4": {"node-path", "sibling-swap", "spine"},
    }
    # Whoever reads it finds the place where outputs part, and what to do.
    gate = next(gate for gate in found.summary.gates if (gate.id, gate.service) == ("parity", "ddtree#3"))
    (first, *_) = gate.evidence["dflash"]["findings"]
    assert first["gap"] > first["threshold"] > 0
    assert gate.remedy
    assert list(found.files) == [NAME + "summary.json"]


def test_an_interrupted_kit_goes_on_where_it_was(
    verify: Verifier, stub: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = ("-s", f"dflash={stub('dflash')}", "-s", f"ddtree={stub('ddtree')}", *FEW)
    with monkeypatch.context() as patch:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(bundle, "pack", interrupt)
        assert verify(*services) == 130
    work = verify.out.with_name("bundle.work")
    assert (work / "results" / "store.json").is_file()
    assert not verify.out.exists()
    assert verify(*services) == 1  # the stub has no self-check
    assert verify.bundle.failed("ddtree") == {"node-path", "sibling-swap"}
    (run,) = (data for name, data in verify.bundle.files.items() if name.endswith("run.json"))
    assert len(json.loads(run)["reused"]) == 4
    assert not work.exists()


def test_a_server_that_dies_fails_its_gates_and_the_bundle_is_written(
    verify: Verifier, stub: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "START_TIMEOUT_S", 1.0)
    url = stub("ddtree", "--fault", "ddtree:dies-after:1")
    assert verify("-s", f"dflash={stub('dflash')}", "-s", f"ddtree={url}", *FEW) == 1
    found = verify.bundle
    assert found.failed("ddtree") >= {"spine", "kernel-counter", "parity"}
    assert found.summary.sweep.status is StageStatus.FAILED


def test_a_server_s_loose_tongue_stays_out_of_the_bundle(
    verify: Verifier, hostile: str, stub: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "build-box-7")
    assert verify("-s", f"ddtree={hostile}", "-s", f"dflash={stub('dflash')}", *FEW) == 1
    text = b"\n".join(verify.bundle.files.values())
    for word in PLANTED:
        assert word.encode() not in text, word
    assert b"HTTP 500" in text
    server = next(one for one in verify.bundle.summary.services if one.name == "ddtree-31").server
    assert server["served_model_name"] == "[folder]/target"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ((), 2, "--service, --engine: found both or neither"),
        (("--engine", "remote"), 2, "--engine: found 'remote', allowed: local"),
        (("-s", "http://x"), 2, "allowed: ARM=http://HOST:PORT"),
        (("-s", "tree=http://127.0.0.1:1"), 2, "found 'tree', allowed: ar, dflash"),
        (("-s", "ddtree=http://127.0.0.1:1"), 3, "/server_info cannot be read"),
        (("-s", "ddtree=http://127.0.0.1:1", "--skip", "gates"), 2, "--skip: found 'gates'"),
        (("-s", "ddtree=http://127.0.0.1:1", "--out", "x.zip"), 2, "allowed: a name that ends in .tar.gz"),
        (("-s", "ddtree=http://127.0.0.1:1", "--out", "no/where.tar.gz"), 2, "no such folder"),
        (("-s", "ddtree=http://127.0.0.1:1", "--prompts", "9999"), 2, "9999 were asked for"),
        (("--engine", "local", "--budget", "12"), 2, "--budget: found 12"),
    ],
)
def test_wrong_input_is_named_and_leaves_nothing(
    verify: Verifier, options: tuple[str, ...], code: int, said: str, tmp_path: Path
) -> None:
    assert verify(*options) == code
    assert said in verify.error
    assert list(tmp_path.iterdir()) == []


def test_services_that_cannot_be_judged_are_refused(verify: Verifier, stub: Start) -> None:
    chain, tree = stub("dflash"), stub("ddtree")
    assert verify("-s", f"ddtree={chain}", *FEW) == 2
    assert "found arm dflash, allowed: ddtree" in verify.error
    assert verify("-s", f"dflash={chain}", *FEW) == 2
    assert "found no ddtree" in verify.error
    assert verify("-s", f"ddtree={tree}", *FEW) == 2
    assert "found no dflash and no ar" in verify.error


def test_one_folder_gives_one_bundle_and_strangers_stay_out(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "results" / "runs").mkdir(parents=True)
    (folder / "logs").mkdir()
    for name in ("summary.json", "report.html", "results/runs/run.json", "logs/secret.log", "notes.txt"):
        (folder / name).write_text(name)
    bundle.pack(folder, tmp_path / "a.tar.gz")
    for path in folder.rglob("*"):
        path.chmod(0o700)
    bundle.pack(folder, tmp_path / "b.tar.gz")
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
    assert [str(path) for path in bundle.members(folder)] == [
        "report.html",
        "results/runs/run.json",
        "summary.json",
    ]


def test_the_work_folder_is_named_after_the_bundle() -> None:
    assert job.VerifyOptions(Path("a/b.tar.gz")).work == Path("a/b.work")


PLANTED = (
    "sk-very-secret-value",
    "hf_abcdefgh12345678",
    "/home/alice",
    "alice@corp.example",
    "10.20.30.40",
    "127.0.0.2",
    "build-box-7",
)
CHATTER = f"at {' and '.join(PLANTED)}: see http://build-box-7:8000/x?key=sk-very-secret-value"


class _Hostile(BaseHTTPRequestHandler):
    """Says all that it knows, in fields that are allowed and in errors."""

    def do_GET(self) -> None:
        block = {"arm": "ddtree", "engine": "sglang", "budget": 31, "builder": "best-first", "block": 16}
        check = {"trees": 2, "skipped": CHATTER, "dtype": "/home/alice/dtype"}
        info = {
            "version": "0.5.23",
            "served_model_name": "/home/alice/models/target",
            "attention_backend": CHATTER,
            "model_path": "/home/alice/models/target",
            "api_key": "sk-very-secret-value",
            "ddtree": {**block, "self_check": check},
        }
        self._answer(200, info)

    def do_POST(self) -> None:
        self._answer(500, {"error": {"message": CHATTER}})

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hostile() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.2", 0), _Hostile) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.2:{server.server_address[1]}"
        server.shutdown()


def test_the_prompts_of_a_stub_are_enough_for_the_gates(
    verify: Verifier, stub: Start, tmp_path: Path
) -> None:
    """A dataset of the user's own, and a near-tie that is counted."""
    prompts = write_prompts(tmp_path / "mine.jsonl", 2)
    tree = stub("ddtree", "--fault", "ddtree:near-tie")
    options = ("--dataset", str(prompts), *FEW, *GATES_ONLY)
    verify("-s", f"dflash={stub('dflash')}", "-s", f"ddtree={tree}", *options)
    gate = next(gate for gate in verify.bundle.summary.gates if gate.id.value == "parity")
    assert gate.evidence["dflash"]["different"] == 0
