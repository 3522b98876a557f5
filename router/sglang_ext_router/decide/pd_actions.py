"""The actions of the prefill-decode protocol for its driver: small frozen records, shared where possible."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TypeAlias


class Leg(IntEnum):
    """The two upstream requests that serve one client request."""

    PREFILL = 0
    DECODE = 1


class FailureReason(StrEnum):
    """The reason for an error of the router's own."""

    NO_INSTANCE = "no_instance"
    CONNECT_FAILED = "connect_failed"
    LEG_LOST = "leg_lost"
    LOST_AGAIN = "lost_again"
    LEG_FAILED = "leg_failed"
    QUEUE_TIMEOUT = "queue_timeout"
    TIMEOUT = "timeout"
    RETRY_BUDGET = "retry_budget"


@dataclass(frozen=True, slots=True)
class StartLegs:
    """Choose a prefill and a decode instance and send the body to both, with a room never used before.

    `on_new_connections`: a kept connection has just turned out to be closed, so others may be, too.
    """

    attempt: int
    on_new_connections: bool = False


@dataclass(frozen=True, slots=True)
class AbortLeg:
    """Close this leg's connection at once; no further event of it matters."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class RelayReply:
    """Send this leg's response to the client: what is here now, the rest as it arrives. Nothing can be retried then."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class ReplyError:
    """Answer the client with an error of the router's own; nothing has been sent to it yet."""

    status: int
    reason: FailureReason


@dataclass(frozen=True, slots=True)
class EmitErrorEvent:
    """Append an error event to the SSE stream and end it; close the connection if its framing is lost."""

    reason: FailureReason


@dataclass(frozen=True, slots=True)
class ContinueStream:
    """The next attempt goes on with the stream behind what the client has of it."""


@dataclass(frozen=True, slots=True)
class CloseClient:
    """Close the client's connection: a half-sent reply must not look like a whole one."""

    reason: FailureReason


@dataclass(frozen=True, slots=True)
class ScheduleRetry:
    """Call `on_retry_timer` with the current attempt after the back-off of this index (0 for the first)."""

    backoff_index: int


@dataclass(frozen=True, slots=True)
class RecordFailure:
    """Verdict on a leg: its instance failed."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class RecordSuccess:
    """Verdict on a leg: its instance did its part."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class ReleaseTrial:
    """Verdict on a leg: its end says nothing about its instance (a breaker's trial is released)."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class Exclude:
    """The next attempt should avoid the instance of this leg if another one can serve."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The request is over: both legs have ended and no further action will come."""


Action: TypeAlias = (
    StartLegs
    | AbortLeg
    | RelayReply
    | ReplyError
    | EmitErrorEvent
    | ContinueStream
    | CloseClient
    | ScheduleRetry
    | RecordFailure
    | RecordSuccess
    | ReleaseTrial
    | Exclude
    | RequestFinished
)
Actions: TypeAlias = tuple[Action, ...]

# The happy path returns these very objects, so a driver may test for them with `is`.
NOTHING: Actions = ()
PREFILL_SUCCEEDED: Actions = (RecordSuccess(Leg.PREFILL),)
DECODE_SUCCEEDED: Actions = (RecordSuccess(Leg.DECODE),)
RELAY_DECODE: Actions = (RelayReply(Leg.DECODE),)
RELAY_PREFILL: Actions = (RelayReply(Leg.PREFILL),)
DECODE_SUCCEEDED_AND_FINISHED: Actions = (RecordSuccess(Leg.DECODE), RequestFinished())
PREFILL_SUCCEEDED_AND_FINISHED: Actions = (RecordSuccess(Leg.PREFILL), RequestFinished())
