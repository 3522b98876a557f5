"""Several routers as one: each tells the others, over TCP, of prefixes, loads, and instances added or drained by hand.

Every router connects to every other one and tells its state again and again (`SharedState`); what it hears comes on the
connections of the others. Both sides of a connection prove that they know the common key, and every frame carries a
code made with it and with the frame's number, so nothing can be forged, repeated or left out unnoticed. Frames are not
encrypted: they hold addresses of instances and hashes of prompts, none of their text.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Sequence
from typing import Any

import orjson

from sglang_ext_router.config import RouterConfig
from sglang_ext_router.metrics import MetricsSnapshot
from sglang_ext_router.shared_state import LinkedRouter, PeerCounts, SharedState

logger = logging.getLogger(__name__)

HELLO = b"sglang-ext peer 1\n"
INTERVAL_S = 0.2
FORGET_AFTER_S = 3.0
RESOLVE_S = 5.0
HANDSHAKE_TIMEOUT_S = 5.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.2, 5.0
MAX_FRAME_BYTES = 8 << 20
MAX_UNSENT_BYTES = 1 << 20  # to a peer that does not read: it misses messages, the others do not
MAX_INCOMING = 512  # connections
SILENT_AFTER_S = 15.0  # without a message its connection is closed
NONCE_BYTES = 16
CODE_BYTES = 32
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")

Address = tuple[str, int]


class PeerError(Exception):
    """The other side is no peer, or not one that knows the key."""


class _FrameCodes:
    """The codes of one direction of one connection."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def code(self, body: bytes) -> bytes:
        """Of the next frame."""
        self._number += 1
        return _code(self._key, _NUMBER.pack(self._number), body)


def _code(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, origin: int) -> _FrameCodes:
    """The handshake of the side that connects and then tells; PeerError if the other one does not know the key."""
    own = secrets.token_bytes(NONCE_BYTES)
    writer.write(HELLO + own)
    answer = await reader.readexactly(NONCE_BYTES + CODE_BYTES)
    nonces = own + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _code(key, b"hears", nonces)):
        raise PeerError("it does not have our --peer-key")
    teller = _NUMBER.pack(origin)
    writer.write(teller + _code(key, b"tells", nonces, teller))
    return _FrameCodes(_code(key, b"session", nonces, teller))


async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> tuple[int, _FrameCodes]:
    """The handshake of the side that hears: the teller's number; PeerError if it does not know the key."""
    first = await reader.readexactly(len(HELLO) + NONCE_BYTES)
    if not first.startswith(HELLO):
        raise PeerError("it does not speak this protocol")
    own = secrets.token_bytes(NONCE_BYTES)
    nonces = first[len(HELLO) :] + own
    writer.write(own + _code(key, b"hears", nonces))
    answer = await reader.readexactly(_NUMBER.size + CODE_BYTES)
    teller = answer[: _NUMBER.size]
    if not hmac.compare_digest(answer[_NUMBER.size :], _code(key, b"tells", nonces, teller)):
        raise PeerError("it does not have our --peer-key")
    return _NUMBER.unpack(teller)[0], _FrameCodes(_code(key, b"session", nonces, teller))


