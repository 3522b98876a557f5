"""How long a chunk may take: as long as it likes without short prefills, and never so long that they are late."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from sglang_ext.long_pool.decide.chunk_length import NO_SHORT_LOAD, ShortLoad, longest_chunk_s, should_wait

overheads_s = st.floats(1e-4, 0.2)
sizes = st.sampled_from([1, 2, 4, 8, 16])
prices = st.floats(0, 20)
rates = st.floats(1e-3, 200)


def test_without_short_prefills_a_chunk_has_no_bound() -> None:
    assert longest_chunk_s(0.01, 8, 1.0, NO_SHORT_LOAD) == math.inf


def test_a_chunk_takes_half_of_the_objective_where_short_prefills_are_few() -> None:
    assert longest_chunk_s(0.004, 4, 1.0, ShortLoad(0.01, 0.4)) == 0.2
    assert longest_chunk_s(0.004, 4, 1.0, ShortLoad(0.0, 0.4)) == 0.2


@given(overheads_s, st.floats(0, 0.5), sizes, prices, rates)
def test_short_prefills_and_overheads_cost_least_together(
    overhead_s: float, meeting_s: float, size: int, price: float, per_s: float
) -> None:
    """Against the sum itself, at other lengths."""
    shorts = ShortLoad(per_s, math.inf)
    chosen_s = longest_chunk_s(overhead_s, size, price, shorts, meeting_s)

    def delay_s(chunk_s: float) -> float:
        return per_s * size * chunk_s / 2 + (1 + price * size) * (overhead_s + meeting_s) / chunk_s

    for factor in (1.01, 1.5, 4.0):
        assert delay_s(chosen_s) <= delay_s(chosen_s * factor) * (1 + 1e-9)
        if chosen_s / factor >= 4 * (overhead_s + meeting_s):
            assert delay_s(chosen_s) <= delay_s(chosen_s / factor) * (1 + 1e-9)


@given(overheads_s, st.floats(0, 0.5), sizes, prices, rates, st.floats(0.01, 10))
def test_the_bounds_hold(
    overhead_s: float, meeting_s: float, size: int, price: float, per_s: float, slo_s: float
) -> None:
    chosen_s = longest_chunk_s(overhead_s, size, price, ShortLoad(per_s, slo_s), meeting_s)
    assert chosen_s >= 4 * overhead_s
    assert chosen_s >= min(4 * (overhead_s + meeting_s), slo_s / 2)
    assert chosen_s <= max(4 * overhead_s, slo_s / 2)
    assert longest_chunk_s(overhead_s, size, price + 1, ShortLoad(per_s, slo_s), meeting_s) >= chosen_s
    assert longest_chunk_s(overhead_s, size, price, ShortLoad(2 * per_s, slo_s), meeting_s) <= chosen_s


def test_where_members_meet_long_chunks_are_longer() -> None:
    """Batches follow each other on all members: many short chunks would take the group's time with meeting."""
    shorts = ShortLoad(40.0, 0.4)
    assert longest_chunk_s(0.008, 8, 0.0, shorts) == 4 * 0.008
    assert longest_chunk_s(0.008, 8, 0.0, shorts, 0.012) == 4 * 0.02
    assert longest_chunk_s(0.008, 8, 4.0, shorts, 0.05) == 0.2


@example(0.3, 0.0, 0.4, 0.1, 9.0)
@given(st.floats(0, 2), st.floats(0, 2), st.floats(0.01, 2), st.floats(0, 5), st.floats(-5, 60))
def test_a_chunk_waits_only_for_short_prefills_and_while_its_prefill_has_time(
    chunk_s: float, busy_s: float, slo_s: float, left_s: float, due_in_s: float
) -> None:
    waits = should_wait(chunk_s, busy_s, ShortLoad(1.0, slo_s), left_s, due_in_s)
    if busy_s == 0.0 or due_in_s <= 2 * left_s or busy_s + chunk_s <= slo_s / 2:
        assert not waits
    if waits:
        assert should_wait(chunk_s, 2 * busy_s, ShortLoad(1.0, slo_s), left_s, due_in_s)
    assert not should_wait(chunk_s, busy_s, NO_SHORT_LOAD, left_s, due_in_s)
