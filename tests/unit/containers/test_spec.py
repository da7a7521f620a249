"""The hash of a container changes with everything that it is made of, and with nothing else."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from ddtree_ops.containers.spec import ContainerSpec, Healthcheck, Mount

SPEC = ContainerSpec("lab-ddtree-0", "lab", "ddtree", 0, "sha256:aa", ("serve",), env={"A": "1", "B": "2"})
CHANGES: dict[str, Any] = {
    "name": "x",
    "cluster": "x",
    "service": "x",
    "replica": 1,
    "image": "sha256:bb",
    "argv": ("other",),
    "env": {"A": "2"},
    "secret_env": ("API_KEY",),
    "mounts": (Mount("/a", "/b"),),
    "gpus": ("GPU-1",),
    "shm_gib": 1,
    "ulimits": {"memlock": -1},
    "cap_add": ("SYS_NICE",),
    "user": "1000",
    "network": "none",
    "healthcheck": Healthcheck(("true",)),
    "stop_timeout_s": 1,
    "entrypoint": ("/bin/sh",),
    "restart": "always",
    "log_max_mib": 1,
    "log_files": 1,
}


@pytest.mark.parametrize("field", [field.name for field in fields(ContainerSpec)])
def test_a_change_of_any_field_is_a_change_of_the_hash(field: str) -> None:
    assert replace(SPEC, **{field: CHANGES[field]}).config_hash != SPEC.config_hash


def test_the_order_of_variables_is_no_change() -> None:
    assert replace(SPEC, env={"B": "2", "A": "1"}).config_hash == SPEC.config_hash
