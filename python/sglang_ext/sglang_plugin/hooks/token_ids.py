"""Token ids of a client are of the model's vocabulary: stock SGLang ends the whole engine at one that is not.

An id beyond the vocabulary is an error of the forward pass in a prompt, and of the sampler as a stop token beside
`min_new_tokens`; on a GPU one that nothing recovers from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def validate_one_request(stock: Callable[..., None], manager: Any, request: Any, input_ids: Any) -> None:
    """AROUND `TokenizerManager._validate_one_request(obj, input_ids)`: ValueError (400) for ids that are none."""
    size = manager.model_config.vocab_size
    if getattr(request, "input_ids", None) is not None and input_ids is not None:
        check_token_ids(input_ids, size, "the prompt")
    parameters = getattr(request, "sampling_params", None)
    stop_ids = parameters.get("stop_token_ids") if isinstance(parameters, dict) else None
    if stop_ids:
        if not all(type(token) is int for token in stop_ids):
            raise ValueError("stop_token_ids must be a list of integers")
        check_token_ids(stop_ids, size, "stop_token_ids")
    stock(manager, request, input_ids)


def check_token_ids(ids: Any, vocabulary_size: int, where: str) -> None:
    """ValueError for an id outside of `[0, vocabulary_size)`; `where` says what they belong to."""
    if not len(ids):
        return
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= vocabulary_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"the token id {wrong} in {where} is not one of the model's 0 to {vocabulary_size - 1}")
