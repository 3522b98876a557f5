"""The cost of one iteration of an instance, and the prompts that it leaves unfinished."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_ext.costs.engine_profile import PipelineCosts
from sglang_ext.laps.decide.cost_model import IterationSample
from sglang_ext.planner.simulation.iteration_policies import Iteration, WorkItem
from sglang_ext.types import LengthClass


def iteration_sample(iteration: Iteration, costs: PipelineCosts) -> IterationSample:
    """Return the features of an iteration, as an engine records them, and its duration: padding counts in the new
    tokens."""
    lengths = [(tokens, item.cached_tokens) for item, tokens in iteration.slices]
    attention_work = _attention_work(lengths)
    cached_tokens = sum(cached for _, cached in lengths)
    is_replayed = iteration.padded_requests > 0
    computed = _padded(lengths, iteration.padded_requests, iteration.padded_tokens) if is_replayed else lengths
    new_tokens = sum(new for new, _ in computed)
    if costs.iteration is None:
        duration_s = costs.coefficients.iteration_s(
            _attention_work(computed), new_tokens, cached_tokens, len(computed), is_replayed
        )
    else:
        duration_s = costs.iteration.iteration_s(computed)
    return IterationSample(attention_work, new_tokens, cached_tokens, len(lengths), duration_s, is_replayed)


def advance(items: list[WorkItem], iteration: Iteration) -> list[WorkItem]:
    """Take what an iteration has computed off its prompts; remove the finished ones from `items` and return
    them."""
    ended = []
    if any(tokens < item.new_tokens or item.length_class is LengthClass.LONG for item, tokens in iteration.slices):
        for item in items:
            item.is_current = False
    for item, tokens in iteration.slices:
        item.new_tokens -= tokens
        item.cached_tokens += tokens
        item.is_current = item.new_tokens > 0
        if item.new_tokens == 0:
            ended.append(item)
            items.remove(item)
    return ended


def _attention_work(lengths: Sequence[tuple[int, int]]) -> float:
    """The sum of L (L + 2 H)."""
    return float(sum(new * (new + 2 * cached) for new, cached in lengths))


def _padded(lengths: Sequence[tuple[int, int]], requests: int, tokens: int) -> list[tuple[int, int]]:
    """Return what a captured graph for `requests` of `tokens` each computes: every request is as long as that.

    Where it runs more and shorter ones, what is left of it is one more.
    """
    if len(lengths) <= requests:
        return [(tokens, cached) for _, cached in lengths] + [(tokens, 0)] * (requests - len(lengths))
    left = requests * tokens - sum(new for new, _ in lengths)
    return [*lengths, (left, 0)] if left else list(lengths)
