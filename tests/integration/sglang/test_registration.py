"""Registration, hooks and pins in the real SGLang."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ddtree_engine.sglang_plugin import check, hooks, pin
from ddtree_engine.sglang_plugin.algorithm import DDTreeAlgorithm


@pytest.fixture
def algorithm(plugin):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SpeculativeAlgorithm.from_string(plugin)


def test_sglang_knows_the_algorithm_by_name(algorithm):
    assert isinstance(algorithm, DDTreeAlgorithm)
    assert algorithm.supports_overlap


def test_everything_that_the_scheduler_asks_an_algorithm_has_an_answer(algorithm):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    # Its registration compares is_* and supports_* only; these three are called on any algorithm.
    for name in ("create_future_map", "need_topk", "carries_draft_hidden_states"):
        assert callable(getattr(algorithm, name)), name
    asked = [name for name, member in vars(SpeculativeAlgorithm).items() if callable(member)]
    public = [name for name in asked if not name.startswith("_")]
    builtin_only = {"register", "from_string", "get_platform_worker_cls"}
    missing = [name for name in public if name not in builtin_only and not hasattr(algorithm, name)]
    assert not missing


def test_the_installed_sources_are_the_pinned_ones():
    assert pin.mismatches() == ()


def test_a_changed_source_is_named(tmp_path):
    root = tmp_path / "sglang"
    name = "sglang.srt.speculative.eagle_worker_common:run_eagle_verify"
    file = root / "srt" / "speculative" / "eagle_worker_common.py"
    file.parent.mkdir(parents=True)
    original = pin.source_of(name, pin.package_root())
    file.write_text(original.replace("topk > 1", "topk > 2"))
    _, pins = pin.load_pins()
    assert pin.source_hash(name, pin.package_root()) == pins[name]
    assert pin.source_hash(name, root) not in (None, pins[name])


def test_the_check_command_says_yes_here():
    findings = check.examine()
    assert [finding.check for finding in findings if not finding.ok] == []


def test_the_check_command_without_imports_needs_no_gpu():
    command = [sys.executable, "-m", "ddtree_engine.sglang_plugin.check", "--no-import"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_registering_imports_no_worker_and_no_attention_backend():
    """The detokenizer registers too."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import stand_ins; stand_ins.install()\n"
        "from ddtree_engine.sglang_plugin.register import register; register()\n"
        "heavy = [m for m in sys.modules if m.endswith(('dflash_worker_v2', 'decode_cuda_graph_runner', "
        "'sglang_plugin.worker'))]\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


class _Runner:
    """As much of a graph runner as `get_spec_info` reads."""

    def __init__(self, algorithm, *, drafter):
        class model_runner:  # noqa: N801
            spec_algorithm = algorithm
            is_draft_worker = drafter

        class buffers:  # noqa: N801
            custom_mask = "mask"

        self.model_runner = model_runner
        self.buffers = buffers
        self.captured_req_width = 16
        self.speculative_num_steps = 15
        self.speculative_num_draft_tokens = 64


@pytest.fixture
def hooked(published):
    """Hooks installed in a process that is configured for a 64-node tree."""
    hooks.install()


def test_hooks_are_found_and_installed_once(hooked):
    from sglang.srt.plugins.hook_registry import HookRegistry

    again = hooks.install()
    assert set(again) <= HookRegistry._patched
    assert all(len(HookRegistry._hooks[target]) == 1 for target in again)


def test_graphs_are_captured_with_a_tree_for_the_target_and_a_block_for_the_drafter(hooked, algorithm):
    from ddtree_engine.sglang_plugin.inputs import DDTreeVerifyInput
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    tree = DecodeCudaGraphRunner.get_spec_info(_Runner(algorithm, drafter=False), 64)
    assert isinstance(tree, DDTreeVerifyInput)
    assert (tree.draft_token_num, tree.topk, tree.custom_mask) == (64, 2, "mask")
    assert tree.max_tree_depth == 16
    block = DecodeCudaGraphRunner.get_spec_info(_Runner(algorithm, drafter=True), 16)
    assert block.draft_token_num == 16
    assert block.custom_mask is None


