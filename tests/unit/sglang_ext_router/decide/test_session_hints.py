"""Hints of conversations: bounded, for a prompt that goes on behind its turn, and never worth more than it."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.types import PrefillLoad
from sglang_ext_router.decide.prefill_choice import PredictedWait, predicted_end_s
from sglang_ext_router.decide.session_hints import NO_SESSION, SessionHints, session_key
from support.examples import examples


def load(worker_id: int, pending_tokens: int = 0, cached_tokens: int = 0, tokens_per_s: float = 1000.0) -> PrefillLoad:
    return PrefillLoad(worker_id, pending_tokens, 0, cached_tokens, tokens_per_s, 0)


LOADS = st.lists(
    st.tuples(st.integers(0, 20_000), st.integers(0, 4000), st.sampled_from([0.0, 500.0, 1000.0, 1003.0, 9000.0])),
    min_size=1,
    max_size=5,
).map(lambda given: [load(number, *item) for number, item in enumerate(given)])
HASHES = st.lists(st.integers(1, 3), max_size=4)


def chained(blocks: list[int]) -> list[int]:
    """Hashes that, as those of a prompt, cover all blocks before them."""
    found: list[int] = []
    for block in blocks:
        found.append(hash((found[-1] if found else 0, block)) & 0xFFFF_FFFF)
    return found


def test_a_turn_goes_where_the_turn_before_went() -> None:
    hints = SessionHints(10)
    hints.record(1, 7, 100, [])
    loads = [load(6), load(7), load(8)]
    (first, second, third) = hints.hinted(1, loads, [], 150)
    assert (first, third) == (loads[0], loads[2])
    assert second == load(7, cached_tokens=100)
    assert hints.hinted(2, loads, [], 150) is loads
    assert hints.hinted(1, loads[:1], [], 150) == loads[:1], "its instance may not get the request"


@pytest.mark.parametrize(
    ("before", "now", "tokens", "is_hint"),
    [
        ([], [], 100, True),
        ([], [], 99, True),
        ([], [1], 300, True),
        ([1, 2], [1, 2], 99, True),  # estimates of the same text differ from time to time
        ([1, 2], [1, 2, 3], 300, True),
        ([1, 2], [1, 3, 3], 300, False),
        ([1, 2], [3, 2, 3], 300, False),
        ([1, 2], [1], 300, False),
    ],
)
def test_only_what_goes_on_behind_the_turn_has_a_hint(
    before: list[int], now: list[int], tokens: int, is_hint: bool
) -> None:
    hints = SessionHints(10)
    hints.record(1, 7, 100, chained(before))
    hinted = hints.hinted(1, [load(7)], chained(now), tokens)
    assert hinted == [load(7, cached_tokens=min(100, tokens - 1) if is_hint else 0)]


def test_what_is_known_to_be_cached_stays() -> None:
    hints = SessionHints(10)
    hints.record(1, 7, 100, [])
    loads = [load(7, cached_tokens=120)]
    assert hints.hinted(1, loads, [], 150) is loads


def test_an_instance_that_failed_or_restarted_has_no_hint() -> None:
    hints = SessionHints(10)
    for session in range(4):
        hints.record(session, session % 2, 100, [])
    hints.forget(0, 1)
    assert len(hints) == 4, "another instance has it"
    hints.forget(0, 0)
    hints.forget(9, 0)
    assert len(hints) == 3
    hints.forget_worker(1)
    assert len(hints) == 1
    assert hints.hinted(2, [load(0)], [], 100) == [load(0, cached_tokens=99)]


def test_keys() -> None:
    assert session_key("a") == session_key(b"a") != session_key("b")
    assert session_key("") != NO_SESSION
    with pytest.raises(ValueError, match="capacity"):
        SessionHints(0)


@settings(max_examples=examples(200))
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(1, 50), st.sampled_from("rfw")), max_size=60),
)
def test_it_is_bounded_and_forgets_what_was_used_least_recently(
    capacity: int, events: list[tuple[int, int, int, str]]
) -> None:
    hints = SessionHints(capacity)
    model: OrderedDict[int, tuple[int, int]] = OrderedDict()
    for session, worker, tokens, kind in events:
        if kind == "r":
            hints.record(session, worker, tokens, [])
            model.pop(session, None)
            model[session] = worker, tokens
            if len(model) > capacity:
                model.popitem(last=False)
        elif kind == "f":
            hints.forget(session, worker)
            if model.get(session, (None,))[0] == worker:
                del model[session]
        else:
            hints.forget_worker(worker)
            model = OrderedDict((key, value) for key, value in model.items() if value[0] != worker)
        assert len(hints) == len(model) <= capacity
        for key in range(1, 10):
            hinted = hints.hinted(key, [load(number) for number in range(4)], [], 1000)
            cached = {item.worker_id: item.cached_tokens for item in hinted if item.cached_tokens}
            assert cached == (dict([model[key]]) if key in model else {})


@settings(max_examples=examples(500))
@given(LOADS, st.integers(0, 6), st.integers(1, 6000), HASHES, st.integers(1, 6000), HASHES, st.floats(0, 0.999))
def test_a_hint_is_worth_the_turn_and_no_more(
    loads: list[PrefillLoad],
    worker_id: int,
    turn_tokens: int,
    before: list[int],
    prompt_tokens: int,
    now: list[int],
    draw: float,
) -> None:
    """The instance that is chosen ends at most as much later than the best one as computing the turn takes there, and
    any other choice than without the hint is the conversation's instance."""
    hints = SessionHints(3)
    hints.record(1, worker_id, turn_tokens, chained(before))
    policy = PredictedWait()
    hinted = hints.hinted(1, loads, chained(now), prompt_tokens)
    assert [item._replace(cached_tokens=0) for item in hinted] == [item._replace(cached_tokens=0) for item in loads]
    chosen, alone = policy.choose(hinted, prompt_tokens, draw), policy.choose(loads, prompt_tokens, draw)
    if loads[chosen].worker_id != worker_id:
        assert predicted_end_s(loads[chosen], prompt_tokens) == predicted_end_s(loads[alone], prompt_tokens)
        return
    saved_s = turn_tokens / loads[chosen].tokens_per_s if loads[chosen].tokens_per_s else 0.0
    best_s = predicted_end_s(loads[alone], prompt_tokens)
    assert predicted_end_s(loads[chosen], prompt_tokens) <= best_s + saved_s + 1e-9


@settings(max_examples=examples(200))
@given(LOADS, st.integers(1, 6000), st.floats(0, 0.999))
def test_without_a_turn_nothing_changes(loads: list[PrefillLoad], prompt_tokens: int, draw: float) -> None:
    hints = SessionHints(3)
    hints.record(2, 0, 10, [])
    assert hints.hinted(1, loads, [], prompt_tokens) is loads
