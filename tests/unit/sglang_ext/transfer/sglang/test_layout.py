"""SGLang's pool as rows of token slots; each decode rank gets each of its heads from exactly one prefill rank."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.transfer.decide.shards import HeadLayout, KVShard
from sglang_ext.transfer.pool_layout import ItemBuffer, StatePart, plan_rows
from sglang_ext.transfer.sglang.layout import (
    Mamba2Convolution,
    Share,
    cpu_head_layout,
    gpu_head_layout,
    is_spread_alike,
    latent_layout,
    pool_layout,
    shares_of,
    state_slots,
    token_slots,
)


class StateType(StrEnum):
    """The kinds of states, named as in SGLang."""

    MAMBA = "mamba"
    SWA = "swa"


def arguments(page_size: int, token_bytes: int = 64, tokens: int = 160) -> Any:
    return SimpleNamespace(
        kv_cache_dtype_str="float32",
        page_size=page_size,
        num_draft_entries=0,
        kv_data_ptrs=[1000, 2000, 3000, 4000],  # K of two layers, then V
        kv_data_lens=[token_bytes * tokens] * 4,
        kv_item_lens=[token_bytes * page_size] * 4,
        aux_data_ptrs=[7000, 8000],
        aux_data_lens=[8 * 16, 8 * 64],
        aux_item_lens=[16, 64],
        state_types=[],
        state_data_ptrs=[],
        state_data_lens=[],
        state_item_lens=[],
        state_dim_per_tensor=[],
        state_slice_outer_counts=[],
        state_conv_shard_groups=[],
    )


def with_states(sizes: list[int], groups: list[list[int] | None], rows: list[int]) -> Any:
    """Two buffers of recurrent states whose divided axis has these sizes, with 4 bytes for each of it and each row."""
    pools = arguments(16)
    pools.state_types, pools.state_data_ptrs = [StateType.MAMBA], [[5000, 6000]]
    item_bytes = [4 * max(1, size) * count for size, count in zip(sizes, rows, strict=True)]
    pools.state_data_lens, pools.state_item_lens = [[10 * size for size in item_bytes]], [item_bytes]
    pools.state_dim_per_tensor, pools.state_conv_shard_groups = [sizes], [groups]
    pools.state_slice_outer_counts = [rows]
    return pools


def test_fp8_travels_as_bytes_to_pools_of_its_type() -> None:
    """One byte a number, and one scale for a whole layer, which both sides have from the weights."""
    stored = arguments(16, token_bytes=16)
    stored.kv_cache_dtype_str = "fp8_e4m3"
    layout = pool_layout(stored, HeadLayout(2, 1, 2), rank=0)
    assert layout.layers[0] == (ItemBuffer(1000, 16, 160), ItemBuffer(3000, 16, 160))
    other = arguments(1, token_bytes=16)
    other.kv_cache_dtype_str = "fp8_e4m3"
    assert layout.layout_mismatch(pool_layout(other, HeadLayout(2, 1, 2), rank=0)) is None
    for kind in ("fp8_e5m2", "bfloat16"):
        other.kv_cache_dtype_str = kind
        problem = layout.layout_mismatch(pool_layout(other, HeadLayout(2, 1, 2), rank=0))
        assert problem == f"KV is fp8_e4m3 here and {kind} at the peer"


def with_draft(entries: int, item_bytes: int = 32, page_size: int = 16) -> Any:
    """Make arguments as SGLang does: K of two layers, then V, and behind them the draft model's."""
    pools = arguments(page_size)
    pools.num_draft_entries = entries
    pools.kv_data_ptrs += [10_000 + 1000 * entry for entry in range(entries)]
    pools.kv_data_lens += [item_bytes * 160] * entries
    pools.kv_item_lens += [item_bytes * page_size] * entries
    return pools


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_draft_s_rows_are_one_layer_behind_the_model_s(page_size: int) -> None:
    layout = pool_layout(with_draft(4, page_size=page_size), HeadLayout(4, 2, 4), rank=1)
    assert layout.layers[:2] == pool_layout(arguments(page_size), HeadLayout(4, 2, 4), rank=1).layers
    assert layout.layers[2:] == (tuple(ItemBuffer(10_000 + 1000 * entry, 32, 160) for entry in range(4)),)
    latent = pool_layout(with_draft(1, page_size=page_size), latent_layout(2), rank=1, is_latent=True)
    assert [len(layer) for layer in latent.layers] == [1] * 5
    assert latent.layers[4] == (ItemBuffer(10_000, 32, 160),)
    assert layout.has_draft
    assert latent.has_draft


