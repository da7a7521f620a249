"""How the GPU plan talks to a server that refuses, hangs up or ends."""

import http.client
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

from engine.servers import Server


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def server_at(listener, process):
    server = Server.__new__(Server)
    server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.process, server.began, server.refused, server.ready_after = process, 0.0, None, None
    return server


def answering(listener, answer):
    """Answer every connection with these bytes and hang up, until the listener is closed."""

    def loop():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(answer(connection))

    threading.Thread(target=loop, daemon=True).start()


def test_a_server_that_hangs_up_is_known_to_have_ended(listener):
    answering(listener, lambda connection: b"")
    with subprocess.Popen([sys.executable, "-c", "import json"]) as process:
        server = server_at(listener, process)
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            server.generate([1], 1)
        assert server.ended


def test_a_server_that_answers_with_an_error_is_not_waited_for_and_says_it(listener):
    said = json.dumps({"error": {"message": "no such kernel"}}).encode()
    head = f"HTTP/1.1 500 Oh\r\nContent-Length: {len(said)}\r\nConnection: close\r\n\r\n".encode()
    answering(listener, lambda connection: head + said)
    server = server_at(listener, SimpleNamespace(poll=lambda: None))
    assert not server.wait(600)
    assert "no such kernel" in server.refused
