"""What the GPU plan does when an arm breaks, and what is left of a plan that is killed."""

import argparse
import gzip
import json
import sys
import tarfile
import threading
from pathlib import Path
from typing import ClassVar

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "gpu"))

from engine import arms, diagnosis, host, judgement, profiles, runs, servers, step_parts, workloads


class Server:
    """A server that answers at once, or does not start; its log says why."""

    # Arm -> the last line of its log.
    broken: ClassVar[dict[str, str]] = {}

    def __init__(self, context, name, arm, port, argv):
        self.name, self.arm, self.port = name, arm, port
        self.ready_after, self.ended = None, False
        self.stopped = False
        self.log = context.raw / f"{name}.log"
        self.log.write_text(self.broken.get(name, "all is well") + "\n")

    def wait(self, limit):
        self.ended = self.name in self.broken
        self.ready_after = None if self.ended else 1.0
        return not self.ended

    def why(self):
        return servers.why(self.log.read_text())

    def stop(self):
        self.ended = self.stopped = True


@pytest.fixture
def context(tmp_path, monkeypatch):
    options = argparse.Namespace(pair=tmp_path, out=tmp_path / "out", minutes=9.0, parallel=3, earlier=None)
    options.out.mkdir()
    (tmp_path / "raw").mkdir()
    monkeypatch.setattr(runs, "Server", Server)
    monkeypatch.setattr(diagnosis, "Server", Server)
    monkeypatch.setattr(runs, "judge", lambda context: None)
    monkeypatch.setattr(runs, "ask_about_ties", lambda context, servers: {})
    for name in workloads.WORKLOADS:
        monkeypatch.setitem(workloads.WORKLOADS, name, lambda context, server: {"by": server.name})
    return host.Context(options, site=tmp_path / "site", raw=tmp_path / "raw")


def kept(context):
    with tarfile.open(context.archive) as archive:
        return {entry.name: archive.extractfile(entry).read() for entry in archive}


def test_stages_name_arms_and_workloads_that_exist():
    for stage, arms_of_stage in arms.STAGES.items():
        for arm, asked in arms_of_stage.items():
            assert arm in arms.ARMS, (stage, arm)
            assert set(asked) <= set(workloads.WORKLOADS), (stage, arm)
    work = arms.plan_of(["a", "b", "d"])
    assert work["dflash"] == ["greedy"]
    assert next(iter(arms.plan_of(["d"]))) == "ar"


def test_an_arm_that_does_not_start_stops_no_other_and_is_looked_into(context, monkeypatch):
    fault = "RuntimeError: CUDA error: an illegal memory access was encountered at 0x7f"
    monkeypatch.setattr(Server, "broken", dict.fromkeys(("chain", "tree16", "tree16.no-graphs"), fault))
    run = runs.Run(context)
    work = arms.plan_of(["smoke"])
    assert run.all(work, [], diagnose=True) == ["chain", "tree16"]
    found = kept(context)
    for arm in set(work) - {"chain", "tree16"}:
        assert json.loads(found[f"{arm}.greedy.json"]) == {"by": arm}
    # Both ended for one reason, so one of them is started again, in every simpler way.
    assert "tree16.diagnosis.json" not in found
    ways = json.loads(found["chain.diagnosis.json"])
    assert ways["no-graphs"] == ways["torch-builder"] == "serves"


def test_arms_are_asked_side_by_side_once_the_first_is_ready(context, monkeypatch):
    work = arms.plan_of(["paths"])
    together = threading.Barrier(len(work))

    def greedy(context, server):
        together.wait(timeout=60)
        return {"by": server.name}

    monkeypatch.setitem(workloads.WORKLOADS, "greedy", greedy)
    assert runs.Run(context).all(work, [], diagnose=False) == []
    assert {f"{arm}.greedy.json" for arm in work} <= set(kept(context))


@pytest.mark.parametrize(("parallel", "waits"), [(2, True), (3, False)])
def test_only_where_not_all_may_be_up_at_once_others_wait_for_the_first(
    context, monkeypatch, parallel, waits
):
    began = []
    first_is_ready = threading.Event()
    others = threading.Event()

    class Slow(Server):
        def wait(self, limit):
            began.append(self.name)
            if len(began) == 3:
                others.set()
            if self.name == "ar" and not waits:
                assert others.wait(timeout=60)
            if self.name == "ar":
                first_is_ready.set()
            else:
                assert not waits or first_is_ready.is_set()
            return super().wait(limit)

    monkeypatch.setattr(runs, "Server", Slow)
    context.options.parallel = parallel
    work = {"ar": ["greedy"], "tree16": ["greedy"], "tree32": ["greedy"]}
    assert runs.Run(context).all(work, [], diagnose=False) == []
    assert began[0] == "ar" or not waits