class PeerRouters(SharedState):
    """The link between routers; see `siblings.py: SiblingLink`."""

    shares_prefixes = True

    def __init__(self, config: RouterConfig, sock: socket.socket) -> None:
        """`sock` listens for the others."""
        super().__init__(secrets.randbits(62) + 1, config.workers)
        self._key = hashlib.sha256(config.peer_key.encode()).digest()
        self._sock = sock
        self._fixed = [_address(text) for text in config.peer]
        self._service = config.peer_service
        self._service_port = config.peer_port
        self._tellers: dict[Address, asyncio.Task[None]] = {}
        self._own_addresses: set[Address] = set()  # which turned out to be this router
        self._writers: dict[asyncio.StreamWriter, _FrameCodes] = {}  # to those that hear us
        self._hearing: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server
        self.skipped = 0  # messages that a peer did not get, as it did not read

    async def start(self, router: LinkedRouter) -> None:
        self._router = router
        self._server = await asyncio.start_server(self._hear, sock=self._sock, limit=MAX_FRAME_BYTES)
        self._tasks = [asyncio.create_task(self._find_peers()), asyncio.create_task(self._tell())]

    async def stop(self) -> None:
        self._server.close()
        tasks = [*self._tasks, *self._tellers.values()]
        for task in tasks:
            task.cancel()
        for writer in self._hearing.values():
            writer.transport.abort()
        await asyncio.gather(*tasks, *self._hearing, return_exceptions=True)

    @property
    def peers(self) -> int:
        """Routers that hear this one now."""
        return len(self._writers)

    def peer_counts(self) -> PeerCounts:
        return PeerCounts(len(self._tellers), len(self._writers), len(self._states), self.skipped)

    def metric_snapshots(self) -> Sequence[tuple[int, MetricsSnapshot]]:
        """None: each router is asked for its own numbers."""
        return ()

    # -- telling ----------------------------------------------------------------------------------------

    async def _find_peers(self) -> None:
        while True:
            wanted = set(self._fixed)
            if self._service:
                try:
                    loop = asyncio.get_running_loop()
                    found = await loop.getaddrinfo(self._service, self._service_port, type=socket.SOCK_STREAM)
                    wanted |= {(str(entry[4][0]), self._service_port) for entry in found}
                except (OSError, UnicodeError) as error:
                    # Names fail to resolve now and then; those that are known stay.
                    logger.debug("peers of %s: %s", self._service, error)
                    wanted |= set(self._tellers)
            for address in self._tellers.keys() - wanted:
                self._tellers.pop(address).cancel()
            for address in wanted - self._tellers.keys() - self._own_addresses:
                self._tellers[address] = asyncio.create_task(self._tell_one(address))
            self._table.expire(self._router.loop.time())
            await asyncio.sleep(RESOLVE_S)

    async def _tell_one(self, address: Address) -> None:
        """Keep a connection to one peer; what it is told is written by `_tell`."""
        backoff_s, complaint = FIRST_BACKOFF_S, ""
        while True:
            writer: asyncio.StreamWriter | None = None
            try:
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    reader, writer = await asyncio.open_connection(*address)
                    session = await greet(reader, writer, self._key, self._origin)
                self._writers[writer] = session
                complaint = ""
                connected_s = self._router.loop.time()
                is_own = bool(await reader.read(1))
                if self._router.loop.time() - connected_s > MAX_BACKOFF_S:
                    backoff_s = FIRST_BACKOFF_S  # not where it refuses what it is told, again and again
                if is_own:  # nothing is sent here but that this is the router itself
                    self._own_addresses.add(address)
                    self._tellers.pop(address, None)
                    return
            except (OSError, UnicodeError, TimeoutError, asyncio.IncompleteReadError, PeerError) as error:
                if isinstance(error, PeerError) and str(error) != complaint:
                    logger.warning("peer %s:%d: %s", *address, error)
                    complaint = str(error)
            finally:
                if writer is not None:
                    self._writers.pop(writer, None)
                    writer.transport.abort()  # one that does not read would keep a closed one open
            await asyncio.sleep(backoff_s)
            backoff_s = min(MAX_BACKOFF_S, backoff_s * 2)

    async def _tell(self) -> None:
        while True:
            self._send_state()
            self._apply_loads(FORGET_AFTER_S)
            await asyncio.sleep(INTERVAL_S)

    def _on_changed(self) -> None:
        self._send_state()

    def _send_state(self) -> None:
        message = self._next_message()
        body = orjson.dumps(message)
        if len(body) > MAX_FRAME_BYTES:
            body = orjson.dumps({**message, "prefixes": []})
        for writer, session in self._writers.items():
            if writer.is_closing():
                continue
            if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self.skipped += 1
                continue
            writer.write(_LENGTH.pack(len(body)) + session.code(body) + body)

    # -- hearing ----------------------------------------------------------------------------------------

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._hearing[task] = writer
        try:
            if len(self._hearing) > MAX_INCOMING:
                return
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                teller, session = await welcome(reader, writer, self._key)
            if teller == self._origin:
                writer.write(b"!")
                await writer.drain()
                return
            while True:
                async with asyncio.timeout(SILENT_AFTER_S):
                    body = await _read_frame(reader, session)
                message = orjson.loads(body)
                if message["index"] != teller:
                    raise PeerError("it speaks for another one")
                self._take(message)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # it is gone, or connects anew
        except PeerError as error:
            logger.warning("a connection from %s was refused: %s", writer.get_extra_info("peername"), error)
        except (
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            AttributeError,
        ) as error:  # of another version of this program
            logger.warning("a message of %s cannot be read: %r", writer.get_extra_info("peername"), error)
        finally:
            del self._hearing[task]
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _read_frame(reader: asyncio.StreamReader, session: _FrameCodes) -> bytes:
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > MAX_FRAME_BYTES:
        raise PeerError(f"a frame of {size} bytes is too large")
    code = await reader.readexactly(CODE_BYTES)
    body = await reader.readexactly(size)
    if not hmac.compare_digest(code, session.code(body)):
        raise PeerError("a frame was forged, repeated or lost")
    return body


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)
