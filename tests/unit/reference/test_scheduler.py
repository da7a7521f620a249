"""The worker: turns, a bounded queue, cuts at stops, cancelling, failures, draining."""

from __future__ import annotations

import threading
import time

import pytest
from ddtree_engine.reference.errors import DrainingError, QueueFullError
from ddtree_engine.reference.metrics import Metrics
from ddtree_engine.reference.scheduler import Scheduler

from .conftest import generate, make_request, random_prompt


class Client:
    """Collects what a request's client is told."""

    def __init__(self):
        self.updates = []
        self.ended = threading.Event()

    def __call__(self, update):
        self.updates.append(update)
        if update.finish is not None or update.error is not None:
            self.ended.set()

    def last(self):
        assert self.ended.wait(60)
        return self.updates[-1]


class GatedEngine:
    """The real engine behind a gate, so that a test decides when a step may run."""

    def __init__(self, engine):
        self.engine, self.gate, self.order = engine, threading.Event(), []
        self.gate.set()
        self.fail_on = None

    def start(self, request):
        return self.engine.start(request)

    def advance(self, running):
        assert self.gate.wait(60)
        self.order.append(running.request.prompt_ids)
        if running.request.prompt_ids == self.fail_on and not running.in_prefill:
            raise RuntimeError("broken on purpose")
        return self.engine.advance(running)


@pytest.fixture
def engine(engines):
    return GatedEngine(engines("ddtree"))


@pytest.fixture
def scheduler(engine, codec):
    made = Scheduler(engine, codec, Metrics(engine.engine.arm, "tiny"), max_running=2, max_queue=2)
    made.start()
    yield made
    engine.gate.set()
    made.stop()


def submit(scheduler, prompt, tokens=20, **more):
    client = Client()
    return scheduler.submit(make_request(prompt, tokens, budget=31, **more), client), client


def value(scheduler, name, **labels):
    labels = {"arm": "ddtree", "model_name": "tiny", **labels}
    return scheduler.observer.registry.get_sample_value(name, labels)


def test_concurrent_requests_get_what_each_gets_alone(scheduler, engines):
    prompts = [random_prompt(20 + n, seed=n) for n in range(4)]
    clients = [submit(scheduler, prompt)[1] for prompt in prompts]
    for prompt, client in zip(prompts, clients, strict=True):
        assert list(client.last().output_ids) == generate(engines("ar"), prompt, 20)[0]
        assert client.last().finish == {"type": "length", "length": 20}


def test_running_requests_take_turns(scheduler, engine):
    engine.gate.clear()
    first, second = random_prompt(10, seed=1), random_prompt(10, seed=2)
    clients = [submit(scheduler, prompt)[1] for prompt in (first, second)]
    engine.gate.set()
    for client in clients:
        client.last()
    turns = [index for index, prompt in enumerate(engine.order) if prompt == tuple(second)]
    assert engine.order.index(tuple(second)) <= 2
    assert turns[0] < engine.order.index(tuple(first), 2)


def test_past_the_queue_requests_are_refused_and_later_ones_are_not(scheduler, engine):
    engine.gate.clear()
    clients = [submit(scheduler, random_prompt(8, seed=n))[1] for n in range(4)]
    with pytest.raises(QueueFullError):
        submit(scheduler, random_prompt(8))
    engine.gate.set()
    for client in clients:
        assert client.last().finish["type"] == "length"
    assert submit(scheduler, random_prompt(8))[1].last().finish["type"] == "length"


def test_a_cancelled_request_ends_and_frees_its_place(scheduler, engine):
    ticket, client = submit(scheduler, random_prompt(8), 400)
    while not client.updates and ticket.first_token is None:
        time.sleep(0.005)
    ticket.cancel()
    update = client.last()
    assert update.finish == {"type": "abort", "message": "Aborted"}
    assert 0 < len(update.output_ids) < 400
    assert submit(scheduler, random_prompt(8))[1].last().finish["type"] == "length"
    assert value(scheduler, "ddtree_requests_total", reason="abort") == 1


def test_a_waiting_request_can_be_aborted_by_id(scheduler, engine):
    engine.gate.clear()
    running = [submit(scheduler, random_prompt(8, seed=n))[1] for n in range(2)]
    time.sleep(0.05)
    _, waiting = submit(scheduler, random_prompt(9))
    waiting_ticket = scheduler._waiting[-1]
    object.__setattr__(waiting_ticket.request, "rid", "mine")
    assert scheduler.abort("mine") == 1
    assert scheduler.abort("other") == 0
    engine.gate.set()
    assert waiting.last().finish["type"] == "abort"
    assert waiting.last().output_ids == ()
    assert all(client.last().finish["type"] == "length" for client in running)


