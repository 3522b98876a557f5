"""Latent attention (MLA: DeepSeek V2 and V3, GLM-4-MoE-lite) on a CPU that has no AMX.

SGLang's DeepSeek attention asks a backend for keys and values of all heads where no prefix is cached, and its attention
for CPUs finds only latent rows in the pool. Here every batch attends to the latent rows themselves (the absorbed form,
which SGLang uses for decode): one row is a key, and its first part the value, of all heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_BACKEND = "torch_native"


def choose_method(stock: Callable[..., Any], attention: Any, forward_batch: Any) -> Any:
    """AROUND `DeepseekV2AttentionMLA.dispatch_attn_forward_method`: return the absorbed form of every batch here."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    method = stock(attention, forward_batch)
    return AttnForwardMethod.MLA if attention.current_attention_backend == _BACKEND else method


def make_rotary(
    stock: Callable[..., Any],
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: Any = None,
    partial_rotary_factor: float = 1.0,
    device: str | None = None,
) -> Any:
    """AROUND `get_rope_cpu`, which makes the rotary embedding of YaRN only: any other one is that of other devices."""
    from sglang.srt.layers.rotary_embedding import factory

    arguments = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor)
    if rope_scaling is None or rope_scaling.get("rope_type") != "deepseek_yarn":
        return factory.get_rope(*arguments)
    return stock(*arguments, device)
