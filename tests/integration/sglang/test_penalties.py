"""Penalised requests through a real worker's prefills and steps, against decoding token by token.

Requests, batches, sampling parameters, penalties, merging, filtering, retraction and the copy for a forward
pass are SGLang's own. Stood in for: the two models and the scheduler's order of events, in which the host
hears of a step's tokens one step late.
"""

from __future__ import annotations

from array import array
from collections import deque
from types import SimpleNamespace

import harness
import numpy as np
import pytest
import torch
from ddtree_engine.sglang_plugin import hooks
from harness import BLOCK, VOCABULARY

WIDTH, SLOTS = 16, 3
STOP = 9
FAVOURITES = [20, 21, STOP]
BIAS = {"20": -1.0, "30": 2.0}

MIXED = {
    "presence": {"presence_penalty": 1.5},
    "nothing": {},
    "all": {
        "frequency_penalty": 0.4,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.25,
        "min_new_tokens": 20,
    },
}


def target(text):
    """The target's logits after a text; a few tokens are likely, so that texts repeat themselves."""
    generator = torch.Generator().manual_seed(hash(tuple(text)) % 2**31)
    logits = torch.randn(VOCABULARY, generator=generator)
    logits[FAVOURITES] += 2.0
    return logits


def adjusted(logits, output, sampling):
    """What the parameters mean for float32[V] after these output tokens."""
    logits = logits.clone()
    for token in set(output):
        value = logits[token] - torch.tensor(sampling.frequency_penalty) * output.count(token)
        value = value - torch.tensor(sampling.presence_penalty)
        scale = torch.tensor(sampling.repetition_penalty)
        logits[token] = value * scale if value < 0 else value / scale
    if len(output) < sampling.min_new_tokens:
        logits[STOP] = -torch.inf
    for token, bias in (sampling.logit_bias or {}).items():
        logits[int(token)] += bias
    return logits


def plain_decoding(request, tokens, grammar=False):
    prompt, output = list(request.origin_input_ids), []
    for _ in range(tokens):
        logits = adjusted(target(prompt + output), output, request.sampling_params)
        if grammar:
            GrammarMask([(prompt + output)[-1]]).apply(logits[None])
        output.append(int(logits.argmax()))
    return output


class GrammarMask:
    """A grammar of its own at every node: what may not follow depends on the node's token."""

    def __init__(self, tokens):
        self.tokens = torch.as_tensor(tokens).flatten()

    def apply(self, logits):
        forbidden = torch.arange(VOCABULARY) % 3 == self.tokens[:, None] % 3
        logits.masked_fill_(forbidden, -torch.inf)


class Target:
    """Remembers the text of every request slot, as the KV cache does."""

    def __init__(self, runner):
        self.model_runner = runner
        self.texts = {}
        self.grammar = False

    def forward_batch_generation(self, batch, forward_batch=None, is_verify=False, **_):
        return self._verify(forward_batch) if is_verify else self._prefill(batch)

    def _prefill(self, batch):
        texts = [[*one.origin_input_ids, *one.output_ids] for one in batch.reqs]
        self.texts |= dict(zip(batch.req_pool_indices.tolist(), texts, strict=True))
        logits = torch.stack([target(text) for text in texts])
        batch.sampling_info.apply_logits_bias(logits)
        if self.grammar:
            GrammarMask([text[-1] for text in texts]).apply(logits)
        output = SimpleNamespace(hidden_states=torch.zeros(sum(map(len, texts)), 2))
        return SimpleNamespace(
            logits_output=output,
            next_token_ids=logits.argmax(-1),
            accept_lens=None,
            kv_loc_plan=SimpleNamespace(),
        )

    def _verify(self, forward_batch):
        tokens = forward_batch.input_ids.view(-1, WIDTH)
        parents = harness.parents_from_mask(forward_batch, WIDTH)
        rows = []
        for row, slot in enumerate(forward_batch.req_pool_indices.tolist()):
            for node in range(WIDTH):
                path, at = [], node
                while at >= 0:
                    path.append(int(tokens[row, at]))
                    at = parents[row][at]
                rows.append(target(self.texts[slot] + path[::-1]))
        hidden = torch.zeros(tokens.numel(), 2)
        output = SimpleNamespace(next_token_logits=torch.stack(rows), hidden_states=hidden)
        return SimpleNamespace(
            logits_output=output,
            can_run_cuda_graph=False,
            routed_experts_output=None,
            indexer_topk_output=None,
        )