def test_ranks_cut_a_draft_s_rows_as_the_model_s() -> None:
    """Two ranks send to one: the second half of each row is the second rank's, for any number of heads of the draft."""
    one = pool_layout(with_draft(2, item_bytes=64), HeadLayout(4, 1, 4), rank=0)
    for rank in range(2):
        layout = pool_layout(with_draft(2), HeadLayout(4, 2, 4), rank)
        shard = KVShard((), layout.first_head, layout.head_count, 2, 1)
        rows = plan_rows(layout, one, shard, np.array([5], np.uint32), np.array([7], np.uint32))
        assert [(copy.source_address, copy.target_address, copy.length_bytes) for copy in rows] == [
            (10_000, 10_000 + 32 * rank, 32),
            (11_000, 11_000 + 32 * rank, 32),
        ]


def test_a_draft_of_other_size_or_on_one_side_is_refused() -> None:
    heads = HeadLayout(2, 1, 2)
    drafted, plain = pool_layout(with_draft(2), heads, rank=0), pool_layout(arguments(16), heads, rank=0)
    assert drafted.layout_mismatch(pool_layout(with_draft(2, page_size=1), heads, rank=0)) is None
    for layout, peer in ((drafted, plain), (plain, drafted)):
        problem = layout.layout_mismatch(peer)
        assert problem is not None
        assert problem.startswith("one of the two has a draft model")
    for other in (with_draft(2, item_bytes=64), with_draft(4)):
        assert drafted.layout_mismatch(pool_layout(other, heads, rank=0)) == (
            "one head of one token takes another number of bytes at the peer"
        )


@pytest.mark.parametrize(
    ("draft", "model", "is_alike"),
    [
        (HeadLayout(4, 2, 4), HeadLayout(8, 2, 8), True),
        (HeadLayout(1, 2, 1), HeadLayout(8, 2, 8), False),  # each rank has all of the draft's one head
        (HeadLayout(8, 2, 8), latent_layout(2), False),  # one rank sends the latent rows, for all
        (latent_layout(4), latent_layout(4), True),
        (HeadLayout(3, 2, 4), HeadLayout(6, 2, 6), True),
        (HeadLayout(2, 4, 2), HeadLayout(4, 4, 4), False),
    ],
)
def test_which_drafts_are_spread_as_their_model(draft: HeadLayout, model: HeadLayout, is_alike: bool) -> None:
    assert is_spread_alike(draft, model) is is_alike


@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_are_tokens_whatever_the_page(page_size: int) -> None:
    layout = pool_layout(arguments(page_size), HeadLayout(3, 2, 4), rank=1)
    assert layout.layers == (
        (ItemBuffer(1000, 64, 160), ItemBuffer(3000, 64, 160)),
        (ItemBuffer(2000, 64, 160), ItemBuffer(4000, 64, 160)),
    )
    assert (layout.first_head, layout.head_count, layout.first_layer) == (2, 2, 0)
    assert layout.aux == (ItemBuffer(7000, 16, 8), ItemBuffer(8000, 64, 8))
    stage = pool_layout(arguments(page_size), HeadLayout(3, 2, 4), rank=1, first_layer=5)
    assert (stage.first_layer, stage.layers) == (5, layout.layers)


def test_latent_rows_and_states_have_places_of_their_own() -> None:
    """A layer of a model with latent attention is one buffer; the slots of requests are items, one kind of state."""
    pools = arguments(16)
    pools.state_types = [StateType.MAMBA]
    pools.state_data_ptrs, pools.state_data_lens, pools.state_item_lens = [[5000, 6000]], [[800, 800]], [[80, 80]]
    pools.state_dim_per_tensor, pools.state_conv_shard_groups = [[5, 4]], [[None, None]]
    pools.state_slice_outer_counts = [[1, 1]]
    layout = pool_layout(pools, latent_layout(2), rank=1, is_latent=True)
    assert layout.layers == tuple((ItemBuffer(address, 64, 160),) for address in (1000, 2000, 3000, 4000))
    assert (layout.first_head, layout.head_count) == (0, 1)
    assert layout.states == ((ItemBuffer(5000, 80, 10), ItemBuffer(6000, 80, 10)),)
    assert set(layout.states[0]) < set(layout.buffers)


