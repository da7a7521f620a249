"""What a server is pointed at: configs of the 27B's shape around the pair's own weights."""

from __future__ import annotations

import json

import pytest
import torch
from ddtree_engine.bed.__main__ import main
from ddtree_engine.bed.embed import Filling
from ddtree_engine.bed.folders import bed_from_json, bed_json, beds_of, write_folders
from ddtree_engine.bed.shapes import DFLASH_27B, QWEN36_27B, DrafterShape, TargetShape
from ddtree_engine.reference import pair_path
from ddtree_engine.reference.config import read_drafter_config, read_target_config
from ddtree_engine.reference.errors import InputError

from tests.support.bed_pair import WIDE, WIDE_DRAFTER, write_bed_pair
from tests.support.tiny_pair import write_pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("bed")
    assert main([str(out)]) == 0
    return out


def test_the_command_writes_the_27bs_shapes(folder):
    config = json.loads((folder / "target" / "config.json").read_text())
    assert TargetShape.of(config) == QWEN36_27B
    assert (config["num_hidden_layers"], config["tie_word_embeddings"]) == (64, False)
    target = read_target_config(folder / "target")
    assert (target.conv_dim, target.rotary_dim, target.rms_norm_eps) == (10240, 64, 1e-6)
    small = read_target_config(pair_path() / "target")
    assert (target.rope_theta, target.eos_token_ids) == (small.rope_theta, small.eos_token_ids)
    config = json.loads((folder / "drafter" / "config.json").read_text())
    assert DrafterShape.of(config) == DFLASH_27B
    drafter = read_drafter_config(folder / "drafter", target)
    assert (drafter.block_size, drafter.mask_token_id) == (16, 3)
    assert config["ddtree_bed"]["places"] == [0, 1, 2, 3, 4]


def test_the_folders_hold_the_pairs_weights_and_nothing_else(folder):
    for name in ("target", "drafter"):
        files = {path.name for path in (folder / name).iterdir()}
        assert files == {path.name for path in (pair_path() / name).iterdir()}
        for path in (folder / name).glob("*.safetensors"):
            assert path.read_bytes() == (pair_path() / name / path.name).read_bytes()


def test_what_the_config_says_is_the_map(tmp_path):
    beds = beds_of(write_bed_pair(tmp_path), WIDE, WIDE_DRAFTER)
    for bed in (beds.target, beds.drafter):
        data = json.loads(json.dumps(bed_json(bed, seed=5)))
        again, filling = bed_from_json(data, torch.float32, "cpu")
        assert again == bed
        assert filling == Filling(5, torch.float32, "cpu")
    with pytest.raises(InputError, match="schema"):
        bed_from_json(data | {"schema": 2}, torch.float32, "cpu")


@pytest.mark.parametrize("spoil", ["nothing constant", "a bed", "no pair"])
def test_a_pair_that_cannot_be_embedded_ends_with_2_and_says_why(spoil, tmp_path, capsys):
    if spoil == "a bed":
        pair = write_bed_pair(tmp_path / "pair")
        write_folders(tmp_path / "wide", pair, beds_of(pair, WIDE, WIDE_DRAFTER))
        pair, expected = tmp_path / "wide", "is a bed already"
    elif spoil == "nothing constant":
        pair, expected = write_pair(tmp_path / "pair", prefix="model.", tied=True), "no residual channel"
    else:
        pair, expected = tmp_path / "nowhere", "no readable config"
    assert main([str(tmp_path / "out"), "--pair", str(pair)]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
