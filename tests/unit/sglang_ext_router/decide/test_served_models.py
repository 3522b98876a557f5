"""Which model a name means, and which instances fit each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_router.decide.served_models import (
    MAX_NAME_CHARACTERS,
    PairingFacts,
    find_model,
    pairing_refusal,
    parse_alias,
)

PREFILL, DECODE = "http://prefill:1", "http://decode:1"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("llama", 1),
        ("s3://bucket/m", 2),
        ("llama:poems", 1),
        ("s3://bucket/m:poems", 2),
        ("s3://bucket/m:poems:v2", 2),
        ("llama:", 1),
        ("s3://bucket", None),
        (":llama", None),
        ("Llama", None),
        ("llama ", None),
        (":" * 1_000_000, None),
        ("llama:" + "x" * MAX_NAME_CHARACTERS, None),
    ],
)
def test_a_name_means(name: str, found: int | None) -> None:
    assert find_model(name, {"llama": 1, "s3://bucket/m": 2}) == found


@pytest.mark.slow
@given(names=st.sets(st.text("ab:", min_size=1, max_size=4)), asked=st.text("ab:", min_size=1, max_size=6))
def test_the_longest_served_name_before_a_colon_wins(names: set[str], asked: str) -> None:
    fitting = [name for name in names if asked == name or asked.startswith(f"{name}:")]
    assert find_model(asked, {name: name for name in names}) == max(fitting, key=len, default=None)


def facts(url: str, **fields: object) -> PairingFacts:
    told: dict[str, Any] = {
        "model": "m",
        "kv_cache_dtype": "auto",
        "page_size_tokens": 16,
        "transfer_backend": "mooncake",
        "architecture": "Llama",
    }
    return PairingFacts(url, **{**told, **fields})


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, {}, ["KV cache dtype", "fp8_e4m3", "auto"]),
        ({"page_size_tokens": 1}, {}, ["page size", "1", "16"]),
        ({}, {"transfer_backend": "nixl"}, ["transfer backend", "mooncake", "nixl"]),
        (
            {"kv_element_type": "float16"},
            {"kv_element_type": "bfloat16"},
            ["KV cache element type", "float16", "bfloat16"],
        ),
        ({}, {"architecture": "Qwen"}, ["model architecture", "Llama", "Qwen"]),
        (
            {"has_kv_checksums": True},
            {"has_kv_checksums": False},
            ["--disaggregation-enable-kv-checksum", "True", "False"],
        ),
        (
            {"kv_cache_dtype": "auto", "resolved_kv_cache_dtype": "bfloat16"},
            {"kv_cache_dtype": "fp8_e4m3", "resolved_kv_cache_dtype": "fp8_e4m3"},
            ["KV cache dtype", "bfloat16", "fp8_e4m3"],
        ),
        (
            {"side": "prefill", "ranks": 4},
            {"side": "decode", "ranks": 6},
            ["4", "6", "ranks", "neither is a multiple"],
        ),
        (
            {"side": "prefill", "ranks": 2, "states_of_equal_ranks": ("swa",)},
            {"side": "decode", "ranks": 4, "states_of_equal_ranks": ("swa",)},
            ["2", "4", "ranks", "mooncake", "swa"],
        ),
        ({"ranks": 2, "states_of_equal_ranks": ("swa",)}, {"ranks": 4}, ["swa"]),  # each may be either
        (
            {"side": "prefill", "stages": 1},
            {"side": "decode", "stages": 2},
            ["2 pipeline stages", "1"],
        ),
    ],
)
def test_a_pair_that_differs_is_refused(
    prefill: dict[str, object], decode: dict[str, object], words: list[str]
) -> None:
    one, other = facts(PREFILL, **prefill), facts(DECODE, **decode)
    for candidate, serving in ((one, other), (other, one)):
        refusal = pairing_refusal(candidate, [serving])
        assert refusal is not None
        assert "\n" not in refusal
        for word in (*words, PREFILL, DECODE, "m"):
            assert word in refusal


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({}, {}),
        ({"model": "other", "page_size_tokens": 1}, {}),  # never a pair
        ({"kv_cache_dtype": None, "page_size_tokens": None, "transfer_backend": None, "architecture": None}, {}),
        # A checkpoint that asks for what the other one was given
        (
            {"kv_cache_dtype": "auto", "resolved_kv_cache_dtype": "fp8_e4m3"},
            {"kv_cache_dtype": "fp8_e4m3", "resolved_kv_cache_dtype": "fp8_e4m3"},
        ),
        # The same option, of which one tells what it came to
        ({"resolved_kv_cache_dtype": "bfloat16"}, {}),
        ({"side": "prefill", "ranks": 2, "stages": 4}, {"side": "decode", "ranks": 4, "stages": 1}),
        ({"side": "prefill", "ranks": 2, "states_of_equal_ranks": ("swa",)}, {"side": "decode", "ranks": 2}),
        # KV passes between no two of one side
        ({"side": "prefill", "ranks": 2, "states_of_equal_ranks": ("swa",)}, {"side": "prefill", "ranks": 3}),
        (
            {"side": "prefill", "ranks": 2, "transfer_backend": "handshake"},
            {"side": "decode", "ranks": 3, "transfer_backend": "handshake"},
        ),
    ],
)
def test_a_pair_that_agrees_as_far_as_is_known_serves(prefill: dict[str, object], decode: dict[str, object]) -> None:
    one, other = facts(PREFILL, **prefill), facts(DECODE, **decode)
    assert pairing_refusal(one, [other]) is None
    assert pairing_refusal(other, [one]) is None


def test_an_instance_is_not_compared_with_what_it_was() -> None:
    assert pairing_refusal(facts(PREFILL), [facts(PREFILL, page_size_tokens=1)]) is None


def test_all_that_serve_are_looked_at() -> None:
    serving = [facts("http://a:1"), facts("http://b:1"), facts(DECODE, page_size_tokens=64)]
    refusal = pairing_refusal(facts(PREFILL), serving)
    assert refusal is not None
    assert DECODE in refusal


@pytest.mark.parametrize("text", ["", "a", "=m", "a=", "a:b=m", " =m"])
def test_what_is_no_alias(text: str) -> None:
    with pytest.raises(ValueError, match=r"alias|NAME=MODEL"):
        parse_alias(text)


def test_an_alias() -> None:
    assert parse_alias("gpt-4=s3://bucket/m:x=y") == ("gpt-4", "s3://bucket/m:x=y")


def test_revisions_need_not_agree_in_anything() -> None:
    old = PairingFacts(PREFILL, "llama", kv_cache_dtype="auto", transfer_backend="nixl", revision="v1")
    new = PairingFacts(DECODE, "llama", kv_cache_dtype="fp8_e4m3", transfer_backend="mooncake", revision="v2")
    assert pairing_refusal(new, [old]) is None
    assert "KV cache dtype" in (pairing_refusal(new._replace(revision="v1"), [old]) or "")
