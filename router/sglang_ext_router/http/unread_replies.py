"""Find clients that do not read their replies, over plain TCP and over TLS."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios

SHUTDOWN_TIMEOUT_S = 1e6  # replaces the event loop's limit for TLS, which would cut off clients that read slowly
DRAIN_STALL_S = 5.0  # limit for a client that reads nothing while the router shuts down
GOODBYE_S = 1.0  # limit over TLS for a client that has read everything to close its side
_TCP_INFO_BYTES_ACKED = struct.Struct("=120xQ")


def bytes_not_taken(transport: asyncio.Transport) -> tuple[int, int]:
    """Return the bytes written over TLS that the client's machine has not taken, and all that it has ever taken.

    An event loop counts only bytes that are not encrypted yet, and nearly all of a large reply is encrypted at once.
    The kernel's queue stays full while more waits, so the first number is not exact, but it is 0 only when nothing
    waits. Return (0, 0) for a lost connection.
    """
    sock = transport.get_extra_info("socket")
    if sock is None:
        return 0, 0
    try:
        (queued_bytes,) = struct.unpack("=i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES_ACKED.size)
        (taken_bytes,) = _TCP_INFO_BYTES_ACKED.unpack(info)
    except (OSError, ValueError):
        return 0, 0
    return transport.get_write_buffer_size() + queued_bytes, taken_bytes


class ReadingWatch:
    """Watches whether the client of one connection reads. Times are the event loop's, in seconds."""

    def __init__(self, transport: asyncio.Transport, write_timeout_s: float) -> None:
        self.is_tls = transport.get_extra_info("ssl_object") is not None
        self._transport = transport
        self._write_timeout_s = write_timeout_s
        self._is_flushed = True  # the client has taken everything, and no request was served since
        self._not_taken = (0, 0)
        self._since_s = 0.0  # when `_not_taken` last changed

    def on_reply(self) -> None:
        """Look for unread bytes again, as a reply was written."""
        self._is_flushed = False

    def is_stalled(self, now_s: float, is_serving: bool, is_draining: bool) -> bool:
        """Return whether the client has read nothing of its reply, or not closed, for longer than its limit."""
        transport = self._transport
        is_leaving = self.is_tls and transport.is_closing()  # the client has not closed its side yet
        not_taken = (transport.get_write_buffer_size(), 0)
        if is_leaving or (self.is_tls and (is_serving or not self._is_flushed)):
            not_taken = bytes_not_taken(transport)
        self._is_flushed = not not_taken[0]
        if not_taken != self._not_taken or not (not_taken[0] or is_leaving):
            self._not_taken, self._since_s = not_taken, now_s
            return False
        limit_s = self._write_timeout_s if not_taken[0] else GOODBYE_S
        if is_draining and not is_serving:
            limit_s = min(limit_s, DRAIN_STALL_S)
        return now_s - self._since_s > limit_s
