"""Engines whose prefills are not captured, each refused in a line that names what stands against it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.sglang_plugin.graphs.compatibility import conflict


def runner(architecture: str = "Qwen2ForCausalLM", window: int | None = None, **changed: Any) -> SimpleNamespace:
    arguments = {
        "tp_size": 1,
        "pp_size": 1,
        "enable_dp_attention": False,
        "enable_lora": None,
        "speculative_algorithm": None,
        "enable_hierarchical_cache": False,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(architectures=[architecture]), sliding_window_size=window
        ),
        server_args=SimpleNamespace(**{name: changed.get(name, value) for name, value in arguments.items()}),
        token_to_kv_pool=SimpleNamespace(requires_physical_write_loc=changed.get("is_unified", False)),
        dtype="bfloat16",
        kv_cache_dtype=changed.get("kv_cache_dtype", "bfloat16"),
    )


def test_a_dense_model_alone_goes() -> None:
    assert conflict(runner()) is None
    assert conflict(runner("LlamaForCausalLM")) is None


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"architecture": "DeepseekV3ForCausalLM"}, "DeepseekV3ForCausalLM is not one of"),
        ({"window": 4096}, "sliding window"),
        ({"tp_size": 2}, "--tp-size"),
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
