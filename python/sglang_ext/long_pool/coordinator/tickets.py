"""Prompts that routers have announced to a long pool: which of them wait for an instance, which have one, how they end.

No I/O. `PoolProtocol` keeps them; a prompt is known here by its bootstrap room, which both of its legs will have.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from sglang_ext.identifiers import BootstrapRoom
from sglang_ext.long_pool.decide.kept_prompts import PromptText

MAX_WAITING = 4096  # announced prompts without an instance
_FORGET_S = 60.0  # long after the coordinator no longer waits for the offer of a prompt


class TicketProblem(StrEnum):
    """Describes why a prompt is not taken. Bounded: the router's metric labels."""

    BAD = "bad_ticket"
    NO_POOL = "no_pool"
    KNOWN = "known_ticket"
    TOO_MANY = "too_many_tickets"
    TOO_SHORT = "too_short"


class TicketError(ValueError):
    """A prompt that is not taken; the text says why."""

    def __init__(self, problem: TicketProblem, text: str) -> None:
        super().__init__(text)
        self.problem = problem


class TicketEnd(StrEnum):
    """Describes what became of an announced prompt. Bounded: these are metric labels."""

    CLAIMED = "claimed"  # an instance that was named has offered it
    WITHDRAWN = "withdrawn"  # its client has gone, or its router has gone another way
    UNSERVED = "unserved"  # the pool has lost its last member
    UNCLAIMED = "unclaimed"  # an instance was named, and has not offered it


class Announcement(NamedTuple):
    """A long prompt that a router has, before any instance has it."""

    room: BootstrapRoom
    tokens: int
    cached_tokens: int  # of them, that the instance which gets it may be expected to have
    waited_s: float  # since it came
    slack_s: float | None  # until its client's deadline, below 0 where that has passed; None: it has sent none
    is_online: bool = True  # whether it has a deadline, by the pool's objective, where its client has sent none
    text: PromptText | None = None


class BoundPrompt(NamedTuple):
    """The turn of an announced prompt has come."""

    room: BootstrapRoom
    name: str  # of the member that shall get it
    members: tuple[str, ...] = ()  # names of the members that are to compute it; empty: not known
    chunk_s: float = 0.0  # see `Bind`


@dataclass(frozen=True, slots=True)
class TicketTimes:
    """Describes when a prompt was announced, and when an instance was named for it, on the coordinator's clock."""

    announced_s: float
    bound_s: float


class OpenTickets:
    """The announced prompts of one pool."""

    def __init__(self) -> None:
        self._waiting: dict[BootstrapRoom, float] = {}  # since when
        self._bound: dict[BootstrapRoom, TicketTimes] = {}  # in order of binding
        self.ends: Counter[TicketEnd] = Counter()

    @property
    def waiting(self) -> int:
        """Return how many have no instance yet."""
        return len(self._waiting)

    def open(self, room: BootstrapRoom, now_s: float) -> None:
        """A prompt has been announced. TicketError where it is known already, or there are too many."""
        self.forget_unclaimed(now_s)
        if room in self._waiting or room in self._bound:
            raise TicketError(TicketProblem.KNOWN, f"ticket {room} has been announced already")
        if len(self._waiting) >= MAX_WAITING:
            raise TicketError(TicketProblem.TOO_MANY, f"{MAX_WAITING} prompts wait for an instance already")
        self._waiting[room] = now_s

    def bind(self, room: BootstrapRoom, now_s: float) -> None:
        """An instance has been named for it."""
        self._bound[room] = TicketTimes(self._waiting.pop(room), now_s)

    def claim(self, room: BootstrapRoom, now_s: float) -> TicketTimes | None:
        """An instance offers a prompt of this room; None where no router has announced it."""
        if room in self._waiting:  # it has been sent there without waiting for its turn
            self.bind(room, now_s)
        times = self._bound.pop(room, None)
        self.ends[TicketEnd.CLAIMED] += times is not None
        return times

    def withdraw(self, room: BootstrapRoom) -> bool:
        """It is not wanted any more; whether it was there."""
        is_there = self._waiting.pop(room, None) is not None or self._bound.pop(room, None) is not None
        self.ends[TicketEnd.WITHDRAWN] += is_there
        return is_there

    def end_all(self) -> list[BootstrapRoom]:
        """The pool is no more: return the tickets that no instance was named for."""
        rooms = list(self._waiting)
        self.ends[TicketEnd.UNSERVED] += len(rooms)
        self.ends[TicketEnd.UNCLAIMED] += len(self._bound)
        self._waiting.clear()
        self._bound.clear()
        return rooms

    def forget_unclaimed(self, now_s: float) -> None:
        """Forget tickets whose instance will not offer them any more."""
        for room, times in list(self._bound.items()):
            if now_s <= times.bound_s + _FORGET_S:
                return
            del self._bound[room]
            self.ends[TicketEnd.UNCLAIMED] += 1
