"""One instance changing its pool, or its role: drain → switch → verify → relabel, undone when the switch did nothing.

A state machine without I/O: events in, actions out, in order. Each batch of actions ends with at most one action that
the driver answers with an event. A reply "200" to a switch proves nothing; the move counts once the instance
itself reports the new mode, under a higher generation where it counts its switches.

A mode is `short`, `long` or `both` of LAPS, or `prefill` or `decode`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

VERIFY_PAUSE_S = 0.1  # between two readings of an instance's mode


class MoveOutcome(StrEnum):
    """The outcome of a move. Bounded: these are metric labels."""

    MOVED = "moved"
    FAILED = "failed"  # nothing has changed, or what had was taken back
    NOT_UNDONE = "not_undone"  # it failed, and the instance does not confirm its old mode
    LOST = "lost"  # the instance was lost or removed meanwhile


class MovePhase(StrEnum):
    """The phase of a move."""

    NEW = "new"
    DRAINING = "draining"  # nothing new is sent there
    READING = "reading"  # asked for its mode and generation
    SWITCHING = "switching"  # was sent its new mode
    VERIFYING = "verifying"
    UNDOING = "undoing"  # was sent its old mode
    VERIFYING_UNDO = "verifying_undo"
    OVER = "over"


class MovePlan(NamedTuple):
    """The mode that an instance shall leave, and the mode that it shall get."""

    source: str
    target: str
    can_drain: bool  # False where no other instance serves the old class: it goes on serving until it is switched
    verify_timeout_s: float


@dataclass(frozen=True, slots=True)
class HoldBack:
    """Send the instance nothing new."""


@dataclass(frozen=True, slots=True)
class AwaitDrain:
    """Wait until nothing is in flight there, then `on_drained`; after the drain timeout `on_drain_timeout`."""


@dataclass(frozen=True, slots=True)
class ReadMode:
    """Ask the instance for its mode after a pause, then `on_mode` or `on_mode_unknown`."""

    after_s: float


@dataclass(frozen=True, slots=True)
class PostMode:
    """Send the instance its mode, then `on_switched`, `on_switch_unanswered` or `on_switch_failed`."""

    mode: str


@dataclass(frozen=True, slots=True)
class Relabel:
    """The router counts the instance to the pool of this mode from now on."""

    mode: str


@dataclass(frozen=True, slots=True)
class Release:
    """Send the instance requests again."""


@dataclass(frozen=True, slots=True)
class MoveFinished:
    """The move is over; no further action will come."""

    outcome: MoveOutcome
    detail: str


MoveAction: TypeAlias = HoldBack | AwaitDrain | ReadMode | PostMode | Relabel | Release | MoveFinished
MoveActions: TypeAlias = tuple[MoveAction, ...]
NOTHING: MoveActions = ()


class PoolMove:
    """One move. Events of another phase than the present one are ignored."""

    def __init__(self, plan: MovePlan) -> None:
        self.plan = plan
        self._phase = MovePhase.NEW
        self._previous_mode = plan.source
        self._generation = 0  # before the switch
        self._verify_until_s = 0.0
        self._failure = ""

    @property
    def phase(self) -> MovePhase:
        return self._phase

    @property
    def is_over(self) -> bool:
        return self._phase is MovePhase.OVER

    # ---- events ----

    def start(self) -> MoveActions:
        """Begin. Ignored unless it is the first event."""
        if self._phase is not MovePhase.NEW:
            return NOTHING
        if not self.plan.can_drain:
            return self._read_first()
        self._phase = MovePhase.DRAINING
        return HoldBack(), AwaitDrain()

    def on_drained(self) -> MoveActions:
        """Nothing is in flight there any more."""
        return self._read_first() if self._phase is MovePhase.DRAINING else NOTHING

    def on_drain_timeout(self) -> MoveActions:
        """Something still is: the instance serves it in its new mode too, only later."""
        return self.on_drained()

    def on_mode(self, mode: str, generation: int | None, now_s: float) -> MoveActions:
        """The instance reports its mode and how often it has been switched; None where it does not count that."""
        match self._phase:
            case MovePhase.READING:
                self._previous_mode, self._generation = mode, generation or 0
                if mode == self.plan.target:
                    return self._moved("it was in that mode already")
                self._phase = MovePhase.SWITCHING
                return (PostMode(self.plan.target),)
            case MovePhase.VERIFYING:
                if mode == self.plan.target and (generation is None or generation > self._generation):
                    return self._moved("")
                counted = "" if generation is None else f" and generation {generation} (before: {self._generation})"
                seen = f"it reports mode {mode}{counted}"
                return self._read_again(now_s) or self._undo(f"the switch had no effect: {seen}")
            case MovePhase.VERIFYING_UNDO:
                if mode == self._previous_mode:
                    return self._finish(MoveOutcome.FAILED, self._failure)
                return self._read_again(now_s) or self._not_undone(f"it reports mode {mode}")
            case _:
                return NOTHING

    def on_mode_unknown(self, detail: str, now_s: float) -> MoveActions:
        """The instance did not answer, or not as it should."""
        match self._phase:
            case MovePhase.READING:
                return self._finish(MoveOutcome.FAILED, f"its mode cannot be read: {detail}")
            case MovePhase.VERIFYING:
                return self._read_again(now_s) or self._undo(f"the switch cannot be verified: {detail}")
            case MovePhase.VERIFYING_UNDO:
                return self._read_again(now_s) or self._not_undone(detail)
            case _:
                return NOTHING

    def on_switched(self, now_s: float) -> MoveActions:
        """The instance has accepted the mode: see whether it has taken it."""
        match self._phase:
            case MovePhase.SWITCHING:
                return self._verify(MovePhase.VERIFYING, now_s)
            case MovePhase.UNDOING:
                return self._verify(MovePhase.VERIFYING_UNDO, now_s)
            case _:
                return NOTHING

    def on_switch_unanswered(self, now_s: float) -> MoveActions:
        """No reply came: the instance may have taken the mode all the same, or take it yet."""
        return self.on_switched(now_s)

    def on_switch_failed(self, detail: str, now_s: float) -> MoveActions:
        """The instance refused the mode."""
        match self._phase:
            case MovePhase.SWITCHING:
                return self._undo(f"the switch failed: {detail}")
            case MovePhase.UNDOING:
                return self._verify(MovePhase.VERIFYING_UNDO, now_s)
            case _:
                return NOTHING

    def on_lost(self, detail: str) -> MoveActions:
        """The instance is down or was removed. It reports the mode that it comes back in."""
        if self._phase in (MovePhase.NEW, MovePhase.OVER):
            return NOTHING
        return self._finish(MoveOutcome.LOST, detail)

    # ---- what follows ----

    def _read_first(self) -> MoveActions:
        self._phase = MovePhase.READING
        return (ReadMode(0.0),)

    def _verify(self, phase: MovePhase, now_s: float) -> MoveActions:
        self._phase = phase
        self._verify_until_s = now_s + self.plan.verify_timeout_s
        return (ReadMode(0.0),)

    def _read_again(self, now_s: float) -> MoveActions:
        """A switch takes effect between two iterations, so a first look may come too early."""
        return (ReadMode(VERIFY_PAUSE_S),) if now_s < self._verify_until_s else NOTHING

    def _undo(self, failure: str) -> MoveActions:
        self._failure = failure
        self._phase = MovePhase.UNDOING
        return (PostMode(self._previous_mode),)

    def _moved(self, detail: str) -> MoveActions:
        return Relabel(self.plan.target), *self._finish(MoveOutcome.MOVED, detail)

    def _not_undone(self, detail: str) -> MoveActions:
        return self._finish(MoveOutcome.NOT_UNDONE, f"{self._failure}; taking it back cannot be verified: {detail}")

    def _finish(self, outcome: MoveOutcome, detail: str) -> MoveActions:
        self._phase = MovePhase.OVER
        return Release(), MoveFinished(outcome, detail)
