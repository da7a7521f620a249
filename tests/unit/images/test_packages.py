"""What the CPU engine's image holds: the whole list, nothing else, and torch without CUDA."""

from __future__ import annotations

import importlib.metadata
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ddtree_ops.errors import JobFailed
from ddtree_ops.images.packages import index_in, installed_packages, needs_cuda, requirements_of
from ddtree_ops.images.places import cache_folder, dockerfiles_folder

ROOT = Path(__file__).parents[3]
#: What `ddtree_engine.reference` imports beyond the extra `local`; both are in the base install.
BESIDE = ("jinja2", "numpy", "prometheus-client")
#: tokenizers asks for it only to download.
NOT_THERE = {"huggingface-hub"}


def pins() -> dict[str, str]:
    text = (dockerfiles_folder() / "local-requirements.txt").read_text()
    return dict(pin.split("==") for pin in requirements_of(text))


def test_the_list_is_what_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["optional-dependencies"]["local"]]
    wanted += [one for one in map(Requirement, project["dependencies"]) if one.name in BESIDE]
    assert len(wanted) >= len(BESIDE) + 5
    for requirement in wanted:
        assert requirement.specifier.contains(pins()[requirement.name]), requirement


def test_the_list_holds_all_that_its_packages_need_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    todo = [Requirement(line).name for line in project["optional-dependencies"]["local"]] + list(BESIDE)
    needed: set[str] = set()
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in needed | NOT_THERE:
            continue
        needed.add(name)
        for requirement in map(Requirement, importlib.metadata.requires(name) or []):
            marker = requirement.marker
            if marker is None or marker.evaluate({"extra": "", "python_version": "3.11"}):
                todo.append(requirement.name)
                if requirement.name.lower() not in NOT_THERE:
                    pinned = pins()[requirement.name.lower().replace("_", "-")]
                    assert requirement.specifier.contains(pinned), f"{name} wants {requirement}"
    assert needed == set(pins())


@pytest.mark.parametrize("line", ["torch", "torch>=2", "torch==", "torch==2 ; python_version > '3'", "-r x"])
def test_a_line_that_pins_nothing_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="NAME==VERSION"):
        requirements_of(f"# words\nnumpy==2.4.6\n{line}\n")


def wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", f"version = {version!r}\n")
        archive.writestr(f"{name}/bin/tool", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name} = {name}:main\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What pip finds here, and nothing else."""
    folder = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    wheel(folder, "one", "1.0")
    wheel(folder, "two", "2.0")
    return folder


def test_packages_are_installed_once_and_without_what_names_this_machine(index: Path, tmp_path: Path) -> None:
    cache, said = tmp_path / "cache", []
    folder = installed_packages(["one==1.0", "two==2.0"], cache, note=said.append)
    assert (folder / "one/__init__.py").read_text() == "version = '1.0'\n"
    assert not (folder / "bin").exists()
    assert not list(folder.glob("*.dist-info/RECORD"))
    assert (folder / "two-2.0.dist-info/METADATA").is_file()
    for path in index.iterdir():
        path.unlink()
    assert installed_packages(["two==2.0", "one==1.0"], cache, note=said.append) == folder
    assert said == ["2 packages for Python 3.11"]


def test_a_package_that_is_not_there_is_named_and_nothing_half_stays(index: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(JobFailed, match=r"three==3\.0"):
        installed_packages(["one==1.0", "three==3.0"], cache)
    assert [path.suffix for path in (cache / "packages").iterdir()] == [".lock"]


def test_a_cuda_build_is_told_by_what_it_requires() -> None:
    assert needs_cuda({"requires_dist": ["filelock", "nvidia-cublas==13.0; platform_system == 'Linux'"]})
    assert needs_cuda({"requires_dist": ["triton==3.6.0"]})
    assert not needs_cuda({"requires_dist": ["filelock", "opt-einsum; extra == 'opt-einsum'"]})
    assert not needs_cuda({"requires_dist": ["triton-extra; extra == 'x'"]})
    assert not needs_cuda({})


def test_the_index_that_uv_names_is_found() -> None:
    assert index_in("torch==2.13.0+cpu\n    # from https://example.org/whl/cpu\n") == (
        "https://example.org/whl/cpu"
    )
    assert index_in("torch==2.13.0\n    # via something\n") is None


def test_the_cache_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "ddtree"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder({}) == tmp_path / ".cache/ddtree"
