"""Which requests an undivided instance serves, and which are divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.types import PrefillLoad
from sglang_ext_router.decide.prefill_choice import predicted_end_s
from sglang_ext_router.decide.way_choice import MEMORY_S, PlainLoad, WayCost, choose_plain

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
    return choose_plain(plains, divided, prompt, reply, sequences, limit, *costs)


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


def test_a_way_costs_what_its_streams_took_longer() -> None:
    cost = WayCost()
    assert cost.cost_s(0.0) == 0.0
    for number in range(200):
        cost.observe(1.0, 0.6, number * 0.01)
    assert cost.cost_s(2.0) == pytest.approx(0.4, rel=0.05)
    assert cost.cost_s(2.0 + MEMORY_S) == pytest.approx(0.2, rel=0.05)
    for number in range(200):
        cost.observe(0.5, 0.6, 3.0 + number * 0.01)
    assert cost.cost_s(5.0) == pytest.approx(0.0, abs=0.01)
