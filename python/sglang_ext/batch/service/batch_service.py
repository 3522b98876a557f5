"""Drives every batch through its life: one task per open batch does what the batch's state asks for.

A state is written down before its work begins, and its work can be done again from the beginning: that is all a restart
does. A cancellation changes the state and ends the work that was under way; the task then does what the new state asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

from sglang_ext.batch.database import CommitUnknownError, StoreError
from sglang_ext.batch.decide.batch_lifecycle import (
    BatchEvent,
    BatchLifecycle,
    BatchStatus,
    BatchWork,
    OpenBatch,
    choose_batches,
    parse_completion_window,
)
from sglang_ext.batch.object_storage import StorageError
from sglang_ext.batch.outputs import error_line, output_line
from sglang_ext.batch.service.batches import BatchEntry, BatchTable, LineProblem, RequestTotals
from sglang_ext.batch.service.dispatcher import Dispatcher, until_done
from sglang_ext.batch.service.file_bytes import FileBytes
from sglang_ext.batch.service.files import FileStore, IdSource, PlacedFile, StoredFile
from sglang_ext.batch.service.leases import LEASE_S, Holders, LeaseLostError, Leases
from sglang_ext.batch.service.metrics import RequestOutcome, ServiceReading
from sglang_ext.batch.service.validation import read_lines
from sglang_ext.batch.store import BatchStore, Job, LineResult, StoredResult
from sglang_ext.types import DEFAULT_TENANT, TenantLimits

T = TypeVar("T")
logger = logging.getLogger(__name__)
OUTPUT_PURPOSE = "batch_output"
SWEEP_S = 60.0
POLL_S = 1.0  # how often a running batch looks at the clock
VALIDATING_AT_ONCE = 2
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
CLOSED_AT_ONCE = 500


# Batches whose requests are sent at a time, and one more for each tenant that has no other. Each holds some of its
# requests in memory; more would not be faster, as all share what may be in flight.
MAX_RUNNING = 16


@dataclass(frozen=True)
class ServiceLimits:
    """The size of a batch, and what its lines may leave out."""

    max_lines: int = 50_000
    model: str | None = None  # for lines that name none


class _Exported(NamedTuple):
    """The files of a batch, None where there was nothing to write, and what became of its requests."""

    output: PlacedFile | None
    errors: PlacedFile | None
    outcomes: Counter[RequestOutcome]


class BatchService:
    """Files, batches and what drives them. All methods belong to one event loop.

    `bytes_of` holds the files' bytes; their rows and the batches' are in the store's own database. `limits_of` returns
    the limits of a tenant, of which the weight counts here.
    """

    def __init__(
        self,
        store: BatchStore,
        dispatcher: Dispatcher,
        bytes_of: FileBytes,
        limits: ServiceLimits,
        now_s: Callable[[], float] = time.time,
        lease_s: float = LEASE_S,
        limits_of: Callable[[str], TenantLimits] = TenantLimits,
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._limits = limits
        self._limits_of = limits_of
        self._now_s = now_s
        self._database = store.database.second()  # an accepted batch outlives the machine's power
        self._ids = IdSource()
        self.files = FileStore(self._database, bytes_of, self._ids, now_s)
        self.batches = BatchTable(self._database)
        # The one process that owns a file has at once what it had before it was killed.
        owner = secrets.token_hex(8) if self._database.is_shared else "the owner"
        self._leases = Leases(self._database, owner, lease_s)
        self._holders = Holders()
        self._drivers: dict[str, asyncio.Task[None]] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        self._doing: dict[str, BatchWork] = {}
        self._retry_s: dict[str, float] = {}
        # Each tenant has one input there at most: tenants take turns.
        self._validators = ThreadPoolExecutor(VALIDATING_AT_ONCE, "batch-input")
        self._validating: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._outcomes: Counter[RequestOutcome] = Counter()
        self._in_doubt: dict[str, list[PlacedFile]] = {}  # files of a batch that may have a row
        self._background: list[asyncio.Task[None]] = []

    # -- what clients ask for ------------------------------------------------------------------------------------------

    def create(
        self,
        source: StoredFile,
        endpoint: str,
        completion_window: str,
        *,
        metadata: dict[str, str] | None = None,
        output_expires_after_s: int | None = None,
    ) -> BatchEntry:
        """Accept a batch of the file's tenant; it is durable when this returns. ValueError for a window that cannot
        be."""
        now = int(self._now_s())
        entry = BatchEntry(
            batch_id=self._ids.make("batch_"),
            endpoint=endpoint,
            input_file_id=source.file_id,
            completion_window=completion_window,
            lifecycle=BatchLifecycle(created_at=now, expires_at=now + parse_completion_window(completion_window)),
            metadata=metadata,
            output_expires_after_s=output_expires_after_s,
            tenant=source.tenant,
        )
        try:
            self.batches.put(entry)
        except StoreError:  # a client that is answered with an error makes another
            if self.batches.find(entry.batch_id) is None:
                raise
        self._take_soon(entry.batch_id)
        return entry

    def find(self, batch_id: str, tenant: str = DEFAULT_TENANT) -> BatchEntry | None:
        """A tenant's batch with its counts of now."""
        entry = self.batches.find(batch_id)
        return None if entry is None or entry.tenant != tenant else self._counted(entry)

    def page(self, after: str | None, limit: int, tenant: str = DEFAULT_TENANT) -> list[BatchEntry]:
        """Up to `limit` batches of a tenant behind the id `after`, the newest first, with their counts of now."""
        return [self._counted(entry) for entry in self.batches.page(tenant, after, limit)]

    def cancel(self, batch_id: str, tenant: str = DEFAULT_TENANT) -> BatchEntry | None:
        """Cancel a tenant's batch: its work ends at once.

        None where it has none of this id; EventRefusedError when it is too late.
        """
        with self._database.transaction():
            entry = self.batches.find_to_change(batch_id)
            if entry is None or entry.tenant != tenant:
                return None
            lifecycle = entry.lifecycle.advance(BatchEvent.CANCEL, self._now_s())
            is_changed = lifecycle is not entry.lifecycle
            if is_changed:
                entry = replace(entry, lifecycle=lifecycle)
                self.batches.put(entry)
        if is_changed and not self._stop_work(batch_id):
            self._take_soon(batch_id)  # unless another dispatcher has it, which sees the new state
        return self._counted(entry)

    def _counted(self, entry: BatchEntry) -> BatchEntry:
        if entry.status.is_terminal:
            return entry
        job = self._store.find_job(entry.batch_id)
        if job is None or not job.is_ready:
            return entry
        return replace(entry, totals=_totals(job))

    def reading(self) -> ServiceReading:
        """Return the figures for Prometheus."""
        files, file_bytes = self.files.totals()
        return ServiceReading(
            batches=self.batches.count_by_status(),
            outcomes=dict(self._outcomes),
            in_flight=self._dispatcher.in_flight,
            cap=self._dispatcher.cap,
            waiting=sum(job.remaining for job in self._store.jobs() if job.is_ready),
            files=files,
            file_bytes=file_bytes,
        )

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Go on with every open batch."""
        await self._drop_ended_jobs()
        self._take_turn()
        self._background = [asyncio.create_task(self._sweep()), asyncio.create_task(self._take_turns())]
        if self._drivers:
            logger.info("going on with %d batches", len(self._drivers))

    async def stop(self) -> None:
        """End all work; open batches go on when the service starts again."""
        tasks = [*self._background, *self._drivers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._dispatcher.close()
        with contextlib.suppress(StoreError):  # else they end by themselves
            self._leases.give_up_all()
        self._database.close()
        await asyncio.to_thread(self._validators.shutdown)

    def _take(self, batch_id: str) -> None:
        """Work on a batch if no other dispatcher does."""
        if batch_id not in self._drivers and self._leases.take(batch_id):
            self._drivers[batch_id] = asyncio.create_task(self._drive(batch_id))

    def _take_soon(self, batch_id: str) -> None:
        """Work on a batch if no other dispatcher does, now or, where the store cannot be reached, in a later turn."""
        with contextlib.suppress(StoreError):
            self._take(batch_id)

    async def _take_turns(self) -> None:
        """Renew leases, see what other dispatchers have changed, and take batches that no one has."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                self._take_turn()
            except StoreError as error:
                logger.warning("leases: %s", error)

    def _take_turn(self) -> None:
        entries = {entry.batch_id: entry for entry in self.batches.open()}
        self._holders = self._leases.renew()
        for batch_id, driver in list(self._drivers.items()):
            if batch_id not in self._holders.batches:
                continue  # it is ending
            if not self._leases.is_mine(self._holders.batches[batch_id]):
                logger.warning("%s: another dispatcher has taken it over", batch_id)
                driver.cancel()
            elif batch_id in entries and entries[batch_id].lifecycle.work is not self._doing.get(batch_id):
                self._stop_work(batch_id)  # cancelled elsewhere
        now_s = self._now_s()
        batches = [
            OpenBatch(
                entry.batch_id,
                entry.tenant,
                entry.lifecycle.work is BatchWork.RUN and entry.lifecycle.due_event(1, now_s) is None,
                self._limits_of(entry.tenant).weight,
            )
            for entry in entries.values()
        ]
        taken = {  # a lease of its own that nothing is done for is of an earlier life
            batch_id: holder
            for batch_id, holder in self._holders.batches.items()
            if batch_id in self._drivers or not self._leases.is_mine(holder)
        }
        for batch_id in choose_batches(batches, taken, self._drivers, self._holders.dispatchers, MAX_RUNNING):
            self._take(batch_id)

    def _stop_work(self, batch_id: str) -> bool:
        """End what is being done for a batch, so that its driver looks at its state; False if nothing is done here."""
        work = self._work.get(batch_id)
        if work is None:
            return False
        work.cancel()
        return True

    def _must_wait(self, entry: BatchEntry) -> bool:
        """Return whether a batch whose requests are known waits, at any dispatcher, until one has room for it."""
        sending = sum(doing is BatchWork.RUN for doing in self._doing.values())
        is_due = entry.lifecycle.due_event(1, self._now_s()) is not None
        others = self._holders.dispatchers > 1 and sending > 0
        is_full = sending >= MAX_RUNNING  # a tenant that has no other is let in by `choose_batches`
        return entry.lifecycle.work is BatchWork.RUN and not is_due and (others or is_full)

    async def _drive(self, batch_id: str) -> None:
        """Do what the batch's state asks for until it asks for nothing."""
        try:
            is_new = True
            while (entry := self.batches.find(batch_id)) and entry.lifecycle.work is not BatchWork.NOTHING:
                if not is_new and self._must_wait(entry) and self._doing.get(batch_id) is not BatchWork.RUN:
                    break
                is_new = False
                self._doing[batch_id] = entry.lifecycle.work
                work = self._work[batch_id] = asyncio.create_task(self._do(entry))
                try:
                    await asyncio.wait([work])
                finally:
                    work.cancel()
                    await until_done(work)
                if not work.cancelled():  # else a cancellation has changed the state
                    work.result()
            if entry:
                logger.info("%s: %s, %s", batch_id, entry.status.value, entry.totals)
                if entry.status.is_terminal:
                    await self._drop_job(batch_id)
            self._leases.give_up(batch_id)
        except (LeaseLostError, StoreError) as error:
            logger.warning("%s: left: %r", batch_id, error)
        finally:
            self._work.pop(batch_id, None)
            self._doing.pop(batch_id, None)
            self._retry_s.pop(batch_id, None)
            self._in_doubt.pop(batch_id, None)  # what has no row is removed at a start
            self._drivers.pop(batch_id, None)

    async def _do(self, entry: BatchEntry) -> None:
        """The work of a state, once; a failure is logged, and the next attempt comes later and later."""
        steps: dict[BatchWork, Callable[[BatchEntry], Coroutine[None, None, None]]] = {
            BatchWork.VALIDATE: self._validate,
            BatchWork.RUN: self._run,
            BatchWork.WRITE_FILES: self._write_files,
        }
        try:
            await steps[entry.lifecycle.work](entry)
            self._retry_s.pop(entry.batch_id, None)
        except LeaseLostError:
            raise
        except Exception as error:
            wait_s = self._retry_s.get(entry.batch_id, FIRST_RETRY_S)
            self._retry_s[entry.batch_id] = min(wait_s * 2, LAST_RETRY_S)
            is_expected = isinstance(error, (StoreError, StorageError, OSError))
            logger.warning(
                "%s: %s: %s; again in %g s",
                entry.batch_id,
                entry.lifecycle.work.value,
                error,
                wait_s,
                exc_info=None if is_expected else error,
            )
            await asyncio.sleep(wait_s)

    # -- the work of each state ----------------------------------------------------------------------------------------

    async def _validate(self, entry: BatchEntry) -> None:
        async with self._validating[entry.tenant]:
            problems = await self._in_thread(partial(self._read_lines, entry), self._validators)
        if not problems:
            self._advance(entry, BatchEvent.LINES_VALID)
            return
        self._advance(replace(entry, problems=tuple(problems)), BatchEvent.LINES_INVALID)

    def _read_lines(self, entry: BatchEntry, is_stopped: Callable[[], bool]) -> list[LineProblem]:
        earlier = self._store.find_job(entry.batch_id)
        if earlier is not None:
            self._store.delete_job(earlier.id)
        job = self._store.create_job(entry.batch_id, {})
        try:
            with self.files.bytes.open(entry.input_file_id) as file:
                return read_lines(
                    self._store,
                    job,
                    file,
                    entry.endpoint,
                    self._limits.max_lines,
                    self._limits.model,
                    is_stopped,
                )
        except FileNotFoundError:
            return [LineProblem("file_not_found", "the input file was deleted", param="input_file_id")]

    async def _run(self, entry: BatchEntry) -> None:
        job = self._job(entry)
        # A runner that has failed may have leased lines after its end, on its own thread.
        self._store.release_leases(job.id)
        running = asyncio.create_task(self._dispatcher.run_job(job.id, entry.tenant))
        try:
            while entry.lifecycle.due_event(self._job(entry).remaining, self._now_s()) is None:
                await asyncio.wait([running], timeout=POLL_S)
                if running.done():
                    running.result()
                    break
        finally:
            running.cancel()
            await until_done(running)
        # What came while it stopped counts.
        event = entry.lifecycle.due_event(self._job(entry).remaining, self._now_s())
        if event is None:
            raise RuntimeError("the job is done, and requests are left")
        self._advance(entry, event)

    async def _write_files(self, entry: BatchEntry) -> None:
        """Requests without a result get an error, and output and error file are written. Nothing is in flight."""
        job = self._store.find_job(entry.batch_id)
        if job is None or not job.is_ready:  # it was cancelled before its requests were known
            self._advance(entry, BatchEvent.FILES_WRITTEN)
        else:
            exported = await self._in_thread(partial(self._export, entry, job))
            totals = _totals(self._job(entry))  # not within: the store may be waiting for this transaction to end
            try:
                with self._database.transaction():
                    for placed, kind in ((exported.output, "output"), (exported.errors, "error")):
                        if placed is not None:
                            name = f"{entry.batch_id}_{kind}.jsonl"
                            self.files.add(placed, name, OUTPUT_PURPOSE, entry.output_expires_after_s, entry.tenant)
                    self._advance(
                        replace(
                            entry,
                            output_file_id=exported.output.file_id if exported.output else None,
                            error_file_id=exported.errors.file_id if exported.errors else None,
                            totals=totals,
                        ),
                        BatchEvent.FILES_WRITTEN,
                    )
            except CommitUnknownError:
                files = [placed for placed in (exported.output, exported.errors) if placed is not None]
                self._in_doubt.setdefault(entry.batch_id, []).extend(files)
                raise
            except BaseException:
                await asyncio.to_thread(self._discard, [exported.output, exported.errors])
                raise
            # This transaction came behind any other that was in doubt, and none has ended the batch.
            await asyncio.to_thread(self._discard, self._in_doubt.pop(entry.batch_id, []))
            self._outcomes.update(exported.outcomes)

    def _export(self, entry: BatchEntry, job: Job, is_stopped: Callable[[], bool]) -> _Exported:
        code = "batch_cancelled" if entry.status is BatchStatus.CANCELLING else "batch_expired"
        self._store.release_leases(job.id)
        while leased := self._store.lease(job.id, CLOSED_AT_ONCE):
            self._store.finish([LineResult(leased_line.id, False, None, "", code, b"") for leased_line in leased])
        outcomes: Counter[RequestOutcome] = Counter()
        placed: list[PlacedFile | None] = []
        try:
            for is_ok in (True, False):
                with self.files.bytes.writing() as file:
                    is_empty = True
                    for result in self._store.results(job.id, ok=is_ok):
                        if is_stopped():
                            raise asyncio.CancelledError
                        file.write(output_line(result) if is_ok else error_line(result))
                        outcomes[_outcome(result)] += 1
                        is_empty = False
                    placed.append(None if is_empty else self.files.place(file, is_stopped))
        except BaseException:
            self._discard(placed)
            raise
        return _Exported(placed[0], placed[1], outcomes)

    def _discard(self, placed: Sequence[PlacedFile | None]) -> None:
        """Remove files that were placed and are in no table, or every attempt on a full disk would leave its own."""
        for file in placed:
            if file is not None:
                with contextlib.suppress(OSError, StorageError):  # `tidy` tries again
                    self.files.bytes.remove(file.file_id)

    async def _drop_job(self, batch_id: str) -> None:
        job = self._store.find_job(batch_id)
        if job is not None:
            await asyncio.to_thread(self._store.delete_job, job.id)

    async def _drop_ended_jobs(self) -> None:
        """Remove the lines of batches that have ended, which a killed or disconnected service has left."""
        jobs = self._store.jobs()  # before the batches: another dispatcher may begin some
        open_ids = {entry.batch_id for entry in self.batches.open()}
        for job in jobs:
            if job.name not in open_ids and job.name not in self._drivers:
                await asyncio.to_thread(self._store.delete_job, job.id)

    def _advance(self, entry: BatchEntry, event: BatchEvent) -> None:
        """Write down the batch's next state, and with it what `entry` says that is new."""
        with self._database.transaction():
            current = self.batches.find_to_change(entry.batch_id)
            assert current is not None
            self._leases.confirm(entry.batch_id)
            self.batches.put(replace(entry, lifecycle=current.lifecycle.advance(event, self._now_s())))

    def _job(self, entry: BatchEntry) -> Job:
        job = self._store.find_job(entry.batch_id)
        if job is None:  # this process stood still, and another dispatcher has ended the batch meanwhile
            raise LeaseLostError(entry.batch_id)
        return job

    async def _in_thread(self, work: Callable[[Callable[[], bool]], T], threads: ThreadPoolExecutor | None = None) -> T:
        """Run `work` in a thread, of `threads` where they are given.

        When cancelled, signal it to stop, and return only when it has stopped.
        """
        stopped = threading.Event()
        thread = asyncio.get_running_loop().run_in_executor(threads, work, stopped.is_set)
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            stopped.set()
            await until_done(thread)
            raise

    async def _sweep(self) -> None:
        while True:
            try:
                count = await asyncio.to_thread(self.files.delete_expired)
                if count:
                    logger.info("deleted %d files whose time was over", count)
                await asyncio.to_thread(self.files.bytes.tidy)
                await self._drop_ended_jobs()
            except (OSError, StoreError, StorageError) as error:
                logger.warning("expired files: %s", error)
            await asyncio.sleep(SWEEP_S)


def _outcome(result: StoredResult) -> RequestOutcome:
    if result.is_ok:
        return RequestOutcome.SUCCEEDED
    ends = {"batch_expired": RequestOutcome.EXPIRED, "batch_cancelled": RequestOutcome.CANCELLED}
    return ends.get(result.error or "", RequestOutcome.FAILED)


def _totals(job: Job) -> RequestTotals:
    return RequestTotals(job.lines, job.succeeded, job.failed, job.prompt_tokens, job.completion_tokens)
