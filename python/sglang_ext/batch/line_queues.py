"""The lines that a runner has in memory: leased lines of every job by length class, and lines to be sent again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from sglang_ext.batch.endpoint import Answer
from sglang_ext.batch.lines import BatchLine
from sglang_ext.batch.store import LeasedLine
from sglang_ext.types import LengthClass

Encoder = Callable[[BatchLine, Answer], bytes]


@dataclass(slots=True, eq=False)
class JobQueue:
    """One job's leased lines and what is under way of it."""

    job: int
    encode: Encoder
    waiting: dict[LengthClass | None, deque[LeasedLine]]
    on_end: Callable[[int], None] | None
    is_cancelled: bool = False
    exhausted: set[LengthClass | None] = field(default_factory=set)  # classes without a line left to lease
    leasing: set[LengthClass | None] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    in_flight: dict[LengthClass | None, int] = field(default_factory=dict)
    retrying: int = 0
    unwritten: int = 0
    tries: dict[int, tuple[int, int]] = field(default_factory=dict)  # line that failed → tries, of them counted

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, and nothing will be."""
        under_way = self.tasks or self.leasing or self.unwritten
        left = self.retrying or len(self.exhausted) < len(self.waiting) or any(self.waiting.values())
        return not under_way and (self.is_cancelled or not left)


class LineQueues:
    """The queues of all jobs. A class is None where the endpoint has none."""

    def __init__(self) -> None:
        self.jobs: dict[int, JobQueue] = {}
        self._classes: tuple[LengthClass | None, ...] = ()
        self._retries: list[tuple[float, int, LengthClass | None, JobQueue, LeasedLine]] = []  # heap by due time
        self._due: dict[LengthClass | None, deque[tuple[JobQueue, LeasedLine]]] = {}
        self._pushed = 0

    def split(self, classes: Iterable[LengthClass | None]) -> None:
        """The classes are known; nothing has been leased yet."""
        self._classes = tuple(classes)
        self._due = {name: deque() for name in self._classes}
        for queue in self.jobs.values():
            queue.waiting = {name: deque() for name in self._classes}

    def add_job(self, job: int, encode: Encoder, on_end: Callable[[int], None] | None) -> None:
        """ValueError when it is there already."""
        if job in self.jobs:
            raise ValueError(f"job {job} runs already")
        self.jobs[job] = JobQueue(job, encode, {name: deque() for name in self._classes}, on_end)

    def push_retry(self, due_s: float, name: LengthClass | None, queue: JobQueue, leased: LeasedLine) -> None:
        """Send the line again at that time."""
        queue.retrying += 1
        self._pushed += 1
        heappush(self._retries, (due_s, self._pushed, name, queue, leased))

    def collect_due(self, now_s: float) -> float | None:
        """Let lines whose retry is due wait with the others. Returns when the next retry is due."""
        retries = self._retries
        while retries and (retries[0][0] <= now_s or retries[0][3].is_cancelled):
            _, _, name, queue, leased = heappop(retries)
            self._due[name].append((queue, leased))
        return retries[0][0] if retries else None

    def next_line(self, name: LengthClass | None, max_waiting: int) -> tuple[JobQueue, LeasedLine] | None:
        """The next line of a class: what is sent again first, then of the job that has the fewest in flight.

        With `max_waiting` lines that wait to be sent again, which are in memory, there is none but those.
        """
        due = self._due[name]
        while due:
            queue, leased = due.popleft()
            queue.retrying -= 1
            if not queue.is_cancelled:
                return queue, leased
        if len(self._retries) >= max_waiting:
            return None
        able = [queue for queue in self.jobs.values() if queue.waiting[name]]
        if not able:
            return None
        chosen = min(able, key=lambda queue: queue.in_flight.get(name, 0))
        return chosen, chosen.waiting[name].popleft()

    def lines_left(self) -> int | None:
        """Lines without a result, the ones under way included; None while there are more to lease."""
        left = 0
        for queue in self.jobs.values():
            if len(queue.exhausted) < len(queue.waiting):
                return None
            left += sum(map(len, queue.waiting.values())) + queue.retrying + len(queue.tasks)
        return left
