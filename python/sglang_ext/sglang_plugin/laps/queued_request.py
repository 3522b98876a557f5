"""What the scheduler remembers of each request beside SGLang's own record of it, and what it reads there.

Every rank gives a request its key at the same moment, in the order of the same queue, so a key names the same
request everywhere. Times and deadlines matter on the deciding rank alone. SGLang 0.5.17 and 0.5.23 have the prefix of a
request under different names; they share the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from sglang_ext.policy.laps.round_plan import PriorityClass, QueuedPrefill
from sglang_ext.types import LengthClass

ATTRIBUTE = "_sglang_ext_laps"
TTFT_SLO_MS_PARAMETER = "sglang_ext_ttft_slo_ms"
PRIORITY_PARAMETER = "sglang_ext_priority"
_PRIORITY_NAMES = {
    "real-time": PriorityClass.REAL_TIME,
    "high": PriorityClass.HIGH,
    "normal": PriorityClass.NORMAL,
    "low": PriorityClass.LOW,
}


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


def entry_of(request: Any) -> LapsEntry | None:
    """The entry of an SGLang request, or None before `remember`."""
    entry: LapsEntry | None = getattr(request, ATTRIBUTE, None)
    return entry


def remember(request: Any, entry: LapsEntry) -> None:
    """Attach an entry to an SGLang request, in place."""
    setattr(request, ATTRIBUTE, entry)


def prefill_tokens(request: Any) -> tuple[int, int]:
    """New and cached tokens of an SGLang request as of its last prefix match or chunk."""
    total_tokens = len(request.origin_input_ids) + len(request.output_ids)
    # SGLang computes at least the last token, however much is cached.
    cached_tokens = min(prefix_tokens(request) + request.host_hit_length, total_tokens - 1)
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
    """The TTFT objective that came with the request (s), or None. Anything but a positive number is ignored."""
    value = _parameters(request).get(TTFT_SLO_MS_PARAMETER)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        slo_s = value / 1e3
    except OverflowError:  # an integer beyond every float
        return None
    # In seconds: the smallest positive floats are 0 there.
    return slo_s if slo_s > 0 else None


def requested_priority(request: Any) -> PriorityClass:
    """The priority class that came with the request; normal when none, or an unknown one, did."""
    value = _parameters(request).get(PRIORITY_PARAMETER)
    return _PRIORITY_NAMES.get(value, PriorityClass.NORMAL) if isinstance(value, str) else PriorityClass.NORMAL


def _parameters(request: Any) -> dict[str, Any]:
    parameters = getattr(request.sampling_params, "custom_params", None)
    return parameters if isinstance(parameters, dict) else {}


def prefix_tokens(request: Any) -> int:
    """Tokens of an SGLang request whose KV is there: found in the cache, and computed by its chunks so far."""
    if hasattr(request, "prefix_len"):
        return int(request.prefix_len)
    return len(request.prefix_indices)  # before 0.5.23: the slots themselves


def match_prefix(request: Any, tree_cache: Any) -> None:
    """Look a waiting request up in the prefix cache; it remembers what was found. Nothing is locked."""
    _match()(request, tree_cache)


@cache
def _match() -> Callable[[Any, Any], object]:
    try:
        from sglang.srt.mem_cache.common import match_kv_cache
    except ImportError:
        from sglang.srt.managers.schedule_policy import match_prefix_for_req

        return lambda request, tree_cache: match_prefix_for_req(tree_cache, request, include_req=True)
    match: Callable[[Any, Any], object] = match_kv_cache
    return match
