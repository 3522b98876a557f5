"""How many tokens of a long prefill run next: as many as fit a time budget (Medha's adaptive chunking)."""

from __future__ import annotations

from sglang_ext.policy.prefill_cost import CostCoefficients


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
