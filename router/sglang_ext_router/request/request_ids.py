"""Bootstrap rooms and request ids: what the legs of a request meet under, and what instances call its sequences.

A room is never used twice. A request id is made of the room, or made unique by it.
"""

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


def room_id(room: int) -> bytes:
    """The request id made of a room: 16 hexadecimal digits."""
    return b"%016x" % room


def unique_ids(given: str | list[str], made: bytes) -> str | list[str]:
    """A client's own ids, made unique by the id that is `made` of the room.

    SGLang aborts every request whose id begins with the one to abort.
    """
    suffix = "-" + made.decode()
    return given + suffix if isinstance(given, str) else [item + suffix for item in given]


def abort_ids(
    given: str | list[str] | None, made: bytes, sequence_count: int, samples: int, knows_families: bool
) -> list[str]:
    """Request ids that abort all sequences of a request: ids `given` by the client, or the one `made` of the room.

    An instance names the sequences of a batch `ID_0`, `ID_1`, ... Its front end knows only these whole ids, unless it
    `knows_families`: then `ID` aborts them all.
    """
    if isinstance(given, list):
        unique = unique_ids(given, made)
        if samples == 1 or knows_families:
            return list(unique)
        return [f"{item}_{i}" for item in unique for i in range(samples)]
    base = str(made.decode() if given is None else unique_ids(given, made))
    return [base] if sequence_count == 1 or knows_families else [f"{base}_{i}" for i in range(sequence_count)]
