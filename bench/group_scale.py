"""Describes what a large deployment costs each router: peers, checks of instances, discovery, the controller, routing
decisions.

    python bench/group_scale.py [--seconds 8]

One real router's parts; the other routers are stand-ins that speak the protocol of a group over TCP, the instances
stand-ins that answer checks. Load grows with size: 2 requests/s and instance, prompts of 8 KB.

- `peers`: for groups of 3 to 100 routers, cores that the link takes, bytes/s to and from the others, and the time
  between two states (what a router knows of the others is at most so old)
- `checks`: cores per 1,000 instances for health, liveness and load reports at the default intervals
- `discovery`, `controller`, `routing`: milliseconds for a full list, for one event, for one decision of the controller,
  and microseconds for one routing decision

The last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from timeit import Timer
from typing import Any

import uvloop

from sglang_ext.types import LengthClass, Role
from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.decide.admission import Demand
from sglang_ext_router.decide.endpoint_slices import RoleRules, SliceTable, reconcile
from sglang_ext_router.decide.instance_pressure import (
    ControllerState,
    InstanceSignals,
    PoolInstance,
    PressureSettings,
    decide,
)
from sglang_ext_router.group.peers import Peers
from sglang_ext_router.http.tls import worker_context
from sglang_ext_router.instances.online_load import SiblingLoad
from sglang_ext_router.instances.probe import Prober
from sglang_ext_router.instances.registry import WorkerRegistry
from sglang_ext_router.instances.workers import Worker
from sglang_ext_router.observe.metrics import MetricsSnapshot
from sglang_ext_router.request.prompt import measure
from sglang_ext_router.request.routing import RoutePlanner
from support.compiled import use_compiled_modules
from support.group_peers import BLOCKS_PER_PROMPT, PeerFigures, PeerLoad, run_instances, run_peers
from support.result import BenchmarkRun, progress

GROUPS = ((3, 30), (10, 300), (30, 3000), (100, 10_000))  # routers, instances
REQUESTS_PER_INSTANCE_S = 2.0
SETTLE_S = 4.0
CHECKED_INSTANCES = 400
SIZES = (100, 1000, 10_000)
KEY = "benchmark"
ROLES = (Role.SHORT, Role.LONG, Role.DECODE, Role.DECODE)


class LinkedStandIn:
    """Describes what a link needs of its router: the real registry and planner, and no requests except those made
    up."""

    def __init__(self, config: RouterConfig) -> None:
        self.loop = asyncio.get_running_loop()
        self.registry = WorkerRegistry(config)
        self.planner = RoutePlanner(config, self.registry, random.random)

    def adopt_worker(self, address: WorkerAddress) -> Worker:
        return self.registry.add(address)

    def drop_worker(self, worker: Worker) -> None:
        self.registry.remove(worker)

    def set_draining(self, worker: Worker, is_draining: bool) -> None:
        worker.is_draining = is_draining

    def online_load(self) -> SiblingLoad:
        return SiblingLoad({}, {})

    def demand(self) -> Demand:
        return Demand(1, 0)

    def limit_requests(self, most: int) -> None:
        """There is nothing to limit."""

    def metrics_snapshot(self) -> MetricsSnapshot:
        raise NotImplementedError


def main() -> None:
    use_compiled_modules()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement (default %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("bench/out"), help="folder of the figures (default %(default)s)"
    )
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    benchmark = BenchmarkRun("uvloop", "aiohttp", "orjson")
    result: dict[str, Any] = {"peers": {}}
    for routers, instances in GROUPS:
        figures = _run(measure_peers(routers, instances, options.seconds))
        result["peers"][f"{routers}x{instances}"] = figures
        progress(f"{routers} routers, {instances} instances: {figures}")
    result["checks"] = _run(measure_checks(options.seconds))
    progress(f"checks: {result['checks']}")
    for name, of_size in (("discovery", discovery_ms), ("controller", controller_ms), ("routing", routing_us)):
        result[name] = {str(size): of_size(size) for size in SIZES}
        progress(f"{name}: {result[name]}")
    result["seconds"] = options.seconds
    benchmark.end(result, options.out / "group-scale.json")


def _run(measurement: Any) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measurement)


@contextmanager
def _process(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """A process of its own, and the pipe to it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(*arguments, there), daemon=True)
    process.start()
    try:
        yield here
    finally:
        process.kill()
        process.join()


