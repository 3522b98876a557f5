"""Events that instances bring to a long pool's coordinator, and what it orders from them."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from sglang_ext.long_pool.decide.kept_prompts import KeptPrefix, PromptBlocks, PromptText
from sglang_ext.long_pool.decide.row_pulls import Pull
from sglang_ext.long_pool.decide.sharding import ChunkLayout, KvMove
from sglang_ext.long_pool.wire_types import Count, Positive, Rate, Seconds


class Offer(NamedTuple):
    """A long prefill that an instance would like to share."""

    request: int  # unique
    owner: int  # the instance that it came to: holds the cached prefix, and will have all its KV
    tokens: int  # of the prompt that are to be in memory when the request is handed back
    cached_tokens: int
    arrival_s: float
    deadline_s: float  # absolute; infinity where there is none
    is_streamed: bool = False  # members send their KV straight to where it is wanted: it need not come to the owner
    fits_owner: bool = True  # the owner has the memory to compute it by itself
    blocks: PromptBlocks | None = None  # None: it is computed without what the pool has kept, and not kept


class PromptTicket(NamedTuple):
    """A long prompt that no instance has yet: the pool says which one shall get it, once its turn has come."""

    ticket: int  # unique among tickets and requests
    tokens: int  # as many as the router knows of
    cached_tokens: int  # of them, that the instance which gets it is expected to have
    arrival_s: float
    deadline_s: float | None  # absolute; infinity: there is none; None: by the pool's objective
    text: PromptText | None = None  # None: what the pool has kept of it is known once an instance offers it


class MeasuredCost(NamedTuple):
    """The time of a prefill on a single instance, as the instance has measured it: L tokens behind C cached ones take
    `fixed_s` + `token_s` L + `work_s` L (L + 2 C) seconds."""

    fixed_s: Rate
    token_s: Rate
    work_s: Rate
    is_extrapolated: bool = False  # from short prefills: long ones take longer, as attention is not in it


class MemberReport(NamedTuple):
    """An instance's load, as it reports it."""

    backlog_s: Seconds  # ordinary work there: queued, and what was begun as this was sent
    free_kv_tokens: Count
    max_chunk_tokens: Positive | None = None  # that it can compute at once by the memory besides KV, as far as it knows
    short_per_s: Rate = 0.0  # short prefills that have arrived there recently
    short_slo_s: Seconds | None = None  # their objective; None: it serves none, or none that is in a hurry
    short_work_s: Rate = 0.0  # time that the short prefills of a second take there, recently
    cost: MeasuredCost | None = None  # None: it does not know
    running_s: Seconds = 0.0  # of the backlog, what the batch takes that was begun as this was sent
    short_backlog_s: Seconds = 0.0  # of the backlog, what short prefills take that wait for a batch


class DeclineReason(StrEnum):
    """Describes why a request is computed by its own instance. Bounded: these are metric labels."""

    ALONE_IS_BEST = "alone_is_best"
    NO_PLAN = "no_plan"
    NO_ROOM = "no_room"  # its KV would have to come to its own instance, and does not fit there
    FAILURES = "failures"
    NOT_A_MEMBER = "not_a_member"


class Bind(NamedTuple):
    """Ask the router that brought the ticket to give the prompt to this instance, which offers it with the ticket."""

    ticket: int
    owner: int
    members: tuple[int, ...]  # that are to compute it, as it seems now
    chunk_s: float = 0.0  # time of its first chunk, which no batch interrupts; 0: its owner's own batches compute it


class RunChunk(NamedTuple):
    """Ask every member of the group to take part in this chunk."""

    sequence: int  # unique, rising
    request: int
    layout: ChunkLayout
    first_tag: int
    is_last: bool = False  # and the logits of its last row are wanted


class Collect(NamedTuple):
    """Ask every holder to send its KV to the owner, which goes on with the request."""

    sequence: int
    request: int
    owner: int
    members: tuple[int, ...]
    moves: tuple[KvMove, ...]
    first_tag: int


class Finish(NamedTuple):
    """Inform the owner that all is computed and on its way. Members keep the KV until the transfer has ended."""

    request: int
    owner: int


class GiveUp(NamedTuple):
    """Ask members that have not answered for a step to give it up: it has failed for another member."""

    sequence: int
    members: tuple[int, ...]


class RollBack(NamedTuple):
    """Ask members that have done a chunk that others have not to go back to the state before it."""

    sequence: int
    request: int
    members: tuple[int, ...]


class Drop(NamedTuple):
    """Ask these members to forget the request and free what it holds."""

    request: int
    members: tuple[int, ...]


class Keep(NamedTuple):
    """Ask these members to forget the request, and to keep its rows from `start_tokens` to `end_tokens` as a prefix
    under its number. Rows of the owner's own cached prefix are copied."""

    request: int
    members: tuple[int, ...]
    start_tokens: int
    end_tokens: int


class Borrow(NamedTuple):
    """Ask these members to begin the request with rows that they keep: those of each part, as one segment. The owner's
    own cached prefix of `cached_tokens`, which is shorter, is not used, but sent to where it is wanted."""

    request: int
    members: tuple[int, ...]
    parts: tuple[KeptPrefix, ...]
    cached_tokens: int


class DropKept(NamedTuple):
    """Ask these members to free the rows that they keep under this number, once no request reads them; or to give up
    the pull of this number."""

    request: int
    members: tuple[int, ...]


class Decline(NamedTuple):
    """Ask the owner to compute the request by itself, with the part that is in its cache."""

    request: int
    owner: int
    reason: DeclineReason
    arrival_s: float  # of the prompt: it has waited since then, before it came to its owner, too


Order = Bind | RunChunk | Finish | Collect | GiveUp | RollBack | Drop | Keep | Borrow | Pull | DropKept | Decline
