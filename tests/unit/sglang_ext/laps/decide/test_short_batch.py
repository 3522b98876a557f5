"""As many on time as possible; bucket first, then neighbours while padding pays, within the bounds of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.graphs.decide.graph_grid import GraphGrid, GraphShape, TokenBuckets
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.round_plan import PriorityClass, QueuedPrefill
from sglang_ext.laps.decide.short_batch import (
    SPARE,
    BatchBounds,
    FormedBatch,
    form_batch,
    joined_s,
    lone_batch,
)
from sglang_ext.laps.decide.urgency import RankedPrefill, Urgency, aged_class
from sglang_ext.types import LengthClass
from support.examples import examples
from support.graph_grids import full_grid
from support.plain_batches import plain_form_batch

GRID = full_grid((8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16, 32, 64))
NO_GRID = GraphGrid()
OVERHEAD_BOUND = CostCoefficients(0.0, 1e-6, 0.0, 0.01)
COMPUTE_BOUND = CostCoefficients(0.0, 1e-3, 0.0, 1e-4)
LMSYS = CostCoefficients(0.0, 1.5e-4, 0.0, 0.02)  # as of Qwen2.5-32B on an H100, without attention
BOUNDS = BatchBounds(max_requests=64, max_tokens=8192, free_kv_tokens=100_000, page_tokens=1, budget_s=inf)


def short(
    key: int,
    new_tokens: int,
    cost: CostCoefficients,
    cached_tokens: int = 0,
    *,
    arrival_s: float = 0.0,
    deadline_s: float = inf,
    aged_class: int = 2,
) -> RankedPrefill:
    request = QueuedPrefill(
        key,
        LengthClass.SHORT,
        new_tokens,
        cached_tokens,
        new_tokens,
        arrival_s,
        deadline_s,
        PriorityClass.NORMAL,
        False,
        False,
    )
    time_s = cost.chunk_s(new_tokens, cached_tokens)
    return RankedPrefill(Urgency(aged_class, float(key), arrival_s, key), request, time_s, time_s)


def form(
    lengths: list[int], cost: CostCoefficients = OVERHEAD_BOUND, grid: GraphGrid = GRID, bounds: BatchBounds = BOUNDS
) -> FormedBatch:
    formed = form_batch([short(key, length, cost) for key, length in enumerate(lengths)], 0.0, cost, grid, bounds)
    assert formed is not None
    return formed


def keys(formed: FormedBatch) -> list[int]:
    return [member.request.key for member in formed.members]


def test_no_short_prefill_waits() -> None:
    assert form_batch([], 0.0, OVERHEAD_BOUND, GRID, BOUNDS) is None


def test_the_heads_bucket_comes_first() -> None:
    formed = form([20, 100, 30, 60, 25], bounds=BOUNDS._replace(max_requests=4))
    assert keys(formed) == [0, 2, 4, 3]
    assert formed.is_full
    assert formed.shape == GraphShape(64, 4)


@pytest.mark.parametrize(
    ("bounds", "is_full"),
    [
        (BOUNDS, False),
        (BOUNDS._replace(max_tokens=40), True),
        (BOUNDS._replace(max_tokens=41), False),
        (BOUNDS._replace(free_kv_tokens=40), True),
        (BOUNDS._replace(free_kv_tokens=41), False),
        (BOUNDS._replace(free_kv_tokens=79, page_tokens=16), True),  # 32 for each of the two; 15 are no page
        (BOUNDS._replace(free_kv_tokens=80, page_tokens=16), False),
    ],
)
def test_a_batch_that_not_even_one_token_could_join_is_full(bounds: BatchBounds, is_full: bool) -> None:
    formed = form([20, 20], bounds=bounds)
    assert keys(formed) == [0, 1]
    assert formed.is_full is is_full


def test_neighbours_join_only_while_padding_pays() -> None:
    assert keys(form([8, 256], COMPUTE_BOUND)) == [0]
    assert keys(form([8, 256], OVERHEAD_BOUND)) == [0, 1]
    assert not form([8, 256], COMPUTE_BOUND).is_full


def test_several_pay_for_a_larger_shape_that_one_does_not_pay_for() -> None:
    # Shapes of 32 to 256 tokens take 8.2, 11.4, 17.8 and 30.6 ms: the fifth request would cost 12.8 ms more.
    cost = CostCoefficients(0.0, 1e-4, 0.0, 5e-3)
    grid = full_grid((32,), (1, 2, 4, 8))
    assert [len(form([32] * count, cost, grid).members) for count in range(1, 9)] == [1, 2, 3, 4, 4, 4, 7, 8]
    # Twice in one batch: five more pay for 16.
    larger = full_grid((32,), (1, 2, 4, 8, 16))
    assert [sorted(keys(form([32] * count, cost, larger))) for count in (12, 13)] == [list(range(8)), list(range(13))]
    # A request that fits into what is left joins although a more urgent one does not.
    assert keys(form([32, 32, 32, 20, 32, 10, 3], cost, grid)) == [0, 1, 2, 3, 5]


def test_without_shapes_urgency_alone_decides() -> None:
    formed = form([20, 100, 30, 60], grid=NO_GRID, bounds=BOUNDS._replace(max_requests=3))
    assert keys(formed) == [0, 1, 2]
    assert formed.shape is None
    assert formed.new_tokens == 150
    assert formed.predicted_s == pytest.approx(OVERHEAD_BOUND.iteration_s(0.0, 150, 0))


def test_the_time_on_a_shape_is_that_of_its_padding() -> None:
    cost = CostCoefficients(1e-6, 1e-4, 1e-6, 0.01)
    ranked = [short(0, 20, cost, 100), short(1, 30, cost, 50), short(2, 25, cost, 0)]
    formed = form_batch(ranked, 0.0, cost, GRID, BOUNDS)
    assert formed is not None
    assert formed.shape == GraphShape(32, 4)
    attention_work = sum(new * (new + 2 * cached) for new, cached in ((20, 100), (30, 50), (25, 0)))
    assert formed.predicted_s == pytest.approx(cost.iteration_s(attention_work, 128, 150))


def test_the_deepest_shape_bounds_the_batch() -> None:
    formed = form([20] * 5, grid=full_grid((32,), (1, 2)))
    assert len(formed.members) == GraphShape(32, 2).slots == 4
    assert formed.is_full


def test_a_shape_that_pads_too_much_is_not_planned_for() -> None:
    formed = form([256, *[8] * 8], grid=full_grid((256,), (1, 16)))
    assert len(formed.members) == 9
    assert formed.shape is None
    assert formed.predicted_s == pytest.approx(OVERHEAD_BOUND.iteration_s(0.0, 256 + 64, 0))


def test_on_buckets_a_batch_costs_the_next_bucket_and_beyond_the_largest_it_runs_eagerly() -> None:
    replayed = CostCoefficients(0.0, 1e-4, 0.0, 1e-3)
    cost = CostCoefficients(0.0, 1e-4, 0.0, 5e-3, replayed=replayed)
    buckets = TokenBuckets((32, 64, 128))
    for count, tokens in ((1, 32), (3, 64), (6, 128)):
        formed = form([20] * count, cost, buckets)
        assert (len(formed.members), formed.shape) == (count, GraphShape(tokens, 1))
        assert formed.predicted_s == pytest.approx(replayed.iteration_s(0.0, tokens, 0))
    # A seventh would make 19 ms of 13.8 and 4.2: eager for 140 tokens instead of replays of 128 and 32.
    assert len(form([20] * 7, cost, buckets).members) == 6
    assert len(form([20] * 7, cost, NO_GRID).members) == 7
    eager = form([140, 20], cost, buckets)
    assert (eager.shape, eager.predicted_s) == (None, pytest.approx(cost.iteration_s(0.0, 160, 0)))


def test_a_request_by_itself() -> None:
    alone = lone_batch(short(3, 20, OVERHEAD_BOUND), OVERHEAD_BOUND, GRID)
    assert (keys(alone), alone.new_tokens, alone.shape, alone.is_full) == ([3], 20, (32, 1), True)
    assert alone.predicted_s == pytest.approx(OVERHEAD_BOUND.iteration_s(0.0, 32, 0))


def test_longer_than_any_shape_runs_on_the_ordinary_kernels() -> None:
    formed = form([300, 310])
    assert keys(formed) == [0, 1]
    assert formed.shape is None


@pytest.mark.parametrize(
    "bounds",
    [
        BOUNDS._replace(max_tokens=250),
        BOUNDS._replace(free_kv_tokens=250),
        BOUNDS._replace(free_kv_tokens=256, page_tokens=128),
        BOUNDS._replace(budget_s=OVERHEAD_BOUND.iteration_s(0, 250, 0)),
    ],
)
def test_room_is_bounded(bounds: BatchBounds) -> None:
    formed = form([100, 100, 100], grid=NO_GRID, bounds=bounds)
    assert keys(formed) == [0, 1]
    assert formed.is_full


def test_a_smaller_one_takes_the_room_that_is_left() -> None:
    assert keys(form([100, 200, 50], grid=NO_GRID, bounds=BOUNDS._replace(max_tokens=150))) == [0, 2]


def test_the_head_goes_whatever_it_costs_unless_memory_refuses() -> None:
    assert keys(form([100], grid=NO_GRID, bounds=BOUNDS._replace(budget_s=0.0, max_tokens=10))) == [0]
    head = short(0, 100, OVERHEAD_BOUND)
    assert form_batch([head], 0.0, OVERHEAD_BOUND, NO_GRID, BOUNDS._replace(free_kv_tokens=99)) is None


def test_one_more_of_average_length() -> None:
    formed = form([100, 50], grid=NO_GRID)
    assert joined_s(formed, OVERHEAD_BOUND, NO_GRID) == pytest.approx(OVERHEAD_BOUND.iteration_s(0.0, 225, 0))
    padded = form([60, 60, 60])
    assert joined_s(padded, OVERHEAD_BOUND, GRID) == pytest.approx(padded.predicted_s)  # the fourth seat is free


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=40),
    max_requests=st.integers(1, 64),
    max_tokens=st.integers(400, 5000),
    free=st.integers(500, 5000),
    page=st.sampled_from([1, 16]),
    with_grid=st.booleans(),
)
def test_every_batch_keeps_its_bounds(
    lengths: list[int], max_requests: int, max_tokens: int, free: int, page: int, with_grid: bool
) -> None:
    bounds = BatchBounds(max_requests, max_tokens, free, page, 0.05)
    formed = form(lengths, COMPUTE_BOUND, GRID if with_grid else NO_GRID, bounds)
    members = [lengths[key] for key in keys(formed)]
    assert keys(formed)[0] == 0
    assert len(set(keys(formed))) == len(members) <= max_requests
    assert sum(members) == formed.new_tokens <= max_tokens
    assert sum(-(-length // page) * page for length in members) <= free
    if len(members) > 1:
        assert formed.predicted_s <= 0.05
    if formed.shape is not None:
        assert max(members) <= formed.shape.length_tokens
        assert len(members) <= formed.shape.slots


# -- on time ----------------------------------------------------------------------------------------------------------


def batch_keys(
    ranked: list[RankedPrefill], now_s: float, bounds: BatchBounds = BOUNDS, due: Sequence[RankedPrefill] = ()
) -> list[int]:
    """The members of a batch without captured shapes: 20 ms and 0.15 ms a token."""
    formed = form_batch(ranked, now_s, LMSYS, NO_GRID, bounds, due)
    assert formed is not None
    return keys(formed)


def test_the_longest_is_put_back_where_not_all_can_be_on_time() -> None:
    # 20 ms + 0.15 ms a token: all take 245 ms, and the first has 200 ms left.
    ranked = [
        short(0, 100, LMSYS, deadline_s=0.2),
        short(1, 1000, LMSYS, deadline_s=0.3),
        short(2, 400, LMSYS, deadline_s=0.3),
    ]
    formed = form_batch(ranked, 0.0, LMSYS, NO_GRID, BOUNDS)
    assert formed is not None
    assert keys(formed) == [0, 2]
    assert formed.is_full
    assert formed.deadline_s == 0.2
    assert batch_keys(ranked, -0.05) == [0, 1, 2]


def test_those_that_can_wait_are_put_back_before_those_that_cannot() -> None:
    # A long prompt that is about to be late, and shorter ones that have seconds: they wait, although it is the longest.
    tight = short(0, 1000, LMSYS, deadline_s=0.18)
    others = [short(key, 100, LMSYS, deadline_s=2.0) for key in range(1, 5)]
    assert batch_keys([tight, *others], 0.0) == [0]
    # Two of them fit beside it where it has 30 ms more.
    assert batch_keys([short(0, 1000, LMSYS, deadline_s=0.21), *others], 0.0) == [0, 1, 2]
    # The shortest of them, so that the most do.
    mixed = [short(key, tokens, LMSYS, deadline_s=2.0) for key, tokens in ((1, 200), (2, 50), (3, 100), (4, 50))]
    assert batch_keys([short(0, 1000, LMSYS, deadline_s=0.205), *mixed], 0.0) == [0, 2, 3, 4]
    # And where they would be late as well, the one is put back and not the four.
    hurried = [short(key, 100, LMSYS, deadline_s=0.2) for key in range(1, 5)]
    assert batch_keys([tight, *hurried], 0.0) == [1, 2, 3, 4]


def test_a_margin_is_kept_for_what_takes_longer_than_predicted() -> None:
    ranked = [short(key, 400, LMSYS, deadline_s=0.3) for key in (0, 1, 2, 3)]  # in all 260 ms
    assert batch_keys(ranked, 0.0) == [0, 1, 2, 3]
    assert batch_keys(ranked, 0.0, BOUNDS._replace(margin=0.15)) == [0, 1, 2, 3]
    assert batch_keys(ranked, 0.0, BOUNDS._replace(margin=0.16)) == [0, 1, 2]


def test_late_ones_use_what_room_is_left() -> None:
    late = [short(key, 200, LMSYS, arrival_s=-0.5, deadline_s=-0.1) for key in (1, 2, 3, 4)]  # 30 ms each
    on_time = short(0, 100, LMSYS, deadline_s=0.4)
    assert batch_keys([*late, on_time], 0.0) == [0, 1, 2, 3]  # at most 100 ms, a quarter of their objective
    assert SPARE == 0.25
    assert batch_keys([*late, short(0, 100, LMSYS, deadline_s=0.08)], 0.0) == [0, 1]  # and before its deadline
    assert batch_keys(late, 0.0) == [1, 2, 3, 4]  # on their own they fill the bounds
    assert batch_keys(late, 0.0, BOUNDS._replace(budget_s=0.09)) == [1, 2]


def test_what_is_put_back_leaves_its_memory_to_others() -> None:
    tight = short(0, 200, LMSYS, deadline_s=0.1)
    longer = short(1, 600, LMSYS, deadline_s=0.2)
    late = short(2, 100, LMSYS, arrival_s=-0.5, deadline_s=-0.1)
    assert batch_keys([late, tight, longer], 0.0, BOUNDS._replace(free_kv_tokens=850)) == [0, 2]


def test_late_ones_join_shortest_first() -> None:
    late = [
        short(key, tokens, LMSYS, arrival_s=-5.0 + key, deadline_s=-4.6 + key)
        for key, tokens in ((0, 800), (1, 300), (2, 500), (3, 100))
    ]
    assert batch_keys(late, 0.0) == [3, 1, 2, 0]
    assert batch_keys(late, 0.0, BOUNDS._replace(budget_s=0.09)) == [3, 1]


def test_those_that_are_due_join_first_in_the_order_given() -> None:
    """The others use what time is left."""
    late = [
        short(key, tokens, LMSYS, arrival_s=arrival_s, deadline_s=arrival_s + 0.4)
        for key, tokens, arrival_s in ((0, 800, -3.0), (1, 900, -2.5), (2, 300, -1.5), (3, 100, -0.5))
    ]
    assert batch_keys(late[2:], 0.0, due=late[:2]) == [0, 1, 3, 2]
    assert batch_keys(late[2:], 0.0, BOUNDS._replace(budget_s=0.09), late[:2]) == [0]
    assert batch_keys([], 0.0, due=late) == [0, 1, 2, 3]
    urgent = short(4, 100, LMSYS, deadline_s=0.3, aged_class=1)
    assert batch_keys([urgent, *late[2:]], 0.0, due=late[:2])[:2] == [4, 3], "a class is not held up by a lower one"


def test_where_there_is_no_time_for_another_batch_none_is_put_back() -> None:
    ranked = [
        short(0, 100, LMSYS, deadline_s=0.2),
        short(1, 1000, LMSYS, deadline_s=0.3),
        short(2, 400, LMSYS, deadline_s=0.3),
        short(3, 200, LMSYS, arrival_s=-9.0, deadline_s=-8.6),
    ]
    assert batch_keys(ranked, 0.0) == [0, 2, 3]
    assert batch_keys(ranked, 0.0, BOUNDS._replace(keeps_deadlines=False)) == [0, 3, 2, 1]


def test_a_more_urgent_class_is_not_made_late() -> None:
    urgent = short(0, 100, LMSYS, deadline_s=0.05, aged_class=1)
    normal = [short(key, 100, LMSYS, deadline_s=0.06) for key in (1, 2)]
    due = short(3, 1000, LMSYS, arrival_s=-9.0, deadline_s=-8.6)
    assert batch_keys([urgent, *normal, due], 0.0) == [0, 1]
    # A late one of a more urgent class runs before those of the next that are on time.
    late = short(0, 1000, LMSYS, arrival_s=-0.5, deadline_s=-0.1, aged_class=1)
    assert batch_keys([late, *normal], 0.0)[0] == 0


def test_where_nothing_can_be_on_time_as_it_runs_the_batch_is_filled_all_the_same() -> None:
    # On its own tokens each takes 130 ms and would be on time; padded to 256 it takes 256 ms, and both take 512.
    ranked = [short(key, 130, COMPUTE_BOUND, deadline_s=0.14) for key in (0, 1)]
    formed = form_batch(ranked, 0.0, COMPUTE_BOUND, full_grid((256,), (1, 2)), BOUNDS)
    assert formed is not None
    assert keys(formed) == [0, 1]


def plain_time_s(members: tuple[RankedPrefill, ...] | list[RankedPrefill], cost: CostCoefficients) -> float:
    lengths = [(one.request.new_tokens, one.request.cached_tokens) for one in members]
    work = float(sum(new * (new + 2 * cached) for new, cached in lengths))
    return cost.iteration_s(work, sum(new for new, _ in lengths), sum(cached for _, cached in lengths))


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(
    waiting=st.lists(
        st.tuples(st.integers(1, 1000), st.integers(0, 500), st.integers(1, 60)),
        min_size=1,
        max_size=9,
    ),
    alpha_s=st.sampled_from([0.0, 1e-7]),
)
def test_no_subset_has_more_on_time_than_the_batch(waiting: list[tuple[int, int, int]], alpha_s: float) -> None:
    """Against all subsets: most of those that cannot wait, and with them most of those that can."""
    cost = CostCoefficients(alpha_s, 1.5e-4, 1e-6, 0.02)
    ranked = [
        short(key, new, cost, cached, deadline_s=0.01 * hundredths)
        for key, (new, cached, hundredths) in enumerate(waiting)
    ]
    formed = form_batch(ranked, 0.0, cost, NO_GRID, BOUNDS)
    assert formed is not None
    joined = [one for one in ranked if one.remaining_s <= one.request.deadline_s]
    after_s = plain_time_s(joined, cost)
    must = {one.request.key for one in joined if after_s + one.remaining_s > one.request.deadline_s}

    def on_time(members: tuple[RankedPrefill, ...] | list[RankedPrefill]) -> tuple[int, int]:
        count = sum(one.request.key in must for one in members)
        return count, len(members) - count

    best = (0, 0)
    if after_s <= min((one.request.deadline_s for one in joined), default=inf):
        best = on_time(joined)
    else:
        for size in range(len(joined) + 1):
            for members in combinations(joined, size):
                earliest_s = min((one.request.deadline_s for one in members), default=inf)
                if not members or plain_time_s(members, cost) <= earliest_s:
                    best = max(best, on_time(members))
    kept = [one for one in formed.members if formed.predicted_s <= one.request.deadline_s]
    assert on_time(kept) >= best
    if best > (0, 0):  # none of those that were put into it for being on time is late
        assert {one.request.key for one in formed.members} - {one.request.key for one in kept} <= {
            one.request.key for one in ranked if one not in joined
        }


candidates = st.lists(
    st.tuples(
        st.integers(1, 400),  # new tokens
        st.sampled_from([0, 0, 0, 50, 3000]),  # cached
        st.integers(0, 35) | st.integers(0, 300),  # arrived so many hundredths of a second ago
        st.sampled_from([10, 30, 40, 40, 40, 45, 50, 100, None]),  # from there to the deadline
        st.sampled_from([1, 2, 2, 2, 2, 3]),  # class
    ),
    min_size=1,
    max_size=24,
)
FEW = full_grid((32, 256), (1, 4, 16))
PREFIXES = GraphGrid(GRID.shapes, max_prefix_tokens=2000)


@pytest.mark.slow
@settings(max_examples=examples(600))
@given(
    waiting=candidates,
    cost=st.sampled_from(
        [
            OVERHEAD_BOUND,
            COMPUTE_BOUND,
            LMSYS,
            CostCoefficients(1e-7, 1e-4, 1e-6, 0.005),
            CostCoefficients(2e-6, 0.0, 1e-5, 0.0),
            CostCoefficients(1e-7, 1e-4, 1e-6, 0.012, 1e-3, CostCoefficients(1e-7, 5e-5, 1e-6, 0.003, 5e-4)),
        ]
    ),
    grid=st.sampled_from([NO_GRID, GRID, FEW, PREFIXES]),
    max_requests=st.sampled_from([1, 2, 5, 64]),
    max_tokens=st.sampled_from([300, 1500, 8192]),
    free=st.sampled_from([100, 700, 100_000]),
    page=st.sampled_from([1, 16]),
    budget_s=st.sampled_from([0.02, 0.1, 0.4, inf]),
    margin=st.sampled_from([0.0, 0.1]),
    patience_s=st.sampled_from([inf, 0.05, 0.5]),
)
def test_it_decides_as_the_plain_version(
    waiting: list[tuple[int, int, int, int | None, int]],
    cost: CostCoefficients,
    grid: GraphGrid,
    max_requests: int,
    max_tokens: int,
    free: int,
    page: int,
    budget_s: float,
    margin: float,
    patience_s: float,
) -> None:
    now_s = 10.0
    ranked = []
    for key, (new, cached, ago, objective, level) in enumerate(waiting):
        arrival_s = now_s - ago / 100
        deadline_s = inf if objective is None else arrival_s + objective / 100
        ranked.append(short(key, new, cost, cached, arrival_s=arrival_s, deadline_s=deadline_s, aged_class=level))
    ranked.sort()
    due = [one for one in ranked if one.request.arrival_s < now_s - patience_s]
    ranked = [one for one in ranked if one not in due]
    bounds = BatchBounds(max_requests, max_tokens, free, page, budget_s, margin)
    formed = form_batch(ranked, now_s, cost, grid, bounds, due)
    assert formed == plain_form_batch(ranked, now_s, cost, grid, bounds, due)
    if formed is None:
        return
    assert now_s + (1 + margin) * formed.predicted_s <= formed.deadline_s
    assert formed.new_tokens <= max_tokens or len(formed.members) == 1
    assert sum(-(-one.request.new_tokens // page) * page for one in formed.members) <= free
    assert len(formed.members) <= max_requests
    assert formed.predicted_s <= budget_s or len(formed.members) == 1


@pytest.mark.parametrize("grid", [NO_GRID, GRID])
@pytest.mark.parametrize("load", [0.9, 1.3])
@pytest.mark.parametrize("keeps_deadlines", [False, True])
def test_no_request_starves(grid: GraphGrid, load: float, keeps_deadlines: bool) -> None:
    """Also under a load that no machine could serve in time: every batch takes from the most urgent class, which a
    request that waits is lifted to after a time that is a multiple of what it takes."""
    random = Random(7)
    lengths = [int(2 ** random.uniform(3, 10)) for _ in range(1500)]
    per_s = load / (LMSYS.token_s * sum(lengths) / len(lengths))
    arrivals_s, now_s = [], 0.0
    for _ in lengths:
        now_s += random.expovariate(per_s)
        arrivals_s.append(now_s)
    waiting: list[int] = []
    index, now_s, lifted = 0, 0.0, 0
    while index < len(lengths) or waiting:
        while index < len(lengths) and arrivals_s[index] <= now_s:
            waiting.append(index)
            index += 1
        if not waiting:
            now_s = arrivals_s[index]
            continue
        queue = []
        for key in waiting:
            arrival_s = arrivals_s[key]
            lift_s = 20 * LMSYS.chunk_s(lengths[key], 0)
            level = aged_class(2, now_s - arrival_s, lift_s)
            queue.append(
                short(
                    key,
                    lengths[key],
                    LMSYS,
                    arrival_s=arrival_s,
                    deadline_s=arrival_s + 0.4,
                    aged_class=level,
                )
            )
        queue.sort()
        bounds = BOUNDS._replace(budget_s=0.3, keeps_deadlines=keeps_deadlines)
        formed = form_batch(queue, now_s, LMSYS, grid, bounds)
        assert formed is not None
        urgent = queue[0].urgency.aged_class
        assert any(member.urgency.aged_class == urgent for member in formed.members)
        lifted += urgent < 2
        left = set(keys(formed))
        waiting = [key for key in waiting if key not in left]
        now_s += formed.predicted_s
    assert load < 1 or lifted > 100
