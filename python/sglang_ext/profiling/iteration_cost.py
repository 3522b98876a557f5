"""What a forward iteration of prefill was measured to cost, and what a request costs outside of iterations.

The papers' forms leave out what some engines show: work per request of a batch (an attention kernel that takes one
request at a time) and work quadratic in the cached tokens (torch's attention pads queries to the whole prompt). A
simulation of a measured instance needs them; a planner or policy goes on with its own form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class IterationCost(NamedTuple):
    """Coefficients of the duration of one iteration; none of them is negative. L: new tokens, C: cached tokens."""

    fixed_s: float
    request_s: float  # per request of the batch
    token_s: float  # per L
    read_s: float  # per C
    cached2_s: float  # per C^2
    cached_new_s: float  # per C L
    new2_s: float  # per L^2

    def iteration_s(self, lengths: Sequence[tuple[int, int]]) -> float:
        """Seconds of an iteration with these (new, cached) tokens of each request."""
        work = features(lengths)
        return sum(coefficient * feature for coefficient, feature in zip(self, work, strict=True))


def features(lengths: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    """What each coefficient of `IterationCost` is multiplied by."""
    return (
        1.0,
        float(len(lengths)),
        float(sum(new for new, _ in lengths)),
        float(sum(cached for _, cached in lengths)),
        float(sum(cached * cached for _, cached in lengths)),
        float(sum(cached * new for new, cached in lengths)),
        float(sum(new * new for new, _ in lengths)),
    )


class FrontEnd(NamedTuple):
    """Time of a request outside of the scheduler's iterations, on an idle instance: it delays, and occupies nobody.

    Linear in the prompt's tokens P: HTTP, queues between processes and the scheduler's intake before its first
    iteration; the way of the first token to the client after its last one, the KV transfer to decode included where
    that was measured. No coefficient is negative.
    """

    before_s: float
    before_token_s: float  # per P
    after_s: float
    after_token_s: float  # per P

    def entry_delay_s(self, prompt_tokens: int) -> float:
        """Seconds from the client's sending to the request being in the scheduler's queue."""
        return self.before_s + self.before_token_s * prompt_tokens

    def return_delay_s(self, prompt_tokens: int) -> float:
        """Seconds from the end of the last iteration to the first token at the client."""
        return self.after_s + self.after_token_s * prompt_tokens
