"""Containers of a real Docker engine: how they are made, watched, ended, and what is left of them."""

from __future__ import annotations

import signal
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.containers.engine import Engine
from ddtree_ops.containers.failures import DockerFailure
from ddtree_ops.containers.spec import LABEL_CLUSTER, ContainerSpec, Healthcheck, Mount
from ddtree_ops.errors import BadInput
from tests.support.docker import CLUSTER, Docker

pytestmark = [pytest.mark.root, pytest.mark.docker]
NAME = "lab-dflash-0"


def raw(engine: Engine, name: str) -> dict[str, Any]:
    """What the engine really keeps, past our allow-list."""
    with engine._call("test") as client:
        return client.inspect_container(name)


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_a_container_lives_from_creation_to_removal_and_its_log_stays(
    engine: Engine, docker: Docker, tmp_path: Path
) -> None:
    spec = docker.spec(NAME, "echo one; echo two >&2; sleep 600")
    identity = engine.create(spec)
    created = engine.find(NAME)
    assert created is not None
    assert (created.state, created.exit_code, created.started_at) == ("created", None, None)
    assert (created.cluster, created.service, created.replica) == (CLUSTER, "dflash", 0)
    engine.start(NAME)
    running = engine.find(NAME)
    assert running is not None
    assert running.running
    assert running.id == identity
    assert running.image == docker.image
    engine.stop(NAME)
    engine.rename(NAME, f"{NAME}.previous")
    assert engine.find(NAME) is None
    stopped = engine.find(f"{NAME}.previous")
    assert stopped is not None
    assert stopped.previous
    assert not stopped.running
    assert stopped.exit_code == 128 + signal.SIGTERM
    log = engine.remove(stopped.name, log_folder=tmp_path / "logs")
    assert log is not None
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    text = log.read_text()
    assert "was killed by signal 15" in text.splitlines()[0]
    assert "one" in text
    assert "two" in text
    assert engine.ours(CLUSTER) == []


def test_equal_specs_give_equal_labels_and_any_change_another(engine: Engine, docker: Docker) -> None:
    spec = docker.spec()
    engine.create(spec)
    found = engine.find(NAME)
    assert found is not None
    assert found.config_hash == docker.spec().config_hash
    for change in (
        {"env": {"A": "1"}},
        {"argv": ("/bin/true",)},
        {"gpus": ("GPU-1",)},
        {"restart": "always"},
    ):
        assert replace(spec, **change).config_hash != found.config_hash


def test_only_containers_with_our_labels_are_listed(engine: Engine, docker: Docker) -> None:
    engine.create(docker.spec())
    engine.create(docker.spec("other-dflash-0", cluster="other"))
    try:
        assert [found.name for found in engine.ours(CLUSTER)] == [NAME]
    finally:
        engine.remove("other-dflash-0")


def test_sigterm_reaches_a_program_that_would_ignore_it_as_process_one(
    engine: Engine, docker: Docker
) -> None:
    engine.create(docker.spec())
    engine.start(NAME)
    engine.stop(NAME)
    engine.stop(NAME)
    found = engine.find(NAME)
    assert found is not None
    assert found.exit_code == 128 + signal.SIGTERM


def test_a_program_that_ignores_sigterm_is_killed_after_the_stop_timeout_of_its_spec(
    engine: Engine, docker: Docker
) -> None:
    engine.create(docker.spec(NAME, "trap '' TERM; while true; do sleep 0.1; done", stop_timeout_s=1))
    engine.start(NAME)
    started = time.monotonic()
    engine.stop(NAME)
    found = engine.find(NAME)
    assert found is not None
    assert found.exit_code == 128 + signal.SIGKILL
    assert 0.8 < time.monotonic() - started < 60
    assert raw(engine, NAME)["Config"]["StopTimeout"] == 1


def test_gpus_without_the_toolkit_give_its_name_and_leave_no_container(
    engine: Engine, docker: Docker
) -> None:
    engine.create(docker.spec(gpus=("GPU-11111111-2222-3333-4444-555555555555",)))
    created = engine.find(NAME)
    assert created is not None
    assert created.gpus == ("GPU-11111111-2222-3333-4444-555555555555",)
    with pytest.raises(DockerFailure, match="could not select device driver") as caught:
        engine.start(NAME)
    assert "nvidia-container-toolkit" in (caught.value.remedy or "")
    assert engine.ours(CLUSTER) == []


