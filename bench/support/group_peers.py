"""Stand-ins for the other routers of a group: they speak the real protocol, and serve nothing."""

from __future__ import annotations

import asyncio
import hashlib
import random
import struct
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import orjson

from sglang_ext_router.group.peers import INTERVAL_S, FrameCodes, greet, welcome
from support.instance_stand_in import InstanceStandIn

PREPARED = 8  # messages of each peer, sent in turn
BLOCKS_PER_PROMPT = 32  # 8 KB
LENGTH = struct.Struct("<I")


class PeerLoad(NamedTuple):
    """The messages that one peer has to send."""

    urls: list[str]  # of all instances
    peers: int
    requests_per_s: float  # of each
    key: str


class PeerFigures(NamedTuple):
    """Of a stretch of time, over all connections."""

    received_bytes: int
    sent_bytes: int
    intervals_s: list[float]  # between two messages of the router to the same peer


class _Peers:
    def __init__(self, load: PeerLoad) -> None:
        self.load = load
        self.key = hashlib.sha256(load.key.encode()).digest()
        self.received_bytes = self.sent_bytes = 0
        self.intervals_s: list[float] = []
        self.interval_s = INTERVAL_S
        self.next_origin = 1

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        origin, self.next_origin = self.next_origin, self.next_origin + 1
        await welcome(reader, writer, self.key, origin)
        last_s: float | None = None
        while True:
            try:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                await reader.readexactly(32 + size)
            except (OSError, asyncio.IncompleteReadError):
                writer.close()
                return
            self.received_bytes += LENGTH.size + 32 + size
            now_s = time.monotonic()
            if last_s is not None:
                self.intervals_s.append(now_s - last_s)
                self.interval_s += 0.05 * (now_s - last_s - self.interval_s)
            last_s = now_s

    async def send(self, origin: int, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        session = await greet(reader, writer, self.key, origin)
        whole, changes = self.messages(origin)
        await asyncio.sleep(random.random() * INTERVAL_S)
        self._write(writer, session, whole, hashlib.sha256(whole).digest())
        digests = [(body, hashlib.sha256(body).digest()) for body in changes]
        number = 0
        while True:
            await asyncio.sleep(self.interval_s)
            self._write(writer, session, *digests[number % PREPARED])
            await writer.drain()
            number += 1

    def _write(self, writer: asyncio.StreamWriter, session: FrameCodes, body: bytes, digest: bytes) -> None:
        frame = LENGTH.pack(len(body)) + session.code(digest) + body
        writer.write(frame)
        self.sent_bytes += len(frame)

    def messages(self, origin: int) -> tuple[bytes, list[bytes]]:
        """The whole state, and what changes from message to message."""
        load, draw = self.load, random.Random(origin)
        count = max(1, round(load.requests_per_s * INTERVAL_S))
        recent = draw.sample(load.urls, min(len(load.urls), round(load.requests_per_s * 5.0)))
        state: dict[str, Any] = {
            "index": origin,
            "members": [],
            "online": ({"model": {"short": count}}, {url: draw.random() for url in recent}),
            "demand": (count, 0),
            "circuits": [],
            "known_bytes": 0,
            "asks": None,
        }
        loads = {url: (draw.randrange(1, 9), draw.randrange(9000)) for url in recent}
        whole = orjson.dumps({**state, "loads": loads, "prefixes": []})
        changes = []
        for _ in range(PREPARED):
            # A request changes what two instances have when it comes, and when it ends.
            touched = draw.sample(load.urls, min(len(load.urls), 4 * count))
            prompts = [
                (draw.choice(load.urls), [draw.getrandbits(64) for _ in range(BLOCKS_PER_PROMPT)]) for _ in range(count)
            ]
            loads = {url: (draw.randrange(1, 9), draw.randrange(9000)) for url in touched}
            changes.append(orjson.dumps({**state, "loads": loads, "prefixes": prompts, "only_changes": True}))
        return whole, changes


async def _run(load: PeerLoad, pipe: Connection) -> None:
    peers = _Peers(load)
    server = await asyncio.start_server(peers.hear, "0.0.0.0", 0, backlog=1024, limit=1 << 20)
    pipe.send(server.sockets[0].getsockname()[1])
    port = await asyncio.to_thread(pipe.recv)
    tasks = [asyncio.create_task(peers.send(origin, port)) for origin in range(1, load.peers + 1)]
    while True:
        await asyncio.to_thread(pipe.recv)  # the end of a stretch
        pipe.send(PeerFigures(peers.received_bytes, peers.sent_bytes, peers.intervals_s))
        peers.received_bytes = peers.sent_bytes = 0
        peers.intervals_s = []
        for task in tasks:
            if task.done():
                task.result()


def run_peers(load: PeerLoad, pipe: Connection) -> None:
    """The stand-ins' process: sends its port, gets the router's, then figures for everything that is received."""
    asyncio.run(_run(load, pipe))


async def _serve(pipe: Connection) -> None:
    pipe.send(await InstanceStandIn().serve())
    await asyncio.to_thread(pipe.recv)


def run_instances(pipe: Connection) -> None:
    """A process that answers checks and load reports at every loopback address, until something is received."""
    asyncio.run(_serve(pipe))
