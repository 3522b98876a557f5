"""Long prefills in what a batch has left, shorts alone or not, and the packed instance as a whole."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf, sqrt
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide import packed_batch
from sglang_ext.laps.decide.cost_model import CostCoefficients, IterationSample
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.packed_batch import (
    LongParts,
    LongRoom,
    can_afford,
    even_share_s,
    fill_with_longs,
    loaded_round_s,
    long_mode_round_s,
    packed_round_s,
    run_shorts_alone,
    stage_share,
    whole_within,
    without_shorts_s,
)
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import (
    DispatchReason,
    LapsMode,
    PriorityClass,
    QueuedPrefill,
    RoundSnapshot,
)
from sglang_ext.laps.decide.short_batch import FormedBatch
from sglang_ext.laps.decide.urgency import RankedPrefill, Urgency
from sglang_ext.laps.decide.wait_depth import OfferedLoad
from support.examples import examples
from support.prefill_loop import CPU, GPU, GRID, LIMITS, LONG, SHORT, Arrival, mixed, policy, run_laps

COST = CostCoefficients(alpha_s=0.0, token_s=1e-3, read_s=0.0, kappa_s=0.01)
ROOM = LongRoom(
    left_s=0.5,
    is_mixed=False,
    tokens=4096,
    requests=16,
    free_kv_tokens=100_000,
    chunk_tokens=2048,
    page_tokens=1,
    min_chunk_tokens=64,
    max_parked=4,
)


def queued(key: int, new_tokens: int, **changes: object) -> QueuedPrefill:
    length_class = SHORT if new_tokens <= 256 else LONG
    request = QueuedPrefill(key, length_class, new_tokens, 0, new_tokens, 0.0, 1e6, PriorityClass.NORMAL, False, False)
    return replace(request, **changes)  # type: ignore[arg-type]


def ranked(request: QueuedPrefill) -> RankedPrefill:
    remaining_s = COST.chunk_s(request.new_tokens, request.cached_tokens)
    return RankedPrefill(Urgency(2, remaining_s, request.arrival_s, request.key), request, remaining_s, remaining_s)


def fill(*requests: QueuedPrefill, room: LongRoom = ROOM) -> LongParts:
    longs = sorted([ranked(request) for request in requests])
    return fill_with_longs(longs, [one for one in longs if one.request.is_started], COST, room)


def keys(parts: LongParts) -> tuple[tuple[int, ...], int | None, int]:
    cut = None if parts.cut is None else parts.cut.request.key
    return tuple(one.request.key for one in parts.whole), cut, parts.cut_tokens


def test_a_tail_and_the_next_prompt_share_an_iteration() -> None:
    tail = queued(1, 76, total_tokens=588, cached_tokens=512, is_started=True, is_current=True)
    assert keys(fill(tail, queued(2, 2000))) == ((1,), 2, 424)


def test_what_nearly_fits_is_not_cut() -> None:
    """What takes up to twice the time that is left runs whole: the rest would need an iteration of its own."""
    assert keys(fill(queued(1, 999))) == ((1,), None, 0)
    assert keys(fill(queued(1, 1002))) == ((), 1, 500)
    fixed = ROOM._replace(whole_within=whole_within(is_fixed=True))
    assert keys(fill(queued(1, 549), room=fixed)) == ((1,), None, 0)
    assert keys(fill(queued(1, 999), room=fixed)) == ((), 1, 500)


def test_the_first_one_moves_on_however_little_time_is_left() -> None:
    assert keys(fill(queued(1, 1000), room=ROOM._replace(left_s=-1.0))) == ((), 1, 64)
    assert keys(fill(queued(1, 300), queued(2, 1000), room=ROOM._replace(left_s=0.31))) == ((1,), None, 0)


def test_one_started_prefill_is_in_a_batch() -> None:
    first = queued(1, 100, is_started=True, is_current=True)
    second = queued(2, 150, is_started=True)
    assert keys(fill(first, second, queued(3, 300))) == ((1, 3), None, 0)


def test_no_more_are_started_than_may_be_parked() -> None:
    started = [queued(key, 3000, is_started=True) for key in range(1, 6)]
    new = queued(9, 2000)
    assert keys(fill(*started, new))[1] == 1  # five parked ones are too many: one of them goes on
    assert keys(fill(*started[:4], new))[1] == 9


def test_memory_is_promised_to_those_that_were_started() -> None:
    started = queued(1, 3000, is_started=True)
    assert keys(fill(started, queued(2, 2000), room=ROOM._replace(free_kv_tokens=5000)))[1] == 2
    assert keys(fill(started, queued(2, 2000), room=ROOM._replace(free_kv_tokens=4999)))[1] == 1
    # Its cached tokens are free only as long as it does not run, or lie on the host.
    cached = queued(2, 2000, cached_tokens=600, total_tokens=2600)
    assert keys(fill(started, cached, room=ROOM._replace(free_kv_tokens=5600)))[1] == 2
    assert keys(fill(started, cached, room=ROOM._replace(free_kv_tokens=5599)))[1] == 1
    # One that this batch ends gives its KV away again.
    assert keys(fill(started, queued(2, 400), room=ROOM._replace(free_kv_tokens=3000)))[0] == (2,)


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(
    longs=st.lists(st.tuples(st.integers(1, 6000), st.booleans(), st.sampled_from([0, 512])), min_size=1, max_size=8),
    left_s=st.floats(-0.1, 3.0),
    tokens=st.integers(1, 8192),
    free=st.integers(0, 20_000),
    page=st.sampled_from([1, 16, 64]),
    requests=st.integers(1, 8),
    parked=st.integers(0, 4),
)
def test_what_holds_for_any_room(
    longs: list[tuple[int, bool, int]],
    left_s: float,
    tokens: int,
    free: int,
    page: int,
    requests: int,
    parked: int,
) -> None:
    queue = [
        queued(key, new, is_started=is_started, cached_tokens=cached, total_tokens=new + cached)
        for key, (new, is_started, cached) in enumerate(longs, start=1)
    ]
    room = LongRoom(left_s, False, tokens, requests, free, 4096, page, 64, parked)
    parts = fill(*queue, room=room)
    chosen = [one.request for one in parts.whole] + ([] if parts.cut is None else [parts.cut.request])
    assert len({one.key for one in chosen}) == len(chosen) == parts.requests <= requests
    assert sum(one.is_started for one in chosen) <= 1
    paged = [-(-one.request.new_tokens // page) * page for one in parts.whole]
    assert sum(one.request.new_tokens for one in parts.whole) + parts.cut_tokens == parts.new_tokens
    # The last one that runs whole may end within a page that the others of the room have left.
    assert sum(paged) + parts.cut_tokens <= min(tokens, free) + page * len(paged)
    if parts.cut is not None:
        assert 0 < parts.cut_tokens < parts.cut.request.new_tokens
        assert parts.cut_tokens % page == 0
        after = [one for one in queue if one.is_started and one not in chosen]
        if not parts.cut.request.is_started and any(one.is_started for one in queue):
            assert len(after) <= parked
            promised = sum(one.new_tokens for one in after) + parts.cut.request.total_tokens
            assert promised <= free
    # With room for a page, and nothing promised, one of them runs.
    can_start = not any(one.is_started for one in queue) and min(tokens, free) >= page
    assert chosen or not can_start
    if len(chosen) > 1:
        assert parts.added_s <= 2 * left_s + 1e-9


def short_batch(*deadlines_s: float, predicted_s: float = 0.03) -> FormedBatch:
    members = tuple(ranked(queued(key, 20, deadline_s=at_s)) for key, at_s in enumerate(deadlines_s, start=1))
    return FormedBatch(members, 20 * len(members), 0, 0.0, predicted_s, None, False, min(deadlines_s))


def test_shorts_run_alone_where_mixing_makes_one_late() -> None:
    assert run_shorts_alone(0.0, short_batch(0.1, inf), 0.15, 1.0, 10, 0.9)
    assert not run_shorts_alone(0.0, short_batch(0.16, inf), 0.15, 1.0, 10, 0.9)
    assert not run_shorts_alone(0.0, short_batch(0.02, inf), 0.15, 1.0, 10, 0.9), "late by itself, too"


def test_shorts_run_alone_where_they_wait_for_more_than_is_saved() -> None:
    batch = short_batch(inf, inf, inf)
    assert run_shorts_alone(0.0, batch, 0.2, 0.01, 4, 0.0)  # 3 x 0.17 s against 2 x 5 x 0.01 s
    assert not run_shorts_alone(0.0, batch, 0.2, 0.01, 4, 0.9)
    assert run_shorts_alone(0.0, batch, 0.2, 0.001, 4, 0.9), "a captured graph saves next to nothing"


def test_the_budget_of_an_instance_for_long_prefills() -> None:
    assert long_mode_round_s(0.1, 0.02, 5.0) == pytest.approx(0.3)
    # Of chunks of 1.5 times that: no other length ends sooner on the last of three stages.
    chunk_s = without_shorts_s(long_mode_round_s(0.1, 0.02, 5.0, stages=3))
    assert chunk_s == pytest.approx(
        min((0.15 + 0.001 * n for n in range(300)), key=lambda t: 0.02 * 5.0 / t + 2 * t), abs=1e-3
    )
    assert long_mode_round_s(0.1, 0.02, 5000.0, stages=3) == pytest.approx(0.3), "many wait: the fill is paid once"
    assert long_mode_round_s(0.1, 0.02, 0.01, stages=3) == pytest.approx(0.1)


@given(st.floats(0.001, 1e4), st.floats(0.01, 10.0))
def test_even_parts_keep_the_budget(work_s: float, budget_s: float) -> None:
    share_s = even_share_s(work_s, budget_s)
    parts = round(work_s / share_s)
    assert share_s * parts == pytest.approx(work_s)
    assert work_s <= (parts + 0.1) * budget_s * (1 + 1e-9)
    assert parts == 1 or work_s > (parts - 0.9) * budget_s * (1 - 1e-9)


def test_shorts_share_their_batch_in_a_pipeline() -> None:
    """Behind a long chunk they are no earlier on the later stages, and these wait as well as those before."""
    batch = short_batch(inf, inf, inf)
    assert run_shorts_alone(0.0, batch, 0.2, 0.01, 0, 0.0)  # 3 x 0.17 s against 2 x 0.01 s
    assert run_shorts_alone(0.0, batch, 0.2, 0.01, 0, 0.0, stages=2)  # and against 2 x 0.18 s
    assert not run_shorts_alone(0.0, batch, 0.2, 0.01, 1, 0.0, stages=2)
    assert not run_shorts_alone(0.0, short_batch(inf), 0.2, 0.01, 0, 0.0, stages=2)
    # On time alone: after two chunks on the later stages and 0.03 s.
    assert run_shorts_alone(0.0, short_batch(0.45), 0.2, 1.0, 10, 0.9, stages=3)
    assert not run_shorts_alone(0.0, short_batch(0.42), 0.2, 1.0, 10, 0.9, stages=3)


def test_the_longest_batch_leaves_the_next_one_its_part_of_an_objective() -> None:
    """0.5 s are left, so nearly 1 s would run whole, but the objective leaves 0.6 s, never less than what is left."""
    room = ROOM._replace(longest_s=0.6)
    assert keys(fill(queued(1, 599), room=room)) == ((1,), None, 0)
    assert keys(fill(queued(1, 602), room=room)) == ((), 1, 500)
    assert keys(fill(queued(1, 499), room=ROOM._replace(longest_s=0.1))) == ((1,), None, 0)
    assert packed_batch.longest_batch_s(0.02, 0.4) == pytest.approx(0.2)
    assert packed_batch.longest_batch_s(0.07, 0.4) == inf  # cannot be held


def test_the_budget_of_a_batch() -> None:
    assert packed_round_s(1e-4, 0.4) == pytest.approx(0.02)  # a twentieth of the objective
    assert packed_round_s(1e-4, 0.4, 2) == pytest.approx(0.08 * stage_share(2))  # a fifth, shared by the stages
    assert packed_round_s(0.015, 0.4) == pytest.approx(0.12)  # an eighth of it is lost
    assert packed_round_s(0.02, 0.4) == pytest.approx(0.4 / 3)  # a third of the objective
    assert packed_round_s(0.07, 0.4) == pytest.approx(0.56)  # which cannot be held
    assert packed_round_s(0.2, 0.4, 2) == pytest.approx(0.48)  # the fixed cost alone takes most of it


def test_under_load_a_batch_takes_what_its_fixed_costs_leave() -> None:
    half = OfferedLoad(1e6, 0.5)  # half of the time is free
    # Fixed costs of 10 ms take half of it where no prefill is long, or none is five such batches long.
    assert loaded_round_s(0.01, 0.01, half, 0.0) == pytest.approx(0.01 / 0.25)
    assert loaded_round_s(0.01, 0.01, half, 0.2) == pytest.approx(0.01 / 0.25)
    # A long prefill has five parts, until fixed costs take only a fifth of the free time.
    assert loaded_round_s(0.01, 0.01, half, 0.4) == pytest.approx(0.08)
    assert loaded_round_s(0.01, 0.01, half, 1.0) == pytest.approx(0.01 / 0.1)
    # More comes than can be served, and the objective cannot be held.
    assert loaded_round_s(0.01, 0.01, OfferedLoad(1e6, 1.5), 0.0) == pytest.approx(0.01 / 0.125)
    assert loaded_round_s(0.01, 0.3, OfferedLoad(1e6, 0.6), 9.0) == pytest.approx(0.1)  # a third of the objective
    # Batches are made no longer than that for long prefills: not where the load leaves little time, or none.
    assert loaded_round_s(0.01, 0.3, OfferedLoad(1e6, 0.9), 9.0) == pytest.approx(0.1)
    assert loaded_round_s(0.01, 0.3, OfferedLoad(1e6, 1.2), 9.0) == pytest.approx(0.1)
    # Batches of a third of 0.18 s lose half of the time that is free; of 0.165 s they would lose nine tenths.
    assert loaded_round_s(0.01, 0.18, OfferedLoad(1e6, 0.67), 0.0) == pytest.approx(0.06)
    assert loaded_round_s(0.01, 0.165, OfferedLoad(1e6, 0.8), 0.0) == pytest.approx(0.01 / 0.15)
    assert loaded_round_s(0.01, 0.05, OfferedLoad(1e6, 0.8), 0.0) == pytest.approx(0.01 / 0.125)  # cannot be held
    assert loaded_round_s(0.01, 0.3, OfferedLoad(0.1, 0.0), 0.0) == pytest.approx(0.5)  # one comes in twenty of these
    assert loaded_round_s(0.01, 0.3, OfferedLoad(0.0, 0.0), 0.0) == inf  # nothing comes: nothing is cut
    assert loaded_round_s(0.01, 0.3, OfferedLoad(inf, 0.0), 0.0) == pytest.approx(0.02)


@given(
    fixed_s=st.floats(1e-4, 0.3),
    short_slo_s=st.floats(0.01, 10.0),
    requests_per_s=st.floats(1e-3, 1e3),
    utilisation=st.floats(0.0, 0.7),
    long_s=st.floats(0.0, 60.0),
)
def test_fixed_costs_never_fill_the_time(
    fixed_s: float, short_slo_s: float, requests_per_s: float, utilisation: float, long_s: float
) -> None:
    load = OfferedLoad(requests_per_s, utilisation)
    round_s = loaded_round_s(fixed_s, short_slo_s, load, long_s)
    can_hold = 6 * fixed_s <= short_slo_s
    assert utilisation + fixed_s / round_s <= 1 - (0.25 if can_hold else 0.5) * (1 - utilisation) + 1e-9
    assert loaded_round_s(fixed_s, short_slo_s, load, long_s + 0.1) >= round_s
    if can_hold:
        least_s = fixed_s / (0.75 * (1 - utilisation))
        assert round_s <= max(short_slo_s / 3, least_s, 0.05 / requests_per_s) * (1 + 1e-9)
    elif round_s > 0.0501 / requests_per_s:

        def slowness(batch_s: float) -> float:
            """Return the product of the waits of short and of long prefills with batches of this length."""
            return batch_s / (1 - utilisation - fixed_s / batch_s)

        # Longer batches than those with the least product only where a long prefill has five parts all the same.
        if slowness(0.99 * round_s) < slowness(round_s) * (1 - 1e-9):
            assert round_s <= max(long_s / 5, 2 * fixed_s / (1 - utilisation)) * (1 + 1e-9)
        assert round_s <= 5 * fixed_s / (1 - utilisation) * (1 + 1e-9)


def test_a_batch_is_longer_where_long_prefills_are() -> None:
    """Saturated by a long prompt each second, with an objective that cannot be held: a part is at most a fifth of a
    long prompt."""
    rounds_s = []
    for long_tokens in (300, 2000):
        laps = policy(COST, short_ttft_slo_ms=10.0)
        for second in range(20):
            laps.record_arrival(float(second), LONG, long_tokens, 0, 1e6)
            laps.record_arrival(float(second), SHORT, 10, 0, 1e6)
        rounds_s.append(laps.report(RoundSnapshot(20.0, (), 100_000)).round_s)
    assert rounds_s[1] > 1.2 * rounds_s[0]


def test_deadlines_cost_no_time_that_the_load_does_not_leave() -> None:
    assert can_afford(OfferedLoad(10.0, 0.5), 0.01, 0.4, extra_s=0.049, batch_s=0.1)
    assert not can_afford(OfferedLoad(10.0, 0.5), 0.01, 0.4, extra_s=0.051, batch_s=0.1)
    assert not can_afford(OfferedLoad(10.0, 1.2), 0.01, 0.4, extra_s=0.001, batch_s=0.1)


def test_an_objective_that_holds_no_two_batches_costs_none() -> None:
    assert can_afford(OfferedLoad(10.0, 0.0), 0.01, 0.061, extra_s=0.01, batch_s=0.1)
    assert not can_afford(OfferedLoad(10.0, 0.0), 0.01, 0.059, extra_s=0.01, batch_s=0.1)


def test_without_spare_time_shorts_share_a_batch_that_makes_one_late() -> None:
    shorts = FormedBatch((ranked(queued(1, 100, deadline_s=0.2)),), 100, 0, 1e4, 0.11, None, False, 0.2)
    alone = (0.0, shorts, 0.3, 0.01, 100, 0.9)
    assert run_shorts_alone(*alone)
    assert not run_shorts_alone(*alone, is_affordable=False)


@pytest.mark.parametrize(("offered_s", "reason"), [(0.1, None), (5.0, DispatchReason.MIXED)])
def test_under_load_a_deadline_costs_no_batch_of_its_own(offered_s: float, reason: DispatchReason | None) -> None:
    """Alone the short one takes 0.2 s and is on time, mixed it takes 0.3 s; each batch costs 0.1 s again."""
    laps = policy(COST._replace(kappa_s=0.1), round_ms=300.0, short_ttft_slo_ms=1600.0)
    for number in range(20):
        laps.record_arrival(0.1 * number, LONG, int(100 * offered_s), 0, 1e6)
    queue = (queued(1, 100, deadline_s=2.25, arrival_s=1.9), queued(2, 2000))
    first = laps.choose_of(RoundSnapshot(2.0, queue, 100_000)).batches[0]
    assert first.is_short is (reason is None)
    assert reason is None or first.reason is reason


@pytest.mark.parametrize(("offered_s", "together"), [(0.1, False), (5.0, True)])
def test_under_load_nothing_is_put_back_for_a_deadline(offered_s: float, together: bool) -> None:
    """The first is on time only without the second, whose own batch costs 0.1 s again: of an objective of 1.6 s."""
    laps = policy(COST._replace(kappa_s=0.1), short_ttft_slo_ms=1600.0)
    for number in range(20):
        laps.record_arrival(0.1 * number, LONG, int(100 * offered_s), 0, 1e6)
    queue = (queued(1, 100, deadline_s=2.25, arrival_s=1.9), queued(2, 200, deadline_s=2.35, arrival_s=1.95))
    first = laps.choose_of(RoundSnapshot(2.0, queue, 100_000)).batches[0]
    assert (len(first.whole) == 2) is together


def test_under_an_objective_that_cannot_be_held_nothing_is_put_back() -> None:
    """The load is little, but the objective holds only four fixed costs."""
    laps = policy(COST._replace(kappa_s=0.1), short_ttft_slo_ms=400.0)
    queue = (queued(1, 100, deadline_s=2.25, arrival_s=1.9), queued(2, 200, deadline_s=2.35, arrival_s=1.95))
    first = laps.choose_of(RoundSnapshot(2.0, queue, 100_000)).batches[0]
    assert len(first.whole) == 2


def test_a_short_prefill_is_predicted_as_it_runs() -> None:
    """250 tokens end 10 ms before the deadline; in parts of a round, of 30 ms, they would be late, and go last."""
    laps = policy(COST, round_ms=30.0, max_chunk_tokens=300)
    laps.put(queued(1, 250, deadline_s=0.27), 0.0)
    assert laps.queue.get(1).remaining_s == pytest.approx(0.26)


@pytest.mark.parametrize(("is_mixed", "cut_tokens"), [(False, 290), (True, 190)])
def test_further_requests_are_paid_for(is_mixed: bool, cut_tokens: int) -> None:
    """0.5 s: 10 ms less for the fixed cost of an unmixed batch is the caller's; each further request costs 100 ms."""
    costly = COST._replace(request_s=0.1)
    room = ROOM._replace(is_mixed=is_mixed, left_s=0.4901)
    longs = [ranked(queued(1, 100)), ranked(queued(2, 2000))]
    parts = fill_with_longs(longs, [], costly, room)
    assert parts.cut is not None
    assert parts.cut_tokens == cut_tokens
    assert parts.added_s == pytest.approx(0.49)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_longest_wait_is_the_same_through_a_pipeline(stages: int) -> None:
    """Behind the longest batch, half as long again, through all stages, and for its own: 5/6 of the objective."""
    round_s = packed_round_s(0.02, 0.4, stages)
    longest_s = packed_batch.without_shorts_s(round_s)
    assert stages * longest_s + round_s == pytest.approx(max(5 / 6 * 0.4, (1.5 * stages + 1) * 2.4 * 0.02))


