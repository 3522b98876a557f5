"""The records that cross a boundary between components, and the names of a request's states.

Nothing here does anything: a policy takes these and returns these, the router and the engine carry them
out, the simulator replays them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class LengthClass(StrEnum):
    """Describes what a prefill is bound by: memory and launch cost (short) or compute (long)."""

    SHORT = "short"
    LONG = "long"


class Role(StrEnum):
    """Describes what an instance serves. `both` takes short and long prefills in turn, `plain` whole requests."""

    SHORT = "short"
    LONG = "long"
    BOTH = "both"
    DECODE = "decode"
    PLAIN = "plain"

    @property
    def is_prefill(self) -> bool:
        """Return whether it prefills for a decode instance."""
        return self is not Role.DECODE and self is not Role.PLAIN

    @property
    def computes_prompts(self) -> bool:
        """Return whether it prefills, for a decode instance or for itself, and so has a prefix cache."""
        return self is not Role.DECODE

    def serves(self, length_class: LengthClass) -> bool:
        """Return whether a prefill of this class belongs on an instance of this role."""
        if self is _BOTH:
            return True
        return self is (_SHORT if length_class is LengthClass.SHORT else _LONG)


# Looking a member up in its class takes longer than comparing it.
_SHORT, _LONG, _BOTH = Role.SHORT, Role.LONG, Role.BOTH


class PrefillLoad(NamedTuple):
    """One prefill instance at the moment of a decision."""

    worker_id: int  # what a decision names; the higher, the later the instance was added to this router
    pending_tokens: int  # uncached prompt tokens queued or being prefilled there
    in_flight: int  # requests sent there whose prefill has not ended
    cached_tokens: int  # of this request's prompt, believed to be in its prefix cache
    tokens_per_s: float  # prefill rate last observed, or a prior
    computed_tokens: int = 0  # of the pending ones, that should be computed by now


class DecodeLoad(NamedTuple):
    """One decode instance at the moment of a decision."""

    worker_id: int
    free_kv_tokens: int  # KV slots reported free
    reserved_tokens: int  # virtual usage: KV on its way, not yet in the report
    batch_size: int  # requests running or on their way
    max_prompt_tokens: int  # longest prompt that it can hold: context length and KV capacity
    held_share: float = 0.0  # of this request's prompt, believed to be in its prefix cache


class RouteDecision(NamedTuple):
    """Describes where a request goes and why."""

    length_class: LengthClass
    prefill_id: int  # worker ids, as in the loads
    decode_id: int | None  # None: prefill serves by itself
    predicted_wait_s: float
    new_tokens: int
    cached_tokens: int
    decode_cached_tokens: int = 0  # believed to be in the prefix cache of the decode instance
    class_name: str = ""  # of the classes of a file, where there is one
    objective_s: float = 0.0  # of that class, for the time to the first token; 0: none


DEFAULT_TENANT = "default"  # to which a key belongs that no tenant has
PRIORITIES = ("real-time", "high", "normal", "low")  # of requests, the most urgent first


class TenantLimits(NamedTuple):
    """The limits of one tenant in the file of tenants; 0 is no limit."""

    name: str
    weight: float = 1.0
    concurrency: int = 0  # requests under way at once, of all routers
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_priority: str = PRIORITIES[0]
    sends_for_others: bool = False  # its requests may name the tenant that they belong to
