"""Decides whether a short prompt is taken back from an instance that is about to compute a chunk.

A short prompt is sent where it ends first, as far as is known then. A chunk of a long prompt that comes to its instance
afterwards delays it by all of the chunk's time, as a chunk cannot be interrupted. Another instance may have time. What
has not begun costs nothing but a message to move; what has begun would be computed twice, so that it stays.

Both times are estimates. A prompt moves only where it gains half of the time, and once at most: no two instances pass a
prompt to each other.
"""

from __future__ import annotations

_MOST_ELSEWHERE = 0.5  # of the time until its end where it is


def ends_much_sooner(elsewhere_s: float, here_s: float) -> bool:
    """Return whether a prompt that ends in `here_s`, behind the chunk, moves to where it ends in `elsewhere_s`."""
    return elsewhere_s < _MOST_ELSEWHERE * here_s
