"""Describes what names a request, and a transfer of its KV.

| name | given by | names |
|---|---|---|
| bootstrap room | the router | a request at its prefill and its decode instance, as SGLang has it |
| transfer id | follows from the room | one attempt to bring KV to decode: the room, or a `TransferAttempt` |
| pool request | a member of a long pool | a request that was offered to the pool, unique there |
| pool ticket | follows from the room | a prompt that a router has announced to the pool |
| pool pull | the coordinator of a long pool | kept rows on their way to one member; below 0, as no pool request is |

A request whose KV comes from several instances may have to be sent again when one of them fails. Each attempt is a
transfer of its own to the protocol, with permits of its own: what is late belongs to an attempt that has ended.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

MAX_ATTEMPTS = 4  # at a request, in all
_REQUESTS_OF_AN_INSTANCE = 2**32
_ROOMS = 2**63

BootstrapRoom: TypeAlias = int
PoolRequest: TypeAlias = int
PoolTicket: TypeAlias = int


class TransferAttempt(NamedTuple):
    """A later attempt; the first one is named only by the room."""

    room: BootstrapRoom
    number: int  # 1, 2, …

    def __str__(self) -> str:
        return f"{self.room} (attempt {self.number + 1})"


TransferId: TypeAlias = BootstrapRoom | TransferAttempt


def attempts_of(room: BootstrapRoom) -> tuple[TransferId, ...]:
    """All that there can be."""
    return (room, *(TransferAttempt(room, number) for number in range(1, MAX_ATTEMPTS)))


def next_attempt(transfer_id: TransferId) -> TransferAttempt | None:
    """The attempt after this one; None where there have been enough."""
    room, number = transfer_id if isinstance(transfer_id, TransferAttempt) else (transfer_id, 0)
    return TransferAttempt(room, number + 1) if number + 1 < MAX_ATTEMPTS else None


def pool_request(instance: int, count: int) -> PoolRequest:
    """The name of the `count`-th request that a member offers; `instance` is its number in the pool."""
    return instance * _REQUESTS_OF_AN_INSTANCE + count


def instance_of(request: PoolRequest) -> int:
    """The member that has offered a request."""
    return request // _REQUESTS_OF_AN_INSTANCE


def room_of_pull(pool_id: str, pull: int) -> BootstrapRoom:
    """The room under which rows of a pull are transferred.

    `pool_id`, in hexadecimal digits, is part of it: each run of a coordinator begins to count its pulls at one.
    """
    return int(pool_id[:7], 16) << 32 | -pull


def pool_ticket(room: BootstrapRoom) -> PoolTicket:
    """The ticket of the prompt that will have this room: below 0 as no pool request is, and in the rooms' order."""
    return room - _ROOMS


def room_of(ticket: PoolTicket) -> BootstrapRoom:
    """The room of a ticket."""
    return ticket + _ROOMS
