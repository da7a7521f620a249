"""From the operator's server arguments to the ones that DDTREE serves with, or a refusal with its remedy.

`resolve` runs inside SGLang's own argument resolution: it reads the resolved view and returns the fields to
write. What SGLang calls `speculative_num_draft_tokens` is Q in modes tree and unsafe and F in mode shadow,
which is DFLASH's configuration to the last field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ddtree_engine.sglang_plugin import memory
from ddtree_engine.sglang_plugin.config import MAX_WIDTH, VARIABLE, Config, Mode, StateStore
from ddtree_engine.sglang_plugin.errors import ArgumentError
from ddtree_engine.sglang_plugin.names import ALGORITHM

# Above 1 SGLang allocates tree metadata and full convolution windows; 2 keeps its KV reserve small.
TREE_TOPK = 2
DEFAULT_RUNNING = 4
DEFAULT_BLOCK = 16
TREE_ATTENTION_BACKENDS = ("triton", "fa3", "flashinfer")
# What a commit moves and an injection writes is a row a token: no scales of blocks beside it.
CACHE_TYPES = (None, "auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
# Of the card, when --mem-fraction-static is not resolved yet.
STATIC_FRACTION = 0.85
# Of what the weights leave, kept for the KV cache and the requests' own states.
CACHE_SHARE = 1 / 8


class ServerArguments(Protocol):
    """SGLang's resolved view of its arguments: attribute access by field name."""

    def __getattr__(self, name: str) -> Any: ...


@dataclass(frozen=True)
class Surroundings:
    """What resolution knows besides the arguments.

    draft_block     F from the drafter's config.json, None when it names none
    node_bytes      what a node takes for its recurrent layers on a rank, 0 for a model without them
    weight_bytes    target's and drafter's checkpoints per rank, 0 when unknown
    card_bytes      memory of one card, 0 when unknown
    """

    draft_block: int | None
    node_bytes: int
    weight_bytes: int
    card_bytes: int


def resolve(view: ServerArguments, config: Config, around: Surroundings) -> dict[str, Any]:
    """The fields to write for these arguments. Raises `ArgumentError` naming argument, found and allowed."""
    refuse_unsupported(view)
    block = _block(view, around)
    if config.mode is Mode.SHADOW:
        return _shadow_fields(view, block, around)
    _refuse_unsupported_in_a_tree(view)
    if config.state is StateStore.WY:
        _apply(WY_RULES, view)
    width = _width(view, config)
    _check_track_interval(view, width)
    running = _running(view, width, around, stashed=config.state is StateStore.WY)
    return {
        "speculative_dflash_block_size": block,
        "speculative_num_draft_tokens": width,
        "speculative_eagle_topk": TREE_TOPK,
        # The scheduler expects a step to take max(steps x topk, Q) slots: here never fewer than the
        # drafter's block, which a small tree would otherwise leave out.
        "speculative_num_steps": block - 1,
        "max_running_requests": running,
        "speculative_draft_attention_backend": _draft_backend(view),
        "enable_mixed_chunk": False,
    }


def _shadow_fields(view: ServerArguments, block: int, around: Surroundings) -> dict[str, Any]:
    found = view.speculative_num_draft_tokens
    if found not in (None, block):
        raise ArgumentError(
            f"--speculative-num-draft-tokens: found {found}, allowed in mode shadow is the drafter's block "
            f'{block} or nothing; the width of the tree that is scored is "budget" in {VARIABLE}'
        )
    return {
        "speculative_dflash_block_size": block,
        "speculative_num_draft_tokens": block,
        "speculative_eagle_topk": 1,
        "speculative_num_steps": 1,
        "max_running_requests": _running(view, block, around),
        "speculative_draft_attention_backend": _draft_backend(view),
    }


@dataclass(frozen=True)
class Rule:
    """One argument that must have one of few values."""

    field: str
    option: str
    holds: Callable[[Any], bool]
    allowed: str


def _off(value: Any) -> bool:
    return not value


def _one(value: Any) -> bool:
    return value in (None, 1)


