"""The life of a batch: which states there are, what leads from one to the next, and what each asks to be done.

```
validating ──▶ in_progress ──▶ finalizing ──▶ completed | expired
   │   └──▶ failed    │
   └──────────────────┴──▶ cancelling ──▶ cancelled
```

What has to be done follows only from the state (`BatchLifecycle.work`): a service that was killed goes on by reading
the state and doing its work again. Work that was overtaken by a cancellation or by the end of the window reports an
event that no longer matters: it is ignored.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple


class BatchStatus(StrEnum):
    """A batch's status, as OpenAI's API spells it."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        return self in _TERMINAL


_TERMINAL = frozenset({BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


class BatchEvent(StrEnum):
    """The events of a batch."""

    LINES_VALID = "lines_valid"  # the input file was read to its end, every line is in the store
    LINES_INVALID = "lines_invalid"  # it was read to its end, and some lines cannot be sent
    ALL_FINISHED = "all_finished"  # every request has a result or a final error
    WINDOW_OVER = "window_over"  # the completion window has passed
    CANCEL = "cancel"  # a client wants it cancelled
    FILES_WRITTEN = "files_written"  # output and error file are in place


class BatchWork(StrEnum):
    """The work that a batch in some state needs; doing it twice must be harmless."""

    VALIDATE = "validate"  # read the input file into the store
    RUN = "run"  # send its requests
    WRITE_FILES = "write_files"  # nothing is sent any more; write output and error file
    NOTHING = "nothing"


class EventRefusedError(ValueError):
    """This event cannot happen to a batch in this state; the message says why."""


@dataclass(frozen=True)
class BatchLifecycle:
    """Status of one batch and when it came to it; all times are Unix seconds, None where it never was so."""

    created_at: int
    expires_at: int  # end of the completion window
    status: BatchStatus = BatchStatus.VALIDATING
    is_expiring: bool = False  # the window ended before all requests had an outcome
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def work(self) -> BatchWork:
        """Return the work that the batch needs now."""
        return _WORK.get(self.status, BatchWork.NOTHING)

    def advance(self, event: BatchEvent, now_s: float) -> BatchLifecycle:
        """The lifecycle behind this event; itself where the event no longer matters.

        EventRefusedError: a cancellation that comes too late, or an event that no correct driver reports in this state.
        """
        status = self.status
        if event is BatchEvent.CANCEL:
            if status in {BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS}:
                return self._become(BatchStatus.CANCELLING, now_s)
            if status is BatchStatus.CANCELLING:
                return self
            raise EventRefusedError(f"a batch with status {status.value!r} cannot be cancelled")
        if event is BatchEvent.WINDOW_OVER:
            # A batch that is still validated expires once its requests are known: the error file names all of them.
            if status is BatchStatus.IN_PROGRESS:
                return replace(self._become(BatchStatus.FINALIZING, now_s), is_expiring=True)
            return self
        if event is BatchEvent.FILES_WRITTEN:
            if status is BatchStatus.CANCELLING:
                return self._become(BatchStatus.CANCELLED, now_s)
            if status is BatchStatus.FINALIZING:
                return self._become(BatchStatus.EXPIRED if self.is_expiring else BatchStatus.COMPLETED, now_s)
            raise EventRefusedError(f"files of a batch with status {status.value!r} are not written")
        expected, following = _STEPS[event]
        if status is expected:
            return self._become(following, now_s)
        if status in _OVERTAKEN_BY:
            return self
        raise EventRefusedError(f"{event.value} cannot happen to a batch with status {status.value!r}")

    def due_event(self, unfinished_requests: int, now_s: float) -> BatchEvent | None:
        """Return the event that time has brought while requests are sent: all are done, or the window is over."""
        if self.status is not BatchStatus.IN_PROGRESS:
            return None
        if unfinished_requests == 0:
            return BatchEvent.ALL_FINISHED
        return BatchEvent.WINDOW_OVER if now_s >= self.expires_at else None

    def _become(self, status: BatchStatus, now_s: float) -> BatchLifecycle:
        # Times of one batch never run backwards, even where the clock does.
        latest = max(getattr(self, name) or 0 for name in ("created_at", *_TIMES.values()))
        times: dict[str, Any] = {_TIMES[status]: max(int(now_s), latest)}
        return replace(self, status=status, **times)


_WORK = {
    BatchStatus.VALIDATING: BatchWork.VALIDATE,
    BatchStatus.IN_PROGRESS: BatchWork.RUN,
    BatchStatus.FINALIZING: BatchWork.WRITE_FILES,
    BatchStatus.CANCELLING: BatchWork.WRITE_FILES,
}
_STEPS = {
    BatchEvent.LINES_VALID: (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS),
    BatchEvent.LINES_INVALID: (BatchStatus.VALIDATING, BatchStatus.FAILED),
    BatchEvent.ALL_FINISHED: (BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING),
}
_OVERTAKEN_BY = frozenset(
    {BatchStatus.CANCELLING, BatchStatus.CANCELLED, BatchStatus.FINALIZING, BatchStatus.COMPLETED, BatchStatus.EXPIRED}
)
_TIMES = {
    BatchStatus.IN_PROGRESS: "in_progress_at",
    BatchStatus.FINALIZING: "finalizing_at",
    BatchStatus.COMPLETED: "completed_at",
    BatchStatus.FAILED: "failed_at",
    BatchStatus.EXPIRED: "expired_at",
    BatchStatus.CANCELLING: "cancelling_at",
    BatchStatus.CANCELLED: "cancelled_at",
}

MAX_WINDOW_S = 30 * 24 * 3600
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


def parse_completion_window(text: str) -> int:
    """Seconds of a completion window such as `24h`, `30m`, `90s` or `7d`; ValueError says what is allowed."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise ValueError(
            f"{text!r} is not a completion window: a whole number and s, m, h or d, such as 24h; at most 30d"
        )
    return seconds


class OpenBatch(NamedTuple):
    """A batch that is not over."""

    batch_id: str  # sorts by age
    tenant: str
    is_sending: bool  # its requests are sent, or wait for it; else its work is short
    weight: float = 1.0  # of its tenant


def choose_batches(
    batches: Sequence[OpenBatch], holders: Mapping[str, str], mine: Iterable[str], dispatchers: int, max_sending: int
) -> list[str]:
    """Return the ids of batches that a dispatcher takes next, in order, where several work on one store.

    Reading an input and writing files is short, and is taken as it comes. Batches whose requests are sent are divided:
    no dispatcher takes more than its part of them. The next is of the tenant that has the fewest for its weight under
    way at all dispatchers, its oldest. A tenant that has none under way does not wait for others' batches to end.

    `holders` has the batches of all dispatchers, `mine` this dispatcher's; `dispatchers` live, and each sends at most
    `max_sending` batches at a time, and one more for each tenant that has no other.
    """
    free = [batch for batch in batches if batch.batch_id not in holders]
    chosen = [batch.batch_id for batch in free if not batch.is_sending]
    sending = [batch for batch in batches if batch.is_sending]
    own = set(mine)
    part = -(-len(sending) // max(1, dispatchers))
    under_way_here = sum(batch.batch_id in own for batch in sending)
    under_way = Counter(batch.tenant for batch in sending if batch.batch_id in holders)
    waiting = sorted(batch for batch in free if batch.is_sending)
    while waiting and under_way_here < part:
        following = min(waiting, key=lambda batch: (under_way[batch.tenant] / batch.weight, batch.batch_id))
        if under_way_here >= max_sending and under_way[following.tenant]:
            break
        waiting.remove(following)
        under_way[following.tenant] += 1
        chosen.append(following.batch_id)
        under_way_here += 1
    return chosen
