"""The tokenizer rebuilt from GGUF metadata splits, merges and round-trips as the original does."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from sglang_ext.cpu.models.gguf_tokenizer import (
    CONTROL_TOKEN,
    USER_DEFINED_TOKEN,
    GgufVocabulary,
    UnsupportedTokenizerError,
    build_tokenizer,
    tokenizer_config,
)
from support.examples import examples

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGED = ["he", "ll", "hell", "hello", "Ġw", "20"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "2 0"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIAL, *BYTES, *MERGED, "<tool>"]
TYPES = [CONTROL_TOKEN] * len(SPECIAL) + [1] * (len(BYTES) + len(MERGED)) + [USER_DEFINED_TOKEN]

VOCABULARY = GgufVocabulary(
    model="gpt2",
    pre_tokenizer="smollm",
    tokens=TOKENS,
    token_types=TYPES,
    merges=MERGES,
    bos_token_id=1,
    eos_token_id=2,
    unk_token_id=0,
    pad_token_id=2,
    chat_template="{{ messages }}",
)


def tokens_of(text: str, vocabulary: GgufVocabulary = VOCABULARY) -> list[str]:
    return list(build_tokenizer(vocabulary).encode(text).tokens)


def test_merges_apply_in_order() -> None:
    assert tokens_of("hello w") == ["hello", "Ġw"]


def test_digits_stay_single_in_spite_of_a_merge() -> None:
    assert tokens_of("2024") == ["2", "0", "2", "4"]


def test_gpt2_rule_lets_digits_merge() -> None:
    assert tokens_of("2024", dataclasses.replace(VOCABULARY, pre_tokenizer="gpt-2")) == ["20", "2", "4"]


def test_control_and_user_defined_tokens_are_one_token_each() -> None:
    assert tokens_of("<|im_start|>hello<tool><|im_end|>") == [
        "<|im_start|>",
        "hello",
        "<tool>",
        "<|im_end|>",
    ]


def test_only_control_tokens_are_skipped_when_decoding() -> None:
    tokenizer = build_tokenizer(VOCABULARY)
    ids = tokenizer.encode("<|im_start|>hello<tool>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello<tool>"


def test_ids_are_positions() -> None:
    tokenizer = build_tokenizer(VOCABULARY)
    assert tokenizer.get_vocab_size() == len(TOKENS)
    assert [tokenizer.token_to_id(token) for token in TOKENS] == list(range(len(TOKENS)))


@settings(max_examples=examples(200), deadline=None)
@given(st.text(max_size=60))
def test_decoding_inverts_encoding(text: str) -> None:
    tokenizer = build_tokenizer(VOCABULARY)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_config_names_the_special_tokens_and_a_class_that_keeps_the_file() -> None:
    config = tokenizer_config(VOCABULARY, 8192)
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert (config["unk_token"], config["pad_token"]) == ("<|endoftext|>", "<|im_end|>")
    assert config["model_max_length"] == 8192


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"pre_tokenizer": "qwen2"}, "supported are: gpt-2, smollm"),
    ],
)
def test_unknown_rules_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(UnsupportedTokenizerError, match=message):
        dataclasses.replace(VOCABULARY, **change)  # type: ignore[arg-type]


def test_inconsistent_metadata_is_refused() -> None:
    with pytest.raises(ValueError, match="token_type"):
        dataclasses.replace(VOCABULARY, token_types=TYPES[:-1])
    with pytest.raises(ValueError, match="names a token twice"):
        dataclasses.replace(VOCABULARY, tokens=[*TOKENS[:-1], "he"])
    with pytest.raises(ValueError, match="eos_token_id"):
        dataclasses.replace(VOCABULARY, eos_token_id=len(TOKENS))


@pytest.mark.parametrize("merge", ["he", "h ", " e", "h e l"])
def test_a_merge_is_a_pair(merge: str) -> None:
    with pytest.raises(ValueError, match="is not a pair of tokens"):
        build_tokenizer(dataclasses.replace(VOCABULARY, merges=[merge]))
