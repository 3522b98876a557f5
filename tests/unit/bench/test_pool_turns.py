"""How long a turn of the load goes unanswered: until the heavy class has its instances, at most until the next turn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))

from support.pool_turns import Move, Phase, turns_s, unanswered

SHORT_HEAVY, LONG_HEAVY = Phase("s", 1.1, 0.05, 30.0), Phase("l", 0.05, 1.1, 40.0)
BALANCED = Phase("b", 0.5, 0.5, 20.0)


def to(target: str, at_s: float) -> Move:
    return Move(at_s, "long" if target == "short" else "short", target, "moved")


def test_phases_follow_each_other() -> None:
    assert turns_s([SHORT_HEAVY, LONG_HEAVY, BALANCED]) == [0.0, 30.0, 70.0]


@pytest.mark.parametrize(
    ("phases", "moves", "expected"),
    [
        ([SHORT_HEAVY], [to("short", 3.0)], [3.0]),
        # Without a move it is not answered at once, but never.
        ([SHORT_HEAVY, LONG_HEAVY], [], [30.0, 40.0]),
        ([SHORT_HEAVY, LONG_HEAVY], [to("short", 3.0)], [3.0, 40.0]),
        ([SHORT_HEAVY, SHORT_HEAVY], [to("short", 3.0)], [3.0, 0.0]),
        # Both must go over; the first of them is not the answer.
        ([SHORT_HEAVY, LONG_HEAVY], [to("short", 3.0), to("long", 32.0), to("long", 45.0)], [3.0, 15.0]),
        # After the next turn it is too late.
        ([SHORT_HEAVY, LONG_HEAVY], [to("short", 31.0), to("long", 33.0), to("long", 34.0)], [30.0, 4.0]),
        ([BALANCED], [], [0.0]),
        ([BALANCED, LONG_HEAVY], [to("long", 5.0)], [0.0, 0.0]),
    ],
)
def test_unanswered_turns(phases: list[Phase], moves: list[Move], expected: list[float]) -> None:
    assert unanswered(phases, moves) == expected
