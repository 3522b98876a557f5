"""Describes what a prefill of several pipeline stages needs in addition to SGLang's: a head on the last one, KV on its
own layers.

A head: SGLang's Llama with tied embeddings takes those of its own stage for the head, and only the first stage has
them. Qwen's models give the last stage a head of its own, as is done here; others with tied embeddings are refused.

Layers: SGLang takes a stage whose number of layers does not divide the model's for a whole model whose decode instance
has a draft model besides, and its values arrive in layers of other stages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

_ATTRIBUTE = "_sglang_ext_tied_head"
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Architectures whose last stage has a head although the embeddings are tied: Llama's class, and those with their own.
WITH_HEAD = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


def tied_head_problem(architecture: str | None, *, is_tied: bool) -> str | None:
    """Return why a model cannot run in stages; None where it can, as far as its config shows."""
    if not is_tied or architecture is None or architecture in WITH_HEAD:
        return None
    return f"--pp-size: {architecture} with tied embeddings has no head on the last stage (tie_word_embeddings)"


def init_model(stock: Callable[..., None], model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND `LlamaForCausalLM.__init__(config, ...)`: on a last stage that is not the first, an untied head."""
    if not (config.tie_word_embeddings and _is_last_of_several()):
        stock(model, config, *args, **kwargs)
        return
    untied = copy.copy(config)
    untied.tie_word_embeddings = False
    stock(model, untied, *args, **kwargs)
    setattr(model, _ATTRIBUTE, True)


def load_weights(stock: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Any]]) -> Any:
    """AROUND `LlamaForCausalLM.load_weights(weights)`."""
    return stock(model, head_from_embeddings(weights) if getattr(model, _ATTRIBUTE, False) else weights)


def head_from_embeddings(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The weights of a model with tied embeddings for a stage that has the head, and not the embeddings."""
    for name, weight in weights:
        if name != _HEAD:
            yield (_HEAD if name == _EMBEDDINGS else name), weight


def layer_pointers(
    stock: Callable[..., Any], manager: Any, source: Sequence[int], target: Sequence[int]
) -> tuple[list[int], list[int], list[int], list[int], int]:
    """AROUND `CommonKVManager.get_mha_kv_ptrs_with_pp(src, dst)`: keys and values of the stage's layers.

    Asked by the threads that send, once for each chunk.
    """
    if manager.pp_size == 1 or len(source) == len(target):
        pointers: tuple[list[int], list[int], list[int], list[int], int] = stock(manager, source, target)
        return pointers
    from sglang.srt.runtime_context import process_model_config

    model_layers = process_model_config().num_hidden_layers
    return stage_pointers(source, target, manager.kv_args.prefill_start_layer, model_layers)


def stage_pointers(
    source: Sequence[int], target: Sequence[int], first_layer: int, model_layers: int
) -> tuple[list[int], list[int], list[int], list[int], int]:
    """Keys and values of a stage's layers, those of the same layers in all of the model's, and their number.

    `source` has the stage's keys, then its values; `target` the model's, and behind them those of a draft model, if
    any.
    """
    layers = len(source) // 2
    target_layers = min(len(target) // 2, model_layers)
    end = first_layer + layers
    keys, values = list(target[first_layer:end]), list(target[target_layers + first_layer : target_layers + end])
    return list(source[:layers]), list(source[layers:]), keys, values, layers


def _is_last_of_several() -> bool:
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().pp_group
    return bool(group.world_size > 1 and group.is_last_rank)
