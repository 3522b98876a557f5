"""Clients that do not read: whether one takes what was written for it, over plain TCP and over TLS."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios

SHUTDOWN_TIMEOUT_S = 1e6  # the event loop's own limit for TLS, which would cut those that read slowly
DRAIN_STALL_S = 5.0  # while the router shuts down, for a client that takes nothing of its reply
GOODBYE_S = 1.0  # over TLS, for a client that has been sent everything to close too
_TCP_INFO_BYTES_ACKED = struct.Struct("=120xQ")


def bytes_not_taken(transport: asyncio.Transport) -> tuple[int, int]:
    """Bytes written over TLS that the client's machine has not taken, and the bytes that it ever took.

    An event loop counts only what is not encrypted yet, and nearly all of a large reply is, at once: so the kernel is
    asked about its own queue, which stays full while anything waits behind it. The first is no exact sum, but 0 only
    when nothing waits. (0, 0) when the connection is lost.
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
    """Looks now and then whether the client of one connection reads. Times are the event loop's, in seconds."""

    def __init__(self, transport: asyncio.Transport, write_timeout_s: float) -> None:
        self.is_tls = transport.get_extra_info("ssl_object") is not None
        self._transport = transport
        self._write_timeout_s = write_timeout_s
        self._is_flushed = True  # the client took all, and no request was served since
        self._not_taken = (0, 0)  # when the client last took something
        self._since_s = 0.0

    def note_reply(self) -> None:
        """A reply was written."""
        self._is_flushed = False

    def is_stalled(self, now_s: float, is_serving: bool, is_draining: bool) -> bool:
        """Whether the client has taken nothing of what was written for it, or does not close, for too long."""
        transport = self._transport
        is_leaving = self.is_tls and transport.is_closing()  # until the client closes too
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
