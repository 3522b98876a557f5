"""Which long prefill goes on: the current one, unless another is clearly more urgent and there is room to park it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_ext.policy.relative_slack import RankedPrefill


class LongChoice(NamedTuple):
    """The long prefill that should run, and whether the memory as it is holds the rest of it."""

    ranked: RankedPrefill
    fits: bool


def choose_long(
    ranked: Sequence[RankedPrefill], free_kv_tokens: int, max_parked: int, preempt_margin: float
) -> LongChoice | None:
    """The long prefill to run next, `ranked` being in order of urgency; None if none waits.

    A prefill is started only if the memory holds it and the rest of all that are started, so that these can always
    end. One that waits for memory longer than it takes to be lifted a class keeps others from being started before
    it. When none is started, the most urgent one that fits is, or else the most urgent: nobody else holds memory.
    """
    if not ranked:
        return None
    started = [candidate for candidate in ranked if candidate.request.is_started]
    promised_tokens = sum(candidate.request.new_tokens for candidate in started)
    may_start = len(started) <= max_parked if started else True
    current = next((candidate for candidate in started if candidate.request.is_current), None)
    for candidate in ranked:
        if candidate is current:
            return LongChoice(candidate, _fits(candidate, free_kv_tokens))
        if not candidate.request.is_started:
            if not may_start:
                continue
            if candidate.request.new_tokens + promised_tokens > free_kv_tokens:
                if candidate.urgency.aged_class < candidate.request.priority:
                    may_start = False
                continue
        if current is not None and not _preempts(candidate, current, preempt_margin):
            continue
        return LongChoice(candidate, _fits(candidate, free_kv_tokens))
    first = current or (started[0] if started else ranked[0])
    return LongChoice(first, _fits(first, free_kv_tokens))


def _fits(candidate: RankedPrefill, free_kv_tokens: int) -> bool:
    return candidate.request.new_tokens <= free_kv_tokens


def _preempts(candidate: RankedPrefill, current: RankedPrefill, margin: float) -> bool:
    """Whether the candidate is of a more urgent class, or of the same and by the margin lower in relative slack."""
    theirs, ours = candidate.urgency, current.urgency
    if theirs.aged_class != ours.aged_class:
        return theirs.aged_class < ours.aged_class
    return theirs.relative_slack < ours.relative_slack - margin
