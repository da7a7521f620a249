"""Penalties at the nodes of a tree against decoding token by token."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ddtree_engine.sglang_plugin.penalties import Asked, Penalties, asked, path_tokens, stop_tokens
from ddtree_engine.sglang_plugin.tree_build import TreeBatch
from ddtree_engine.tree.samples import random_tree

VOCABULARY, WIDTH, DEPTH, SLOTS = 24, 24, 6, 5
STOPS = [3, 17]

CASES = {
    "nothing": {},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.3},
    "negative": {"frequency_penalty": -0.4, "presence_penalty": -0.3, "repetition_penalty": 0.8},
    "all": {
        "frequency_penalty": 0.3,
        "presence_penalty": 0.6,
        "repetition_penalty": 1.2,
        "min_new_tokens": 12,
    },
    "least": {"min_new_tokens": 9},
}


def request(slot, prompt=7, output=(), **sampling):
    parameters = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_token_ids": None,
    }
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**parameters | sampling),
        origin_input_ids=[0] * prompt,
        output_ids=list(output),
        kv=SimpleNamespace(req_pool_idx=slot),
        eos_token_ids={STOPS[0]},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=STOPS[1]),
    )


def penalised(logits, output, want):
    """What plain decoding does to float32[V] after these output tokens, one token at a time."""
    logits = logits.clone()
    for token in range(VOCABULARY):
        times = output.count(token)
        if not times:
            continue
        value = logits[token] - (torch.tensor(want.frequency) * times + torch.tensor(want.presence))
        scale = torch.tensor(want.repetition)
        logits[token] = value * scale if value < 0 else value / scale
    if len(output) < want.least:
        logits[STOPS] = -torch.inf
    return logits


def target(text):
    """The target's logits after a text: few tokens are likely, so that texts repeat themselves."""
    generator = torch.Generator().manual_seed(hash(tuple(text)) % 2**31)
    logits = torch.randn(VOCABULARY, generator=generator)
    logits[[5, 6, 7, *STOPS]] += 1.5
    return logits


def greedy(wanted, output, tokens):
    """Plain decoding: `output` and so many tokens more."""
    output = list(output)
    for _ in range(tokens):
        output.append(int(penalised(target(output), output, wanted).argmax()))
    return output


def trees(rng, roots, truths):
    """Random trees in which the true continuation of a request is a path, up to a random depth."""
    grown = [random_tree(rng, WIDTH, DEPTH) for _ in roots]
    tokens = rng.integers(0, VOCABULARY, (len(roots), WIDTH))
    for row, (root, truth) in enumerate(zip(roots, truths, strict=True)):
        tokens[row, 0] = root
        parents = grown[row][0]
        at = 0
        for token in truth[: rng.integers(0, DEPTH)]:
            children = [node for node in range(WIDTH) if parents[node] == at]
            if not children:
                break
            at = children[-1]
            # A walk takes the first child that has the token.
            for child in children:
                tokens[row, child] = (token + 1) % VOCABULARY
            tokens[row, at] = token
    parents, depths = (torch.from_numpy(np.stack(part)).long() for part in zip(*grown, strict=True))
    tokens = torch.from_numpy(tokens)
    return TreeBatch(tokens, parents, depths, torch.zeros_like(tokens), torch.zeros(tokens.shape))


