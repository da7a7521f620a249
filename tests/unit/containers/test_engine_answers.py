"""What an engine says that is wrong, cut short or late, from a fake one on a Unix socket."""

from __future__ import annotations

import io
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.containers.engine import Engine
from ddtree_ops.containers.failures import DockerFailure
from ddtree_ops.containers.spec import ContainerSpec

from .conftest import FakeServer, Handler

IMAGE = "sha256:" + "a" * 64
STATE = {"Status": "exited", "ExitCode": 3, "StartedAt": "2026-01-01T00:00:00.123456789Z"}
CONTAINER = {
    "Id": "c" * 64,
    "Name": "/lab-ddtree-0",
    "Image": IMAGE,
    "State": STATE,
    "Config": {"Tty": False},
}


def spec(**changes: Any) -> ContainerSpec:
    return ContainerSpec("lab-ddtree-0", "lab", "ddtree", 0, IMAGE, ("serve",), **changes)


def error(status: int, text: str) -> Any:
    return lambda handler: handler.json(status, {"message": text})


def frame(text: bytes) -> bytes:
    return struct.pack(">BxxxL", 1, len(text)) + text


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ('could not select device driver "" with capabilities: [[gpu]]', "nvidia-container-toolkit"),
        ("nvidia-container-cli: device error: GPU-1: unknown device", "nvidia-smi -L"),
        ("write /var/lib/docker/x: no space left on device", "docker system df"),
        ("listen tcp 127.0.0.1:30000: bind: address already in use", "ss -ltnp"),
        ("error setting rlimit type 8: operation not permitted", "ulimits"),
    ],
)
def test_an_engine_s_error_keeps_its_words_and_gets_a_remedy(
    engine: Engine, server: FakeServer, text: str, remedy: str
) -> None:
    server.answers["POST /containers/lab-ddtree-0/start"] = error(500, text)
    with pytest.raises(DockerFailure, match="gpu-a: start of lab-ddtree-0: ") as caught:
        engine.start("lab-ddtree-0")
    assert text in caught.value.message
    assert caught.value.status == 500
    assert remedy in (caught.value.remedy or "")


def test_secrets_in_an_engine_s_error_are_taken_out(engine: Engine, server: FakeServer) -> None:
    server.answers["POST /containers/create"] = error(500, "invalid: API_KEY=sesame-open-4711")
    with pytest.raises(DockerFailure) as caught:
        engine.create(spec(secret_env=("API_KEY",)), {"API_KEY": "sesame-open-4711"})
    assert "sesame" not in caught.value.message


def test_a_failed_start_removes_only_what_never_ran(engine: Engine, server: FakeServer) -> None:
    server.answers["POST /containers/lab-ddtree-0/start"] = error(500, "no")
    server.answers["GET /containers/lab-ddtree-0/json"] = lambda h: h.json(200, CONTAINER)
    with pytest.raises(DockerFailure):
        engine.start("lab-ddtree-0")
    assert not any(request.startswith("DELETE") for request in server.seen)
    created = {**CONTAINER, "State": {"Status": "created", "StartedAt": "0001-01-01T00:00:00Z"}}
    server.answers["GET /containers/lab-ddtree-0/json"] = lambda h: h.json(200, created)
    with pytest.raises(DockerFailure):
        engine.start("lab-ddtree-0")
    assert f"DELETE /containers/{'c' * 64}" in server.seen


@pytest.mark.parametrize(
    ("events", "end", "message"),
    [
        ([{"stream": "Step 1/2 : FROM base\n"}], True, "broke off: no image id(?s:.*)Step 1/2"),
        ([{"stream": "Step 1/2 : FROM base\n"}], False, "broke off"),
        (
            [{"stream": "RUN x\n"}, {"error": "exit code 1", "errorDetail": {}}],
            True,
            "exit code 1(?s:.*)RUN x",
        ),
        ([{"aux": {"ID": IMAGE}}], True, "is not there"),
        ([{"aux": {"ID": IMAGE}}], False, "broke off"),
    ],
)
def test_a_build_without_an_image_at_its_end_is_no_build(
    engine: Engine, server: FakeServer, events: list[dict[str, Any]], end: bool, message: str
) -> None:
    server.answers["POST /build"] = lambda handler: handler.events(*events, end=end)
    with pytest.raises(DockerFailure, match=message):
        engine.build(io.BytesIO(b"tar"), tag="ddtree/x:1")


