"""Replicas, their cards and ports; and the rotation of arms over cards."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.deploy.layout import Card, cards_of, lay_out
from ddtree_ops.deploy.turns import rotation
from ddtree_ops.errors import BadInput
from ddtree_ops.hosts.facts import parse_facts, read_capture
from ddtree_ops.schemas.cluster import Cluster

from .clusters import cards, cluster, rehearsal

CAPTURES = Path(__file__).parents[1] / "hosts" / "captures"


def service(name: str, port: int, **keys: object) -> dict[str, object]:
    return {"name": name, "arm": "dflash", "port": port, **keys}


def test_every_replica_has_a_card_and_a_port_of_its_own_on_its_host() -> None:
    wanted = cluster([service("x", 30001, replicas=3), service("y", 30011, gpus=[0, 7])])
    found = lay_out(wanted, ["a", "b"], {"a": cards(), "b": cards(host="b")})
    for host in "ab":
        mine = [one for one in found if one.host == host]
        assert [(one.service.name, one.index, one.port) for one in mine] == [
            ("x", 0, 30001), ("x", 1, 30002), ("x", 2, 30003), ("y", 0, 30011), ("y", 1, 30012),
        ]  # fmt: skip
        taken = [gpu for one in mine for gpu in one.gpus]
        assert taken == [f"GPU-{host}{index}" for index in (1, 2, 3, 0, 7)]
    assert found == lay_out(wanted, ["a", "b"], {"b": cards(host="b"), "a": cards()})


def test_a_service_runs_on_the_hosts_that_it_names_only() -> None:
    wanted = cluster([service("x", 30001, hosts=["b"]), service("y", 30011)])
    found = lay_out(wanted, ["a", "b"], {"a": cards(), "b": cards(host="b")})
    assert [(one.service.name, one.host) for one in found] == [("y", "a"), ("x", "b"), ("y", "b")]


def test_gpus_of_one_replica_share_a_numa_node_where_one_has_room() -> None:
    wanted = cluster([service("single", 30001, replicas=3), service("wide", 30011, tp=4)])
    found = lay_out(wanted, ["a"], {"a": cards()})
    by_name = {(one.service.name, one.index): one.gpus for one in found}
    assert by_name["wide", 0] == ("GPU-a0", "GPU-a1", "GPU-a2", "GPU-a3")
    assert [by_name["single", index] for index in range(3)] == [("GPU-a4",), ("GPU-a5",), ("GPU-a6",)]


def test_pairs_take_the_node_with_the_least_room_so_that_fours_still_fit() -> None:
    wanted = cluster([service("fixed", 30001, gpus=[0, 1]), service("pair", 30011, tp=2)])
    found = lay_out(wanted, ["a"], {"a": cards()})
    assert found[-1].gpus == ("GPU-a2", "GPU-a3")


def test_a_replica_wider_than_a_node_spans_nodes_in_bus_order() -> None:
    found = lay_out(cluster([service("wide", 30001, tp=8)]), ["a"], {"a": cards()})
    assert found[0].gpus == tuple(f"GPU-a{index}" for index in range(8))


def test_named_gpus_are_split_into_groups_of_tp() -> None:
    found = lay_out(cluster([service("x", 30001, gpus=[6, 4, 0, 2], tp=2)]), ["a"], {"a": cards()})
    assert [one.gpus for one in found] == [("GPU-a6", "GPU-a4"), ("GPU-a0", "GPU-a2")]


def test_fewer_cards_than_asked_for_are_refused() -> None:
    wanted = cluster([service("x", 30001, replicas=3)])
    with pytest.raises(BadInput, match=r"found 3 GPUs asked for on a, allowed: the 2 that it has"):
        lay_out(wanted, ["a"], {"a": cards(2)})
    with pytest.raises(BadInput, match="the 0 that it has"):
        lay_out(wanted, ["a"])


def test_an_index_that_the_host_lacks_is_refused() -> None:
    with pytest.raises(BadInput, match=r"services\.x\.gpus: found 7, allowed: 0 to 3"):
        lay_out(cluster([service("x", 30001, gpus=[7])]), ["a"], {"a": cards(4)})


def test_the_cpu_engine_needs_no_card() -> None:
    found = lay_out(rehearsal([service("x", 30001, replicas=2)]), ["a"])
    assert [(one.container("lab"), one.port, one.gpus) for one in found] == [
        ("lab-x-0", 30001, ()),
        ("lab-x-1", 30002, ()),
    ]


def test_cards_keep_their_numa_node_only_where_the_counts_agree() -> None:
    facts = parse_facts(read_capture(CAPTURES / "good.json"), name="a")
    found = cards_of(facts)
    assert [card.uuid for card in found] == [gpu.uuid for gpu in facts.gpus]
    assert [card.numa for card in found] == list(facts.numa)
    assert {card.numa for card in cards_of(replace(facts, numa=(0,)))} == {-1}


@given(
    gpus=st.integers(1, 8),
    data=st.data(),
    start=st.integers(0, 30),
)
def test_every_arm_visits_every_card_equally_and_never_shares_one(
    gpus: int, data: st.DataObject, start: int
) -> None:
    arms = [f"arm{index}" for index in range(data.draw(st.integers(1, gpus)))]
    places = [Card(f"GPU-{index}", "") for index in range(gpus)]
    rounds = [rotation(arms, places, start + repeat) for repeat in range(gpus)]
    for assigned in rounds:
        assert list(assigned) == arms
        assert len(set(assigned.values())) == len(arms)
    for arm in arms:
        assert Counter(assigned[arm] for assigned in rounds) == Counter(places)


def test_a_rotation_of_more_arms_than_cards_is_refused() -> None:
    with pytest.raises(ValueError, match="3 arms do not fit on 2 places"):
        rotation("abc", "xy", 0)


def over_turns(wanted: Cluster, turns: int, gpus: int = 8) -> dict[tuple[str, int], list[tuple[str, ...]]]:
    """Each replica's cards in every turn; no two replicas may share one."""
    seen: dict[tuple[str, int], list[tuple[str, ...]]] = {}
    for turn in range(turns):
        found = lay_out(wanted, ["a"], {"a": cards(gpus)}, turn=turn)
        taken = [gpu for one in found for gpu in one.gpus]
        assert len(set(taken)) == len(taken)
        for one in found:
            seen.setdefault((one.service.name, one.index), []).append(one.gpus)
    return seen


