"""A budget of retries: a share of the router's requests, so that retries never make an outage worse.

As Finagle's budget (retries within a window are at most a share of the requests within it, and a few a second
independent of the load) and Envoy's (the requests that are under way count).
"""

from __future__ import annotations

SLOTS = 10  # the window slides by a tenth of itself


class RetryBudget:
    """Counts requests and retries of the last `window_s` seconds, on one monotonic clock of the caller's.

    A retry is within the budget while no more than `ratio` times the requests, plus `min_per_s` for each second of the
    window, have been sent with it. Raises ValueError, naming the argument.
    """

    __slots__ = ("_requests", "_retries", "_slot", "_slot_s", "min_per_s", "ratio", "window_s")

    def __init__(self, ratio: float = 0.2, min_per_s: float = 10.0, window_s: float = 10.0) -> None:
        if not ratio >= 0:
            raise ValueError(f"ratio must be at least 0, got {ratio}")
        if not min_per_s >= 0:
            raise ValueError(f"min_per_s must be at least 0, got {min_per_s}")
        if not window_s > 0:
            raise ValueError(f"window_s must be above 0, got {window_s}")
        self.ratio = ratio
        self.min_per_s = min_per_s
        self.window_s = window_s
        self._slot_s = window_s / SLOTS
        self._slot = 0
        self._requests = [0] * SLOTS
        self._retries = [0] * SLOTS

    def record_request(self, now_s: float) -> None:
        """A request is sent for the first time."""
        self._advance(now_s)
        self._requests[self._slot % SLOTS] += 1

    def spend(self, now_s: float, running: int) -> bool:
        """Take one retry, if the budget has one; `running` are the requests under way, sent recently or long ago."""
        self._advance(now_s)
        requests = max(sum(self._requests), running)
        if sum(self._retries) + 1 > self.ratio * requests + self.min_per_s * self.window_s:
            return False
        self._retries[self._slot % SLOTS] += 1
        return True

    def _advance(self, now_s: float) -> None:
        slot = int(now_s / self._slot_s)
        passed = slot - self._slot
        if passed <= 0:
            return
        for later in range(1, min(passed, SLOTS) + 1):
            self._requests[(self._slot + later) % SLOTS] = 0
            self._retries[(self._slot + later) % SLOTS] = 0
        self._slot = slot
