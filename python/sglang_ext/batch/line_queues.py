"""The lines that a runner has in memory: leased lines of every job by length class, and lines to be sent again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from sglang_ext.batch.decide.line_order import TenantShares
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
    tenant: str
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
        self._due: dict[LengthClass | None, dict[str, deque[tuple[JobQueue, LeasedLine]]]] = {}  # by class and tenant
        self._pushed = 0
        self.shares = TenantShares()

    def split(self, classes: Iterable[LengthClass | None]) -> None:
        """The classes are known; nothing has been leased yet."""
        self._classes = tuple(classes)
        self._due = {name: {} for name in self._classes}
        for queue in self.jobs.values():
            queue.waiting = {name: deque() for name in self._classes}

    def add_job(self, job: int, encode: Encoder, on_end: Callable[[int], None] | None, tenant: str) -> None:
        """ValueError when it is there already."""
        if job in self.jobs:
            raise ValueError(f"job {job} runs already")
        self.jobs[job] = JobQueue(job, encode, {name: deque() for name in self._classes}, on_end, tenant)

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
            self._due[name].setdefault(queue.tenant, deque()).append((queue, leased))
        return retries[0][0] if retries else None

    def next_line(
        self, name: LengthClass | None, max_waiting: int, may_send: Callable[[str, int], bool]
    ) -> tuple[JobQueue, LeasedLine] | None:
        """The next line of a class: of the tenant that is furthest behind its share.

        A tenant's repeated lines are first, then come the lines of its job that has the fewest in
        flight. A tenant with `max_waiting` lines that wait to be sent again, which are in memory, has only those.
        `may_send` is asked with a tenant and how many of its requests are in flight.
        """
        queues: dict[str, list[JobQueue]] = {}
        for queue in self.jobs.values():
            queues.setdefault(queue.tenant, []).append(queue)
        able = {
            tenant: its_queues
            for tenant, its_queues in queues.items()
            if may_send(tenant, sum(len(queue.tasks) for queue in its_queues))
            and self._has_line(name, tenant, its_queues, max_waiting)
        }
        if not able:
            return None
        tenant = self.shares.choose(able)
        if due := self._due[name].get(tenant):
            queue, leased = due.popleft()
            queue.retrying -= 1
            return queue, leased
        chosen = min(
            (queue for queue in able[tenant] if queue.waiting[name]), key=lambda queue: queue.in_flight.get(name, 0)
        )
        return chosen, chosen.waiting[name].popleft()

    def _has_line(self, name: LengthClass | None, tenant: str, queues: Iterable[JobQueue], max_waiting: int) -> bool:
        due = self._due[name].get(tenant)
        while due and due[0][0].is_cancelled:
            due.popleft()[0].retrying -= 1
        if due:
            return True
        is_bounded = sum(queue.retrying for queue in queues) < max_waiting
        return is_bounded and any(queue.waiting[name] for queue in queues)

    def lines_left(self) -> int | None:
        """Lines without a result, the ones under way included; None while there are more to lease."""
        left = 0
        for queue in self.jobs.values():
            if len(queue.exhausted) < len(queue.waiting):
                return None
            left += sum(map(len, queue.waiting.values())) + queue.retrying + len(queue.tasks)
        return left
