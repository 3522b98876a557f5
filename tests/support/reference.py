"""What Hugging Face's own `generate` answers: the reference for greedy tokens."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

from support.tiny_model import STANDARD_SHAPE, TinyModelShape, tiny_model

FIRST_ORDINARY_TOKEN = 8


def random_prompt(length_tokens: int, seed: int, shape: TinyModelShape = STANDARD_SHAPE) -> list[int]:
    """Token ids without special tokens."""
    generator = random.Random(seed)
    return [generator.randrange(FIRST_ORDINARY_TOKEN, shape.vocabulary) for _ in range(length_tokens)]


def greedy_reference(prompt: Sequence[int], new_tokens: int, shape: TinyModelShape = STANDARD_SHAPE) -> list[int]:
    """Greedy continuation by transformers in float32, end-of-sequence ignored."""
    import torch

    # An end token would stop the reference earlier than `ignore_eos` stops SGLang.
    settings = {"do_sample": False, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    model = _model(shape)
    ids = torch.tensor([list(prompt)])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@cache
def _model(shape: TinyModelShape) -> Any:
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(tiny_model(shape), dtype=torch.float32).eval()
    # `min_new_tokens` would forbid the end token, and SGLang's greedy choice may be that token.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 1
    return model


def logprobs_reference(prompt: Sequence[int], shape: TinyModelShape = STANDARD_SHAPE) -> Any:
    """Log-probabilities of every token of the vocabulary behind each position: float32, [len(prompt), vocabulary]."""
    import torch

    with torch.no_grad():
        logits = _model(shape)(torch.tensor([list(prompt)])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)