def path(tree, row, node):
    """Tokens from the root to a node."""
    found = []
    while node >= 0:
        found.append(int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return found[::-1]


def node_logits(tree, committed):
    return torch.stack(
        [
            target(committed[row] + path(tree, row, node))
            for row in range(len(committed))
            for node in range(WIDTH)
        ]
    )


def batch_of(requests, committed):
    lens = [len(one.origin_input_ids) + len(text) for one, text in zip(requests, committed, strict=True)]
    info = SimpleNamespace(acc_additive_penalties=None, acc_scaling_penalties=None)
    return SimpleNamespace(
        reqs=requests,
        seq_lens=torch.tensor(lens),
        req_pool_indices=torch.tensor([one.kv.req_pool_idx for one in requests]),
        sampling_info=info,
    )


def walk(tree, row, choices):
    """(accept_index of a row, bonus token)."""
    at, found = 0, [0]
    while True:
        matching = [
            node
            for node in range(WIDTH)
            if tree.parents[row, node] == at and tree.tokens[row, node] == choices[at]
        ]
        if not matching:
            return found, int(choices[at])
        at = matching[0]
        found.append(at)


class Serving:
    """Steps of a batch as a worker takes them; what the host knows of the output may lag."""

    def __init__(self, seed=0, lag=0):
        self.rng, self.lag = np.random.default_rng(seed), lag
        self.penalties = Penalties(SLOTS, VOCABULARY, "cpu")
        self.running, self.committed, self.roots = [], [], []
        self.accepted = []

    def join(self, request):
        """Prefill: the output that a retracted request brings is committed, the first token is sampled."""
        info = SimpleNamespace(
            acc_additive_penalties=torch.zeros(1, VOCABULARY),
            acc_scaling_penalties=torch.ones(1, VOCABULARY),
        )
        if not request.output_ids and asked(request).least:
            info.acc_additive_penalties[0, STOPS] = -torch.inf  # SGLang's own, right for a new request
        self.penalties.prefill(SimpleNamespace(reqs=[request], sampling_info=info))
        logits = target(request.output_ids) + info.acc_additive_penalties[0]
        scale = info.acc_scaling_penalties[0]
        root = int(torch.where(logits < 0, logits * scale, logits / scale).argmax())
        self.running.append(request)
        self.committed.append(list(request.output_ids))
        self.roots.append(root)

    def leave(self, request):
        """The whole output, the last bonus token included."""
        at = self.running.index(request)
        del self.running[at]
        return [*self.committed.pop(at), self.roots.pop(at)]

    def step(self):
        truths = [
            greedy(asked(one), [*text, root], DEPTH)[len(text) + 1 :]
            for one, text, root in zip(self.running, self.committed, self.roots, strict=True)
        ]
        tree = trees(self.rng, self.roots, truths)
        step = self.penalties.step(batch_of(self.running, self.committed), tree, DEPTH)
        logits = node_logits(tree, self.committed)
        if step is not None:
            step.apply(logits)
        choices = logits.view(len(self.running), WIDTH, -1).argmax(-1)
        index = torch.full((len(self.running), DEPTH), -1, dtype=torch.int32)
        for row, one in enumerate(self.running):
            known = [*self.committed[row], self.roots[row]]
            one.output_ids = known[: len(known) - self.lag]
            nodes, bonus = walk(tree, row, choices[row])
            index[row, : len(nodes)] = torch.tensor(nodes) + row * WIDTH
            self.committed[row] += [int(tree.tokens[row, node]) for node in nodes]
            self.roots[row] = bonus
            self.accepted.append(len(nodes))
        if step is not None:
            step.commit(index)


def test_every_node_gets_the_penalties_of_its_own_path():
    rng = np.random.default_rng(1)
    for _ in range(5):
        committed = [rng.integers(0, VOCABULARY, rng.integers(0, 8)).tolist() for _ in CASES]
        requests = [
            request(slot, output=text, **sampling)
            for slot, (sampling, text) in enumerate(zip(CASES.values(), committed, strict=True))
        ]
        penalties = Penalties(len(CASES), VOCABULARY, "cpu")
        info = SimpleNamespace(
            acc_additive_penalties=torch.zeros(len(CASES), VOCABULARY), acc_scaling_penalties=None
        )
        penalties.prefill(SimpleNamespace(reqs=requests, sampling_info=info))
        tree = trees(rng, rng.integers(0, VOCABULARY, len(CASES)), [[5, 5, 6, 5, 6]] * len(CASES))
        logits = node_logits(tree, committed)
        before = logits.clone()
        penalties.step(batch_of(requests, committed), tree, DEPTH).apply(logits)
        for row, one in enumerate(requests):
            for node in range(WIDTH):
                at = row * WIDTH + node
                text = committed[row] + path(tree, row, node)
                assert logits[at].equal(penalised(before[at], text, asked(one))), (row, node)


@pytest.mark.parametrize("lag", [0, 3])
def test_steps_give_the_text_of_decoding_token_by_token(lag):
    serving = Serving(seed=lag, lag=lag)
    requests = [request(slot, **CASES[name]) for slot, name in enumerate(["all", "nothing", "least"])]
    for one in requests:
        serving.join(one)
    late = request(3, prompt=2, **CASES["repetition"])
    for number in range(12):
        if number == 4:
            serving.join(late)
        serving.step()
    for one in [*requests, late]:
        text = serving.leave(one)
        assert text == greedy(asked(one), [], len(text))
    # A step takes several tokens, or all of this would be said of paths of one.
    assert np.mean(serving.accepted) > 2


def test_a_slots_next_request_starts_from_nothing():
    serving = Serving()
    first = request(2, **CASES["all"])
    serving.join(first)
    for _ in range(5):
        serving.step()
    serving.leave(first)
    second = request(2, **CASES["presence"])
    serving.join(second)
    for _ in range(5):
        serving.step()
    text = serving.leave(second)
    assert text == greedy(asked(second), [], len(text))


@pytest.mark.parametrize("name", ["all", "presence", "least"])
def test_a_retracted_request_goes_on_as_if_nothing_had_happened(name):
    serving = Serving(seed=3)
    one, other = request(1, **CASES[name]), request(0, **CASES["frequency"])
    serving.join(one)
    serving.join(other)
    for _ in range(3):
        serving.step()
    # What the last step gave is thrown away, as under overlap.
    serving.leave(one)
    assert one.output_ids
    one.kv.req_pool_idx = 4
    serving.step()
    serving.join(one)
    for _ in range(4):
        serving.step()
    for request_, least in ((one, 10), (other, 10)):
        text = serving.leave(request_)
        assert len(text) >= least
        assert text == greedy(asked(request_), [], len(text))


@pytest.mark.parametrize(("least", "held_back"), [(5, False), (6, True)])
def test_a_prefill_after_a_retraction_goes_on_counting(least, held_back):
    one = request(
        1, output=[4, 8, 4, 4, 8], presence_penalty=0.5, repetition_penalty=1.5, min_new_tokens=least
    )
    # SGLang's own rows, which hold stop tokens back as for an output of none.
    additive, scaling = torch.zeros(2, VOCABULARY), torch.ones(2, VOCABULARY)
    additive[1, STOPS] = -torch.inf
    info = SimpleNamespace(acc_additive_penalties=additive, acc_scaling_penalties=scaling)
    Penalties(SLOTS, VOCABULARY, "cpu").prefill(SimpleNamespace(reqs=[request(0), one], sampling_info=info))
    expected = penalised(torch.full((VOCABULARY,), 3.0), one.output_ids, asked(one))
    assert ((torch.full((VOCABULARY,), 3.0) + additive[1]) / scaling[1]).equal(expected)
    assert bool((additive[1, STOPS] == -torch.inf).all()) is held_back
    assert not additive[0].any()


def test_a_batch_without_penalties_costs_nothing():
    penalties = Penalties(SLOTS, VOCABULARY, "cpu")
    plain = [request(0), request(1)]
    penalties.prefill(SimpleNamespace(reqs=plain, sampling_info=None))
    assert penalties.step(SimpleNamespace(reqs=plain), None, DEPTH) is None
    assert penalties._counts is None


def test_padding_behind_the_root_counts_once():
    tokens = torch.tensor([[5, 5, 6]])
    parents = torch.tensor([[-1, 0, 1]])
    tree = TreeBatch(tokens, parents, torch.tensor([[0, 1, 2]]), tokens, tokens.float())
    found, counts = path_tokens(tree, 4)
    assert found.tolist() == [[[5, 5, 5, 5], [5, 5, 5, 5], [6, 5, 5, 5]]]
    assert counts.tolist() == [[[1, 1, 1, 1], [2, 2, 2, 2], [1, 2, 2, 2]]]


def test_stop_tokens_are_those_of_request_model_and_tokenizer():
    one = request(0, stop_token_ids={9})
    one.tokenizer.additional_stop_token_ids = {11}
    assert stop_tokens(one) == {3, 9, 11, 17}
    one.tokenizer = one.eos_token_ids = None
    assert stop_tokens(one) == {9}


def test_parameters_that_do_nothing_are_not_named():
    assert Asked().named == {}
    assert Asked(presence=1.5, repetition=1.1).named == {
        "presence_penalty": 1.5,
        "repetition_penalty": 1.1,
    }
