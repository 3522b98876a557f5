"""Datagrams between endpoints over ZeroMQ: may be lost when a peer is slow or gone, never wait for it."""

from __future__ import annotations

import logging
import os
import select
from collections import OrderedDict

import zmq

logger = logging.getLogger(__name__)

_MAX_PEERS = 1024
_MAX_QUEUED = 10_000  # messages waiting for one peer
_MAX_FRAME_BYTES = 1 << 28


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
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._wake, select.POLLIN)
        self.dropped_messages = 0

    def wake(self) -> None:
        """Let `receive` return. From any thread, also after `close`."""
        try:
            os.eventfd_write(self._wake, 1)
        except OSError:
            pass

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
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
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
        os.close(self._wake)