class Serving:
    """A worker and as much of a scheduler as decides what it is asked."""

    def __init__(self, monkeypatch, lag):
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        self.lag, self.rng = lag, np.random.default_rng(0)
        runner, recorded = harness.make_runner(monkeypatch, SLOTS, columns=192)
        self.worker = harness.make_worker(runner, recorded, np.zeros((SLOTS, BLOCK - 1, VOCABULARY)), WIDTH)
        self.target = self.worker._target_worker = Target(runner)
        self.worker.draft_model_runner.forward = self.draft
        self.worker.selector = self.worker.lilicorr = None
        self.worker._warned_sampling_fallback, self.worker.watch = True, SimpleNamespace()
        self.worker._wait_for_fused_hicache_load = lambda batch: None
        self.worker._tp_sync = SimpleNamespace(sync=lambda *_: None)
        write_ids = self.worker._draft_write_ids
        self.worker._draft_write_ids = lambda plan: write_ids(plan) if hasattr(plan, "write_ids") else None
        runner.prefill_attention_backend_str = "torch_native"
        self.runner = runner
        self.slots = ReqToTokenPool(SLOTS, 192, "cpu", enable_memory_saver=False)
        self.running, self.results, self.accepted = None, deque(), []

    def draft(self, forward_batch):
        """Often the token that is right, often the one that would be without penalties, sometimes neither."""
        by_slot = {one.kv.req_pool_idx: one for one in self.running.reqs}
        roots = forward_batch.input_ids.view(-1, BLOCK)[:, 0].tolist()
        hidden = torch.zeros(len(roots), BLOCK, VOCABULARY)
        for row, (slot, root) in enumerate(zip(forward_batch.req_pool_indices.tolist(), roots, strict=True)):
            request, text = by_slot[slot], [*self.target.texts[slot], root]
            prompt = len(request.origin_input_ids)
            for place in range(1, BLOCK):
                logits = target(text)
                truth = int(adjusted(logits, text[prompt:], request.sampling_params).argmax())
                scores = torch.from_numpy(self.rng.normal(0, 1, VOCABULARY))
                scores[logits.argmax()] += 3.5
                scores[truth] += self.rng.choice([6.0, 3.5, 0.0], p=[0.6, 0.3, 0.1])
                hidden[row, place] = scores
                text.append(truth)
        output = SimpleNamespace(hidden_states=hidden.view(-1, VOCABULARY))
        return SimpleNamespace(logits_output=output, can_run_graph=False)

    def forward(self, batch):
        from sglang.srt.managers.scheduler import Scheduler

        with Scheduler._forward_isolation(None, batch, overlap=False), harness.configured(WIDTH):
            result = self.worker.forward_batch_generation(batch)
        batch.spec_info, batch.seq_lens = result.next_draft_input, result.new_seq_lens
        self.results.append((list(batch.reqs), result))
        return result

    def join(self, request):
        """A prefill of its own, then into the running batch."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        (slot,) = self.slots.alloc([request])
        request.is_retracted = False
        length = len(request.origin_input_ids) + len(request.output_ids)
        model_config = SimpleNamespace(is_encoder_decoder=False, **vars(self.runner.model_config))
        batch = ScheduleBatch(
            reqs=[request],
            model_config=model_config,
            device="cpu",
            forward_mode=ForwardMode.EXTEND,
            spec_algorithm=SpeculativeAlgorithm.from_string("DDTREE"),
            req_pool_indices=torch.tensor([slot]),
            req_pool_indices_cpu=torch.tensor([slot]),
            seq_lens=torch.tensor([length]),
            orig_seq_lens=torch.tensor([length]),
            out_cache_loc=torch.arange(length),
            prefix_lens=[0],
            extend_lens=[length],
        )
        batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, VOCABULARY)
        self.forward(batch)
        batch.forward_mode = ForwardMode.DECODE
        batch.seq_lens_cpu = batch.seq_lens_sum = None
        if self.running is None:
            self.running = batch
        else:
            self.running.merge_batch(batch)

    def step(self):
        running = self.running
        running.spec_info.nxt_kv_lens_cpu = (running.seq_lens + 2 * WIDTH).int()
        roots = running.spec_info.bonus_tokens.tolist()
        result = self.forward(running)
        emitted = result.next_token_ids.view(-1, WIDTH).tolist()
        for row, slot in enumerate(running.req_pool_indices.tolist()):
            length = int(result.accept_lens[row])
            self.target.texts[slot] += [roots[row], *emitted[row][: length - 1]]
            self.accepted.append(length)
        self.hear(self.lag)

    def hear(self, unheard=0):
        """The host processes results, but for the last few."""
        while len(self.results) > unheard:
            requests, result = self.results.popleft()
            tokens = result.next_token_ids.view(len(requests), -1).tolist()
            lengths = [1] * len(requests) if result.accept_lens is None else result.accept_lens.tolist()
            for request, emitted, length in zip(requests, tokens, lengths, strict=True):
                if not request.is_retracted:
                    request.output_ids.extend(emitted[:length])

    def leave(self, request):
        self.slots.free(request)
        self.running.filter_batch(reqs_to_exclude=request)

    def retract(self, request):
        self.leave(request)
        request.reset_for_retract()


@pytest.fixture
def serve(published, monkeypatch):
    """Make a `Serving`; results are processed one step late unless asked otherwise."""
    harness.patch_sglang(monkeypatch)

    def make(lag=1):
        return Serving(monkeypatch, lag)

    # SGLang's own penalties are compiled; here they run as they are written.
    with torch.compiler.set_stance("force_eager"):
        yield make


@pytest.fixture
def ask(published):
    """Make a real `Req`."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    def make(rid, prompt=5, temperature=0.0, **sampling):
        parameters = SamplingParams(max_new_tokens=100, temperature=temperature, **sampling)
        tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=STOP)
        parameters.normalize(tokenizer)
        ids = array("q", np.random.default_rng(prompt).integers(0, VOCABULARY, prompt).tolist())
        request = Req(rid, "", ids, parameters, eos_token_ids={STOP}, vocab_size=VOCABULARY)
        request.tokenizer = tokenizer
        return request

    return make