def _addresses(instances: int) -> tuple[WorkerAddress, ...]:
    return tuple(
        WorkerAddress(f"http://10.{number >> 16}.{(number >> 8) & 255}.{number & 255}:30000", ROLES[number % 4], 8998)
        for number in range(instances)
    )


async def measure_peers(routers: int, instances: int, seconds: float) -> dict[str, float]:
    """Run one router of a group while it sends and receives."""
    addresses = _addresses(instances)
    per_router = REQUESTS_PER_INSTANCE_S * instances / routers
    load = PeerLoad([address.url for address in addresses], routers - 1, per_router, KEY)
    with _process(run_peers, load) as pipe, socket.create_server(("127.0.0.1", 0)) as sock:
        port = await asyncio.to_thread(pipe.recv)
        config = replace(
            RouterConfig(),
            workers=addresses,
            peer=tuple(f"127.1.{number >> 8}.{number & 255}:{port}" for number in range(1, routers)),
            peer_port=1,
            peer_key=KEY,
        )
        sock.setblocking(False)
        router, link = LinkedStandIn(config), Peers(config, sock)
        await link.start(router)
        pipe.send(sock.getsockname()[1])
        own = asyncio.create_task(_serve_requests(router, link, per_router))
        while (counts := link.peer_counts()).connected < routers - 1 or counts.received < routers - 1:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await asyncio.sleep(SETTLE_S)
        await _figures(pipe)
        began_s, busy_s = time.monotonic(), time.process_time()
        await asyncio.sleep(seconds)
        busy_s, passed_s = time.process_time() - busy_s, time.monotonic() - began_s
        figures = await _figures(pipe)
        own.cancel()
        await link.stop()
    intervals_s = sorted(figures.intervals_s)
    return {
        "cores": round(busy_s / passed_s, 3),
        "sent_mb_per_s": round(figures.received_bytes / passed_s / 1e6, 3),
        "received_mb_per_s": round(figures.sent_bytes / passed_s / 1e6, 3),
        "interval_p50_s": round(intervals_s[len(intervals_s) // 2], 3),
        "interval_p99_s": round(intervals_s[int(len(intervals_s) * 0.99)], 3),
        "skipped_messages": link.skipped,
    }


async def _figures(pipe: Connection) -> PeerFigures:
    pipe.send(None)
    figures: PeerFigures = await asyncio.to_thread(pipe.recv)
    return figures


async def _serve_requests(router: LinkedStandIn, link: Peers, requests_per_s: float) -> None:
    """Record the loads and prefixes that this number of requests would leave, without serving any."""
    workers = list(router.registry)
    interval_s = 0.05
    due = 0.0
    while True:
        await asyncio.sleep(interval_s)
        due += requests_per_s * interval_s
        for _ in range(int(due)):
            prefill, decode = random.choice(workers), random.choice(workers)
            prefill.in_flight = random.randrange(9)
            decode.in_flight = random.randrange(9)
            link.tell_prefix(prefill.url, [random.getrandbits(64) for _ in range(BLOCKS_PER_PROMPT)])
        due %= 1.0


async def measure_checks(seconds: float) -> dict[str, float]:
    """The real checks of many instances."""
    with _process(run_instances) as pipe:
        port = await asyncio.to_thread(pipe.recv)
        addresses = tuple(
            WorkerAddress(f"http://127.2.{number >> 8}.{number & 255}:{port}", Role.BOTH, 8998)
            for number in range(1, CHECKED_INSTANCES + 1)
        )
        config = replace(RouterConfig(), workers=addresses)
        registry = WorkerRegistry(config)
        prober = Prober(
            config,
            registry,
            lambda _: None,
            lambda _: None,
            worker_context(config),
            lambda _: None,
            lambda _: 0.0,
            lambda _: 0.0,
        )
        await prober.start()
        while not all(worker.is_healthy for worker in registry):  # noqa: ASYNC110 - each has its own
            await asyncio.sleep(0.1)
        await asyncio.sleep(SETTLE_S)
        began_s, busy_s = time.monotonic(), time.process_time()
        await asyncio.sleep(seconds)
        busy_s, passed_s = time.process_time() - busy_s, time.monotonic() - began_s
        healthy = sum(worker.is_healthy for worker in registry)
        await prober.stop()
    per_s = (
        1 / config.health_check_interval_secs + 1 / config.liveness_interval_secs + 1 / config.load_poll_interval_secs
    )
    return {
        "instances": CHECKED_INSTANCES,
        "healthy": healthy,
        "cores_per_1000": round(busy_s / passed_s * 1000 / CHECKED_INSTANCES, 3),
        "requests_per_instance_s": round(per_s, 2),
        "request_us": round(busy_s / passed_s / CHECKED_INSTANCES / per_s * 1e6, 1),
    }


def discovery_ms(size: int) -> dict[str, float]:
    """A full list of slices of 100 endpoints each, and one slice that changes."""
    slices: list[dict[str, Any]] = [
        {
            "metadata": {"name": f"slice-{first}", "labels": {"sglang-ext.io/role": "decode"}},
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": 30000}],
            "endpoints": [
                {
                    "addresses": [f"10.{number >> 16}.{(number >> 8) & 255}.{number & 255}"],
                    "conditions": {"ready": True},
                    "targetRef": {"uid": f"uid-{number}"},
                    "zone": "a",
                    "nodeName": f"node-{number >> 3}",
                }
                for number in range(first, min(size, first + 100))
            ],
        }
        for first in range(0, size, 100)
    ]
    table = SliceTable(RoleRules())
    held = {}

    def take_all() -> None:
        table.replace(slices)
        held.update(table.endpoints)

    def take_one() -> None:
        table.put(slices[0])
        reconcile(held, table.endpoints)

    return {"list_ms": _ms(take_all), "event_ms": _ms(take_one)}


def controller_ms(size: int) -> float:
    """One decision over two pools of half the instances each."""
    draw = random.Random(1)
    instances = [
        PoolInstance(
            number,
            (LengthClass.SHORT, LengthClass.LONG)[number % 2],
            True,
            InstanceSignals(draw.random(), draw.random(), 0.01, 0.0, 0.7),
            True,
            draw.randrange(9),
            0.0,
        )
        for number in range(size)
    ]
    return _ms(lambda: decide(instances, PressureSettings(), ControllerState(), 1000.0))


def routing_us(size: int) -> float:
    """One routing decision: a prompt of 8 KB whose start two instances have."""
    config = replace(RouterConfig(), workers=_addresses(size))
    registry = WorkerRegistry(config)
    for worker in registry:
        worker.is_healthy = True
        worker.max_prompt_tokens = 100_000
        worker.reported_free_kv_tokens = 100_000
    registry.refresh()
    planner = RoutePlanner(config, registry, random.random)
    model = registry.find_model(None)
    assert model is not None
    prompt = measure(b"/generate", {"text": "".join(f"{number:07d} " for number in range(1000))})
    for worker in registry.ready_prefill[:2]:
        planner.prefixes.record_sent(worker, prompt.hashes)
    none: frozenset[int] = frozenset()
    return round(_ms(lambda: planner.route(model, prompt, 2000, none, none, 100.0)) * 1000, 1)


def _ms(work: Callable[[], object]) -> float:
    """Milliseconds of processor time: the least of five means."""
    timer = Timer(work, timer=time.process_time)
    number = max(1, timer.autorange()[0] // 5)
    return round(min(timer.repeat(5, number)) / number * 1000, 4)


if __name__ == "__main__":
    main()
