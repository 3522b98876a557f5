"""Where the KV of a shared request has to go, as its own instance tells it to the others."""

from __future__ import annotations

from typing import NamedTuple

from sglang_ext.policy.handshake.head_mapping import HeadLayout


class Destination(NamedTuple):
    """A decode rank that waits for it."""

    room: int
    receiver: str  # address of its endpoint
    rank: int
    heads: HeadLayout  # how its instance spreads them over ranks
    first_token: int  # what comes before is cached there
