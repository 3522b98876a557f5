"""When a failed attempt is worth another one, and how long to wait before it."""

from __future__ import annotations

from dataclasses import dataclass

# As in sglang_router and smg. 408 and 429 say that an instance is busy, the others that it failed.
RETRYABLE_STATUS: frozenset[int] = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with symmetric jitter.

    Raises ValueError, naming the field, when a value makes no sense.
    """

    max_retries: int = 5
    initial_backoff_s: float = 0.05
    max_backoff_s: float = 5.0
    backoff_multiplier: float = 2.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ValueError(f"max_retries must be at least 0, got {self.max_retries}")
        if not self.initial_backoff_s >= 0:
            raise ValueError(f"initial_backoff_s must be at least 0, got {self.initial_backoff_s}")
        if not self.max_backoff_s >= self.initial_backoff_s:
            raise ValueError(
                f"max_backoff_s must be at least initial_backoff_s ({self.initial_backoff_s}), got {self.max_backoff_s}"
            )
        if not self.backoff_multiplier >= 1:
            raise ValueError(f"backoff_multiplier must be at least 1, got {self.backoff_multiplier}")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), got {self.jitter}")

    def backoff_s(self, attempt: int, draw: float) -> float:
        """Seconds to wait after the failure of attempt `attempt` (0 is the first).

        `draw` in [0, 1) places the result in ±`jitter` around min(initial * multiplier^attempt, max), so that
        requests that failed together do not come back together.
        """
        try:
            backoff_s = min(self.initial_backoff_s * self.backoff_multiplier**attempt, self.max_backoff_s)
        except OverflowError:
            backoff_s = self.max_backoff_s
        return backoff_s * (1.0 + self.jitter * (2.0 * draw - 1.0))
