"""Wakes a loop that sleeps on descriptors."""

from __future__ import annotations

import socket


class Bell:
    """A descriptor that is readable from `ring` to `silence`. Any thread may ring."""

    def __init__(self) -> None:
        self._ear, self._clapper = socket.socketpair()
        self._ear.setblocking(False)
        self._clapper.setblocking(False)

    @property
    def descriptor(self) -> int:
        return self._ear.fileno()

    def ring(self) -> None:
        try:
            self._clapper.send(b"\0")
        except OSError:
            pass  # rung often enough, or closed

    def silence(self) -> None:
        try:
            while self._ear.recv(4096):
                pass
        except OSError:
            pass  # silent

    def close(self) -> None:
        self._clapper.close()
        self._ear.close()
