"""Decode's slots are called for shortly before a prompt's turn: not earlier, and in the end always."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.transfer.decide.slot_calls import ANSWER_S, LatePrompt, QueuedWork, SlotCalls

A, B, C = (LatePrompt(name, float(name), 1000) for name in (1, 2, 3))


def test_a_prompt_is_called_once_when_no_more_than_the_lookahead_is_before_it() -> None:
    calls = SlotCalls(500)
    assert calls.due([QueuedWork(0.5, 501)], [A], 0.0) == []
    assert calls.due([QueuedWork(0.5, 500)], [A], 1.0) == [1]
    assert calls.due([], [A], 2.0) == []


def test_what_came_later_is_not_before_it() -> None:
    assert SlotCalls(500).due([QueuedWork(1.5, 9_000), QueuedWork(0.5, 100)], [A], 0.0) == [1]


def test_those_that_are_called_are_before_the_next_until_decode_could_have_answered() -> None:
    calls = SlotCalls(500)
    assert calls.due([], [A, B, C], 0.0) == [1]
    assert calls.due([], [A, B, C], 0.9 * ANSWER_S) == []
    # Its decode instance has no room. Another one may have.
    assert calls.due([], [A, B, C], ANSWER_S) == [2]
    # It has its slots now, and is in the queue.
    assert calls.due([QueuedWork(1.0, 1000)], [B, C], ANSWER_S) == []
    assert calls.due([QueuedWork(1.0, 100)], [C], ANSWER_S) == [3]


def test_one_of_which_decode_does_not_know_yet_holds_up_no_other() -> None:
    calls = SlotCalls(500)
    assert calls.due([], [A._replace(is_invited=False), B], 0.0) == [2]
    assert calls.due([], [A, B], 1.0) == [1]


def test_short_prompts_are_called_together() -> None:
    prompts = [LatePrompt(name, float(name), 200) for name in range(5)]
    assert SlotCalls(500).due([], prompts, 0.0) == [0, 1, 2]


def test_without_a_lookahead_all_are_called() -> None:
    assert SlotCalls(None).due([QueuedWork(0.0, 10**9)], [A, B, C], 0.0) == [1, 2, 3]


def test_a_room_that_is_used_again_is_called_again() -> None:
    calls = SlotCalls(500)
    assert calls.due([], [A], 0.0) == [1]
    assert calls.due([], [], 1.0) == []
    assert calls.due([], [A], 2.0) == [1]


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 3000)), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 3000)), max_size=12),
    st.integers(1, 2000),
)
def test_all_get_their_turn_in_order_and_none_too_early(
    late: list[tuple[int, int]], queued: list[tuple[int, int]], lookahead_tokens: int
) -> None:
    """A queue in the order of arrival: none is called while more than the lookahead is before it, and the queue
    becomes empty."""
    calls, now_s = SlotCalls(lookahead_tokens), 0.0
    waiting = [LatePrompt(index, float(arrival), tokens) for index, (arrival, tokens) in enumerate(late)]
    work = [QueuedWork(float(arrival), tokens) for arrival, tokens in queued]
    while waiting or work:
        due = calls.due(work, waiting, now_s)
        for prompt in waiting:
            before = sum(one.left_tokens for one in work if one.arrival_s <= prompt.arrival_s)
            assert before <= lookahead_tokens or prompt.transfer_id not in due
        work += [QueuedWork(one.arrival_s, one.prompt_tokens) for one in waiting if one.transfer_id in due]
        waiting = [one for one in waiting if one.transfer_id not in due]
        assert work, "an idle instance calls for the next prompt"
        work.remove(min(work))
        now_s += 1.0
