"""Watches one prefill-decode protocol from outside and fails at the first action that breaks a promise.

It knows what was fed and what came out, nothing of the protocol's inner state.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sglang_ext_router.decide.pd_actions import (
    AbortLeg,
    Actions,
    CloseClient,
    ContinueStream,
    EmitErrorEvent,
    Exclude,
    Leg,
    RecordFailure,
    RecordSuccess,
    RelayReply,
    ReleaseTrial,
    ReplyError,
    RequestFinished,
    ScheduleRetry,
    StartLegs,
)
from sglang_ext_router.decide.pd_protocol import PDProtocol

FAULTS = (500, 502, 503, 504)
BUSY = (408, 429)


class Event(NamedTuple):
    """A call of a method of the protocol; `leg` and `status` where it takes them, `age` attempts too late."""

    name: str
    leg: Leg | None = None
    status: int | None = None
    age: int = 0


_GLOBAL = ("start", "on_client_gone", "on_timeout", "on_evicted")


def feed(protocol: PDProtocol, event: Event) -> Actions:
    """Carry an event to the protocol."""
    method = getattr(protocol, event.name)
    if event.name in _GLOBAL:
        actions: Actions = method()
    elif event.leg is None:
        actions = method(protocol.attempt - event.age)
    elif event.status is None:
        actions = method(event.leg, protocol.attempt - event.age)
    else:
        actions = method(event.leg, protocol.attempt - event.age, event.status)
    return actions


@dataclass
class LegRecord:
    """One leg of the current attempt."""

    status: int = 0  # of its head; 0 before it
    is_failed_inside: bool = False
    is_closed: bool = False  # completed, lost or aborted
    is_completed: bool = False
    is_lost: bool = False
    is_stale: bool = False  # its kept connection was closed
    is_judged: bool = False

    @property
    def is_fine(self) -> bool:
        return 200 <= self.status < 300 and not self.is_failed_inside


@dataclass
class Monitor:
    """Everything that may be known of the protocol without looking into it."""

    max_retries: int
    is_stream: bool
    needs_decode: bool = True
    max_migrations: int = 0
    legs: list[LegRecord] | None = None
    attempt: int = -1
    is_waiting: bool = False  # for an instance, or for a place
    is_undivided: bool = False  # this attempt
    scheduled: int = -1  # highest back-off index asked for
    restarts: int = 0  # attempts that are no retries
    migrations: int = 0
    evictions: int = 0
    losses: int = 0  # legs that an instance had, or may have had
    relayed: Leg | None = None
    replied: bool = False
    broken: bool = False
    is_over: bool = False
    total_aborts: dict[tuple[int, Leg], int] = field(default_factory=dict)

    @property
    def served_by(self) -> Leg:
        """The leg whose success the client is shown."""
        return Leg.DECODE if self.needs_decode and not self.is_undivided else Leg.PREFILL

    def _fresh_legs(self) -> list[LegRecord]:
        return [LegRecord(), LegRecord() if self.needs_decode else LegRecord(is_closed=True, is_judged=True)]

    def copy(self) -> Monitor:
        legs = None if self.legs is None else [replace(leg) for leg in self.legs]
        return replace(self, legs=legs, total_aborts=dict(self.total_aborts))

    def key(self) -> tuple[object, ...]:
        """For telling visited states apart."""
        legs = () if self.legs is None else tuple(tuple(vars(leg).values()) for leg in self.legs)
        return (
            legs,
            self.attempt,
            self.is_waiting,
            self.is_undivided,
            self.scheduled,
            self.restarts,
            self.migrations,
            self.evictions,
            self.losses,
            self.relayed,
            self.replied,
            self.broken,
            self.is_over,
        )

    def step(self, event: Event, actions: Actions) -> None:
        """Take in an event and what it brought about."""
        if self.is_over:
            assert actions == (), "an action after the end"
            return
        self._note(event)
        finished_at = None
        for position, action in enumerate(actions):
            assert finished_at is None, "an action after RequestFinished"
            match action:
                case StartLegs(attempt) if event.name == "on_instance_back":
                    assert self.is_waiting
                    assert attempt == self.attempt, "waiting is no attempt"
                    assert self.legs is None
                    self.is_waiting = self.is_undivided = False
                    self.legs = self._fresh_legs()
                case StartLegs(attempt, is_restart):
                    is_migration = event.name == "on_stream_lost"
                    self.restarts += is_restart or is_migration
                    assert self.restarts <= 1 + self.migrations + self.evictions
                    assert is_restart <= (event.name == "on_leg_stale")
                    assert attempt == self.attempt + 1 <= self.max_retries + self.restarts
                    assert self.losses <= max(1, self.migrations), "sent again after it was lost twice"
                    assert self.relayed is None
                    assert not self.replied
                    is_due = attempt == 0 or is_restart or is_migration or self.scheduled == attempt - 1
                    assert is_due, "a retry that was not scheduled"
                    self._check_nothing_leaks()
                    self.attempt = attempt
                    self.is_undivided = False
                    self.legs = self._fresh_legs()
                case AbortLeg(leg):
                    record = self._leg(leg)
                    assert not record.is_closed, "aborted what had ended"
                    record.is_closed = True
                    key = (self.attempt, leg)
                    self.total_aborts[key] = self.total_aborts.get(key, 0) + 1
                    assert self.total_aborts[key] == 1
                case RecordSuccess(leg):
                    record = self._judge(leg)
                    assert record.is_completed
                    assert record.is_fine
                case RecordFailure(leg):
                    record = self._judge(leg)
                    is_gone = record.is_lost or record.is_stale
                    assert is_gone or record.is_failed_inside or record.status in FAULTS
                    assert is_gone or record.status not in BUSY
                case ReleaseTrial(leg):
                    record = self._judge(leg)
                    assert not record.is_lost
                    assert self.relayed is not leg or record.status not in FAULTS, (
                        "a shown 5xx without a recorded failure"
                    )
                case Exclude(leg):
                    record = self._leg(leg)
                    assert record.is_lost or record.is_stale or not record.is_fine
                    assert self.scheduled == self.attempt or any(
                        isinstance(later, ScheduleRetry | ContinueStream) for later in actions
                    ), "an exclusion without another attempt"
                case ScheduleRetry(index):
                    assert index == self.attempt > self.scheduled
                    assert index - self.restarts < self.max_retries
                    assert self.losses <= max(1, self.migrations), "tried again after it was lost twice"
                    assert self.relayed is None
                    self.scheduled = index
                case RelayReply(leg):
                    assert self.relayed is None, "two heads"
                    assert not self.replied
                    record = self._leg(leg)
                    assert record.status >= 200
                    assert leg is self.served_by or not record.is_fine, "prefill's success is not shown beside decode's"
                    self.relayed = leg
                case ReplyError(status, _):
                    assert self.relayed is None
                    assert not self.replied
                    assert 400 <= status < 600
                    self.replied = True
                case ContinueStream():
                    assert event.name == "on_stream_lost"
                    assert event.leg is self.relayed is self.served_by
                    assert self.is_stream
                    assert self.migrations < self.max_migrations
                    self.migrations += 1
                    self.relayed = None
                case EmitErrorEvent() | CloseClient():
                    assert self.relayed is not None
                    assert not self.broken
                    assert not isinstance(action, EmitErrorEvent) or self.is_stream
                    self.broken = True
                case RequestFinished():
                    finished_at = position
                    self.is_over = True
                    self._check_end(event)
        if event.name == "on_evicted" and actions:
            assert self.relayed is None
            assert not any(isinstance(action, RecordFailure) for action in actions), "nobody has failed"
            self._check_nothing_leaks()
            self.legs, self.is_waiting = None, True
            self.attempt += 1
            self.restarts += 1
            self.evictions += 1
        if not self.is_over and self.legs is not None and self.relayed is None and self.attempt >= 0:
            both_closed = all(leg.is_closed for leg in self.legs)
            assert not both_closed or self.scheduled == self.attempt, "stuck: nothing open, nothing scheduled"

    def _note(self, event: Event) -> None:
        """What the event says about the legs, if it is about the current attempt."""
        if event.name in ("on_no_instance", "on_no_instance_yet") and event.age == 0 and self.legs is not None:
            untouched = self.legs == self._fresh_legs()
            if untouched and self.scheduled < self.attempt:
                self.legs = None
                self.is_waiting = event.name == "on_no_instance_yet"
        is_unsent = self.legs is not None and self.legs == self._fresh_legs() and self.scheduled < self.attempt
        if event.name == "serve_undivided" and event.age == 0 and is_unsent:
            self.is_undivided = True
            self.legs = [LegRecord(), LegRecord(is_closed=True, is_judged=True)]
        if event.leg is None or event.age or self.legs is None:
            return
        record = self.legs[event.leg]
        if record.is_closed:
            return
        match event.name:
            case "on_leg_head" if record.status == 0 and event.status is not None and event.status >= 200:
                record.status = event.status
            case "on_error_event" if record.is_fine:
                assert event.status is not None
                record.is_failed_inside = True
                record.status = event.status
            case "on_leg_complete" if record.status:
                record.is_completed = record.is_closed = True
            case "on_leg_stale":
                record.is_stale = record.is_closed = True
                self.losses += 1
            case "on_leg_complete" | "on_leg_lost" | "on_stream_lost" | "on_leg_connect_failed":
                record.is_lost = record.is_closed = True
                self.losses += event.name != "on_leg_connect_failed"

    def _leg(self, leg: Leg) -> LegRecord:
        assert self.legs is not None, "an action on a leg that was not started"
        return self.legs[leg]

    def _judge(self, leg: Leg) -> LegRecord:
        record = self._leg(leg)
        assert not record.is_judged, "two verdicts"
        assert record.is_closed, "a verdict before the end"
        record.is_judged = True
        return record

    def _check_nothing_leaks(self) -> None:
        for record in self.legs or ():
            assert record.is_closed, "a leg was left open"
            assert record.is_judged, "a leg without a verdict"

    def _check_end(self, event: Event) -> None:
        self._check_nothing_leaks()
        if event.name == "on_client_gone":
            return
        assert self.replied or self.relayed is not None, "the client was told nothing"
        if self.relayed is self.served_by and self._leg(self.served_by).is_fine:
            is_whole = self._leg(self.served_by).is_completed
            assert self.broken != is_whole, "a reply cut short looks whole, or a whole one was broken"
