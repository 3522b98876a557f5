"""Keeps a runner running: jobs are added and given up while others go on, and a runner that failed is replaced.

A runner ends for good when the store cannot be written (a full disk). The service outlives that: every job that ran is
notified, its driver tries again after a while, and a new runner takes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from sglang_ext.batch.runner import JobRunner
from sglang_ext.types import DEFAULT_TENANT

logger = logging.getLogger(__name__)


class Dispatcher:
    """Runs jobs on a runner that `make_runner` makes. All methods belong to one event loop."""

    def __init__(self, make_runner: Callable[[], JobRunner]) -> None:
        self._make_runner = make_runner
        self._runner: JobRunner | None = None
        self._running: asyncio.Task[None] | None = None
        self._ends: dict[int, asyncio.Future[None]] = {}

    @property
    def in_flight(self) -> int:
        """Requests at the endpoint."""
        return self._runner.progress.in_flight if self._runner else 0

    @property
    def cap(self) -> int:
        """Return how many may be there now."""
        return self._runner.progress.cap if self._runner else 0

    async def run_job(self, job: int, tenant: str = DEFAULT_TENANT) -> None:
        """Send the requests of a tenant's ready job; returns when each of them has a result in the store.

        Cancelled, it gives up what is in flight and is over when nothing of the job is. StoreError when results cannot
        be written.
        """
        runner = self._runner_now()
        end = self._ends[job] = asyncio.get_running_loop().create_future()
        try:
            runner.add_job(job, tenant=tenant, on_end=self._on_end)
            await asyncio.shield(end)
        except asyncio.CancelledError:
            runner.cancel_job(job)
            await until_done(end)
            raise
        finally:
            del self._ends[job]

    async def close(self) -> None:
        """Give up what is in flight and end the runner."""
        if self._runner and self._running:
            self._runner.stop(grace_s=0.0)
            await until_done(self._running)

    def _runner_now(self) -> JobRunner:
        if self._runner is None:
            self._runner = self._make_runner()
            self._running = asyncio.create_task(self._run(self._runner))
        return self._runner

    async def _run(self, runner: JobRunner) -> None:
        error: BaseException = asyncio.CancelledError()
        try:
            await runner.run(until_idle=False)
        except Exception as failure:
            error = failure
        finally:
            self._runner = None
            for end in self._ends.values():
                if end.done():
                    continue
                if isinstance(error, asyncio.CancelledError):
                    end.cancel()
                else:
                    end.set_exception(error)

    def _on_end(self, job: int) -> None:
        end = self._ends.get(job)
        if end is not None and not end.done():
            end.set_result(None)


async def until_done(task: asyncio.Future[Any]) -> None:
    """Return when `task` is done, however; a cancellation of the caller takes effect only then."""
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_cancelled = True
    if not task.cancelled():
        task.exception()  # seen by whom it concerns
    if is_cancelled:
        raise asyncio.CancelledError
