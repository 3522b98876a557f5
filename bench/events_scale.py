"""Describes what it costs a router to follow the KV events of many instances.

    python bench/events_scale.py [--instances 1000] [--events-per-s 10000] [--seconds 20]

Another process publishes on as many ZeroMQ sockets as there are instances, as SGLang does: each batch stores the new
end of a prompt, with its token ids, and removes as many blocks of an older one. Nothing is lost; replays are served.
The router's own parts follow all of them. First every instance fills its cache, then the processor time of the
following process is read while events come at the given rate.

- `cores_at_10k_events`: its cores, per 10,000 events/s
- `cores_one_event_a_batch`: the same where every event is a batch of its own
- `index_bytes_per_block`: of an index of a million different blocks, a tenth of them held by two instances
- `lag_ms`: between the making of a batch and the index, the median and the longest of the instances' last ones
- `match_us`: to find a prompt of 32,000 tokens of which instances hold half, its hashes made before

The last line is `RESULT {json}`.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import random
import resource
import time
import tracemalloc
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from timeit import Timer

import msgspec
import uvloop
import zmq

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.decide.block_index import BlockIndex
from sglang_ext_router.instances.kv_events import KvEvents
from sglang_ext_router.instances.workers import KvEventsAddress, Worker
from support.result import BenchmarkRun, benchmark_parser, progress

BLOCK_TOKENS = 16
BLOCKS_PER_EVENT = 8
HELD_BLOCKS = 512  # of each instance while the cost is measured
KEPT_BATCHES = 100
VOCABULARY = 150_000
INDEXED_BLOCKS = 1_000_000
INDEXED_SOURCES = 1000
PROMPT_TOKENS = 32_000
SETTLED_S = 3.0
SLICE_S = 0.05  # in which the publishers send what is due
END = (-1).to_bytes(8, "big", signed=True)


@dataclass
class Keys:
    """The blocks of a prompt, whose hashes are made."""

    keys: list[int]

    @property
    def count(self) -> int:
        return len(self.keys)

    def key(self, number: int) -> int:
        return self.keys[number]


class Publisher:
    """One instance: its sockets, its numbers, and the blocks that it removes next."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], draws: random.Random) -> None:
        self._socket = context.socket(zmq.PUB)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.replays = context.socket(zmq.ROUTER)
        self.replay_port = self.replays.bind_to_random_port("tcp://127.0.0.1")
        self._draws = draws
        self._number = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._held: list[list[int]] = []
        self._tokens = [draws.randrange(VOCABULARY) for _ in range(BLOCK_TOKENS * BLOCKS_PER_EVENT)]

    def publish(self, events: list[dict[str, object]]) -> None:
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        number = self._number.to_bytes(8, "big")
        self._socket.send_multipart((b"", number, payload))
        self._kept.append((number, payload))
        self._number += 1

    def store(self) -> dict[str, object]:
        keys = [self._draws.getrandbits(64) - 2**63 for _ in range(BLOCKS_PER_EVENT)]
        self._held.append(keys)
        return {
            "type": "BlockStored",
            "block_hashes": keys,
            "parent_block_hash": keys[0],
            "token_ids": self._tokens,
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
        }

    def remove(self) -> dict[str, object]:
        keys = self._held.pop(0)
        return {"type": "BlockRemoved", "block_hashes": keys, "medium": "GPU"}

    def serve_replays(self) -> None:
        """Send what is asked for of the batches that are kept."""
        while self.replays.poll(0):
            client, _, first = self.replays.recv_multipart()
            for number, payload in self._kept:
                if number >= first:
                    self.replays.send_multipart((client, b"", b"", number, payload))
            self.replays.send_multipart((client, b"", b"", END, b""))


