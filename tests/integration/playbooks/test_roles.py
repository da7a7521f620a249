"""Roles for real on this machine, below a temporary root.

Molecule covers each role (`make molecule`); here are the parts that need a server, and site.yml as a whole.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.hosts.runner import Outcome, playbooks_folder

from .conftest import local
from .hub import COMMIT, REPO, Hub, serve

#: The client writes in pieces of 10 MiB: only a longer file is resumed in its middle.
WEIGHTS = os.urandom(1 << 16) * 384


def role(folder: Path, name: str, variables: dict[str, Any]) -> Path:
    book = folder / f"{name}.yml"
    plays = [{"hosts": "all", "gather_facts": False, "roles": [{"role": name, "vars": variables}]}]
    book.write_text(yaml.safe_dump(plays))
    return book


def fetch(folder: Path, hub: Hub, *, secrets: dict[str, str] | None = None, **variables: Any) -> Outcome:
    hf = Path(sys.executable).with_name("hf")
    assert hf.exists(), "the extra dev brings huggingface_hub"
    book = role(
        folder,
        "model_cache",
        {
            "model_cache_folder": str(folder / "models"),
            "model_cache_endpoint": hub.url,
            "model_cache_hf": str(hf),
            "model_cache_manage_client": False,
            "model_cache_models": [{"repo": REPO, "revision": "main"}],
            "model_cache_min_free_gib": 0,
            "model_cache_delay": 0,
            **variables,
        },
    )
    return local(folder / "logs", secrets).run(book, deadline_s=120)


def snapshot(folder: Path) -> Path:
    return folder / "models" / "models--lab--model" / "snapshots" / COMMIT


def test_a_download_that_breaks_off_goes_on_and_a_second_run_changes_nothing(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": WEIGHTS}
    with serve(Hub(files, token="good-token", breaks=2)) as hub:
        first = fetch(tmp_path, hub, secrets={"HF_TOKEN": "good-token"})
        first.require_ok()
        assert (snapshot(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
        ranges = [
            asked for method, path, asked in hub.asked if method == "GET" and path.endswith("safetensors")
        ]
        assert any(asked and not asked.startswith("bytes=0-") for asked in ranges), ranges
        asked = len(hub.asked)
        second = fetch(tmp_path, hub, secrets={"HF_TOKEN": "good-token"})
        second.require_ok()
        assert second.hosts["here"].changed == 0
        assert len(hub.asked) == asked
    for log in (first.log, second.log):
        assert log is not None
        assert "good-token" not in log.read_text()


def test_a_gated_model_is_refused_before_anything_is_downloaded(tmp_path: Path) -> None:
    with serve(Hub({"config.json": b"{}", "model.safetensors": WEIGHTS}, token="good-token")) as hub:
        outcome = fetch(tmp_path, hub)
    assert "hub.access: lab/model is gated: the Hub answers 403" in outcome.failed["here"]
    assert not any(path.endswith("safetensors") for _, path, _ in hub.asked)


def test_a_model_that_does_not_fit_on_the_disk_is_refused(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with serve(Hub({"config.json": b"{}", "model.safetensors": WEIGHTS}, size=free)) as hub:
        outcome = fetch(tmp_path, hub)
    assert "disk.space: lab/model takes" in outcome.failed["here"]
    assert not any(path.endswith("safetensors") for _, path, _ in hub.asked)


def test_an_unfinished_download_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    """The client itself would: offline it takes any snapshot folder as it is."""
    folder = snapshot(tmp_path)
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    refs = folder.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    with serve(Hub({"config.json": b"{}", "model.safetensors": WEIGHTS})) as hub:
        fetch(tmp_path, hub).require_ok()
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.slow
def test_the_whole_site_can_be_planned_without_changing_anything(tmp_path: Path) -> None:
    """--check on a bare machine: every role says what it would do, none stumbles over what is not there."""
    variables = {
        "facts_paths": [str(tmp_path)],
        "preflight_min_free_gib": 0,
        "preflight_paths": [str(tmp_path)],
        "service_host_state": str(tmp_path / "state"),
        "service_host_models": str(tmp_path / "state" / "models"),
        "service_host_logs": str(tmp_path / "logs"),
        "monitoring_folder": str(tmp_path / "state" / "monitoring"),
        "container_runtime_manage": False,
        "nvidia_driver_packages": [],
        "gpu_settings_tp": 2,
    }
    outcome = local().run("site.yml", variables=variables, check=True, deadline_s=120)
    outcome.require_ok()
    would = {change.task.partition(": ")[0] for change in outcome.changes}
    assert {"service_host", "nvidia_driver", "container_runtime", "gpu_settings", "monitoring"} <= would
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
def test_roles_do_not_undo_each_other(tmp_path: Path) -> None:
    """Folders that two roles look after keep one owner."""
    if os.getuid() != 0:
        pytest.skip("giving folders away needs root")
    variables = {
        "facts_paths": [str(tmp_path)],
        "service_host_root": str(tmp_path),
        "service_host_manage_user": False,
        "service_host_user": "nobody",
        "service_host_group": "nogroup",
        "service_host_state": str(tmp_path / "state"),
        "service_host_models": str(tmp_path / "state" / "models"),
        "service_host_logs": str(tmp_path / "logs"),
        "model_cache_folder": str(tmp_path / "state" / "models"),
    }
    for changed in (True, False):
        outcome = local().run("site.yml", variables=variables, tags=["service_host", "model_cache"])
        outcome.require_ok()
        assert bool(outcome.changes) is changed, outcome.changes
    assert (tmp_path / "state" / "models").owner() == "nobody"


def test_every_role_has_defaults_a_description_and_a_scenario() -> None:
    roles = sorted(folder for folder in (playbooks_folder() / "roles").iterdir() if folder.is_dir())
    assert len(roles) == 8
    for folder in roles:
        for name in ("defaults/main.yml", "meta/main.yml", "tasks/main.yml", "molecule/default/verify.yml"):
            assert (folder / name).is_file(), f"{folder.name}: {name}"


@pytest.mark.parametrize("name", ["site.yml", "facts.yml"])
def test_playbooks_use_builtin_modules_only(name: str) -> None:
    folder = playbooks_folder()
    for file in [folder / name, *folder.glob("roles/*/tasks/*.yml"), *folder.glob("roles/*/handlers/*.yml")]:
        for module in re.findall(r"^ *(?:- )?([a-z_]+[.][a-z_]+[.][a-z_]+):", file.read_text(), re.MULTILINE):
            assert module.startswith("ansible.builtin."), f"{file}: {module}"
