"""A member's connection to its coordinator: made again whenever it ends, and what each rank sees of it.

Threads do what blocks: one connects, reads, and connects again when the connection has ended; one writes. The engine's
loop only takes from and puts into queues, and may sleep on a descriptor that becomes readable.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from io import BufferedReader
from typing import NamedTuple, Protocol

from sglang_ext.long_pool.decide.orders import GiveUp
from sglang_ext.long_pool.member.ranks import Ranks
from sglang_ext.long_pool.messages import (
    KEY_PROTOCOL,
    PROTOCOL_VERSION,
    Alive,
    Challenge,
    FromMember,
    Heartbeat,
    Hello,
    KeyRequest,
    MessageError,
    Proof,
    Refusal,
    ToMember,
    Welcome,
    encode,
    read_message,
)
from sglang_ext.shared_key import Caller, WrongKeyError
from sglang_ext.waker import Waker

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 5.0
_BEATS = 4  # heartbeats per member timeout
_LONG_SESSION_S = 10.0
_TURN_POLL_S = 0.05


class PoolLink(Protocol):
    """A connection to the coordinator that is made again whenever it ends; nothing here blocks."""

    @property
    def wake_descriptor(self) -> int | None:
        """Readable when there is something to receive, or the connection has ended; None where another rank listens."""

    def session(self) -> Welcome | None:
        """The coordinator's answer to the present connection's hello; None while there is no connection."""

    def receive(self) -> Sequence[ToMember]:
        """Orders that have come since the last call."""

    def send(self, message: FromMember) -> None:
        """Send when possible; a message to a coordinator that has gone is lost with it."""

    def wake(self) -> None:
        """Let an engine loop that sleeps on the link take a turn; from any thread."""


class _JoinError(Exception):
    """Not joined this time; the text is one line."""


class TcpLink:
    """See `PoolLink`. A session lasts as long as one connection; its messages are of no other session."""

    def __init__(
        self,
        host: str,
        port: int,
        hello: Callable[[], Hello],
        key: bytes = b"",
        silent_s: Callable[[], float] = lambda: 0.0,
        give_up: Callable[[int | None], None] = lambda sequence: None,
    ) -> None:
        """Connects in the background, for ever; `hello` is called there, once for each attempt.

        `key` is the pool's. `silent_s`: how long ago the engine has done anything, sent with every heartbeat.
        `give_up` is called at once, in a thread of this link, for a step that the coordinator gives up, and with None
        when the session ends.
        """
        self._host = host
        self._port = port
        self._hello = hello
        self._key = key
        self._silent_s = silent_s
        self._give_up = give_up
        self._turns = 0
        self._waker = Waker()
        # Readable when there is something to receive, or a session has begun or ended.
        self.wake_descriptor = self._waker.descriptor
        self._is_closed = threading.Event()
        self._live: _Session | None = None  # what the threads have
        self._seen: _Session | None = None  # what the engine's loop has seen
        self._thread = threading.Thread(target=self._run, name="cdsp-link", daemon=True)
        self._thread.start()

    def session(self) -> Welcome | None:
        """The coordinator's answer to the present session's hello; None while there is none.

        `receive` and `send` belong to the session that this has returned last. Call it first in every turn: from here
        on the descriptor is readable for what is new.
        """
        self._waker.drain()
        self._turns += 1
        live = self._live
        self._seen = live if live is not None and live.is_up else None
        return None if self._seen is None else self._seen.welcome

    def receive(self) -> list[ToMember]:
        """Orders that have come since the last call; none once the session has ended."""
        seen = self._seen
        return [] if seen is None or not seen.is_up else seen.take()

    def send(self, message: FromMember) -> None:
        """Send soon; never blocks. What cannot be sent is lost, with the session."""
        if self._seen is not None:
            self._seen.put(message)

    def wake(self) -> None:
        """Make the descriptor readable; from any thread."""
        self._waker.notify()

    def close(self) -> None:
        """Leave the pool, for good."""
        self._is_closed.set()
        live = self._live
        if live is not None:
            live.end("closed")
        self._thread.join(CONNECT_TIMEOUT_S)
        self._waker.close()

    def _run(self) -> None:
        last_error, retry_s = "", _FIRST_RETRY_S
        while not self._is_closed.is_set():
            try:
                session = self._join()
            except _JoinError as error:
                if str(error) != last_error:
                    last_error = str(error)
                    logger.warning("cdsp: not in the pool of %s:%d: %s", self._host, self._port, last_error)
                self._is_closed.wait(retry_s)
                retry_s = min(_LAST_RETRY_S, 2 * retry_s)
                continue
            last_error = ""
            logger.info("cdsp: instance %d in the pool of %s:%d", session.welcome.instance, self._host, self._port)
            self._live = session
            if self._is_closed.is_set():
                session.end("closed")
            self._waker.notify()
            began_s = time.monotonic()
            reason = session.run()
            self._live = None
            self._give_up(None)
            turns = self._turns
            self._waker.notify()
            # A session that was short may be followed by another short one.
            is_long = time.monotonic() >= began_s + _LONG_SESSION_S
            retry_s = _FIRST_RETRY_S if is_long else min(_LAST_RETRY_S, 2 * retry_s)
            if not self._is_closed.is_set():
                logger.warning("cdsp: out of the pool of %s:%d: %s", self._host, self._port, reason)
                self._is_closed.wait(retry_s)
            # An engine that hangs is of no use to the pool.
            while self._turns == turns and not self._is_closed.wait(_TURN_POLL_S):
                pass

    def _join(self) -> _Session:
        hello = self._hello()
        try:
            sock = socket.create_connection((self._host, self._port), CONNECT_TIMEOUT_S)
        except OSError as error:
            raise _JoinError(_reason(error)) from None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            lines = sock.makefile("rb")
            self._prove(sock, lines)
            sock.sendall(encode(hello))
            answer = read_message(lines)
        except (OSError, ValueError) as error:
            sock.close()
            raise _JoinError(_reason(error)) from None
        except _JoinError:
            sock.close()
            raise
        if not isinstance(answer, Welcome):
            sock.close()
            raise _JoinError(answer.reason if isinstance(answer, Refusal) else f"{answer!r} instead of a welcome")
        return _Session(_JoinedSocket(sock, lines), answer, self._waker, self._silent_s, self._give_up)

    def _prove(self, sock: socket.socket, lines: BufferedReader) -> None:
        """Both sides know the pool's key, or _JoinError."""
        caller = Caller(self._key, KEY_PROTOCOL)
        sock.sendall(encode(KeyRequest(PROTOCOL_VERSION, caller.opening.hex())))
        answer = read_message(lines)
        if isinstance(answer, Refusal):
            raise _JoinError(answer.reason)
        if not isinstance(answer, Challenge):
            raise _JoinError(f"{answer!r} instead of a challenge")
        try:
            proof = caller.answer(bytes.fromhex(answer.challenge))
        except WrongKeyError:
            raise _JoinError("the coordinator has another key (--cdsp-key-file)") from None
        sock.sendall(encode(Proof(proof.hex())))