@pytest.mark.parametrize(
    ("events", "end"),
    [([], True), ([{"stream": "Loading"}], True), ([{"stream": f"Loaded image ID: {IMAGE}\n"}], False)],
)
def test_a_load_without_an_image_at_its_end_is_no_load(
    engine: Engine, server: FakeServer, events: list[dict[str, Any]], end: bool
) -> None:
    server.answers["GET /images/"] = lambda handler: handler.json(200, {"Id": IMAGE})
    server.answers["POST /images/load"] = lambda handler: handler.events(*events, end=end)
    with pytest.raises(DockerFailure, match="broke off"):
        engine.load([b"tar"])


def test_a_load_that_says_what_it_loaded_is_one(engine: Engine, server: FakeServer) -> None:
    server.answers["GET /images/"] = lambda handler: handler.json(200, {"Id": IMAGE})
    server.answers["POST /images/load"] = lambda h: h.events({"stream": "Loaded image: ddtree/x:1\n"})
    assert engine.load([b"tar", b"ball"]) == IMAGE
    assert "GET /images/ddtree/x:1/json" in server.seen


def test_a_saved_tar_that_breaks_off_is_an_error_and_not_a_short_tar(
    engine: Engine, server: FakeServer
) -> None:
    server.answers[f"GET /images/{IMAGE}/get"] = lambda handler: handler.stream(b"half", end=False)
    with pytest.raises(DockerFailure, match="broke off"):
        list(engine.save(IMAGE))


@pytest.mark.parametrize("end", [True, False])
def test_a_log_that_breaks_off_is_not_a_log_that_ends(engine: Engine, server: FakeServer, end: bool) -> None:
    server.answers["GET /containers/lab-ddtree-0/json"] = lambda handler: handler.json(200, CONTAINER)
    server.answers["GET /containers/lab-ddtree-0/logs"] = lambda handler: handler.stream(
        frame(b"one\ntw"), frame(b"o\napi_key=ses"), frame(b"ame-open\n"), end=end
    )
    lines = engine.logs("lab-ddtree-0", follow=True)
    assert [next(lines) for _ in range(3)] == [b"one\n", b"two\n", b"api_key=[redacted]\n"]
    if end:
        assert list(lines) == []
    else:
        with pytest.raises(DockerFailure, match="broke off"):
            next(lines)


def test_a_log_that_breaks_off_keeps_the_container(
    engine: Engine, server: FakeServer, tmp_path: Path
) -> None:
    server.answers[f"GET /containers/{'c' * 64}/logs"] = lambda h: h.stream(frame(b"one\n"), end=False)
    server.answers["GET /containers/"] = lambda handler: handler.json(200, CONTAINER)
    with pytest.raises(DockerFailure):
        engine.remove("lab-ddtree-0", log_folder=tmp_path / "kept")
    assert not any(request.startswith("DELETE") for request in server.seen)
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.read_text().splitlines()[1] == "one"


def test_a_silent_engine_is_given_up_at_the_call_s_own_time_limit(engine: Engine, server: FakeServer) -> None:
    server.answers["POST /containers/lab-ddtree-0/exec"] = lambda handler: handler.json(201, {"Id": "e"})

    def never(handler: Handler) -> None:
        server.released.wait(300)

    server.answers["POST /exec/e/start"] = never
    started = time.monotonic()
    with pytest.raises(DockerFailure, match=r"no answer in 0\.3 s") as caught:
        engine.exec("lab-ddtree-0", ["nvidia-smi"], timeout_s=0.3)
    assert caught.value.timed_out
    assert time.monotonic() - started < 60


def test_output_that_arrives_together_with_the_header_is_not_lost(engine: Engine, server: FakeServer) -> None:
    """A slow network joins what the engine wrote apart."""

    def at_once(handler: Handler) -> None:
        head = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        handler.wfile.write(head + frame(b"GPU 0\n") + frame(b"GPU 1\n"))
        handler.close_connection = True

    server.answers["POST /containers/lab-ddtree-0/exec"] = lambda handler: handler.json(201, {"Id": "e"})
    server.answers["POST /exec/e/start"] = at_once
    server.answers["GET /exec/e/json"] = lambda handler: handler.json(200, {"Running": False, "ExitCode": 0})
    assert engine.exec("lab-ddtree-0", ["nvidia-smi", "-L"], timeout_s=60) == (0, "GPU 0\nGPU 1\n")