def run_publishers(link: Connection, instances: int) -> None:
    """Send the ports, then do what comes by the link: (events/s, events of a batch), or None to end."""
    _raise_open_files()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * instances + 100)
    draws = random.Random(1)
    publishers = [Publisher(context, draws) for _ in range(instances)]
    poller = zmq.Poller()
    by_socket = {publisher.replays: publisher for publisher in publishers}
    for publisher in publishers:
        poller.register(publisher.replays, zmq.POLLIN)
    link.send([(publisher.port, publisher.replay_port) for publisher in publishers])
    is_filled = False
    events_per_s, batch_events, began_s, sent = 0.0, 1, time.monotonic(), 0
    while True:
        if link.poll(0):
            asked = link.recv()
            if asked is None:
                break
            if not is_filled:
                for publisher in publishers:
                    for _ in range(HELD_BLOCKS // BLOCKS_PER_EVENT):
                        publisher.publish([publisher.store()])
                is_filled = True
            link.send(sent)
            events_per_s, batch_events = asked
            began_s, sent = time.monotonic(), 0
        due = int((time.monotonic() - began_s) * events_per_s)
        while sent < due:
            publisher = publishers[draws.randrange(instances)]
            events = [publisher.store(), publisher.remove()]
            for first in range(0, len(events), batch_events):
                publisher.publish(events[first : first + batch_events])
            sent += len(events)
        for readable, _ in poller.poll(0):
            by_socket[readable].serve_replays()
        time.sleep(SLICE_S)
    context.destroy(linger=0)


def _raise_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def follow(instances: int, events_per_s: float, seconds: float) -> dict[str, object]:
    """Follow the publishers of another process; return what that costs this one."""
    link, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_publishers, args=(theirs, instances))
    process.start()
    addresses = await asyncio.to_thread(link.recv)
    events = KvEvents(asyncio.get_running_loop(), BlockIndex(1_000_000))
    config = RouterConfig()
    workers = []
    for number, (port, replay_port) in enumerate(addresses):
        worker = Worker(number, WorkerAddress(f"http://127.0.0.1:{number + 1}", Role.BOTH, None), config)
        worker.kv_events = KvEventsAddress("127.0.0.1", port, replay_port, b"", BLOCK_TOKENS, 1)
        events.follow(worker)
        workers.append(worker)
    ranks = [rank for worker in workers for rank in events.ranks(worker)]
    while not all(rank.is_connected and not rank.sequence.is_replaying for rank in ranks):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await asyncio.sleep(SETTLED_S)
    figures: dict[str, object] = {}
    link.send((events_per_s, 2))
    await asyncio.to_thread(link.recv)
    expected = instances * HELD_BLOCKS
    while events.index.block_count < expected:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    for name, batch_events in (("cores_at_10k_events", 2), ("cores_one_event_a_batch", 1)):
        link.send((events_per_s, batch_events))
        await asyncio.to_thread(link.recv)
        await asyncio.sleep(SETTLED_S)
        batches = sum(rank.batches for rank in ranks)
        began_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        await asyncio.sleep(seconds)
        took_s, after = time.monotonic() - began_s, resource.getrusage(resource.RUSAGE_SELF)
        system_s = after.ru_stime - before.ru_stime
        used_s = after.ru_utime - before.ru_utime + system_s
        rate = (sum(rank.batches for rank in ranks) - batches) * batch_events / took_s
        figures[name] = round(used_s / took_s * 10_000 / rate, 3)
        figures[name.replace("cores", "system_share")] = round(system_s / used_s, 2)
        figures[name.replace("cores", "events_per_s")] = round(rate)
        progress(f"{name}: {figures[name]} at {rate:,.0f} events/s")
    lags_ms = sorted(1000 * rank.lag_s for rank in ranks if rank.lag_s is not None)
    figures["lag_ms"] = {"median": round(lags_ms[len(lags_ms) // 2], 1), "longest": round(lags_ms[-1], 1)}
    link.send((0.0, 1))
    await asyncio.to_thread(link.recv)
    await asyncio.sleep(1)
    figures["blocks_known"] = events.index.block_count
    figures["gaps"] = sum(rank.sequence.gaps for rank in ranks)
    assert events.index.block_count == expected, (events.index.block_count, expected)
    link.send(None)
    await events.stop()
    process.join()
    return figures


def index_figures() -> dict[str, object]:
    """Fill an index; return its memory, and the time of a match."""
    draws = random.Random(2)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = BlockIndex(INDEXED_BLOCKS)
    sources = [index.add_source() for _ in range(INDEXED_SOURCES)]
    for _ in range(INDEXED_BLOCKS // 1000):
        keys = [draws.getrandbits(64) - 2**63 for _ in range(1000)]
        index.store(draws.choice(sources), keys)
        index.store(draws.choice(sources), keys[:100])
    del keys
    gc.collect()
    used_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    blocks = index.block_count
    prompt = Keys([draws.getrandbits(64) - 2**63 for _ in range(PROMPT_TOKENS // BLOCK_TOKENS)])
    for number, source in enumerate(sources):
        index.store(source, prompt.keys[: 4 if number % 10 else len(prompt.keys) // 2])
    timer = Timer(lambda: index.matched(prompt), timer=time.process_time)
    return {
        "index_bytes_per_block": round(used_bytes / blocks, 1),
        "indexed_blocks": blocks,
        "match_us": round(1e6 * min(timer.repeat(5, 20)) / 20, 1),
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--instances", type=int, default=1000, help="that publish (default %(default)s)")
    parser.add_argument("--events-per-s", type=float, default=10_000.0, help="of all of them (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement (default %(default)s)")
    options = parser.parse_args()
    run = BenchmarkRun("msgspec", "pyzmq", "uvloop")
    _raise_open_files()
    figures = uvloop.run(follow(options.instances, options.events_per_s, options.seconds))
    figures |= index_figures()
    settings = {"instances": options.instances, "blocks_per_event": BLOCKS_PER_EVENT, "block_tokens": BLOCK_TOKENS}
    run.end({**figures, **settings}, options.out / "events-scale.json")


if __name__ == "__main__":
    main()
