"""Budgets per minute of a tenant: what a request may use is reserved at admission, what it did not use is returned.

A budget is a bucket that holds a minute's worth and fills at a steady rate: a tenant that has used nothing for a minute
may use a minute's worth at once, and in any `T` seconds at most `per_minute * (1 + T / 60)`.

The routers of a group divide a budget into equal parts. Each fills and spends its own, and hands what it does not need
to a router that has run out. What was handed over is gone at the sender before it counts at the receiver, so the parts
never add up to more than the budget.
"""

from __future__ import annotations

from math import ceil

MINUTE_S = 60.0
REMEMBERED_S = 1.0  # refusals that follow each other within this time add up
ROUNDING = 1e-6  # sums of many fractions differ by less


class Bucket:
    """One router's part of a budget of `per_minute` units. It begins full, or with `level` units."""

    __slots__ = ("_at_s", "_refused_s", "_wanted", "level", "parts", "per_minute", "spilled")

    def __init__(self, per_minute: float, now_s: float, parts: int = 1, level: float | None = None) -> None:
        self.per_minute = per_minute
        self.parts = parts  # routers among which the budget is divided
        self.level = per_minute / parts if level is None else level
        self.spilled = 0.0  # units by which it would have filled if there had been room
        self._wanted = 0.0  # units of refusals that follow each other within REMEMBERED_S
        self._refused_s = now_s  # the last time
        self._at_s = now_s

    @property
    def capacity(self) -> float:
        """Return the units that this part holds at most by filling; what is handed over comes on top."""
        return self.per_minute / self.parts

    @property
    def _per_s(self) -> float:
        return self.capacity / MINUTE_S

    def fill(self, now_s: float) -> None:
        """Bring the level up to this time."""
        elapsed_s, self._at_s = now_s - self._at_s, max(now_s, self._at_s)
        if elapsed_s > 0:
            units = elapsed_s * self._per_s
            room = max(0.0, self.capacity - self.level)
            self.level += min(units, room)
            self.spilled += max(0.0, units - room)

    def fill_from(self, at_s: float) -> None:
        """Do not fill before this time; what was to be filled until then is not."""
        self._at_s = at_s

    def change(self, per_minute: float, parts: int, now_s: float) -> None:
        """Take another budget, or another number of parts: the level stays, as far as there is room for it."""
        self.fill(now_s)
        self.per_minute, self.parts = per_minute, parts
        self.level = min(self.level, per_minute)

    def take(self, units: float, now_s: float) -> bool:
        """Take `units` if they are there."""
        self.fill(now_s)
        if self.level + ROUNDING < units:
            self._wanted = min(self.per_minute, units + self.wanted_lately(now_s, REMEMBERED_S))
            self._refused_s = now_s
            return False
        self.level -= units
        return True

    def settle(self, reserved: float, used: float) -> None:
        """Return what was not used of a reservation; what exceeded it is a debt that later requests wait for."""
        self.level = min(self.per_minute, self.level + reserved - used)

    def wait_s(self, units: float, now_s: float) -> float:
        """Return the time until `units` are there, if nothing else is taken; infinite if they never are."""
        self.fill(now_s)
        if units > self.per_minute:
            return float("inf")
        return max(0.0, units - self.level) / self._per_s

    def wanted_lately(self, now_s: float, within_s: float) -> float:
        """Return the units that were refused, where the last refusal was at most `within_s` ago."""
        return self._wanted if now_s - self._refused_s <= within_s else 0.0


def header_lines(unit: str, bucket: Bucket, elsewhere: float) -> str:
    """Return OpenAI's header lines for a budget of this unit: what is left of it, and the time until all of it is.

    `elsewhere`: the units that the other routers have of it.
    """
    remaining = max(0.0, bucket.level + elsewhere)
    reset_s = max(0.0, bucket.per_minute - remaining) / bucket.per_minute * MINUTE_S
    return (
        f"x-ratelimit-limit-{unit}: {int(bucket.per_minute + 0.5)}\r\n"
        f"x-ratelimit-remaining-{unit}: {int(remaining + ROUNDING)}\r\n"
        f"x-ratelimit-reset-{unit}: {shown_duration(reset_s)}\r\n"
    )


def shown_duration(duration_s: float) -> str:
    """Return a duration as OpenAI's headers have it: `120ms`, `1.5s`, `6m0s`."""
    milliseconds = -int((ROUNDING - duration_s * 1000) // 1)  # rounded up
    if milliseconds < 1000:
        return f"{max(0, milliseconds)}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{ceil(rest / 1000)}s" if minutes else f"{rest / 1000:g}s"