def test_a_stream_that_drips_is_given_up_as_well(engine: Engine, server: FakeServer) -> None:
    """A time limit for each read would never strike here."""

    def drip(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        while not server.released.wait(0.05):
            handler.wfile.write(b"14\r\n" + b'{"stream": "step\\n"}' + b"\r\n")

    server.answers["POST /build"] = drip
    lines: list[str] = []
    with pytest.raises(DockerFailure, match=r"no answer in 0\.5 s"):
        engine.build(io.BytesIO(b"tar"), on_line=lines.append, timeout_s=0.5)
    assert "step" in lines


def test_a_pull_shows_how_far_it_is_and_must_end_with_a_status(engine: Engine, server: FakeServer) -> None:
    layers = [
        {"status": "Pulling from engine", "id": "v1"},
        {"status": "Downloading", "id": "l1", "progressDetail": {"current": 1 << 29, "total": 1 << 30}},
        {"status": "Downloading", "id": "l2", "progressDetail": {"current": 1 << 29, "total": 1 << 30}},
        {"status": "Pull complete", "id": "l1"},
    ]
    done = {"status": "Status: Downloaded newer image for engine:v1"}
    server.answers["POST /images/create"] = lambda handler: handler.events(*layers, done)
    server.answers["GET /images/"] = lambda handler: handler.json(200, {"Id": IMAGE})
    lines: list[str] = []
    assert engine.pull("engine:v1", on_line=lines.append, clock=iter(range(0, 99, 3)).__next__) == IMAGE
    assert "l1: Pull complete" in lines
    assert "downloaded 1.00 of 2.00 GiB in 2 layers so far" in lines
    server.answers["POST /images/create"] = lambda handler: handler.events(*layers)
    with pytest.raises(DockerFailure, match="broke off"):  # the old image of that tag is still there
        engine.pull("engine:v1")


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_pull_that_is_refused_says_so(engine: Engine, server: FakeServer, status: int) -> None:
    server.answers["POST /images/create"] = error(status, "pull access denied for engine")
    with pytest.raises(DockerFailure, match="pull access denied") as caught:
        engine.pull("engine:v1")
    assert "docker login" in (caught.value.remedy or "")


def test_an_answer_that_is_no_json_is_an_error_of_the_engine(engine: Engine, server: FakeServer) -> None:
    def garbage(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "4")
        handler.end_headers()
        handler.wfile.write(b"<ht>")

    server.answers["GET /info"] = garbage
    with pytest.raises(DockerFailure, match="broke off"):
        engine.info()


def test_a_proxy_s_html_error_is_shown_as_text(engine: Engine, server: FakeServer) -> None:
    def html(handler: Handler) -> None:
        handler.send_response(502)
        handler.send_header("Content-Length", "11")
        handler.end_headers()
        handler.wfile.write(b"bad gateway")

    server.answers["GET /info"] = html
    with pytest.raises(DockerFailure, match="bad gateway"):
        engine.info()


def test_containers_that_vanish_while_they_are_listed_are_left_out(
    engine: Engine, server: FakeServer
) -> None:
    server.answers["GET /containers/json"] = lambda handler: handler.json(
        200, [{"Id": "c" * 64}, {"Id": "gone"}]
    )
    server.answers[f"GET /containers/{'c' * 64}/json"] = lambda handler: handler.json(200, CONTAINER)
    assert [found.name for found in engine.ours("lab")] == ["lab-ddtree-0"]


def test_no_connection_is_kept_that_would_be_dead_after_a_reconnect(
    engine: Engine, server: FakeServer
) -> None:
    connections: list[str] = []

    def create(handler: Handler) -> None:
        connections.append(str(handler.headers["Connection"]))
        handler.json(201, {"Id": "n" * 64})

    server.answers["POST /containers/create"] = create
    assert engine.create(spec()) == "n" * 64
    assert connections == ["close"]
