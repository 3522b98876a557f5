"""Every decode rank gets each of its heads, and its metadata, from exactly one prefill rank."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.policy.handshake.shards import HeadLayout
from sglang_ext.sglang_plugin.handshake.rank_pairing import Share, cpu_head_layout, shares_of

sizes = st.integers(1, 8)


@given(sizes, sizes, sizes)
def test_cpu_engines_of_any_sizes(kv_heads: int, prefill_ranks: int, decode_ranks: int) -> None:
    check(cpu_head_layout(kv_heads, prefill_ranks), cpu_head_layout(kv_heads, decode_ranks))


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8, 16]))
def test_ranks_that_share_heads(kv_heads: int, prefill_ranks: int, decode_ranks: int) -> None:
    check(HeadLayout(kv_heads, prefill_ranks, kv_heads), HeadLayout(kv_heads, decode_ranks, kv_heads))


def check(prefill: HeadLayout, decode: HeadLayout) -> None:
    shares = [(rank, share) for rank in range(prefill.tp_size) for share in shares_of(rank, prefill, decode)]
    for decode_rank in range(decode.tp_size):
        theirs = [(rank, share) for rank, share in shares if share.decode_rank == decode_rank]
        heads = Counter(
            head for _, share in theirs for head in range(share.first_head, share.first_head + share.head_count)
        )
        assert heads == Counter(decode.heads(decode_rank))
        assert sum(share.has_metadata for _, share in theirs) == 1
        assert {share.sender_count for _, share in theirs} == {len(theirs)}
        for rank, share in theirs:
            held = range(prefill.first_head(rank), prefill.first_head(rank) + prefill.heads_per_rank)
            assert share.head_count == 0 or set(range(share.first_head, share.first_head + share.head_count)) <= set(
                held
            )


def test_three_heads_on_two_decode_ranks() -> None:
    one, two = cpu_head_layout(3, 1), cpu_head_layout(3, 2)
    assert two == HeadLayout(kv_heads=3, tp_size=2, stored_kv_heads=4)
    assert shares_of(0, one, two) == (Share(0, 0, 2, True, 1), Share(1, 2, 1, True, 1))


def test_a_decode_rank_of_padding_gets_metadata_only() -> None:
    shares = shares_of(0, cpu_head_layout(3, 1), cpu_head_layout(3, 4))
    assert shares[3] == Share(3, 3, 0, True, 1)


def test_a_prefill_rank_of_padding_sends_nothing() -> None:
    assert shares_of(3, cpu_head_layout(3, 4), cpu_head_layout(3, 1)) == ()


def test_different_models_are_refused() -> None:
    with pytest.raises(ValueError, match="prefill has 3 KV heads, decode 4"):
        shares_of(0, cpu_head_layout(3, 1), cpu_head_layout(4, 1))
