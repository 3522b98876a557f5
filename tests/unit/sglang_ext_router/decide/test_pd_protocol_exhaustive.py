"""Every state that the protocol can be brought into by any sequence of events, and every event in each of them."""

from __future__ import annotations

from copy import copy
from typing import TypeAlias

import pytest

from sglang_ext_router.decide.pd_actions import Leg
from sglang_ext_router.decide.pd_protocol import PDProtocol, RequestPhase
from support.pd_monitor import Event, Monitor, feed

STATUSES = (100, 200, 302, 400, 429, 500)
LEG_EVENTS = ("on_first_body", "on_leg_complete", "on_leg_connect_failed", "on_leg_lost", "on_leg_stale")
STREAM_EVENTS = tuple(Event("on_stream_lost", leg, age=age) for leg in Leg for age in (0, 1))
EVENTS = (
    *(Event(name) for name in ("start", "on_client_gone", "on_timeout", "on_evicted")),
    *(Event(name, age=age) for name in ("on_no_instance", "on_retry_timer", "on_retry_refused") for age in (0, 1)),
    *(Event(name, age=age) for name in ("on_no_instance_yet", "on_instance_back", "serve_undivided") for age in (0, 1)),
    *(Event(name, leg, age=age) for name in LEG_EVENTS for leg in Leg for age in (0, 1)),
    *(Event("on_leg_head", leg, status) for leg in Leg for status in STATUSES),
    *(Event("on_error_event", leg, status) for leg in Leg for status in (400, 429, 500)),
    *(Event("on_leg_head", leg, 500, age=1) for leg in Leg),
    *(Event("on_error_event", leg, 500, age=1) for leg in Leg),
)


Path: TypeAlias = "tuple[Path, Event] | None"


def story(path: Path) -> str:
    """The events of a path in order."""
    events: list[Event] = []
    while path is not None:
        path, event = path
        events.append(event)
    return " → ".join(str(tuple(event)) for event in reversed(events))


def clone(protocol: PDProtocol) -> PDProtocol:
    twin = copy(protocol)
    twin._legs = list(protocol._legs)
    return twin


def explore(
    max_retries: int,
    is_stream: bool,
    is_single: bool,
    needs_decode: bool = True,
    max_migrations: int = 0,
    max_evictions: int = 0,
) -> tuple[int, set[RequestPhase]]:
    """Feed every event in every reachable state; returns how many states there are, and their phases."""
    protocol = PDProtocol(
        max_retries,
        max_migrations=max_migrations,
        is_stream=is_stream,
        is_single_sequence=is_single,
        needs_decode=needs_decode,
    )
    monitor = Monitor(max_retries, is_stream, needs_decode, max_migrations)
    frontier: list[tuple[PDProtocol, Monitor, Path]] = [(protocol, monitor, None)]
    seen: set[tuple[object, ...]] = set()
    phases: set[RequestPhase] = set()
    while frontier:
        protocol, monitor, path = frontier.pop()
        phases.add(protocol.phase)
        for event in EVENTS + STREAM_EVENTS if is_stream else EVENTS:
            if event.name == "on_evicted" and monitor.evictions >= max_evictions:
                continue
            next_protocol, next_monitor = clone(protocol), monitor.copy()
            try:
                next_monitor.step(event, feed(next_protocol, event))
            except AssertionError as error:
                raise AssertionError(f"{error}: {story((path, event))}") from error
            assert next_protocol.is_over == next_monitor.is_over
            key = (
                next_protocol._phase,
                next_protocol._attempt,
                tuple(next_protocol._legs),
                next_protocol._statuses,
                next_protocol._losses,
                next_protocol._restarts,
                next_protocol._migrations,
                next_protocol._is_divided,
                next_monitor.key(),
            )
            if key not in seen:
                seen.add(key)
                frontier.append((next_protocol, next_monitor, (path, event)))
        if not protocol.is_over:
            last, last_monitor = clone(protocol), monitor.copy()
            last_monitor.step(Event("on_timeout"), last.on_timeout())
            assert last.is_over, "a time limit must always end the protocol"
    return len(seen), phases


@pytest.mark.full
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_single", [False, True])
@pytest.mark.parametrize("max_retries", [0, 1])
def test_every_reachable_state_keeps_the_promises(max_retries: int, is_stream: bool, is_single: bool) -> None:
    states, phases = explore(max_retries, is_stream, is_single)
    expected = set(RequestPhase) if max_retries else set(RequestPhase) - {RequestPhase.SETTLING, RequestPhase.BACKOFF}
    assert phases == expected
    assert states > 100


@pytest.mark.full
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_single", [False, True])
@pytest.mark.parametrize("max_retries", [0, 1, 2])
def test_prefill_alone_keeps_them_too(max_retries: int, is_stream: bool, is_single: bool) -> None:
    states, phases = explore(max_retries, is_stream, is_single, needs_decode=False)
    retrying = {RequestPhase.BACKOFF} if max_retries else set()
    # With one leg nothing is left to wait for: neither another's word on a 5xx nor a leg behind the relayed one.
    expected = {RequestPhase.NEW, RequestPhase.OPEN, RequestPhase.RELAYING, RequestPhase.RELAYING_ERROR}
    expected.add(RequestPhase.WAITING)
    assert phases == expected | retrying | {RequestPhase.OVER}
    assert states > 20


@pytest.mark.full
@pytest.mark.parametrize("needs_decode", [False, True])
@pytest.mark.parametrize("max_migrations", [1, 2])
def test_streams_that_go_on_elsewhere_keep_them_too(max_migrations: int, needs_decode: bool) -> None:
    states, _ = explore(1, True, True, needs_decode, max_migrations)
    without, _ = explore(1, True, True, needs_decode)
    assert states > without


@pytest.mark.full
@pytest.mark.parametrize("needs_decode", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
def test_requests_that_make_room_keep_them_too(is_stream: bool, needs_decode: bool) -> None:
    states, _ = explore(0, is_stream, True, needs_decode, max_evictions=1)
    without, _ = explore(0, is_stream, True, needs_decode)
    assert states > without
