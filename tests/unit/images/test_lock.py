"""The lock file: what is wrong with it is named, and it is never half written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddtree_ops.containers.found import ImageFound
from ddtree_ops.errors import BadEnvironment, BadInput
from ddtree_ops.images.base import (
    LOCAL_BASE,
    WantedBase,
    _as_found,
    by_digest,
    known_base,
    wanted_base,
    with_found,
)
from ddtree_ops.images.lock import (
    KEPT_IMAGES,
    LOCK_NAME,
    load_lock,
    read_lock,
    save_lock,
    with_base,
    with_image,
)
from ddtree_ops.images.places import dockerfiles_folder
from ddtree_ops.schemas.cluster import Cluster, Image
from ddtree_ops.schemas.images import ImagesLock, LockedBase, LockedImage

ONE, TWO = ("sha256:" + digit * 64 for digit in "12")


def image(tag: str = "ddtree/lab-engine:1", identity: str = ONE) -> LockedImage:
    return LockedImage(
        tag=tag,
        id=identity,
        context_hash="a" * 64,
        base="b:1",
        base_digest=ONE,
        wheel_sha256="c" * 64,
        version="0.1.0",
        built_at="2026-01-01T00:00:00+00:00",
    )


def cluster(**changes: object) -> Cluster:
    plain = {
        "schema": 1,
        "name": "lab",
        "engine": "reference",
        "hosts": {"inline": {"a": {}}},
        "services": [{"name": "ar", "arm": "ar", "port": 30000}],
    }
    return Cluster.model_validate({**plain, **changes})


def test_what_is_shipped_is_valid_and_names_the_bases_that_are_used() -> None:
    lock = read_lock(dockerfiles_folder() / LOCK_NAME)
    assert {base.name for base in lock.bases} == {Image().base, LOCAL_BASE}
    assert all(base.digest or base.note for base in lock.bases), "a digest that is not known has a reason"
    engine = next(base for base in lock.bases if base.name == Image().base)
    assert engine.cuda == Image().cuda
    assert lock.images == []


def test_without_a_lock_file_the_shipped_one_counts_and_then_its_own(tmp_path: Path) -> None:
    shipped = load_lock(tmp_path)
    assert shipped == read_lock(dockerfiles_folder() / LOCK_NAME)
    save_lock(tmp_path, with_image(shipped, image()))
    assert load_lock(tmp_path).images == [image()]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema: found 2, allowed: 1"),
        ({"kind": "other"}, "kind"),
        ({"colour": "red"}, "colour"),
        ({"bases": [{"name": "b:1", "digest": "latest"}]}, r"bases\.0\.digest"),
        ({"bases": [{"name": "b:1"}, {"name": "b:1"}]}, r"bases\.1: found 'b:1' again"),
        ({"images": [{"tag": "x"}]}, r"images\.0\.id"),
    ],
)
def test_an_error_names_the_file_and_the_key(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / LOCK_NAME
    path.write_text(json.dumps({"schema": 1, "kind": "ddtree-images", **change}))
    with pytest.raises(BadInput, match=words) as caught:
        load_lock(tmp_path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7"])
def test_what_is_no_lock_file_is_bad_input(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK_NAME).write_text(text)
    with pytest.raises(BadInput, match=LOCK_NAME):
        load_lock(tmp_path)


def test_a_lock_file_that_cannot_be_read_is_no_missing_one(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).mkdir()
    with pytest.raises(BadEnvironment, match="cannot be read"):
        load_lock(tmp_path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_lock(tmp_path, ImagesLock(bases=[LockedBase(name="b:1", digest=ONE)]))
    before = (tmp_path / LOCK_NAME).read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(BadEnvironment, match="No space left"):
        save_lock(tmp_path, ImagesLock())
    assert (tmp_path / LOCK_NAME).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]


def test_the_newest_image_is_first_and_the_list_stays_short() -> None:
    lock = ImagesLock()
    for number in range(KEPT_IMAGES + 5):
        lock = with_image(lock, image(f"ddtree/lab-engine:{number}"))
    assert lock.images[0].tag == f"ddtree/lab-engine:{KEPT_IMAGES + 4}"
    assert len(lock.images) == KEPT_IMAGES
    again = with_image(lock, image(lock.images[3].tag, TWO))
    assert again.images[0].id == TWO
    assert len({one.tag for one in again.images}) == len(again.images)


def test_a_digest_in_cluster_yaml_counts_more_than_the_lock_file() -> None:
    lock = with_base(ImagesLock(), LockedBase(name="b:1", digest=ONE))
    pinned = known_base(WantedBase("b:1", TWO), lock, None)
    locked = known_base(WantedBase("b:1"), lock, None)
    assert pinned is not None
    assert locked is not None
    assert (pinned.reference, locked.reference) == (f"b@{TWO}", f"b@{ONE}")


def test_a_base_that_only_hosts_have_is_known_by_its_id_and_not_pulled() -> None:
    lock = with_base(ImagesLock(), LockedBase(name="b:1", id=ONE))
    base = known_base(WantedBase("b:1"), lock, None)
    assert base is not None
    assert (base.reference, base.pullable) == (ONE, False)
    assert with_found(lock, base, None) == lock


def test_a_base_without_digest_anywhere_is_not_guessed() -> None:
    lock = with_base(ImagesLock(), LockedBase(name="b:1"))
    assert known_base(WantedBase("b:1"), lock, None) is None


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("lmsysorg/sglang:v0.5.23", "lmsysorg/sglang@"),
        ("python", "python@"),
        ("registry.lab:5000/team/base", "registry.lab:5000/team/base@"),
        ("registry.lab:5000/team/base:1", "registry.lab:5000/team/base@"),
    ],
)
def test_a_tag_gives_way_to_the_digest_and_a_port_does_not(name: str, reference: str) -> None:
    assert by_digest(name, ONE) == reference + ONE


def test_the_digest_is_that_of_the_repository_which_was_named() -> None:
    found = ImageFound(TWO, digests=(f"mirror.lab/python@{TWO}", f"python@{ONE}"))
    assert _as_found("docker.io/library/python:3.11", found).digest == ONE
    assert not _as_found("other:1", found).pullable


def test_the_cpu_engine_has_no_use_for_the_default_base() -> None:
    assert wanted_base(cluster()) == WantedBase(LOCAL_BASE)
    assert wanted_base(cluster(image={"base": "mine:1"})) == WantedBase("mine:1")
    sglang = cluster(engine="sglang", model={"repo": "a/b"}, image={"digest": ONE})
    assert wanted_base(sglang) == WantedBase(Image().base, ONE, "13.0")
