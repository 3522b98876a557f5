"""The numbered batches of one publisher of KV events: what is applied, what is asked for again, when all is forgotten.

A publisher numbers its batches from 0 and keeps the last of them for replays. What is lost on the way shows as a gap in
the numbers; then a replay is asked for, from the last batch that was applied: if that comes back as it was, the rest
follows it. If it does not, the publisher was started again; if the replay begins later, batches are lost for good. In
both cases all that was known is forgotten. Batches that come while a replay is under way are held, and follow it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

_MARK_BYTES = 10  # of a batch: the header of an array, and the time at which it was made
MAX_HELD_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ApplyBatch:
    """Apply what this batch says to the index."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class ForgetBlocks:
    """Forget all that the publisher has reported."""


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Ask the publisher for its batches from this number on."""

    first: int


SequenceAction: TypeAlias = ApplyBatch | ForgetBlocks | AskReplay


class EventSequence:
    """Follows the batches of one publisher. Every event returns the actions that follow from it, in order.

    It begins with `on_connected`. `is_whole` says that the index has all that the publisher's engine holds.
    """

    def __init__(self, can_replay: bool, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self.can_replay = can_replay
        self.is_whole = False
        self.expected = 0  # number of the batch that is applied next
        self.is_replaying = False
        self.gaps = 0
        self.losses = 0  # times that batches were lost for good
        self.restarts = 0
        self._max_held_bytes = max_held_bytes
        self._mark: bytes | None = None  # of the batch that was applied last
        self._last_live = -1
        self._held: list[tuple[int, bytes]] = []
        self._held_bytes = 0
        self._first = 0  # of the replay under way
        self._is_checked = False  # the replay has begun where it should
        self._reaches_start = True  # the publisher may keep its first batch still
        self._ignored_ends = 0  # of replays that were given up

    # -- events ---------------------------------------------------------------------------------------------

    def on_connected(self) -> list[SequenceAction]:
        """Batches come from now on; others may have been published before."""
        self._last_live = -1
        self._drop_held()  # a replay has them too, where they are this publisher's
        if not self.can_replay:
            actions = self._forget()
            self._begin(0)
            return actions
        return [self._ask()]

    def on_batch(self, number: int, payload: bytes) -> list[SequenceAction]:
        """A batch has come that was just published."""
        if number <= self._last_live:  # a publisher counts on: it was started again
            return self._on_restarted(number, payload)
        self._last_live = number
        if self.is_replaying:
            self._hold(number, payload)
            return []
        if number < self.expected:  # the replay had it, too
            return []
        if number == self.expected:
            return [self._apply(number, payload)]
        return self._on_gap(number, payload)

    def on_replayed(self, number: int, payload: bytes) -> list[SequenceAction]:
        """A batch of a replay has come."""
        if not self.is_replaying or self._ignored_ends:
            return []
        actions: list[SequenceAction] = []
        if not self._is_checked:
            self._is_checked = True
            if number > self._first:
                self.losses += self._mark is not None
                self._reaches_start = self._reaches_start and self._first > 0
                actions += self._forget()
                self._begin(number)
            elif self._mark is not None and payload[:_MARK_BYTES] != self._mark:
                return self._replay_restarted()
        if number < self.expected:
            return actions
        if number > self.expected:  # within a replay none is left out
            self.losses += 1
            actions += self._forget()
            self._begin(number)
        return [*actions, self._apply(number, payload)]

    def on_replay_end(self) -> list[SequenceAction]:
        """A replay is over; what was held follows it."""
        if self._ignored_ends:
            self._ignored_ends -= 1
            return []
        if not self.is_replaying:
            return []
        self.is_replaying = False
        if not self._is_checked:
            if self._mark is not None:  # the publisher does not know the last batch
                return self._replay_restarted()
            self.is_whole = True  # it has published nothing
        return self._release()

    def on_replay_failed(self) -> list[SequenceAction]:
        """A replay does not come: its connection is lost, or it takes too long."""
        self._ignored_ends = 0
        if not self.is_replaying:
            return []
        self.is_replaying = False
        self.losses += self._mark is not None
        actions = self._forget()
        self._begin(self._held[0][0] if self._held else self.expected)
        return actions + self._release()

    def on_quiet(self) -> list[SequenceAction]:
        """Nothing has come for a while: the last batch may be lost, or the publisher another one."""
        if not self.can_replay or self.is_replaying:
            return []
        if self.is_whole or not self._reaches_start:
            return [self._ask()]
        actions = self._forget()
        self._begin(0)
        return [*actions, self._ask()]

    def on_cleared(self) -> None:
        """The engine holds nothing: all that it will hold is known."""
        self.is_whole = True

    def on_instance_lost(self) -> list[SequenceAction]:
        """The instance is gone, or not what it was."""
        actions = self._forget()
        self._begin(0)
        self._reaches_start = True
        if self.is_replaying:
            self._ignored_ends += 1
            self.is_replaying = False
        self._drop_held()
        return actions

    # -- parts ----------------------------------------------------------------------------------------------

    def _apply(self, number: int, payload: bytes) -> ApplyBatch:
        if not number:
            self.is_whole = True
        self.expected = number + 1
        self._mark = payload[:_MARK_BYTES]
        return ApplyBatch(payload)

    def _begin(self, number: int) -> None:
        self.expected = number
        self._mark = None

    def _forget(self) -> list[SequenceAction]:
        self.is_whole = False
        return [ForgetBlocks()]

    def _ask(self) -> AskReplay:
        """Ask for the last batch that was applied and all behind it; without one, for all."""
        if self.is_replaying:
            self._ignored_ends += 1
        self.is_replaying = True
        self._is_checked = False
        if self._mark is None:  # nothing that is known was applied
            self._begin(0)
        self._first = max(0, self.expected - 1)
        return AskReplay(self._first)

    def _on_gap(self, number: int, payload: bytes) -> list[SequenceAction]:
        self.gaps += self._mark is not None
        if self.can_replay:
            self._hold(number, payload)
            return [self._ask()]
        self.losses += self._mark is not None
        actions = self._forget()
        return [*actions, self._apply(number, payload)]

    def _on_restarted(self, number: int, payload: bytes) -> list[SequenceAction]:
        self.restarts += 1
        self._reaches_start = True
        self._drop_held()
        self._last_live = number
        actions = self._forget()
        self._begin(0)
        if self.can_replay:
            self._hold(number, payload)
            return [*actions, self._ask()]
        return [*actions, self._apply(number, payload)]

    def _replay_restarted(self) -> list[SequenceAction]:
        """The replay under way shows another publisher than before: the next one asks for all."""
        self.restarts += 1
        self._reaches_start = True
        actions = self._forget()
        self._begin(0)
        return [*actions, self._ask()]

    def _hold(self, number: int, payload: bytes) -> None:
        """Keep a batch until the replay is over; where there is no room, that leaves a gap behind it."""
        if self._held_bytes + len(payload) <= self._max_held_bytes:
            self._held.append((number, payload))
            self._held_bytes += len(payload)

    def _drop_held(self) -> None:
        self._held, self._held_bytes = [], 0

    def _release(self) -> list[SequenceAction]:
        held = self._held
        self._drop_held()
        actions: list[SequenceAction] = []
        for number, payload in held:
            if self.is_replaying:
                self._hold(number, payload)
            elif number == self.expected:
                actions.append(self._apply(number, payload))
            elif number > self.expected:
                actions += self._on_gap(number, payload)
        return actions
