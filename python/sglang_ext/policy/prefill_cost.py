"""What a prefill iteration costs: LAPS's compute and memory terms, and where one outgrows the other.

T = alpha * sum L(L + 2H) + (beta + gamma_w) * sum L + gamma_r * sum H + kappa, for L new tokens after H cached
ones of each request (LAPS, section 2.1; kappa, the fixed cost of an iteration, is ours).
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import NamedTuple


class CostCoefficients(NamedTuple):
    """The coefficients of the cost model in seconds; none of them is negative."""

    alpha_s: float  # attention: per unit of L * (L + 2 H)
    token_s: float  # beta + gamma_w: per new token
    read_s: float  # gamma_r: per cached token
    kappa_s: float  # per iteration

    @classmethod
    def from_throughput(cls, tokens_per_s: float, fixed_s: float) -> CostCoefficients:
        """A prior without measurements: so many new tokens per second, and a fixed cost. ValueError if it is none."""
        if not (tokens_per_s > 0 and fixed_s >= 0):
            raise ValueError(f"tokens_per_s must be above 0 and fixed_s at least 0, got {tokens_per_s} and {fixed_s}")
        return cls(0.0, 1.0 / tokens_per_s, 0.0, fixed_s)

    def iteration_s(self, attention_work: float, new_tokens: int, cached_tokens: int) -> float:
        """Seconds of an iteration with these features: sum L(L + 2H), sum L, sum H."""
        return self.alpha_s * attention_work + self.token_s * new_tokens + self.read_s * cached_tokens + self.kappa_s

    def chunk_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Seconds of an iteration that computes `new_tokens` of one request after `cached_tokens`."""
        return (
            new_tokens * (self.alpha_s * (new_tokens + 2 * cached_tokens) + self.token_s)
            + self.read_s * cached_tokens
            + self.kappa_s
        )

    def prefill_s(self, new_tokens: int, cached_tokens: int, chunk_budget_s: float) -> float:
        """Seconds to prefill a prompt in chunks of about `chunk_budget_s` on an idle instance.

        Medha (appendix A.3) looks this up in a table of simulated prefills. Here sum L(L + 2H) over the chunks of
        a prompt is that of the whole prompt, so only the cached tokens that are read again and kappa depend on the
        number of chunks, and a closed form serves.
        """
        whole_s = self.chunk_s(new_tokens, cached_tokens)
        if whole_s <= chunk_budget_s:
            return whole_s
        chunks = min(ceil(whole_s / chunk_budget_s), new_tokens)
        read_again_s = self.read_s * (cached_tokens + 0.5 * new_tokens)
        return whole_s + (chunks - 1) * (self.kappa_s + read_again_s)


def boundary_tokens(
    coefficients: CostCoefficients, write_s: float, cached_tokens: int, *, with_kappa: bool
) -> float | None:
    """L_m(H): new tokens at which compute time equals memory time; None where it never gets that far.

    Compute is alpha L(L + 2H) + beta L, memory is gamma_w L + gamma_r H (LAPS, section 2.1), plus kappa if asked.
    `write_s` is gamma_w: total times give only beta + gamma_w. The result is the positive root of
    alpha L^2 + (2 alpha H + beta - gamma_w) L - (gamma_r H + kappa) = 0, which at H = 0 and without kappa is the
    paper's max(0, (gamma_w - beta) / alpha).
    """
    alpha_s = coefficients.alpha_s
    linear = 2 * alpha_s * cached_tokens + coefficients.token_s - 2 * write_s
    constant = coefficients.read_s * cached_tokens + (coefficients.kappa_s if with_kappa else 0.0)
    root = sqrt(linear * linear + 4 * alpha_s * constant)
    if linear > 0:  # the same root, without subtracting nearly equal numbers
        return 2 * constant / (linear + root)
    return (root - linear) / (2 * alpha_s) if alpha_s > 0 else None
