"""The trainer of the test pair: its delta rule, its constant channel, its checkpoints, its resumption."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra `local`")
sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from ddtree_engine.reference.cache import DrafterCache, TargetCache  # noqa: E402
from ddtree_engine.reference.drafter import Drafter as EngineDrafter  # noqa: E402
from ddtree_engine.reference.target import Target as EngineTarget  # noqa: E402
from pair import checkpoint, corpus, data  # noqa: E402
from pair.delta_rule import chunked, recurrent, unit_lower_inverse  # noqa: E402
from pair.drafter_stage import train_drafter  # noqa: E402
from pair.generate import Continuations, greedy, loops, useful_limit  # noqa: E402
from pair.model import Drafter, DrafterShape, Target, TargetShape  # noqa: E402
from pair.run import Curve, Limits  # noqa: E402
from pair.target_stage import train_target  # noqa: E402

TARGET = TargetShape(vocab=64, hidden=32, intermediate=32, head_dim=32, gdn_dim=16)
DRAFTER = DrafterShape(hidden=32, intermediate=32, head_dim=16, window=24)


@pytest.fixture
def streams() -> data.Streams:
    rng = np.random.default_rng(0)
    return data.Streams(rng.integers(4, 64, 4000).astype(np.uint16), [], [])


def random_heads(tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    q, k = (torch.nn.functional.normalize(torch.randn(2, tokens, 2, 16, dtype=dtype), dim=-1) for _ in "qk")
    v = torch.randn(2, tokens, 6, 16, dtype=dtype)
    return [q, k, v, -3 * torch.rand(2, tokens, 6, dtype=dtype), torch.rand(2, tokens, 6, dtype=dtype)]


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 150])
def test_chunked_delta_rule_equals_the_recurrence(tokens: int) -> None:
    torch.manual_seed(0)
    heads = [x.float() for x in random_heads(tokens)]
    out, state = chunked(*heads)
    wanted_out, wanted_state = recurrent(*heads)
    torch.testing.assert_close(out, wanted_out, atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(state, wanted_state, atol=5e-6, rtol=1e-4)


def test_chunked_delta_rule_has_the_recurrences_gradients() -> None:
    torch.manual_seed(0)
    heads = [x.float().requires_grad_() for x in random_heads(70)]
    weight = torch.randn(2, 70, 6, 16)
    out, _ = chunked(*heads)
    got = torch.autograd.grad((out * weight).sum(), heads)
    wanted = torch.autograd.grad((differentiable_recurrence(*heads) * weight).sum(), heads)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3)


def differentiable_recurrence(q, k, v, g, beta):
    q, k = (x.repeat_interleave(3, 2) for x in (q * q.shape[-1] ** -0.5, k))
    state, outs = torch.zeros(2, 6, 16, 16), []
    for i in range(q.shape[1]):
        state = state * g[:, i].exp()[..., None, None]
        delta = beta[:, i, :, None] * (v[:, i] - (state * k[:, i, :, :, None]).sum(-2))
        state = state + k[:, i, :, :, None] * delta[..., None, :]
        outs.append((state * q[:, i, :, :, None]).sum(-2))
    return torch.stack(outs, 1)


def test_inverse_keeps_its_digits_when_all_keys_are_equal() -> None:
    system = torch.ones(64, 64, dtype=torch.float64).tril(-1)
    exact = torch.linalg.inv(system + torch.eye(64, dtype=torch.float64))
    torch.testing.assert_close(unit_lower_inverse(system.float()).double(), exact, atol=1e-3, rtol=0)


def test_training_leaves_the_constant_channel_alone(tmp_path: Path, streams: data.Streams) -> None:
    torch.manual_seed(0)
    target, drafter = Target(TARGET), Drafter(DRAFTER)
    curve = Curve(tmp_path / "curve.jsonl", echo=False)
    train_target(target, streams, Limits(steps=3), curve, tmp_path / "t.pt", batch=2, length=40)
    checkpoint.save_target(target, tmp_path / "target")
    made = Continuations(
        torch.randint(4, 64, (4, 60), dtype=torch.int16), torch.full((4,), 10), torch.full((4,), 60)
    )
    train_drafter(drafter, target, made, Limits(steps=3), curve, tmp_path / "d.pt", batch=2, anchors=3)
    checkpoint.save_drafter(drafter, TARGET, tmp_path / "drafter")
    _, features = target(torch.randint(4, 64, (1, 20)), DRAFTER.features)
    assert (features.view(1, 20, 5, 32)[..., -1] == 1).all()


def test_a_checkpoint_that_writes_the_constant_channel_is_refused(tmp_path: Path) -> None:
    target = Target(TARGET)
    with torch.no_grad():
        target.layers[2].mlp.down_proj.weight[-1, 0] = 0.5
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.down_proj"):
        checkpoint.save_target(target, tmp_path)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, streams: data.Streams) -> None:
    curve = Curve(tmp_path / "curve.jsonl", echo=False)

    def run(name: str, *limits: Limits) -> Target:
        for limit in limits:
            torch.manual_seed(0)
            target = Target(TARGET)
            train_target(target, streams, limit, curve, tmp_path / name, batch=2, length=40)
        return target

    whole = run("whole.pt", Limits(steps=6))
    parts = run("parts.pt", Limits(steps=6, stop_at=3), Limits(steps=6))
    for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_the_engine_computes_what_the_trainer_trains(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target, drafter = Target(TARGET), Drafter(DRAFTER)
    with torch.no_grad():
        for model in (target, drafter):
            for p in model.parameters():
                if p.ndim == 1:
                    p.add_(0.2 * torch.randn_like(p))
            model.hold_constant_()
            checkpoint.round_to_bf16_(model)
    checkpoint.save_target(target, tmp_path / "target")
    checkpoint.save_drafter(drafter, TARGET, tmp_path / "drafter")
    engine = EngineTarget.load(tmp_path / "target", torch.float32, 256)
    engine_drafter = EngineDrafter.load(tmp_path / "drafter", engine.config, torch.float32, 256)
    engine.capture = DRAFTER.features
    ids = torch.randint(4, 64, (1, 90))
    cache = TargetCache.empty(engine.config, 128, torch.float32)
    passes = [engine.prefill(part, cache) for part in ids[0].split(64)]
    with torch.no_grad():
        hidden, features = target(ids, DRAFTER.features)
    torch.testing.assert_close(torch.cat([p.hidden for p in passes]), hidden[0], atol=1e-4, rtol=1e-3)
    for anchor in (10, 60, 89):
        context = DrafterCache.empty(engine_drafter.config, 128, torch.float32)
        engine_drafter.extend(features[0, :anchor], context)
        block = torch.cat([ids[0, anchor : anchor + 1], torch.full((15,), DRAFTER.mask_token)])
        wanted = engine_drafter.hidden(engine.embed(block), context)[1:]
        with torch.no_grad():
            got = drafter(target.embed_tokens.weight, ids, features, torch.tensor([[anchor]]))[0, 0]
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-3)


def test_greedy_decoding_equals_teacher_forcing() -> None:
    torch.manual_seed(0)
    target = Target(TARGET)
    out = greedy(target, torch.randint(4, 64, (3, 20)), 12)
    with torch.no_grad():
        hidden, _ = target(out[:, :-1])
    logits = hidden @ target.embed_tokens.weight.T
    assert torch.equal(logits[:, 19:].argmax(-1), out[:, 20:])


def test_loops_are_seen_and_cut() -> None:
    rng = np.random.default_rng(0)
    free = rng.integers(4, 64, 100).tolist()
    looping = free[:40] + [5, 6, 7] * 20
    assert loops(looping)
    assert not loops(free)
    limit = useful_limit(torch.tensor([looping, free]), 10)
    assert limit.tolist() == [43, 100]
    assert useful_limit(torch.tensor([[9, 9, 9, data.EOS, 4, 5]]), 2).tolist() == [4]


def test_cleaning_collapses_newline_runs_and_drops_the_licence_comment() -> None:
    text = "# Copyright\n# All rights\n\nimport os\n\n\n\n\nx = 1   \n"
    assert corpus.clean(text) == "import os\n\nx = 1\n"


def test_packed_streams_come_back(tmp_path: Path) -> None:
    streams = data.Streams(
        np.arange(300, dtype=np.uint16),
        [np.array([7, 2], dtype=np.uint16)],
        [{"package": "a==1", "path": "b.py"}],
    )
    data.pack(streams, tmp_path / "tokens.xz")
    back = data.unpack(tmp_path / "tokens.xz")
    assert np.array_equal(back.train, streams.train)
    assert np.array_equal(back.held_out[0], streams.held_out[0])
    assert back.held_out_sources == streams.held_out_sources


def test_the_corpus_list_names_a_licence_for_every_package() -> None:
    allowed = {"MIT", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0", "PSF-2.0"}
    assert {r.licence for r in corpus.read_list()} <= allowed
