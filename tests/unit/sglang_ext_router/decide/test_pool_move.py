"""A move between pools: every way it can go, and that a switch which did nothing is noticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.laps.decide.round_plan import LapsMode
from sglang_ext.types import LengthClass
from sglang_ext_router.decide.pool_move import (
    VERIFY_PAUSE_S,
    AwaitDrain,
    HoldBack,
    MoveActions,
    MoveFinished,
    MoveOutcome,
    MovePhase,
    MovePlan,
    PoolMove,
    PostMode,
    ReadMode,
    Relabel,
    Release,
)

SHORT, LONG = LengthClass.SHORT, LengthClass.LONG
PLAN = MovePlan(SHORT, LONG, can_drain=True, verify_timeout_s=10.0)
NOW_S = 100.0


def switching(plan: MovePlan = PLAN, mode: LapsMode = LapsMode.SHORT) -> PoolMove:
    """A move whose switch has just been sent; the instance was at generation 3."""
    move = PoolMove(plan)
    move.start()
    move.on_drained()
    assert move.on_mode(mode, 3, NOW_S) == (PostMode(LapsMode.LONG),)
    return move


def verifying(mode: LapsMode = LapsMode.SHORT) -> PoolMove:
    move = switching(mode=mode)
    assert move.on_switched(NOW_S) == (ReadMode(0.0),)
    return move


def undoing(mode: LapsMode = LapsMode.SHORT) -> PoolMove:
    move = switching(mode=mode)
    assert move.on_switch_failed("answered 500", NOW_S) == (PostMode(mode),)
    return move


def outcome(actions: MoveActions) -> MoveOutcome:
    assert isinstance(actions[-1], MoveFinished)
    assert actions[-2] == Release()
    return actions[-1].outcome


def detail(actions: MoveActions) -> str:
    assert isinstance(actions[-1], MoveFinished)
    return actions[-1].detail


def test_the_good_way() -> None:
    move = PoolMove(PLAN)
    assert move.start() == (HoldBack(), AwaitDrain())
    assert move.on_drained() == (ReadMode(0.0),)
    assert move.on_mode(LapsMode.SHORT, 3, NOW_S) == (PostMode(LapsMode.LONG),)
    assert move.on_switched(NOW_S) == (ReadMode(0.0),)
    assert move.on_mode(LapsMode.LONG, 4, NOW_S) == (Relabel(LONG), Release(), MoveFinished(MoveOutcome.MOVED, ""))
    assert move.is_over


def test_the_last_of_a_pool_serves_until_it_is_switched() -> None:
    assert PoolMove(PLAN._replace(can_drain=False)).start() == (ReadMode(0.0),)


def test_what_does_not_end_in_time_is_served_in_the_new_mode() -> None:
    move = PoolMove(PLAN)
    move.start()
    assert move.on_drain_timeout() == (ReadMode(0.0),)


def test_an_instance_in_the_mode_already_is_only_relabelled() -> None:
    move = PoolMove(PLAN)
    move.start()
    move.on_drained()
    actions = move.on_mode(LapsMode.LONG, 3, NOW_S)
    assert actions[0] == Relabel(LONG)
    assert outcome(actions) is MoveOutcome.MOVED


def test_an_instance_that_cannot_be_read_is_not_switched() -> None:
    move = PoolMove(PLAN)
    move.start()
    move.on_drained()
    actions = move.on_mode_unknown("no answer", NOW_S)
    assert outcome(actions) is MoveOutcome.FAILED
    assert "no answer" in detail(actions)


def test_a_switch_may_take_its_time() -> None:
    move = verifying()
    assert move.on_mode(LapsMode.SHORT, 3, NOW_S + 5) == (ReadMode(VERIFY_PAUSE_S),)
    assert move.on_mode_unknown("busy", NOW_S + 9) == (ReadMode(VERIFY_PAUSE_S),)
    assert outcome(move.on_mode(LapsMode.LONG, 4, NOW_S + 30)) is MoveOutcome.MOVED


@pytest.mark.parametrize(
    ("mode", "generation"), [(LapsMode.SHORT, 3), (LapsMode.SHORT, 4), (LapsMode.LONG, 3), (LapsMode.BOTH, 4)]
)
def test_a_switch_that_did_nothing_is_undone(mode: LapsMode, generation: int) -> None:
    move = verifying()
    assert move.on_mode(mode, generation, NOW_S + 10) == (PostMode(LapsMode.SHORT),)
    assert move.phase is MovePhase.UNDOING
    assert move.on_switched(NOW_S + 11) == (ReadMode(0.0),)
    actions = move.on_mode(LapsMode.SHORT, 5, NOW_S + 11)
    assert outcome(actions) is MoveOutcome.FAILED
    assert Relabel(LONG) not in actions
    assert f"mode {mode} and generation {generation}" in detail(actions)


def test_the_mode_before_is_what_comes_back_not_the_label() -> None:
    move = undoing(LapsMode.BOTH)
    move.on_switched(NOW_S)
    assert move.on_mode(LapsMode.SHORT, 9, NOW_S) == (ReadMode(VERIFY_PAUSE_S),)
    assert outcome(move.on_mode(LapsMode.BOTH, 9, NOW_S)) is MoveOutcome.FAILED


def test_a_switch_without_an_answer_is_looked_at_before_it_is_undone() -> None:
    move = switching()
    assert move.on_switch_unanswered(NOW_S) == (ReadMode(0.0),)
    assert outcome(move.on_mode(LapsMode.LONG, 4, NOW_S)) is MoveOutcome.MOVED


def test_a_switch_that_cannot_be_verified_is_undone() -> None:
    assert verifying().on_mode_unknown("gone quiet", NOW_S + 10) == (PostMode(LapsMode.SHORT),)


def test_an_undo_that_is_refused_may_still_find_the_old_mode() -> None:
    move = undoing()
    assert move.on_switch_failed("answered 500", NOW_S) == (ReadMode(0.0),)
    actions = move.on_mode(LapsMode.SHORT, 3, NOW_S)
    assert outcome(actions) is MoveOutcome.FAILED
    assert detail(actions) == "the switch failed: answered 500"


@pytest.mark.parametrize("is_silent", [False, True])
def test_an_undo_that_cannot_be_verified_is_told(is_silent: bool) -> None:
    move = undoing()
    move.on_switched(NOW_S)
    for now_s in (NOW_S + 1, NOW_S + 10):
        actions = move.on_mode_unknown("no answer", now_s) if is_silent else move.on_mode(LapsMode.LONG, 4, now_s)
    assert outcome(actions) is MoveOutcome.NOT_UNDONE
    assert Relabel(LONG) not in actions


def test_nothing_begins_before_the_start_and_nothing_follows_the_end() -> None:
    move = PoolMove(PLAN)
    assert move.on_drained() == move.on_lost("down") == move.on_mode(LapsMode.LONG, 9, NOW_S) == ()
    move.start()
    assert outcome(move.on_lost("down")) is MoveOutcome.LOST
    assert move.start() == move.on_drained() == move.on_switched(NOW_S) == move.on_lost("down") == ()


EVENTS = st.one_of(
    st.just("drained"),
    st.just("drain_timeout"),
    st.just("switched"),
    st.just("unanswered"),
    st.just("failed"),
    st.just("unknown"),
    st.just("lost"),
    st.tuples(st.sampled_from(LapsMode), st.integers(0, 6)),
)


def feed(move: PoolMove, event: str | tuple[LapsMode, int], now_s: float) -> MoveActions:
    match event:
        case "drained":
            return move.on_drained()
        case "drain_timeout":
            return move.on_drain_timeout()
        case "switched":
            return move.on_switched(now_s)
        case "unanswered":
            return move.on_switch_unanswered(now_s)
        case "failed":
            return move.on_switch_failed("x", now_s)
        case "unknown":
            return move.on_mode_unknown("x", now_s)
        case (mode, generation):
            return move.on_mode(LapsMode(mode), int(generation), now_s)
    return move.on_lost("x")


@pytest.mark.slow
@given(st.lists(st.tuples(EVENTS, st.floats(0, 5)), max_size=30), st.booleans())
def test_whatever_happens_the_instance_is_released_and_relabelled_only_when_seen(
    events: list[tuple[str | tuple[LapsMode, int], float]], can_drain: bool
) -> None:
    move = PoolMove(PLAN._replace(can_drain=can_drain))
    given_actions = list(move.start())
    now_s, seen = 0.0, (LapsMode.SHORT, 0)
    for event, after_s in [*events, ("lost", 0.0)]:
        now_s += after_s
        was_over = move.is_over
        seen = event if isinstance(event, tuple) else seen
        actions = feed(move, event, now_s)
        assert not (was_over and actions)
        if any(isinstance(action, Relabel) for action in actions):
            assert seen[0] is LapsMode.LONG
        # At most one action of a batch asks for an event, and it is the last.
        asking = [isinstance(action, AwaitDrain | ReadMode | PostMode) for action in actions]
        assert not any(asking[:-1])
        given_actions += actions
    assert move.is_over
    finished = [action for action in given_actions if isinstance(action, MoveFinished)]
    assert len(finished) == 1
    assert given_actions[-2:] == [Release(), finished[0]]
    relabelled = any(isinstance(action, Relabel) for action in given_actions)
    assert relabelled == (finished[0].outcome is MoveOutcome.MOVED)
