"""Every check against captured hosts: what is wrong is found, and nothing else is."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ddtree_ops.errors import BadInput
from ddtree_ops.hosts.checks import (
    CHECKS,
    GIB,
    Expectations,
    Status,
    check_host,
    expectations,
    unreachable_host,
    worst,
)
from ddtree_ops.hosts.facts import parse_facts
from ddtree_ops.schemas.cluster import Cluster

from .captured import NAMES, capture, facts

WANT = Expectations(ports=(30001,), paths=("/var/lib/ddtree/models", "/var/lib/ddtree"))
TP2 = replace(WANT, tp=2)
H200 = Expectations(gpu_model="H200", gpu_count=2, min_free=100 * GIB, paths=("/var/lib/ddtree",))
#: Reported, never judged.
INFORMATION = {"host.hugepages", "gpu.numa"}


def wrong(name: str, want: Expectations = WANT) -> dict[str, str]:
    """Status by id of every check that neither passes nor skips."""
    found = check_host(facts(name), want)
    return {one.id: one.status.value for one in found if one.status in {Status.WARN, Status.FAIL}}


CASES = [
    ("good", WANT, {}),
    ("good", TP2, {}),
    ("deployed", WANT, {}),
    ("x8-slot", WANT, {"gpu.pcie": "warn"}),
    ("driver-575", WANT, {"driver.branch": "fail", "driver.cuda": "fail"}),
    (
        "proprietary",
        WANT,
        {"driver.answers": "fail", "driver.open": "fail", "gpu.count": "fail"},
    ),
    (
        "nouveau",
        WANT,
        {
            "driver.answers": "fail",
            "driver.branch": "fail",
            "driver.open": "fail",
            "driver.nouveau": "fail",
            "gpu.count": "fail",
        },
    ),
    ("mixed-skus", WANT, {"gpu.same": "fail", "gpu.memory_clock": "fail", "gpu.power_cap": "fail"}),
    ("unequal-caps", WANT, {"gpu.power_cap": "fail"}),
    ("acs-on", WANT, {"kernel.acs": "warn"}),
    ("acs-on", TP2, {"kernel.acs": "fail", "kernel.hmm": "warn"}),
    ("xid", WANT, {"kernel.xid": "fail", "gpu.count": "fail"}),
    ("full-disk", WANT, {"disk.space": "fail", "disk.filesystem": "warn"}),
    ("hung", WANT, {"driver.answers": "fail", "gpu.count": "fail"}),
    ("no-runtime", WANT, {"docker.toolkit": "fail", "docker.runtime": "fail", "docker.gpus": "fail"}),
    ("stale-cdi", WANT, {"docker.cdi": "fail", "driver.versions": "fail"}),
    (
        "hot",
        WANT,
        {
            "gpu.ecc": "fail",
            "gpu.persistence": "warn",
            "gpu.temperature": "fail",
            "gpu.throttle": "fail",
            "gpu.pcie": "warn",
            "gpu.bar1": "warn",
            "gpu.idle": "warn",
        },
    ),
    (
        "bare",
        WANT,
        {
            "host.os": "warn",
            "host.root": "fail",
            "host.python": "fail",
            "host.time": "warn",
            "host.governor": "warn",
            "host.ports": "fail",
            "driver.answers": "fail",
            "driver.branch": "fail",
            "driver.open": "fail",
            "driver.held": "warn",
            "docker.answers": "fail",
            "docker.toolkit": "fail",
            "gpu.count": "fail",
            "kernel.iommu": "warn",
            "kernel.aspm": "warn",
        },
    ),
    (
        "h200-x2",
        H200,
        {
            "driver.held": "warn",
            "docker.answers": "fail",
            "docker.toolkit": "fail",
            "kernel.iommu": "warn",
            "kernel.aspm": "warn",
        },
    ),
]


@pytest.mark.parametrize(
    ("name", "want", "expected"), CASES, ids=[f"{name}-tp{want.tp}" for name, want, _ in CASES]
)
def test_what_is_wrong_is_found_and_nothing_else(
    name: str, want: Expectations, expected: dict[str, str]
) -> None:
    assert wrong(name, want) == expected


def test_every_capture_is_used() -> None:
    assert set(NAMES) == {name for name, _, _ in CASES}


def test_every_check_is_made_to_complain_by_some_host() -> None:
    complained = {id for name, want, _ in CASES for id in wrong(name, want)}
    complained |= {"gpu.model"}  # below
    assert set(CHECKS) - complained == INFORMATION


def test_another_model_is_refused() -> None:
    assert wrong("good", replace(WANT, gpu_model="H200")) == {"gpu.model": "fail"}


def test_a_power_cap_other_than_the_wanted_one_is_refused() -> None:
    assert wrong("good", replace(WANT, power_cap=450)) == {"gpu.power_cap": "fail"}
    assert wrong("good", replace(WANT, power_cap=600)) == {}


def test_a_bar1_that_is_too_small_matters_more_with_tp() -> None:
    assert wrong("hot", TP2)["gpu.bar1"] == "fail"


def test_an_application_xid_alone_only_warns() -> None:
    data = capture("xid")
    data["kernel_log"] = data["kernel_log"][:1]
    found = {one.id: one for one in check_host(parse_facts(data, name="x"), WANT)}["kernel.xid"]
    assert (found.status, found.found) == (Status.WARN, "31 on 0000:41:00")


def test_an_idle_card_is_not_judged_by_its_generation_but_a_busy_one_is() -> None:
    found = {one.id: one for one in check_host(facts("good"), WANT)}["gpu.pcie"]
    assert (found.status, found.found) == (Status.PASS, "x16, all idle")
    found = {one.id: one for one in check_host(facts("hot"), WANT)}["gpu.pcie"]
    assert found.found == "GPU 2: Gen4 under load"


def test_a_host_without_gpus_is_fit_for_the_cpu_engine() -> None:
    data = capture("bare")
    data["docker"] = capture("good")["docker"]
    found = check_host(parse_facts(data, name="x"), replace(WANT, gpus=False))
    assert {one.status for one in found if one.id.startswith(("gpu.", "driver.", "kernel."))} == {Status.SKIP}


def test_every_complaint_has_a_one_line_remedy_and_nothing_else_has_one() -> None:
    for name, want, _ in CASES:
        for one in check_host(facts(name), want):
            complains = one.status in {Status.WARN, Status.FAIL}
            assert (one.remedy is not None) == complains, one
            assert "\n" not in one.found + (one.remedy or "")


def test_ids_are_stable() -> None:
    assert all(re.fullmatch(r"[a-z]+\.[a-z0-9_]+", id) for id in CHECKS)


def test_the_gravest_status_wins_and_skips_do_not_count() -> None:
    found = check_host(facts("acs-on"), WANT)
    assert worst(found) is Status.WARN
    assert worst([*found, unreachable_host("b", "timed out")]) is Status.FAIL
    assert worst([one for one in found if one.status is Status.SKIP]) is Status.PASS


@pytest.mark.parametrize(
    "damage", [{}, {"commands": None}, {"schema": 1, "commands": {}}, {"commands": 3, "files": 4}]
)
def test_an_answer_of_another_shape_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(BadInput, match="the probe's answer cannot be read"):
        parse_facts(damage, name="x")


def test_expectations_follow_the_services_of_the_host() -> None:
    cluster = Cluster.model_validate(
        {
            "schema": 1,
            "name": "lab",
            "hosts": {"inline": {"a": {}, "b": {}}},
            "model": {"path": "/m"},
            "drafter": {"path": "/d"},
            "gpu": {"count": 4, "power_cap_w": 450},
            "services": [
                {"name": "x", "arm": "ddtree", "budget": 31, "port": 30001, "tp": 2, "hosts": ["a"]},
                {"name": "y", "arm": "dflash", "port": 30010, "replicas": 2},
            ],
        }
    )
    a, b = expectations(cluster, "a"), expectations(cluster, "b")
    assert (a.tp, b.tp) == (2, 1)
    assert (a.ports, b.ports) == ((30001, 30010, 30011, 9100, 9400), (30010, 30011, 9100, 9400))
    assert (a.gpu_count, a.power_cap, a.min_free) == (4, 450, 250 * GIB)
