"""An estimate of a prefill instance's progress, from the times at which the router saw its prefills end.

Without this an instance near the end of a large batch looks as loaded as an instance that has just begun it.
"""

from __future__ import annotations

ONE_ITERATION_TOKENS = 8192  # an instance with more works on long prompts, of whose parts the router sees no end


class PrefillProgress:
    """Estimates the progress of one instance: since its last known start it computes at its rate, at most all it had.

    So a hanging instance does not look idle: what it is sent after that counts in full. Where it had more than an
    iteration holds nothing is counted: with long prompts its rate says too little, and the estimate would draw work to
    it.
    """

    __slots__ = ("_since_s", "_tokens")

    def __init__(self) -> None:
        self._since_s = 0.0
        self._tokens = 0

    def begin(self, now_s: float, pending_tokens: int) -> None:
        """A prefill has ended there, or it was idle and has been sent one; now it has this many tokens left."""
        self._since_s = now_s
        self._tokens = pending_tokens if pending_tokens <= ONE_ITERATION_TOKENS else 0

    def computed_tokens(self, now_s: float, tokens_per_s: float) -> int:
        """Return how many of its pending tokens it should have computed by now; never negative."""
        tokens = (now_s - self._since_s) * tokens_per_s
        if tokens <= 0:
            return 0
        return int(tokens) if tokens < self._tokens else self._tokens