@pytest.mark.parametrize(("stages", "together"), [(1, 3), (2, 1)])
def test_a_batch_ends_when_it_has_passed_all_stages(stages: int, together: int) -> None:
    """Three shorts of 100 ms each, due in 350 ms: one stage ends them all in time, two end only the first."""
    cost = CostCoefficients(0.0, 1e-3, 0.0, 1e-4)
    limits = LIMITS._replace(stages=stages)
    laps = Laps(LapsOptions(boundary_tokens=256, short_ttft_slo_ms=5000.0), GraphGrid(()), cost, limits)
    queue = tuple(
        QueuedPrefill(key, SHORT, 100, 0, 100, 0.0, 0.35, PriorityClass.NORMAL, False, False) for key in range(1, 4)
    )
    plan = laps.choose_of(RoundSnapshot(0.0, queue, 1 << 20))
    assert len(plan.batches[0].whole) == together


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 100_000),
    load=st.floats(0.3, 1.3),
    is_gpu=st.booleans(),
    mode=st.sampled_from(LapsMode),
    kv_tokens=st.sampled_from([9000, 1_000_000]),
)
def test_a_queue_that_is_kept_decides_as_one_that_is_made_anew(
    seed: int, load: float, is_gpu: bool, mode: LapsMode, kv_tokens: int
) -> None:
    random = Random(seed)
    truth = GPU if is_gpu else CPU
    arrivals = [
        arrival._replace(
            priority=random.choice(list(PriorityClass)), ttft_slo_s=random.choice([None, None, 0.001, 0.5, 60.0])
        )
        for arrival in mixed(random, 80, load, truth)
    ]
    laps = Laps(LapsOptions(mode=mode, age_s=0.5), GRID if is_gpu else GraphGrid(), truth, LIMITS)
    outcome = run_laps(laps, arrivals, truth, kv_tokens=kv_tokens, is_compared=True)
    assert len(outcome.ended) == 80


