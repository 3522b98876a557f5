"""One connection between two members of a long pool: what is to be sent, what was posted, and the threads that move it.

A message goes straight into the tensor that was posted for its step and tag. What comes of a step that is over is read
and thrown away. With its connection a link ends, and all calls that use it fail.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from sglang_ext.long_pool.link_frames import (
    Frame,
    FrameKind,
    LinkError,
    PeerAddress,
    PeerId,
    close_connection,
    keep_alive,
    read_exactly,
    read_head,
    reason_of,
    send_frame,
)

CONNECT_TIMEOUT_S = 5.0  # of the connecting side; the other side waits as long as a step does
_SCRAP_BYTES = 2**20


class LinkOwner(Protocol):
    """Whose link it is; see `peer_links.PeerLinks`. Called from the link's threads."""

    step_timeout_s: float

    def connect(
        self, peer: PeerId, address: PeerAddress, deadline_s: float, is_wanted: Callable[[], bool]
    ) -> socket.socket: ...

    def forget(self, link: PeerLink) -> None: ...

    def is_past(self, sequence: int) -> bool: ...

    def take_word(self, peer: PeerId, frame: Frame) -> None: ...


class Readiness(Protocol):
    """Describes when a message is in its memory; `device_streams.Mark` is such."""

    def synchronize(self) -> None:
        """Return once it is."""


class LinkCall:
    """A message under way. Its tensor belongs to it until it has ended, or for good where it has failed."""

    def __init__(self, frame: Frame, ready: Readiness | None = None) -> None:
        """`ready` is waited for before it is sent; None: it is in its memory."""
        self.frame = frame
        self.ready = ready
        self.error: str | None = None
        self._lock = threading.Lock()
        self._is_over = False
        self._under_way = threading.Lock()
        self._under_way.acquire()

    @property
    def is_over(self) -> bool:
        return self._is_over

    def end(self, error: str | None = None) -> None:
        """It is done, or has failed; the first word counts."""
        with self._lock:
            if self._is_over:
                return
            self._is_over, self.error = True, error
        self._under_way.release()

    def has_ended_within(self, timeout_s: float) -> bool:
        """Wait for its end, at most this long."""
        if not self._under_way.acquire(timeout=max(0.0, timeout_s)):
            return False
        self._under_way.release()
        return True


class PeerLink:
    """A link to one peer, from its first use to the end of its connection."""

    def __init__(self, owner: LinkOwner, peer: PeerId, address: PeerAddress | None) -> None:
        """`address`: where to connect; None where the peer connects."""
        self._owner = owner
        self.peer = peer
        self._condition = threading.Condition()
        self._outbox: deque[LinkCall] = deque()
        self._posted: dict[tuple[int, int], LinkCall] = {}  # by step and tag
        self._socket: socket.socket | None = None
        self._reason: str | None = None
        self._connects_until_s = time.monotonic() + owner.step_timeout_s  # the peer, which may have other work first
        threading.Thread(target=self._run, args=(address,), name="cdsp-link-writer", daemon=True).start()

    @property
    def is_connected(self) -> bool:
        return self._socket is not None and self._reason is None

    def put(self, call: LinkCall, *, is_urgent: bool = False) -> None:
        """Send it behind everything that waits, or before."""
        with self._condition:
            if self._reason is None:
                self._connects_until_s = time.monotonic() + self._owner.step_timeout_s
                if is_urgent:
                    self._outbox.appendleft(call)
                else:
                    self._outbox.append(call)
                self._condition.notify_all()
                return
        call.end(self._reason)

    def post(self, call: LinkCall) -> None:
        """Receive into it what comes under its step and tag."""
        with self._condition:
            if self._reason is None:
                self._connects_until_s = time.monotonic() + self._owner.step_timeout_s
                self._posted[call.frame.sequence, call.frame.tag] = call
                self._condition.notify_all()
                return
        call.end(self._reason)

    def forget_past(self) -> None:
        """A step is over: what still comes of it is thrown away."""
        with self._condition:
            self._posted = {key: call for key, call in self._posted.items() if not self._owner.is_past(key[0])}
            self._condition.notify_all()

    def take(self, connection: socket.socket) -> bool:
        """Use this connection; False where it has one, or has ended."""
        with self._condition:
            if self._socket is not None or self._reason is not None:
                return False
            keep_alive(connection, 2 * self._owner.step_timeout_s)
            self._socket = connection
            self._condition.notify_all()
        threading.Thread(target=self._read, args=(connection,), name="cdsp-link-reader", daemon=True).start()
        return True

    def end(self, reason: str) -> None:
        """Fail everything that uses it; the first reason counts."""
        with self._condition:
            if self._reason is not None:
                return
            self._reason = reason
            calls = [*self._outbox, *self._posted.values()]
            self._outbox.clear()
            self._posted.clear()
            if self._socket is not None:
                close_connection(self._socket)
            self._condition.notify_all()
        self._owner.forget(self)
        for call in calls:
            call.end(reason)

    def _run(self, address: PeerAddress | None) -> None:
        """The writing thread."""
        try:
            if address is not None:
                deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
                connection = self._owner.connect(self.peer, address, deadline_s, lambda: self._reason is None)
                if not self.take(connection):
                    close_connection(connection)
            self._wait_until_connected()
            while (call := self._next()) is not None and self._socket is not None:
                if not call.is_over:
                    try:
                        if call.ready is not None:
                            call.ready.synchronize()
                        send_frame(self._socket, call.frame)
                    except (OSError, RuntimeError) as error:
                        call.end(reason_of(error))
                        raise
                    call.end()
        except (LinkError, OSError, RuntimeError) as error:  # of devices
            self.end(reason_of(error))

    def _wait_until_connected(self) -> None:
        """Or until it has ended. Raises LinkError where the peer has not connected as long as a step waits for it."""
        with self._condition:
            while self._socket is None and self._reason is None:
                left_s = self._connects_until_s - time.monotonic()
                if left_s <= 0:
                    raise LinkError(f"it has not connected within {self._owner.step_timeout_s:g} s")
                self._condition.wait(left_s)

    def _next(self) -> LinkCall | None:
        with self._condition:
            while not self._outbox and self._reason is None:
                self._condition.wait()
            return self._outbox.popleft() if self._reason is None else None

    def _read(self, connection: socket.socket) -> None:
        """The reading thread."""
        try:
            while True:
                frame = read_head(connection)
                if frame.kind is not FrameKind.DATA:
                    self._owner.take_word(self.peer, frame)
                    continue
                size = frame.size_bytes
                call = self._wait_for_post(frame)
                if call is not None and call.frame.data.nbytes == size:
                    read_exactly(connection, call.frame.data)
                    call.end()
                    continue
                if call is not None:
                    call.end(f"{size} bytes instead of {call.frame.data.nbytes}")
                scrap = memoryview(bytearray(min(size, _SCRAP_BYTES)))
                while size:
                    part = scrap[:size]
                    read_exactly(connection, part)
                    size -= len(part)
        except (LinkError, OSError) as error:
            self.end(reason_of(error))

    def _wait_for_post(self, frame: Frame) -> LinkCall | None:
        """Return where a message goes; None where its step is over."""
        key = frame.sequence, frame.tag
        with self._condition:
            while key not in self._posted and not self._owner.is_past(frame.sequence):
                if self._reason is not None:
                    raise LinkError(self._reason)
                self._condition.wait()
            return self._posted.pop(key, None)