def test_other_algorithms_keep_their_own_dummies(hooked):
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm, create_dummy_verify_input

    dummy = create_dummy_verify_input(SpeculativeAlgorithm.DFLASH, None, 64, False)
    assert type(dummy) is DFlashVerifyInput


def test_warm_up_gets_a_tree_through_the_name_that_its_caller_has_bound(hooked, algorithm):
    from ddtree_engine.sglang_plugin.inputs import DDTreeVerifyInput
    from sglang.srt.model_executor.runner import base_runner

    assert isinstance(base_runner.create_dummy_verify_input(algorithm, None, 64, False), DDTreeVerifyInput)
    assert base_runner.create_dummy_verify_input(algorithm, None, 16, True).draft_token_num == 16


def test_rows_hold_a_whole_reservation_past_the_context(hooked):
    from ddtree_engine.sglang_plugin.inputs import reserved_tokens
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len

    assert get_req_to_token_extra_context_len() >= reserved_tokens() == 128
    assert kv_cache_configurator.get_req_to_token_extra_context_len() >= 128


def test_drafter_and_target_have_their_own_widths(hooked, algorithm):
    assert algorithm.get_num_tokens_per_req_for_target_verify(64, is_draft_worker=False) == 64
    assert algorithm.get_num_tokens_per_req_for_target_verify(64, is_draft_worker=True) == 16


def test_the_worker_module_imports(plugin):
    from ddtree_engine.sglang_plugin.worker import DDTreeWorkerV2
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    assert issubclass(DDTreeWorkerV2, DFlashWorkerV2)


def test_server_info_names_the_arm_and_its_numbers(plugin, configure, resolved):
    from sglang.srt.arg_groups.overrides import record_of
    from sglang.srt.utils import build_server_info

    configure(mode="shadow", budget=31)
    record = record_of(resolved())
    record._launch_command = "sglang serve"
    facts = build_server_info(record, {})["ddtree"]
    assert (facts["arm"], facts["budget"], facts["block"], facts["engine"]) == ("shadow", 31, 16, "sglang")
    plain = record_of(resolved(algorithm=None))
    plain._launch_command = "sglang serve"
    assert "ddtree" not in build_server_info(plain, {})


def test_server_info_shows_no_api_key(plugin):
    """Neither at the top nor in the schedulers' state, where the name is bound before or after the plugin."""
    from sglang.srt.entrypoints import grpc_bridge
    from sglang.srt.managers import tokenizer_manager

    answer = {
        "api_key": "sesame",
        "admin_api_key": "mellon",
        "tp_size": 1,
        "internal_states": [{"api_key": "sesame", "memory_usage": {"weight": 1.0}, "admin_api_key": None}],
    }
    for module in (grpc_bridge, tokenizer_manager):
        shown = module.redact_watermark_secrets(answer)
        assert "sesame" not in str(shown)
        assert "mellon" not in str(shown)
        assert shown["tp_size"] == 1
        assert shown["internal_states"][0]["memory_usage"] == {"weight": 1.0}
        assert shown["internal_states"][0]["admin_api_key"] is None
    assert answer["api_key"] == "sesame"


def test_server_info_is_redacted_last(plugin):
    """/server_info's own code gives the whole answer to the hooked function."""
    source = (pin.package_root() / "srt" / "entrypoints" / "http_server.py").read_text()
    body = source.split("async def server_info():", 1)[1].split("\n@app", 1)[0]
    assert re.search(
        r"redact_watermark_secrets\(\s*\{\s*\*\*build_server_info.*internal_states", body, re.DOTALL
    )


def test_the_scheduler_asks_our_request_check(hooked):
    """The scheduler has bound the name long before the worker installs the hooks."""
    from types import SimpleNamespace

    from sglang.srt.managers import scheduler

    parameters = SimpleNamespace(custom_params={"ddtree_budget": 7})
    request = SimpleNamespace(sampling_params=parameters, return_hidden_states=False)
    assert "ddtree_budget" in scheduler.validate_dflash_request(request, True)
    parameters.custom_params = None
    request.return_sampling_mask, request.custom_logit_processor = False, None
    assert scheduler.validate_dflash_request(request, True) is None
