"""`ddtree deploy` on a real Docker engine: up, again, one service changed, a start that fails, back, down."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from threading import Thread

import httpx
import pytest

from ddtree_ops.deploy.lockfile import exclusively

from .conftest import Lab

pytestmark = [pytest.mark.docker, pytest.mark.root]


def ready(lab: Lab, name: str) -> int:
    return httpx.get(f"http://127.0.0.1:{lab.service(name)['port']}/ready", trust_env=False).status_code


def await_ready(lab: Lab, name: str) -> None:
    """The previous container may take longer to start on a busy machine than a test gives a bad one."""
    deadline = time.monotonic() + 120
    while True:
        with suppress(httpx.HTTPError):
            if ready(lab, name) == 200:
                return
        assert time.monotonic() < deadline, "the previous container does not serve"
        time.sleep(0.1)


def actions(result: dict[str, object]) -> dict[str, str]:
    steps = result["steps"]
    assert isinstance(steps, list)
    return {step["container"]: step["action"] for step in steps}


def test_the_life_of_a_cluster(lab: Lab) -> None:
    code, plan, _ = lab.run("plan", "--skip-provisioning")
    assert (code, plan["changes"], lab.ids()) == (0, 2, {})

    code, up, events = lab.up()
    assert code == 0, up
    assert actions(up) == {"lab-plain-0": "create", "lab-tree-0": "create"}
    assert (up["changes"], ready(lab, "plain"), ready(lab, "tree")) == (2, 200, 200)
    first = lab.ids()
    assert up["containers"] == {f"here/{name}": identity for name, identity in first.items()}
    assert [event["name"] for event in events if event["event"] == "phase"][-1] == "ready"

    code, up, _ = lab.up()
    assert (code, up["changes"], lab.ids()) == (0, 0, first)
    code, status, _ = lab.run("status")
    assert (code, status["ok"]) == (0, True)
    assert [one["ready"] for one in status["replicas"]] == [True, True]

    lab.service("tree")["budget"] = 63
    code, plan, _ = lab.run("plan", "--skip-provisioning")
    (step,) = [one for one in plan["hosts"][0]["containers"] if one["action"] != "unchanged"]
    assert step["diff"] == ["- argv --budget 31", "+ argv --budget 63"]
    code, status, _ = lab.run("status")
    assert code == 1
    assert status["replicas"][1]["drift"] == ["- argv --budget 31", "+ argv --budget 63"]
    code, up, _ = lab.up()
    assert (code, actions(up)) == (0, {"lab-plain-0": "unchanged", "lab-tree-0": "replace"})
    now = lab.ids()
    assert now["lab-plain-0"] == first["lab-plain-0"]
    assert now["lab-tree-0.previous"] == first["lab-tree-0"]

    code, back, _ = lab.run("rollback")
    assert (code, back["swapped"], back["without"]) == (0, ["here/lab-tree-0"], ["here/lab-plain-0"])
    assert lab.ids()["lab-tree-0"] == first["lab-tree-0"]
    code, back, _ = lab.run("rollback", "--service", "tree")
    assert lab.ids() == now

    code, down, _ = lab.run("down", "--yes")
    assert (code, down["left"], lab.ids()) == (0, {}, {})
    assert len(down["removed"]) == 3
    logs = [file.read_text() for file in (lab.file.parent / "ddtree-logs/lab").iterdir()]
    assert len(logs) == 3
    assert all("double: drained" in text for text in logs)
    code, status, _ = lab.run("status")
    assert (code, {one["state"] for one in status["replicas"]}) == (1, {"missing"})


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("exit", "exited with code 3"),
        ("never", "was not ready after 3 s"),
        ("liar", "ddtree.budget: found 7, asked for 63"),
    ],
)
def test_a_container_that_does_not_serve_gives_way_to_the_previous_one(
    lab: Lab, mode: str, words: str
) -> None:
    assert lab.up()[0] == 0
    before = lab.ids()
    lab.service("tree").update(budget=63, env={"DOUBLE": mode})
    if mode == "never":
        lab.data["deadlines"]["ready"] = 3
    code, up, _ = lab.up()
    assert code == 1
    assert words in up["failed"]["here/lab-tree-0"]
    assert up["restored"] == ["here/lab-tree-0"]
    assert lab.ids() == before
    await_ready(lab, "tree")
    kept = [line for file in up["logs"] for line in Path(file).read_text().splitlines()]
    assert any("--budget 63" in line for line in kept)


def test_a_first_start_that_fails_leaves_the_others_serving_and_is_mended_by_the_next_up(lab: Lab) -> None:
    lab.service("tree")["env"] = {"DOUBLE": "exit"}
    code, up, _ = lab.up()
    assert (code, list(up["failed"]), up["restored"]) == (1, ["here/lab-tree-0"], [])
    assert "double: cannot go on" in up["failed"]["here/lab-tree-0"]
    assert ready(lab, "plain") == 200
    code, status, _ = lab.run("status")
    assert (code, [one["reason"] for one in status["replicas"]]) == (1, ["", "exited with code 3"])
    plain = lab.ids()["lab-plain-0"]
    del lab.service("tree")["env"]
    code, up, _ = lab.up()
    assert (code, up["changes"], lab.ids()["lab-plain-0"]) == (0, 1, plain)


def test_a_killed_container_is_started_again(lab: Lab) -> None:
    lab.up()
    before = lab.ids()
    lab.engine.stop("lab-plain-0", 0)
    code, status, _ = lab.run("status")
    assert code == 1
    assert status["replicas"][0]["state"] == "exited"
    code, up, _ = lab.up()
    assert (code, actions(up)["lab-plain-0"], lab.ids()) == (0, "start", before)


def test_one_service_is_worked_on_alone(lab: Lab) -> None:
    lab.up()
    before = lab.ids()
    lab.service("plain")["max_running_requests"] = 2
    lab.service("tree")["max_running_requests"] = 2
    code, up, _ = lab.up("--service", "tree")
    assert (code, actions(up)) == (0, {"lab-tree-0": "replace"})
    assert lab.ids()["lab-plain-0"] == before["lab-plain-0"]
    code, up, _ = lab.up("--service", "tree", "--recreate")
    assert (code, actions(up)) == (0, {"lab-tree-0": "replace"})
    code, _, _ = lab.run("down", "--service", "tree", "--yes")
    assert (code, list(lab.ids())) == (0, ["lab-plain-0"])
    code, error, _ = lab.up("--service", "three")
    assert (code, error["message"].split(": ", 1)[1]) == (
        2,
        "--service: found 'three', allowed: plain, tree",
    )


def test_a_service_that_left_the_file_goes_and_strangers_stay(lab: Lab) -> None:
    lab.up()
    lab.data["services"] = lab.data["services"][:1]
    code, status, _ = lab.run("status")
    assert (code, status["strays"]) == (1, ["here/lab-tree-0"])
    code, up, _ = lab.up()
    assert (code, actions(up)) == (0, {"lab-tree-0": "remove", "lab-plain-0": "unchanged"})
    assert list(lab.ids()) == ["lab-plain-0"]


def test_a_key_is_needed_and_shown_nowhere(lab: Lab) -> None:
    file = lab.file.with_name("key")
    file.write_text("s3cret-key-of-the-test")
    file.chmod(0o600)
    lab.data["secrets"] = {"api_key": {"file": "key"}}
    code, up, events = lab.up()
    assert code == 0, up
    assert "s3cret-key" not in str(events)
    url = f"http://127.0.0.1:{lab.service('tree')['port']}/server_info"
    assert httpx.get(url, trust_env=False).status_code == 401
    assert (lab.up()[1]["changes"], lab.run("status")[0]) == (0, 0)


def test_logs_of_now_and_of_before(lab: Lab) -> None:
    lab.up()
    lab.service("tree")["budget"] = 63
    lab.up()
    code, _, lines = lab.run("logs", "tree")
    assert code == 0
    assert "--budget 63" in "".join(one.get("line", "") for one in lines)
    code, _, lines = lab.run("logs", "tree", "--previous")
    assert "--budget 31" in "".join(one.get("line", "") for one in lines)
    code, error, _ = lab.run("logs", "plain", "--previous")
    assert (code, error["message"]) == (1, "plain: there is no previous container")


def test_something_that_still_answers_after_down_is_told(lab: Lab) -> None:
    port = lab.service("plain")["port"]
    server = HTTPServer(("127.0.0.1", port), SimpleHTTPRequestHandler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        code, down, _ = lab.run("down", "--yes")
    finally:
        server.shutdown()
        server.server_close()
    assert (code, down["left"]) == (1, {"here": [f"something still answers on port {port}"]})


def test_two_ups_do_not_meet(lab: Lab) -> None:
    with exclusively(lab.file):  # one that waited would do so for ever
        code, error, _ = lab.up()
    assert code == 3
    assert "another `ddtree deploy` works on this cluster" in error["message"]


def test_an_image_that_is_not_there_is_told(lab: Lab) -> None:
    lab.data["image"]["prebuilt"] = "ddtree/none:1"
    code, error, _ = lab.up()
    assert (code, error["message"]) == (3, "image.prebuilt: ddtree/none:1 is not on here")


def test_a_host_without_docker_is_planned_as_bare_and_told_by_the_others(lab: Lab) -> None:
    here = lab.data["hosts"]["inline"]["here"]["vars"]
    here |= {"ddtree_docker_socket": "/nowhere/docker.sock", "ansible_python_interpreter": sys.executable}
    lab.data["paths"] = {"min_free_gib": 0}
    lab.data["ssh"] = {"become": False}
    code, plan, _ = lab.run("plan", "--tags", "preflight")
    assert (code, plan["hosts"][0]["bare"]) == (0, True), plan
    assert [one["action"] for one in plan["hosts"][0]["containers"]] == ["create", "create"]
    code, error, _ = lab.run("plan", "--skip-provisioning")
    assert (code, "the Docker engine is not running" in error["message"]) == (1, True)
    code, status, _ = lab.run("status")
    assert (code, {one["state"] for one in status["replicas"]}) == (1, {"unknown"})
    assert "the Docker engine is not running" in status["replicas"][0]["reason"]