def group(*numbers: int) -> tuple[str, ...]:
    return tuple(f"GPU-a{number}" for number in numbers)


def test_turns_bring_every_single_card_service_to_every_free_card() -> None:
    services = [service("x", 30001), service("y", 30011, replicas=2), service("z", 30031, gpus=[7])]
    seen = over_turns(cluster(services), 7)
    assert set(seen["z", 0]) == {group(7)}
    for seat in (("x", 0), ("y", 0), ("y", 1)):
        assert set(seen[seat]) == {group(number) for number in range(7)}


def test_turns_bring_groups_of_cards_to_every_group_and_keep_them_whole() -> None:
    wanted = cluster([service("x", 30001, tp=2), service("y", 30011, tp=2, replicas=2)])
    seen = over_turns(wanted, 4)
    groups = [group(0, 1), group(2, 3), group(4, 5), group(6, 7)]
    assert seen["x", 0] == groups
    assert seen["y", 0] == [*groups[1:], groups[0]]
    assert seen["y", 1] == [*groups[2:], *groups[:2]]


def test_narrow_replicas_go_around_with_the_wide_ones_and_within_their_groups() -> None:
    """A wide replica was in every place after 2 turns, a single one after 8."""
    wanted = cluster([service("wide", 30001, tp=4), service("x", 30011), service("y", 30021, replicas=2)])
    seen = over_turns(wanted, 8)
    assert set(seen["wide", 0]) == {group(0, 1, 2, 3), group(4, 5, 6, 7)}
    for seat in (("x", 0), ("y", 0), ("y", 1)):
        assert set(seen[seat]) == {group(number) for number in range(8)}
    assert lay_out(wanted, ["a"], {"a": cards()}, turn=8) == lay_out(wanted, ["a"], {"a": cards()})
    mixed = over_turns(cluster([service("wide", 30001, tp=4), service("pair", 30011, tp=2, replicas=2)]), 4)
    pairs = {group(number, number + 1) for number in (0, 2, 4, 6)}
    assert set(mixed["pair", 0]) == set(mixed["pair", 1]) == pairs


def test_layouts_that_cannot_be_exchanged_are_refused() -> None:
    """Seven cards are to move: three pairs and one that is left, with a service on it."""
    services = [
        service("pair", 30001, tp=2),
        service("single", 30011, replicas=5),
        service("own", 30031, gpus=[7]),
    ]
    assert len(lay_out(cluster(services), ["a"], {"a": cards()})) == 7
    with pytest.raises(BadInput) as caught:
        lay_out(cluster(services), ["a"], {"a": cards()}, turn=1)
    assert "services.single: its cards cannot be exchanged with a group of 2" in caught.value.message
    assert "GPU-a6" in caught.value.message
    services[1]["replicas"] = 4
    assert len(over_turns(cluster(services), 6)["single", 3]) == 6


def test_a_group_that_no_block_holds_is_refused() -> None:
    """A NUMA node of three cards and one of five: the wide group goes to the second, and a pair's cards are
    not those that a second group of four would take together.
    """
    wanted = cluster([service("wide", 30001, tp=4), service("pair", 30011, tp=2)])
    uneven = tuple(Card(f"GPU-a{number}", f"0000:0{number}:00.0", int(number >= 3)) for number in range(8))
    found = {one.service.name: one.gpus for one in lay_out(wanted, ["a"], {"a": uneven}, turn=1)}
    assert len(set(found["wide"]) | set(found["pair"])) == 6
    with pytest.raises(BadInput, match="cannot be exchanged"):
        lay_out(wanted, ["a"], {"a": uneven[:7]}, turn=1)
