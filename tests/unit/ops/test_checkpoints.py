from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ddtree_ops.errors import BadInput
from ddtree_ops.schemas.sweep import LocalEngine
from ddtree_ops.services.argv import find_models
from ddtree_ops.services.checkpoints import checkpoint_sha256, find_checkpoint
from tests.support.ops import write_checkpoint

REPOSITORIES = {
    "org/gated": (403, "GatedRepo"),
    "org/locked": (401, "GatedRepo"),
    "org/unknown": (401, "RepoNotFound"),
    "org/gone": (404, "RepoNotFound"),
    "org/open": (200, None),
}


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        repository = "/".join(self.path.split("/")[1:3])
        status, code = REPOSITORIES[repository]
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        return None


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A stand-in for the Hub, and an empty local cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("repository", "complaint", "remedy"),
    [
        ("org/gated", "gated", "accept its licence"),
        ("org/locked", "gated", "accept its licence"),
        ("org/unknown", "no repository org/unknown", ""),
        ("org/gone", "no repository org/gone", ""),
        ("org/open", "not on this machine", "hf download org/open"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_a_hub_id_is_refused_with_the_reason(repository: str, complaint: str, remedy: str) -> None:
    with pytest.raises(BadInput, match=complaint) as caught:
        find_checkpoint(Path(repository), what="--model")
    assert remedy in (caught.value.remedy or "")


def test_a_hub_that_cannot_be_reached_is_said_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(BadInput, match="cannot be reached"):
        find_checkpoint(Path("org/gated"), what="--model")


def test_a_downloaded_hub_id_is_found_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    base = tmp_path / "hub" / "models--org--name"
    write_checkpoint(base / "snapshots" / "abc")
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("abc\n")
    assert find_checkpoint(Path("org/name"), what="--model") == base / "snapshots" / "abc"


def test_what_is_no_checkpoint_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--model: no such folder"):
        find_checkpoint(tmp_path / "a" / "none", what="--model")
    with pytest.raises(BadInput, match=r"no config\.json"):
        find_checkpoint(tmp_path, what="--model")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(BadInput, match="is a file"):
        find_checkpoint(tmp_path / "model.gguf", what="--model")


def test_the_hash_covers_config_and_shards(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path / "one")
    plain = hashlib.sha256(b"config.json\0{}model.safetensors\0weights").hexdigest()
    assert checkpoint_sha256(one) == plain
    (one / "config.json").write_text('{"x": 1}')
    assert checkpoint_sha256(one) != plain


def test_sharded_checkpoints_are_hashed_by_their_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "2.safetensors", "a": "1.safetensors"}}))
    (tmp_path / "1.safetensors").write_bytes(b"1")
    with pytest.raises(BadInput, match=r"2\.safetensors: cannot be read"):
        checkpoint_sha256(tmp_path)
    (tmp_path / "2.safetensors").write_bytes(b"2")
    assert checkpoint_sha256(tmp_path)
    index.write_text("{}")
    with pytest.raises(BadInput, match="not a safetensors index"):
        checkpoint_sha256(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"no model\.safetensors"):
        checkpoint_sha256(tmp_path)


def test_target_and_drafter_belong_together(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="belong together"):
        find_models(LocalEngine(model=tmp_path))