@pytest.mark.parametrize(
    ("changes", "message", "remedy"),
    [
        ({"image": "sha256:" + "0" * 64}, "No such image", "build or ship"),
        ({"mounts": (Mount("/nowhere/at/all", "/data"),)}, "bind source path does not exist", "folder"),
        ({"user": "nobody-here"}, "nobody-here", None),
    ],
)
def test_a_container_that_cannot_be_run_says_what_to_do_and_is_not_left_behind(
    engine: Engine, docker: Docker, changes: dict[str, Any], message: str, remedy: str | None
) -> None:
    with pytest.raises(DockerFailure, match=message) as caught:
        _run(engine, docker.spec(**changes))
    assert caught.value.remedy is None if remedy is None else remedy in (caught.value.remedy or "")
    assert engine.ours(CLUSTER) == []


def test_a_program_that_is_not_in_the_image_ends_its_container_with_the_reason_in_the_log(
    engine: Engine, docker: Docker
) -> None:
    engine.create(docker.spec(argv=("/bin/nothing",)))  # the init process starts, and finds no program
    engine.start(NAME)
    until(lambda: not _running(engine))
    found = engine.find(NAME)
    assert found is not None
    assert found.exit_code == 127
    assert "No such file" in engine.log_tail(NAME)


def _run(engine: Engine, spec: ContainerSpec) -> None:
    engine.create(spec)
    engine.start(spec.name)


def _running(engine: Engine) -> bool:
    found = engine.find(NAME)
    return found is not None and found.running


def test_a_leftover_that_never_ran_makes_way_and_one_that_ran_does_not(
    engine: Engine, docker: Docker
) -> None:
    first = engine.create(docker.spec())
    second = engine.create(docker.spec())
    assert first != second
    engine.start(NAME)
    with pytest.raises(DockerFailure, match="already in use") as caught:
        engine.create(docker.spec())
    assert caught.value.status == 409
    assert engine.find(second) is not None


