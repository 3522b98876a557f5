"""Helpers of several policies: positions out of one random draw, and fair turns among a changing set."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_REMEMBERED = 4096


def two_positions(count: int, draw: float) -> tuple[int, int]:
    """Two different positions below `count` (at least 2); each ordered pair is equally likely.

    `draw` is in [0, 1).
    """
    pair = int(draw * (count * (count - 1)))
    first, second = divmod(pair, count - 1)
    return first, second + (second >= first)


class LeastRecent:
    """Fair turns: of those present, the one whose last turn is longest ago; newcomers first.

    A counter modulo the number present is fair only while the set stays the same; here any sequence of sets
    is.
    """

    __slots__ = ("_last_turn", "_turn")

    def __init__(self) -> None:
        self._last_turn: dict[int, int] = {}  # in order of the last turn, the oldest first
        self._turn = 0

    def take(self, indices: Sequence[int]) -> int:
        """Position in `indices` (not empty) of whose turn it is; mutates: the turn is taken."""
        last_turn = self._last_turn
        turns = [last_turn.get(index, -1) for index in indices]
        position = turns.index(min(turns))
        self._turn += 1
        last_turn.pop(indices[position], None)
        last_turn[indices[position]] = self._turn
        if len(last_turn) > max(_MAX_REMEMBERED, 2 * len(indices)):
            del last_turn[next(iter(last_turn))]
        return position
