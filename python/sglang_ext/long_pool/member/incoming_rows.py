"""Kept rows of other members that come to this one, in the background, and are kept here from then on.

The target of a pull takes slots and waits at its transfer endpoint, as decode does; who keeps the rows sends them there
as it sends to decode. The engine computes meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_ext.identifiers import BootstrapRoom
from sglang_ext.long_pool.member.landing import Landing
from sglang_ext.long_pool.member.ranks import Ranks, all_ranks_or_raise
from sglang_ext.long_pool.member.shard import HeldRows, KvPool, KvPoolFullError


class ArrivedRows(NamedTuple):
    """A pull of which all rows have come, or none will."""

    pull: int
    rows: HeldRows | None


@dataclass(slots=True)
class _Incoming:
    pull: int | None  # None: of a membership that is over
    slots: torch.Tensor
    is_cancelled: bool = False


class IncomingRows:
    """All pulls whose target this member is. Belongs to the thread of the engine's loop; the same on all ranks."""

    def __init__(self, pool: KvPool, ranks: Ranks) -> None:
        self._pool = pool
        self._ranks = ranks
        self._incoming: dict[BootstrapRoom, _Incoming] = {}

    def __len__(self) -> int:
        return len(self._incoming)

    @property
    def tokens(self) -> int:
        """Return the number of slots that are taken, in whole pages."""
        page = self._pool.page_tokens
        return sum(-(-incoming.slots.numel() // page) * page for incoming in self._incoming.values())

    def begin(self, landing: Landing, pull: int, room: BootstrapRoom, tokens: int) -> None:
        """Take slots for the rows of a prefix. Raises KvPoolFullError."""
        with all_ranks_or_raise(self._ranks, KvPoolFullError):
            slots = self._pool.allocate(tokens)
        self._incoming[room] = _Incoming(pull, slots)
        landing.expect(room, slots)

    def cancel(self, pull: int) -> None:
        """A pull is not wanted any more."""
        for incoming in self._incoming.values():
            if incoming.pull == pull:
                incoming.is_cancelled = True

    def abandon(self) -> None:
        """Cancel all pulls, and report none of them: another coordinator may give their numbers again."""
        for incoming in self._incoming.values():
            incoming.pull, incoming.is_cancelled = None, True

    def settle(self, landing: Landing) -> list[ArrivedRows]:
        """Return what has ended since the last call. Call it in every turn; collective while anything is coming."""
        ended = []
        rooms = list(self._incoming)
        are_complete = self._ranks.all_of([landing.is_complete(room) for room in rooms])
        are_released = self._ranks.all_of([landing.is_released(room) for room in rooms])
        for room, is_complete, is_released in zip(rooms, are_complete, are_released, strict=True):
            incoming = self._incoming[room]
            if is_complete and not incoming.is_cancelled:
                assert incoming.pull is not None
                rows = HeldRows((range(incoming.slots.numel()),), incoming.slots)
                ended.append(ArrivedRows(incoming.pull, rows))
            elif is_released:
                self._pool.free(incoming.slots)
                if incoming.pull is not None:
                    ended.append(ArrivedRows(incoming.pull, None))
            else:
                if incoming.is_cancelled:
                    landing.cancel(room)
                continue
            del self._incoming[room]
            landing.forget(room)
        return ended