def test_shorts_share_iterations_with_longs_on_a_busy_cpu_and_run_alone_on_graphs() -> None:
    # What an eager iteration costs is lost with each: 15 ms.
    slow = CostCoefficients(alpha_s=5e-9, token_s=2e-4, read_s=1e-7, kappa_s=0.015)
    outcome = run_laps(policy(slow), mixed(Random(3), 800, 0.9, slow), slow)
    beside = [
        step.batch.reason
        for step in outcome.steps
        if {one.length_class for one in step.snapshot.queue} == {SHORT, LONG}
    ]
    assert beside.count(DispatchReason.MIXED) > len(beside) / 2
    graphs = GPU._replace(replayed=GPU._replace(kappa_s=5e-4))
    outcome = run_laps(policy(graphs, GRID), mixed(Random(3), 800, 0.9, graphs), graphs)
    beside = [step for step in outcome.steps if step.batch.short_requests and len(step.snapshot.queue) > 1]
    assert sum(step.batch.is_short for step in beside) > 0.7 * len(beside)


def test_a_real_time_long_prefill_goes_before_normal_shorts() -> None:
    queue = (queued(1, 8000, priority=PriorityClass.REAL_TIME), queued(2, 100))
    first = policy().choose_of(RoundSnapshot(0.0, queue, 100_000)).batches[0]
    assert first.cut is not None
    assert first.cut.key == 1
    assert first.whole == ()