def check(*requests, least, grammar=False):
    for request in requests:
        output = list(request.output_ids)
        assert len(output) >= least, request.rid
        assert output == plain_decoding(request, len(output), grammar), request.rid


@pytest.mark.parametrize("lag", [0, 1])
def test_a_mixed_batch_gives_what_decoding_token_by_token_gives(lag, serve, ask):
    serving = serve(lag)
    requests = [ask(name, prompt=5 + n, **MIXED[name]) for n, name in enumerate(MIXED)]
    for request in requests:
        serving.join(request)
    for _ in range(9):
        serving.step()
    serving.hear()
    check(*requests, least=20)
    # A step takes several tokens; penalties change the text; a stop token is held back and comes later.
    assert np.mean(serving.accepted) > 2.5
    presence, plain, every = (list(request.output_ids) for request in requests)
    bare = [plain_decoding(ask("bare", prompt=5 + n), 20) for n in (0, 2)]
    assert bare[0] != presence[:20]
    assert bare[1] != every[:20]
    assert STOP in plain[:20]
    assert STOP not in every[:20]
    assert STOP in bare[1]


def test_sampling_at_a_temperature_near_zero_sees_the_same_penalties(serve, ask):
    serving = serve()
    torch.manual_seed(0)
    requests = [ask(name, prompt=5 + n, temperature=1e-5, **MIXED[name]) for n, name in enumerate(MIXED)]
    for request in requests:
        serving.join(request)
    for _ in range(6):
        serving.step()
    serving.hear()
    check(*requests, least=12)


