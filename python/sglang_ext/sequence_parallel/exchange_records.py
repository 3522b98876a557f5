"""What a `PoolExchange` is told and tells beside messages: who is there, who has gone, what goes to whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_ext.sequence_parallel.messages import Hello, ToMember
from sglang_ext.sequence_parallel.pool_records import PrefillRecord


class ProtocolError(ValueError):
    """A member has said what it cannot mean: its connection has to end."""


class Outgoing(NamedTuple):
    """A message to a member."""

    instance: int
    message: ToMember


class Lost(NamedTuple):
    """A member that has been given up."""

    instance: int
    reason: str


class GivenUp(NamedTuple):
    """A step that has come to nothing."""

    epoch: int
    sequence: int


class Admission(NamedTuple):
    """A member's number."""

    instance: int


class Identity(NamedTuple):
    """What is the same in all members."""

    model: str
    layers: int
    page_tokens: int

    def __str__(self) -> str:
        return f"{self.model} ({self.layers} layers, pages of {self.page_tokens})"


@dataclass(slots=True)
class Peer:
    """A member as it described itself, lately."""

    hello: Hello
    heard_s: float


@dataclass(slots=True)
class Events:
    """What a caller logs."""

    lost: list[Lost] = field(default_factory=list)
    ended: list[PrefillRecord] = field(default_factory=list)
    given_up: list[GivenUp] = field(default_factory=list)  # steps that a lost member was in, for all who still compute
