"""Decides which long prefill runs next, and how many of its tokens: by urgency, memory and a time budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.slack import RankedPrefill


class LongChoice(NamedTuple):
    """The long prefill that should run, and whether the memory as it is holds the rest of it."""

    ranked: RankedPrefill
    fits: bool


def choose_long(
    ranked: Sequence[RankedPrefill], free_kv_tokens: int, max_parked: int, preempt_margin: float
) -> LongChoice | None:
    """The long prefill to run next, `ranked` being in order of urgency; None if none waits.

    A prefill is started only if the memory holds it and the rest of all that are started, so that these can always
    end. A prefill that waits for memory longer than it takes to be lifted a class keeps others from being started
    before it. When none is started, the most urgent prefill that fits is, or else the most urgent: no other one holds
    memory.
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
    """Return whether the candidate is of a more urgent class, or of the same and by the margin lower in relative
    slack."""
    theirs, ours = candidate.urgency, current.urgency
    if theirs.aged_class != ours.aged_class:
        return theirs.aged_class < ours.aged_class
    return theirs.relative_slack < ours.relative_slack - margin


def choose_chunk(
    cost: CostCoefficients,
    remaining_tokens: int,
    cached_tokens: int,
    budget_s: float,
    page_tokens: int,
    min_tokens: int,
    max_tokens: int,
) -> int:
    """Tokens of the next chunk: the largest multiple of `page_tokens` whose predicted time is within `budget_s`.

    It shrinks as the cache grows (Medha, section 3.2). At least `min_tokens`, at most `max_tokens`; all that is
    left, of any number, if that fits. What would stay behind as a last chunk below `min_tokens` is left a little
    longer, or taken along.
    """
    pages_max = max(1, max_tokens // page_tokens)
    pages_min = min(pages_max, -(-min_tokens // page_tokens))
    if remaining_tokens <= pages_min * page_tokens:
        return remaining_tokens
    if remaining_tokens <= max_tokens and cost.chunk_s(remaining_tokens, cached_tokens) <= budget_s:
        return remaining_tokens
    low, high = pages_min, min(pages_max, remaining_tokens // page_tokens)
    while low < high:  # the largest that fits is in [low, high]
        middle = (low + high + 1) // 2
        if cost.chunk_s(middle * page_tokens, cached_tokens) <= budget_s:
            low = middle
        else:
            high = middle - 1
    chunk_tokens = low * page_tokens
    least_tokens = pages_min * page_tokens
    if remaining_tokens - chunk_tokens < least_tokens:
        shorter_tokens = (remaining_tokens - least_tokens) // page_tokens * page_tokens
        if shorter_tokens >= least_tokens:
            return shorter_tokens
        if remaining_tokens <= max_tokens:
            return remaining_tokens
    return chunk_tokens
