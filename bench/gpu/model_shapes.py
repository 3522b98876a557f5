"""Models by their shape alone: a config for `--load-format dummy`, and the least time that a prefill can take.

    floor = max(bytes that must be read / read bandwidth, operations / rate of dense bfloat16 products)

Both ceilings are measured in the run that uses them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Rates(Protocol):
    """Describes the measured rates of a device (`measure.Ceilings`)."""

    @property
    def read_bytes_per_s(self) -> float: ...

    @property
    def operations_per_s(self) -> float: ...


@dataclass(frozen=True)
class Shape:
    """A dense decoder with grouped-query attention and a gated network, without biases' few bytes."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    is_tied: bool = False
    element_bytes: int = 2

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def body_parameters(self) -> int:
        """Matrices that every token goes through."""
        attended = self.hidden * self.hidden * 2 + self.hidden * self.kv_heads * self.head_size * 2
        return self.layers * (attended + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """The matrix that the last token of each request goes through."""
        return self.hidden * self.vocabulary

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * self.element_bytes


def prefill_bytes(shape: Shape, length_tokens: int, requests: int, prefix_tokens: int = 0) -> float:
    """Weights once, prefixes' KV read, new KV written, the rows of the embedding."""
    tokens = length_tokens * requests
    weights = (shape.body_parameters + shape.head_parameters) * shape.element_bytes
    kv = (requests * prefix_tokens + tokens) * shape.kv_bytes_per_token
    return weights + kv + tokens * shape.hidden * shape.element_bytes


def prefill_operations(shape: Shape, length_tokens: int, requests: int, prefix_tokens: int = 0) -> float:
    """Two per parameter and token; scores and weighted sums over what each token sees."""
    tokens = length_tokens * requests
    products = 2.0 * (tokens * shape.body_parameters + requests * shape.head_parameters)
    seen = requests * (length_tokens * prefix_tokens + length_tokens * (length_tokens + 1) / 2)
    return products + 4.0 * seen * shape.hidden * shape.layers


def floor_s(shape: Shape, ceilings: Rates, length_tokens: int, requests: int, prefix_tokens: int = 0) -> float:
    """Seconds of a batch of `requests` prompts of `length_tokens` new tokens each."""
    return max(
        prefill_bytes(shape, length_tokens, requests, prefix_tokens) / ceilings.read_bytes_per_s,
        prefill_operations(shape, length_tokens, requests, prefix_tokens) / ceilings.operations_per_s,
    )


SHAPES = {
    "qwen2.5-7b": Shape(3584, 28, 28, 4, 18944, 152064),
    "qwen2.5-14b": Shape(5120, 48, 40, 8, 13824, 152064),
    "qwen2.5-32b": Shape(5120, 64, 40, 8, 27648, 152064),
    "tiny": Shape(256, 4, 4, 2, 512, 4096, element_bytes=4),
}
CONTEXT_TOKENS = 32768


def write_model(name: str, folder: Path) -> Shape:
    """Write the config of a Qwen2 model without weights or tokenizer. Raises KeyError for an unknown name."""
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.is_tied,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": CONTEXT_TOKENS,
        "max_window_layers": shape.layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": "float32" if shape.element_bytes == 4 else "bfloat16",
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return shape
