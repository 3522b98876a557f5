"""Models that SGLang serves with other attention than they have, or refuses although they can be served.

- AFTER `ModelRunner.load_model`: SGLang serves a Mistral with a sliding window without the window, on every device: the
  tokens behind it are wrong, and nothing says so. The window of a Cohere 2 it makes a token too long.
- AROUND `handle_model_specific_adjustments`: SGLang refuses gpt-oss on its attention for CPUs, which has neither
  windows over a pool of their own nor sinks; with `cpu.layer_attention` it has both. Other models end somewhere in a
  kernel that a CPU does not have: `cpu.unserved_models` names them before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_ext.cpu import unserved_models

_OURS, _ADMITTED = "torch_native", "intel_amx"
_SERVED = "GptOssForCausalLM"

logger = logging.getLogger(__name__)


class UnservedModelError(ValueError):
    """A model that would get wrong tokens, or none. The text is one line."""


def check_windows(result: Any, runner: Any, *arguments: Any, **options: Any) -> Any:
    """Return `result`. Raises UnservedModelError where prompts may be longer than the model's window, and none of its
    layers has one, and where decode would keep prefixes of windows in single rows.

    A window of transformers counts the token itself, and SGLang's only those before it.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    config = runner.model_config
    if getattr(config, "is_hybrid_swa", False) and keeps_single_rows(runner.server_args):
        raise UnservedModelError(
            f"{config.hf_config.architectures[0]} keeps its windows in a pool of their own, of which SGLang's prefix "
            "cache of decode loses rows where pages have one token: replies would be wrong. Give decode --page-size 16 "
            "or leave --disaggregation-decode-enable-radix-cache out."
        )
    window = window_of(config.hf_text_config)
    layers = [module for module in runner.model.modules() if isinstance(module, RadixAttention)]
    has_windows = not layers or any(layer.sliding_window_size > -1 for layer in layers)
    too_long = [layer for layer in layers if layer.sliding_window_size == window]
    for layer in too_long:
        layer.sliding_window_size -= 1
    if too_long:
        logger.info("the windows of %d layers are a token shorter than SGLang makes them", len(too_long))
    if window is not None and not has_windows and config.context_len > window:
        raise UnservedModelError(
            f"{config.hf_config.architectures[0]} attends to {window} tokens, which SGLang leaves out: replies to "
            f"longer prompts would be wrong. --context-length {window} serves the others."
        )
    return result


def keeps_single_rows(server_args: Any) -> bool:
    """Return whether a decode instance keeps prefixes in pages of one token."""
    is_decode = server_args.disaggregation_mode == "decode"
    return is_decode and server_args.disaggregation_decode_enable_radix_cache and (server_args.page_size or 1) == 1


def window_of(config: Any) -> int | None:
    """Return how many tokens a model's layers with a window attend to, by its configuration; None without such
    layers."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return int(window)


def admit_attention(stock: Callable[[Any], Any], server_args: Any) -> Any:
    """Let SGLang's check of a gpt-oss see a backend that it admits; which one is used stays the same.

    Raises UnservedModelError for a model that a CPU cannot compute.
    """
    from sglang.srt.arg_groups import model_hook

    config = model_hook.model_config_of(server_args).hf_config
    architecture = config.architectures[0]
    problem = unserved_models.refusal(architecture, getattr(config, "layers_block_type", None) or ())
    if problem is not None:
        raise UnservedModelError(problem)
    backends_of = model_hook.attention_backends_of

    def admitted(view: Any) -> tuple[Any, ...]:
        backends = tuple(backends_of(view))
        if architecture != _SERVED:
            return backends
        return tuple(_ADMITTED if backend == _OURS else backend for backend in backends)

    model_hook.attention_backends_of = admitted
    try:
        return stock(server_args)
    finally:
        model_hook.attention_backends_of = backends_of