def test_others_are_served_and_the_breakdown_starts_while_one_is_under_load(context, monkeypatch):
    events = []
    started = threading.Event()

    def load(context, server):
        assert started.wait(timeout=60)
        events.append("load ends")
        return {}

    def start(context):
        events.append("server starts")
        started.set()
        return Server(context, step_parts.NAME, step_parts.ARM, 1, [])

    def measure(context, server):
        assert not server.stopped
        events.append("measured")

    monkeypatch.setitem(workloads.WORKLOADS, "load", load)
    monkeypatch.setattr(step_parts, "start", start)
    monkeypatch.setattr(step_parts, "measure", measure)
    context.options.parallel = 1
    work = {"tree16": ["greedy"], "tree32-cached": ["load"], "ar": ["greedy"], "tree32": ["greedy"]}
    run = runs.Run(context)
    assert run.all(work, ["profile"], diagnose=False) == []
    assert events == ["server starts", "load ends", "measured"]
    assert {f"{arm}.greedy.json" for arm in ("tree16", "ar", "tree32")} <= set(kept(context))
    assert run.references["ar"].stopped


def test_only_referees_outlast_their_workloads(context, monkeypatch):
    seen = {}

    def ask(context, referees):
        seen.update(referees)
        assert not any(server.stopped for server in referees.values())
        return {}

    monkeypatch.setattr(runs, "ask_about_ties", ask)
    runs.Run(context).all(
        {arm: ["greedy"] for arm in ("ar", "ar-fp8", "ar-vision", "tree32")}, [], diagnose=False
    )
    assert set(seen) == {"ar", "ar-fp8"}
    assert all(server.stopped for server in seen.values())


def test_a_difference_is_put_to_plain_decoding_of_the_same_numbers(context, monkeypatch):
    rows = {
        "ar": [[1, 2]],
        "tree32": [[1, 3]],
        "ar-fp8": [[1, 4]],
        "tree32-fp8": [[1, 5]],
        "tree32-kv8": [[1, 6]],
    }
    context.prompts = [[9]]
    for arm, outputs in rows.items():
        context.results[arm] = {"greedy": [{"output_ids": ids} for ids in outputs]}
    context.results["ar-kv8"] = {"greedy": [{"output_ids": [1, 7]}]}
    monkeypatch.setattr(judgement, "best_tokens", lambda server, ids, count: [[-0.5, server, None]])
    found = judgement.ask_about_ties(context, {"ar": "plain", "ar-fp8": "fp8"})
    asked = {question["where"]: question["best"][0][1] for question in found["questions"]}
    assert asked == {"tree32 against ar": "plain", "tree32-fp8 against ar-fp8": "fp8"}
    assert context.left_over == ["ties of tree32-kv8 against ar-kv8"]


def test_answers_of_an_earlier_run_are_put_to_the_referee_and_new_ones_win(context, monkeypatch, tmp_path):
    before = host.Context(context.options, site=tmp_path / "site", raw=tmp_path / "before")
    before.raw.mkdir()
    before.keep("host", "prompts", [[9]])
    before.keep("tree16", "greedy", [{"output_ids": [1]}])
    before.keep("tree64", "greedy", [{"output_ids": [2]}])
    before.keep("tree64", "info", {"of": "no use"})
    before.options = argparse.Namespace(**{**vars(context.options), "out": tmp_path})
    before.save()
    context.prompts, context.options.earlier = [[9]], before.archive
    seen = {}
    monkeypatch.setattr(runs, "ask_about_ties", lambda context, referees: seen.update(context.results) or {})
    assert runs.Run(context).all({"ar": ["greedy"], "tree16": ["greedy"]}, [], diagnose=False) == []
    assert seen["tree16"] == {"greedy": {"by": "tree16"}}
    assert seen["tree64"] == {"greedy": [{"output_ids": [2]}]}
    context.prompts = [[8]]
    assert runs.Run(context).all({"ar": ["greedy"]}, [], diagnose=False) == ["ties"]