@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_of_windows_are_those_of_tokens_and_cut_by_heads(page_size: int) -> None:
    pools = arguments(page_size)
    pools.state_types = [StateType.MAMBA, StateType.SWA]
    pools.state_data_ptrs, pools.state_data_lens = [[5000], [6000, 7000]], [[800], [3200, 3200]]
    pools.state_item_lens = [[80], [20 * page_size] * 2]
    pools.state_dim_per_tensor, pools.state_slice_outer_counts = [[0], []], [[1], []]
    pools.state_conv_shard_groups = [[None], []]
    layout = pool_layout(pools, HeadLayout(4, 2, 4), rank=1)
    assert layout.cut_states == (False, True)
    assert layout.states == ((ItemBuffer(5000, 80, 10),), (ItemBuffer(6000, 20, 160), ItemBuffer(7000, 20, 160)))
    indices = [np.array([3], np.int32), np.array([2, 0], np.int32)]
    states, windows = state_slots(indices, layout.cut_states, page_size)
    assert states.tolist() == [3]
    assert windows.tolist() == [*range(2 * page_size, 3 * page_size), *range(page_size)]
    # Their layers have other heads, which do not go into those of the others: only ranks of equal number agree.
    pools.state_item_lens = [[80], [21 * page_size] * 2]
    assert pool_layout(pools, HeadLayout(4, 2, 4), rank=1).cut_states == (False, False)
    assert state_slots((), layout.cut_states, page_size) == ()


def test_recurrent_states_are_divided_in_their_parts() -> None:
    pools = with_states([8, 6], [[4, 4, 8], None], [1, 1])  # queries, keys and values of a convolution; heads
    layout = pool_layout(pools, HeadLayout(4, 2, 4), rank=1)
    first, second = layout.state_parts[0]
    assert first == (StatePart(0, 8), StatePart(8, 8), StatePart(16, 16))
    assert second == (StatePart(0, 24),)
    assert (layout.rank, layout.ranks, layout.cut_states) == (1, 2, (False,))
    in_rows = pool_layout(with_states([8, 6], [[8, 8], None], [2, 1]), HeadLayout(4, 2, 4), rank=0)
    assert in_rows.state_parts[0][0] == tuple(StatePart(start, 16) for start in (0, 16, 32, 48))
    short = pool_layout(with_states([8, 8], [None, None], [1, 1]), HeadLayout(4, 2, 4), rank=0)
    assert short.state_parts[0] == ((StatePart(0, 32),), (StatePart(0, 32),))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 4])
