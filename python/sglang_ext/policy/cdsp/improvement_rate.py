"""Which improvement rate the planner uses: the best one for the load, looked up in a table made offline.

Tetris, sections 5.1 and 7.1: at light load a small gain is worth a larger SP size, under load it is not. A simulator
finds the best rate for arrival rates in steps (0.5 per second); online the rate of arrivals in a sliding window picks
the closest of them, every 30 s.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

WINDOW_S = 60.0
REFRESH_S = 30.0
TABLE_VERSION = 1


class ProfiledRate(NamedTuple):
    """The improvement rate that is best at an arrival rate."""

    arrivals_per_s: float
    improvement_rate: float


@dataclass(frozen=True, slots=True)
class ImprovementRateTable:
    """Entries in order of their arrival rates.

    ValueError, one line, unless there is an entry, arrival rates rise from at least 0, and improvement rates are at
    least 0 and below 1.
    """

    entries: tuple[ProfiledRate, ...]

    def __post_init__(self) -> None:
        if not self.entries:
            raise ValueError("there is no entry")
        for entry in self.entries:
            if not (math.isfinite(entry.arrivals_per_s) and entry.arrivals_per_s >= 0):
                raise ValueError(f"arrivals_per_s {entry.arrivals_per_s:g} is not a finite number of at least 0")
            if not 0 <= entry.improvement_rate < 1:
                raise ValueError(f"improvement_rate {entry.improvement_rate:g} is not at least 0 and below 1")
        for one, following in pairwise(self.entries):
            if one.arrivals_per_s >= following.arrivals_per_s:
                raise ValueError(
                    f"arrivals_per_s must rise: {following.arrivals_per_s:g} comes after {one.arrivals_per_s:g}"
                )

    def closest(self, arrivals_per_s: float) -> ProfiledRate:
        """Return the entry whose arrival rate is closest; of two, the higher one, whose choice wastes less."""
        entries = self.entries
        above = bisect_left(entries, (arrivals_per_s,))
        if above == 0:
            return entries[0]
        if above == len(entries):
            return entries[-1]
        lower, upper = entries[above - 1], entries[above]
        is_lower = arrivals_per_s - lower.arrivals_per_s < upper.arrivals_per_s - arrivals_per_s
        return lower if is_lower else upper


def table_from_json(content: object) -> ImprovementRateTable:
    """Return the table in the parsed JSON of an improvement-rate file. ValueError, one line, names what is wrong.

    {"version": 1, "rates": [{"arrivals_per_s": 0.5, "improvement_rate": 0.05}, ...]}; other keys are not read.
    """
    if not isinstance(content, Mapping):
        raise ValueError("a table of improvement rates is an object")
    version = content.get("version")
    if version != TABLE_VERSION or isinstance(version, bool):
        raise ValueError(f"version {version!r} is not known, {TABLE_VERSION} is needed")
    rates = content.get("rates")
    if not isinstance(rates, Sequence) or isinstance(rates, str):
        raise ValueError("rates is not a list")
    return ImprovementRateTable(tuple(_entry(number, entry) for number, entry in enumerate(rates)))


def _entry(number: int, entry: object) -> ProfiledRate:
    values = []
    for name in ProfiledRate._fields:
        value = entry.get(name) if isinstance(entry, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"rates[{number}].{name} is not a number")
        values.append(float(value))
    return ProfiledRate(*values)


class ImprovementRateSource(Protocol):
    """What a planner asks. Only `note_arrival` changes something."""

    @property
    def current(self) -> float:
        """The improvement rate to plan with."""
        ...

    def note_arrival(self, now_s: float) -> None:
        """A request has arrived that the planner will plan."""
        ...


class FixedImprovementRate:
    """The same rate at every load. ValueError unless it is at least 0 and below 1."""

    __slots__ = ("current",)

    def __init__(self, improvement_rate: float) -> None:
        if not 0 <= improvement_rate < 1:
            raise ValueError(f"improvement_rate must be at least 0 and below 1, got {improvement_rate}")
        self.current = improvement_rate

    def note_arrival(self, now_s: float) -> None:
        """The load does not matter."""


class ProfiledImprovementRate:
    """The table's rate for the load of the last `window_s`, looked up again at the first arrival after `refresh_s`.

    Until the first look-up the load counts as light. The window is open at both ends, without the arrival that looks:
    an arrival at its start and one at its end would count too many. ValueError for a time that is not above 0.
    """

    def __init__(
        self, table: ImprovementRateTable, *, window_s: float = WINDOW_S, refresh_s: float = REFRESH_S
    ) -> None:
        for name, value in (("window_s", window_s), ("refresh_s", refresh_s)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite number above 0, got {value}")
        self.table = table
        self.window_s = window_s
        self.refresh_s = refresh_s
        self.arrivals_per_s: float | None = None  # at the last look-up
        self.current = table.closest(0.0).improvement_rate
        self._arrivals_s: deque[float] = deque()
        self._started_s: float | None = None
        self._looked_s = 0.0

    def note_arrival(self, now_s: float) -> None:
        """Count the arrival, and look the rate up if it is time. A time before the latest one counts as that one's."""
        arrivals_s = self._arrivals_s
        if self._started_s is None:
            self._started_s = self._looked_s = now_s
        elif arrivals_s:
            now_s = max(now_s, arrivals_s[-1])
        from_s = max(self._started_s, now_s - self.window_s)
        while arrivals_s and arrivals_s[0] <= from_s:
            arrivals_s.popleft()
        if now_s - self._looked_s >= self.refresh_s:
            self._looked_s = now_s
            self.arrivals_per_s = len(arrivals_s) / (now_s - from_s)
            self._look_up()
        arrivals_s.append(now_s)

    def replace(self, table: ImprovementRateTable) -> None:
        """Use another table from now on, at the load last seen."""
        self.table = table
        self._look_up()

    def _look_up(self) -> None:
        self.current = self.table.closest(self.arrivals_per_s or 0.0).improvement_rate
