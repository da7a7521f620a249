"""The wide pair computes what the small pair computes, node by node of a tree; no rule of the map is idle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from ddtree_engine.bed import embed
from ddtree_engine.bed.embed import Role, Rule
from ddtree_engine.bed.folders import beds_of, write_folders
from ddtree_engine.bed.places import Axis
from ddtree_engine.bed.shapes import DFLASH_27B, QWEN36_27B
from ddtree_engine.bed.source import BedSource
from ddtree_engine.reference import pair_path
from ddtree_engine.reference.cache import DrafterCache, TargetCache
from ddtree_engine.reference.config import FULL, LINEAR, read_drafter_config, read_target_config
from ddtree_engine.reference.drafter import Drafter
from ddtree_engine.reference.engine import Arm, Engine
from ddtree_engine.reference.requests import GenerateRequest
from ddtree_engine.reference.sampling import Sampler
from ddtree_engine.reference.shape import tree_shape
from ddtree_engine.reference.target import Target
from ddtree_engine.tree import Builder, tree_of
from torch import Tensor

from tests.support.bed_pair import PLACES, SMALL, SMALL_DRAFTER, WIDE, WIDE_DRAFTER, write_bed_pair

POSITIONS = 256
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 5, 8, 8, 0, 4, 12]
# Of the range of the logits, in float32: sums of other lengths are added up in another order.
TOLERANCE = 2e-5


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["tied", "untied"])
def pair(request, tmp_path_factory) -> Path:
    return write_bed_pair(tmp_path_factory.mktemp("pair"), tied=request.param == "tied")


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    return write_bed_pair(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def wide_folder(tied, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    write_folders(folder, tied, beds_of(tied, WIDE, WIDE_DRAFTER))
    return folder


@dataclass(frozen=True)
class Run:
    """What a pair makes of a prompt, a tree of tokens after it and a block to draft."""

    prefill: Tensor
    verify: Tensor
    features: Tensor
    draft: Tensor


def load_small(pair: Path) -> tuple[Target, Drafter]:
    target = Target.load(pair / "target", torch.float32, POSITIONS)
    return target, Drafter.load(pair / "drafter", target.config, torch.float32, POSITIONS)


class Partly(BedSource):
    """Makes again what a changed rule is for; the rest is as it was."""

    kept: ClassVar[dict[str, Tensor]] = {}
    changed = ""

    def take(self, name, shape, dtype=None):
        if name.endswith(self.changed):
            return super().take(name, shape, dtype)
        self.left.remove(name)
        return self.kept[name]


def load_wide(folder: Path, source: type[BedSource] = BedSource) -> tuple[Target, Drafter]:
    config = read_target_config(folder / "target")
    drafter_config = read_drafter_config(folder / "drafter", config)
    target = Target.of(config, source.of_folder(folder / "target"), POSITIONS)
    return target, Drafter.of(drafter_config, source.of_folder(folder / "drafter"), POSITIONS)


@torch.inference_mode()
def run(target: Target, drafter: Drafter) -> Run:
    make = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 260, (32,), generator=make)
    target.capture = drafter.config.target_layer_ids
    cache = TargetCache.empty(target.config, 128, torch.float32)
    drafter_cache = DrafterCache.empty(drafter.config, 128, torch.float32)
    prefilled = target.prefill(tokens, cache)
    drafter.extend(prefilled.features, drafter_cache)
    block = torch.full((drafter.config.block_size,), drafter.config.mask_token_id)
    block[0] = 77
    drafted = target.logits(drafter.hidden(target.embed(block), drafter_cache))
    tree = some_tree(torch.randint(4, 260, (len(PARENTS),), generator=make))
    nodes = torch.from_numpy(tree.tokens)
    verified = target.verify(nodes, tree_shape(tree, target.config.conv_kernel), cache)
    return Run(target.logits(prefilled.hidden), target.logits(verified.hidden), verified.features, drafted)


def some_tree(tokens):
    depths: list[int] = []
    for parent in PARENTS:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return tree_of(tokens.tolist(), PARENTS, depths, [0.0] * len(PARENTS), [0] * len(PARENTS))


def error(small: Run, wide: Run) -> float:
    """Largest difference of log-probabilities over both whole vocabularies, of the range of the logits."""
    worst = 0.0
    for name in ("prefill", "verify", "draft"):
        mine, theirs = getattr(small, name), getattr(wide, name)
        span = (mine.max() - mine.min()).item()
        known = theirs.log_softmax(dim=-1)[:, : mine.shape[1]]
        gap = (mine.log_softmax(dim=-1) - known).abs().max().item()
        worst = max(worst, gap / span if np.isfinite(gap) else np.inf)
    return worst


def test_every_node_has_the_small_pairs_log_probabilities(pair, tmp_path):
    write_folders(tmp_path, pair, beds_of(pair, WIDE, WIDE_DRAFTER))
    small, wide = run(*load_small(pair)), run(*load_wide(tmp_path))
    assert error(small, wide) < TOLERANCE
    for name in ("prefill", "verify", "draft"):
        unused = getattr(wide, name)[:, SMALL.vocabulary :]
        assert unused.shape[1] == WIDE.vocabulary - SMALL.vocabulary
        assert (unused < getattr(small, name).min() - 200).all()


def test_captured_features_are_the_small_ones_times_r_and_zeros(tied, wide_folder):
    small, wide = run(*load_small(tied)), run(*load_wide(wide_folder))
    parts = small.features.unflatten(1, (3, SMALL.hidden))
    wider = wide.features.unflatten(1, (3, WIDE.hidden))
    assert torch.allclose(wider[..., : SMALL.hidden], 2 * parts, rtol=0, atol=2e-5 * parts.abs().max())
    assert (wider[..., SMALL.hidden :] == 0).all()


def test_a_request_takes_the_same_steps(tied, wide_folder):
    """Greedy decoding through drafts, trees and commits."""
    outputs = []
    for target, drafter in (load_small(tied), load_wide(wide_folder)):
        engine = Engine(Arm.DDTREE, target, drafter)
        request = GenerateRequest(
            "r", tuple(range(40, 75)), 24, Sampler(), budget=15, builder=Builder.BEST_FIRST
        )
        running = engine.start(request)
        while len(running.output) < 24:
            engine.advance(running)
        outputs.append((running.output, [step.matched for step in running.stats.steps]))
    assert outputs[0] == outputs[1]


def test_names_and_values_of_the_wide_checkpoint(tied, wide_folder):
    """Scales are powers of two: the small numbers are there bit by bit, also where a norm hides a factor."""
    beds = beds_of(tied, WIDE, WIDE_DRAFTER)
    assert beds.target.places == PLACES
    small, drafter = load_small(tied)
    source = BedSource.of_folder(wide_folder / "drafter")
    fc = source.take("fc.weight", (128, 3 * 128)).unflatten(1, (3, 128))
    assert torch.equal(fc[:32, :, :32].flatten(1), drafter.fc.t())
    assert (fc[32:] == 0).all()
    assert (fc[:, :, 32:] == 0).all()
    keys = source.take("layers.0.self_attn.k_proj.weight", (48, 128))
    assert torch.equal(keys[:32, :32], drafter.layers[0].qkv.t()[64:96] / 2)
    source = BedSource.of_folder(wide_folder / "target")
    embedding = source.take("model.embed_tokens.weight", (1800, 128))
    assert torch.equal(embedding[:260, :32], 2 * small.embedding)
    assert not embedding[260:].any()
    assert not embedding[:, 32:].any()
    # Layers that no layer of the pair became change nothing.
    for name in ("linear_attn.out_proj.weight", "mlp.down_proj.weight"):
        tensor = source.bed.tensor(f"model.layers.0.{name}", source.read, source.filling)
        assert not tensor.any()
    assert source.bed.tensor("model.layers.0.mlp.up_proj.weight", source.read, source.filling).std() > 0.01


def test_a_name_has_the_same_random_numbers_in_any_order(wide_folder):
    source = BedSource.of_folder(wide_folder / "target")
    forward = dict(embed.tensors(source.bed, source.read, source.filling))
    for name in reversed(list(forward)):
        assert torch.equal(forward[name], source.bed.tensor(name, source.read, source.filling)), name
    other = replace(source.filling, seed=1)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(forward[name], source.bed.tensor(name, source.read, other))


TABLES = {
    "linear": embed.LINEAR_LAYER,
    "full": embed.FULL_LAYER,
    "drafter": embed.DRAFTER_LAYER,
    "top": embed.TARGET_TOP,
    "drafter top": embed.DRAFTER_TOP,
}
# A norm follows these at once, which hides a factor but for its eps: their values are compared above.
NORMED = {
    ("full", "self_attn.k_proj.weight"),
    ("drafter", "self_attn.q_proj.weight"),
    ("drafter", "self_attn.k_proj.weight"),
    ("drafter top", "fc.weight"),
}
# The rules that both kinds of target layers share are broken in one of them.
EVERY = [
    (table, name)
    for table, rules in TABLES.items()
    for name in rules
    if table != "linear" or name not in embed.FULL_LAYER
]


@pytest.fixture(scope="module")
def partly(wide_folder):
    """Loads the wide pair with the tensors of one name made again."""
    for name in ("target", "drafter"):
        source = BedSource.of_folder(wide_folder / name)
        Partly.kept |= dict(embed.tensors(source.bed, source.read, source.filling))

    def load(changed: str) -> tuple[Target, Drafter]:
        Partly.changed = changed
        return load_wide(wide_folder, Partly)

    yield load
    Partly.kept.clear()


@pytest.fixture(scope="module")
def expected(tied) -> Run:
    return run(*load_small(tied))


@pytest.mark.parametrize(("table", "name"), [pair for pair in EVERY if pair not in NORMED])
def test_a_wrong_factor_shows(table, name, expected, partly, monkeypatch):
    original = embed._embedded

    def scaled(bed, rule, *arguments, **options):
        tensor = original(bed, rule, *arguments, **options)
        return tensor * 2 if rule is TABLES[table][name] else tensor

    monkeypatch.setattr(embed, "_embedded", scaled)
    assert error(expected, run(*partly(name))) > 5 * TOLERANCE


# Two or more entries of the pair, and room to put them elsewhere.
WIDTHS = {"q": 16, "kv": 16, "values": 8, "q k v": 8, "q gate": 32, "vocabulary": 130}
MOVABLE = ("hidden", "inner", "q", "kv", "q gate", "q k v", "values", "value heads", "features", "vocabulary")


@pytest.mark.parametrize(
    ("table", "name", "axis"),
    [
        (table, name, axis)
        for table, name in EVERY
        for axis in TABLES[table][name].axes
        if axis in MOVABLE and not (axis == "hidden" and TABLES[table][name].role is Role.READER)
    ],
)
def test_a_misplaced_row_or_column_shows(table, name, axis, expected, partly, monkeypatch):
    rule = TABLES[table][name]
    moved = Rule(rule.role, tuple("moved" if part == axis else part for part in rule.axes))
    monkeypatch.setitem(TABLES[table], name, moved)
    for kind in (embed.TargetBed, embed.DrafterBed):
        axes = kind.axes.func

        def with_moved(self, axes=axes):
            known = axes(self)
            if axis not in known:
                return known
            index = known[axis].index.clone()
            # The first two change places: an order that is wrong, in the right amount of room.
            width = WIDTHS.get(axis, 1)
            index[: 2 * width] = index[: 2 * width].roll(width)
            return known | {"moved": Axis(known[axis].size, index)}

        monkeypatch.setattr(kind, "axes", property(with_moved))
    assert error(expected, run(*partly(name))) > 5 * TOLERANCE


def test_with_nothing_changed_nothing_shows(expected, partly):
    assert error(expected, run(*partly("no such name"))) < TOLERANCE
    assert error(expected, run(*partly("mlp.down_proj.weight"))) < TOLERANCE


@pytest.mark.parametrize("role", [Role.WRITER, Role.FEATURES])
def test_a_writer_that_is_not_zero_elsewhere_shows(role, expected, wide_folder, monkeypatch):
    monkeypatch.setitem(embed.TREATMENT, role, (embed.TREATMENT[role][0], "random"))
    assert error(expected, run(*load_wide(wide_folder))) > 5 * TOLERANCE


def test_unused_tokens_with_zero_rows_show(expected, wide_folder, monkeypatch):
    monkeypatch.setattr(embed, "UNUSED_LOGIT", 0.0)
    assert error(expected, run(*load_wide(wide_folder))) > 5 * TOLERANCE


@pytest.mark.parametrize("name", ["value_heads", "q_heads"])
def test_heads_that_leave_their_group_show(name, expected, tied, tmp_path, monkeypatch):
    """As many heads in a row as the pair has, in groups that are wider."""
    from ddtree_engine.bed import places

    original = places._groups

    def in_a_row(small, wide, heads, groups, width):
        if heads != name:
            return original(small, wide, heads, groups, width)
        return torch.arange(getattr(small, heads) * width)

    monkeypatch.setattr(places, "_groups", in_a_row)
    write_folders(tmp_path, tied, beds_of(tied, WIDE, WIDE_DRAFTER))
    assert error(expected, run(*load_wide(tmp_path))) > 5 * TOLERANCE


@pytest.mark.parametrize(
    "places", [(1, 2, 3, 8, 9), (1, 2, 4, 5, 9), (4, 2, 1, 8, 9), (1, 2, 4, 11, 9), (1, 2, 4, 8, 6)]
)
def test_layers_out_of_place_show(places, expected, tied, tmp_path):
    beds = beds_of(tied, WIDE, WIDE_DRAFTER)
    write_folders(tmp_path, tied, replace(beds, target=replace(beds.target, places=places)))
    shown = error(expected, run(*load_wide(tmp_path))) > 5 * TOLERANCE
    # Layer 3 is before the capture at 5 as well: the same model.
    assert shown == (places != (1, 2, 3, 8, 9))


def test_the_shipped_pair_at_four_times_its_width(tmp_path):
    """The real weights: hidden 1280, twelve layers, two key heads more."""
    wide = replace(
        QWEN36_27B,
        hidden=1280,
        inner=640,
        vocabulary=4352,
        layers=(LINEAR, LINEAR, LINEAR, FULL) * 3,
        q_heads=6,
        kv_heads=2,
        key_heads=3,
        value_heads=9,
    )
    wide_drafter = replace(
        DFLASH_27B,
        hidden=1280,
        inner=640,
        vocabulary=4352,
        q_heads=8,
        kv_heads=2,
        captured=(1, 4, 7, 9, 10),
        target_layers=12,
    )
    beds = beds_of(pair_path(), wide, wide_drafter)
    assert beds.target.constant == 319
    write_folders(tmp_path, pair_path(), beds)
    small, wider = run(*load_small(pair_path())), run(*load_wide(tmp_path))
    assert error(small, wider) < TOLERANCE
    assert (wider.draft[:, 4096:] < -1000).all()


def test_the_wide_drafter_reads_what_the_config_says(wide_folder):
    target, drafter = load_wide(wide_folder)
    assert drafter.config.target_layer_ids == WIDE_DRAFTER.captured
    assert drafter.config.layer_types == SMALL_DRAFTER.layers
    assert not target.config.tie_word_embeddings