def test_a_bias_comes_on_top(serve, ask):
    serving = serve()
    both = ask("both", logit_bias=BIAS, presence_penalty=0.8, repetition_penalty=1.2)
    other = ask("other", prompt=9)
    serving.join(both)
    serving.join(other)
    for _ in range(6):
        serving.step()
    serving.hear()
    check(both, other, least=12)


@pytest.mark.parametrize("temperature", [0.0, 1e-5])
def test_a_grammar_comes_on_top_at_every_node(temperature, serve, ask, monkeypatch):
    from sglang.srt.speculative import eagle_worker_common

    trees = SimpleNamespace(from_device=lambda first, sibling, tokens: tokens)
    monkeypatch.setattr(eagle_worker_common, "GrammarTree", trees)
    monkeypatch.setattr(eagle_worker_common, "build_grammar_vocab_mask", lambda tree, **_: GrammarMask(tree))
    serving = serve()
    serving.target.grammar = True
    request = ask("grammar", temperature=temperature, presence_penalty=1.0, frequency_penalty=0.5)
    serving.join(request)
    serving.running.has_grammar = True
    for _ in range(8):
        serving.step()
    serving.hear()
    check(request, least=12, grammar=True)


def test_requests_that_come_and_go_share_slots(serve, ask):
    serving = serve()
    waiting = deque(
        ask(f"{turn} {name}", prompt=4 + turn, **MIXED[name]) for turn in range(2) for name in MIXED
    )
    every, running = list(waiting), deque()
    while waiting or len(running) > 1:
        while waiting and len(running) < SLOTS:
            running.append(waiting.popleft())
            serving.join(running[-1])
        for _ in range(2):
            serving.step()
        serving.leave(running.popleft())
    serving.hear()
    check(*every, least=6)


def test_a_retracted_request_goes_on_where_it_was(serve, ask):
    serving = serve()
    request, other = ask("all", **MIXED["all"]), ask("other", prompt=6, frequency_penalty=1.0)
    serving.join(request)
    serving.join(other)
    for _ in range(2):
        serving.step()
    for turn in range(5):
        serving.retract(request)
        known = len(request.output_ids)
        serving.step()
        # The step that was in the works when it was retracted has been thrown away.
        assert len(request.output_ids) == known
        if not turn:
            taker = ask("takes its slot", prompt=7, repetition_penalty=1.4)
            serving.join(taker)
        serving.join(request)
        serving.step()
        serving.step()
    serving.hear()
    check(request, other, taker, least=10)


def test_a_batch_without_penalties_gets_no_table(serve, ask):
    serving = serve()
    serving.join(ask("plain"))
    for _ in range(2):
        serving.step()
    assert serving.worker._output_counts._counts is None


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty: found 0.5, allowed in mode shadow is 0:"),
        ({"presence_penalty": 1.5}, "presence_penalty: found 1.5, allowed in mode shadow is 0:"),
        ({"repetition_penalty": 1.1}, "repetition_penalty: found 1.1, allowed in mode shadow is 1:"),
        ({"min_new_tokens": 3}, "min_new_tokens: found 3, allowed in mode shadow is 0:"),
    ],
)
def test_mode_shadow_refuses_what_dflash_ignores(sampling, said, published, ask, configure):
    request = ask("penalised", **sampling)
    configure(mode="shadow")
    assert hooks.refuse_request(lambda *_: None, request, True).startswith(said)
    assert hooks.refuse_request(lambda *_: None, ask("plain"), True) is None
    configure(mode="tree")
    assert hooks.refuse_request(lambda *_: None, request, True) is None