def test_offline_work_does_not_join_requests_with_deadlines() -> None:
    offline = [queued(key, 40, deadline_s=inf, priority=PriorityClass.LOW) for key in (1, 2)]
    (batch,) = policy().choose_of(RoundSnapshot(0.0, (*offline, queued(3, 40)), 100_000)).batches
    assert batch.whole == (3,)


def test_what_the_memory_refuses_waits_for_offline_work_that_holds_it() -> None:
    holder = queued(1, 500, total_tokens=3000, cached_tokens=2500, deadline_s=inf, is_started=True, is_current=True)
    plan = policy().choose_of(RoundSnapshot(0.0, (holder, queued(2, 4000)), 600))
    assert 1 in plan.batches[0].keys


def test_arrivals_in_one_instant_are_served() -> None:
    outcome = run_laps(policy(), [Arrival(0.0, 100) for _ in range(200)], CPU)
    assert len(outcome.ended) == 200


def test_shorts_with_nothing_long_beside_them_are_bounded_by_their_deadlines() -> None:
    laps = policy(COST, boundary_tokens=256)  # 10 ms and 1 ms a token
    shorts = tuple(queued(key, 90, deadline_s=0.4) for key in range(1, 5))
    round_s = laps.report(RoundSnapshot(0.0, shorts, 10_000)).round_s
    assert round_s < 0.2
    (batch,) = laps.choose_of(RoundSnapshot(0.0, shorts[:3], 10_000)).batches
    assert sorted(batch.keys) == [1, 2, 3]
    assert batch.predicted_s > round_s
    (batch,) = laps.choose_of(RoundSnapshot(0.1, shorts, 10_000)).batches  # all four would end at 0.47
    assert len(batch.keys) == 3
    fixed = policy(COST, boundary_tokens=256, round_ms=150.0)
    assert len(fixed.choose_of(RoundSnapshot(0.0, shorts, 10_000)).batches[0].keys) == 1


