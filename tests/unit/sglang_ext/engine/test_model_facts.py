"""Model facts from config.json, and what they imply for memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.engine.model_facts import ModelFacts, parse_model_config, read_model_facts

LLAMA = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 2048,
}


def test_grouped_query_model() -> None:
    assert parse_model_config(LLAMA) == ModelFacts(layers=2, kv_heads=2, head_dim=16, context_tokens=2048)


def test_every_head_keeps_kv_where_no_number_is_given() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    facts = parse_model_config(config)
    assert facts is not None
    assert facts.kv_heads == 4


def test_explicit_head_dim_wins() -> None:
    facts = parse_model_config({**LLAMA, "head_dim": 128})
    assert facts is not None
    assert facts.head_dim == 128


def test_language_part_of_a_multimodal_model() -> None:
    assert parse_model_config({"text_config": LLAMA, "vision_config": {}}) == parse_model_config(LLAMA)


def test_kv_bytes_per_token() -> None:
    assert ModelFacts(layers=30, kv_heads=3, head_dim=64, context_tokens=None).kv_bytes_per_token == 46080


def test_latent_rows_take_the_place_of_keys_and_values() -> None:
    facts = parse_model_config({**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert facts is not None
    assert facts.kv_bytes_per_token == 2 * (512 + 64) * 4


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": "many"}, {**LLAMA, "num_attention_heads": 0}])
def test_unknown_shape_is_none(config: dict[str, Any]) -> None:
    assert parse_model_config(config) is None


def test_reading(tmp_path: Path) -> None:
    assert read_model_facts(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("[]")
    assert read_model_facts(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("{")
    assert read_model_facts(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_model_facts(str(tmp_path)) == parse_model_config(LLAMA)
