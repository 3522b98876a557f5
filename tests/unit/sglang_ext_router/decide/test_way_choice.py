"""Which requests an undivided instance serves, and which are divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.types import PrefillLoad
from sglang_ext_router.decide.prefill_choice import predicted_end_s
from sglang_ext_router.decide.way_choice import (
    MEMORY_S,
    PlainLoad,
    WayCost,
    choose_plain,
    common_rate,
    way_costs_s,
)

RATE = 1000.0
PROMPT = 200


def load(pending: int = 0, cached: int = 0, in_flight: int = 0, number: int = 0) -> PrefillLoad:
    return PrefillLoad(number, pending, in_flight, cached, RATE)


def plain(pending: int = 0, cached: int = 0, free: int = 100_000, in_flight: int = 0) -> PlainLoad:
    return PlainLoad(load(pending, cached, in_flight), free)


def choose(
    plains: list[PlainLoad],
    divided: PrefillLoad | None,
    prompt: int = PROMPT,
    reply: int = 0,
    sequences: int = 1,
    limit: int = 512,
    costs: tuple[float, float] = (0.0, 0.0),
) -> int | None:
    loads = [one.load for one in plains] + ([divided] if divided is not None else [])
    rate = common_rate(loads) if loads else 0.0
    return choose_plain(plains, divided, prompt, reply, sequences, limit, rate, *costs)


@pytest.mark.parametrize(
    ("plains", "divided", "options", "expected"),
    [
        ([plain()], load(), {}, 0),  # no KV has to travel
        ([plain(pending=1)], load(), {}, None),
        ([plain(pending=50)], load(), {"costs": (0.0, 0.1)}, 0),  # what the transfer takes
        ([plain(pending=50)], load(), {"costs": (0.1, 0.1)}, None),  # what the decodes beside it take
        ([plain()], load(), {"prompt": 513}, None),  # it would hold up the decodes
        ([plain(cached=400)], load(), {"prompt": 513}, 0),  # of new tokens
        ([plain()], load(), {"sequences": 3}, None),  # of all sequences
        ([plain(free=199)], load(), {}, None),
        ([plain(free=300)], load(), {"reply": 101}, None),
        ([plain(free=300)], load(), {"reply": 100}, 0),
        ([plain()], load(cached=150), {}, None),  # its prefix is worth more than the way
        ([plain(pending=10), plain(), plain(pending=20)], load(), {}, 1),
        ([plain(in_flight=2), plain(in_flight=1)], load(), {}, 1),
        ([plain(free=10), plain(pending=30)], load(pending=100), {}, 1),
        # Without another way it serves everything.
        ([plain()], None, {"prompt": 9000}, 0),
        ([plain(free=10)], None, {"prompt": 9000}, 0),
        ([plain(free=10), plain(pending=9000)], None, {}, 1),
        ([], None, {}, None),
        ([], load(), {}, None),
    ],
)
def test_the_way_of_a_request(
    plains: list[PlainLoad], divided: PrefillLoad | None, options: dict[str, object], expected: int | None
) -> None:
    assert choose(plains, divided, **options) == expected  # type: ignore[arg-type]


@given(
    pending=st.lists(st.integers(0, 5000), min_size=1, max_size=4),
    divided=st.integers(0, 5000),
    prompt=st.integers(1, 512),
    costs=st.tuples(st.floats(0, 10), st.floats(0, 10)),
)
def test_no_way_with_a_later_first_token_is_taken(
    pending: list[int], divided: int, prompt: int, costs: tuple[float, float]
) -> None:
    plains = [plain(tokens) for tokens in pending]
    chosen = choose(plains, load(divided), prompt=prompt, costs=costs)
    ends_s = [predicted_end_s(one.load, prompt) + costs[0] for one in plains]
    divided_s = predicted_end_s(load(divided), prompt) + costs[1]
    if chosen is None:
        assert divided_s < min(ends_s)
    else:
        assert ends_s[chosen] == min(ends_s)
        assert ends_s[chosen] <= divided_s


def test_an_idle_instance_that_gets_only_short_prompts_gets_the_next_one_too() -> None:
    """It shows a low rate, as each prompt has a fixed cost; the other one gets long prompts and shows a high one."""
    slow = PlainLoad(load()._replace(tokens_per_s=300.0), 100_000)
    fast = load()._replace(tokens_per_s=8000.0)
    assert choose([slow], fast, prompt=40) == 0
    assert choose([slow], fast, prompt=40, costs=(0.5, 0.05)) is None  # it is slower at the same length
    assert choose([PlainLoad(slow.load._replace(pending_tokens=40), 100_000)], fast, prompt=40) is None


def test_a_way_costs_what_its_streams_took_longer() -> None:
    cost, other = WayCost(), WayCost()
    assert way_costs_s(cost, other, 0.0) == (0.0, 0.0)
    for number in range(200):
        cost.observe(1.0, 0.6, number * 0.01)
    assert way_costs_s(cost, other, 2.0)[0] == pytest.approx(0.4, rel=0.05)
    for number in range(200):
        cost.observe(0.5, 0.6, 3.0 + number * 0.01)
    assert way_costs_s(cost, other, 5.0)[0] == pytest.approx(0.0, abs=0.01)


def test_a_way_of_which_nothing_is_known_is_taken_to_cost_what_the_other_does() -> None:
    known, unknown = WayCost(), WayCost()
    known.observe(1.0, 0.6, 0.0)
    assert way_costs_s(known, unknown, 0.0) == pytest.approx((0.4, 0.4))
    assert way_costs_s(unknown, known, 0.0) == pytest.approx((0.4, 0.4))


def test_a_way_that_was_slow_once_is_forgotten_and_never_preferred_for_it() -> None:
    slow, fast = WayCost(), WayCost()
    for at_s in (0.0, 1.0):
        slow.observe(1.0, 0.5, at_s)
    for at_s in range(300):
        fast.observe(0.6, 0.5, float(at_s))
    earlier = way_costs_s(slow, fast, 2.0)
    later = way_costs_s(slow, fast, 300.0)
    assert earlier == pytest.approx((0.5, 0.1), abs=0.03)
    assert later == pytest.approx((0.1, 0.1), abs=0.01)
    for at_s in (300.0, 1000.0, 10_000.0, 1e9):
        costs = way_costs_s(slow, fast, at_s)
        assert costs[0] >= costs[1]
    assert way_costs_s(slow, fast, 300.0 + 20 * MEMORY_S)[0] == pytest.approx(0.1, abs=0.01)
