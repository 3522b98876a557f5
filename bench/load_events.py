"""Describes what it costs a router, and the engines, to know the load of many instances: polled, and published.

    python bench/load_events.py [--instances 1000] [--seconds 20]

Another process stands in for the instances: it answers the checks of the router's own prober, counts them, and where
load is published does so on a ZeroMQ socket of each instance as `sglang-ext worker` does, with both messages. Half of
the instances have requests under way, of which something comes back every 0.3 s in the mean; these report their load
five times a second, the others once. Intervals are the defaults.

- `requests_ratio`: requests to engines a second where load is polled, over those where it is published
- `requests_per_s`: of either, by path
- `cores`: of the router's process for checks and load, of either
- `load_age_ms`: of the loads that are known, the median and the longest, of either

The last line is `RESULT {json}`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import resource
import statistics
import time
from collections import Counter
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec
import uvloop
import zmq

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.http.tls import worker_context
from sglang_ext_router.instances.load_events import LOAD_TOPIC, SUPPLEMENT_TOPIC, LoadEvents
from sglang_ext_router.instances.probe import Prober
from sglang_ext_router.instances.registry import WorkerRegistry
from sglang_ext_router.instances.workers import SchedulerLoad, Worker
from support.instance_stand_in import CAPACITY_TOKENS, InstanceStandIn
from support.result import BenchmarkRun, benchmark_parser, progress

SETTLED_S = 6.0
SLICE_S = 0.02  # in which the publishers send what is due
IN_FLIGHT = 4
REPLY_INTERVAL_S = 0.3
BUSY_REPORTS_PER_S, IDLE_REPORTS_PER_S = 5.0, 1.0
MS = 1000.0


def _address(number: int) -> str:
    return f"127.2.{number >> 8}.{number & 255}"


def is_busy(number: int) -> bool:
    return number % 2 == 0


class Instances:
    """Stand-ins at loopback addresses of their own, which answer, and publish their load where they shall."""

    def __init__(self, count: int, publishes: bool) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, count + 100)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._draws = random.Random(1)
        load_port = None
        for number in range(1, count + 1) if publishes else ():
            publisher = self._context.socket(zmq.PUB)
            if load_port is None:
                load_port = publisher.bind_to_random_port(f"tcp://{_address(number)}")
            else:
                publisher.bind(f"tcp://{_address(number)}:{load_port}")
            self._sockets.append(publisher)
        self.http = InstanceStandIn({"sglang_ext": {"load_port": load_port}})

    async def publish(self) -> None:
        """Publish what is due, for ever."""
        due_s = [time.monotonic() + self._draws.random() for _ in self._sockets]
        while True:
            now_s = time.monotonic()
            for number, publisher in enumerate(self._sockets, 1):
                if due_s[number - 1] > now_s:
                    continue
                due_s[number - 1] += 1 / (BUSY_REPORTS_PER_S if is_busy(number) else IDLE_REPORTS_PER_S)
                tokens = self._draws.randrange(CAPACITY_TOKENS) if is_busy(number) else 0
                load = ["LoadStat", 3, 0, tokens, CAPACITY_TOKENS, 0, tokens // 7, tokens, 64, tokens, tokens]
                supplement = {"awaiting_tokens": tokens // 9}
                for topic, content in ((SUPPLEMENT_TOPIC, supplement), (LOAD_TOPIC, load)):
                    publisher.send_multipart((topic, bytes(8), msgspec.msgpack.encode(content)))
            await asyncio.sleep(SLICE_S)


async def _serve(link: Connection, count: int, publishes: bool) -> None:
    instances = Instances(count, publishes)
    publishing = asyncio.create_task(instances.publish())
    link.send(await instances.http.serve())
    while await asyncio.to_thread(link.recv):
        link.send(dict(instances.http.asked))
    publishing.cancel()


def run_instances(link: Connection, count: int, publishes: bool) -> None:
    """Send the port of all, then how often each path was asked for whenever True comes; False ends it."""
    _raise_open_files()
    asyncio.run(_serve(link, count, publishes))


def _raise_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Measured(NamedTuple):
    """Describes what following the instances costs in one second."""

    requests: dict[str, float]  # by path
    cores: float
    ages_ms: list[float]

    @property
    def requests_per_s(self) -> float:
        return sum(self.requests.values())


async def measure(count: int, seconds: float, *, publishes: bool) -> Measured:
    """Have the router's prober follow the instances."""
    loop = asyncio.get_running_loop()
    link, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_instances, args=(theirs, count, publishes))
    process.start()
    port = await asyncio.to_thread(link.recv)
    addresses = tuple(
        WorkerAddress(f"http://{_address(number)}:{port}", Role.BOTH, 8998) for number in range(1, count + 1)
    )
    config = replace(RouterConfig(), workers=addresses)
    registry = WorkerRegistry(config)
    draws = random.Random(2)
    known_s: dict[int, float] = {}

    def received_s(worker: Worker) -> float:
        return loop.time() - draws.expovariate(1 / REPLY_INTERVAL_S) if worker.in_flight else float("-inf")

    def take(worker: Worker, report: SchedulerLoad) -> None:
        known_s[worker.id] = loop.time()
        prober.take_published_load(worker, report)

    events = LoadEvents(loop, take, lambda worker: prober.check_now(worker))
    prober = Prober(
        config,
        registry,
        on_restarted=lambda _: None,
        on_info=events.follow,
        tls=worker_context(config),
        on_frozen=lambda _: None,
        last_received_s=received_s,
        last_worked_s=received_s,
    )
    workers = list(registry)
    for number, worker in enumerate(workers, 1):
        worker.in_flight = IN_FLIGHT if is_busy(number) else 0
    await prober.start()
    while not all(worker.is_healthy for worker in workers):  # noqa: ASYNC110 - each has its own
        await asyncio.sleep(0.1)
    while publishes and not all(worker.publishes_load(loop.time()) for worker in workers):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await asyncio.sleep(SETTLED_S)

    async def asked() -> Counter[str]:
        link.send(True)
        return Counter(await asyncio.to_thread(link.recv))

    before, began_s, busy_s = await asked(), time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    busy_s, passed_s, after = time.process_time() - busy_s, time.monotonic() - began_s, await asked()
    ages_ms = sorted(MS * (loop.time() - heard_s) for heard_s in known_s.values())
    if not publishes:  # as old as the last answer: evenly from now to an interval before
        ages_ms = [MS * config.load_poll_interval_secs / 2, MS * config.load_poll_interval_secs]
    assert sum(worker.is_healthy for worker in workers) == count
    link.send(False)
    await prober.stop()
    await events.stop()
    process.join()
    requests = {path: round((after[path] - before[path]) / passed_s, 1) for path in sorted(after - before)}
    return Measured(requests, busy_s / passed_s, ages_ms)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--instances", type=int, default=1000, help="of the router (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement (default %(default)s)")
    options = parser.parse_args()
    run = BenchmarkRun("aiohttp", "pyzmq", "uvloop")
    _raise_open_files()
    measured = {}
    for name in ("polled", "published"):
        figures = uvloop.run(measure(options.instances, options.seconds, publishes=name == "published"))
        measured[name] = figures
        progress(f"{name}: {figures.requests_per_s:,.0f} requests/s, {figures.cores:.3f} cores")
    result: dict[str, Any] = {
        "requests_ratio": round(measured["polled"].requests_per_s / measured["published"].requests_per_s, 1),
        "requests_per_s": {name: figures.requests for name, figures in measured.items()},
        "cores": {name: round(figures.cores, 3) for name, figures in measured.items()},
        "load_age_ms": {
            name: {"median": round(statistics.median_low(figures.ages_ms)), "longest": round(figures.ages_ms[-1])}
            for name, figures in measured.items()
        },
        "instances": options.instances,
    }
    run.end(result, options.out / "load-events.json")


if __name__ == "__main__":
    main()