TRACE = [
    {"cat": "kernel", "name": "b" * 300, "ts": 10.5, "dur": 2.0},
    {"cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 50.0},
    {"cat": "kernel", "name": "a", "ts": 10.0, "dur": 0.25},
    {"cat": "gpu_memcpy", "name": "Memcpy", "ts": 13.0, "dur": 1.5},
    {"name": "a", "ph": "i", "ts": 14.0},
]


def test_a_trace_keeps_what_was_on_the_card_in_nanoseconds():
    found = profiles.compact(TRACE)
    assert found == {
        "names": ["a", "b" * 160, "Memcpy"],
        "events": [[0, 0, 250], [1, 500, 2000], [2, 3000, 1500]],
    }
    with pytest.raises(ValueError, match="without kernels"):
        profiles.compact(TRACE[1:2])


def test_requests_that_end_before_the_profiler_begins_are_asked_again(tmp_path):
    class Late:
        asked = 0
        profiled = None

        def post(self, path, body):
            self.profiled = body

        def generate(self, ids, tokens, sampling):
            assert tokens == 30
            self.asked += 1
            if self.asked == 2:
                (tmp_path / "x").mkdir()
                (tmp_path / "x" / "TP-0.trace.json.gz").write_bytes(
                    gzip.compress(json.dumps({"traceEvents": TRACE}).encode())
                )

    server = Late()
    found = profiles.take(server, tmp_path, [[1]], {}, tokens=30)
    assert found == profiles.compact(TRACE)
    assert server.asked == 2
    assert server.profiled["output_dir"] == str(tmp_path)


def test_what_fails_in_a_simpler_way_too_says_why(context, monkeypatch):
    monkeypatch.setattr(Server, "broken", {"tree16": "ValueError: a", "tree16.no-graphs": "KeyError: b"})
    runs.Run(context).all(arms.plan_of(["paths"]), [], diagnose=True)
    ways = json.loads(kept(context)["tree16.diagnosis.json"])
    assert ways["no-graphs"].startswith("KeyError: b")
    assert ways["no-overlap"] == "serves"


def test_states_by_our_kernels_are_tried_as_snapshots_too():
    ways = diagnosis.simpler(arms.tree(32, state="wy"))
    assert ways["snapshots"].config["state"] == "snapshot"
    assert "snapshots" not in diagnosis.simpler(arms.tree(32))
    assert "torch-builder" not in diagnosis.simpler(arms.ARMS["ar"])


def test_a_plan_that_is_killed_has_kept_the_arms_that_were_done(context, monkeypatch):
    def killed(context, server):
        raise KeyboardInterrupt

    monkeypatch.setitem(workloads.WORKLOADS, "padded", killed)
    with pytest.raises(KeyboardInterrupt):
        runs.Run(context).all(arms.plan_of(["smoke"]), [], diagnose=True)
    assert {"ar.greedy.json", "dflash.greedy.json", "chain.info.json"} <= set(kept(context))


def test_a_workload_that_raises_is_named_and_the_next_one_runs(context, monkeypatch):
    monkeypatch.setitem(workloads.WORKLOADS, "greedy", lambda context, server: {}[server.name])
    run = runs.Run(context)
    assert run.all({"tree16": ["greedy", "info"]}, [], diagnose=True) == ["tree16.greedy"]
    assert "tree16.info.json" in kept(context)
    assert not run.broken  # it still serves: there is nothing to diagnose


def test_long_logs_are_kept_by_their_start_and_end(context):
    text = "start\n" + "x" * (host.LOG_START + host.LOG_END) + "\nend"
    (context.raw / "tree16.log").write_text(text)
    context.save()
    log = kept(context)["tree16.log"]
    assert log.startswith(b"start\n")
    assert log.endswith(b"\nend")
    assert len(log) < len(text)


LOG = """\
[12:00] Scheduler hit an exception: Traceback (most recent call last):
  File "worker.py", line 3, in forward
torch.AcceleratorError: CUDA error: an illegal memory access was encountered at 0x7f12
[12:01] Received sigquit from a child process.
"""


def test_of_a_log_the_error_is_told_and_not_the_noise():
    told = servers.why("noise\n" * 5000 + LOG)
    assert told.startswith("torch.AcceleratorError: CUDA error")
    assert len(told) < 2000
    assert servers.cause(LOG) == servers.cause(LOG.replace("0x7f12", "0x99"))
    assert servers.cause("fine") == "no error in the log"


def test_every_arm_with_replayed_states_has_one_with_stored_states_beside_it():
    asked = arms.STAGES["wy"]
    pairs = [name for name in asked if name.endswith("-wy")]
    assert pairs
    for name in pairs:
        mine, stored = arms.ARMS[name], arms.ARMS[name.removesuffix("-wy")]
        assert name.removesuffix("-wy") in asked
        assert mine.config == stored.config | {"state": "wy"}
        assert (mine.width, mine.flags) == (stored.width, stored.flags)
    for name, arm in arms.ARMS.items():
        if arm.config and arm.config["mode"] == "tree" and name.endswith("-wy"):
            assert arm.config["state"] == "wy", name


def test_replayed_states_are_compared_with_stored_ones_figure_by_figure():
    def runs_of(output, seconds, kept):
        meta = {"spec_verify_ct": 2}
        row = {"output_ids": output, "seconds": seconds, "meta": meta}
        return {"greedy": [row, row], "info": {"ddtree": {"state_scratch_bytes": kept}}}

    found = judgement.against_snapshots(runs_of([1, 2, 3], 0.5, 7), runs_of([1, 2, 4, 5], 1.0, 900))
    assert found == {
        "identical": "0/2",
        "accept_length": [1.5, 2.0],
        "seconds_a_step": [0.25, 0.5],
        "state_scratch_bytes": [7, 900],
    }
    assert judgement.against_snapshots({}, {}) == {"state_scratch_bytes": [None, None]}
