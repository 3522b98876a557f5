"""The router's index follows publishers on real ZeroMQ sockets: through losses, restarts and what makes no sense."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.decide.block_index import BlockIndex, Tier
from sglang_ext_router.instances import kv_events, publisher_connection
from sglang_ext_router.instances.kv_events import QUIET_S, KvEvents
from sglang_ext_router.instances.probe import read_kv_events
from sglang_ext_router.instances.workers import KvEventsAddress, Worker
from support.event_publisher import CLEARED, EventPublisher, removed, stored
from support.router_process import cluster

pytestmark = pytest.mark.slow
KEYS = [(-1) ** number * (number + 1) * 2**55 for number in range(60)]


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    made = EventPublisher(kept=20)
    yield made
    made.stop()


class Followed:
    """One instance whose events are followed."""

    def __init__(self, publisher: EventPublisher, has_replay: bool) -> None:
        self.index = BlockIndex(1000)
        self.events = KvEvents(asyncio.get_running_loop(), self.index)
        self.worker = Worker(1, WorkerAddress("http://127.0.0.1:1", Role.BOTH, None), RouterConfig())
        replay_port = publisher.replay_port if has_replay else None
        self.worker.kv_events = KvEventsAddress("127.0.0.1", publisher.port, replay_port, b"", 16, 1)
        self.events.follow(self.worker)
        self.rank = self.events.ranks(self.worker)[0]

    @property
    def keys(self) -> set[int]:
        return self.index.keys_of(self.rank.source)

    async def knows(self, *keys: int, is_whole: bool = True) -> None:
        """Wait until exactly these blocks are known."""
        end_s = time.monotonic() + 5
        held = self.worker.held_blocks
        assert held is not None
        while self.keys != set(keys) or held.is_whole != is_whole or self.rank.sequence.is_replaying:
            assert time.monotonic() < end_s, (self.keys, self.events.describe(self.worker))
            await asyncio.sleep(0.01)

    async def subscribes(self) -> None:
        """Wait until the publisher knows of it."""
        while not self.rank.is_connected:  # noqa: ASYNC110 - a connection has no event
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)

    def described(self) -> dict[str, Any]:
        return self.events.describe(self.worker)


@asynccontextmanager
async def following(publisher: EventPublisher, has_replay: bool = True) -> AsyncIterator[Followed]:
    followed = Followed(publisher, has_replay)
    try:
        yield followed
    finally:
        await followed.events.stop()


def run(test: Any) -> None:
    """On the event loop that routers run on."""
    uvloop.run(asyncio.wait_for(test, 60))


def test_what_was_published_before_and_what_comes(publisher: EventPublisher) -> None:
    async def check() -> None:
        publisher.publish(stored(KEYS[:5]))
        async with following(publisher) as followed:
            await followed.knows(*KEYS[:5])
            publisher.publish(stored(KEYS[5:7]), removed(KEYS[:1]), stored(KEYS[8:9], "CPU_PINNED"))
            await followed.knows(*KEYS[1:7])
            assert followed.index.tiers(followed.rank.source, KEYS[8]) == (Tier.HOST,)
            described = followed.described()
            assert described["from"] == "events"
            assert (described["blocks"], described["host_blocks"], described["gaps"]) == (6, 1, 0)
            assert 0 <= described["lag_s"] < 5
            publisher.publish(CLEARED, stored(KEYS[:2]))
            await followed.knows(*KEYS[:2])

    run(check())


def test_lost_batches_are_replayed_the_last_one_too(publisher: EventPublisher) -> None:
    async def check() -> None:
        async with following(publisher) as followed:
            await followed.knows()
            publisher.publish(stored(KEYS[:1]))
            await followed.knows(*KEYS[:1])
            publisher.publish(removed(KEYS[:1]), is_lost=True)
            publisher.publish(stored(KEYS[1:2]))
            await followed.knows(KEYS[1])
            assert followed.described()["gaps"] == 1
            publisher.publish(stored(KEYS[2:3]))
            publisher.publish(stored(KEYS[3:4]), is_lost=True)
            started_s = time.monotonic()
            await followed.knows(*KEYS[1:4])
            assert time.monotonic() - started_s < 1
            assert followed.described()["losses"] == 0

    run(check())


def test_what_is_not_kept_any_more_makes_the_rest_unknown_until_the_engine_is_empty(publisher: EventPublisher) -> None:
    async def check() -> None:
        async with following(publisher) as followed:
            publisher.publish(stored(KEYS[:1]))
            await followed.knows(*KEYS[:1])
            for number in range(30):
                publisher.publish(stored(KEYS[number + 1 : number + 2]), is_lost=number < 29)
            await followed.knows(*KEYS[11:31], is_whole=False)
            assert followed.described()["from"] == "estimate"
            assert followed.described()["losses"] == 1
            publisher.publish(CLEARED)
            await followed.knows()

    run(check())


def test_an_engine_that_starts_again_is_empty(publisher: EventPublisher) -> None:
    async def check() -> None:
        async with following(publisher) as followed:
            publisher.publish(stored(KEYS[:3]))
            await followed.knows(*KEYS[:3])
            publisher.restart()
            await followed.knows()
            publisher.publish(stored(KEYS[4:5]))
            await followed.knows(KEYS[4])
            publisher.restart()
            publisher.publish(stored(KEYS[5:6]))
            await followed.knows(KEYS[5])
            assert followed.described()["restarts"] == 2

    run(check())


def test_while_no_events_can_come_what_was_sent_counts(publisher: EventPublisher) -> None:
    async def check() -> None:
        async with following(publisher) as followed:
            publisher.publish(stored(KEYS[:3]))
            await followed.knows(*KEYS[:3])
            publisher.stop()
            await followed.knows(*KEYS[:3], is_whole=False)
            assert followed.described()["connected"] is False
            publisher._bind()
            await followed.knows(*KEYS[:3])

    run(check())


def test_an_instance_that_is_taken_out_is_read_again(publisher: EventPublisher) -> None:
    async def check() -> None:
        async with following(publisher) as followed:
            publisher.publish(stored(KEYS[:3]))
            await followed.knows(*KEYS[:3])
            followed.events.on_lost(followed.worker)
            assert followed.keys == set()
            assert followed.described()["from"] == "estimate"
            await followed.knows(*KEYS[:3])

    run(check())


def test_without_replays_only_a_whole_life_is_known(publisher: EventPublisher) -> None:
    async def check() -> None:
        async with following(publisher, has_replay=False) as followed:
            await followed.subscribes()
            publisher.publish(stored(KEYS[:1]))
            await followed.knows(*KEYS[:1])
            publisher.publish(stored(KEYS[1:2]), is_lost=True)
            publisher.publish(stored(KEYS[2:3]))
            await followed.knows(KEYS[2], is_whole=False)

    run(check())


@pytest.mark.parametrize("payload", [b"\xc1", b"\x93\x01", b"\x92\xcb" + bytes(8) + b"\x91\x81\xa4type\xa4What"])
def test_what_cannot_be_read_leaves_the_estimate(publisher: EventPublisher, payload: bytes) -> None:
    async def check() -> None:
        async with following(publisher) as followed:
            publisher.publish(stored(KEYS[:1]))
            await followed.knows(*KEYS[:1])
            publisher.publish_bytes(payload)
            await followed.knows(is_whole=False)
            asked = publisher.replays
            await asyncio.sleep(4 * QUIET_S)
            assert publisher.replays == asked  # they would bring the same again
            publisher.publish(CLEARED, stored(KEYS[:1]))
            await followed.knows(*KEYS[:1])

    run(check())


def test_a_replay_that_does_not_come_ends(publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "REPLAY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(publisher, "_is_stopping", True)  # nothing serves replays

    async def check() -> None:
        async with following(publisher) as followed:
            await followed.subscribes()
            publisher.publish(stored(KEYS[:1]))
            publisher.publish(stored(KEYS[1:2]))
            await asyncio.sleep(1)
            assert followed.keys <= set(KEYS[:2])

    run(check())


def test_few_ask_for_all_at_a_time_and_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a replay may take, as it is not theirs that takes so long."""
    monkeypatch.setattr(kv_events, "MAX_WHOLE_REPLAYS", 1)
    monkeypatch.setattr(kv_events, "REPLAY_TIMEOUT_S", 0.5)
    publishers = [EventPublisher() for _ in range(3)]
    slow = publishers[0]
    slow.publish(*(stored([key]) for key in KEYS[:3]))

    async def check() -> None:
        loop = asyncio.get_running_loop()
        events = KvEvents(loop, BlockIndex(1000))
        workers = []
        for number, publisher in enumerate(publishers):
            worker = Worker(number, WorkerAddress(f"http://127.0.0.1:{number + 1}", Role.BOTH, None), RouterConfig())
            worker.kv_events = KvEventsAddress("127.0.0.1", publisher.port, publisher.replay_port, b"", 16, 1)
            workers.append(worker)
        blocker = object()
        events._whole_replays.add(blocker)  # type: ignore[arg-type]
        for worker in workers:
            events.follow(worker)
        await asyncio.sleep(1.5)
        assert not any(worker.held_blocks and worker.held_blocks.is_whole for worker in workers)
        assert all(events.ranks(worker)[0].sequence.is_replaying for worker in workers)
        events.on_replay_over(blocker)  # type: ignore[arg-type]
        end_s = loop.time() + 5
        while not all(worker.held_blocks and worker.held_blocks.is_whole for worker in workers):
            assert loop.time() < end_s
            await asyncio.sleep(0.01)
        assert events.index.held_blocks(events.ranks(workers[0])[0].source) == 3
        await events.stop()

    try:
        run(check())
    finally:
        for publisher in publishers:
            publisher.stop()


