"""Where each decode policy sends a request."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.types import DecodeLoad
from sglang_ext_router.decide.decode_choice import (
    DECODE_POLICIES,
    DecodePowerOfTwo,
    DecodeRandomChoice,
    DecodeRoundRobin,
    Freeness,
    decode_policy,
    fits,
    freeness,
)

DRAWS = st.floats(0, 1, exclude_max=True)
SMALL_OR_LARGE = st.integers(0, 4) | st.integers(0, 10**6)
LOADS = st.lists(
    st.builds(
        DecodeLoad,
        *(st.integers(0, 99), SMALL_OR_LARGE, SMALL_OR_LARGE, st.integers(0, 5), st.just(4096), st.floats(0, 1)),
    ),
    min_size=1,
    max_size=9,
)


def load(index: int = 0, *, free: int = 1000, reserved: int = 0, batch: int = 0, held: float = 0.0) -> DecodeLoad:
    return DecodeLoad(index, free, reserved, batch, 4096, held)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODE_POLICIES)
@given(loads=LOADS, draw=DRAWS)
def test_chooses_a_position_of_any_loads(name: str, loads: list[DecodeLoad], draw: float) -> None:
    assert 0 <= decode_policy(name).choose(loads, draw) < len(loads)


def test_names() -> None:
    assert DECODE_POLICIES == ("freeness", "round_robin", "random", "power_of_two")
    with pytest.raises(ValueError, match=r"'cache_aware'.*freeness, round_robin, random, power_of_two"):
        decode_policy("cache_aware")


def test_fits_up_to_the_longest_prompt() -> None:
    assert fits(load(free=0), 4096)
    assert not fits(load(), 4097)


class TestFreeness:
    choose = staticmethod(Freeness().choose)

    def test_formula(self) -> None:
        assert freeness(load(free=1000, reserved=200, batch=4)) == 200.0
        assert freeness(load(free=1000, batch=0)) == freeness(load(free=1000, batch=1)) == 1000.0

    def test_virtual_usage_counts(self) -> None:
        assert self.choose([load(free=1000, reserved=600, batch=1), load(free=500, batch=1)], 0.0) == 1

    def test_a_larger_batch_needs_more_room(self) -> None:
        assert self.choose([load(free=1000, batch=10), load(free=500, batch=2)], 0.0) == 1

    def test_an_empty_batch_wins_a_tie(self) -> None:
        assert self.choose([load(batch=1), load(batch=0)], 0.0) == 1

    def test_a_shortage_is_not_diluted_by_the_batch(self) -> None:
        short = load(free=0, reserved=100, batch=1)
        crowded = load(free=0, reserved=100, batch=50)
        assert freeness(short) > freeness(crowded)
        assert self.choose([crowded, short], 0.0) == 1

    def test_what_holds_the_prompt_is_taken_unless_another_is_much_freer(self) -> None:
        """Twice as free where it holds all of the prompt; also where nothing is free."""
        holder = load(free=500, batch=1, held=0.9)
        assert self.choose([load(free=900, batch=1), holder], 0.0) == 1
        assert self.choose([load(free=990, batch=1), holder], 0.0) == 0
        assert self.choose([load(free=900, batch=1), load(free=400, batch=1, held=1.0), holder], 0.0) == 2
        short = load(free=0, reserved=150, held=0.9)
        assert self.choose([load(free=0, reserved=100), short], 0.0) == 1
        assert self.choose([load(free=0, reserved=70), short], 0.0) == 0

    @given(loads=LOADS, draw=DRAWS)
    def test_it_is_the_highest_freeness(self, loads: list[DecodeLoad], draw: float) -> None:
        assert freeness(loads[self.choose(loads, draw)]) == max(map(freeness, loads))

    def test_ties_are_spread_by_the_draw(self) -> None:
        loads = [load(free=900), load(), load(batch=1), load()]
        counts = Counter(self.choose(loads, draw / 200) for draw in range(200))
        assert counts == {1: 100, 3: 100}

    @given(loads=LOADS, draw=DRAWS)
    def test_no_instance_is_freer(self, loads: list[DecodeLoad], draw: float) -> None:
        chosen = loads[self.choose(loads, draw)]
        assert freeness(chosen) == max(map(freeness, loads))
        equals = [one for one in loads if freeness(one) == freeness(chosen)]
        assert chosen.batch_size == min(one.batch_size for one in equals)


def test_round_robin_takes_turns() -> None:
    policy = DecodeRoundRobin()
    loads = [load(4), load(2), load(8)]
    assert [policy.choose(loads, 0.9) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_random_is_uniform() -> None:
    counts = Counter(DecodeRandomChoice().choose([load()] * 3, draw / 300) for draw in range(300))
    assert counts == {0: 100, 1: 100, 2: 100}


def test_power_of_two_takes_the_freer_of_a_random_pair() -> None:
    loads = [load(free=free) for free in (10, 30, 20)]
    counts = Counter(DecodePowerOfTwo().choose(loads, (draw + 0.5) / 600) for draw in range(600))
    assert counts == {1: 400, 2: 200}
