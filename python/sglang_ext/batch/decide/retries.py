"""Decides when a failed request is tried again, and whether the failure counts against its line.

A line may fail a few times; then it is given up. But when the whole endpoint is down, it fails all that it is
sent, and no line is at fault: the run waits, tries one line from time to time, and counts nothing. Down means that no
connection can be made, or that several different lines in a row got no answer of their own (connection lost, 429,
502, 503, 504).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0
_JITTER = 0.5  # a delay is drawn from half of it to all of it
_RETRY_AFTER_JITTER = 0.25  # and what the endpoint asks for, from all of it to a quarter more
_FIRST_PROBE_S = 0.5
_MAX_PROBE_S = 10.0


class FailureKind(Enum):
    """Describes who may be at fault."""

    LINE = "line"  # the endpoint answered this request with an error of its own: HTTP 500
    UNAVAILABLE = "unavailable"  # no answer of its own: connection lost, timeout, 429, 502, 503, 504
    UNREACHABLE = "unreachable"  # no connection


def retry_delay_s(failures: int, retry_after_s: float | None, draw: float) -> float:
    """Wait before try number `failures` + 1; `draw` is from 0 to 1.

    Exponential from 0.5 s to 30 s with jitter; never before what the endpoint asked for.
    """
    delay_s = min(_FIRST_DELAY_S * 2.0 ** min(max(failures - 1, 0), 16), _MAX_DELAY_S)
    delay_s *= 1 - _JITTER * (1 - draw)
    if retry_after_s is None:
        return delay_s
    return max(delay_s, retry_after_s * (1 + _RETRY_AFTER_JITTER * draw))


@dataclass(frozen=True, slots=True)
class OutageSettings:
    """The limits that define an outage."""

    lines_in_a_row: int = 3  # different ones without an answer of their own
    uncounted_s: float = 600.0  # after this time of an outage failures with a connection count again


class EndpointOutage:
    """Decides whether the whole endpoint is down, and when to try it again. Times are of one clock, in seconds."""

    __slots__ = ("_lines", "_probe_at_s", "_probe_delay_s", "_settings", "since_s")

    def __init__(self, settings: OutageSettings = OutageSettings()) -> None:
        self._settings = settings
        self._lines: set[int] = set()  # that failed since the last answer; no more than are needed
        self._probe_at_s = 0.0
        self._probe_delay_s = _FIRST_PROBE_S
        self.since_s: float | None = None  # when it went down; None while it is up

    @property
    def is_down(self) -> bool:
        """Return whether only probes should be sent."""
        return self.since_s is not None

    @property
    def probe_at_s(self) -> float:
        """While it is down: when one request may be sent to see whether it is up."""
        return self._probe_at_s

    def on_answer(self) -> float | None:
        """A request got an answer of its own. Returns since when the endpoint was down, if it was: it is up again."""
        since_s, self.since_s = self.since_s, None
        self._lines.clear()
        self._probe_delay_s = _FIRST_PROBE_S
        return since_s

    def on_failure(self, kind: FailureKind, line: int, now_s: float, lines_left: int | None = None) -> bool:
        """A request for `line` failed. Returns whether that counts against the line.

        `lines_left`: how many lines have no result, this one included, if there are few: no more can fail in a row.
        """
        if kind is FailureKind.LINE:
            self.on_answer()
            return True
        enough = self._settings.lines_in_a_row
        if lines_left is not None:
            enough = max(1, min(enough, lines_left))
        if len(self._lines) < enough:
            self._lines.add(line)
        is_outage = kind is FailureKind.UNREACHABLE or len(self._lines) >= enough
        if self.since_s is None:
            if not is_outage:
                return True
            self.since_s = now_s
            self._probe_at_s = now_s + self._probe_delay_s
        elif now_s >= self._probe_at_s:  # a probe failed; what was in flight before is no news
            self._probe_delay_s = min(2 * self._probe_delay_s, _MAX_PROBE_S)
            self._probe_at_s = now_s + self._probe_delay_s
        return kind is FailureKind.UNAVAILABLE and now_s - self.since_s > self._settings.uncounted_s
