"""One client request over its prefill leg and its decode leg: a state machine without I/O.

Events go in, actions come out; the driver carries all actions of one event out, in order, before it feeds the
next event. Every event of a leg names the attempt that it belongs to, so late events of an older attempt are
ignored.

    new ──start──▶ open ──first body of decode──▶ relaying ──decode done──▶ draining ──prefill ended──▶ over
                   │  ▲                              │                                                   ▲
     5xx of one leg│  │retry timer                   └── decode done, prefill had ended ─────────────────┤
                   ▼  │                                                                                  │
          settling ─▶ backoff                        open/settling ──an answer──▶ relaying error ────────┘

* Until `RelayReply` everything can be tried again elsewhere; from then on a failure shows to the client, unless the
  driver knows what the client has of its stream (`on_stream_lost`): then other instances go on behind it, at once,
  `max_migrations` times at most. It counts as a loss, as below, but not as a retry: a lost instance takes many streams
  with it.
* A status outside `RETRYABLE_STATUS` (a 400, say) is an answer: it is relayed, also from the prefill leg.
* A lost connection ends the attempt at once. A 5xx may be the echo of the other leg's failure (a decode
  instance answers 500 when its prefill instance dies), so the verdict waits, for one back-off at most, for
  the end of the other leg: an answer there outweighs a loss, a loss a 408 or 429, and those a 5xx.
* A leg whose instance is too small for the prompt, where another one is not, is no answer: both legs start again at
  once. That is no retry, as every instance can refuse so only once, and no failure.
* A leg that an instance has taken and lost (or may have taken, see `on_leg_stale`) is sent again only once: a request
  that ends the instances that serve it must not visit them all.
* Where prefill serves without decode, or an undivided instance serves an attempt, that leg is relayed instead of
  decode's, which counts as ended from the start. The next attempt may be divided again.
* Where no instance is there and one may return, the request waits in the same attempt (`waiting`); that is no failure.
* A request of which nothing is relayed may give its place to another one (`on_evicted`): it waits as well, and starts
  again when it has a place. That is neither a retry nor a failure.
* Each started leg of each attempt gets exactly one verdict (`RecordFailure`, `RecordSuccess` or `ReleaseTrial`) and
  ends completed, lost or aborted; each request ends with exactly one `RequestFinished`, and nothing comes after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang_ext_router.decide.pd_actions import (
    DECODE_SUCCEEDED,
    DECODE_SUCCEEDED_AND_FINISHED,
    NOTHING,
    PREFILL_SUCCEEDED,
    PREFILL_SUCCEEDED_AND_FINISHED,
    RELAY_DECODE,
    RELAY_PREFILL,
    AbortLeg,
    Action,
    Actions,
    CloseClient,
    ContinueStream,
    EmitErrorEvent,
    Exclude,
    FailureReason,
    Leg,
    RecordFailure,
    RelayReply,
    ReleaseTrial,
    ReplyError,
    RequestFinished,
    ScheduleRetry,
    StartLegs,
)

# As in sglang_router and smg. 408 and 429 say that an instance is busy, the others that it failed.
RETRYABLE_STATUS: frozenset[int] = frozenset({408, 429, 500, 502, 503, 504})
# A busy instance (408, 429) is avoided by the next attempt but is not broken.
_BUSY_STATUS = frozenset({408, 429})
_FAULT_STATUS = RETRYABLE_STATUS - _BUSY_STATUS


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with symmetric jitter.

    Raises ValueError, naming the field, when a value makes no sense.
    """

    max_retries: int = 5
    initial_backoff_s: float = 0.05
    max_backoff_s: float = 5.0
    backoff_multiplier: float = 2.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ValueError(f"max_retries must be at least 0, got {self.max_retries}")
        if not self.initial_backoff_s >= 0:
            raise ValueError(f"initial_backoff_s must be at least 0, got {self.initial_backoff_s}")
        if not self.max_backoff_s >= self.initial_backoff_s:
            raise ValueError(
                f"max_backoff_s must be at least initial_backoff_s ({self.initial_backoff_s}), got {self.max_backoff_s}"
            )
        if not self.backoff_multiplier >= 1:
            raise ValueError(f"backoff_multiplier must be at least 1, got {self.backoff_multiplier}")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), got {self.jitter}")

    def backoff_s(self, attempt: int, draw: float) -> float:
        """Seconds to wait after the failure of attempt `attempt` (0 is the first).

        `draw` in [0, 1) places the result in ±`jitter` around min(initial * multiplier^attempt, max), so that
        requests that failed together do not come back together.
        """
        try:
            backoff_s = min(self.initial_backoff_s * self.backoff_multiplier**attempt, self.max_backoff_s)
        except OverflowError:
            backoff_s = self.max_backoff_s
        return backoff_s * (1.0 + self.jitter * (2.0 * draw - 1.0))


