"""Judges whether an instance that fails its probes is dead, or late.

A probe is one sign among others. An instance that computes a long batch answers `/health` late; an instance whose
server process tokenises a megabyte, or has no processor time, answers nothing for seconds; a process that was stopped
looks the same from outside. So probes are weighed with what else is seen: bytes of replies, load reports whose numbers
change, the bodies that the instance has been sent and has to read, and whether its machine accepts connections.

They are also weighed with what an ejection would bring. While another instance of the role answers, a silent one is
taken out and its requests are served there. Where there is no other, an ejection fails every request and helps none:
the last instance keeps its requests, and is sent no new ones while it is silent.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

# A server process reads and tokenises a body before it answers anything else: 4 MB take 4 to 16 s.
READING_BYTES_PER_S = 250_000
LARGE_BODY_BYTES = 1 << 17  # smaller ones are read in less time than any probe is given


class Judgement(Enum):
    """Describes what becomes of an instance."""

    STAYS = "stays"
    SILENT = "silent"  # keeps its requests, gets no new ones until it is heard
    OUT = "out"  # takes no new requests; the requests that it has go on
    LOST = "lost"  # the same, and its requests are lost: they are tried elsewhere


class Silence(NamedTuple):
    """An instance that answers no liveness check and sends nothing else."""

    silent_s: float  # for how long a check has waited since anything came
    reading_s: float  # how much of this time the bodies that it was sent may take it to read
    is_unreachable: bool  # its machine accepts no connection, or there is no way to it
    has_peer: bool  # another instance of its role answers, and could serve instead


class FailedChecks(NamedTuple):
    """Health checks that failed in a row, the latest of them just now."""

    failures: int
    is_refused: bool  # its port is closed
    is_unanswered: bool  # the time was over before an answer came
    has_worked: bool  # since the latest check was sent: bytes of replies, or new numbers in a load report
    has_peer: bool


def judge_silence(silence: Silence, limit_s: float) -> Judgement:
    """Judge an instance that says nothing at all. `limit_s` is the silence that makes it suspect."""
    if silence.silent_s - silence.reading_s < limit_s:
        return Judgement.STAYS
    if silence.is_unreachable or silence.has_peer:
        return Judgement.LOST
    return Judgement.SILENT


def judge_checks(checks: FailedChecks, threshold: int) -> Judgement:
    """Judge an instance that fails health checks: it says that it is not well, or its scheduler does not answer.

    A check that was not answered while the instance worked counts as passed (`STAYS`, and the row begins again). Its
    own word, or a closed port, counts before all other signs: it ends in order, and serves what it has.
    """
    if checks.is_refused:
        return Judgement.OUT
    if checks.failures < threshold or (checks.is_unanswered and checks.has_worked):
        return Judgement.STAYS
    if not checks.is_unanswered:
        return Judgement.OUT
    return Judgement.LOST if checks.has_peer else Judgement.STAYS


class ReadingTime:
    """Estimates how long an instance's server process may be busy with the large bodies that it was sent."""

    __slots__ = ("_until_s",)

    def __init__(self) -> None:
        self._until_s = float("-inf")

    def add(self, size_bytes: int, now_s: float) -> None:
        """A body of this size is sent now; bodies are read one after the other."""
        if size_bytes >= LARGE_BODY_BYTES:
            self._until_s = max(self._until_s, now_s) + size_bytes / READING_BYTES_PER_S

    def within(self, since_s: float, now_s: float) -> float:
        """Return how many of the seconds from `since_s` to `now_s` may go to reading."""
        return max(0.0, min(self._until_s, now_s) - since_s)
