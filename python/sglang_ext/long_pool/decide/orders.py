"""Events that instances bring to a long pool's coordinator, and what it orders from them."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from sglang_ext.long_pool.decide.sharding import ChunkLayout, KvMove


class Offer(NamedTuple):
    """A long prefill that an instance would like to share."""

    request: int  # unique
    owner: int  # the instance that it came to: holds the cached prefix, and will have all its KV
    tokens: int  # of the prompt that are to be in memory when the request is handed back
    cached_tokens: int
    arrival_s: float
    deadline_s: float  # absolute; infinity where there is none
    is_streamed: bool = False  # members send their KV straight to where it is wanted: it need not come to the owner
    fits_owner: bool = True  # the owner has the memory to compute it alone


class PromptTicket(NamedTuple):
    """A long prompt that no instance has yet: the pool says which one shall get it, once its turn has come."""

    ticket: int  # unique among tickets and requests
    tokens: int  # as many as the router knows of
    cached_tokens: int  # of them, that the instance which gets it is expected to have
    arrival_s: float
    deadline_s: float | None  # absolute; infinity: there is none; None: by the pool's objective


class MemberReport(NamedTuple):
    """An instance's load, as it reports it."""

    backlog_s: float  # ordinary work there: queued, and what was begun as this was sent
    free_kv_tokens: int
    max_chunk_tokens: int | None = None  # that it can compute at once by the memory besides KV, as far as it knows


class DeclineReason(StrEnum):
    """Why a request is computed by its own instance. Bounded: these are metric labels."""

    ALONE_IS_BEST = "alone_is_best"
    NO_PLAN = "no_plan"
    NO_ROOM = "no_room"  # its KV would have to come to its own instance, and does not fit there
    FAILURES = "failures"
    NOT_A_MEMBER = "not_a_member"


class Bind(NamedTuple):
    """To the router that brought the ticket: give the prompt to this instance, which is to offer it with the ticket."""

    ticket: int
    owner: int


class RunChunk(NamedTuple):
    """To every member of the group: take part in this chunk."""

    sequence: int  # unique, rising
    request: int
    layout: ChunkLayout
    first_tag: int
    is_last: bool = False  # and the logits of its last row are wanted


class Collect(NamedTuple):
    """To every holder: KV goes to the owner, which then goes on with the request, or keeps it in its prefix cache."""

    sequence: int
    request: int
    owner: int
    members: tuple[int, ...]
    moves: tuple[KvMove, ...]
    first_tag: int
    is_last: bool = True  # with it the owner has all; else the request stays where it is, but for these moves


class Finish(NamedTuple):
    """To the owner: all is computed and on its way to where it is wanted. Members keep it until that has an end."""

    request: int
    owner: int


class GiveUp(NamedTuple):
    """To these members, which have not answered for a step: it has failed for another one."""

    sequence: int
    members: tuple[int, ...]


class RollBack(NamedTuple):
    """To these members, which have done a chunk that others have not: be as before it."""

    sequence: int
    request: int
    members: tuple[int, ...]


class Drop(NamedTuple):
    """To these members: forget the request and free what it holds."""

    request: int
    members: tuple[int, ...]


class Decline(NamedTuple):
    """To the owner: compute the request alone, with whatever of it is in the cache."""

    request: int
    owner: int
    reason: DeclineReason


Order = Bind | RunChunk | Finish | Collect | GiveUp | RollBack | Drop | Decline
