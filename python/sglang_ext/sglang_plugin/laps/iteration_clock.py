"""Measures each forward iteration as the cost model wants it: features and duration.

With overlapped scheduling a batch is launched while the one before it still computes, so a duration counts from
the later of its own launch and the end of the batch before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext.policy.laps.cost_model import IterationSample
from sglang_ext.types import LengthClass

BUSY_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class _Launched:
    at_s: float
    length_class: LengthClass
    attention_work: float
    new_tokens: int
    cached_tokens: int
    requests: int


class IterationClock:
    """Pairs launches with results, in order, and remembers how busy the last ten seconds were."""

    def __init__(self) -> None:
        self._launched: deque[_Launched] = deque()
        self._busy: deque[tuple[float, float, LengthClass]] = deque()  # ends and durations within the window
        self._busy_s = dict.fromkeys(LengthClass, 0.0)
        self._started_s: float | None = None
        self._last_end_s = float("-inf")

    def note_launch(
        self, now_s: float, length_class: LengthClass, new_tokens: Sequence[int], cached_tokens: Sequence[int]
    ) -> None:
        """A batch of one class was launched: `new_tokens` (L) and `cached_tokens` (H) of each of its requests."""
        work = sum(new * (new + 2 * cached) for new, cached in zip(new_tokens, cached_tokens, strict=True))
        self._launched.append(
            _Launched(now_s, length_class, work, sum(new_tokens), sum(cached_tokens), len(new_tokens))
        )
        if self._started_s is None:
            self._started_s = now_s

    def note_result(self, now_s: float) -> IterationSample:
        """The oldest launched batch ended. Raises IndexError when none was launched."""
        launched = self._launched.popleft()
        duration_s = now_s - max(launched.at_s, self._last_end_s)
        self._last_end_s = now_s
        self._busy.append((now_s, duration_s, launched.length_class))
        self._busy_s[launched.length_class] += duration_s
        self._forget(now_s)
        return IterationSample(
            launched.attention_work, launched.new_tokens, launched.cached_tokens, launched.requests, duration_s
        )

    def utilisation(self, now_s: float, length_class: LengthClass | None = None) -> float:
        """Share of the last ten seconds spent in forward iterations, of one class or of both: 0 to 1."""
        self._forget(now_s)
        if self._started_s is None or now_s <= self._started_s:
            return 0.0
        busy_s = sum(self._busy_s.values()) if length_class is None else self._busy_s[length_class]
        if self._launched and length_class in {None, self._launched[0].length_class}:
            busy_s += max(0.0, now_s - max(self._launched[0].at_s, self._last_end_s))
        return max(0.0, min(1.0, busy_s / min(BUSY_WINDOW_S, now_s - self._started_s)))

    def _forget(self, now_s: float) -> None:
        while self._busy and self._busy[0][0] < now_s - BUSY_WINDOW_S:
            _, duration_s, length_class = self._busy.popleft()
            self._busy_s[length_class] -= duration_s
