"""Rights to write that can be taken back: after `revoke` returns, no write under the permit is under way or will be.

A transport over which one peer writes into another's memory has them (TCP, shared memory)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PermitError(Exception):
    """A write came without a right to it."""


class Permits:
    """A thread-safe set of permits, and the writes under way under each."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users: dict[int, list[Callable[[], None]]] = {}

    def allow(self, permit: int) -> None:
        """Writes under `permit` are allowed from now on."""
        with self._changed:
            self._users.setdefault(permit, [])

    def revoke(self, permit: int) -> None:
        """Cut off writes under `permit` and wait until the last one has ended. An unknown permit is fine."""
        with self._changed:
            users = self._users.pop(permit, None)
            if users is None:
                return
            for interrupt in users:
                interrupt()
            self._changed.wait_for(lambda: not users)

    @contextmanager
    def use(self, permit: int, interrupt: Callable[[], None]) -> Iterator[None]:
        """Write inside the `with` block; `interrupt` must make a write that waits for its peer fail soon.

        Raises PermitError when the permit does not hold.
        """
        with self._changed:
            users = self._users.get(permit)
            if users is None:
                raise PermitError(f"permit {permit:#x} does not hold")
            users.append(interrupt)
        try:
            yield
        finally:
            with self._changed:
                users.remove(interrupt)
                self._changed.notify_all()
