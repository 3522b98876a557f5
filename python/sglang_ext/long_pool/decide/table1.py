"""Table 1 of Tetris: prefill latency of LLaMA3-8B on A100 (TP 1), by prompt length and SP size.

Source: "Optimizing Long-context LLM Serving via Fine-grained Sequence Parallelism", section 2.4, Table 1; batch size 1,
4k meaning 4096 tokens. Measured without a cached prefix, so the fit takes c = 2d. SP 1 at 256k is out of memory.
"""

from __future__ import annotations

from sglang_ext.long_pool.decide.sp_cost import ChunkSample, SpCandidate, SpCost, fit_sp_cost

PROMPT_TOKENS = tuple(4096 << step for step in range(7))  # 4k to 256k
LATENCY_S = {
    1: (0.28, 0.57, 1.29, 3.22, 9.05, 29.20),
    2: (0.16, 0.31, 0.69, 1.67, 4.61, 14.30, 50.07),
    4: (0.13, 0.20, 0.39, 0.92, 2.43, 7.32, 24.77),
    8: (0.21, 0.24, 0.31, 0.58, 1.37, 3.96, 12.81),
    16: (0.39, 0.43, 0.46, 0.53, 0.96, 2.31, 7.02),
}
LARGEST_SIZE = max(LATENCY_S)


def samples(size: int) -> tuple[ChunkSample, ...]:
    """Return what Table 1 lists for an SP size. KeyError for a size that it does not list."""
    return tuple(ChunkSample(0, tokens, time_s) for tokens, time_s in zip(PROMPT_TOKENS, LATENCY_S[size], strict=False))


def fitted_cost(size: int) -> SpCost:
    """Return the cost of an SP size that is a power of two, fitted to Table 1 (largest relative error about 6%).

    Beyond SP 16, which the paper does not list, this continues what the table does from 8 to 16: with twice the
    instances the overhead doubles (one more ring step per instance) and the work of each halves. ValueError for a
    size that is not a power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"size: {size} is not a power of two")
    known = fit_sp_cost(samples(min(size, LARGEST_SIZE)))
    ratio = max(1.0, size / LARGEST_SIZE)
    return SpCost(
        known.a_s * ratio, known.b_s_per_token / ratio, known.c_s_per_token2 / ratio, known.d_s_per_token2 / ratio
    )


def fitted_candidates(largest_size: int = LARGEST_SIZE) -> tuple[SpCandidate, ...]:
    """Return the powers of two up to `largest_size` with their fitted costs."""
    return tuple(SpCandidate(1 << step, fitted_cost(1 << step)) for step in range(largest_size.bit_length()))
