"""Undoing llama.cpp's layout: the permutation, the names, and a whole tiny file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from sglang_ext.cpu.models.gguf_llama import (
    FloatArray,
    GgufLlama,
    UnsupportedGgufError,
    gguf,
    hugging_face_name,
    unpermute_from_gguf,
)

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MIDDLE = 3, 1, 4, 12, 8


def permute_for_gguf(weight: FloatArray, head_count: int) -> FloatArray:
    """Return `weight` [rows, columns] with each head's rotary halves interleaved, as llama.cpp has it."""
    rows, columns = weight.shape
    halves = weight.reshape(head_count, 2, rows // head_count // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_unpermute_inverts_permute(heads: int, half: int, columns: int) -> None:
    rows = heads * half * 2
    weight = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    assert np.array_equal(unpermute_from_gguf(permute_for_gguf(weight, heads), heads), weight)
    assert np.array_equal(permute_for_gguf(unpermute_from_gguf(weight, heads), heads), weight)


def test_rows_2i_and_2i_plus_1_become_i_and_i_plus_half() -> None:
    # two heads of four rows; rows are numbered as llama.cpp stores them
    stored = np.arange(8, dtype=np.float32)[:, None]
    assert unpermute_from_gguf(stored, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_rows_must_divide_into_heads() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        unpermute_from_gguf(np.zeros((6, 2), np.float32), 2)


def test_names() -> None:
    assert hugging_face_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hugging_face_name("blk.12.ffn_norm.weight") == "model.layers.12.post_attention_layernorm.weight"
    for strange in ("blk.x.attn_q.weight", "blk.0.attn_q.bias", "rope_freqs.weight"):
        with pytest.raises(UnsupportedGgufError, match=strange):
            hugging_face_name(strange)


def write_tiny_gguf(path: Path, architecture: str = "llama") -> dict[str, FloatArray]:
    """Write a one-layer model and return its tensors in Hugging Face's names and layout."""
    draw = np.random.default_rng(7)
    tokens = ["<|endoftext|>", "<|im_end|>", "ab", *sorted(pre_tokenizers.ByteLevel.alphabet())]

    def random(*shape: int) -> FloatArray:
        return draw.normal(size=shape).astype(np.float32)

    outer = {"model.embed_tokens.weight": random(len(tokens), HIDDEN), "model.norm.weight": random(HIDDEN)}
    inner = {
        "input_layernorm.weight": random(HIDDEN),
        "self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
        "post_attention_layernorm.weight": random(HIDDEN),
        "mlp.gate_proj.weight": random(MIDDLE, HIDDEN),
        "mlp.up_proj.weight": random(MIDDLE, HIDDEN),
        "mlp.down_proj.weight": random(HIDDEN, MIDDLE),
    }
    expected = {**outer, **{f"model.layers.0.{name}": weight for name, weight in inner.items()}}
    stored = {
        "token_embd.weight": outer["model.embed_tokens.weight"],
        "output_norm.weight": outer["model.norm.weight"],
        "blk.0.attn_norm.weight": inner["input_layernorm.weight"],
        "blk.0.attn_q.weight": permute_for_gguf(inner["self_attn.q_proj.weight"], HEADS),
        "blk.0.attn_k.weight": permute_for_gguf(inner["self_attn.k_proj.weight"], KV_HEADS),
        "blk.0.attn_v.weight": inner["self_attn.v_proj.weight"],
        "blk.0.attn_output.weight": inner["self_attn.o_proj.weight"],
        "blk.0.ffn_norm.weight": inner["post_attention_layernorm.weight"],
        "blk.0.ffn_gate.weight": inner["mlp.gate_proj.weight"],
        "blk.0.ffn_up.weight": inner["mlp.up_proj.weight"],
        "blk.0.ffn_down.weight": inner["mlp.down_proj.weight"],
    }
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32("llama.block_count", 1)
    writer.add_uint32("llama.context_length", 64)
    writer.add_uint32("llama.embedding_length", HIDDEN)
    writer.add_uint32("llama.feed_forward_length", MIDDLE)
    writer.add_uint32("llama.attention.head_count", HEADS)
    writer.add_uint32("llama.attention.head_count_kv", KV_HEADS)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(1)
    writer.add_chat_template("{{ messages }}")
    for name, weight in stored.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_a_whole_file_is_written_in_hugging_face_form(tmp_path: Path) -> None:
    expected = write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "out"
    folder.mkdir()
    GgufLlama(tmp_path / "tiny.gguf").write(folder)

    written = load_file(folder / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, weight in expected.items():
        assert np.array_equal(written[name], weight), name
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (3, 1, 4)
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 1e5
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", architecture="gemma")
    with pytest.raises(UnsupportedGgufError, match="'gemma', not 'llama'"):
        GgufLlama(tmp_path / "tiny.gguf")
