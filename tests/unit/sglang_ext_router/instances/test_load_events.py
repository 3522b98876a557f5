"""The router takes in what instances publish of their load, and asks only where that is missing or old."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sglang_ext.ports import pick_port_ranges
from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.instances.laps_monitor import LapsMonitor
from sglang_ext_router.instances.load_events import LoadEvents
from sglang_ext_router.instances.probe import read_load_address
from sglang_ext_router.instances.workers import LoadAddress, RankReport, SchedulerLoad, Worker
from support.load_publisher import LoadPublisher
from support.router_process import Cluster, cluster
from support.scripted_engine import ScriptedEngine, hang, reply

pytestmark = pytest.mark.slow


@pytest.fixture
def ranks() -> Iterator[tuple[LoadPublisher, LoadPublisher]]:
    (port,) = pick_port_ranges("127.0.0.1", 1, 2, draw=random.SystemRandom())
    first, second = LoadPublisher(port), LoadPublisher(port + 1)
    yield first, second
    first.stop()
    second.stop()


@pytest.fixture
def publisher() -> Iterator[LoadPublisher]:
    made = LoadPublisher()
    yield made
    made.stop()


class Followed:
    """One instance whose load is followed, and the reports that came."""

    def __init__(self, port: int, ranks: int, role: Role) -> None:
        self.reports: list[SchedulerLoad] = []
        self.closed: list[Worker] = []
        self.events = LoadEvents(
            asyncio.get_running_loop(), lambda _, report: self.reports.append(report), self.closed.append
        )
        self.worker = Worker(1, WorkerAddress("http://127.0.0.1:1", role, None), RouterConfig())
        self.worker.set_ranks(ranks)
        self.worker.load_events = LoadAddress("127.0.0.1", port, ranks)
        self.events.follow(self.worker)

    async def next_report(self) -> SchedulerLoad:
        async with asyncio.timeout(5):
            while not self.reports:  # noqa: ASYNC110 - a report has no event
                await asyncio.sleep(0.01)
        return self.reports.pop(0)


async def test_the_load_of_an_instance_is_that_of_all_its_ranks(ranks: tuple[LoadPublisher, LoadPublisher]) -> None:
    first, second = ranks
    followed = Followed(first.port, 2, Role.BOTH)
    await asyncio.sleep(0.3)
    first.publish(1, 2, 30, 400, 0, 5, 60, 7, 800, 9, "later")
    first.publish("nonsense")
    first.publish(1, topic=b"other")
    await asyncio.sleep(0.2)
    assert not followed.reports  # the other rank has not said anything
    second.publish(10, 20, 300, 4000, 0, 50, 200, 70, 8000, 90)
    by_rank = RankReport(5, 340, 0), RankReport(50, 3700, 0)
    assert await followed.next_report() == SchedulerLoad(11, 55, 60 + 300, 0, 4400, 8800, 99, by_rank)
    second.publish(10, 20, 300, 4000)
    by_rank = RankReport(5, 340, 0), RankReport(0, 3700, 0)
    assert await followed.next_report() == SchedulerLoad(11, 5, 360, 0, 4400, 800, 9, by_rank)
    await followed.events.stop()


async def test_a_decode_instance_has_to_say_what_it_waits_for(publisher: LoadPublisher) -> None:
    followed = Followed(publisher.port, 1, Role.DECODE)
    await asyncio.sleep(0.3)
    publisher.publish(1, 2, 300, 1000, 0, 0, 350)
    await asyncio.sleep(0.2)
    assert not followed.reports
    publisher.supplement(100)
    assert await followed.next_report() == SchedulerLoad(1, 0, 350, 100, 1000, 0, 0)
    publisher.supplement(100)  # nothing new
    publisher.publish(2, 2, 300, 1000, 0, 0, 350)
    assert await followed.next_report() == SchedulerLoad(2, 0, 350, 100, 1000, 0, 0)
    await followed.events.stop()


async def test_what_is_not_published_any_more_is_not_known(publisher: LoadPublisher) -> None:
    followed = Followed(publisher.port, 1, Role.BOTH)
    await asyncio.sleep(0.3)
    publisher.supplement(0, {"boundary_tokens": 7})
    publisher.publish(1, 2, 300, 1000)
    await followed.next_report()
    worker, now_s = followed.worker, asyncio.get_running_loop().time()
    worker.load_published_s = now_s
    assert worker.fresh_queues(now_s) == {"boundary_tokens": 7}
    assert worker.publishes_load(now_s + 2)
    assert not worker.publishes_load(now_s + 3)
    assert worker.fresh_queues(now_s + 3) is None
    publisher.stop()
    async with asyncio.timeout(5):
        while worker.publishes_load(now_s):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert worker.fresh_queues(now_s) is None
    assert followed.closed == [worker]
    await followed.events.stop()
    assert followed.closed == [worker]  # nothing was closed by the instance


def publishes(engine: ScriptedEngine, port: int) -> None:
    assert isinstance(engine.info, dict)
    engine.info = {**engine.info, "sglang_ext": {**engine.info["sglang_ext"], "load_port": port}}


async def published(served: Cluster, engine: ScriptedEngine, publisher: LoadPublisher) -> Worker:
    """Have an instance of a running router publish its load; return it once that is known."""
    publishes(engine, publisher.port)
    worker = served.worker(engine.url)
    worker.has_info = False
    async with asyncio.timeout(10):
        while not worker.publishes_load(served.router.loop.time()):
            publisher.supplement(90)
            publisher.publish(3, 0, 100, 1000, 0, 70, 200)
            await asyncio.sleep(0.05)
    return worker


@asynccontextmanager
async def heartbeats(publisher: LoadPublisher) -> AsyncIterator[None]:
    """Publish the same load again and again."""

    async def publish() -> None:
        while True:
            publisher.publish(3, 0, 100, 1000, 0, 70, 200)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(publish())
    try:
        yield
    finally:
        task.cancel()


@pytest.mark.parametrize("pool", ["short", "decode"])
async def test_an_instance_that_publishes_its_load_is_asked_for_its_health_only(
    publisher: LoadPublisher, pool: str
) -> None:
    quick = {"load_poll_interval_secs": 0.05, "liveness_interval_secs": 0.05, "health_check_interval_secs": 0.2}
    async with cluster(**quick) as served:
        engine: ScriptedEngine = getattr(served, pool)[0]
        other = served.long[0]
        worker = await published(served, engine, publisher)
        async with heartbeats(publisher):
            listed = (await served.ask("GET", "/workers")).json["workers"]
        known = {one["url"]: one["load"] for one in listed}
        assert (known[engine.url], known[other.url]) == ("published", "polled")
        assert (worker.reported_running, worker.foreign_tokens) == (3, 70)
        assert (worker.reported_free_kv_tokens, worker.reported_awaiting_tokens) == (890, 90)
        async with heartbeats(publisher):
            await served.until(lambda: worker.publishes_load(served.router.loop.time()))
            await asyncio.sleep(0.5)  # what was under way
            before = (engine.loads_read, engine.liveness_checks, engine.health_checks)
            others = (other.loads_read, other.liveness_checks)
            await served.until(
                lambda: other.loads_read >= others[0] + 20 and other.liveness_checks >= others[1] + 20, 30
            )
            await served.until(lambda: engine.health_checks > before[2], 30)
            # A process that stands still for seconds may ask once.
            assert engine.loads_read <= before[0] + 2
            assert engine.liveness_checks <= before[1] + 2
        # Nothing is published any more: it is asked.
        await served.until(lambda: worker.reported_running != 3, 10)
        await served.until(lambda: engine.liveness_checks > before[1], 10)


async def test_an_instance_that_publishes_is_checked_half_as_often(publisher: LoadPublisher) -> None:
    async with cluster(load_poll_interval_secs=0.05, health_check_interval_secs=0.4) as served:
        (engine,), (other,) = served.short, served.long
        worker = await published(served, engine, publisher)
        async with heartbeats(publisher):
            await served.until(lambda: worker.publishes_load(served.router.loop.time()))
            before = engine.health_checks, other.health_checks
            await served.until(lambda: other.health_checks >= before[1] + 12, 60)
            assert 4 <= engine.health_checks - before[0] <= 8
            worker.can_switch_roles = True
            before = engine.health_checks, other.health_checks
            await served.until(lambda: other.health_checks >= before[1] + 12, 60)
            assert engine.health_checks - before[0] >= 10


async def test_an_instance_that_ends_the_publishers_connection_is_checked_at_once(publisher: LoadPublisher) -> None:
    async with cluster(health_check_interval_secs=3600) as served:
        (engine,) = served.short
        publishes(engine, publisher.port)
        worker = served.worker(engine.url)
        worker.has_info = False
        served.router.prober.check_now(worker)
        await published(served, engine, publisher)
        engine.health_status = 503
        await asyncio.sleep(0.3)
        assert worker.is_healthy
        publisher.stop()
        await served.until(lambda: worker.failed_checks > 0)


async def test_a_report_from_before_a_prefill_had_ended_does_not_count_it_as_others_work(
    publisher: LoadPublisher,
) -> None:
    async with cluster(decode=1) as served:
        (engine,) = served.short
        worker = await published(served, engine, publisher)

        async def foreign_tokens() -> int:
            """Of a report with 70 tokens that wait."""
            before_s = worker.load_published_s
            publisher.publish(3, 0, 100, 1000, 0, 70, 200)
            await served.until(lambda: worker.load_published_s > before_s)
            return worker.foreign_tokens

        await foreign_tokens()  # those that were published before may still come
        assert await foreign_tokens() == 70
        assert (await served.ask("POST", "/generate", {"text": "word " * 200})).status == 200
        await served.until_idle()
        assert await foreign_tokens() == 0
        assert await foreign_tokens() == 70  # nothing has ended since


async def test_an_instance_that_publishes_and_answers_nothing_is_found_frozen(publisher: LoadPublisher) -> None:
    """Its scheduler works, its server process does not."""
    quick = {"liveness_interval_secs": 0.1, "liveness_timeout_secs": 0.6, "decode_policy": "round_robin"}
    async with cluster(decode=2, **quick) as served:
        frozen, other = served.decode
        await published(served, frozen, publisher)
        for engine in served.decode:
            engine.script = reply({"text": engine.url})
        frozen.script = hang()
        frozen.liveness_delay_s = None
        checks = frozen.liveness_checks
        asking = [asyncio.create_task(served.ask("POST", "/generate", {"text": "x"})) for _ in range(2)]
        # It may be back at once, as it still answers health checks; the request that it had is not.
        async with heartbeats(publisher):
            answers = await asyncio.gather(*asking)
        assert [answer.json["text"] for answer in answers] == [other.url] * 2
        assert frozen.liveness_checks > checks


async def test_a_server_process_that_answers_nothing_is_found_without_requests(publisher: LoadPublisher) -> None:
    quick = {
        "liveness_interval_secs": 0.1,
        "liveness_timeout_secs": 0.6,
        "health_check_interval_secs": 0.2,
        "health_check_timeout_secs": 0.3,
    }
    async with cluster(decode=2, **quick) as served:
        frozen = served.decode[0]
        worker = await published(served, frozen, publisher)
        frozen.liveness_delay_s = frozen.health_status = None
        async with heartbeats(publisher):
            await served.until(lambda: not worker.is_healthy, 60)


QUEUE = {
    "requests": 2,
    "tokens": 30,
    "backlog_s": 0.5,
    "oldest_wait_s": 0.1,
    "slo_violation_rate": 0.0,
    "tardiness": 0.0,
    "utilisation": 0.4,
}
QUEUES = {"mode": "both", "generation": 3, "short": QUEUE, "long": QUEUE, "parked": 1, "utilisation": 0.8}


async def test_published_queues_are_not_asked_for(publisher: LoadPublisher) -> None:
    async with cluster() as served:
        engine, loop = served.short[0], served.router.loop
        for one in (*served.short, *served.long):
            one.pages["/laps"] = reply({**QUEUES, "generation": 1})
        worker = await published(served, engine, publisher)
        publisher.supplement(1, {**QUEUES, "boundary_tokens": 77})
        await served.until(lambda: worker.fresh_queues(loop.time()) is not None)
        monitor = LapsMonitor(served.router.registry, served.router.prober, loop.time, 5.0)
        await monitor.refresh()
        assert monitor.reports[worker.id].generation == 3
        assert monitor.reports[worker.id].short.tokens == 30
        assert {report.generation for number, report in monitor.reports.items() if number != worker.id} == {1}
        assert not [request for request in engine.control if request.path == "/laps"]
        worker.published_queues = loop.time() - 3, QUEUES
        await monitor.refresh()
        assert monitor.reports[worker.id].generation == 1
        worker.published_queues = loop.time(), {"mode": "nonsense"}
        await monitor.refresh()
        assert worker.id not in monitor.reports


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({}, None),
        ({"kv_events": "yes", "sglang_ext": {"load_port": None}}, None),
        ({"kv_events": {"load_endpoint_port_base": 7}}, LoadAddress("node-1", 7, 1)),
        ({"sglang_ext": {"load_port": 8}, "dp_size": 4}, LoadAddress("node-1", 8, 4)),
        ({"kv_events": {"load_endpoint_port_base": 7}, "sglang_ext": {"load_port": 8}}, LoadAddress("node-1", 8, 1)),
    ],
)
def test_where_load_is_published(info: dict[str, Any], expected: LoadAddress | None) -> None:
    assert read_load_address("node-1", info) == expected
