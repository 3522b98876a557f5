"""Bootstrap rooms, under which the legs of a request meet, and request ids, the instances' names of its sequences.

A room is never used twice. A request id is derived from the room, or made unique by it.
"""

from __future__ import annotations

ROOM_BITS = 63
COUNTER_BITS = 40


class RoomAllocator:
    """Allocates consecutive rooms under a prefix of this router process.

    A duplicate room crashes both schedulers. Within a process a counter hands out ranges that cannot overlap. A 23-bit
    prefix separates processes: `prefix_draw` is random, from the operating system's entropy, and `process_index` makes
    the prefixes of one router's processes differ.
    """

    def __init__(self, prefix_draw: int, process_index: int, process_count: int) -> None:
        prefixes = 1 << (ROOM_BITS - COUNTER_BITS)
        groups = max(1, prefixes // max(1, process_count))
        prefix = (prefix_draw % groups) * max(1, process_count) + process_index
        self._base = prefix << COUNTER_BITS
        self._next = 0

    def take(self, count: int) -> int:
        """Return the first of `count` consecutive rooms."""
        if count < 1:
            raise ValueError(f"count must be positive, not {count}")
        if self._next + count > 1 << COUNTER_BITS:
            self._next = 0  # after 2^40 rooms the first are not in use any more
        room = self._base + self._next
        self._next += count
        return room


def room_id(room: int) -> bytes:
    """Return the request id derived from a room: 16 hexadecimal digits."""
    return b"%016x" % room


def unique_ids(given: str | list[str], made: bytes) -> str | list[str]:
    """Return a client's own ids, made unique by the id `made` from the room.

    SGLang aborts every request whose id begins with the aborted id.
    """
    suffix = "-" + made.decode()
    return given + suffix if isinstance(given, str) else [item + suffix for item in given]


def abort_ids(
    given: str | list[str] | None, made: bytes, sequence_count: int, samples: int, knows_families: bool
) -> list[str]:
    """Return the ids that abort all sequences of a request: `given` by the client, or `made` from the room.

    An instance names the sequences of a batch `ID_0`, `ID_1`, ... and its front end aborts only by these full ids,
    unless it `knows_families`: then `ID` aborts all of them.
    """
    if isinstance(given, list):
        unique = unique_ids(given, made)
        if samples == 1 or knows_families:
            return list(unique)
        return [f"{item}_{i}" for item in unique for i in range(samples)]
    base = str(made.decode() if given is None else unique_ids(given, made))
    return [base] if sequence_count == 1 or knows_families else [f"{base}_{i}" for i in range(sequence_count)]