class RequestPhase(Enum):
    """The phase of a request."""

    NEW = "new"
    OPEN = "open"  # both legs sent, nothing relayed
    SETTLING = "settling"  # one leg answered 5xx, the other has not ended; a retry is scheduled
    BACKOFF = "backoff"  # no leg open; a retry is scheduled
    WAITING = "waiting"  # no leg open; no instance is there, and one may return, or it was evicted
    RELAYING = "relaying"  # decode's reply is on its way to the client
    RELAYING_ERROR = "relaying_error"  # a failing leg's reply is
    DRAINING = "draining"  # the client has its whole reply; the prefill leg has not ended
    OVER = "over"


class _LegState(Enum):
    IDLE = 0  # not started in this attempt
    SENT = 1
    ACCEPTED = 2  # 2xx head seen
    REJECTED = 3  # another head, or an error event, seen
    REFUSED = 4  # a rejection has arrived whole; its verdict is due
    ENDED = 5  # completed, lost or aborted, and judged


_PREFILL, _DECODE = Leg.PREFILL, Leg.DECODE
_IDLE, _SENT, _ACCEPTED = _LegState.IDLE, _LegState.SENT, _LegState.ACCEPTED
_REJECTED, _REFUSED, _ENDED = _LegState.REJECTED, _LegState.REFUSED, _LegState.ENDED
_NEW, _OPEN, _SETTLING, _BACKOFF = RequestPhase.NEW, RequestPhase.OPEN, RequestPhase.SETTLING, RequestPhase.BACKOFF
_WAITING = RequestPhase.WAITING
_RELAYING, _RELAYING_ERROR, _DRAINING, _OVER = (
    RequestPhase.RELAYING,
    RequestPhase.RELAYING_ERROR,
    RequestPhase.DRAINING,
    RequestPhase.OVER,
)

_NOT_RUNNING = (_IDLE, _REFUSED, _ENDED)
_BEFORE_FIRST_BYTE = (_NEW, _OPEN, _SETTLING, _BACKOFF, _WAITING)
_OTHER = (_DECODE, _PREFILL)
_ABORT = (AbortLeg(_PREFILL), AbortLeg(_DECODE))
_RECORD_FAILURE = (RecordFailure(_PREFILL), RecordFailure(_DECODE))
_RELEASE_TRIAL = (ReleaseTrial(_PREFILL), ReleaseTrial(_DECODE))
_EXCLUDE = (Exclude(_PREFILL), Exclude(_DECODE))
_CONTINUE_STREAM = ContinueStream()
_START_FIRST: Actions = (StartLegs(0),)


