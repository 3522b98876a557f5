"""AROUND `handle_model_specific_adjustments`: a gpt-oss is served with SGLang's attention for CPUs.

SGLang refuses it there, as that attention has neither windows over a pool of their own nor sinks. With
`cpu.layer_attention` it has both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OURS, _ADMITTED = "torch_native", "intel_amx"


def adjust(stock: Callable[[Any], Any], server_args: Any) -> Any:
    """Let SGLang's check see a backend that it admits; which one is used stays the same."""
    from sglang.srt.arg_groups import model_hook

    backends_of = model_hook.attention_backends_of

    def admitted(view: Any) -> tuple[Any, ...]:
        return tuple(_ADMITTED if backend == _OURS else backend for backend in backends_of(view))

    model_hook.attention_backends_of = admitted
    try:
        return stock(server_args)
    finally:
        model_hook.attention_backends_of = backends_of
