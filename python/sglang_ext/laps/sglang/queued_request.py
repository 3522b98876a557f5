"""Describes what the scheduler remembers of each request in addition to SGLang's own record of it, and what it reads
there.

Every rank gives a request its key at the same moment, in the order of the same queue, so a key names the same
request everywhere. Times and deadlines matter only on the deciding rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import PriorityClass, QueuedPrefill
from sglang_ext.laps.sglang.request_hints import (
    PRIORITY_NAMES,
    PRIORITY_PARAMETER,
    TTFT_SLO_MS_PARAMETER,
    slo_seconds,
)
from sglang_ext.types import LengthClass

ATTRIBUTE = "_sglang_ext_laps"


@dataclass(slots=True)
class LapsEntry:
    """LAPS's view of one request, from its arrival in the waiting queue to the end of its prefill."""

    key: int
    length_class: LengthClass
    total_tokens: int
    arrival_s: float
    deadline_s: float
    priority: PriorityClass
    is_started: bool = False
    was_offered: bool = False  # to a long pool
    is_counted: bool = False  # as work of this instance


def entry_of(request: Any) -> LapsEntry | None:
    """The entry of an SGLang request, or None before `remember`."""
    entry: LapsEntry | None = getattr(request, ATTRIBUTE, None)
    return entry


def remember(request: Any, entry: LapsEntry) -> None:
    """Attach an entry to an SGLang request, in place."""
    setattr(request, ATTRIBUTE, entry)


def reclassify(request: Any, entry: LapsEntry, policy: Laps, now_s: float) -> None:
    """Class and deadline of a waiting request after a new match with the prefix cache; changes `entry`.

    They change together, unless the deadline is the request's own. A prompt that turns long has a long one's deadline
    from its arrival on: with that of a short one it would go before every other long prefill. A prefill that turns
    short has a short one's objective from now on, and never more time than it had.
    """
    new_tokens, cached_tokens = prefill_tokens(request)
    entry.total_tokens = new_tokens
    length_class = policy.classify(new_tokens, cached_tokens)
    if length_class is entry.length_class:
        return
    entry.length_class = length_class
    is_short = length_class is LengthClass.SHORT
    own_slo_s = requested_slo_s(request)
    start_s = now_s if is_short and own_slo_s is None else entry.arrival_s
    deadline_s = policy.deadline_s(length_class, new_tokens, cached_tokens, start_s, own_slo_s, entry.priority)
    entry.deadline_s = min(entry.deadline_s, deadline_s) if is_short else deadline_s


def count_wait(request: Any, entry: LapsEntry, waited_s: float, now_s: float) -> None:
    """Count the time that a request has waited since it came to a router.

    Its arrival moves back to then, and so does the deadline that follows from it. From an objective that the client has
    asked for the router has subtracted that time already.
    """
    earlier_s = entry.arrival_s - (now_s - waited_s)
    if earlier_s > 0:
        entry.arrival_s -= earlier_s
        if requested_slo_s(request) is None:
            entry.deadline_s -= earlier_s


def match_again(request: Any, tree_cache: Any) -> bool:
    """Look a waiting request up in the prefix cache again; whether it has lost some of its prefix since."""
    before_tokens, _ = prefill_tokens(request)
    match_prefix(request, tree_cache)
    return prefill_tokens(request)[0] > before_tokens


def prefill_tokens(request: Any) -> tuple[int, int]:
    """New and cached tokens of an SGLang request as of its last prefix match or chunk."""
    total_tokens = len(request.origin_input_ids) + len(request.output_ids)
    entry = entry_of(request)
    # What was found on the host is part of the prefix once the prefill has started; SGLang keeps the count of it.
    host_tokens = 0 if entry is not None and entry.is_started else request.host_hit_length
    # SGLang computes at least the last token, however much is cached.
    cached_tokens = min(prefix_tokens(request) + host_tokens, total_tokens - 1)
    return total_tokens - cached_tokens, cached_tokens


def as_queued_prefill(request: Any, entry: LapsEntry, *, is_current: bool) -> QueuedPrefill:
    """The record that a policy sees."""
    new_tokens, cached_tokens = prefill_tokens(request)
    return QueuedPrefill(
        key=entry.key,
        length_class=entry.length_class,
        new_tokens=new_tokens,
        cached_tokens=cached_tokens,
        total_tokens=max(entry.total_tokens, new_tokens),
        arrival_s=entry.arrival_s,
        deadline_s=entry.deadline_s,
        priority=entry.priority,
        is_started=entry.is_started,
        is_current=is_current,
    )


def requested_slo_s(request: Any) -> float | None:
    """The TTFT objective that came with the request (s), or None. What is no objective has been refused."""
    return slo_seconds(_parameters(request).get(TTFT_SLO_MS_PARAMETER))


def requested_priority(request: Any) -> PriorityClass:
    """The priority class that came with the request; normal when none did."""
    value = _parameters(request).get(PRIORITY_PARAMETER)
    return PRIORITY_NAMES.get(value, PriorityClass.NORMAL) if isinstance(value, str) else PriorityClass.NORMAL


def _parameters(request: Any) -> dict[str, Any]:
    parameters = getattr(request.sampling_params, "custom_params", None)
    return parameters if isinstance(parameters, dict) else {}


def prefix_tokens(request: Any) -> int:
    """Tokens of an SGLang request whose KV is there: found in the cache, and computed by its chunks so far."""
    return int(request.prefix_len)


def match_prefix(request: Any, tree_cache: Any) -> None:
    """Look a waiting request up in the prefix cache; it remembers what was found. Nothing is locked."""
    from sglang.srt.mem_cache.common import match_kv_cache

    match_kv_cache(request, tree_cache)
