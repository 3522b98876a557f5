"""What names a transfer: the room of its request and, where it has begun again, which attempt it is.

A request whose KV comes from several instances may have to be sent anew when one of them fails. Each attempt is a
transfer of its own to the protocol, with permits of its own: whatever is late belongs to an attempt that has ended.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

MAX_ATTEMPTS = 4  # at a request, in all


class Attempt(NamedTuple):
    """A later attempt; the first one is named by the room alone."""

    room: int
    number: int  # 1, 2, …

    def __str__(self) -> str:
        return f"{self.room} (attempt {self.number + 1})"


Room: TypeAlias = int | Attempt


def attempts_of(room: int) -> tuple[Room, ...]:
    """All that there can be."""
    return (room, *(Attempt(room, number) for number in range(1, MAX_ATTEMPTS)))


def following(room: Room) -> Attempt | None:
    """The attempt after this one; None where there have been enough."""
    attempt = Attempt(room.room, room.number + 1) if isinstance(room, Attempt) else Attempt(room, 1)
    return attempt if attempt.number < MAX_ATTEMPTS else None
