"""Models, by architecture, and arguments that SGLang's engine for CPUs has not without AMX, and why."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sglang_ext.cpu.host_cache import IO_BACKEND, MEMORY_LAYOUT
from sglang_ext.cpu.import_hook import absent_packages

_SPARSE = "its attention chooses the tokens that it sees, by kernels for GPUs (DSA)"
_STATE = "its layers with a recurrent state have kernels for GPUs only"
_EXPERTS = "its experts have kernels for GPUs only"
_ATTENTION = "SGLang admits no attention for CPUs to it"
_BFLOAT16 = "SGLang normalises its queries and keys in bfloat16, and engines for CPUs compute in float32"
_SHAPES = "SGLang gives its attention queries of a shape that it does not take there"
# Algorithms, by SGLang's names, whose drafts may be chains of tokens of a draft model; NEXTN is EAGLE to it.
_UNDIVIDED = "STANDALONE"
CHAINS = frozenset({"EAGLE", "EAGLE3", _UNDIVIDED})
UNSERVED = {
    "AfmoeForCausalLM": _EXPERTS,
    "DeepseekV32ForCausalLM": _SPARSE,
    "DeepseekV4ForCausalLM": "its attention to compressed latent rows has kernels for GPUs only",
    "Exaone4ForCausalLM": _ATTENTION,
    "Gemma4ForCausalLM": _ATTENTION,
    "Gemma4ForConditionalGeneration": _ATTENTION,
    "FalconMambaForCausalLM": _STATE,
    "GlmMoeDsaForCausalLM": _SPARSE,
    "HYV3ForCausalLM": "SGLang's path for its experts gives other tokens there",
    "HunYuanDenseV1ForCausalLM": _SHAPES,
    "HunYuanMoEV1ForCausalLM": _SHAPES,
    "KimiLinearForCausalLM": _STATE,
    "Llama4ForCausalLM": _BFLOAT16,
    "Llama4ForConditionalGeneration": _BFLOAT16,
    "MambaForCausalLM": _STATE,
    "MiniMaxM2ForCausalLM": "its normalisation of queries and keys has a kernel for GPUs only",
}


# With these kinds of layers.
UNSERVED_LAYERS = {"NemotronHForCausalLM": ("moe", "its experts have an activation that SGLang has on GPUs only")}


def refusal(architecture: str | None, layer_kinds: Collection[str] = ()) -> str | None:
    """Return why a CPU does not serve a model with these kinds of layers, and what to do; None where it may."""
    reason = UNSERVED.get(architecture or "")
    kind, why = UNSERVED_LAYERS.get(architecture or "", ("", ""))
    if kind in layer_kinds:
        reason = why
    if reason is None or _has_kernels():
        return None
    return f"{architecture} does not run on a CPU without AMX ({reason}); serve it on a GPU"


def argument_conflict(server_args: Any) -> str | None:
    """Return which of these SGLang arguments a CPU does not take, why, and what to do; None where it may."""
    found = None if server_args.device != "cpu" or _has_kernels() else unserved_argument(server_args)
    if found is None:
        return None
    argument, reason = found
    way_out = "choose another value, leave it out, or serve on a GPU"
    return f"{argument} does not run on a CPU without AMX ({reason}); {way_out}"


def unserved_argument(server_args: Any) -> tuple[str, str] | None:
    """Return which of these SGLang arguments a CPU without AMX does not take, and why; None for none."""
    algorithm = server_args.speculative_algorithm
    if algorithm is not None and algorithm not in CHAINS:
        return f"--speculative-algorithm {algorithm}", "its drafts have kernels for GPUs only"
    if algorithm == _UNDIVIDED and server_args.disaggregation_mode != "null":
        return f"--speculative-algorithm {algorithm}", "SGLang's decode has nothing to begin its drafts with"
    if algorithm is not None and server_args.speculative_eagle_topk != 1:
        topk = server_args.speculative_eagle_topk
        return f"--speculative-eagle-topk {topk}", "drafts are chains there, which is 1, not trees"
    if server_args.hicache_io_backend != IO_BACKEND and server_args.enable_hierarchical_cache:
        return f"--hicache-io-backend {server_args.hicache_io_backend}", "it copies by a kernel for GPUs"
    if server_args.hicache_mem_layout != MEMORY_LAYOUT and server_args.enable_hierarchical_cache:
        return f"--hicache-mem-layout {server_args.hicache_mem_layout}", "it is copied by a kernel for GPUs"
    if server_args.kv_cache_dtype not in {"auto", "bf16", "bfloat16", "fp8_e4m3"}:
        return f"--kv-cache-dtype {server_args.kv_cache_dtype}", "SGLang has KV of this type on GPUs only"
    return None


def _has_kernels() -> bool:
    """Return whether SGLang's build for CPUs with AMX is installed, which has some of the kernels."""
    return not absent_packages(("sgl_kernel",))
