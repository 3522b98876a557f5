"""Which failures count, and when the next try is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.batch.decide.retries import EndpointOutage, FailureKind, OutageSettings, retry_delay_s

LINE, UNAVAILABLE, UNREACHABLE = FailureKind.LINE, FailureKind.UNAVAILABLE, FailureKind.UNREACHABLE


@given(st.integers(1, 100), st.floats(0, 1))
def test_delays_grow_to_a_bound(failures: int, draw: float) -> None:
    delay_s = retry_delay_s(failures, None, draw)
    assert 0.25 <= delay_s <= 30.0
    assert delay_s <= 0.5 * 2 ** (failures - 1)


@given(st.integers(1, 20), st.floats(0, 300), st.floats(0, 1))
def test_never_before_what_the_endpoint_asked_for(failures: int, retry_after_s: float, draw: float) -> None:
    assert retry_after_s <= retry_delay_s(failures, retry_after_s, draw) <= max(30.0, 1.25 * retry_after_s)


def test_one_line_that_fails_alone_is_at_fault() -> None:
    outage = EndpointOutage()
    assert all(outage.on_failure(UNAVAILABLE, 1, float(now_s)) for now_s in range(10))
    assert not outage.is_down


def test_no_connection_is_never_at_a_lines_expense() -> None:
    outage = EndpointOutage()
    assert not any(outage.on_failure(UNREACHABLE, 1, float(now_s)) for now_s in range(0, 10_000, 100))
    assert outage.is_down


def test_several_lines_in_a_row_are_an_outage_for_a_while() -> None:
    outage = EndpointOutage(OutageSettings(lines_in_a_row=3, uncounted_s=600))
    assert [outage.on_failure(UNAVAILABLE, line, 1.0) for line in (1, 1, 2, 3, 4)] == [True, True, True, False, False]
    assert outage.is_down
    assert not outage.on_failure(UNAVAILABLE, 5, 600.0)
    assert outage.on_failure(UNAVAILABLE, 6, 602.0)
    assert outage.on_answer() == 1.0
    assert not outage.is_down
    assert outage.on_failure(UNAVAILABLE, 1, 700.0)


def test_an_error_of_the_endpoints_own_is_an_answer() -> None:
    outage = EndpointOutage()
    outage.on_failure(UNREACHABLE, 1, 0.0)
    assert outage.on_failure(LINE, 2, 1.0)
    assert not outage.is_down


@given(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=60))
def test_probes_come_less_and_less_often_but_keep_coming(gaps_s: list[float]) -> None:
    outage = EndpointOutage()
    now_s = 0.0
    outage.on_failure(UNREACHABLE, 1, now_s)
    for gap_s in gaps_s:
        now_s += gap_s
        before_s = outage.probe_at_s
        outage.on_failure(UNREACHABLE, 1, now_s)
        assert before_s <= outage.probe_at_s <= max(before_s, now_s + 10.0)


def test_the_last_lines_of_a_run_are_not_at_fault_for_an_outage_either() -> None:
    outage = EndpointOutage()
    assert outage.on_failure(FailureKind.UNAVAILABLE, 1, 0.0, lines_left=2), "the other one may be fine"
    assert not outage.on_failure(FailureKind.UNAVAILABLE, 2, 0.1, lines_left=2)
    assert not outage.on_failure(FailureKind.UNAVAILABLE, 1, 0.2, lines_left=2)
    assert outage.on_answer() == 0.1
    assert not outage.on_failure(FailureKind.UNAVAILABLE, 2, 0.3, lines_left=1)
    assert outage.on_failure(FailureKind.LINE, 2, 0.4, lines_left=1)
