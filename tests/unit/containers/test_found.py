"""Only what is listed passes from `docker inspect` into anything of ours."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_ops.containers.found import container_found, image_found
from ddtree_ops.containers.spec import ContainerSpec


def answer(**state: Any) -> dict[str, Any]:
    spec = ContainerSpec("lab-ddtree-1.previous", "lab", "ddtree", 1, "sha256:aa", ("serve",))
    return {
        "Id": "c" * 64,
        "Name": "/lab-ddtree-1.previous",
        "Image": "sha256:aa",
        "RestartCount": 2,
        "Created": "2026-01-01T00:00:00.123456789Z",
        "State": {"Status": "exited", "StartedAt": "2026-01-01T00:00:01Z", "FinishedAt": "", **state},
        "Config": {"Labels": spec.labels, "Env": ["API_KEY=sesame-open", "HF_TOKEN=hf_abcdefghijkl"]},
        "HostConfig": {"DeviceRequests": [{"DeviceIDs": ["GPU-1", "GPU-2"]}]},
        "Args": ["--secret", "sesame-open"],
    }


def test_variables_and_arguments_of_a_container_do_not_pass() -> None:
    found = container_found(answer(ExitCode=0))
    assert "sesame" not in repr(found)
    assert "hf_" not in repr(found)
    assert found.gpus == ("GPU-1", "GPU-2")
    assert (found.service, found.replica, found.previous, found.restarts) == ("ddtree", 1, True, 2)
    assert found.started_at is not None
    assert found.finished_at is None


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        ({"ExitCode": 0}, 0, "exited with code 0"),
        ({"ExitCode": 3}, 3, "exited with code 3"),
        ({"ExitCode": 137}, 137, "was killed by signal 9"),
        ({"ExitCode": 137, "OOMKilled": True}, 137, "killed: out of memory"),
        ({"Status": "running", "ExitCode": 0}, None, "running"),
        ({"Status": "running", "Health": {"Status": "unhealthy"}}, None, "running (unhealthy)"),
        ({"Status": "running", "Health": {"Status": "none"}}, None, "running"),
        ({"Status": "created", "ExitCode": 128, "Error": "no GPU"}, None, "created: no GPU"),
        (
            {"Status": "exited", "ExitCode": 127, "Error": "no such file"},
            127,
            "exited with code 127: no such file",
        ),
    ],
)
def test_how_a_container_stands_in_words(state: dict[str, Any], code: int | None, words: str) -> None:
    found = container_found(answer(**state))
    assert found.exit_code == code
    assert found.outcome == words


def test_a_container_of_others_has_no_service_and_no_replica() -> None:
    found = container_found({"Id": "x", "Name": "/web", "Image": "i", "State": {"Status": "running"}})
    assert (found.cluster, found.service, found.replica, found.config_hash) == (None, None, None, None)


def test_of_an_image_s_variables_only_the_known_ones_pass() -> None:
    image = image_found({"Id": "sha256:bb", "Config": {"Env": ["CUDA_VERSION=13.0.1", "NPM_TOKEN=x"]}})
    assert image.env == {"CUDA_VERSION": "13.0.1"}
    assert image.tags == ()
