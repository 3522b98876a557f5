"""Models by their shape alone: a config for `--load-format dummy`, and the sizes that the floor needs."""

from __future__ import annotations

import json
from pathlib import Path

from gpu.floor import Shape

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
