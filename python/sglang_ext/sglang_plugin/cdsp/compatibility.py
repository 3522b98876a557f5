"""Which SGLang arguments and models a member of a long pool works with. Found before it serves, said in one line."""

from __future__ import annotations

from typing import Any

# Dense decoders whose every layer attends to everything before a token.
SUPPORTED_ARCHITECTURES = frozenset(
    {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"},
)


def conflict(server_args: Any) -> str | None:
    """Why these SGLang arguments and `--cdsp-coordinator` exclude each other; None when they do not."""
    for is_conflicting, argument, reason in (
        (server_args.pp_size > 1, "--pp-size", "a member has all layers"),
        (server_args.dp_size > 1, "--dp-size", "a member has one scheduler"),
        (server_args.disable_radix_cache, "--disable-radix-cache", "what others have computed is found in it"),
        (server_args.speculative_algorithm is not None, "--speculative-algorithm", "the draft model has KV of its own"),
        (server_args.kv_cache_dtype not in {"auto", "bf16", "bfloat16"}, "--kv-cache-dtype", "KV travels unscaled"),
    ):
        if is_conflicting:
            return f"{argument} does not go with --cdsp-coordinator ({reason})"
    return None


def architecture_conflict(name: str | None) -> str | None:
    """Why a model of this architecture cannot be computed by several instances; None when it can."""
    if name in SUPPORTED_ARCHITECTURES:
        return None
    known = ", ".join(sorted(SUPPORTED_ARCHITECTURES))
    return f"{name or 'a model without a name'} does not go with --cdsp-coordinator (these do: {known})"


def model_conflict(model_config: Any) -> str | None:
    """The same of SGLang's ModelConfig, which tells more."""
    architectures = getattr(model_config.hf_config, "architectures", None)
    name = architectures[0] if architectures else None
    if getattr(model_config, "sliding_window_size", None):
        return f"{name} with a sliding window does not go with --cdsp-coordinator (it attends to a part of its KV)"
    return architecture_conflict(name)