def test_a_worker_that_is_removed_leaves_nothing(publisher: EventPublisher) -> None:
    async def check() -> None:
        async with following(publisher) as followed:
            publisher.publish(stored(KEYS[:3]))
            await followed.knows(*KEYS[:3])
            followed.events.forget(followed.worker)
            assert followed.worker.held_blocks is None
            assert followed.index.block_count == 0
            assert followed.described() == {"from": "estimate"}
            followed.events.follow(followed.worker)
            followed.rank = followed.events.ranks(followed.worker)[0]
            await followed.knows(*KEYS[:3])

    run(check())


def test_an_instance_that_is_back_is_connected_at_once(
    publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_connection, "FIRST_PAUSE_S", 30.0)

    async def check() -> None:
        async with following(publisher) as followed:
            publisher.publish(stored(KEYS[:3]))
            await followed.knows(*KEYS[:3])
            publisher.stop()
            while followed.rank.is_connected:  # noqa: ASYNC110 - a connection has no event
                await asyncio.sleep(0.01)
            publisher.restart()
            publisher.publish(stored(KEYS[3:5]))
            await asyncio.sleep(0.2)
            assert not followed.rank.is_connected
            followed.events.follow(followed.worker)
            await followed.knows(*KEYS[3:5])
            assert followed.rank.sequence.restarts == 1

    run(check())


