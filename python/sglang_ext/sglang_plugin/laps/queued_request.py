"""What the scheduler remembers of each request beside SGLang's own record of it.

Every rank gives a request its key at the same moment, in the order of the same queue, so a key names the same
request everywhere. Times and deadlines matter on the deciding rank alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_ext.policy.laps.round_plan import PriorityClass, QueuedPrefill
from sglang_ext.sglang_plugin.laps.engine_interface import prefix_tokens
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
