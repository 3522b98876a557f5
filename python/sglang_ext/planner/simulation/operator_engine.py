"""Prefill times of a model on H200, put together from measured operator times.

On one device a chunk of L tokens behind C others takes, in each layer, the four matrix products of L rows, attention,
and the operations on memory between them; at the end one row of the output matrix is read.

- Products between two measured numbers of rows lie on the straight line, beyond the last they grow with the rows.
- Attention was measured for whole prompts: a chunk's is that of C + L tokens less that of C, plus one kernel's start.
  Beyond 16,384 tokens it grows with the square.
- Operations on memory: two norms with the residual (8 reads or writes of the hidden state), rotary embedding and KV
  write (2 of what attention reads), activation (3 of the intermediate state), at 80% of 4.8 TB/s, 3 us each at least.

On s devices each has L / s rows and 1 / s of the attention, and the keys and values of all tokens pass by as in a ring:
the time of an all-gather of them, measured on up to 8 devices of a node. Attention hides it, but for the block of keys
and values that a device has from the beginning.

With tensor parallelism the shape is that of one device's share, and each layer ends its two halves with an all-reduce
of the hidden state. On s instances each device shares a ring with those of its rank.

An engine adds the host's time (`host_times.py`) to every iteration and chunk, and to a request's way. An iteration of
one instance replays a captured graph, unless the name ends with `-eager`; a chunk on several is launched layer by
layer. With `-bare` there is no host time, and short prompts are too fast.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from sglang_ext.costs.engine_profile import FrontEnd
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.long_pool.decide.sp_cost import ChunkSample, SpCandidate, fit_sp_cost
from sglang_ext.planner.simulation.h200_operators import (
    GATHER_MS,
    GATHERED_ELEMENTS,
    KERNEL_S,
    MEMORY_BYTES_PER_S,
    PROMPT_TOKENS,
    REDUCE_MS,
    REDUCED_ELEMENTS,
    ROWS,
    SHAPES,
    ModelShape,
)
from sglang_ext.planner.simulation.host_times import H200_HOST, NO_HOST, HostTimes

ELEMENT_BYTES = 2
LARGEST_SIZE = 8
OPERATOR_PREFIX = "h200-"
EAGER, BARE = "-eager", "-bare"
# What the cost models are fitted to: prompts and later chunks up to 256K tokens.
FITTED_NEW_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
FITTED_CACHED_TOKENS = (0, 8192, 32768, 131072)
# And what one instance's model is fitted to: prompts that share iterations are short.
FITTED_PROMPT_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class OperatorModel(NamedTuple):
    """A model whose operators were measured, and what the host adds to them."""

    name: str
    shape: ModelShape
    host: HostTimes = NO_HOST
    is_eager: bool = False  # an iteration of one instance replays no graph

    def chunk_s(self, size: int, cached_tokens: int, new_tokens: int) -> float:
        """Seconds of a chunk of `new_tokens` behind `cached_tokens` on `size` devices together, without the host's."""
        shape = self.shape
        rows = -(-new_tokens // size)
        local_s = _product_s(shape, rows) + _memory_s(shape, rows) + _reduce_s(shape, rows)
        attention_s = _attention_s(shape, cached_tokens, new_tokens) / size
        ring_s = _ring_s(shape, cached_tokens + new_tokens, size)
        exposed_s = max(0.0, ring_s - attention_s * (size - 1) / size)
        output_s = KERNEL_S + ELEMENT_BYTES * shape.vocabulary_size * shape.hidden_size / MEMORY_BYTES_PER_S
        return shape.layers * (local_s + attention_s + exposed_s) + output_s

    def iteration_s(self, size: int, cached_tokens: int, new_tokens: int) -> float:
        """Seconds of the same as an iteration of its own, with the host's time."""
        device_s = self.chunk_s(size, cached_tokens, new_tokens)
        is_eager = self.is_eager or size > 1
        return self.host.iteration_s(device_s, self.shape.layers, self.shape.tp, 1, is_eager=is_eager)

    def front_end(self) -> FrontEnd | None:
        """Return what a request waits for outside of prefill: decode's first step is part of it. None: no host time."""
        host = self.host
        if host == NO_HOST:
            return None
        back_s = host.way_s / 2 + self.chunk_s(1, 0, 1) + host.reply_s
        return FrontEnd(host.front_s + host.way_s / 2, 0.0, back_s, host.transfer_s_per_byte * self.kv_bytes_per_token)

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the KV of a token on all devices of an instance."""
        shape = self.shape
        return 2 * ELEMENT_BYTES * shape.layers * shape.kv_heads * shape.tp * shape.head_size

    def attention_s(self, cached_tokens: int, new_tokens: int) -> float:
        """Seconds of a layer's attention, as one prompt, on one device."""
        return _attention_s(self.shape, cached_tokens, new_tokens)

    def samples(self, size: int) -> tuple[ChunkSample, ...]:
        """The chunks that the cost of an SP size is fitted to."""
        return tuple(
            ChunkSample(cached, new, self.iteration_s(size, cached, new))
            for cached in FITTED_CACHED_TOKENS
            for new in FITTED_NEW_TOKENS
            if new >= FITTED_NEW_TOKENS[0] * size
        )

    def candidates(self, largest_size: int) -> tuple[SpCandidate, ...]:
        """SP sizes that are powers of two, up to `largest_size` and a node of 8 devices, with their fitted costs
        (Tetris, Eq. 1)."""
        sizes = [1 << step for step in range(min(largest_size, LARGEST_SIZE // self.shape.tp).bit_length())]
        return tuple(SpCandidate(size, fit_sp_cost(self.samples(size))) for size in sizes)

    def coefficients(self) -> CostCoefficients:
        """LAPS's model of one instance, without a cost of reading cached tokens in addition to attention."""
        samples = [ChunkSample(0, new, self.iteration_s(1, 0, new)) for new in FITTED_PROMPT_TOKENS]
        cost = fit_sp_cost(samples)
        return CostCoefficients(cost.d_s_per_token2, cost.b_s_per_token, 0.0, cost.a_s, self.host.request_s)


OPERATOR_MODELS = {OPERATOR_PREFIX + name: OperatorModel(name, shape, H200_HOST) for name, shape in SHAPES.items()}


def operator_model(name: str) -> OperatorModel | None:
    """Return the engine of this name, which may end with EAGER or BARE; None: there is none."""
    model = OPERATOR_MODELS.get(name.removesuffix(EAGER).removesuffix(BARE))
    if model is None or name.endswith(BARE + EAGER):
        return None
    if name.endswith(BARE):
        return model._replace(host=NO_HOST)
    return model._replace(is_eager=name.endswith(EAGER))


def _product_s(shape: ModelShape, rows: int) -> float:
    if rows >= ROWS[-1]:
        return 1e-3 * shape.product_ms[-1] * rows / ROWS[-1]
    return 1e-3 * _between(ROWS, shape.product_ms, rows)


def _memory_s(shape: ModelShape, rows: int) -> float:
    attended = shape.head_size * (shape.heads + 2 * shape.kv_heads)
    norm, rotary, activation = 4 * shape.hidden_size, 2 * attended, 3 * shape.intermediate_size

    def time_s(elements: int) -> float:
        return max(KERNEL_S, ELEMENT_BYTES * rows * elements / MEMORY_BYTES_PER_S)

    return 2 * time_s(norm) + time_s(rotary) + time_s(activation)


def _reduce_s(shape: ModelShape, rows: int) -> float:
    """Return the time of a layer's two all-reduces."""
    if shape.tp == 1:
        return 0.0
    elements = shape.hidden_size * rows
    if elements >= REDUCED_ELEMENTS[-1]:
        return 2e-3 * REDUCE_MS[shape.tp][-1] * elements / REDUCED_ELEMENTS[-1]
    return 2e-3 * _between(REDUCED_ELEMENTS, REDUCE_MS[shape.tp], elements)


def _attention_s(shape: ModelShape, cached_tokens: int, new_tokens: int) -> float:
    whole_s = _prompt_attention_s(shape, cached_tokens + new_tokens)
    if cached_tokens == 0:
        return whole_s
    start_s = 1e-3 * shape.attention_ms[0]
    return whole_s - _prompt_attention_s(shape, cached_tokens) + start_s


def _prompt_attention_s(shape: ModelShape, tokens: int) -> float:
    if tokens >= PROMPT_TOKENS[-1]:
        return 1e-3 * shape.attention_ms[-1] * (tokens / PROMPT_TOKENS[-1]) ** 2
    return 1e-3 * _between(PROMPT_TOKENS, shape.attention_ms, tokens)


def _ring_s(shape: ModelShape, tokens: int, size: int) -> float:
    """Time until each device has seen the keys and values of all tokens of a layer."""
    if size == 1:
        return 0.0
    elements = 2 * shape.head_size * shape.kv_heads * tokens
    if elements >= GATHERED_ELEMENTS[-1]:
        return 1e-3 * GATHER_MS[size][-1] * elements / GATHERED_ELEMENTS[-1]
    return 1e-3 * _between(GATHERED_ELEMENTS, GATHER_MS[size], elements)


def _between(points: Sequence[int], values: Sequence[float], at: int) -> float:
    """The value on the line between the two nearest points; the first value before the first point."""
    upper = bisect_left(points, at)
    if upper == 0:
        return values[0]
    low, high = points[upper - 1], points[upper]
    share = (at - low) / (high - low)
    return (1 - share) * values[upper - 1] + share * values[upper]