def test_laps_experiment_in_small() -> None:
    """Prompts that one iteration holds: order of arrival makes five times as many of them late."""
    truth = CostCoefficients(0.0, 1.5e-4, 0.0, 0.02)
    random = Random(2)
    arrivals, now_s = [], 0.0
    for _ in range(2000):
        now_s += random.expovariate(22.0)
        arrivals.append(Arrival(now_s, int(2 ** random.uniform(3, 10))))
    late, first, free_s = 0, 0, 0.0
    while first < len(arrivals):  # all that wait, in order of arrival
        start_s = max(free_s, arrivals[first].at_s)
        batch = [one for one in arrivals[first : first + 64] if one.at_s <= start_s]
        free_s = start_s + truth.iteration_s(0.0, sum(one.new_tokens for one in batch), 0)
        late += sum(free_s > one.at_s + 0.4 for one in batch)
        first += len(batch)
    outcome = run_laps(policy(truth, boundary_tokens=1024), arrivals, truth)
    assert late > 5 * outcome.late() > 0
    assert outcome.ttft_s(SHORT, 1.0) < 5 * 0.4 + 2 * 0.4


def test_a_batch_keeps_a_margin_for_a_machine_that_is_hard_to_predict() -> None:
    shorts = tuple(queued(key, 10, deadline_s=0.4) for key in range(1, 50))  # in all 500 ms
    steady, erratic = policy(COST, boundary_tokens=256), policy(COST, boundary_tokens=256)
    random = Random(4)
    for _ in range(200):
        tokens = random.randint(20, 400)
        duration_s = COST.chunk_s(tokens, 0)
        sample = IterationSample(float(tokens * tokens), tokens, 0, 1, duration_s)
        steady.record_iteration(sample)
        erratic.record_iteration(sample._replace(duration_s=duration_s * random.uniform(0.7, 1.3)))
    snapshot = RoundSnapshot(0.0, shorts, 10_000)
    assert len(steady.choose_of(snapshot).batches[0].keys) >= 38
    error = erratic.report(snapshot).fit.error_p50
    assert error is not None
    assert error > 0.05
    batch = erratic.choose_of(snapshot).batches[0]
    assert 0.3 < batch.predicted_s * (1 + error) <= 0.4