def test_a_stopped_container_that_cannot_start_again_is_kept(
    engine: Engine, docker: Docker, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    engine.create(docker.spec(mounts=(Mount(str(folder), "/models"),)))
    engine.start(NAME)
    engine.stop(NAME)
    folder.rmdir()
    with pytest.raises(DockerFailure):
        engine.start(NAME)
    assert engine.find(NAME) is not None


def test_a_secret_is_in_the_container_and_nowhere_else(
    engine: Engine, docker: Docker, tmp_path: Path
) -> None:
    secret = "sesame-open-4711"
    script = 'echo "length ${#API_KEY}"; echo "server_args: api_key=$API_KEY"; sleep 600'
    spec = docker.spec(NAME, script, secret_env=("API_KEY",), env={"MODE": "fast"})
    with pytest.raises(BadInput, match="API_KEY"):
        engine.create(spec, {})
    engine.create(spec, {"API_KEY": secret, "UNUSED": "value"})
    engine.start(NAME)
    until(lambda: "server_args" in engine.log_tail(NAME))
    assert f"API_KEY={secret}" in raw(engine, NAME)["Config"]["Env"]
    assert not any("UNUSED" in entry for entry in raw(engine, NAME)["Config"]["Env"])
    engine.stop(NAME)
    assert secret not in repr(engine.find(NAME))
    log = engine.remove(NAME, log_folder=tmp_path)
    assert log is not None
    assert "length 16" in log.read_text()
    assert "api_key=[redacted]" in log.read_text()


def test_a_container_is_made_as_asked_and_never_privileged(
    engine: Engine, docker: Docker, tmp_path: Path
) -> None:
    (tmp_path / "weights").write_text("w")
    tmp_path.chmod(0o777)
    script = (
        "cat /models/weights; echo; (echo x > /models/new) 2>&1; echo y > /cache/new && cat /cache/new;"
        " df -k /dev/shm | grep -v Filesystem; ulimit -n; sleep 600"
    )
    spec = docker.spec(
        NAME,
        script,
        mounts=(Mount(str(tmp_path), "/models"), Mount("lab-jit-1", "/cache", read_only=False)),
        ulimits={"nofile": 4321},
        cap_add=("SYS_NICE",),
        log_max_mib=3,
        log_files=2,
    )
    engine.create(spec)
    engine.start(NAME)
    until(lambda: "4321" in engine.log_tail(NAME))
    said = engine.log_tail(NAME)
    assert "Read-only file system" in said
    assert "\ny\n" in f"\n{said}"
    assert "1048576" in said
    assert [(volume.name, volume.labels) for volume in engine.our_volumes(CLUSTER)] == [
        ("lab-jit-1", {LABEL_CLUSTER: CLUSTER})
    ]
    host = raw(engine, NAME)["HostConfig"]
    assert host["Privileged"] is False
    assert host["Init"] is True
    assert host["RestartPolicy"]["Name"] == "no"
    assert host["CapAdd"] in (["SYS_NICE"], ["CAP_SYS_NICE"])
    assert host["LogConfig"] == {"Type": "json-file", "Config": {"max-file": "2", "max-size": "3m"}}
    assert raw(engine, NAME)["Config"]["StopTimeout"] == 10


def test_a_container_runs_as_the_user_that_was_asked_for(engine: Engine, docker: Docker) -> None:
    answer = engine.run_once(docker.spec("lab-id-0", "id -u; id -g", user="1000:1000"), timeout_s=120)
    assert answer.output.split() == ["1000", "1000"]


def test_health_comes_from_the_container_itself(engine: Engine, docker: Docker) -> None:
    check = Healthcheck(
        ("/bin/test", "-e", "/tmp/up"), interval_s=0.2, timeout_s=60, retries=2, start_period_s=0
    )
    engine.create(docker.spec(NAME, "touch() { : > $1; }; sleep 600", healthcheck=check))
    assert raw(engine, NAME)["Config"]["Healthcheck"]["Interval"] == 200_000_000
    engine.start(NAME)

    def health() -> str | None:
        found = engine.find(NAME)
        return found.health if found else None

    until(lambda: health() == "unhealthy")
    engine.exec(NAME, ["/bin/sh", "-c", ": > /tmp/up"], timeout_s=60)
    until(lambda: health() == "healthy")
    found = engine.find(NAME)
    assert found is not None
    assert found.outcome == "running (healthy)"


def test_one_command_gives_its_code_and_output_and_leaves_nothing(engine: Engine, docker: Docker) -> None:
    answer = engine.run_once(docker.spec("lab-probe-0", "echo out; echo err >&2; exit 7"), timeout_s=120)
    assert answer.exit_code == 7
    assert sorted(answer.output.split()) == ["err", "out"]
    assert engine.ours(CLUSTER) == []


def test_one_command_that_hangs_is_ended_at_its_time_limit_with_its_last_words(
    engine: Engine, docker: Docker
) -> None:
    started, red = time.monotonic(), r"printf '\033[1;31mnccl\033[0m waits\n'"
    with pytest.raises(DockerFailure, match=r"did not end in \d+ s(?s:.*)\nnccl waits$") as caught:
        engine.run_once(docker.spec("lab-p2p-0", f"{red}; sleep 600"), timeout_s=3)
    assert caught.value.timed_out
    assert time.monotonic() - started < 100
    assert engine.ours(CLUSTER) == []


def test_ctrl_c_leaves_no_one_shot_behind(engine: Engine, docker: Docker) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def press() -> None:
        with docker.link() as link:
            until(lambda: any(found.running for found in link.engine().ours(CLUSTER)), 120)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        engine.run_once(docker.spec("lab-p2p-0"), timeout_s=300)
    assert engine.ours(CLUSTER) == []


def test_a_one_shot_of_a_crashed_run_makes_way_and_a_service_of_that_name_does_not(
    engine: Engine, docker: Docker
) -> None:
    left = engine._create(docker.spec("lab-probe-0"), {}, {"ddtree.one-shot": "true"})
    engine.start(left)
    assert engine.run_once(docker.spec("lab-probe-0", "echo new"), timeout_s=120).output == "new"
    engine.create(docker.spec())
    engine.start(NAME)
    with pytest.raises(DockerFailure, match="already in use"):
        engine.run_once(docker.spec(NAME, "echo never"), timeout_s=120)
    assert _running(engine)


def test_a_running_container_is_not_removed(engine: Engine, docker: Docker, tmp_path: Path) -> None:
    engine.create(docker.spec())
    engine.start(NAME)
    with pytest.raises(DockerFailure, match="it runs"):
        engine.remove(NAME, log_folder=tmp_path)
    assert _running(engine)


def test_a_log_that_cannot_be_kept_keeps_its_container(
    engine: Engine, docker: Docker, tmp_path: Path
) -> None:
    engine.create(docker.spec(NAME, "echo precious"))
    engine.start(NAME)
    until(lambda: not _running(engine))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        engine.remove(NAME, log_folder=tmp_path / "file")
    assert engine.log_tail(NAME) == "precious"


def test_following_a_log_ends_with_the_container(engine: Engine, docker: Docker) -> None:
    engine.create(docker.spec(NAME, "for i in 1 2 3; do echo line $i; sleep 0.2; done"))
    engine.start(NAME)
    assert list(engine.logs(NAME, follow=True)) == [b"line 1\n", b"line 2\n", b"line 3\n"]
    assert list(engine.logs(NAME, tail=1)) == [b"line 3\n"]


def test_following_a_silent_log_stops_when_nobody_wants_it_any_more(engine: Engine, docker: Docker) -> None:
    engine.create(docker.spec(NAME, "echo first; sleep 600"))
    engine.start(NAME)
    lines = engine.logs(NAME, follow=True)
    assert next(lines) == b"first\n"
    lines.close()  # type: ignore[attr-defined]
    with pytest.raises(DockerFailure, match="no answer in 1 s"):
        list(engine.logs(NAME, follow=True, timeout_s=1))


def test_a_command_in_a_container_gives_its_code_and_output_or_a_timeout(
    engine: Engine, docker: Docker
) -> None:
    engine.create(docker.spec())
    engine.start(NAME)
    code, output = engine.exec(NAME, ["/bin/sh", "-c", "echo probe; exit 4"], timeout_s=60)
    assert (code, output) == (4, "probe\n")
    started = time.monotonic()
    with pytest.raises(DockerFailure, match="no answer in 1 s") as caught:
        engine.exec(NAME, ["/bin/sleep", "600"], timeout_s=1)
    assert caught.value.timed_out
    assert time.monotonic() - started < 60


def test_volumes_are_ours_by_label_and_stay_while_in_use(engine: Engine, docker: Docker) -> None:
    engine.ensure_volume("lab-jit-a", {LABEL_CLUSTER: CLUSTER})
    engine.ensure_volume("lab-jit-a", {LABEL_CLUSTER: CLUSTER})
    engine.ensure_volume("other-jit", {LABEL_CLUSTER: "other"})
    try:
        assert [volume.name for volume in engine.our_volumes(CLUSTER)] == ["lab-jit-a"]
        engine.create(docker.spec(mounts=(Mount("lab-jit-a", "/cache", read_only=False),)))
        with pytest.raises(DockerFailure, match="in use"):
            engine.remove_volume("lab-jit-a")
    finally:
        assert engine.remove_volume("other-jit")
    assert not engine.remove_volume("other-jit")


def test_what_is_not_there_is_nothing_to_remove(engine: Engine) -> None:
    assert engine.find("lab-nothing-0") is None
    assert engine.remove("lab-nothing-0") is None
    assert engine.log_tail("lab-nothing-0") == ""
    with pytest.raises(DockerFailure, match="No such container") as caught:
        engine.stop("lab-nothing-0")
    assert caught.value.status == 404


def test_the_engine_says_what_it_is(engine: Engine, docker: Docker) -> None:
    info = engine.info()
    assert info.version
    assert "runc" in info.runtimes
    assert Path(info.data_root) == docker.socket.parent / "data"
