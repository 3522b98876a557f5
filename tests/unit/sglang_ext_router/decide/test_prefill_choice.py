"""Where each prefill policy sends a request."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.types import PrefillLoad
from sglang_ext_router.decide.prefill_choice import (
    PREFILL_POLICIES,
    CacheAware,
    PredictedWait,
    PrefillPowerOfTwo,
    PrefillRandomChoice,
    PrefillRoundRobin,
    choose_helper,
    predicted_end_s,
    predicted_wait_s,
    prefill_policy,
)

DRAWS = st.floats(0, 1, exclude_max=True)


def load(
    index: int = 0,
    *,
    pending: int = 0,
    in_flight: int = 0,
    cached: int = 0,
    rate: float = 1000.0,
    computed: int = 0,
) -> PrefillLoad:
    return PrefillLoad(index, pending, in_flight, cached, rate, computed)


def partly_computed(index: int, pending: int, in_flight: int, cached: int, rate: float, share: float) -> PrefillLoad:
    return PrefillLoad(index, pending, in_flight, cached, rate, int(share * pending))


LOADS = st.lists(
    st.builds(
        partly_computed,
        st.integers(0, 1000),
        st.integers(0, 3) | st.integers(0, 10**6),
        st.integers(0, 3),
        st.integers(0, 3) | st.integers(0, 10**6),
        st.sampled_from([0.0, 1.0, 1000.0, 1234.5]),
        st.sampled_from([0.0, 0.5, 1.0]),
    ),
    min_size=1,
    max_size=9,
)


@pytest.mark.full
@pytest.mark.parametrize("name", PREFILL_POLICIES)
@given(loads=LOADS, prompt=st.integers(1, 10**6), draw=DRAWS)
def test_chooses_a_position_of_any_loads(name: str, loads: list[PrefillLoad], prompt: int, draw: float) -> None:
    assert 0 <= prefill_policy(name).choose(loads, prompt, draw) < len(loads)


def test_names() -> None:
    assert PREFILL_POLICIES == ("predicted_wait", "round_robin", "random", "power_of_two", "cache_aware")
    with pytest.raises(ValueError, match=r"'fastest'.*predicted_wait, round_robin, random, power_of_two, cache_aware"):
        prefill_policy("fastest")


def test_predicted_wait_s() -> None:
    assert predicted_wait_s(load(pending=500)) == 0.5
    assert predicted_wait_s(load(pending=1, rate=0.5)) == 2.0
    assert predicted_wait_s(load(pending=0, rate=0.0)) == 0.0
    assert predicted_wait_s(load(pending=1, rate=0.0)) == float("inf")
    assert predicted_wait_s(load(pending=500, computed=400)) == 0.1


class TestPredictedWait:
    choose = staticmethod(PredictedWait().choose)

    def test_the_shorter_queue(self) -> None:
        assert self.choose([load(pending=900), load(pending=100)], 100, 0.0) == 1

    def test_a_faster_instance_may_have_the_longer_queue(self) -> None:
        assert self.choose([load(pending=900, rate=10_000.0), load(pending=100)], 100, 0.0) == 0

    def test_a_cached_prefix_is_worth_what_it_saves(self) -> None:
        holder, idle = load(pending=500, cached=800), load()
        assert self.choose([holder, idle], 1000, 0.0) == 0
        assert self.choose([holder._replace(pending_tokens=900), idle], 1000, 0.0) == 1

    def test_where_others_wait_it_is_worth_more(self) -> None:
        loads = [load(pending=900, cached=800), load()]  # 0.9 s more to wait, 0.8 s less to compute
        assert [self.choose(loads, 1000, 0.0, price) for price in (0.0, 0.1, 0.2, 5.0)] == [1, 1, 0, 0]

    def test_what_is_cached_beyond_the_prompt_saves_nothing(self) -> None:
        assert self.choose([load(pending=1, cached=10_000), load(cached=100)], 100, 0.0) == 1

    def test_a_prompt_that_is_cached_whole_still_costs_its_last_token(self) -> None:
        assert self.choose([load(cached=100, in_flight=1), load(cached=99)], 100, 0.0) == 1
        assert self.choose([load(cached=100, in_flight=1), load(cached=98)], 100, 0.0) == 0

    def test_a_large_batch_that_is_about_to_end_is_less_than_a_small_one_that_has_begun(self) -> None:
        assert self.choose([load(pending=900, computed=800), load(pending=200)], 100, 0.0) == 0

    def test_ties_go_to_the_fewest_in_flight(self) -> None:
        assert self.choose([load(in_flight=2), load(in_flight=1), load(in_flight=2)], 10, 0.0) == 1

    def test_remaining_ties_are_spread_by_the_draw(self) -> None:
        loads = [load(pending=5), load(), load(), load(in_flight=1), load()]
        counts = Counter(self.choose(loads, 10, draw / 300) for draw in range(300))
        assert counts == {1: 100, 2: 100, 4: 100}

    def test_an_instance_without_a_rate_comes_last(self) -> None:
        assert self.choose([load(rate=0.0), load(pending=10**9)], 10, 0.0) == 1
        assert self.choose([load(rate=0.0, in_flight=3), load(rate=0.0, in_flight=2)], 10, 0.0) == 1

    @given(loads=LOADS, prompt=st.integers(1, 10**6), draw=DRAWS)
    def test_no_instance_would_end_earlier(self, loads: list[PrefillLoad], prompt: int, draw: float) -> None:
        def key(one: PrefillLoad) -> tuple[float, int]:
            tokens = one.pending_tokens - one.computed_tokens + max(1, prompt - one.cached_tokens)
            end_s = tokens / one.tokens_per_s if one.tokens_per_s else float("inf")
            return end_s, one.in_flight

        assert key(loads[self.choose(loads, prompt, draw)]) == min(map(key, loads))


class TestRoundRobin:
    def test_takes_turns(self) -> None:
        policy = PrefillRoundRobin()
        loads = [load(7), load(3), load(9)]
        assert [policy.choose(loads, 1, 0.9) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]

    def test_two_pools_in_turn_do_not_starve_anybody(self) -> None:
        policy = PrefillRoundRobin()
        short, long = [load(1), load(2)], [load(3), load(4)]
        taken = Counter(pool[policy.choose(pool, 1, 0.0)].worker_id for _ in range(50) for pool in (short, long))
        assert taken == {1: 25, 2: 25, 3: 25, 4: 25}

    @pytest.mark.slow
    @given(st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=60))
    def test_no_instance_is_passed_over_twice_for_the_same_one(self, sets: list[set[int]]) -> None:
        policy = PrefillRoundRobin()
        waiting: dict[int, set[int]] = {}  # who was taken while this one was present and not taken
        for present in sets:
            loads = [load(index) for index in sorted(present)]
            taken = loads[policy.choose(loads, 1, 0.0)].worker_id
            waiting[taken] = set()
            for index in present - {taken}:
                assert taken not in waiting.setdefault(index, set())
                waiting[index].add(taken)


def test_random_is_uniform() -> None:
    counts = Counter(PrefillRandomChoice().choose([load()] * 4, 1, draw / 400) for draw in range(400))
    assert counts == {0: 100, 1: 100, 2: 100, 3: 100}


class TestPowerOfTwo:
    def test_draws_every_pair_equally_and_takes_the_shorter_queue(self) -> None:
        loads = [load(pending=pending) for pending in (30, 10, 20)]
        counts = Counter(PrefillPowerOfTwo().choose(loads, 1, (draw + 0.5) / 600) for draw in range(600))
        assert counts == {1: 400, 2: 200}, "the worst is never better than the other one drawn"

    def test_equal_queues_go_to_the_fewer_in_flight(self) -> None:
        loads = [load(in_flight=2), load(in_flight=1)]
        assert {PrefillPowerOfTwo().choose(loads, 1, draw) for draw in (0.1, 0.9)} == {1}


class TestCacheAware:
    choose = staticmethod(CacheAware().choose)

    def test_the_longest_prefix_while_balanced(self) -> None:
        assert self.choose([load(), load(cached=400, in_flight=9), load(cached=300)], 1000, 0.0) == 1

    def test_a_prefix_below_the_threshold_does_not_count(self) -> None:
        assert self.choose([load(in_flight=1), load(cached=299, in_flight=2)], 1000, 0.0) == 0
        assert self.choose([load(in_flight=1), load(cached=300, in_flight=2)], 1000, 0.0) == 1

    def test_the_shortest_queue_when_out_of_balance(self) -> None:
        assert self.choose([load(cached=1000, in_flight=65), load(in_flight=0)], 1000, 0.0) == 1
        assert self.choose([load(cached=1000, in_flight=64), load(in_flight=0)], 1000, 0.0) == 0

    def test_a_relative_difference_alone_or_an_absolute_one_alone_is_no_imbalance(self) -> None:
        assert self.choose([load(cached=1000, in_flight=10), load(in_flight=1)], 1000, 0.0) == 0
        assert self.choose([load(cached=1000, in_flight=1100), load(in_flight=1000)], 1000, 0.0) == 0

    def test_the_default_thresholds_of_balance(self) -> None:
        assert self.choose([load(cached=1000, in_flight=70), load(in_flight=40)], 1000, 0.0) == 0
        assert self.choose([load(cached=1000, in_flight=200), load(in_flight=134)], 1000, 0.0) == 0
        assert self.choose([load(cached=1000, in_flight=200), load(in_flight=133)], 1000, 0.0) == 1

    def test_the_ends_of_the_ranges_are_allowed(self) -> None:
        CacheAware(cache_threshold=0, balance_abs=0, balance_rel=1)
        CacheAware(cache_threshold=1)

    def test_an_idle_pool_is_spread_by_the_draw(self) -> None:
        assert [self.choose([load(), load()], 1000, draw) for draw in (0.0, 0.6)] == [0, 1]

    @pytest.mark.parametrize(("field", "value"), [("cache_threshold", 1.5), ("balance_abs", -1), ("balance_rel", 0.9)])
    def test_nonsense_is_refused_by_name(self, field: str, value: float) -> None:
        with pytest.raises(ValueError, match=f"^{field} must be"):
            CacheAware(**{field: value})  # type: ignore[arg-type]


ONE_LOAD = st.builds(
    load,
    pending=st.integers(0, 50_000),
    in_flight=st.integers(0, 9),
    cached=st.integers(0, 3_000),
    rate=st.sampled_from([0.0, 1_000.0, 10_000.0]),
)


@pytest.mark.slow
@given(own=ONE_LOAD, others=st.lists(ONE_LOAD, max_size=5), prompt=st.integers(1, 4_000), draw=DRAWS)
def test_who_helps_waits_less_than_half_as_long_and_ends_first(
    own: PrefillLoad, others: list[PrefillLoad], prompt: int, draw: float
) -> None:
    helper = choose_helper(own, others, prompt, 1.0, draw)
    if predicted_wait_s(own) <= 1.0:
        assert helper is None
    if helper is not None:
        ends = [predicted_end_s(one, prompt) for one in others]
        assert ends[helper] == min(ends) < predicted_end_s(own, prompt)
        assert predicted_wait_s(others[helper]) < predicted_wait_s(own) / 2
    elif predicted_wait_s(own) > 1.0:
        idle = [one for one in others if one.pending_tokens == 0 and one.tokens_per_s > 0]
        if idle and all(one.tokens_per_s == own.tokens_per_s for one in others):
            assert predicted_end_s(own, prompt) <= max(predicted_end_s(one, prompt) for one in idle)


def test_no_one_helps_where_there_are_none_or_nothing_is_known() -> None:
    own = load(pending=9_000)
    assert choose_helper(own, [], 100, 1.0, 0.0) is None
    assert choose_helper(own, [load(rate=0.0, pending=1)], 100, 1.0, 0.0) is None
    assert choose_helper(load(pending=9_000, rate=0.0), [load()], 100, 1.0, 0.0) == 0
