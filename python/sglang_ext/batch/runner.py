"""Dispatch: lines from the store to the endpoint, as many in flight as it can take, and results back into the store.

Short and long prompts go out side by side, each class under a cap of its own, so that both pools are busy. The next
line is of the tenant that has been sent the fewest tokens for its weight, and of its jobs of the one that has the
fewest in flight. Results are committed in groups. After a crash nothing here is needed: what has no result is sent
again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from sglang_ext.batch.database import StoreError
from sglang_ext.batch.decide.in_flight_cap import CapSettings, InFlightCap
from sglang_ext.batch.decide.line_order import token_ranges
from sglang_ext.batch.decide.rate_limit import RateLimit
from sglang_ext.batch.decide.retries import EndpointOutage, FailureKind, retry_delay_s
from sglang_ext.batch.endpoint import Answer, AnswerKind, EndpointClient, LoadUnknownError, count_tokens
from sglang_ext.batch.line_queues import Encoder, JobQueue, LineQueues
from sglang_ext.batch.lines import BatchLine
from sglang_ext.batch.store import BatchStore, LeasedLine, LineResult
from sglang_ext.types import DEFAULT_TENANT, LengthClass, TenantLimits

_LEASED_LINES = 64  # leased ahead at least, per job and class
_LEASED_BYTES = 8 << 20
_COMMIT_LINES, _COMMIT_S = 500, 0.05
_MAX_UNWRITTEN_BYTES = 64 << 20
_MAX_REPLY_BYTES = 128 << 20  # expected of what is in flight
_LOAD_RETRY_S = 30.0
_LOAD_INTERVAL_S = 0.5
_MAX_TRIES = 20  # of one line, the uncounted included: it may be what brings the endpoint down
_REFUSED_TENANT_S = 10.0  # until the next try of a tenant that the endpoint refuses without a `Retry-After`
_NOTE_AFTER_S, _NOTE_INTERVAL_S = 1.0, 30.0  # of an outage; a shorter one with connections is overload


def reply_body(line: BatchLine, answer: Answer) -> bytes:
    """Return what a job stores of a good answer by default: the reply's JSON."""
    return answer.body


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """Describes how a runner sends."""

    cap: CapSettings = field(default_factory=CapSettings)  # `max_in_flight` is for all classes together
    max_retries: int = 5  # of one line, after its first try
    reply_bytes_per_token: int = 0  # of a prompt, where replies are large: scores


class Progress(NamedTuple):
    """Counts of a runner since its start."""

    succeeded: int
    failed: int
    retried: int
    prompt_tokens: int
    completion_tokens: int
    in_flight: int
    cap: int


@dataclass(slots=True)
class _Class:
    """One length class: its range of prompt tokens, its cap, and what is under way."""

    min_tokens: int
    below_tokens: int | None
    cap: InFlightCap
    in_flight: int = 0