def test_an_instance_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        policy(limits=LIMITS._replace(max_requests=0))


@pytest.mark.parametrize("stages", [1, 4])
def test_chunks_take_equal_times_as_the_prefix_grows(stages: int) -> None:
    """So no stage of a pipeline waits for another one: tokens of a chunk shrink as each of them costs more."""
    cost = CostCoefficients(alpha_s=4e-7, token_s=1e-4, read_s=0.0, kappa_s=1e-3)
    limits = LIMITS._replace(stages=stages, max_chunk_tokens=1 << 20, max_batch_tokens=1 << 20)
    laps = Laps(LapsOptions(boundary_tokens=256, min_chunk_tokens=1), GraphGrid(()), cost, limits)
    request = QueuedPrefill(1, LONG, 16_000, 0, 16_000, 0.0, inf, PriorityClass.NORMAL, False, False)
    tokens, times_s = [], []
    while True:
        batch = laps.choose_of(RoundSnapshot(0.0, (request,), 1 << 20)).batches[0]
        if batch.cut is None:
            break
        tokens.append(batch.cut.tokens)
        times_s.append(batch.predicted_s)
        request = request.after_chunk(batch.cut.tokens)
    assert len(tokens) > 8
    assert all(after <= before + LIMITS.page_tokens for before, after in pairwise(tokens))
    assert tokens[-1] < tokens[0] / 2
    page_s = cost.chunk_s(LIMITS.page_tokens, 16_000) - cost.kappa_s
    if stages > 1:  # the last one, too: of what pages round away others have a little more
        assert min(*times_s, batch.predicted_s) >= 0.9 * max(*times_s, batch.predicted_s)
    else:
        assert max(times_s) - min(times_s) <= page_s


