"""Decides how many requests of a run may be in flight: additive increase, multiplicative decrease, gated by the
router's load.

Low priority by itself does not protect online requests: what is in flight occupies prefill instances, KV slots and
queues. So the run takes no more than it needs to keep them busy. The cap grows by one per round trip while requests
succeed and use all of it. It doubles per round trip until the first congestion, and at every report of idle prefill
instances, as a round trip with much decoding is long. It is halved, once per round trip, when the endpoint refuses a
request for overload or reports that online requests wait longer than they should. It does not grow while the least
loaded instance has a backlog: more in flight would only queue.
"""

from __future__ import annotations

from dataclasses import dataclass

_DECREASE = 0.5
_IDLE_BELOW = 0.25  # of the backlog that is enough
_ROUND_TRIP_WEIGHT = 0.1  # of a new sample in the smoothed round trip


@dataclass(frozen=True, slots=True)
class CapSettings:
    """The bounds of the cap and of the gate. Raises ValueError, which names a bad setting."""

    max_in_flight: int = 256
    start: int = 16
    online_wait_target_s: float | None = 0.1  # None: their wait is ignored
    max_backlog_s: float = 2.0  # prefill work at the least loaded instance while there are online requests
    max_offline_backlog_s: float = 10.0  # the same while there are none: enough to keep decode busy
    settle_s: float = 2.0  # smallest time between two decreases for the reported load

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise ValueError(f"max_in_flight must be at least 1, got {self.max_in_flight}")
        if self.start < 1:
            raise ValueError(f"start must be at least 1, got {self.start}")
        if self.online_wait_target_s is not None and not self.online_wait_target_s > 0:
            raise ValueError(f"online_wait_target_s must be above 0, got {self.online_wait_target_s}")
        for name in ("max_backlog_s", "max_offline_backlog_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


class InFlightCap:
    """The cap of one length class. Times are of one monotonic clock, in seconds."""

    __slots__ = ("_cap", "_decreased_at_s", "_is_held", "_is_probing", "_round_trip_s", "_settings", "decreases")

    def __init__(self, settings: CapSettings) -> None:
        self._settings = settings
        self._cap = float(min(settings.start, settings.max_in_flight))
        self._is_probing = True  # no congestion yet: doubles per round trip
        self._is_held = False
        self._decreased_at_s = float("-inf")
        self._round_trip_s: float | None = None
        self.decreases = 0

    @property
    def cap(self) -> int:
        """Return how many requests may be in flight: from 1 to `max_in_flight`."""
        return int(self._cap)

    def on_ok(self, sent_at_s: float, now_s: float, *, was_full: bool) -> None:
        """Record a success. `was_full`: the cap was reached when it was sent; else a larger cap would not help."""
        sample_s = now_s - sent_at_s
        if self._round_trip_s is None:
            self._round_trip_s = sample_s
        else:
            self._round_trip_s += _ROUND_TRIP_WEIGHT * (sample_s - self._round_trip_s)
        if not was_full or self._is_held or sent_at_s <= self._decreased_at_s:
            return
        step = 1.0 if self._is_probing else 1.0 / self._cap
        self._cap = min(self._cap + step, float(self._settings.max_in_flight))

    def on_overload(self, sent_at_s: float, now_s: float) -> None:
        """Record a refusal for overload (429, 503). A request sent before the last decrease is no news."""
        if sent_at_s > self._decreased_at_s:
            self._decrease(now_s)

    def on_load(self, online_wait_s: float | None, backlog_s: float, now_s: float, in_flight: int) -> None:
        """Record the load that the router reports.

        `online_wait_s` is the P90 of online requests, None without any; `in_flight` counts the requests of this class.
        """
        settings = self._settings
        target_s = settings.online_wait_target_s
        online_waits = target_s is not None and online_wait_s is not None and online_wait_s > target_s
        max_backlog_s = settings.max_offline_backlog_s if online_wait_s is None else settings.max_backlog_s
        self._is_held = online_waits or backlog_s >= max_backlog_s
        if online_waits or backlog_s >= 2 * max_backlog_s:
            # What is reported now was caused by what was sent up to a round trip ago, and by what is still under way
            # since before the last decrease.
            settle_s = settings.settle_s if in_flight <= self.cap else max(settings.settle_s, self._round_trip_s or 0.0)
            if now_s >= self._decreased_at_s + settle_s:
                self._decrease(now_s)
        elif self._is_probing and in_flight >= self.cap and backlog_s < _IDLE_BELOW * settings.max_backlog_s:
            self._cap = min(2 * self._cap, float(settings.max_in_flight))

    def on_load_unknown(self) -> None:
        """Forget the last report: the router reports no load any more."""
        self._is_held = False

    def _decrease(self, now_s: float) -> None:
        self._cap = max(1.0, self._cap * _DECREASE)
        self._is_probing = False
        self._decreased_at_s = now_s
        self.decreases += 1
