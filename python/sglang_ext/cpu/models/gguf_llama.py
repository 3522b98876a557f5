"""A Llama model in a GGUF file, written as a Hugging Face folder (safetensors, config, tokenizer).

llama.cpp stores the query and key projections with the rows of each head interleaved for its own rotary
embedding, names tensors differently and quantises them in blocks; all three are undone here.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from sglang_ext.cpu.models.gguf_tokenizer import GgufVocabulary, build_tokenizer, tokenizer_config

with warnings.catch_warnings():
    # gguf imports sentencepiece, whose SWIG types warn while they are made. Where warnings are errors they would
    # stay half made, and Python would crash at its end.
    warnings.simplefilter("ignore", DeprecationWarning)
    import gguf

FloatArray = npt.NDArray[np.float32]

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class UnsupportedGgufError(ValueError):
    """The GGUF file holds something else than a plain Llama model."""


def hugging_face_name(gguf_name: str) -> str:
    """Return the Hugging Face name of a tensor, e.g. `blk.3.attn_q.weight` → `model.layers.3.self_attn.…`.

    Raises UnsupportedGgufError for a tensor that a plain Llama model does not have.
    """
    if gguf_name in _OUTER_NAMES:
        return _OUTER_NAMES[gguf_name]
    prefix, _, rest = gguf_name.partition(".")
    layer, _, inner = rest.partition(".")
    if prefix != "blk" or not layer.isdecimal() or inner not in _BLOCK_NAMES:
        raise UnsupportedGgufError(f"the GGUF file has a tensor {gguf_name!r}, which a Llama model has not")
    return f"model.layers.{layer}.{_BLOCK_NAMES[inner]}"


def unpermute_from_gguf(weight: FloatArray, head_count: int) -> FloatArray:
    """Return `weight` [rows, columns] with each head's rows in Hugging Face's order (rotary halves apart).

    Hugging Face rotates row i of a head with row i + head_dim / 2, llama.cpp row 2i with row 2i + 1.
    """
    rows, columns = weight.shape
    if rows % (2 * head_count):
        raise ValueError(f"{rows} rows do not divide into {head_count} heads of even size")
    pairs = weight.reshape(head_count, rows // head_count // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


class GgufLlama:
    """A GGUF file of a Llama model, opened for reading; nothing is dequantised before it is asked for."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)
        architecture = self._text("general.architecture")
        if architecture != "llama":
            raise UnsupportedGgufError(f"general.architecture is {architecture!r}, not 'llama'")
        self.head_count = self._integer("llama.attention.head_count")
        self.kv_head_count = self._integer("llama.attention.head_count_kv")
        self.context_tokens = self._integer("llama.context_length")
        self.vocabulary = GgufVocabulary(
            model=self._text("tokenizer.ggml.model"),
            pre_tokenizer=self._text("tokenizer.ggml.pre"),
            tokens=self._field("tokenizer.ggml.tokens"),  # type: ignore[arg-type]
            token_types=self._field("tokenizer.ggml.token_type"),  # type: ignore[arg-type]
            merges=self._field("tokenizer.ggml.merges"),  # type: ignore[arg-type]
            bos_token_id=self._integer("tokenizer.ggml.bos_token_id"),
            eos_token_id=self._integer("tokenizer.ggml.eos_token_id"),
            unk_token_id=self._integer("tokenizer.ggml.unknown_token_id"),
            pad_token_id=self._integer("tokenizer.ggml.padding_token_id"),
            chat_template=self._text("tokenizer.chat_template"),
        )

    @property
    def has_tied_embeddings(self) -> bool:
        """Return whether the output projection is the embedding table."""
        return all(tensor.name != "output.weight" for tensor in self._reader.tensors)

    def tensors(self) -> Iterator[tuple[str, FloatArray]]:
        """Yield (Hugging Face name, float32 weights in Hugging Face's layout) of every tensor."""
        for tensor in self._reader.tensors:
            weight = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            # GGUF lists the fastest dimension first.
            weight = weight.reshape(tuple(int(size) for size in reversed(tensor.shape)))
            if tensor.name.endswith("attn_q.weight"):
                weight = unpermute_from_gguf(weight, self.head_count)
            elif tensor.name.endswith("attn_k.weight"):
                weight = unpermute_from_gguf(weight, self.kv_head_count)
            yield hugging_face_name(tensor.name), np.ascontiguousarray(weight)

    def config(self) -> dict[str, object]:
        """Return the contents of `config.json`."""
        hidden_size = self._integer("llama.embedding_length")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden_size,
            "intermediate_size": self._integer("llama.feed_forward_length"),
            "num_hidden_layers": self._integer("llama.block_count"),
            "num_attention_heads": self.head_count,
            "num_key_value_heads": self.kv_head_count,
            "head_dim": hidden_size // self.head_count,
            "vocab_size": len(self.vocabulary.tokens),
            "max_position_embeddings": self.context_tokens,
            "rope_theta": self._real("llama.rope.freq_base"),
            "rms_norm_eps": round(self._real("llama.attention.layer_norm_rms_epsilon"), 12),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": self.has_tied_embeddings,
            "bos_token_id": self.vocabulary.bos_token_id,
            "eos_token_id": self.vocabulary.eos_token_id,
            "pad_token_id": self.vocabulary.pad_token_id,
            "dtype": "float32",
            "torch_dtype": "float32",
        }

    def generation_config(self) -> dict[str, object]:
        """Return the contents of `generation_config.json`."""
        return {
            "bos_token_id": self.vocabulary.bos_token_id,
            "eos_token_id": self.vocabulary.eos_token_id,
            "pad_token_id": self.vocabulary.pad_token_id,
        }

    def write(self, folder: Path) -> None:
        """Write the Hugging Face folder's files into `folder`, which exists.

        float32 keeps the dequantised values exact; the file is four times the size of the parameter count.
        """
        save_file(dict(self.tensors()), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)  # safetensors leaves it readable by its owner only
        build_tokenizer(self.vocabulary).save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", tokenizer_config(self.vocabulary, self.context_tokens))
        _write_json(folder / "config.json", self.config())
        _write_json(folder / "generation_config.json", self.generation_config())

    def _field(self, key: str) -> object:
        field = self._reader.get_field(key)
        if field is None:
            raise UnsupportedGgufError(f"the GGUF file has no {key!r}")
        contents: object = field.contents()
        return contents

    def _text(self, key: str) -> str:
        return str(self._field(key))

    def _integer(self, key: str) -> int:
        value = self._field(key)
        if not isinstance(value, int):
            raise UnsupportedGgufError(f"the GGUF file's {key!r} is not a whole number")
        return value

    def _real(self, key: str) -> float:
        value = self._field(key)
        if not isinstance(value, float):
            raise UnsupportedGgufError(f"the GGUF file's {key!r} is not a number")
        return value


def _write_json(path: Path, contents: dict[str, object]) -> None:
    path.write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
