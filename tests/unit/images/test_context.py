"""Equal inputs give equal bytes and an equal hash; whatever goes in changes it."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_ops.images.context import Base, Recipe, engine_recipe, pack_context
from ddtree_ops.images.packages import LEFT_OUT
from ddtree_ops.images.wheel import Wheel
from ddtree_ops.schemas.cluster import EngineKind

DIGEST = "sha256:" + "1" * 64


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    path = tmp_path / "ddtree-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ddtree_ops/__init__.py", "")
        archive.writestr("ddtree-0.1.0.dist-info/METADATA", "Name: ddtree\n")
    return Wheel.of(path)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "installed"
    for name, text in {"b/late.py": "x", "a.py": "y", "torch/bin/torch_shm_manager": "elf"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "torch/bin/torch_shm_manager").chmod(0o700)
    return folder


@pytest.fixture
def recipe(wheel: Wheel) -> Recipe:
    base = Base("python:3.11", f"python@{DIGEST}", DIGEST)
    return Recipe("local", base, wheel, "FROM x\n", ("numpy==2.4.6", "torch==2.13.0"))


def packed(recipe: Recipe, packages: Path | None) -> bytes:
    into = io.BytesIO()
    assert pack_context(recipe, packages, into) == len(into.getvalue())
    return into.getvalue()


def test_same_inputs_same_bytes_whatever_their_times_and_owners(recipe: Recipe, packages: Path) -> None:
    first = packed(recipe, packages)
    for path in packages.rglob("*"):
        os.utime(path, (1, 1))
        if os.getuid() == 0:
            os.chown(path, 1234, 1234)
    (packages / "a.py").chmod(0o600)  # an operator's umask
    assert packed(recipe, packages) == first


def test_another_content_gives_other_bytes(recipe: Recipe, packages: Path) -> None:
    first = packed(recipe, packages)
    (packages / "a.py").write_text("z")
    assert packed(recipe, packages) != first


def test_the_tar_names_nobody_and_keeps_what_can_be_run(recipe: Recipe, packages: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(packed(recipe, packages))) as tar:
        entries = {entry.name: entry for entry in tar}
    assert [*entries] == sorted(entries, key=lambda name: (entries[name].isfile(), name))
    assert {(e.uid, e.gid, e.uname, e.gname, e.mtime) for e in entries.values()} == {
        (0, 0, "", "", 315532800)
    }
    assert entries["packages/torch/bin/torch_shm_manager"].mode == 0o755
    assert entries["packages/a.py"].mode == 0o644


def test_the_wheel_goes_in_unpacked_beside_packages_and_whole_without_them(
    recipe: Recipe, packages: Path
) -> None:
    def names(tar: bytes) -> set[str]:
        with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
            return {entry.name for entry in opened if entry.isfile()}

    unpacked = names(packed(recipe, packages))
    assert "ddtree/ddtree_ops/__init__.py" in unpacked
    assert not any(name.endswith(".whl") for name in unpacked)
    assert names(packed(replace(recipe, files={"smg.json": b"{}"}), None)) == {
        "Dockerfile",
        "ddtree-0.1.0-py3-none-any.whl",
        "smg.json",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "gateway"},
        {"dockerfile": "FROM y\n"},
        {"pins": ("numpy==2.4.6", "torch==2.13.1")},
        {"files": {"smg.json": b"{}"}},
        {"cuda": "13.0"},
        {"wheel": None},
        {"base": Base("python:3.11", "python@sha256:" + "2" * 64, "sha256:" + "2" * 64)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_ingredient_changes_the_hash(recipe: Recipe, change: dict[str, object]) -> None:
    assert replace(recipe, **change).context_hash != recipe.context_hash  # type: ignore[arg-type]


def test_another_wheel_of_the_same_version_changes_the_hash(recipe: Recipe, wheel: Wheel) -> None:
    with zipfile.ZipFile(wheel.path, "a") as archive:
        archive.writestr("ddtree_ops/new.py", "")
    assert replace(recipe, wheel=Wheel.of(wheel.path)).context_hash != recipe.context_hash


def test_the_order_of_the_list_does_not_change_the_hash(recipe: Recipe) -> None:
    assert replace(recipe, pins=recipe.pins[::-1]).context_hash == recipe.context_hash


def test_what_is_left_out_is_part_of_the_hash(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    before = recipe.context_hash
    monkeypatch.setattr("ddtree_ops.images.context.LEFT_OUT", (*LEFT_OUT, "numpy/tests"))
    assert recipe.context_hash != before


def test_each_engine_has_its_dockerfile(wheel: Wheel) -> None:
    base = Base("b:1", DIGEST, DIGEST)
    engine = engine_recipe(EngineKind.SGLANG, base, wheel, cuda="13.0")
    local = engine_recipe(EngineKind.REFERENCE, base, wheel)
    assert "sglang_plugin.check" in engine.dockerfile
    assert not engine.pins
    assert engine.args["CUDA"] == "13.0"
    assert any(pin.startswith("torch==") for pin in local.pins)
    assert "CUDA" not in local.args


def test_every_build_argument_is_one_that_the_dockerfile_takes(wheel: Wheel) -> None:
    base = Base("b:1", DIGEST, DIGEST)
    for recipe in (
        engine_recipe(EngineKind.SGLANG, base, wheel, cuda="13.0"),
        engine_recipe(EngineKind.REFERENCE, base, wheel),
    ):
        for name in recipe.args:
            assert f"\nARG {name}=" in f"\n{recipe.dockerfile}", name
