"""Bootstrap rooms: numbers under which the two legs of a request meet, never used twice."""

from __future__ import annotations

ROOM_BITS = 63
COUNTER_BITS = 40


class RoomAllocator:
    """Consecutive rooms under a prefix of this router process.

    A duplicate room crashes both schedulers, so nothing is left to chance within a process: a counter hands
    out ranges that cannot overlap. Between processes the 23-bit prefix separates; `prefix_draw` comes from
    the operating system's entropy, `process_index` keeps the processes of one router apart for certain.
    """

    def __init__(self, prefix_draw: int, process_index: int, process_count: int) -> None:
        prefixes = 1 << (ROOM_BITS - COUNTER_BITS)
        groups = max(1, prefixes // max(1, process_count))
        prefix = (prefix_draw % groups) * max(1, process_count) + process_index
        self._base = prefix << COUNTER_BITS
        self._next = 0

    def take(self, count: int) -> int:
        """First of `count` consecutive rooms."""
        if count < 1:
            raise ValueError(f"count must be positive, not {count}")
        if self._next + count > 1 << COUNTER_BITS:
            self._next = 0  # after 2^40 rooms: none of the first can still be in use
        room = self._base + self._next
        self._next += count
        return room
