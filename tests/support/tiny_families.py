"""Tiny random models of the families whose prefills are captured: weights and a config, without a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# By architecture, the configuration and what it has beside the sizes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2ForCausalLM": ("Qwen2Config", {}),
    "Qwen3ForCausalLM": ("Qwen3Config", {}),
    "MistralForCausalLM": ("MistralConfig", {"sliding_window": None}),
    "Phi3ForCausalLM": ("Phi3Config", {"sliding_window": None}),
    "Glm4ForCausalLM": ("Glm4Config", {}),
    "Olmo2ForCausalLM": ("Olmo2Config", {}),
    "GraniteForCausalLM": ("GraniteConfig", {}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", _EXPERTS),
    "MixtralForCausalLM": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
}


def tiny_family(architecture: str, folder: Path) -> Path:
    """Write a model of this architecture to `folder`."""
    import torch
    import transformers

    name, more = FAMILIES[architecture]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**_SIZES, **more})
    model = getattr(transformers, architecture)(config).to(torch.float32)
    model.config.dtype = torch.float32
    model.save_pretrained(folder)
    return folder
