"""Peers that are probed: the silent are found out in time, and no other is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.transfer.decide.options import HandshakeOptions
from sglang_ext.transfer.decide.peer_watch import PeerWatches

OPTIONS = HandshakeOptions(retry_s=0.5, heartbeat_s=1.0, lease_s=9.0, stall_timeout_s=100.0)


def probes(watches: PeerWatches, until_s: float, *, answers: bool, start_s: float = 0.0) -> list[float]:
    """When a peer is probed, which answers at once or never."""
    sent = []
    ticks = round((until_s - start_s) / OPTIONS.retry_s)
    for tick in range(ticks):
        now_s = start_s + tick * OPTIONS.retry_s
        for address in watches.on_timer(now_s):
            sent.append(now_s)
            if answers:
                watches.on_alive(address, 1, now_s)
    return sent


def test_an_idle_peer_is_probed_thrice_a_lease_and_forgotten_in_the_end() -> None:
    watches = PeerWatches(OPTIONS)
    assert watches.is_idle
    watches.need("a", 0.0)
    sent = probes(watches, 300.0, answers=True)
    assert sent[:3] == [0.0, 3.0, 6.0]
    assert sent[-1] < 2 * OPTIONS.stall_timeout_s
    assert watches.is_idle


def test_a_silent_peer_is_counted_after_the_lease_and_no_more_when_it_answers() -> None:
    watches = PeerWatches(OPTIONS)
    watches.need("a", 0.0)
    probes(watches, 20.0, answers=True)
    probes(watches, 27.0, answers=False, start_s=20.0)
    assert (watches.silent_count(27.0), list(watches.changes(27.0))) == (0, [])
    probes(watches, 40.0, answers=False, start_s=27.0)
    assert watches.silent_count(40.0) == 1
    assert list(watches.changes(40.0)) == [("a", True)]
    assert list(watches.changes(40.0)) == []
    watches.on_alive("a", 1, 40.0)
    assert watches.silent_count(40.0) == 0
    assert list(watches.changes(40.0)) == [("a", False)]


def test_a_request_that_waits_has_its_peer_probed_at_every_heartbeat() -> None:
    watches, sent = PeerWatches(OPTIONS), []
    for tick in range(20):
        now_s = tick * OPTIONS.retry_s
        assert (watches.loss_reason("a", 0.0, now_s) is None) == (now_s < OPTIONS.lease_s)
        sent += [now_s for _ in watches.on_timer(now_s)]
    assert sent == [float(second) for second in range(10)]
    assert watches.loss_reason("a", 0.0, 10.0) == "lost a: silent for 9 s"


def test_one_that_was_silent_before_gets_another_chance() -> None:
    watches = PeerWatches(OPTIONS)
    watches.need("a", 0.0)
    probes(watches, 30.0, answers=False)
    assert watches.loss_reason("a", 30.0, 30.0) is None
    assert list(watches.on_timer(30.5)) == ["a"]
    assert watches.loss_reason("a", 30.0, 31.0) is None
    assert watches.loss_reason("a", 30.0, 32.0) is not None
    watches.on_alive("a", 1, 32.0)
    assert watches.loss_reason("a", 30.0, 33.0) is None


def test_another_incarnation_is_a_lost_peer() -> None:
    watches = PeerWatches(OPTIONS)
    assert watches.loss_reason("a", 0.0, 0.0, epoch=1) is None
    watches.on_alive("a", 1, 0.0)
    assert watches.loss_reason("a", 0.0, 0.0, epoch=1) is None
    watches.on_alive("a", 2, 1.0)
    assert watches.loss_reason("a", 0.0, 1.0, epoch=1) == "a has been started again"
    assert watches.loss_reason("a", 0.0, 1.0) is None


def test_answers_of_unknown_peers_are_ignored() -> None:
    watches = PeerWatches(OPTIONS)
    watches.on_alive("a", 1, 0.0)
    assert watches.is_idle


@given(st.lists(st.floats(0.01, 60.0), min_size=1, max_size=30), st.floats(0, 5))
def test_a_pause_of_this_process_is_not_held_against_a_peer(pauses_s: list[float], delay_s: float) -> None:
    """Answers take a while, and are handed over before the timer is: then no pause between two calls matters."""
    watches, now_s, due_s = PeerWatches(OPTIONS), 0.0, None
    for pause_s in pauses_s:
        now_s += pause_s
        if due_s is not None and due_s <= now_s:
            watches.on_alive("a", 1, now_s)
            due_s = None
        for _ in watches.on_timer(now_s):
            due_s = now_s + delay_s if due_s is None else due_s
        assert watches.loss_reason("a", 0.0, now_s) is None


@pytest.mark.slow
@pytest.mark.parametrize("needed", [True, False])
@given(steps_s=st.lists(st.floats(0.01, OPTIONS.retry_s), min_size=200, max_size=200))
def test_a_silent_peer_is_lost_in_time_whatever_the_ticks(needed: bool, steps_s: list[float]) -> None:
    watches, now_s = PeerWatches(OPTIONS), 0.0
    watches.need("a", 0.0)
    silent_s = None
    for step_s in steps_s:
        now_s += step_s
        if needed:
            watches.loss_reason("a", 0.0, now_s)
        for _ in watches.on_timer(now_s):
            if silent_s is None:
                silent_s = now_s
        if silent_s is not None:
            assert watches.silent_count(now_s) == (now_s - silent_s >= OPTIONS.lease_s)
