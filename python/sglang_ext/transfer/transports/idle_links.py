"""Connections to peers that no write uses at the moment, kept for the next one and dropped once their peer has gone."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class HasConnection(Protocol):
    """An object that holds a connection."""

    @property
    def connection(self) -> socket.socket:
        """The socket; nothing is to be read from it while the link is idle."""


Link = TypeVar("Link", bound=HasConnection)

_LOOK_EVERY_S = 10.0


class IdleLinks(Generic[Link]):
    """Links by peer, until `close`. Thread-safe.

    A peer that has gone takes its links along. Who has is looked up when one is missing, and every ten seconds of use.
    """

    def __init__(self, drop: Callable[[Link], None]) -> None:
        """`drop` closes a link for good; it is called without a lock held."""
        self._drop = drop
        self._lock = threading.Lock()
        self._closed = False
        self._links: dict[str, list[Link]] = {}
        self._looked_s = time.monotonic()

    @property
    def count(self) -> int:
        """Links to all peers."""
        with self._lock:
            return sum(map(len, self._links.values()))

    def take(self, peer: str) -> Link | None:
        """Return an idle link, which then belongs to the caller, or None. Raises ConnectionError once closed."""
        with self._lock:
            if self._closed:
                raise ConnectionError("the transport is closed")
            links = self._links.get(peer)
            if links:
                link = links.pop()
                if not links:
                    del self._links[peer]
                return link
        self.drop_ended()
        return None

    def keep(self, peer: str, link: Link) -> None:
        """Put a link aside for the next write, or drop it where this is closed."""
        with self._lock:
            is_closed = self._closed
            if not is_closed:
                self._links.setdefault(peer, []).append(link)
            is_time = time.monotonic() > self._looked_s + _LOOK_EVERY_S
        if is_closed:
            self._drop(link)
        elif is_time:
            self.drop_ended()

    def drop_ended(self) -> None:
        """Drop the links whose peer has closed them, or is lost."""
        with self._lock:
            self._looked_s = time.monotonic()
            by_descriptor = {
                link.connection.fileno(): (peer, link) for peer in self._links for link in self._links[peer]
            }
            if not by_descriptor:
                return
            poll = select.poll()
            for descriptor in by_descriptor:
                poll.register(descriptor, select.POLLIN)
            # A peer says nothing unasked: what can be read is the end.
            ended = [by_descriptor[descriptor] for descriptor, _ in poll.poll(0)]
            for peer, link in ended:
                self._links[peer].remove(link)
                if not self._links[peer]:
                    del self._links[peer]
        for _, link in ended:
            self._drop(link)

    def close(self) -> None:
        """Drop all of them, and every link that is put aside later."""
        with self._lock:
            self._closed = True
            links = [link for of_peer in self._links.values() for link in of_peer]
            self._links = {}
        for link in links:
            self._drop(link)