def test_states_of_mamba_2_are_divided_as_its_configuration_says(groups: int, ranks: int) -> None:
    """Its convolution holds inputs, B and C; each rank has the one group, or its own."""
    convolution = Mamba2Convolution(inputs=32, groups=groups, state_size=3)
    group_size = 3 if groups == 1 else 12 // ranks
    pools = with_states([32 // ranks + 2 * group_size, 8 // ranks], [None, None], [1, 1])
    layout = pool_layout(pools, HeadLayout(4, ranks, 4), rank=ranks - 1, convolution=convolution)
    first, second = layout.state_parts[0]
    assert [(part.length_bytes, part.is_on_all_ranks) for part in first] == [
        (128 // ranks, False),
        (4 * group_size, groups == 1),
        (4 * group_size, groups == 1),
    ]
    assert second == (StatePart(0, 32 // ranks),)
    on_one = with_states([32 + 6 * groups, 8], [None, None], [1, 1])
    on_one.kv_item_lens = [ranks * size for size in on_one.kv_item_lens]
    on_one.kv_data_lens = [ranks * size for size in on_one.kv_data_lens]
    whole = pool_layout(on_one, HeadLayout(4, 1, 4), 0, convolution=convolution)
    assert layout.layout_mismatch(whole) is None
    assert pool_layout(pools, HeadLayout(4, ranks, 4), rank=0).state_parts == ()
    other = Mamba2Convolution(inputs=31, groups=groups, state_size=3)  # not what the buffers hold
    assert pool_layout(pools, HeadLayout(4, ranks, 4), rank=0, convolution=other).state_parts == ()


def test_groups_that_sglang_does_not_divide_have_no_parts() -> None:
    assert Mamba2Convolution(32, 3, 4).parts(2) is None
    assert Mamba2Convolution(31, 2, 4).parts(2) is None
    assert Mamba2Convolution(32, 1, 4).parts(2) == [(16, False), (4, True), (4, True)]
    assert Mamba2Convolution(32, 8, 4).parts(2) == [(16, False), (16, False), (16, False)]


@pytest.mark.parametrize(
    ("pools", "heads"),
    [
        (with_states([8, 6], [None, None], [1, 1]), HeadLayout(4, 2, 4)),  # which parts there are is not reported
        (with_states([8, 0], [[8, 8], None], [1, 1]), HeadLayout(4, 2, 4)),  # each rank has the same
        (with_states([8, 6], [[5, 11], None], [1, 1]), HeadLayout(4, 2, 4)),  # in unequal pieces
        (with_states([8, 6], [[8, 16], None], [1, 1]), HeadLayout(4, 2, 4)),  # in more than there is
        (with_states([8, 6], [[8, 8], None], [1, 1]), HeadLayout(3, 2, 4)),  # a rank has no heads to send them with
    ],
    ids=["unknown", "replicated", "unequal", "larger", "padded"],
)
def test_other_recurrent_states_are_whole(pools: Any, heads: HeadLayout) -> None:
    assert pool_layout(pools, heads, rank=0).state_parts == ()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2)])
def test_each_decode_rank_gets_the_latent_rows_once(prefill: int, decode: int) -> None:
    sent = [
        share for rank in range(prefill) for share in shares_of(rank, latent_layout(prefill), latent_layout(decode))
    ]
    assert sorted(share.decode_rank for share in sent) == list(range(decode))
    assert {share[1:] for share in sent} == {(0, 1, True, 1)}


def test_a_pool_that_cannot_hold_the_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="does not hold 3 equal heads"):
        pool_layout(arguments(1), HeadLayout(3, 1, 3), rank=0)


@pytest.mark.parametrize(
    ("pages", "page_size", "slots"),
    [([5, 2, 9], 1, [5, 2, 9]), ([3, 0], 4, [12, 13, 14, 15, 0, 1, 2, 3]), ([], 16, [])],
)
def test_slots_of_pages(pages: list[int], page_size: int, slots: list[int]) -> None:
    found = token_slots(np.array(pages, np.int32), page_size)
    assert found.tolist() == slots
    assert found.dtype == np.uint32


sizes = st.integers(1, 8)


@pytest.mark.slow
@given(sizes, sizes, sizes)
def test_cpu_engines_of_any_sizes(kv_heads: int, prefill_ranks: int, decode_ranks: int) -> None:
    check(cpu_head_layout(kv_heads, prefill_ranks), cpu_head_layout(kv_heads, decode_ranks))


@pytest.mark.slow
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


@pytest.mark.slow
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8, 16]))
def test_on_gpus_every_decode_rank_gets_each_of_its_heads_once_also_of_replicas(
    kv_heads: int, prefill_ranks: int, decode_ranks: int
) -> None:
    prefill, decode = gpu_head_layout(kv_heads, prefill_ranks), gpu_head_layout(kv_heads, decode_ranks)

    def held(ranks: int, rank: int) -> set[int]:
        """As `QKVParallelLinear` has it."""
        if ranks <= kv_heads:
            return {head for head in range(kv_heads) if head // (kv_heads // ranks) == rank}
        return {rank // (ranks // kv_heads)}

    got: Counter[tuple[int, int]] = Counter()
    for rank in range(prefill_ranks):
        for share in shares_of(rank, prefill, decode):
            heads = range(share.first_head, share.first_head + share.head_count)
            assert set(heads) <= held(prefill_ranks, rank)
            got.update((share.decode_rank, head) for head in heads)
    assert got == Counter((rank, head) for rank in range(decode_ranks) for head in held(decode_ranks, rank))
    metadata = Counter(
        share.decode_rank
        for rank in range(prefill_ranks)
        for share in shares_of(rank, prefill, decode)
        if share.has_metadata
    )
    assert metadata == Counter(range(decode_ranks))
