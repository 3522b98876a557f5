"""Asks the prefill instances what their queues look like; remembers the last answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp

from sglang_ext_router.laps_report import REPORT_PATH, LapsReport, read_report
from sglang_ext_router.probe import Prober
from sglang_ext_router.workers import Worker, WorkerRegistry

logger = logging.getLogger(__name__)


class NotServedError(Exception):
    """The instance is a stock SGLang: it has no such report and cannot be switched."""


class NoReportError(Exception):
    """The instance did not answer, or not as it should; the message says how."""


class LapsMonitor:
    """The latest report of every healthy prefill instance, by worker id."""

    def __init__(self, registry: WorkerRegistry, prober: Prober, clock: Callable[[], float], timeout_s: float) -> None:
        self._registry = registry
        self._prober = prober
        self._clock = clock
        self._timeout_s = timeout_s
        self.reports: dict[int, LapsReport] = {}
        self.stock: set[int] = set()  # ids of instances that have no report
        self.refreshed_s: float | None = None

    async def read(self, worker: Worker) -> LapsReport:
        """Ask one instance; NotServedError or NoReportError without an answer that can be used."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return read_report(await self._prober.get_json(worker, REPORT_PATH))
        except aiohttp.ClientResponseError as error:
            if error.status == 404:
                raise NotServedError(f"{worker.url} does not serve {REPORT_PATH}") from None
            raise NoReportError(f"{REPORT_PATH} answered {error.status}") from None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise NoReportError(str(error) or type(error).__name__) from None

    async def refresh(self) -> None:
        """Ask all at once. What an instance that does not answer said before is forgotten."""
        workers = [worker for worker in self._registry if worker.role.is_prefill and worker.is_healthy]
        known = {worker.id for worker in workers}
        for gone in self.reports.keys() - known:
            del self.reports[gone]
        self.stock &= known
        await asyncio.gather(*(self._take(worker) for worker in workers))
        self.refreshed_s = self._clock()

    async def _take(self, worker: Worker) -> None:
        try:
            report = await self.read(worker)
        except NotServedError:
            self.reports.pop(worker.id, None)
            if worker.id not in self.stock:
                self.stock.add(worker.id)
                logger.info("worker %s (%s) has no queue report: it is not moved", worker.url, worker.role)
            return
        except NoReportError as error:
            self.reports.pop(worker.id, None)
            logger.debug("no queue report from %s: %s", worker.url, error)
            return
        self.stock.discard(worker.id)
        self.reports[worker.id] = report
