"""`ddtree plan memory` against SGLang's own allocator: the bytes that its state pool takes, and its log."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from ddtree_ops.memory.planner import GIB, Plan, Wanted, plan_memory
from ddtree_ops.memory.shapes import DrafterShape, TargetShape, drafter_shape, target_shape
from ddtree_ops.schemas.arms import Arm
from ddtree_ops.schemas.cluster import Scratch

RUNNING = 3


@pytest.fixture
def shapes(pair: dict[str, Path]) -> tuple[TargetShape, DrafterShape]:
    return target_shape(str(pair["target"])), drafter_shape(str(pair["drafter"]))


@pytest.fixture
def allocate(published, pair, monkeypatch):
    """SGLang's pool for the small target, as its configurator would ask for it."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
    from sglang.srt.mem_cache import memory_pool

    config = json.loads((pair["target"] / "config.json").read_text())

    def make(*, slots: int, width: int | None, topk: int, ssm: str = "float32"):
        import torch

        shape = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=config["linear_value_head_dim"] * config["linear_num_value_heads"],
            n_groups=config["linear_num_key_heads"],
            num_heads=config["linear_num_value_heads"],
            head_dim=config["linear_value_head_dim"],
            state_size=config["linear_key_head_dim"],
            conv_kernel=config["linear_conv_kernel_dim"],
        )
        kinds = Mamba2StateDType(conv=torch.bfloat16, temporal=getattr(torch, ssm))
        layers = [i for i, kind in enumerate(config["layer_types"]) if kind == "linear_attention"]
        monkeypatch.setattr(memory_pool, "_is_cpu", False)
        return memory_pool.MambaPool(
            size=slots,
            spec_state_size=RUNNING,
            cache_params=Mamba2CacheParams(shape=shape, layers=layers, dtype=kinds),
            mamba_layer_ids=layers,
            device="cpu",
            speculative_num_draft_tokens=width,
            speculative_eagle_topk=topk,
        )

    return make


def plan(shapes: tuple[TargetShape, DrafterShape], arm: Arm, budget: int | None, ssm: str) -> Plan:
    wanted = Wanted(arm, budget, RUNNING, context=1024, card=8 * GIB, ssm=ssm, scratch=Scratch.SNAPSHOTS)
    return plan_memory(*shapes, wanted)


def size(found: Plan, part: str) -> int:
    return next(item.size for item in found.static if item.name == part)


def taken(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("ssm", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("arm", "budget", "width", "topk"),
    [(Arm.DFLASH, None, 16, 1), (Arm.DDTREE, 7, 8, 2), (Arm.DDTREE, 31, 32, 2)],
)
def test_the_plan_is_what_the_engine_allocates(
    shapes, allocate, caplog, arm, budget, width, topk, ssm
) -> None:
    found = plan(shapes, arm, budget, ssm)
    with caplog.at_level(logging.INFO):
        pool = allocate(slots=found.state_slots, width=width, topk=topk, ssm=ssm)
    cache = pool.mamba_cache
    assert size(found, "recurrent states") == taken([*cache.conv, cache.temporal])
    assert size(found, "verify scratch: states") == taken([cache.intermediate_ssm])
    assert size(found, "verify scratch: conv") == taken(pool._intermediate_conv_window_phys)
    logged = re.search(r"intermediate_ssm_state_cache size: ([\d.]+)GB", caplog.text)
    assert logged is not None
    assert float(logged[1]) == round(size(found, "verify scratch: states") / GIB, 2)


def test_without_a_drafter_there_are_states_only(shapes, allocate) -> None:
    found = plan(shapes, Arm.AR, None, "float32")
    cache = allocate(slots=found.state_slots, width=None, topk=1).mamba_cache
    assert size(found, "recurrent states") == taken([*cache.conv, cache.temporal])
    assert not hasattr(cache, "intermediate_ssm")
