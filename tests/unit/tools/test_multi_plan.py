"""What the plan for several cards starts, asks and makes of the answers, on servers that are known."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

import multi_plan
import multi_summary
from engine import cards, multi_figures, telemetry

PAIR = Path(__file__).parents[3] / "engine_patch" / "reference" / "pair"


class Server:
    """Answers at once. Of `leaves` the answers to prompts that begin so part at the fifth token."""

    broken: frozenset[str] = frozenset()
    leaves: dict[str, set[int]] = {}  # noqa: RUF012
    leaves_for = 99
    started: list[Server] = []  # noqa: RUF012

    def __init__(self, context, name, arm, port, argv):
        self.name, self.arm, self.port, self.argv = name, arm, port, argv
        self.ready_after, self.stopped = None, False
        # Who was there when it began: nobody shares memory that a stopped one still has.
        self.beside = {one.name for one in self.started if not one.stopped}
        self.started.append(self)

    def wait(self, limit):
        self.ready_after = 1.0
        return self.name not in self.broken

    def why(self):
        return "no error in the log"

    def stop(self):
        self.stopped = True

    def generate(self, ids, tokens, return_logprob=False, top_logprobs_num=0):
        meta = {"e2e_latency": 0.5}
        if not self.name.startswith("ar"):
            meta["spec_verify_ct"] = tokens // 4
        if return_logprob:
            # The two best are an eighth apart, seen by trees a sixteenth nearer to each other.
            second = -1.0625 if self.name.startswith("ddtree") else -1.125
            meta["output_top_logprobs"] = [[[-1.0, ids[0], None], [second, 99, None]]] * tokens
        output = [ids[0]] * tokens
        if len(ids) == 3 and ids[0] in self.leaves.get(self.name, ()):
            output[5:] = [self.leaves_for] * (tokens - 5)
        return {"output_ids": output, "meta_info": meta}


@pytest.fixture
def context(tmp_path, monkeypatch):
    options = argparse.Namespace(
        out=tmp_path, minutes=60, rounds=3, tokens=33, seconds=0.0, pair=PAIR, bundle="", model="pair",
        gpus=2, arms=["ar", "dflash", "ddtree"], stages=["replicas", "tp"], tp=[2, 4, 8],
    )  # fmt: skip
    monkeypatch.setattr(multi_plan, "Server", Server)
    monkeypatch.setattr(Server, "started", [])
    raw = tmp_path / "raw"
    raw.mkdir()
    prompts = [[number, 1, 2] for number in range(8)]
    return multi_plan.MultiContext(options, site=tmp_path / "site", raw=raw, prompts=prompts)


def run(context, folder=PAIR):
    return multi_plan.Plan(context, folder).run()


def by_layout(figures):
    return {(row["layout"], row["stage"], row["in_flight"]): row for row in figures["layouts"]}


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_every_arm_is_on_every_card_and_pairs_of_cards_come_after_the_other_arms_have_gone(gpus, context):
    context.options.gpus = gpus
    assert run(context) == []
    single = [f"{arm}-c{card}" for arm in ("ar", "dflash", "ddtree") for card in range(gpus)]
    wide = [f"ddtree-tp2-{index}" for index in range(gpus // 2)]
    assert sorted(one.name for one in Server.started) == sorted(single + wide)
    visible = {one.name: dict(one.arm.environment)["CUDA_VISIBLE_DEVICES"] for one in Server.started}
    assert visible["dflash-c1"] == "1"
    assert [visible[name] for name in wide] == [f"{2 * i},{2 * i + 1}" for i in range(gpus // 2)]
    first = next(one for one in Server.started if one.name == wide[0])
    assert first.beside == {f"ddtree-c{card}" for card in range(gpus)}
    ports = [one.port for one in Server.started]
    assert len({*ports, *(port + 1 for port in ports)}) == 2 * len(ports)
    assert all(one.stopped for one in Server.started)
    figures = multi_figures.figures_of(context.results)
    assert figures["replicas_equal"] == dict.fromkeys(("ar", "dflash", "ddtree"), [8 * (gpus - 1)] * 2)
    layouts = by_layout(figures)
    for in_flight in (1, 4):
        for name, stage in (("all-ar", "replicas"), ("side-by-side", "replicas"), ("all-ddtree", "tp2")):
            row = layouts[name, stage, in_flight * gpus]
            assert (row["gpus"], row["replicas"], row["rounds"]) == (gpus, gpus, 3)
        # As many requests on the host as with one rank a server.
        row = layouts["tp2-ddtree", "tp2", in_flight * gpus]
        assert (row["gpus"], row["tp"], row["replicas"]) == (gpus, 2, gpus // 2)
        assert row["parity"]["equal"] == row["parity"]["answers"] == 8 * (gpus // 2)
    assert layouts["alone", "replicas", 1]["gpus"] == 1
    assert set(figures["cannot"]) == {f"tp{tp}" for tp in (4, 8) if tp <= gpus}


@pytest.mark.parametrize(("tp", "allowed"), [(2, True), (4, False), (8, False)])
def test_the_pairs_two_heads_allow_two_ranks(tp, allowed):
    assert (cards.obstacle(PAIR, tp) is None) == allowed


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_27bs_heads_allow_all_widths(tp, tmp_path):
    from ddtree_engine.bed.folders import beds_of, write_folders

    folder = tmp_path / "bed"
    write_folders(folder, PAIR, beds_of(PAIR))
    assert cards.obstacle(folder, tp) is None
    config = json.loads((folder / "target" / "config.json").read_text())
    (folder / "target" / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 3}))
    assert "target: 3 num_key_value_heads" in cards.obstacle(folder, tp)


@pytest.mark.parametrize("seat", cards.single_seats(["ar", "ddtree"], 2) + cards.wide_seats("ddtree", 2, 4))
def test_multicast_is_off_and_ranks_talk_through_nccl_alone(seat, context):
    environment = context.environment(seat.served(), seat.name)
    assert environment["NCCL_NVLS_ENABLE"] == "0"
    assert environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    argv = seat.argv(PAIR, 30700)
    assert argv[argv.index("--tp-size") + 1] == str(seat.tp)
    assert (
        {"--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"} <= set(argv)
    ) == (seat.tp > 1)
    assert argv[argv.index("--max-running-requests") + 1] == str(4 * seat.tp)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_side_by_side_every_card_has_every_arm_once(gpus):
    arms = ["ar", "dflash", "ddtree"]
    rounds = [cards.side_by_side(arms, gpus, position) for position in range(3)]
    assert sorted(name for names in rounds for name in names) == sorted(
        f"{arm}-c{card}" for arm in arms for card in range(gpus)
    )
    assert all([name[-1] for name in names] == [str(card) for card in range(gpus)] for names in rounds)


@pytest.mark.parametrize(("token", "near"), [(99, 2), (98, 0)])
def test_answers_over_two_cards_that_part_are_near_ties_or_are_named(token, near, context, monkeypatch):
    monkeypatch.setattr(Server, "leaves", {"ddtree-tp2-0": {2, 5}, "dflash-c1": {3}})
    monkeypatch.setattr(Server, "leaves_for", token)
    assert run(context) == []
    figures = multi_figures.figures_of(context.results)
    assert figures["parity"]["noise"] == pytest.approx(0.0625)
    found = by_layout(figures)["tp2-ddtree", "tp2", 2]["parity"]
    assert (found["against"], found["equal"], found["near_ties"]) == (["ddtree-c0"], 6, near)
    # A token that is not among the best is no near-tie.
    assert [row[1:3] for row in found["others"]] == ([] if near else [[2, 5], [5, 5]])
    assert figures["replicas_equal"]["dflash"] == [7, 8]


def test_a_server_that_does_not_start_takes_its_layouts_along_and_no_other(context, monkeypatch):
    monkeypatch.setattr(Server, "broken", frozenset({"dflash-c1"}))
    assert run(context) == ["dflash-c1"]
    names = {row["layout"] for row in multi_figures.figures_of(context.results)["layouts"]}
    assert names >= {"all-ar", "all-ddtree", "tp2-ddtree"}
    assert "all-dflash" not in names
    assert all(one.stopped for one in Server.started)


def test_ranks_alone_need_plain_decoding_for_the_noise_and_no_loads_before(context):
    context.options.stages = ["tp"]
    assert run(context) == []
    assert {one.name for one in Server.started} == {"ar-c0", "ddtree-c0", "ddtree-c1", "ddtree-tp2-0"}
    figures = multi_figures.figures_of(context.results)
    assert figures["parity"]["noise"] is not None
    assert {row["stage"] for row in figures["layouts"]} == {"tp2"}


def test_what_there_is_no_time_for_is_left_over(context):
    context.options.minutes = 1.5
    assert run(context) == []
    assert "tp2" not in {row["stage"] for row in multi_figures.figures_of(context.results)["layouts"]}
    assert context.left_over


def test_a_load_counts_what_came_back_at_every_server(context):
    servers = [Server(context, f"ddtree-c{card}", None, 0, []) for card in range(2)]
    found = multi_plan.load(servers, context.prompts, 33, 4, 0.0)
    for row in found.values():
        assert (row["requests"], row["tokens"], row["said_seconds"]) == (4, 4 * 33, 2.0)
        assert row["seconds"] > 0


def loads(rates, layout, number=0):
    servers = {name: {"tokens": rate, "seconds": 1.0, "said_seconds": 1.0} for name, rate in rates.items()}
    return {"round": number, "layout": layout, "in_flight": 1, "servers": servers}


def test_floor_and_cross_talk_are_of_the_same_card_and_round():
    rows = [
        loads({"ddtree-c0": 100}, "alone", 0),
        loads({"ddtree-c0": 90, "ddtree-c1": 80}, "all-ddtree", 0),
        loads({"ddtree-c1": 100}, "alone", 1),
        loads({"ddtree-c0": 99, "ddtree-c1": 80}, "all-ddtree", 1),
    ]
    talk = multi_figures.cross_talk(rows)["busy_over_alone"]
    assert (talk["lowest"], talk["highest"]) == (0.8, 0.9)
    floor = multi_figures.floor_of(rows)
    assert floor["between_cards"] == pytest.approx(94.5 / 80 - 1)
    assert floor["between_rounds"] == pytest.approx(0.1)


def test_arms_are_compared_on_the_same_card():
    rows = [
        loads({"dflash-c0": 100, "ddtree-c1": 60}, "side-by-side", 0),
        loads({"ddtree-c0": 120, "dflash-c1": 40}, "side-by-side", 1),
    ]
    third = loads({"ar-c0": 10, "ddtree-c1": 60}, "side-by-side", 2)
    layout = multi_figures.layout_rows({"replicas": {"loads": [*rows, third]}}, "replicas")[0]
    assert layout["tokens_per_second"] == 130  # the mean of all rounds, since each has other arms
    assert layout["arms"] == ["ar", "ddtree", "dflash"]
    found = multi_figures.arms_by_card(rows, ["dflash", "ddtree"])
    assert found == {"dflash": {"median": 1.35, "lowest": 1.2, "highest": 1.5, "count": 2}}


def test_the_summary_is_made_of_the_raw_files_and_says_what_is_missing(context, tmp_path, monkeypatch):
    context.keep("host", "facts", {"cards": ["a card", "a card"], "versions": {"sglang": "0.5.23"}})
    run(context)
    context.save()
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(sys, "argv", ["multi_summary.py", str(folder), f"two={context.archive}"])
    assert multi_summary.main() == 0
    found = json.loads((folder / "summary.json").read_text())
    assert (found["gpus"], found["hardware"]) == (2, ["a card", "a card"])
    assert found["not_measured"] == {"tp4": "the host had 2 GPUs", "tp8": "the host had 2 GPUs"}
    for row in found["layouts"]:
        assert row["tokens_per_second"] > 0
        assert row["raw"]
        assert all((folder / name).is_file() for name in row["raw"])


def test_a_summary_of_nothing_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["multi_summary.py", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        multi_summary.main()
    assert ended.value.code == 2
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--gpus", "1"], "--gpus: found 1, allowed are 2 or more"),
        (["--gpus", "2", "--arms", "ar"], "found no ddtree"),
        (["--gpus", "2", "--tp", "3"], "--tp: found 3, allowed are 2, 4, 8"),
    ],
)
def test_options_that_cannot_be_are_refused(argv, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["multi_plan.py", *argv])
    with pytest.raises(SystemExit) as ended:
        multi_plan.parse_options()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_card_that_was_slowed_down_is_told_from_one_at_its_power_cap():
    text = """\
0, GPU-a, 1980, 500.5, 60, 97, 0x0000000000000004
1, GPU-b, 1200, 300.0, 88, 97, 0x0000000000000040
0, GPU-a, 345, 80.0, 40, 0, 0x0000000000000001
1, GPU-b, [N/A], 300.0, 88, 97, 0x0
1, GPU-b, 12
"""
    found = telemetry.by_card(text)
    assert found["0"]["clock_mhz"] == [1980.0, 1980.0]
    assert [found[card]["slowed"] for card in "01"] == [0, 1]
    assert [found[card]["at_power_cap"] for card in "01"] == [1, 0]
    assert [found[card]["samples"] for card in "01"] == [2, 1]
