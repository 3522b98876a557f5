"""Decides which of several routers acts for all: the holder of a lease, decided without trusting any clock but its own.

The lease is one record, written only over the version that was read. A holder renews it; it counts itself as the leader
until `renew_deadline_s` after it began its last renewal that succeeded. Another takes over when it has seen the same
renewal for `duration_s`, which is longer: so there are never two leaders, even if messages are lost or late, as long
as clocks run equally fast. That is the way of Kubernetes' own controllers (client-go's leader election).

    read ── none ───────────────────────────────▶ CREATE ─┐
         ── own, or released ───────────────────▶ WRITE ──┼─ success ─▶ leader for renew_deadline_s
         ── another's, unchanged for duration_s ▶ WRITE ──┘  conflict ─▶ another was faster: no leader
         ── another's ──────────────────────────▶ WAIT
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class LeaseRecord(NamedTuple):
    """The lease as it was read."""

    holder: str  # empty: it was released
    duration_s: float  # as its holder wants it
    renewal: str  # differs after every renewal
    version: str  # of the record, to write over it
    transitions: int  # how often the holder changed


class LeaseSettings(NamedTuple):
    duration_s: float = 15.0
    renew_deadline_s: float = 10.0
    retry_s: float = 2.0


class LeaseAction(Enum):
    """The action for a lease that was just read."""

    CREATE = "create"
    WRITE = "write"  # renew it, or take it over
    WAIT = "wait"


class Leadership:
    """One candidate's view. Times are of its own monotonic clock."""

    def __init__(self, candidate: str, settings: LeaseSettings | None = None) -> None:
        """ValueError where the settings could make two leaders."""
        self.candidate = candidate
        self.settings = settings or LeaseSettings()
        if not 0 < self.settings.retry_s < self.settings.renew_deadline_s < self.settings.duration_s:
            raise ValueError(f"retry < renew deadline < duration is needed, not {self.settings}")
        self._seen: tuple[str, str] | None = None  # holder and renewal
        self._seen_s = 0.0  # since when
        self._renewed_s = float("-inf")

    def is_leader(self, now_s: float) -> bool:
        """Return whether this candidate may act now."""
        return now_s < self._renewed_s + self.settings.renew_deadline_s

    def on_read(self, lease: LeaseRecord | None, now_s: float) -> LeaseAction:
        """The lease as the server has it (None: there is none yet), whose answer came at `now_s`."""
        if lease is None:
            return LeaseAction.CREATE
        seen = (lease.holder, lease.renewal)
        if seen != self._seen:
            self._seen, self._seen_s = seen, now_s
        if lease.holder in {"", self.candidate}:
            return LeaseAction.WRITE
        # Its holder may count on the time that it wrote there, which may be more than ours.
        held_s = max(lease.duration_s, self.settings.duration_s)
        return LeaseAction.WRITE if now_s >= self._seen_s + held_s else LeaseAction.WAIT

    def on_written(self, began_s: float) -> None:
        """The write that began at `began_s` has succeeded."""
        self._renewed_s = began_s

    def on_refused(self) -> None:
        """Another candidate was faster, or the lease is another's: this one does not lead."""
        self._renewed_s = float("-inf")
