"""Asks the prefill instances what their queues look like (`GET /laps`), and reads the answers strictly."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import aiohttp
import orjson

from sglang_ext.laps.decide.round_plan import LapsMode
from sglang_ext.types import LengthClass
from sglang_ext_router.decide.instance_pressure import InstanceSignals
from sglang_ext_router.instances.probe import LAPS_PATH, Prober
from sglang_ext_router.instances.registry import WorkerRegistry
from sglang_ext_router.instances.work_reader import WorkReader
from sglang_ext_router.instances.workers import Worker

REPORT_PATH = LAPS_PATH
MODE_PATH = "/laps/mode"
logger = logging.getLogger(__name__)


class ReportedClass(NamedTuple):
    """One length class on one instance."""

    requests: int  # queued
    tokens: int
    backlog_s: float  # predicted time to prefill them
    oldest_wait_s: float
    slo_violation_rate: float  # share of the recently ended prefills that missed their deadline
    tardiness: float  # mean of max(0, end - deadline) / (deadline - arrival) over them
    utilisation: float  # share of the last seconds that this class kept the instance busy


class InstanceReport(NamedTuple):
    """The whole report, as far as the router uses it."""

    mode: LapsMode
    generation: int  # grows with every switch
    short: ReportedClass
    long: ReportedClass
    parked: int  # long prefills that wait between two chunks
    utilisation: float

    def signals(self, pool: LengthClass) -> InstanceSignals:
        """Return the signals by which the controller judges a member of this pool."""
        own, stray = (self.short, self.long) if pool is LengthClass.SHORT else (self.long, self.short)
        return InstanceSignals(
            self.short.backlog_s,
            self.long.backlog_s,
            own.slo_violation_rate,
            own.tardiness,
            self.utilisation,
            min(stray.utilisation, self.utilisation),
        )


def read_report(answer: object) -> InstanceReport:
    """Read an instance's answer; ValueError says what is wrong with it. Fields that are not used may be anything."""
    fields = _object(answer, "the answer")
    mode = fields.get("mode")
    if not isinstance(mode, str) or mode not in tuple(LapsMode):
        raise ValueError(f"mode is {mode!r}")
    return InstanceReport(
        LapsMode(mode),
        _count(fields, "generation"),
        _read_class(fields, "short"),
        _read_class(fields, "long"),
        _count(fields, "parked"),
        _number(fields, "utilisation"),
    )


def _read_class(fields: Mapping[str, object], name: str) -> ReportedClass:
    one = _object(fields.get(name), name)
    return ReportedClass(
        _count(one, "requests"),
        _count(one, "tokens"),
        *(
            _number(one, field)
            for field in ("backlog_s", "oldest_wait_s", "slo_violation_rate", "tardiness", "utilisation")
        ),
    )


def _object(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")
    return value


def _count(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}")
    return value


def _number(fields: Mapping[str, object], name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value!r}")
    return float(value)


class NotServedError(Exception):
    """The instance is a stock SGLang: it has no such report and cannot be switched."""


class NoReportError(Exception):
    """The instance did not answer, or not as it should; the message says how."""


class SwitchRefusedError(Exception):
    """The instance has not taken another mode. With `is_broken` it has lost its old one, too, and must be restarted."""

    def __init__(self, message: str, is_broken: bool = False) -> None:
        super().__init__(message)
        self.is_broken = is_broken


class LapsMonitor:
    """The latest report of every healthy prefill instance, by worker id."""

    def __init__(self, registry: WorkerRegistry, prober: Prober, clock: Callable[[], float], timeout_s: float) -> None:
        self._registry = registry
        self._prober = prober
        self._clock = clock
        self._timeout_s = timeout_s
        self.reports: dict[int, InstanceReport] = {}
        self.stock: set[int] = set()  # ids of instances that have no report
        self.refreshed_s: float | None = None
        self.work_reader: WorkReader | None = None  # while a page is open: what instances did is asked for, too

    async def read(self, worker: Worker, work_reader: WorkReader | None = None) -> InstanceReport:
        """Ask one instance; NotServedError or NoReportError without an answer that can be used."""
        query = "" if work_reader is None else work_reader.query(worker)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._prober.get_json(worker, REPORT_PATH + query)
            report = read_report(answer)
            if work_reader is not None and work_reader is self.work_reader:
                work_reader.take(worker, answer)
            return report
        except aiohttp.ClientResponseError as error:
            if error.status == 404:
                raise NotServedError(f"{worker.url} does not serve {REPORT_PATH}") from None
            raise NoReportError(f"{REPORT_PATH} answered {error.status}") from None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise NoReportError(str(error) or type(error).__name__) from None

    async def switch(self, worker: Worker, mode: str) -> None:
        """Give an instance another mode. Errors as for `RoleSwitches.switch`."""
        status, answer = await self._prober.ask(worker, MODE_PATH, orjson.dumps({"mode": mode}))
        if status != 200:
            raise SwitchRefusedError(f"{MODE_PATH} answered {status} {answer.decode('utf-8', 'replace')[:200]}")

    async def refresh(self) -> None:
        """Ask all at once, but for the instances that publish their queues. The last report of an instance that does
        not answer is forgotten."""
        workers = [worker for worker in self._registry if worker.role.is_prefill and worker.is_healthy]
        known = {worker.id for worker in workers}
        for gone in self.reports.keys() - known:
            del self.reports[gone]
        self.stock &= known
        if self.work_reader is not None:
            self.work_reader.keep(known)
        await asyncio.gather(*(self._take(worker) for worker in workers))
        self.refreshed_s = self._clock()

    async def _take(self, worker: Worker) -> None:
        published = worker.fresh_queues(self._clock()) if self.work_reader is None else None
        try:
            report = await self.read(worker, self.work_reader) if published is None else read_report(published)
        except NotServedError:
            self.reports.pop(worker.id, None)
            if worker.id not in self.stock:
                self.stock.add(worker.id)
                logger.info("worker %s (%s) has no queue report: it is not moved", worker.url, worker.role)
            return
        except (NoReportError, ValueError) as error:
            self.reports.pop(worker.id, None)
            logger.debug("no queue report from %s: %s", worker.url, error)
            return
        self.stock.discard(worker.id)
        self.reports[worker.id] = report
