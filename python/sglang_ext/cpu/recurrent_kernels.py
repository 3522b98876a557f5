"""The names under which SGLang looks for kernels of layers with a recurrent state, and what computes them on a CPU.

Some are functions and operators of `sgl_kernel`, which is absent: `stand_in_definitions` puts them there. The others
are Triton's, or have no name on a CPU: AROUND `ModelRunner.load_model`, `bind` sets them in the modules that call them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from sglang_ext.cpu import recurrent_layers as layers

_LINEAR = "sglang.srt.layers.attention.linear"
_MIXER = "sglang.srt.layers.attention.mamba.mamba"
_NORMS = "sglang.kernels.ops.attention.fla"
_MODELS = "sglang.srt.models"


def bind(stock: Callable[..., Any], runner: Any, *arguments: Any, **options: Any) -> Any:
    """AROUND `ModelRunner.load_model`: the layers that it loads find these kernels."""
    for module, names in BOUND.items():
        if module in sys.modules:  # SGLang has imported all of its models
            vars(sys.modules[module]).update(names)
    return stock(runner, *arguments, **options)


def normalise(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return x / its root mean square * weight, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()


def normalise_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor,
    eps: float,
    activation: str,
    **_: Any,
) -> torch.Tensor:
    """Return normalised x, times the activated z: of Qwen3-Next."""
    return normalise_by(x, z, weight, bias, activation, eps=eps)


def normalise_by(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str = "swish",
    eps: float = 1e-6,
    **_: Any,
) -> torch.Tensor:
    """Return normalised x, times the activated g: of Kimi-Linear."""
    activate = torch.sigmoid if activation == "sigmoid" else functional.silu
    return (normalise(x, weight, eps) * activate(g.float())).to(x.dtype)


def split_projections(
    qkvz: torch.Tensor, ba: torch.Tensor, key_heads: int, heads: int, key_size: int, value_size: int
) -> tuple[torch.Tensor, ...]:
    """Return queries, keys and values [tokens, all], z [tokens, heads, value size], b and a [tokens, heads]."""
    qkv, z = qkvz.split([2 * key_heads * key_size + heads * value_size, heads * value_size], -1)
    b, a = ba.split([heads, heads], -1)
    return qkv.contiguous(), z.reshape(-1, heads, value_size), b.contiguous(), a.contiguous()


def normalise_q_k(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, epsilon: float, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys [tokens * heads, size], normalised as Gemma does: a weight of 0 keeps."""
    q, k = q.reshape(-1, size), k.reshape(-1, size)
    return normalise(q, q_weight + 1, epsilon).to(q.dtype), normalise(k, k_weight + 1, epsilon).to(k.dtype)


def normalise_q_k_gate(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    epsilon: float,
    size: int,
    heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the same of queries that come with a gate in each head, and the gates."""
    q, gate = q_gate.reshape(-1, heads, 2 * size).chunk(2, -1)
    q, k = normalise_q_k(q, k, q_weight, k_weight, epsilon, size)
    return q, k, gate.reshape(-1, size).contiguous()


def multiply_sigmoid_(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply x by the sigmoid of `gate`, in place."""
    x.mul_(gate.sigmoid())


def add_gated_(hidden: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor, total: torch.Tensor) -> None:
    """Add the output of the shared experts [tokens, size] to `total`, times a gate for each token."""
    total += (hidden @ weight).sigmoid()[:, None] * shared


# What a module `sgl_kernel.mamba` has.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn_cpu": layers.convolve,
    "causal_conv1d_update_cpu": layers.convolve_next,
    "chunk_gated_delta_rule_cpu": layers.delta_rule_extend,
}
# Of `torch.ops.sgl_kernel`.
OPERATORS: dict[str, Callable[..., Any]] = {
    "fused_gdn_gating_cpu": layers.gates,
    "fused_sigmoid_gating_delta_rule_update_cpu": layers.delta_rule_next,
    "fused_sigmoid_mul_cpu": multiply_sigmoid_,
    "fused_qk_gemma_rmsnorm_cpu": normalise_q_k,
    "fused_qk_gemma_rmsnorm_with_gate_cpu": normalise_q_k_gate,
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": split_projections,
}
_CONVOLUTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": layers.convolve,
    "causal_conv1d_update": layers.convolve_next,
}
# By module.
BOUND: dict[str, dict[str, Callable[..., Any]]] = {
    _MIXER: {
        **_CONVOLUTIONS,
        "causal_conv1d_fn_triton": layers.convolve,
        "causal_conv1d_update_triton": layers.convolve_next,
        "mamba_chunk_scan_combined": layers.scan,
        "selective_state_update": layers.scan_next,
    },
    f"{_NORMS}.layernorm_gated": {"layernorm_fn": normalise_gated},
    f"{_NORMS}.fused_norm_gate": {"rms_norm_gated": normalise_by},
    f"{_MODELS}.qwen2_moe": {"fused_gate_sigmoid_mul_add": add_gated_},
    f"{_MODELS}.lfm2": _CONVOLUTIONS,
    f"{_MODELS}.lfm2_moe": _CONVOLUTIONS,
}


def register_operators() -> None:
    """Put the operators where SGLang takes them from while it is imported."""
    for name, function in OPERATORS.items():
        setattr(torch.ops.sgl_kernel, name, function)
