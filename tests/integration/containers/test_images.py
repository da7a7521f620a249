"""Images of a real Docker engine: built, saved, loaded, removed; half an image is none."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_ops.containers.engine import Engine
from ddtree_ops.containers.failures import DockerFailure
from tests.support.docker import IMAGE, Docker, rootfs

pytestmark = [pytest.mark.root, pytest.mark.docker]
LABEL = "ddtree-test.built"


def context(dockerfile: str) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo("engine.Dockerfile")
        entry.size = len(dockerfile)
        tar.addfile(entry, io.BytesIO(dockerfile.encode()))
    buffer.seek(0)
    return buffer


def build(engine: Engine, text: str, **options: object) -> str:
    return engine.build(
        context(f"FROM {IMAGE}\n{text}"),
        dockerfile="engine.Dockerfile",
        labels={LABEL: "yes"},
        network="host",
        **options,  # type: ignore[arg-type]
    )


@pytest.fixture(autouse=True)
def _no_images_left(engine: Engine) -> Iterator[None]:
    yield
    for image in engine.images(LABEL):
        engine.remove_image(image.id)


def test_an_image_is_built_with_its_arguments_labels_and_output(engine: Engine, docker: Docker) -> None:
    lines: list[str] = []
    identity = build(
        engine,
        'ARG WORD\nENV CUDA_VERSION=13.0 TOKEN=x\nRUN echo "the word is $WORD" && echo $WORD > /word\n',
        tag="ddtree/lab-engine:1",
        args={"WORD": "drafter"},
        on_line=lines.append,
    )
    image = engine.image("ddtree/lab-engine:1")
    assert image is not None
    assert image.id == identity
    assert image.id.startswith("sha256:")
    assert image.labels[LABEL] == "yes"
    assert image.env == {"CUDA_VERSION": "13.0"}
    assert image.size > 1_000_000
    assert any("the word is drafter" in line for line in lines)
    assert [found.id for found in engine.images(f"{LABEL}=yes", dangling=False)] == [identity]
    assert engine.images(f"{LABEL}=yes", dangling=True) == []
    answer = engine.run_once(docker.spec("lab-word-0", "cat /word", image=identity), timeout_s=120)
    assert answer.output == "drafter"


def test_a_build_that_fails_shows_the_end_of_its_output_and_leaves_no_container(
    engine: Engine,
) -> None:
    with pytest.raises(DockerFailure, match=r"returned a non-zero code: 3(?s:.*)wheel missing"):
        build(engine, "RUN echo wheel missing; exit 3\n")
    with engine._call("test") as client:
        assert client.containers(all=True) == []


def test_a_build_that_takes_too_long_is_given_up(engine: Engine) -> None:
    with pytest.raises(DockerFailure, match="no answer in 2 s") as caught:
        build(engine, "RUN sleep 600\n", timeout_s=2)
    assert caught.value.timed_out


@pytest.mark.parametrize("by", ["id", "tag"])
def test_an_image_comes_back_the_same_from_its_tar(engine: Engine, by: str) -> None:
    identity = build(engine, "RUN echo shipped > /shipped\n", tag="ddtree/ship:1")
    tar = list(engine.save(identity if by == "id" else "ddtree/ship:1"))
    assert engine.remove_image(identity)
    assert engine.image(identity) is None
    sent: list[int] = []
    assert engine.load(iter(tar), on_bytes=sent.append) == identity
    assert sent[-1] == sum(map(len, tar))
    image = engine.image(identity)
    assert image is not None
    assert image.tags == (() if by == "id" else ("ddtree/ship:1",))


def test_half_of_a_tar_is_not_an_image(engine: Engine) -> None:
    identity = build(engine, "RUN echo half > /half\n")
    tar = b"".join(engine.save(identity))
    engine.remove_image(identity)
    with pytest.raises(DockerFailure):
        engine.load([tar[: len(tar) // 2]])
    with pytest.raises(DockerFailure):
        engine.load([b"this is no tar" * 100])
    assert engine.image(identity) is None


def test_a_source_that_breaks_during_a_load_says_so_itself(engine: Engine) -> None:
    def source() -> Iterator[bytes]:
        yield b"\0" * 512
        raise DockerFailure("gpu-a: save of x: the engine's answer broke off")

    with pytest.raises(DockerFailure, match="gpu-a: save of x"):
        engine.load(source())


def test_saving_what_is_not_there_is_an_error(engine: Engine) -> None:
    with pytest.raises(DockerFailure) as caught:
        list(engine.save("ddtree/nothing:1"))
    assert caught.value.status == 404


def test_an_image_in_use_stays_and_a_missing_one_is_no_error(engine: Engine, docker: Docker) -> None:
    identity = build(engine, "RUN echo used > /used\n", tag="ddtree/used:1")
    engine.tag(identity, "ddtree/used:2")
    engine.create(docker.spec(image=identity))
    with pytest.raises(DockerFailure, match="used by lab-dflash-0"):
        engine.remove_image(identity)
    assert engine.remove_image("ddtree/used:1")
    image = engine.image(identity)
    assert image is not None
    assert image.tags == ("ddtree/used:2",)
    engine.remove("lab-dflash-0")
    assert engine.remove_image(identity)
    assert not engine.remove_image(identity)
    assert not engine.remove_image("ddtree/used:2")


def test_a_root_file_system_becomes_an_image(engine: Engine, docker: Docker, tmp_path: Path) -> None:
    (tmp_path / "rootfs.tar").write_bytes(rootfs())
    with (tmp_path / "rootfs.tar").open("rb") as stream:
        identity = engine.import_rootfs(
            stream, "ddtree-test/other:2", changes=["ENV PATH=/bin", f"LABEL {LABEL}=yes"]
        )
    image = engine.image("ddtree-test/other:2")
    assert image is not None
    assert image.id == identity
    answer = engine.run_once(docker.spec("lab-x-0", "echo runs", image=identity), timeout_s=120)
    assert answer.output == "runs"
    with pytest.raises(DockerFailure):
        engine.import_rootfs(io.BytesIO(b"no tar" * 500), "ddtree-test/bad:1")


def test_a_registry_that_does_not_answer_is_an_error_with_a_hint(engine: Engine) -> None:
    with pytest.raises(DockerFailure, match="connection refused") as caught:
        engine.pull("127.0.0.1:9/nothing/at-all:1", timeout_s=120)
    assert "network" in (caught.value.remedy or "")