RULES = (
    Rule("device", "--device", lambda value: str(value).startswith("cuda"), "cuda"),
    Rule("speculative_draft_model_path", "--speculative-draft-model-path", bool, "the DFlash drafter's path"),
    Rule("pp_size", "--pp-size", _one, "1 (use --tp-size or more servers)"),
    Rule("attn_dp_size", "--attn-dp-size", _one, "1 (start one server per group of cards instead)"),
    Rule("attn_cp_size", "--attn-cp-size", _one, "1"),
    Rule("dcp_size", "--dcp-size", _one, "1"),
    Rule("speculative_adaptive", "--speculative-adaptive", _off,
         f'off (several widths are "widths" in {VARIABLE})'),
    Rule("enable_unified_memory", "--enable-unified-memory", _off, "off (it moves pages, trees move tokens)"),
    Rule("disaggregation_mode", "--disaggregation-mode", lambda value: value in (None, "null"), "null"),
    Rule("enable_hierarchical_cache", "--enable-hierarchical-cache", _off, "off"),
    Rule("enable_lmcache", "--enable-lmcache", _off, "off"),
    Rule("enable_hisparse", "--enable-hisparse", _off, "off"),
    Rule("enable_lora", "--enable-lora", _off, "off (merge the adapter into the checkpoint)"),
    Rule("enable_two_batch_overlap", "--enable-two-batch-overlap", _off, "off"),
    Rule("enable_pdmux", "--enable-pdmux", _off, "off"),
    Rule("enable_watermark", "--enable-watermark", _off, "off"),
    Rule("speculative_draft_window_size", "--speculative-draft-window-size", _off, "unset (the drafter's own "
         "sliding layers keep their window without it)"),
    Rule("speculative_accept_threshold_single", "--speculative-accept-threshold-single",
         lambda value: float(value) == 1.0, "1.0: other values change the distribution"),
    Rule("speculative_accept_threshold_acc", "--speculative-accept-threshold-acc",
         lambda value: float(value) == 1.0, "1.0: other values change the distribution"),
    Rule("speculative_use_rejection_sampling", "--speculative-use-rejection-sampling", _off, "off (nodes are "
         "sampled and walked, which is lossless)"),
    Rule("speculative_use_block_verification", "--speculative-use-block-verification", _off, "off"),
    Rule("speculative_token_map", "--speculative-token-map", _off, "unset"),
)  # fmt: skip

TREE_RULES = (
    Rule("speculative_eagle_topk", "--speculative-eagle-topk", lambda value: value in (None, TREE_TOPK),
         f"{TREE_TOPK} or nothing: with 1 the recurrent layers would run the tree as a chain; the number of "
         f'candidates per position is "topk" in {VARIABLE}'),
    Rule("kv_cache_dtype", "--kv-cache-dtype", lambda value: value in CACHE_TYPES,
         ", ".join(kind for kind in CACHE_TYPES if kind)),
    Rule("enable_linear_replayssm_spec", "--enable-linear-replayssm-spec", _off, "off (no state per node)"),
)  # fmt: skip

WY_RULES = (
    Rule("enable_linear_replayssm", "--enable-linear-replayssm", _off, 'off with "state": "wy"'),
    Rule("enable_page_major_kv_layout", "--enable-page-major-kv-layout", _off, 'off with "state": "wy"'),
    Rule("mamba_ssm_dtype", "--mamba-ssm-dtype", lambda value: value in (None, "float32", "bfloat16"),
         'float32, bfloat16 or unset with "state": "wy"'),
)  # fmt: skip


def refuse_unsupported(view: ServerArguments) -> None:
    """Raise `ArgumentError` for arguments that no mode can serve with."""
    _apply(RULES, view)


def _refuse_unsupported_in_a_tree(view: ServerArguments) -> None:
    _apply(TREE_RULES, view)
    for option in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        found = getattr(view, option)
        if found is not None and found not in TREE_ATTENTION_BACKENDS:
            raise ArgumentError(
                f"--{option.replace('_', '-')}: found {found}, allowed are backends that take a tree mask: "
                + ", ".join(TREE_ATTENTION_BACKENDS)
            )


def _apply(rules: tuple[Rule, ...], view: ServerArguments) -> None:
    for rule in rules:
        found = getattr(view, rule.field)
        if not rule.holds(found):
            raise ArgumentError(f"{rule.option}: found {found}, allowed with {ALGORITHM} is {rule.allowed}")


