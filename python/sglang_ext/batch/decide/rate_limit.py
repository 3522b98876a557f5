"""A rate limit: a token bucket that may go into debt."""

from __future__ import annotations


class RateLimit:
    """A limit of `per_s` units a second on average, with a burst of one second's worth. None: no limit.

    What a request takes need not be known before it is sent: the balance may become negative, and nothing is sent until
    it is positive again. Times are of one clock, in seconds. ValueError when the limit is not above 0.
    """

    __slots__ = ("_at_s", "_balance", "_per_s")

    def __init__(self, per_s: float | None) -> None:
        if per_s is not None and not per_s > 0:
            raise ValueError(f"must be above 0, got {per_s}")
        self._per_s = per_s
        self._balance = max(per_s or 0.0, 1.0)
        self._at_s: float | None = None

    def wait_s(self, now_s: float) -> float:
        """Seconds until something may be sent; 0 when it may be now."""
        if self._per_s is None:
            return 0.0
        self._refill(now_s)
        return 0.0 if self._balance > 0 else max((1e-9 - self._balance) / self._per_s, 1e-6)

    def take(self, units: float, now_s: float) -> None:
        """Record that units have been sent, or have come back."""
        if self._per_s is not None:
            self._refill(now_s)
            self._balance -= units

    def _refill(self, now_s: float) -> None:
        assert self._per_s is not None
        if self._at_s is not None and now_s > self._at_s:
            self._balance = min(self._balance + (now_s - self._at_s) * self._per_s, max(self._per_s, 1.0))
        self._at_s = now_s if self._at_s is None else max(self._at_s, now_s)
