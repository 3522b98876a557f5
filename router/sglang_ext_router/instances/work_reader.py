"""The work of prefill instances for the lanes of the live page: polled with their queues, while a page is open.

Every instance has a cursor, so that an answer has what is new, and no more than the messages of the page have room for.
Its clock is put onto the router's by the answers themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from sglang_ext.live.decide.instance_work import (
    KEPT_RECORDS,
    PREFILL,
    WORK_KEY,
    InstanceWork,
    WorkRecord,
    read_work,
)
from sglang_ext.live.decide.view import SeenSpan
from sglang_ext_router.instances.workers import Worker

logger = logging.getLogger(__name__)

MAX_RECORDS_PER_S = 400  # of all instances: what the messages have room for
MIN_RECORDS = 4  # of an answer
CLOCK_JITTER_S = 0.25  # less is how long an answer was under way


class _Asked(NamedTuple):
    """One instance, as it answered last."""

    cursor: int
    offset_s: float  # added to its times to get those of the router
    is_telling: bool


class WorkReader:
    """Cursors and clocks of the instances, as long as a page is open."""

    def __init__(self, clock: Callable[[], float], take: Callable[[Iterable[SeenSpan]], None]) -> None:
        self._clock = clock
        self._began_s = clock()
        self._take = take
        self._asked: dict[int, _Asked] = {}
        self._unanswered: set[int] = set()  # instances whose next answer is to a query since the latest restart
        self.most = KEPT_RECORDS  # records of the next answers
        self.missed = 0  # records that instances left out of their answers, as there were too many

    @property
    def reporting(self) -> int:
        """Return how many instances report what they did."""
        return sum(asked_instance.is_telling for asked_instance in self._asked.values())

    @property
    def silent(self) -> int:
        """Instances that answer, but not what they did: of an earlier version."""
        return len(self._asked) - self.reporting

    def share_out(self, instances: int, interval_s: float) -> None:
        """This many are asked every `interval_s` from now on."""
        self.most = max(MIN_RECORDS, min(KEPT_RECORDS, int(MAX_RECORDS_PER_S * interval_s / max(1, instances))))

    def restart(self) -> None:
        """Another reader has come: all that the instances have kept is asked for once more."""
        self._asked = {number: asked_instance._replace(cursor=0) for number, asked_instance in self._asked.items()}
        self._unanswered.clear()  # an answer that is under way has only what is new

    def keep(self, known: Iterable[int]) -> None:
        """Forget the instances that are not `known` (ids) any more."""
        self._asked = {number: self._asked[number] for number in known if number in self._asked}

    def query(self, worker: Worker) -> str:
        """Return the further query for an instance that is asked for its queues."""
        asked = self._asked.get(worker.id)
        self._unanswered.add(worker.id)
        return f"?since={0 if asked is None else asked.cursor}&most={self.most}"

    def take(self, worker: Worker, answer: object) -> None:
        """Take over the answer of an instance; an unusable one counts as none."""
        try:
            work = read_work(answer.get(WORK_KEY) if isinstance(answer, Mapping) else None)
        except ValueError as error:
            logger.debug("what %s did is not known: %s", worker.url, error)
            work = None
        if work is None:
            self._asked[worker.id] = _Asked(0, 0.0, is_telling=False)
            return
        asked = self._asked.get(worker.id)
        if asked is not None and 0 < asked.cursor <= work.last:
            self.missed += work.missed
        offset_s = self._offset_s(asked, work)
        cursor = work.last if worker.id in self._unanswered else 0
        self._unanswered.discard(worker.id)
        self._asked[worker.id] = _Asked(cursor, offset_s, is_telling=True)
        now_s = work.now_s + offset_s
        spans = (_span(worker.name, record, offset_s, now_s) for record in work.records)
        self._take(span for span in spans if span.end_s >= self._began_s)

    def _offset_s(self, asked: _Asked | None, work: InstanceWork) -> float:
        """Kept, so that what goes on keeps its beginning, until the clocks show another one."""
        offset_s = self._clock() - work.now_s
        if asked is None or not asked.is_telling:
            return offset_s
        known_s = asked.offset_s
        return known_s if known_s - CLOCK_JITTER_S < offset_s < known_s + CLOCK_JITTER_S else offset_s


def _span(name: str, record: WorkRecord, offset_s: float, now_s: float) -> SeenSpan:
    end_s = now_s if record.end_s is None else record.end_s + offset_s
    label = record.label
    if record.kind == PREFILL and not label:
        label = f"{record.requests} request" + ("" if record.requests == 1 else "s")
    return SeenSpan(
        name, record.kind, record.start_s + offset_s, end_s, record.length_class, label, record.tokens, record.requests
    )
