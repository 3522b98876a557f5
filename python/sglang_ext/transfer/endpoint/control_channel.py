"""An endpoint's control channel: messages as bytes, datagrams over ZeroMQ, and the one thread that owns them.

A frame is a version and msgpack of a `ControlRecord`, checked against its types on arrival. Frames may be lost when a
peer is slow or gone; no sender waits for it.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import msgspec
import zmq

from sglang_ext.transfer.decide.protocol import (
    PeerAlive,
    PeerProbe,
    ReceiverAbort,
    ReceiverClosed,
    ReceiverReport,
    SenderReport,
    SenderStopped,
)
from sglang_ext.transfer.endpoint.invitations import Invitation, InvitationSeen, SlotCall
from sglang_ext.transfer.endpoint.peer_layouts import LayoutReply, LayoutRequest
from sglang_ext.waker import Waker

logger = logging.getLogger(__name__)

VERSION = 5
_MAGIC = b"SXHS" + bytes([VERSION])
_MAX_PEERS = 1024
_MAX_QUEUED = 10_000  # messages waiting for one peer
_MAX_FRAME_BYTES = 1 << 28


class CodecError(ValueError):
    """The bytes that arrived are not a message of this protocol."""


ControlMessage: TypeAlias = (
    SenderReport
    | SenderStopped
    | ReceiverReport
    | ReceiverAbort
    | ReceiverClosed
    | LayoutRequest
    | LayoutReply
    | Invitation
    | InvitationSeen
    | PeerProbe
    | PeerAlive
    | SlotCall
)

_DECODER: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: ControlMessage) -> bytes:
    """Return a message as a frame."""
    return _MAGIC + _ENCODER.encode(message)


def decode(frame: bytes) -> ControlMessage:
    """Parse a frame. Raises CodecError."""
    if frame[:4] != _MAGIC[:4]:
        raise CodecError("not a handshake message of sglang-ext")
    if frame[:5] != _MAGIC:
        raise CodecError(f"a handshake message of another version than {VERSION}")
    try:
        return _DECODER.decode(memoryview(frame)[5:])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CodecError(f"a malformed handshake message: {error}") from error


class ControlChannel:
    """All methods but `wake` belong to one thread. Listens on `host` at a free port."""

    def __init__(self, host: str) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        bracketed = f"[{host}]" if ":" in host else host
        self._inbox.setsockopt(zmq.IPV6, ":" in host)
        port = self._inbox.bind_to_random_port(f"tcp://{bracketed}")
        self.address = f"{bracketed}:{port}"
        self._peers: OrderedDict[str, zmq.Socket[bytes]] = OrderedDict()
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._waker.descriptor, select.POLLIN)
        self.dropped_messages = 0

    def wake(self) -> None:
        """Let `receive` return. From any thread, also after `close`."""
        self._waker.notify()

    def send(self, to: str, frame: bytes) -> None:
        """Queue a frame for "host:port"; it is dropped when too many wait already."""
        peer = self._peers.get(to)
        if peer is None:
            peer = self._context.socket(zmq.PUSH)
            peer.setsockopt(zmq.LINGER, 0)
            peer.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
            peer.setsockopt(zmq.IPV6, to.startswith("["))
            try:
                peer.connect(f"tcp://{to}")
            except zmq.ZMQError as error:
                peer.close()
                self.dropped_messages += 1
                logger.warning("cannot send to %r: %s", to, error)
                return
            self._peers[to] = peer
            if len(self._peers) > _MAX_PEERS:
                self._peers.popitem(last=False)[1].close()
        self._peers.move_to_end(to)
        try:
            peer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self.dropped_messages += 1

    def receive(self, timeout_s: float | None) -> list[bytes]:
        """Frames that have arrived; waits for one, for `wake` or for `timeout_s` (None: for ever)."""
        self._poller.poll(None if timeout_s is None else max(0, round(timeout_s * 1000)))
        self._waker.drain()
        frames: list[bytes] = []
        try:
            while len(frames) < _MAX_QUEUED:
                frames.append(self._inbox.recv(zmq.NOBLOCK))
        except zmq.Again:
            pass
        return frames

    def close(self) -> None:
        """Drop what has not left within a moment and close."""
        for peer in self._peers.values():
            peer.close(linger=200)
        self._inbox.close(linger=0)
        self._context.term()
        self._waker.close()


class ControlLoop:
    """Calls `on_message` for each message and `on_tick` every `tick_s` unless `is_idle()`, in its thread.

    Listens on `host` from construction on; handles nothing before `start`. `send` may be called from any thread.
    """

    def __init__(
        self,
        host: str,
        tick_s: float,
        *,
        on_message: Callable[[ControlMessage], None],
        on_tick: Callable[[], None],
        is_idle: Callable[[], bool],
    ) -> None:
        self._channel = ControlChannel(host)
        self.address = self._channel.address
        self.malformed_messages = 0
        self._tick_s = tick_s
        self._on_message = on_message
        self._on_tick = on_tick
        self._is_idle = is_idle
        self._outbox: deque[tuple[str, ControlMessage]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-handshake", daemon=True)

    @property
    def dropped_messages(self) -> int:
        """Messages that could not be queued for their peer."""
        return self._channel.dropped_messages

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def send(self, to: str, message: ControlMessage) -> None:
        """Messages to one peer leave in the order of these calls; they may be lost."""
        self._outbox.append((to, message))
        if threading.current_thread() is not self._thread:
            self._channel.wake()

    def close(self) -> None:
        """Send what is in the outbox and stop."""
        self._is_closed = True
        self._channel.wake()
        self._thread.join()

    def _run(self) -> None:
        next_tick_s = time.monotonic()
        while True:
            for frame in self._channel.receive(self._pause_s()):
                self._handle(frame)
            if time.monotonic() >= next_tick_s:
                next_tick_s = time.monotonic() + self._tick_s
                self._guard(self._on_tick)
            is_closed = self._is_closed
            while self._outbox:
                to, message = self._outbox.popleft()
                self._channel.send(to, encode(message))
            if is_closed:
                self._channel.close()
                return

    def _pause_s(self) -> float | None:
        if self._outbox or self._is_closed:
            return 0.0
        return None if self._is_idle() else self._tick_s

    def _handle(self, frame: bytes) -> None:
        try:
            message = decode(frame)
        except CodecError as error:
            self.malformed_messages += 1
            logger.warning("ignored %s", error)
            return
        self._guard(partial(self._on_message, message))

    @staticmethod
    def _guard(handler: Callable[[], None]) -> None:
        """One request's trouble must not end the transfers of all others."""
        try:
            handler()
        except Exception:
            logger.exception("a handshake message or timer could not be handled")