def _block(view: ServerArguments, around: Surroundings) -> int:
    found = view.speculative_dflash_block_size
    block = found if found is not None else around.draft_block or DEFAULT_BLOCK
    if not 2 <= block <= MAX_WIDTH:
        raise ArgumentError(f"--speculative-dflash-block-size: found {block}, allowed is 2..{MAX_WIDTH}")
    return int(block)


def _width(view: ServerArguments, config: Config) -> int:
    found = view.speculative_num_draft_tokens
    if config.widths:
        return _widest(found, config)
    wanted = config.budget + 1 if isinstance(config.budget, int) else None
    if found is None and wanted is None:
        raise ArgumentError(
            "--speculative-num-draft-tokens: missing, allowed is the number of tree nodes with the root, "
            f"one of {', '.join(map(str, sorted(memory.WIDTHS)))} for budgets 7, 15, 31, 63, 127"
        )
    if found is not None and wanted is not None and found != wanted:
        raise ArgumentError(
            f"--speculative-num-draft-tokens: found {found}, allowed is {wanted} "
            f'("budget": {config.budget} in {VARIABLE}, plus the root) or nothing'
        )
    width = int(found if found is not None else wanted)  # type: ignore[arg-type]
    if not 2 <= width <= MAX_WIDTH:
        raise ArgumentError(f"--speculative-num-draft-tokens: found {width}, allowed is 2..{MAX_WIDTH}")
    return width


def _widest(found: int | None, config: Config) -> int:
    widest = config.widths[-1]
    if found not in (None, widest):
        raise ArgumentError(
            f"--speculative-num-draft-tokens: found {found}, allowed is {widest}, the largest of "
            f'"widths" in {VARIABLE}, or nothing'
        )
    return widest


def _check_track_interval(view: ServerArguments, width: int) -> None:
    interval = view.mamba_track_interval
    if interval is not None and interval < width and not view.disable_radix_cache:
        raise ArgumentError(
            f"--mamba-track-interval: found {interval}, allowed is {width} (the verify width) or more, "
            "or --disable-radix-cache"
        )


def _running(view: ServerArguments, width: int, around: Surroundings, *, stashed: bool = False) -> int:
    asked: int | None = view.max_running_requests
    if not around.node_bytes or not around.card_bytes:
        return DEFAULT_RUNNING if asked is None else asked
    fraction = view.mem_fraction_static or STATIC_FRACTION
    room = max(0, int((around.card_bytes * fraction - around.weight_bytes) * (1 - CACHE_SHARE)))
    if asked is None:
        asked = max(1, memory.fitting_running(around.node_bytes, width, room, DEFAULT_RUNNING))
    memory.check_fits(around.node_bytes, width, asked, room, stashed=stashed)
    return asked


def _draft_backend(view: ServerArguments) -> str:
    # Not SGLang's default, which is flashinfer whatever the target runs on.
    backend = view.speculative_draft_attention_backend or view.attention_backend or "triton"
    return str(backend)


def survey(view: ServerArguments, config: Config, card_bytes: int) -> Surroundings:
    """Read the checkpoints' configs for `resolve`; what is not on this disk stays unknown."""
    tp = int(view.tp_size or 1)
    node_bytes = 0
    target = memory.checkpoint_folder(view.model_path)
    drafter = memory.checkpoint_folder(view.speculative_draft_model_path or "")
    text_config = memory.text_config_of(target)
    if text_config is not None:
        shape = memory.recurrent_shape(
            text_config,
            state_bytes=_itemsize(view.mamba_ssm_dtype or text_config.get("mamba_ssm_dtype") or "float32"),
            tp=tp,
        )
        if shape is not None:
            node_bytes = shape.stash_bytes if config.state is StateStore.WY else shape.node_bytes
    weights = memory.weight_bytes(target, view.quantization)
    weights += memory.weight_bytes(drafter, view.speculative_draft_model_quantization)
    return Surroundings(
        draft_block=_draft_block(memory.text_config_of(drafter)),
        node_bytes=node_bytes,
        weight_bytes=weights // tp,
        card_bytes=card_bytes,
    )


def _draft_block(draft_config: Mapping[str, Any] | None) -> int | None:
    if draft_config is None:
        return None
    nested = draft_config.get("dflash_config") or {}
    found = nested.get("block_size", draft_config.get("block_size"))
    return None if found is None else int(found)


def _itemsize(dtype: str) -> int:
    return {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 4)
