"""What a sender knows of a chunk that it has offered."""

from __future__ import annotations

from typing import NamedTuple

from sglang_ext.policy.handshake.messages import Grant
from sglang_ext.policy.handshake.shards import KVShard


class Part(NamedTuple):
    """A piece of a chunk that is written at once. `cells` is 0 for metadata alone."""

    cells: int
    has_aux: bool = False


class OfferedChunk:
    """A chunk offered."""

    __slots__ = (
        "cells_ready",
        "cells_written",
        "grant",
        "is_aux_ready",
        "is_aux_written",
        "offered_s",
        "parts",
        "ready_s",
        "shard",
    )

    def __init__(self, shard: KVShard, now_s: float) -> None:
        self.shard = shard
        self.offered_s = now_s
        self.ready_s: float | None = None
        self.parts: list[Part] = []
        self.cells_ready = self.cells_written = 0
        self.is_aux_ready = self.is_aux_written = False
        self.grant: Grant | None = None

    @property
    def is_written(self) -> bool:
        return self.cells_written == self.shard.cells and self.is_aux_written == self.shard.has_aux
