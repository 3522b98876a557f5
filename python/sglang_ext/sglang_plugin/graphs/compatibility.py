"""Which engines can capture their prefills by length and batch size. What cannot is said in one line."""

from __future__ import annotations

from typing import Any

from sglang_ext.sglang_plugin.cdsp.compatibility import SUPPORTED_ARCHITECTURES

_TOKENS_HEADS_SIZE = 3


def conflict(model_runner: Any) -> str | None:
    """Why the prefills of this model runner are not captured; None when they can be."""
    config, arguments = model_runner.model_config, model_runner.server_args
    names = getattr(config.hf_config, "architectures", None) or ["a model without a name"]
    pool = model_runner.token_to_kv_pool
    for is_conflicting, reason in (
        (names[0] not in SUPPORTED_ARCHITECTURES, f"{names[0]} is not one of {', '.join(SUPPORTED_ARCHITECTURES)}"),
        (bool(getattr(config, "sliding_window_size", None)), f"{names[0]} has a sliding window"),
        (arguments.tp_size > 1, "--tp-size: an engine of several ranks is not captured yet"),
        (arguments.pp_size > 1, "--pp-size: a pipeline stage is not captured"),
        (arguments.enable_dp_attention, "--enable-dp-attention: its ranks build batches of their own"),
        (bool(arguments.enable_lora), "--enable-lora: adapters differ by request"),
        (arguments.speculative_algorithm is not None, "--speculative-algorithm: the draft reads other states"),
        (
            bool(arguments.enable_hierarchical_cache),
            "--enable-hierarchical-cache: a captured pass cannot wait for the KV of its layers",
        ),
        (
            bool(getattr(arguments, "enable_deterministic_inference", False)),
            "--enable-deterministic-inference: sums are in another order than on the ordinary path",
        ),
        (_token_dimensions(pool) != _TOKENS_HEADS_SIZE, "SGLANG_USE_HND_KVCACHE: KV is not stored token by token"),
        (model_runner.kv_cache_dtype != model_runner.dtype, "--kv-cache-dtype: KV is stored in another type"),
        (
            getattr(pool, "requires_physical_write_loc", False),
            "the unified memory pool: slots are renamed between passes",
        ),
    ):
        if is_conflicting:
            return reason
    return None


def _token_dimensions(pool: Any) -> int:
    """Dimensions of a layer's keys."""
    get_key_buffer = getattr(pool, "get_key_buffer", None)
    return _TOKENS_HEADS_SIZE if get_key_buffer is None else int(get_key_buffer(pool.start_layer).dim())
