"""Prefill rate of an instance from the counters in its load reports: uncached tokens per busy second."""

from __future__ import annotations

PRIOR_TOKENS_PER_S = 2000.0
MEMORY_S = 30.0  # busy time after which old observations count half


class PrefillRate:
    """Follows the instance's running totals; stays at the prior for an engine that does not report them."""

    def __init__(self) -> None:
        self._last_tokens: int | None = None
        self._last_busy_us = 0
        self._tokens = 0.0
        self._busy_s = 0.0
        self.tokens_per_s = PRIOR_TOKENS_PER_S

    def observe(self, total_tokens: int, total_busy_us: int) -> None:
        """Take the totals of a report; totals that went back mean that the instance was restarted."""
        last, last_us = self._last_tokens, self._last_busy_us
        self._last_tokens, self._last_busy_us = total_tokens, total_busy_us
        if last is None or total_tokens < last or total_busy_us <= last_us:
            return
        self._tokens += total_tokens - last
        self._busy_s += (total_busy_us - last_us) / 1e6
        if self._tokens > 0:
            self.tokens_per_s = self._tokens / self._busy_s
        if self._busy_s > MEMORY_S:
            self._busy_s *= 0.5
            self._tokens *= 0.5