def test_a_failing_step_ends_its_own_request_only(scheduler, engine, caplog):
    bad, good = random_prompt(8, seed=1), random_prompt(8, seed=2)
    engine.fail_on = tuple(bad)
    clients = [submit(scheduler, prompt)[1] for prompt in (bad, good)]
    assert clients[0].last().error == "RuntimeError: broken on purpose"
    assert clients[1].last().finish["type"] == "length"
    assert "Traceback" in caplog.text
    assert scheduler.alive
    assert value(scheduler, "ddtree_requests_total", reason="error") == 1


def test_figures_that_fail_do_not_take_the_worker_along(scheduler, caplog):
    def broken(*_):
        raise RuntimeError("no figures")

    scheduler.observer.finished = broken
    assert submit(scheduler, random_prompt(8))[1].last().finish["type"] == "length"
    assert submit(scheduler, random_prompt(8))[1].last().finish["type"] == "length"
    assert "no figures" in caplog.text


def test_a_stop_id_inside_a_commit_cuts_exactly(scheduler, engines, codec):
    """Whatever step it falls into: the output ends with the stop token, the text without it."""
    prompt = random_prompt(30, seed=30)
    plain, _ = generate(engines("ar"), prompt, 40)
    for length in range(1, 25):
        if plain[length - 1] in plain[: length - 1]:
            continue
        _, client = submit(scheduler, prompt, 40, stop_ids=frozenset({plain[length - 1]}))
        update = client.last()
        assert list(update.output_ids) == plain[:length]
        assert update.finish == {"type": "stop", "matched": plain[length - 1]}
        assert update.text == codec.decode(plain[: length - 1])


def test_max_tokens_cuts_inside_a_commit(scheduler, engines):
    prompt = random_prompt(30, seed=30)
    plain, _ = generate(engines("ar"), prompt, 40)
    for length in (0, 1, 2, 3, 4, 5, 9, 17):
        update = submit(scheduler, prompt, length)[1].last()
        assert list(update.output_ids) == plain[:length]
        assert update.finish == {"type": "length", "length": length}


def test_stop_strings_cut_wherever_they_fall(scheduler, engines, codec):
    prompt = random_prompt(30, seed=30)
    plain, _ = generate(engines("ar"), prompt, 60)
    text = codec.decode(plain)
    cuts = 0
    for start in range(1, 25):
        stop = text[start : start + 3]
        if "\ufffd" in stop or len(stop) < 3:
            continue
        update = submit(scheduler, prompt, 60, stop=(stop,))[1].last()
        assert update.text == text[: text.index(stop)]
        assert update.finish == {"type": "stop", "matched": stop}
        assert list(update.output_ids) == plain[: len(update.output_ids)]
        assert stop in codec.decode(update.output_ids)
        assert stop not in codec.decode(update.output_ids[:-1])
        cuts += 1
    assert cuts > 5


def test_a_stream_adds_up_to_the_whole(scheduler):
    _, client = submit(scheduler, random_prompt(30, seed=30), 40, stream=True)
    final = client.last()
    assert len(client.updates) > 3
    for before, after in zip(client.updates, client.updates[1:], strict=False):
        assert after.text.startswith(before.text)
        assert after.output_ids[: len(before.output_ids)] == before.output_ids
        assert len(after.output_ids) > len(before.output_ids)
    assert len(final.output_ids) == 40


def test_draining_lets_requests_end_and_takes_no_more(scheduler):
    _, client = submit(scheduler, random_prompt(8), 30)
    assert scheduler.drain(30)
    assert client.last().finish["type"] == "length"
    assert not scheduler.alive
    with pytest.raises(DrainingError):
        submit(scheduler, random_prompt(8))


def test_draining_cancels_what_takes_too_long(scheduler, engine):
    engine.gate.clear()
    _, client = submit(scheduler, random_prompt(8), 400)
    assert not scheduler.drain(0.05)
    engine.gate.set()
    assert client.last().finish["type"] == "abort"


def test_metrics_add_up(scheduler):
    update = submit(scheduler, random_prompt(30, seed=30), 40)[1].last()
    stats = update.running.stats
    assert value(scheduler, "sglang:generation_tokens_total") == 40
    assert value(scheduler, "sglang:prompt_tokens_total") == 30
    assert value(scheduler, "ddtree_tree_steps_total") == stats.verify_steps > 0
    assert value(scheduler, "ddtree_tree_nodes_total") == 32 * stats.verify_steps
    assert value(scheduler, "ddtree_accepted_drafts_total") == stats.accepted > 0
    assert value(scheduler, "ddtree_accept_length_sum") == stats.accepted + stats.verify_steps
    assert value(scheduler, "sglang:spec_accept_length") == 40 / stats.verify_steps
    for stage, seconds in stats.stage_seconds.items():
        assert value(scheduler, "ddtree_stage_seconds_total", stage=stage) == pytest.approx(seconds)
        assert seconds > 0
