"""Several routers as one: each sends the others, over TCP, prefixes, loads, and instances added or drained by hand.

The processes of one router do the same on loopback, more often, and with their counters.
Every router connects to every other one and sends its state repeatedly (`SharedState`); what it receives comes on the
connections of the others. Both sides of a connection prove that they know the common key, and every frame carries a
code made with it and with the frame's number, so nothing can be forged, repeated or left out unnoticed. Frames are not
encrypted: they hold addresses of instances and hashes of prompts, none of their text.

A router that starts asks the peer with most prefixes for them, and gets the recently used ones. In a large group states
are sent less often, so that sending and receiving take no more than `MAX_BUSY_SHARE` of a processor.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from sglang_ext.shared_key import (
    CHALLENGE_BYTES,
    CODE_BYTES,
    NONCE_BYTES,
    Callee,
    Caller,
    WrongKeyError,
    is_proof,
    prove,
)
from sglang_ext_router.config import RouterConfig
from sglang_ext_router.group.shared_state import NO_LOAD, Loads, PeerCounts, SharedState, read_prefixes
from sglang_ext_router.group.supervisor import ProcessPlace
from sglang_ext_router.request.upstream import watch_peer

if TYPE_CHECKING:
    from sglang_ext_router.router import Router

logger = logging.getLogger(__name__)

HELLO = b"sglang-ext peer 4\n"
_PROTOCOL = "routers"
_OTHER_KEY = "it does not have our --peer-key"
INTERVAL_S = 0.2
MAX_INTERVAL_S = 1.0
MAX_BUSY_SHARE = 0.1  # of the time, for what peers send each other
FORGET_AFTER_S = 3.0
PROCESS_INTERVAL_S = 0.1  # for the processes of one router, which are close to each other
PROCESS_FORGET_AFTER_S = 2.0
RESOLVE_S = 5.0
HANDSHAKE_TIMEOUT_S = 5.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.2, 5.0
MAX_FRAME_BYTES = 8 << 20
MAX_UNSENT_BYTES = 1 << 20  # to a peer that does not read: it misses messages, the others do not
MAX_INCOMING = 512  # connections
SILENT_AFTER_S = 15.0  # without a message its connection is closed
SNAPSHOT_BLOCKS = 500_000  # of prefixes for a router that starts: about 10 MB
SNAPSHOT_FRAME_BLOCKS = 8192
ASK_AFTER_S = 1.0  # after the first state of a peer, for by then the others have sent theirs
ASK_TIMEOUT_S = 5.0  # without a frame the next one is asked
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")

Address = tuple[str, int]


class PeerError(Exception):
    """The other side is not a peer, or does not know the key."""


class FrameCodes:
    """The codes of one direction of one connection, and the number of the router at its other end."""

    def __init__(self, key: bytes, peer: int) -> None:
        self.peer = peer
        self._key = key
        self._number = 0

    def code(self, digest: bytes) -> bytes:
        """Return the code of the next frame; `digest` is that of its body."""
        self._number += 1
        return prove(self._key, "frame", _NUMBER.pack(self._number), digest)

    def is_next(self, code: bytes, digest: bytes) -> bool:
        """Return whether `code` is that of the next frame."""
        self._number += 1
        return is_proof(code, self._key, "frame", _NUMBER.pack(self._number), digest)


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, origin: int) -> FrameCodes:
    """Do the handshake of the side that connects and then sends; PeerError if the other one has another key."""
    sender = _NUMBER.pack(origin)
    caller = Caller(key, _PROTOCOL, sender)
    writer.write(HELLO + sender + caller.opening)
    receiver = await reader.readexactly(_NUMBER.size)
    challenge = await reader.readexactly(CHALLENGE_BYTES)
    try:
        writer.write(caller.answer(challenge, receiver))
    except WrongKeyError:
        raise PeerError(_OTHER_KEY) from None
    return FrameCodes(caller.session_key, _NUMBER.unpack(receiver)[0])


async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, origin: int) -> FrameCodes:
    """Do the handshake of the side that receives; PeerError if the sender is no peer."""
    if await reader.readexactly(len(HELLO)) != HELLO:
        raise PeerError("it does not speak this protocol")
    sender, opening = await reader.readexactly(_NUMBER.size), await reader.readexactly(NONCE_BYTES)
    receiver = _NUMBER.pack(origin)
    callee = Callee(key, _PROTOCOL, opening, sender, receiver)
    writer.write(receiver + callee.challenge)
    answer = await reader.readexactly(CODE_BYTES)
    try:
        callee.check(answer)
    except WrongKeyError:
        raise PeerError(_OTHER_KEY) from None
    return FrameCodes(callee.session_key, _NUMBER.unpack(sender)[0])


class _Receiver:
    """A connection on which this router sends a peer its state."""

    def __init__(self, writer: asyncio.StreamWriter, session: FrameCodes) -> None:
        self.writer = writer
        self.peer = session.peer
        self.needs_all = True  # it has missed a message: changes would not do
        self._session = session

    def send(self, body: bytes, digest: bytes) -> None:
        self.writer.write(_LENGTH.pack(len(body)) + self._session.code(digest) + body)


class Peers(SharedState):
    """The link between the routers of a group, or between the processes of one router."""

    def __init__(self, config: RouterConfig, sock: socket.socket, process: ProcessPlace | None = None) -> None:
        """`sock` listens for the others; `process` is for one of several processes."""
        if process is not None:
            super().__init__(process.number, config, Path(process.folder, f"{process.number}.counts"))
            key, peers = process.key, process.peers
            self._interval_s, self._forget_after_s = PROCESS_INTERVAL_S, PROCESS_FORGET_AFTER_S
        else:
            super().__init__(secrets.randbits(62) + 1, config)
            key, peers = config.peer_key, config.peer
            self._interval_s, self._forget_after_s = INTERVAL_S, FORGET_AFTER_S
        self._key = hashlib.sha256(key.encode()).digest()
        self._sock = sock
        self._fixed = [_address(text) for text in peers]
        self._service = config.peer_service
        self._service_port = config.peer_port
        self._connection_tasks: dict[Address, asyncio.Task[None]] = {}
        self._own_addresses: set[Address] = set()  # which turned out to be this router
        self._receivers: dict[_Receiver, None] = {}
        self._sent_loads: Loads = {}
        self._busy_s = 0.0  # spent on sending and receiving since the last message
        self._prefix_asker = _PrefixAsker()
        self._known_bytes: dict[int, int] = {}  # of prefixes, by sender
        self._snapshots: dict[int, asyncio.Task[None]] = {}  # of prefixes, for routers that have asked
        self._receiving: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._latest: dict[int, FrameCodes] = {}  # the connection that counts, of each sender
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server
        self.skipped = 0  # messages that a peer did not get, as it did not read

    async def start(self, router: Router) -> None:
        await super().start(router)
        self._server = await asyncio.start_server(self._receive, sock=self._sock, limit=MAX_FRAME_BYTES)
        self._tasks = [asyncio.create_task(self._find_peers()), asyncio.create_task(self._send_changes())]

    async def stop(self) -> None:
        self._server.close()
        tasks = [*self._tasks, *self._connection_tasks.values(), *self._snapshots.values()]
        for task in tasks:
            task.cancel()
        for writer in self._receiving.values():
            writer.transport.abort()
        await asyncio.gather(*tasks, *self._receiving, return_exceptions=True)

    def peer_counts(self) -> PeerCounts | None:
        if self._counts_file is not None:
            return None  # processes of one router are no group
        return PeerCounts(len(self._connection_tasks), len(self._receivers), len(self._states), self.skipped)

    # -- sending ----------------------------------------------------------------------------------------

    async def _find_peers(self) -> None:
        while True:
            wanted = set(self._fixed)
            if self._service:
                try:
                    loop = asyncio.get_running_loop()
                    found = await loop.getaddrinfo(self._service, self._service_port, type=socket.SOCK_STREAM)
                    wanted |= {(str(entry[4][0]), self._service_port) for entry in found}
                except (OSError, UnicodeError) as error:
                    # Names fail to resolve now and then; known peers stay.
                    logger.debug("peers of %s: %s", self._service, error)
                    wanted |= set(self._connection_tasks)
            for address in self._connection_tasks.keys() - wanted:
                self._connection_tasks.pop(address).cancel()
            for address in wanted - self._connection_tasks.keys() - self._own_addresses:
                self._connection_tasks[address] = asyncio.create_task(self._keep_connected(address))
            self._table.expire(self._router.loop.time())
            await asyncio.sleep(RESOLVE_S)

    async def _keep_connected(self, address: Address) -> None:
        """Keep a connection to one peer; `_send_changes` writes the messages."""
        backoff_s, complaint = FIRST_BACKOFF_S, ""
        peer: int | None = None
        while True:
            writer: asyncio.StreamWriter | None = None
            receiver: _Receiver | None = None
            try:
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    reader, writer = await asyncio.open_connection(*address)
                    session = await greet(reader, writer, self._key, self._origin)
                if session.peer == self._origin:
                    self._own_addresses.add(address)
                    self._connection_tasks.pop(address, None)
                    return
                if peer not in (None, session.peer):
                    self._forget(peer)  # it has ended: another start of it has its address now
                peer, complaint = session.peer, ""
                connected_s = self._router.loop.time()
                if any(known.peer == session.peer for known in self._receivers):
                    backoff_s = MAX_BACKOFF_S  # another address of a peer that has a connection: in case it loses that
                else:
                    watch_peer(writer.get_extra_info("socket"))
                    receiver = _Receiver(writer, session)
                    self._receivers[receiver] = None
                    await reader.read(1)  # nothing is sent here: it ends with the connection
                if self._router.loop.time() - connected_s > MAX_BACKOFF_S:
                    backoff_s = FIRST_BACKOFF_S  # not where it refuses every message again and again
            except (OSError, UnicodeError, TimeoutError, asyncio.IncompleteReadError, PeerError) as error:
                if isinstance(error, PeerError) and str(error) != complaint:
                    logger.warning("peer %s:%d: %s", *address, error)
                    complaint = str(error)
            finally:
                if receiver is not None:
                    self._receivers.pop(receiver, None)
                if writer is not None:
                    writer.transport.abort()  # a peer that does not read would keep a closed connection open
            await asyncio.sleep(backoff_s)
            backoff_s = min(MAX_BACKOFF_S, backoff_s * 2)

    async def _send_changes(self) -> None:
        loop = self._router.loop
        stood_still = False  # then what came meanwhile is read before a peer is forgotten
        while True:
            try:
                self._send_state()
                if not stood_still:
                    started_s = time.perf_counter()
                    self._apply_states(self._forget_after_s)
                    self._busy_s += time.perf_counter() - started_s
            except Exception:
                # The peers would forget this router, and it would never forget them.
                logger.exception("the state of this router, or its peers' states")
            interval_s = min(MAX_INTERVAL_S, max(self._interval_s, self._busy_s / MAX_BUSY_SHARE))
            self._busy_s = 0.0
            due_s = loop.time() + interval_s
            await asyncio.sleep(interval_s)
            stood_still = not stood_still and loop.time() - due_s > self._forget_after_s / 4

    def _send_state(self) -> None:
        """Send to all peers; only the changes to peers that have got the message before."""
        started_s = time.perf_counter()
        message = self._next_message()
        loads: Loads = message["loads"]
        message["known_bytes"] = self._router.planner.prefixes.index.used
        message["asks"] = self._prefix_asker.next_asked(self._router.loop.time(), self._known_bytes)
        whole = changes = b""
        for receiver in self._receivers:
            if receiver.writer.is_closing():
                continue
            if receiver.writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self.skipped += 1
                receiver.needs_all = True
                continue
            if receiver.needs_all:
                body = whole = whole or _encoded(message)
            else:
                if not changes:
                    changes = _encoded({**message, "loads": _changes(self._sent_loads, loads), "only_changes": True})
                body = changes
            receiver.send(body, _digest(body))
            receiver.needs_all = False
        self._sent_loads = loads
        self._busy_s += time.perf_counter() - started_s

    async def _send_prefixes(self, peer: int) -> None:
        """Send a router that starts what is known of prefixes, in frames that it can follow."""
        router = self._router
        workers = [worker for worker in router.registry if worker.keeps_prefixes]
        frames: list[list[tuple[str, list[int]]]] = [[]]
        blocks = 0
        places = [(worker.url, worker.id) for worker in workers if not worker.ranks]
        places += [(f"{one.url}#{rank}", load.prefix_id) for one in workers for rank, load in enumerate(one.ranks)]
        for place, prefix_id in places:
            for path in router.planner.prefixes.index.newest_paths(prefix_id, SNAPSHOT_BLOCKS // len(places)):
                if blocks + len(path) > SNAPSHOT_FRAME_BLOCKS and blocks:
                    frames.append([])
                    blocks = 0
                frames[-1].append((place, path))
                blocks += len(path)
            await asyncio.sleep(0)
        for number, frame in enumerate(frames):
            receiver = next((known for known in self._receivers if known.peer == peer), None)
            if receiver is None:
                return  # it asks another one
            body = orjson.dumps({"index": self._origin, "snapshot": frame, "is_last": number == len(frames) - 1})
            receiver.send(body, _digest(body))
            with contextlib.suppress(OSError):
                await receiver.writer.drain()

    # -- receiving --------------------------------------------------------------------------------------

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._receiving[task] = writer
        try:
            if len(self._receiving) > MAX_INCOMING:
                return
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                session = await welcome(reader, writer, self._key, self._origin)
            if session.peer == self._origin:
                return
            counts = False  # from its first message on: of a peer with two addresses one connection has none
            while True:
                async with asyncio.timeout(SILENT_AFTER_S):
                    body = await _read_frame(reader, session)
                if not counts:
                    self._latest[session.peer], counts = session, True
                if self._latest.get(session.peer) is not session:
                    return  # it has connected again, or was forgotten: then it connects again and sends everything
                started_s = time.perf_counter()
                message = orjson.loads(body)
                if message["index"] != session.peer:
                    raise PeerError("it speaks for another one")
                self._take(message)
                self._busy_s += time.perf_counter() - started_s
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # it is gone, or connects again
        except PeerError as error:
            logger.warning("a connection from %s was refused: %s", writer.get_extra_info("peername"), error)
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # of another version of this program
            logger.warning("a message of %s cannot be read: %r", writer.get_extra_info("peername"), error)
        finally:
            del self._receiving[task]
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _take(self, message: Mapping[str, Any]) -> None:
        """Take a state, or a part of the prefixes that this router has asked for."""
        if "snapshot" in message:
            self._learn_prefixes(read_prefixes(message["snapshot"]))
            self._prefix_asker.on_frame(message["index"], bool(message["is_last"]), self._router.loop.time())
            return
        known_bytes, asks, sender = int(message["known_bytes"]), message["asks"], message["index"]
        super()._take(message)
        self._known_bytes[sender] = known_bytes
        if asks == self._origin and sender not in self._snapshots:
            self._snapshots[sender] = asyncio.create_task(self._send_prefixes(sender))

    def _forget(self, index: int) -> None:
        super()._forget(index)
        self._known_bytes.pop(index, None)
        self._latest.pop(index, None)
        if (task := self._snapshots.pop(index, None)) is not None:
            task.cancel()


class _PrefixAsker:
    """Decides which peer a router asks for prefixes after its start: the peer that knows most, then the next."""

    def __init__(self) -> None:
        self._is_over = False
        self._since_s: float | None = None  # when the first peer was there, then when the last frame came
        self._asked: int | None = None
        self._failed: set[int] = set()

    def next_asked(self, now_s: float, known_bytes: Mapping[int, int]) -> int | None:
        """Return the peer to ask now."""
        if self._is_over or not known_bytes:
            return None
        if self._since_s is None:
            self._since_s = now_s
        if self._asked is None and now_s - self._since_s < ASK_AFTER_S:
            return None
        if self._asked is not None and (self._asked not in known_bytes or now_s - self._since_s > ASK_TIMEOUT_S):
            self._failed.add(self._asked)
            self._asked = None
        if self._asked is None:
            left = [(size, peer) for peer, size in known_bytes.items() if size and peer not in self._failed]
            self._is_over = not left
            self._asked = max(left)[1] if left else None
            self._since_s = now_s
        return self._asked

    def on_frame(self, peer: int, is_last: bool, now_s: float) -> None:
        """A part of what was asked for has come."""
        if peer == self._asked:
            self._since_s = now_s
            if is_last:
                self._is_over, self._asked = True, None


def _changes(before: Loads, after: Loads) -> Loads:
    """Return what makes the one of the other; an instance without load is sent once."""
    changes = {url: load for url, load in after.items() if before.get(url) != load}
    changes.update((url, NO_LOAD) for url in before.keys() - after.keys())
    return changes


def _encoded(message: Mapping[str, Any]) -> bytes:
    body = orjson.dumps(message)
    return body if len(body) <= MAX_FRAME_BYTES else orjson.dumps({**message, "prefixes": []})


async def _read_frame(reader: asyncio.StreamReader, session: FrameCodes) -> bytes:
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > MAX_FRAME_BYTES:
        raise PeerError(f"a frame of {size} bytes is too large")
    code = await reader.readexactly(CODE_BYTES)
    body = await reader.readexactly(size)
    if not session.is_next(code, _digest(body)):
        raise PeerError("a frame was forged, repeated or lost")
    return body


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)