class _JoinedSocket(NamedTuple):
    socket: socket.socket
    lines: BufferedReader


class _Session:
    """One connection, from its welcome to its end."""

    def __init__(
        self,
        connection: _JoinedSocket,
        welcome: Welcome,
        waker: Waker,
        silent_s: Callable[[], float],
        give_up: Callable[[int | None], None],
    ) -> None:
        self.welcome = welcome
        self._connection = connection
        self._waker = waker
        self._silent_s = silent_s
        self._give_up = give_up
        self._inbox: deque[ToMember] = deque()
        self._outbox: queue.SimpleQueue[FromMember | None] = queue.SimpleQueue()
        self._reason: str | None = None
        self._writer = threading.Thread(target=self._write, name="cdsp-link-writer", daemon=True)
        connection.socket.settimeout(welcome.member_timeout_s)

    @property
    def is_up(self) -> bool:
        return self._reason is None

    def take(self) -> list[ToMember]:
        taken = []
        while self._inbox:
            taken.append(self._inbox.popleft())
        return taken

    def put(self, message: FromMember) -> None:
        self._outbox.put(message)

    def run(self) -> str:
        """Read until the session ends; why it has."""
        self._writer.start()
        try:
            while (message := read_message(self._connection.lines)) is not None:
                if isinstance(message, GiveUp):
                    self._give_up(message.sequence)
                if not isinstance(message, Heartbeat):
                    self._inbox.append(message)  # type: ignore[arg-type]  # decoded from a coordinator
                    self._waker.notify()
            self.end("the coordinator has closed the connection")
        except (OSError, MessageError) as error:
            self.end(_reason(error))
        self._writer.join()
        self._connection.lines.close()
        self._connection.socket.close()
        return self._reason or ""

    def end(self, reason: str) -> None:
        """End the session; the first reason counts."""
        if self._reason is None:
            self._reason = reason
        self._outbox.put(None)
        try:
            self._connection.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was faster

    def _write(self) -> None:
        """Write what is put, and a heartbeat every now and then."""
        beat_s, beaten_s = self.welcome.member_timeout_s / _BEATS, time.monotonic()
        while True:
            now_s = time.monotonic()
            message: FromMember | None
            if now_s >= beaten_s + beat_s:
                message, beaten_s = Alive(self._silent_s()), now_s
            else:
                try:
                    message = self._outbox.get(timeout=beaten_s + beat_s - now_s)
                except queue.Empty:
                    continue
            if message is None or not self.is_up:
                return
            try:
                self._connection.socket.sendall(encode(message))
            except OSError as error:
                self.end(_reason(error))
                return


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the coordinator does not answer"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class _News(NamedTuple):
    """Describes what the first rank has received since the last turn."""

    session: Welcome | None
    is_new_session: bool
    orders: Sequence[ToMember]


_NOTHING = _News(None, False, ())


class ReplicatedLink:
    """A `PoolLink` as each rank of an instance sees it: the same messages in the same turn.

    Every turn has to ask for the session exactly once: that is when news travels.
    """

    def __init__(self, ranks: Ranks, link: PoolLink | None) -> None:
        """`link` is the first rank's; the others have none."""
        self._ranks = ranks
        self._link = link
        self._session: Welcome | None = None
        self._shared_session: Welcome | None = None  # on the first rank: the session that all ranks know
        self._orders: list[ToMember] = []
        self.wake_descriptor = None if link is None else link.wake_descriptor

    def session(self) -> Welcome | None:
        news = self._ranks.share(self._receive_news)
        if news.is_new_session:
            # What came before belongs to a session that has ended.
            self._session, self._orders = news.session, []
        self._orders += news.orders
        return self._session

    def receive(self) -> list[ToMember]:
        orders, self._orders = self._orders, []
        return orders

    def send(self, message: FromMember) -> None:
        if self._link is not None:
            self._link.send(message)

    def wake(self) -> None:
        if self._link is not None:
            self._link.wake()

    def _receive_news(self) -> _News:
        assert self._link is not None, "only the first rank is asked, and it has a link"
        session = self._link.session()
        # Two sessions may be equal: after a restart the coordinator counts again.
        is_new, self._shared_session = session is not self._shared_session, session
        orders = self._link.receive()
        if not is_new and not orders:
            return _NOTHING
        return _News(session if is_new else None, is_new, tuple(orders))
