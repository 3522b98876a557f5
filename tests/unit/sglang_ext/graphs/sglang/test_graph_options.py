"""The options of prefill graphs, also among the engine's arguments, and the engines whose prefills are not captured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.engine.device import Device
from sglang_ext.engine.hook_table import HOOK_TABLE
from sglang_ext.engine.options import ExtensionOptions, options_from_environment
from sglang_ext.graphs.sglang.graph_options import (
    SETTINGS,
    Capture,
    GraphOptions,
    add_graph_arguments,
    conflict,
    graph_options,
)
from sglang_ext.laps.sglang import laps_options
from sglang_ext.types import Role
from support.settings import parse_with_settings


def options(*given: str, engine: Sequence[str] = (), role: Role = Role.SHORT) -> tuple[GraphOptions | None, object]:
    return graph_options(role, parse(*given), engine)


def parse(*given: str) -> argparse.Namespace:
    known = (*laps_options.SETTINGS, *SETTINGS)
    return parse_with_settings([laps_options.add_laps_arguments, add_graph_arguments], known, given)


def test_none_by_default() -> None:
    assert options() == (None, ())
    assert options(role=Role.DECODE) == (None, ())


def test_the_grid() -> None:
    found, _ = options(
        "--laps-graphs", "start", "--set", "graphs.lengths_tokens=64,8,64", "--set", "graphs.batch_sizes=1,2"
    )
    assert found == GraphOptions(Capture.START, (8, 64), (1, 2))
    found, _ = options("--laps-graphs", "lazy", "--set", "graphs.memory_gb=1.5")
    assert found == GraphOptions(Capture.LAZY, memory_gb=1.5)
    assert found is not None
    assert len(found.lengths_tokens) * len(found.batch_sizes) == 42


def test_engine_arguments_win_and_are_taken_out() -> None:
    found, rest = options("--laps-graphs", "start", engine=("--laps-graphs", "lazy", "--tp", "1"))
    assert found == GraphOptions(Capture.LAZY)
    assert rest == ("--tp", "1")
    assert options("--laps-graphs", "start", engine=("--laps-graphs", "off"))[0] is None


def test_they_do_not_disturb_the_options_of_laps() -> None:
    given = parse("--laps-graphs", "start", "--set", "laps.w_max_ms=5")
    laps, rest = laps_options.laps_options(Role.SHORT, given, ("--laps-graphs", "lazy"))
    assert laps is not None
    assert laps.w_max_ms == 5
    assert tuple(rest) == ("--laps-graphs", "lazy")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--set", "graphs.memory_gb=1"), "graphs.memory_gb needs --laps-graphs start or lazy"),
        (("--set", "graphs.lengths_tokens=8"), "graphs.lengths_tokens needs"),
    ],
)
def test_options_without_graphs_are_refused(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(*given)


def test_decode_instances_have_none() -> None:
    with pytest.raises(ValueError, match="these graphs are of prefills"):
        options("--laps-graphs", "start", role=Role.DECODE)


@pytest.mark.parametrize("text", ["", "8,", "0", "8;16", "-8"])
def test_lists_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"graphs\.lengths_tokens must be"):
        options("--laps-graphs", "start", "--set", f"graphs.lengths_tokens={text}")


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "much"])
def test_budgets_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"graphs\.memory_gb must be"):
        options("--laps-graphs", "start", "--set", f"graphs.memory_gb={text}")


def test_they_reach_every_process_and_bring_their_hook() -> None:
    graphs = GraphOptions(Capture.START, (8,), (1, 2), 2.0)
    sent = ExtensionOptions(Role.SHORT, Device.CUDA, graphs=graphs)
    assert options_from_environment(sent.to_environment()) == sent
    hook = next(hook for hook in HOOK_TABLE if hook.name == "prefill-graphs")
    assert hook.is_wanted(sent)
    assert not hook.is_wanted(ExtensionOptions(Role.SHORT, Device.CUDA))


def runner(architecture: str = "Qwen2ForCausalLM", **changed: Any) -> SimpleNamespace:
    arguments = {
        "tp_size": 1,
        "pp_size": 1,
        "enable_dp_attention": False,
        "ep_size": 1,
        "moe_a2a_backend": "none",
        "dcp_size": 1,
        "enable_two_batch_overlap": False,
        "expert_distribution_recorder_mode": None,
        "enable_return_routed_experts": False,
        "forward_hooks": None,
        "enable_lora": None,
        "speculative_algorithm": None,
        "enable_hierarchical_cache": False,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture])),
        server_args=SimpleNamespace(**{name: changed.get(name, value) for name, value in arguments.items()}),
        token_to_kv_pool=SimpleNamespace(requires_physical_write_loc=changed.get("is_unified", False)),
        dtype="bfloat16",
        kv_cache_dtype=changed.get("kv_cache_dtype", "bfloat16"),
    )


def test_models_that_are_captured() -> None:
    assert conflict(runner()) is None
    assert conflict(runner("LlamaForCausalLM")) is None
    assert conflict(runner("Qwen3MoeForCausalLM")) is None
    assert conflict(runner("GptOssForCausalLM")) is None
    assert conflict(runner("DeepseekV3ForCausalLM")) is None
    assert conflict(runner(tp_size=8)) is None


@pytest.mark.parametrize(
    ("architecture", "config", "reason"),
    [
        ("DeepseekV32ForCausalLM", {"index_topk": 2048}, "its attention chooses the tokens"),
        ("DeepseekV3ForCausalLM", {"index_topk": 2048}, "its attention chooses the tokens"),
        ("Qwen3_5ForCausalLM", {"layer_types": ["linear_attention", "full_attention"]}, "its layers are of several"),
        ("Qwen3VLForConditionalGeneration", {"vision_config": {"depth": 2}}, "it takes images"),
        ("OPTForCausalLM", {}, "is not one of Cohere2"),
    ],
)
def test_other_families_are_refused_with_the_reason(architecture: str, config: dict[str, Any], reason: str) -> None:
    model = runner(architecture)
    vars(model.model_config.hf_config).update(config)
    assert f"{architecture}" in (conflict(model) or "")
    assert reason.lower() in (conflict(model) or "").lower()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"architecture": "GemmaForCausalLM"}, "GemmaForCausalLM is not one of"),
        ({"ep_size": 2}, "--ep-size"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend"),
        ({"dcp_size": 2}, "context parallelism"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"expert_distribution_recorder_mode": "stat"}, "--expert-distribution-recorder-mode"),
        ({"enable_return_routed_experts": True}, "--enable-return-routed-experts"),
        ({"forward_hooks": [{}]}, "--forward-hooks"),
        ({"pp_size": 2}, "--pp-size"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype"),
        ({"is_unified": True}, "unified memory pool"),
    ],
)
def test_what_stands_against_it_is_named(changed: dict[str, Any], named: str) -> None:
    assert named in (conflict(runner(**changed)) or "")