class PDProtocol:
    """The protocol of one client request; see the module's text for its rules.

    `max_retries` bounds the attempts after the first. `is_stream` says whether a failure after the first byte
    can be reported as an SSE event. `is_single_sequence` says that the request makes one sequence: then decode's
    first body byte proves that all KV has arrived, and a prefill leg failing after it does no harm. Without
    `needs_decode` only prefill serves: there is no decode leg, and no event of one.
    """

    def __init__(
        self,
        max_retries: int = 5,
        *,
        max_migrations: int = 0,
        is_stream: bool = False,
        is_single_sequence: bool = True,
        needs_decode: bool = True,
    ) -> None:
        self.max_retries = max_retries
        self.max_migrations = max_migrations
        self.is_stream = is_stream
        self.is_single_sequence = is_single_sequence
        self.needs_decode = needs_decode
        self._is_divided = needs_decode  # this attempt has a decode leg
        self._relayed = _DECODE if needs_decode else _PREFILL
        self._attempt = 0
        self._restarts = 0  # attempts that are no retries
        self._migrations = 0
        self._losses = 0  # of legs that an instance had, or may have had
        self._phase = _NEW
        self._legs = [_IDLE, _IDLE]
        self._statuses = (0, 0)  # of a rejected leg, where its state is REJECTED or REFUSED

    @property
    def attempt(self) -> int:
        """The current attempt, 0 for the first: what events of its legs must name."""
        return self._attempt

    @property
    def phase(self) -> RequestPhase:
        return self._phase

    @property
    def is_over(self) -> bool:
        """Return whether `RequestFinished` has been returned."""
        return self._phase is _OVER

    @property
    def may_migrate(self) -> bool:
        """Return whether the stream may go on elsewhere if its leg is lost now."""
        is_allowed = self._migrations < self.max_migrations and self.max_retries > 0
        return self._phase is _RELAYING and is_allowed and self._losses == self._migrations

    # ---- events: each mutates the protocol's state and returns what to do, in order ----

    def start(self) -> Actions:
        """The request may be sent now. Ignored unless it is the first event."""
        if self._phase is not _NEW:
            return NOTHING
        self._phase = _OPEN
        self._open_legs()
        return _START_FIRST

    def on_no_instance(self, attempt: int) -> Actions:
        """`StartLegs(attempt)` found no instance to send to, or none came while it waited; neither leg was started."""
        if attempt != self._attempt or not (self._is_unsent or self._phase is _WAITING):
            return NOTHING
        self._legs = [_IDLE, _IDLE]
        return self._reply_error([], 503, FailureReason.NO_INSTANCE)

    def on_no_instance_yet(self, attempt: int) -> Actions:
        """`StartLegs(attempt)` found no instance to send to, and one may return: the request waits for it."""
        if attempt == self._attempt and self._is_unsent:
            self._legs = [_IDLE, _IDLE]
            self._phase = _WAITING
        return NOTHING

    def on_evicted(self) -> Actions:
        """The request gives its place to a more urgent one. Ignored unless its legs run and nothing is relayed."""
        if self._phase is not _OPEN:
            return NOTHING
        actions = [action for leg in (_PREFILL, _DECODE) for action in self._end(leg, is_failure=False)]
        self._attempt += 1
        self._restarts += 1
        self._legs = [_IDLE, _IDLE]
        self._phase = _WAITING
        return tuple(actions)

    def on_instance_back(self, attempt: int) -> Actions:
        """The request waits for an instance, and there may be one now; or it was evicted, and has a place again."""
        if attempt != self._attempt or self._phase is not _WAITING:
            return NOTHING
        self._phase = _OPEN
        self._open_legs()
        return (StartLegs(attempt),)

    def serve_undivided(self, attempt: int) -> Actions:
        """The attempt goes to an undivided instance: its leg is the prefill leg, and there is no decode leg."""
        if attempt == self._attempt and self._is_unsent:
            self._is_divided = False
            self._relayed = _PREFILL
            self._legs[_DECODE] = _ENDED
        return NOTHING

    def on_leg_head(self, leg: Leg, attempt: int, status: int) -> Actions:
        """A response head has arrived. Informational ones (1xx) are ignored."""
        if attempt != self._attempt or self._legs[leg] is not _SENT or status < 200:
            return NOTHING
        if status < 300:
            self._legs[leg] = _ACCEPTED
            return NOTHING
        return self._reject(leg, status)

    def on_error_event(self, leg: Leg, attempt: int, status: int) -> Actions:
        """The body of a 2xx leg carries an error: SGLang reports failures of a streamed request so.

        Feed it instead of `on_first_body` when the first event is an error. Later in decode's stream the
        event has been relayed already, and only the outcome and the verdict change.
        """
        if attempt != self._attempt or self._legs[leg] is not _ACCEPTED:
            return NOTHING
        if self._phase is _RELAYING and leg is self._relayed:
            self._mark_rejected(leg, status)
            return NOTHING
        return self._reject(leg, status)

    def on_leg_too_small(self, leg: Leg, attempt: int) -> Actions:
        """A leg's instance refuses what it cannot hold, and an instance that holds more is left.

        Feed it instead of the head of a refusal that is here whole, or instead of `on_error_event`. Ignored where
        nothing may be tried again; then the refusal is the answer.
        """
        state = self._legs[leg]
        is_open = self._phase in (_OPEN, _SETTLING) and state in (_SENT, _ACCEPTED)
        if attempt != self._attempt or not is_open or not self.max_retries:
            return NOTHING
        self._legs[leg] = _REFUSED if state is _SENT else _REJECTED
        actions = [*self._end(leg, is_failure=False), _EXCLUDE[leg], *self._end(_OTHER[leg], is_failure=False)]
        return self._back_off(actions) if self._phase is _SETTLING else self._restart(actions)

    def on_first_body(self, leg: Leg, attempt: int) -> Actions:
        """The first body byte of a leg has arrived; that of prefill is ignored where there is a decode leg."""
        if attempt != self._attempt or leg is not self._relayed or self._legs[leg] is not _ACCEPTED:
            return NOTHING
        if self._phase is _OPEN:
            self._phase = _RELAYING
            return RELAY_DECODE if leg is _DECODE else RELAY_PREFILL
        return self._settle() if self._phase is _SETTLING else NOTHING

    def on_leg_complete(self, leg: Leg, attempt: int) -> Actions:
        """A leg's response has arrived whole."""
        if attempt != self._attempt:
            return NOTHING
        legs = self._legs
        state = legs[leg]
        if state is not _ACCEPTED:
            return self._rejection_complete(leg) if state is _REJECTED else self._leg_gone(leg)
        legs[leg] = _ENDED
        phase = self._phase
        if not self._is_divided:
            self._phase = _OVER
            relay = NOTHING if phase is _RELAYING else RELAY_PREFILL
            return relay + PREFILL_SUCCEEDED_AND_FINISHED
        if leg is _PREFILL:
            if phase is _DRAINING:
                self._phase = _OVER
                return PREFILL_SUCCEEDED_AND_FINISHED
            return PREFILL_SUCCEEDED + self._settle() if phase is _SETTLING else PREFILL_SUCCEEDED
        if phase is _SETTLING:
            return DECODE_SUCCEEDED + self._settle()
        if legs[_PREFILL] is _ENDED:
            self._phase = _OVER
            return DECODE_SUCCEEDED_AND_FINISHED if phase is _RELAYING else RELAY_DECODE + DECODE_SUCCEEDED_AND_FINISHED
        self._phase = _DRAINING
        return DECODE_SUCCEEDED if phase is _RELAYING else RELAY_DECODE + DECODE_SUCCEEDED

    def on_leg_connect_failed(self, leg: Leg, attempt: int) -> Actions:
        """No connection to a leg's instance could be made."""
        if attempt != self._attempt:
            return NOTHING
        return self._leg_gone(leg, FailureReason.CONNECT_FAILED)

    def on_leg_lost(self, leg: Leg, attempt: int) -> Actions:
        """A leg's connection died before its response was complete."""
        if attempt != self._attempt:
            return NOTHING
        return self._leg_gone(leg)

    def on_stream_lost(self, leg: Leg, attempt: int) -> Actions:
        """The relayed leg of a stream was lost, and the stream can go on behind what the client has of it.

        Feed it instead of `on_leg_lost`, as which it counts where no migration is left.
        """
        if attempt != self._attempt or self._legs[leg] in _NOT_RUNNING:
            return NOTHING
        if leg is not self._relayed or self._legs[leg] is not _ACCEPTED or not self.may_migrate:
            return self._leg_gone(leg)
        self._migrations += 1
        self._losses += 1
        self._legs[leg] = _ENDED
        other = self._end(_OTHER[leg], is_failure=self._is_faulty(_OTHER[leg]))
        self._phase = _OPEN
        return self._restart([_RECORD_FAILURE[leg], _EXCLUDE[leg], *other, _CONTINUE_STREAM])

    def on_leg_stale(self, leg: Leg, attempt: int) -> Actions:
        """A kept connection was closed before a byte of the answer came: the instance was most likely closing it.

        That is no failure. But the instance may have taken the request, whose room is used up then: both legs start
        again, on new connections, once.
        """
        if attempt != self._attempt or self._legs[leg] in _NOT_RUNNING:
            return NOTHING
        if self._phase is not _OPEN or self._losses:
            return self._leg_gone(leg)
        self._losses += 1
        self._legs[leg] = _ENDED
        actions = [_RELEASE_TRIAL[leg], *self._end(_OTHER[leg], is_failure=False)]
        return self._restart(actions, on_new_connections=True)

    def on_retry_refused(self, attempt: int) -> Actions:
        """The retry that `ScheduleRetry` asked for during `attempt` is beyond the router's budget."""
        if attempt != self._attempt or self._phase not in (_SETTLING, _BACKOFF):
            return NOTHING
        return self._reply_error(self._end_both(), 503, FailureReason.RETRY_BUDGET)

    def on_client_gone(self) -> Actions:
        """The client has closed its connection. Normal once it has its whole reply."""
        if self._phase in (_DRAINING, _OVER):
            return NOTHING
        return self._finish(self._end_both())

    def on_timeout(self) -> Actions:
        """The time allowed for the whole request is over, in any phase."""
        phase = self._phase
        if phase is _OVER:
            return NOTHING
        if phase in _BEFORE_FIRST_BYTE:
            return self._give_up(FailureReason.TIMEOUT)
        actions = self._end_both()
        if phase is _DRAINING:
            return self._finish(actions)
        return self._break_reply(actions, FailureReason.TIMEOUT)

    def on_retry_timer(self, attempt: int) -> Actions:
        """The back-off that `ScheduleRetry` asked for during `attempt` is over."""
        if attempt != self._attempt or self._phase not in (_SETTLING, _BACKOFF):
            return NOTHING
        verdicts = self._settle() if self._phase is _SETTLING else NOTHING
        self._attempt += 1
        self._phase = _OPEN
        self._open_legs()
        return (*verdicts, StartLegs(self._attempt))

    @property
    def _is_unsent(self) -> bool:
        return self._phase is _OPEN and self._legs == self._fresh_legs()

    @property
    def _has_retries(self) -> bool:
        return self._attempt - self._restarts < self.max_retries

    def _restart(self, actions: list[Action], *, on_new_connections: bool = False) -> Actions:
        """Start both legs again at once, which is no retry."""
        self._restarts += 1
        self._attempt += 1
        self._open_legs()
        return (*actions, StartLegs(self._attempt, on_new_connections))

    def _open_legs(self) -> None:
        self._legs = self._fresh_legs()
        self._is_divided = self.needs_decode
        self._relayed = _DECODE if self.needs_decode else _PREFILL

    def _fresh_legs(self) -> list[_LegState]:
        return [_SENT, _SENT if self.needs_decode else _ENDED]

    # ---- one leg fails ----

    def _reject(self, leg: Leg, status: int) -> Actions:
        """A leg answers with something else than success."""
        self._mark_rejected(leg, status)
        if self._phase is _DRAINING:
            return self._finish(self._end_both())
        if self._phase is _RELAYING:
            return self._prefill_failed_late([])
        if status not in RETRYABLE_STATUS or not self._has_retries:
            return self._relay_error(leg)
        other = _OTHER[leg]
        if status in _BUSY_STATUS:
            actions = self._end(leg, is_failure=False)
            actions.append(_EXCLUDE[leg])
            actions += self._end(other, is_failure=False)
            return self._back_off(actions)
        if self._legs[other] in (_SENT, _ACCEPTED):
            self._phase = _SETTLING
            return (ScheduleRetry(self._attempt),)
        # The other leg has ended well, or has answered 5xx too: which of two is the echo cannot be known.
        return self._back_off(self._end_faulty())

    def _leg_gone(self, leg: Leg, reason: FailureReason = FailureReason.LEG_LOST) -> Actions:
        """A leg's connection cannot be made, or dies."""
        if self._legs[leg] in _NOT_RUNNING:
            return NOTHING
        phase = self._phase
        self._legs[leg] = _ENDED
        is_loss = reason is FailureReason.LEG_LOST
        is_lost_again = is_loss and self._losses > 0
        self._losses += is_loss
        actions: list[Action] = [_RECORD_FAILURE[leg]]
        if phase is _DRAINING:
            return self._finish(actions)
        if phase is _RELAYING and leg is not self._relayed:
            return self._prefill_failed_late(actions)
        if phase in (_RELAYING, _RELAYING_ERROR):
            return self._break_reply(actions + self._end_both(), reason)
        other = self._end(_OTHER[leg], is_failure=False)
        if self._has_retries and not is_lost_again:
            actions.append(_EXCLUDE[leg])
            return self._back_off(actions + other)
        if is_lost_again:
            reason = FailureReason.LOST_AGAIN
        elif self._losses:  # an instance may have computed it
            reason = FailureReason.LEG_LOST
        status = 503 if reason is FailureReason.CONNECT_FAILED else 502
        return self._reply_error(actions + other, status, reason)

    def _rejection_complete(self, leg: Leg) -> Actions:
        """The whole response of a rejected leg is here."""
        self._legs[leg] = _REFUSED
        if self._phase is _SETTLING:
            return NOTHING
        return self._finish(self._end_both())

    def _prefill_failed_late(self, actions: list[Action]) -> Actions:
        """The prefill leg fails while decode's reply is being relayed."""
        actions += self._end(_PREFILL, is_failure=self._is_faulty(_PREFILL))
        if self.is_single_sequence:
            return tuple(actions)
        return self._break_reply(actions + self._end_both(), FailureReason.LEG_FAILED)

    # ---- what follows from it ----

    def _relay_error(self, leg: Leg) -> Actions:
        self._phase = _RELAYING_ERROR
        actions = self._end(_OTHER[leg], is_failure=False)
        return (*actions, RelayReply(leg))

    def _back_off(self, actions: list[Action]) -> Actions:
        if self._phase is not _SETTLING:  # else the timer is running already
            actions.append(ScheduleRetry(self._attempt))
        self._phase = _BACKOFF
        return tuple(actions)

    def _settle(self) -> Actions:
        """Nothing outweighs the 5xx that one leg answered: it was that instance's own."""
        self._phase = _BACKOFF
        return tuple(self._end_faulty())

    def _give_up(self, reason: FailureReason) -> Actions:
        if self._phase is _NEW:
            return self._reply_error([], 408, FailureReason.QUEUE_TIMEOUT)
        return self._reply_error(self._end_both(), 504, reason)

    def _reply_error(self, actions: list[Action], status: int, reason: FailureReason) -> Actions:
        actions.append(ReplyError(status, reason))
        return self._finish(actions)

    def _break_reply(self, actions: list[Action], reason: FailureReason) -> Actions:
        as_event = self.is_stream and self._phase is _RELAYING
        actions.append(EmitErrorEvent(reason) if as_event else CloseClient(reason))
        return self._finish(actions)

    def _finish(self, actions: list[Action]) -> Actions:
        self._phase = _OVER
        return (*actions, RequestFinished())

    # ---- ending and judging legs ----

    def _end(self, leg: Leg, *, is_failure: bool) -> list[Action]:
        """Abort a leg that runs and judge it, if that has not been done."""
        state = self._legs[leg]
        if state in (_IDLE, _ENDED):
            return []
        self._legs[leg] = _ENDED
        verdict: Action = _RECORD_FAILURE[leg] if is_failure else _RELEASE_TRIAL[leg]
        return [verdict] if state is _REFUSED else [_ABORT[leg], verdict]

    def _end_both(self) -> list[Action]:
        return [action for leg in (_PREFILL, _DECODE) for action in self._end(leg, is_failure=self._is_faulty(leg))]

    def _end_faulty(self) -> list[Action]:
        """End the attempt; the instance that answered 5xx has failed and is avoided."""
        faulty = [leg for leg in (_PREFILL, _DECODE) if self._is_faulty(leg)]
        return self._end_both() + [_EXCLUDE[leg] for leg in faulty]

    def _mark_rejected(self, leg: Leg, status: int) -> None:
        self._legs[leg] = _REJECTED
        self._statuses = (status, self._statuses[1]) if leg is _PREFILL else (self._statuses[0], status)

    def _is_faulty(self, leg: Leg) -> bool:
        return self._legs[leg] in (_REJECTED, _REFUSED) and self._statuses[leg] in _FAULT_STATUS