def of_stages(stages: int, mode: LapsMode, kappa_s: float) -> Laps:
    cost = CostCoefficients(alpha_s=0.0, token_s=1e-4, read_s=0.0, kappa_s=kappa_s)
    limits = LIMITS._replace(stages=stages, max_chunk_tokens=1 << 20, max_batch_tokens=1 << 20)
    options = LapsOptions(mode=mode, boundary_tokens=256, short_ttft_slo_ms=400.0, min_chunk_tokens=1)
    return Laps(options, GraphGrid(()), cost, limits)


@pytest.mark.parametrize(("stages", "requests"), [(1, 1), (2, 2)])
def test_a_short_prefill_shares_its_batch_in_a_pipeline(stages: int, requests: int) -> None:
    """Where every batch costs next to nothing again it runs alone on one stage."""
    short = QueuedPrefill(1, SHORT, 50, 0, 50, 0.0, 9.0, PriorityClass.NORMAL, False, False)
    long = QueuedPrefill(2, LONG, 64_000, 0, 64_000, 0.0, 99.0, PriorityClass.NORMAL, False, False)
    batch = of_stages(stages, LapsMode.BOTH, 1e-5).choose_of(RoundSnapshot(0.0, (short, long), 1 << 20)).batches[0]
    assert len(batch.keys) == requests


def test_chunks_of_a_pipeline_for_long_prefills() -> None:
    """They take what ends the prompt soonest, from its beginning to its end: sqrt(kappa W / (P - 1))."""
    request = QueuedPrefill(1, LONG, 64_000, 0, 64_000, 0.0, 99.0, PriorityClass.NORMAL, False, False)
    laps = of_stages(2, LapsMode.LONG, 0.01)
    for _ in range(20):
        batch = laps.choose_of(RoundSnapshot(0.0, (request,), 1 << 20)).batches[0]
        assert batch.cut is not None
        assert batch.predicted_s == pytest.approx(sqrt(0.01 * 6.4), rel=0.1)
        request = request.after_chunk(batch.cut.tokens)