class JobRunner:
    """Runs jobs of one store against one endpoint. Use from one event loop; the client must be open.

    `limits_of` returns the limits of a tenant: of those its weight and its concurrency are kept here, the others by
    the router. `on_note` gets a line for the operator when the endpoint goes down or comes up again.
    """

    def __init__(
        self,
        store: BatchStore,
        client: EndpointClient,
        settings: RunnerSettings = RunnerSettings(),
        *,
        requests_limit: RateLimit | None = None,
        tokens_limit: RateLimit | None = None,
        limits_of: Callable[[str], TenantLimits] = TenantLimits,
        on_note: Callable[[str], None] = lambda note: None,
    ) -> None:
        self._store = store
        self._client = client
        self._settings = settings
        self._requests_limit = requests_limit or RateLimit(None)
        self._tokens_limit = tokens_limit or RateLimit(None)
        self._limits_of = limits_of
        self._held_tenants: dict[str, float] = {}  # until when the endpoint wants nothing of them
        self._note = on_note
        self._noted_at_s = float("-inf")
        self._outage = EndpointOutage()
        self._classes: dict[LengthClass | None, _Class] = {}
        self._queues = LineQueues()
        self._jobs = self._queues.jobs
        self._unwritten: list[tuple[JobQueue, LineResult]] = []
        self._unwritten_bytes = 0
        self._in_flight = 0
        self._probes = 0  # requests of them that were sent while the endpoint was down
        self._reply_bytes = 0  # that are expected of them
        self._wake = asyncio.Event()
        self._write = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._thread = ThreadPoolExecutor(1, "batch-store")
        self._background: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._stop_at_s: float | None = None
        self._succeeded = self._failed = self._retried = self._prompt_tokens = self._completion_tokens = 0

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def add_job(
        self,
        job: int,
        encode: Encoder = reply_body,
        *,
        tenant: str = DEFAULT_TENANT,
        on_end: Callable[[int], None] | None = None,
    ) -> None:
        """Send the job's lines that have no result. The job must be ready in the store.

        `encode` makes of a good answer what is stored; its ValueError fails the line. `on_end` is called when every
        line has a result that is written, or the job was cancelled and nothing of it is in flight.
        """
        self._queues.add_job(job, encode, on_end, tenant)
        self._wake.set()

    def cancel_job(self, job: int) -> None:
        """Send nothing more of this job and give up what is in flight; `on_end` follows. Unknown jobs are ignored."""
        queue = self._jobs.get(job)
        if queue is None:
            return
        queue.is_cancelled = True
        for waiting in queue.waiting.values():
            waiting.clear()
        for task in queue.tasks:
            task.cancel()
        self._wake.set()

    @property
    def progress(self) -> Progress:
        """Return the counts so far."""
        return Progress(
            self._succeeded,
            self._failed,
            self._retried,
            self._prompt_tokens,
            self._completion_tokens,
            self._in_flight,
            min(self._settings.cap.max_in_flight, sum(load_class.cap.cap for load_class in self._classes.values())),
        )

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def run(self, *, until_idle: bool = True) -> bool:
        """Send until all jobs have ended, or until `stop`. Returns False when it was stopped.

        StoreError (StoreFullError) when results cannot be written; what is in the store stays. Once per runner.
        """
        try:
            await self._learn_classes()
            self._start(self._write_results())
            self._start(self._follow_load())
            while self._error is None and self._stop_at_s is None:
                self._wake.clear()
                self._dispatch()
                if until_idle and not self._jobs:
                    break
                await self._wake.wait()
            await self._finish_in_flight()
            if self._error is not None:
                raise self._error
            return self._stop_at_s is None
        finally:
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            if self._timer is not None:
                self._timer.cancel()
            await asyncio.to_thread(self._thread.shutdown)

    def stop(self, grace_s: float = 5.0) -> None:
        """Send nothing more; wait a while for what is in flight, then let it go. `run` returns after that.

        Called again, it does not wait any longer.
        """
        if self._stop_at_s is not None:
            for queue in self._jobs.values():
                for task in queue.tasks:
                    task.cancel()
        self._stop_at_s = time.monotonic() + grace_s
        self._wake.set()

    async def _finish_in_flight(self) -> None:
        """Wait for answers until the time of `stop`, cancel the rest, and write what came."""
        if self._in_flight and self._stop_at_s is not None and self._error is None:
            tasks = [task for queue in self._jobs.values() for task in queue.tasks]
            if tasks:
                await asyncio.wait(tasks, timeout=max(0.0, self._stop_at_s - time.monotonic()))
        tasks = [task for queue in self._jobs.values() for task in queue.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._error is None:
            await self._write_once()
        for job in self._jobs:
            self._store.release_leases(job)

    async def _learn_classes(self) -> None:
        """Ask the router for its length boundary, once it answers at all."""
        boundary, tries = None, 0
        while self._stop_at_s is None:
            self._end([queue for queue in self._jobs.values() if queue.is_cancelled])  # before anything was sent
            try:
                load = await self._client.load()
            except LoadUnknownError:
                break
            if load is not None:
                boundary = load.length_boundary_tokens
                break
            if await self._client.is_reachable():
                tries += 1  # it answers, only not this
                if tries >= 3:
                    break
            else:
                self._report_outage("it cannot be reached")
            await asyncio.sleep(0.5)
        for name, (least, below) in token_ranges(boundary).items():
            self._classes[name] = _Class(least, below, InFlightCap(self._settings.cap))
        self._queues.split(self._classes)

    async def _follow_load(self) -> None:
        while True:
            try:
                load = await self._client.load()
            except LoadUnknownError:  # or something between here and the router that answers for it
                for load_class in self._classes.values():
                    load_class.cap.on_load_unknown()
                await asyncio.sleep(_LOAD_RETRY_S)
                continue
            now_s = time.monotonic()
            for name, its_class in self._classes.items():
                if load is None:
                    its_class.cap.on_load_unknown()
                else:
                    its_class.cap.on_load(*load.of(name), now_s, its_class.in_flight)
            self._wake.set()
            await asyncio.sleep(_LOAD_INTERVAL_S)

    def _dispatch(self) -> None:
        """Send what may be sent now, and see to it that lines are leased ahead."""
        now_s = time.monotonic()
        wake_at_s = self._queues.collect_due(now_s)
        for name, its_class in self._classes.items():
            self._lease_ahead(name, its_class)
        self._held_tenants = {tenant: end_s for tenant, end_s in self._held_tenants.items() if end_s > now_s}
        wake_at_s = min([*self._held_tenants.values(), *([] if wake_at_s is None else [wake_at_s])], default=None)
        able = dict(self._classes)
        while able and self._in_flight < self._settings.cap.max_in_flight:
            held_until_s = self._held_until_s(now_s)
            if held_until_s > now_s:
                wake_at_s = min(held_until_s, wake_at_s or held_until_s)
                break
            # The class with the fewest first, or one with many lines would keep the other out.
            name, load_class = min(able.items(), key=lambda item: item[1].in_flight)
            max_waiting = 4 * self._settings.cap.max_in_flight
            has_room = load_class.in_flight < load_class.cap.cap
            chosen = self._queues.next_line(name, max_waiting, self._may_send) if has_room else None
            if chosen is None:
                del able[name]
            else:
                self._send(name, load_class, *chosen, now_s)
        self._end_jobs()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_at_s is not None and wake_at_s != float("inf"):
            self._timer = asyncio.get_running_loop().call_later(max(0.001, wake_at_s - now_s), self._wake.set)

    def _may_send(self, tenant: str, in_flight: int) -> bool:
        """Return whether one more request of a tenant may leave now."""
        concurrency = self._limits_of(tenant).concurrency
        return tenant not in self._held_tenants and (not concurrency or in_flight < concurrency)

    def _held_until_s(self, now_s: float) -> float:
        """Return when the next line may leave: now, later, or (infinity) when something else happens first."""
        if self._unwritten_bytes >= _MAX_UNWRITTEN_BYTES:
            return float("inf")
        if self._outage.is_down:
            if self._probes:
                return float("inf")  # its answer decides; what was sent before may hang for long
            if self._outage.probe_at_s > now_s:
                return self._outage.probe_at_s
        if self._in_flight and self._reply_bytes >= _MAX_REPLY_BYTES:
            return float("inf")
        wait_s = max(self._requests_limit.wait_s(now_s), self._tokens_limit.wait_s(now_s))
        return now_s + wait_s

    def _lease_ahead(self, name: LengthClass | None, load_class: _Class) -> None:
        wanted = max(_LEASED_LINES, 2 * load_class.cap.cap)
        for queue in self._jobs.values():
            if name in queue.exhausted or name in queue.leasing or queue.is_cancelled:
                continue
            if len(queue.waiting[name]) < wanted // 2:
                queue.leasing.add(name)
                self._start(self._lease(queue, name, load_class, wanted))

    async def _lease(self, queue: JobQueue, name: LengthClass | None, load_class: _Class, wanted: int) -> None:
        def lease() -> list[LeasedLine]:
            return self._store.lease(
                queue.job,
                wanted,
                min_tokens=load_class.min_tokens,
                below_tokens=load_class.below_tokens,
                max_bytes=_LEASED_BYTES,
            )

        try:
            leased = await asyncio.get_running_loop().run_in_executor(self._thread, lease)
        except StoreError as error:
            self._fail(error)
            return
        finally:
            queue.leasing.discard(name)
        if not leased:
            queue.exhausted.add(name)
        if not queue.is_cancelled:
            queue.waiting[name].extend(leased)
        self._wake.set()

    def _end_jobs(self) -> None:
        self._end([queue for queue in self._jobs.values() if queue.is_idle])

    def _end(self, queues: list[JobQueue]) -> None:
        for queue in queues:
            del self._jobs[queue.job]
            self._store.release_leases(queue.job)
            if queue.on_end is not None:
                queue.on_end(queue.job)

    # -- one line -----------------------------------------------------------------------------------------------------

    def _send(
        self, name: LengthClass | None, load_class: _Class, queue: JobQueue, leased: LeasedLine, now_s: float
    ) -> None:
        self._in_flight += 1
        load_class.in_flight += 1
        queue.in_flight[name] = queue.in_flight.get(name, 0) + 1
        self._requests_limit.take(1, now_s)
        self._tokens_limit.take(leased.line.prompt_tokens, now_s)
        self._queues.shares.charge(
            queue.tenant, max(1, leased.line.prompt_tokens), self._limits_of(queue.tenant).weight
        )
        was_full = load_class.in_flight >= load_class.cap.cap
        is_probe = self._outage.is_down
        self._probes += is_probe
        self._reply_bytes += self._expected_bytes(leased)
        task = asyncio.create_task(self._request(name, load_class, queue, leased, was_full))
        queue.tasks.add(task)
        task.add_done_callback(partial(self._request_done, name, load_class, queue, leased, is_probe))

    def _expected_bytes(self, leased: LeasedLine) -> int:
        return leased.line.prompt_tokens * self._settings.reply_bytes_per_token

    def _request_done(
        self,
        name: LengthClass | None,
        load_class: _Class,
        queue: JobQueue,
        leased: LeasedLine,
        is_probe: bool,
        task: asyncio.Task[None],
    ) -> None:
        # Here and not in the task: a task that is cancelled before its first step never runs.
        self._in_flight -= 1
        load_class.in_flight -= 1
        queue.in_flight[name] -= 1
        self._probes -= is_probe
        self._reply_bytes -= self._expected_bytes(leased)
        queue.tasks.discard(task)
        self._wake.set()
        self._background_done(task)

    async def _request(
        self, name: LengthClass | None, load_class: _Class, queue: JobQueue, leased: LeasedLine, was_full: bool
    ) -> None:
        sent_at_s = time.monotonic()
        answer = await self._client.send(leased.line, queue.tenant)
        now_s = time.monotonic()
        if answer.kind is AnswerKind.OK:
            load_class.cap.on_ok(sent_at_s, now_s, was_full=was_full)
            self._on_ok(queue, leased, answer, now_s)
        elif answer.kind is AnswerKind.FINAL_ERROR:
            self._report_up(self._outage.on_answer(), now_s)
            self._add_result(queue, _failure(leased, answer))
        elif answer.kind is AnswerKind.TENANT_REFUSED:
            self._report_up(self._outage.on_answer(), now_s)
            self._hold_tenant(name, queue, leased, answer, now_s)
        else:
            if answer.kind is AnswerKind.OVERLOADED:
                load_class.cap.on_overload(sent_at_s, now_s)
            self._on_failure(name, queue, leased, answer, now_s)

    def _on_ok(self, queue: JobQueue, leased: LeasedLine, answer: Answer, now_s: float) -> None:
        self._report_up(self._outage.on_answer(), now_s)
        prompt_tokens, completion_tokens = count_tokens(answer.parsed)
        self._tokens_limit.take(completion_tokens, now_s)
        self._queues.shares.correct(queue.tenant, completion_tokens, self._limits_of(queue.tenant).weight)
        try:
            body = queue.encode(leased.line, answer)
        except ValueError as error:
            self._add_result(queue, _failure(leased, answer._replace(error=str(error))))
            return
        self._prompt_tokens += prompt_tokens
        self._completion_tokens += completion_tokens
        self._add_result(
            queue,
            LineResult(
                leased.id, True, answer.status_code, answer.request_id, None, body, prompt_tokens, completion_tokens
            ),
        )

    def _on_failure(
        self, name: LengthClass | None, queue: JobQueue, leased: LeasedLine, answer: Answer, now_s: float
    ) -> None:
        kind = answer.failure_kind
        is_counted = self._outage.on_failure(kind, leased.id, now_s, self._queues.lines_left())
        since_s = self._outage.since_s
        if since_s is not None and (kind is FailureKind.UNREACHABLE or now_s - since_s >= _NOTE_AFTER_S):
            self._report_outage(answer.error or answer.kind.value)
        tries, counted = queue.tries.get(leased.id, (0, 0))
        if kind is not FailureKind.UNREACHABLE:
            tries += 1
        counted += is_counted
        if counted > self._settings.max_retries or tries >= max(_MAX_TRIES, self._settings.max_retries + 1):
            queue.tries.pop(leased.id, None)
            self._add_result(queue, _failure(leased, answer))
            return
        queue.tries[leased.id] = (tries, counted)
        self._retried += 1
        delay_s = retry_delay_s(max(1, counted), answer.retry_after_s, random.random())
        self._queues.push_retry(now_s + delay_s, name, queue, leased)

    def _hold_tenant(
        self, name: LengthClass | None, queue: JobQueue, leased: LeasedLine, answer: Answer, now_s: float
    ) -> None:
        """Send nothing more of a tenant for a while; nothing is wrong with the line."""
        wait_s = answer.retry_after_s or _REFUSED_TENANT_S
        end_s = self._held_tenants[queue.tenant] = max(now_s + wait_s, self._held_tenants.get(queue.tenant, 0.0))
        self._retried += 1
        self._queues.push_retry(end_s, name, queue, leased)

    # -- results ------------------------------------------------------------------------------------------------------

    def _add_result(self, queue: JobQueue, result: LineResult) -> None:
        queue.tries.pop(result.id, None)
        queue.unwritten += 1
        self._succeeded += result.is_ok
        self._failed += not result.is_ok
        self._unwritten.append((queue, result))
        self._unwritten_bytes += len(result.body)
        self._write.set()

    async def _write_results(self) -> None:
        while self._error is None:
            await self._write.wait()
            if len(self._unwritten) < _COMMIT_LINES:
                await asyncio.sleep(_COMMIT_S)
            self._write.clear()
            try:
                await self._write_once()
            except StoreError as error:
                self._fail(error)
            self._wake.set()

    async def _write_once(self) -> None:
        batch, self._unwritten = self._unwritten, []
        if not batch:
            return
        results = [result for _, result in batch]
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.finish, results)
        for queue, result in batch:
            queue.unwritten -= 1
            self._unwritten_bytes -= len(result.body)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._wake.set()

    def _start(self, coroutine: Coroutine[object, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    # -- notes --------------------------------------------------------------------------------------------------------

    def _report_outage(self, reason: str) -> None:
        now_s = time.monotonic()
        if now_s - self._noted_at_s >= _NOTE_INTERVAL_S:
            self._noted_at_s = now_s
            self._note(f"{self._client.url} is down, waiting for it ({reason})")

    def _report_up(self, down_since_s: float | None, now_s: float) -> None:
        if down_since_s is not None and self._noted_at_s > float("-inf"):
            self._noted_at_s = float("-inf")
            self._note(f"{self._client.url} is up again after {now_s - down_since_s:.0f} s")


def _failure(leased: LeasedLine, answer: Answer) -> LineResult:
    return LineResult(leased.id, False, answer.status_code, answer.request_id, answer.error, answer.body[:65536])
