"""A random Llama, large enough that its prefill is computation, small enough for one core."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RandomLlama:
    """Shape of the model. It has no tokenizer: prompts are token ids."""

    layers: int = 6
    hidden: int = 384
    heads: int = 6
    kv_heads: int = 2
    vocabulary: int = 4096
    context_tokens: int = 8192
    seed: int = 0

    def __str__(self) -> str:
        return f"random Llama, {self.layers} layers, hidden {self.hidden}, {self.heads}/{self.kv_heads} heads"


def build_random_llama(shape: RandomLlama, folder: Path) -> Path:
    """Write the model into `folder` (float32 safetensors) and return it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(shape.seed)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context_tokens,
        bos_token_id=0,
        eos_token_id=1,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder
