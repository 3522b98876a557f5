"""Opening, half-opening and closing, and what must not open a circuit."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_ext_router.decide.circuit_breaker import CircuitBreaker, CircuitState


def fail_in_sequence(breaker: CircuitBreaker, count: int, start_s: float = 0.0) -> float:
    """Requests one after the other, each failing a second after its start; returns the time of the last failure."""
    for number in range(count):
        breaker.on_start(start_s + 2 * number)
        breaker.record_failure(start_s + 2 * number, start_s + 2 * number + 1)
    return start_s + 2 * count - 1


class TestOpening:
    def test_after_the_threshold(self) -> None:
        breaker = CircuitBreaker()
        fail_in_sequence(breaker, 4)
        assert breaker.can_try(8.0)
        fail_in_sequence(breaker, 1, start_s=8.0)
        assert not breaker.can_try(9.0)
        assert breaker.state(9.0) is CircuitState.OPEN

    def test_a_burst_is_one_piece_of_evidence(self) -> None:
        breaker = CircuitBreaker()
        for number in range(100):
            breaker.record_failure(started_s=number / 1000, now_s=1.0 + number / 1000)
        assert breaker.state(2.0) is CircuitState.CLOSED

    def test_requests_of_the_burst_that_fail_late_do_not_count_either(self) -> None:
        breaker = CircuitBreaker()
        for number in range(100):
            breaker.record_failure(started_s=0.5, now_s=1.0 + number)
        assert breaker.state(101.0) is CircuitState.CLOSED

    def test_requests_started_at_the_moment_of_a_failure_had_not_seen_it(self) -> None:
        breaker = CircuitBreaker()
        for _ in range(10):
            breaker.record_failure(started_s=1.0, now_s=1.0)
        assert breaker.state(1.0) is CircuitState.CLOSED

    def test_a_success_in_between_starts_anew(self) -> None:
        breaker = CircuitBreaker()
        end_s = fail_in_sequence(breaker, 4)
        breaker.record_success(end_s + 1)
        end_s = fail_in_sequence(breaker, 4, start_s=end_s + 2)
        assert breaker.state(end_s) is CircuitState.CLOSED

    def test_a_success_of_before_the_failure_does_not(self) -> None:
        breaker = CircuitBreaker()
        end_s = fail_in_sequence(breaker, 4)
        breaker.record_success(end_s + 1, started_s=end_s - 10)
        fail_in_sequence(breaker, 1, start_s=end_s + 2)
        assert not breaker.can_try(end_s + 4)

    def test_failures_outside_the_window_are_forgotten(self) -> None:
        breaker = CircuitBreaker(window_s=60.0)
        for number in range(20):
            breaker.record_failure(started_s=number * 15.0, now_s=number * 15.0 + 0.5)
            assert breaker.state(number * 15.0 + 0.5) is CircuitState.CLOSED
        breaker = CircuitBreaker(window_s=60.0)
        for number in range(5):
            breaker.record_failure(started_s=number * 14.9, now_s=number * 14.9 + 0.05)
        assert not breaker.can_try(60.0)


class TestHalfOpen:
    def opened(self, success_threshold: int = 2) -> CircuitBreaker:
        breaker = CircuitBreaker(failure_threshold=1, success_threshold=success_threshold, open_s=30.0)
        breaker.record_failure(started_s=0.0, now_s=100.0)
        assert not breaker.can_try(129.9)
        assert breaker.state(130.0) is CircuitState.HALF_OPEN
        return breaker

    def test_one_trial_at_a_time(self) -> None:
        breaker = self.opened()
        assert breaker.can_try(130.0)
        breaker.on_start(130.0)
        assert not breaker.can_try(131.0)
        breaker.record_success(132.0)
        assert breaker.can_try(132.0)
        assert breaker.state(132.0) is CircuitState.HALF_OPEN
        breaker.on_start(132.0)
        breaker.record_success(133.0)
        assert breaker.state(133.0) is CircuitState.CLOSED

    def test_a_failed_trial_opens_again(self) -> None:
        breaker = self.opened()
        breaker.on_start(130.0)
        breaker.record_failure(started_s=130.0, now_s=131.0)
        assert not breaker.can_try(160.9)
        assert breaker.can_try(161.0)

    def test_an_old_request_that_fails_during_the_trial_does_not(self) -> None:
        breaker = self.opened()
        breaker.on_start(130.0)
        breaker.record_failure(started_s=99.0, now_s=131.0)
        breaker.record_success(132.0)
        assert breaker.can_try(132.0)

    def test_an_abandoned_trial_is_given_back(self) -> None:
        breaker = self.opened()
        breaker.on_start(130.0)
        breaker.release_trial()
        assert breaker.can_try(130.1)

    def test_a_trial_without_an_outcome_is_replaced(self) -> None:
        breaker = self.opened()
        breaker.on_start(130.0)
        assert not breaker.can_try(159.9)
        assert breaker.can_try(160.0)
        breaker.on_start(160.0)
        assert not breaker.can_try(160.1)

    def test_asking_does_not_claim(self) -> None:
        breaker = self.opened()
        assert all(breaker.can_try(130.0) for _ in range(3))

    def test_successes_of_before_a_failed_trial_do_not_count(self) -> None:
        breaker = self.opened()
        breaker.on_start(130.0)
        breaker.record_success(131.0)
        breaker.on_start(131.0)
        breaker.record_failure(started_s=131.0, now_s=132.0)
        breaker.on_start(162.0)
        breaker.record_success(163.0)
        assert breaker.state(163.0) is CircuitState.HALF_OPEN

    def test_a_success_while_open_starts_the_count_of_successes(self) -> None:
        breaker = self.opened()
        breaker.on_start(130.0)
        breaker.record_success(131.0)
        breaker.record_failure(started_s=131.0, now_s=132.0)
        breaker.record_success(134.0, started_s=133.0)
        assert breaker.state(134.0) is CircuitState.HALF_OPEN

    def test_failures_before_opening_do_not_count_after_closing(self) -> None:
        breaker = CircuitBreaker(failure_threshold=2, success_threshold=1)
        end_s = fail_in_sequence(breaker, 2)
        breaker.on_start(end_s + 30)
        breaker.record_success(end_s + 31)
        fail_in_sequence(breaker, 1, start_s=end_s + 32)
        assert breaker.state(end_s + 33) is CircuitState.CLOSED

    def test_a_success_while_open_is_a_trial_passed(self) -> None:
        breaker = self.opened(success_threshold=1)
        breaker.on_start(101.0)  # every other circuit of the pool was open
        breaker.record_success(102.0, started_s=101.0)
        assert breaker.state(102.0) is CircuitState.CLOSED


def test_one_failure_is_enough_where_another_router_suspects_the_instance() -> None:
    breaker = CircuitBreaker(failure_threshold=3)
    breaker.is_suspected = True
    breaker.record_success(1.0, 0.5)
    assert breaker.state(1.0) is CircuitState.CLOSED
    breaker.record_failure(2.0, 3.0)
    assert breaker.state(3.0) is CircuitState.OPEN
    breaker = CircuitBreaker(failure_threshold=3)
    breaker.record_failure(2.0, 3.0)
    breaker.is_suspected = True
    assert breaker.state(3.0) is CircuitState.CLOSED, "its own next failure opens it"


def test_quiet_is_closed_without_a_remembered_failure() -> None:
    breaker = CircuitBreaker(failure_threshold=2, success_threshold=1)
    quiet = [breaker.is_quiet]
    breaker.record_failure(started_s=0.0, now_s=1.0)
    quiet.append(breaker.is_quiet)
    breaker.record_success(3.0, started_s=2.0)
    quiet.append(breaker.is_quiet)
    end_s = fail_in_sequence(breaker, 2, start_s=4.0)
    quiet.append(breaker.is_quiet)
    breaker.on_start(end_s + 30)
    quiet.append(breaker.is_quiet)
    breaker.record_success(end_s + 31)
    quiet.append(breaker.is_quiet)
    assert quiet == [True, False, True, False, False, True]


def test_defaults() -> None:
    breaker = CircuitBreaker()
    bounds = (breaker.failure_threshold, breaker.success_threshold, breaker.open_s, breaker.window_s)
    assert bounds == (5, 2, 30.0, 60.0)


@pytest.mark.parametrize("field", ["failure_threshold", "success_threshold", "open_s", "window_s"])
def test_nonsense_is_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        CircuitBreaker(**{field: 0})


class AnyHistory(RuleBasedStateMachine):
    """Requests start and end in any order; the clock only goes forward."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.breaker = CircuitBreaker(failure_threshold=3, success_threshold=2, open_s=5.0, window_s=20.0)
        self.open_requests: list[float] = []
        self.trials: list[float] = []
        self.failures = 0

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def start(self) -> None:
        if self.breaker.can_try(self.now_s):
            half_open = self.breaker.state(self.now_s) is CircuitState.HALF_OPEN
            self.breaker.on_start(self.now_s)
            self.open_requests.append(self.now_s)
            if half_open:
                assert not self.breaker.can_try(self.now_s), "a second trial beside the first"

    @precondition(lambda self: self.open_requests)
    @rule(data=st.data(), is_failure=st.booleans())
    def end(self, data: st.DataObject, is_failure: bool) -> None:
        started_s = self.open_requests.pop(data.draw(st.integers(0, len(self.open_requests) - 1)))
        if is_failure:
            self.breaker.record_failure(started_s, self.now_s)
        else:
            self.breaker.record_success(self.now_s, started_s)

    @invariant()
    def recovers_by_waiting(self) -> None:
        assert self.breaker.can_try(self.now_s + self.breaker.open_s)


TestAnyHistory = pytest.mark.slow(AnyHistory.TestCase)
