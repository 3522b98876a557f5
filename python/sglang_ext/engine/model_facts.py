"""Facts of a model that launch flags depend on, read from its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class ModelFacts:
    """Shape of the KV cache, and the model's context."""

    layers: int
    kv_heads: int
    head_dim: int
    context_tokens: int | None
    latent_size: int | None = None  # numbers of a latent row (MLA), which takes the place of keys and values

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers, in float32."""
        return self.layers * (self.latent_size or 2 * self.kv_heads * self.head_dim) * FLOAT32_BYTES


def parse_model_config(config: Mapping[str, Any]) -> ModelFacts | None:
    """Facts from the contents of a Hugging Face config.json; None when it has another shape."""
    text = config.get("text_config", config)
    try:
        heads = int(text["num_attention_heads"])
        latent_rank = text.get("kv_lora_rank")
        return ModelFacts(
            layers=int(text["num_hidden_layers"]),
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or text["hidden_size"] // heads),
            context_tokens=int(text["max_position_embeddings"]) if "max_position_embeddings" in text else None,
            latent_size=None if latent_rank is None else int(latent_rank) + int(text["qk_rope_head_dim"]),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError):
        return None


def read_model_facts(model_path: str) -> ModelFacts | None:
    """Facts of a model in a local folder; None for a model that is not local or not understood."""
    config = _read_config(model_path)
    return None if config is None else parse_model_config(config)


def read_architecture(model_path: str) -> str | None:
    """The class of a model in a local folder, as Transformers names it; None where nothing says so."""
    names = (_read_config(model_path) or {}).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None


def has_tied_embeddings(model_path: str) -> bool:
    """Return whether the config of a model in a local folder says that its head is its embeddings."""
    return bool((_read_config(model_path) or {}).get("tie_word_embeddings"))


def _read_config(model_path: str) -> dict[str, Any] | None:
    try:
        config = json.loads(Path(model_path, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None