@pytest.mark.parametrize("kv_events", [True, False])
async def test_events_are_followed_unless_that_is_off(publisher: EventPublisher, kv_events: bool) -> None:
    async with cluster(kv_events=kv_events) as served:
        engine = served.short[0]
        assert isinstance(engine.info, dict)
        ports = {"endpoint_port_base": publisher.port, "replay_endpoint_port_base": publisher.replay_port, "dp_size": 1}
        engine.info = {**engine.info, "kv_events": {**DESCRIBED, **ports}}
        worker = served.worker(engine.url)
        worker.has_info = False
        await served.until(lambda: worker.kv_events is not None)
        assert (worker.held_blocks is not None) is kv_events
        assert (served.router.kv_events.describe(worker) != {"from": "estimate"}) is kv_events


DESCRIBED = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "",
    "block_size": 16,
    "dp_size": 2,
    "replay_endpoint_port_base": 6557,
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, KvEventsAddress("node-1", 5557, 6557, b"", 16, 2)),
        ({"endpoint_host": "0.0.0.0"}, KvEventsAddress("node-1", 5557, 6557, b"", 16, 2)),
        ({"endpoint_host": "[::]"}, KvEventsAddress("node-1", 5557, 6557, b"", 16, 2)),
        ({"endpoint_host": "10.0.0.7", "topic": "kv"}, KvEventsAddress("10.0.0.7", 5557, 6557, b"kv", 16, 2)),
        ({"replay_endpoint_port_base": None, "dp_size": None}, KvEventsAddress("node-1", 5557, None, b"", 16, 1)),
        ({"publisher": "null"}, None),
        ({"block_size": 0}, None),
        ({"endpoint_port_base": "5557"}, None),
    ],
)
def test_where_an_instance_publishes(changed: dict[str, Any], expected: KvEventsAddress | None) -> None:
    assert read_kv_events("node-1", {"kv_events": {**DESCRIBED, **changed}}) == expected


def test_instances_whose_events_are_not_followed() -> None:
    assert read_kv_events("node-1", {}) is None
    assert read_kv_events("node-1", {"kv_events": "yes"}) is None
    assert read_kv_events("node-1", {"kv_events": DESCRIBED, "speculative_algorithm": "EAGLE"}) is None
