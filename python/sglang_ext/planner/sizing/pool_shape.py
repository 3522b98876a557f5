"""Describes what the devices of a pool should be to a long prompt: a pipeline of stages, or a ring that shares every
chunk.

On a ring (CDSP) every member computes its share of each chunk, and each chunk costs again what does not shrink with the
members: the fixed cost, and keys and values on their way round where attention does not hide them. A pipeline divides
the layers, so that little but activations goes from one to the next and each stage has the fixed cost of its layers
only; but it is filled once for each prompt, which costs P - 1 chunks (`flow_shop`). So rings want large chunks and
pipelines small ones.

Both are asked for the same wait of a short prompt: chunks of `chunk_s` on a ring or a lone instance, and of
`stage_share(P)` of it on each stage of a pipeline, as LAPS has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from sglang_ext.costs.engine_profile import PipelineCosts
from sglang_ext.costs.flow_shop import Chunk, ChunkCost, completions_s, equal_time_chunks, even_chunks
from sglang_ext.laps.decide.packed_batch import stage_share
from sglang_ext.long_pool.decide.sp_cost import SpCost, TabulatedCost

LIKE = 0.05  # times that differ by less are alike: then the rate decides
_PROMPTS_IN_A_ROW = 8
_MIN_CHUNK_TOKENS = 64  # LAPS's
_MIN_RING_TOKENS = 512  # the coordinator's


class PoolShape(StrEnum):
    """Describes how the devices of a pool serve a prompt."""

    ALONE = "instances apart"
    PIPELINE = "pipeline"
    RING = "ring"


class RingLinks(NamedTuple):
    """Describes what goes round between the members of a ring."""

    kv_bytes_per_token: int
    bytes_per_s: float
    step_s: float  # latency of a step, in each layer
    layers: int

    def round_s(self, tokens: int, size: int) -> float:
        """Seconds until every one of `size` members has seen the keys and values of all tokens."""
        moved_bytes = self.kv_bytes_per_token * tokens * (size - 1) / size
        return moved_bytes / self.bytes_per_s + self.layers * (size - 1) * self.step_s


def ring_cost(single: SpCost, size: int, links: RingLinks) -> ChunkCost:
    """A chunk on a ring that was not measured, from its cost on one instance.

    Each member has 1 / size of the tokens and of the attention, and the fixed cost in full. Attention to what comes
    from others hides the way of their keys and values.
    """

    def chunk_s(new_tokens: int, cached_tokens: int) -> float:
        attention_s = new_tokens * (single.c_s_per_token2 * cached_tokens + single.d_s_per_token2 * new_tokens) / size
        exposed_s = max(0.0, links.round_s(cached_tokens + new_tokens, size) - attention_s * (size - 1) / size)
        return single.a_s + single.b_s_per_token * new_tokens / size + attention_s + (exposed_s if size > 1 else 0.0)

    return chunk_s


def measured_cost(cost: SpCost | TabulatedCost) -> ChunkCost:
    """A chunk on an SP size that was measured."""
    return lambda new_tokens, cached_tokens: cost.predict_s(cached_tokens, new_tokens)


class ShapeCosts(NamedTuple):
    """Describes what a chunk costs on the devices of a pool, each way."""

    devices: int
    single: ChunkCost  # on one of them
    pipeline: PipelineCosts  # of as many stages
    ring: ChunkCost


class ShapeQuestion(NamedTuple):
    """A prompt, and how long a chunk may take: or of how many tokens every chunk is, in any shape."""

    prompt_tokens: int
    chunk_s: float
    chunk_tokens: int | None = None


class ShapeTimes(NamedTuple):
    """Describes what a shape makes of a prompt."""

    chunks: tuple[Chunk, ...]
    prompt_s: float  # by itself, from its start to its first token
    prompts_per_s: float  # one behind the other
    lost_s: (
        float  # of `prompt_s`: filling a pipeline and its hops; what every chunk of a ring or an instance costs again
    )

    @property
    def longest_chunk_s(self) -> float:
        return max(chunk.time_s for chunk in self.chunks)


class ShapeChoice(NamedTuple):
    """The better shape, what each takes, and why."""

    devices: int
    prompt_tokens: int
    better: PoolShape
    times: Mapping[PoolShape, ShapeTimes]
    reason: str


def choose_shape(costs: ShapeCosts, question: ShapeQuestion) -> ShapeChoice:
    """The shape with the sooner first token; of two that are alike within 5% the shape that carries more prompts.

    Instances apart, each with prompts of its own, where the prompt is one chunk on one of them, or neither is sooner.
    ValueError for tokens below 1, a time that is not above 0, or fewer than two devices.
    """
    if costs.devices < 2:
        raise ValueError(f"a pipeline or a ring has at least two devices, got {costs.devices}")
    if not question.chunk_s > 0:
        raise ValueError(f"chunk_s must be above 0, got {question.chunk_s:g}")
    apart = _one_after_the_other(costs.single, question, _MIN_CHUNK_TOKENS)
    apart = apart._replace(prompts_per_s=costs.devices * apart.prompts_per_s)
    times = {
        PoolShape.ALONE: apart,
        PoolShape.PIPELINE: _through_stages(costs.pipeline, question),
        PoolShape.RING: _one_after_the_other(costs.ring, question, _MIN_RING_TOKENS),
    }
    pipeline, ring = times[PoolShape.PIPELINE], times[PoolShape.RING]
    sooner, later = sorted((PoolShape.PIPELINE, PoolShape.RING), key=lambda shape: times[shape].prompt_s)
    better = sooner
    are_alike = times[later].prompt_s <= (1 + LIKE) * times[sooner].prompt_s
    if are_alike:
        better = max((sooner, later), key=lambda shape: times[shape].prompts_per_s)
    if len(apart.chunks) == 1 or times[better].prompt_s >= apart.prompt_s:
        better = PoolShape.ALONE
    return ShapeChoice(
        *(costs.devices, question.prompt_tokens, better, times),
        _reason(apart, pipeline, ring, better, are_alike) + _overtime(ring, question),
    )


def _overtime(ring: ShapeTimes, question: ShapeQuestion) -> str:
    """The shortest chunk that the coordinator cuts may take longer than was asked."""
    if question.chunk_tokens is not None or ring.longest_chunk_s <= (1 + LIKE) * question.chunk_s:
        return ""
    return f"; its chunks, of {_MIN_RING_TOKENS} tokens at least, take up to {_s(ring.longest_chunk_s)}"


def _reason(apart: ShapeTimes, pipeline: ShapeTimes, ring: ShapeTimes, better: PoolShape, are_alike: bool) -> str:
    parts = (
        f"the pipeline is filled and its hops pass in {_s(pipeline.lost_s)} of {_s(pipeline.prompt_s)}, "
        f"{len(ring.chunks)} chunk{'s' * (len(ring.chunks) > 1)} of the ring cost {_s(ring.lost_s)} of "
        f"{_s(ring.prompt_s)} again"
    )
    if better is PoolShape.ALONE:
        begun = "it is one chunk on one instance" if len(apart.chunks) == 1 else "one instance is as soon"
        return f"{begun}, and apart they carry {60 * apart.prompts_per_s:.3g}/min: {parts}"
    if are_alike:
        return f"alike within {LIKE:.0%}, it carries more prompts: {parts}"
    return parts


def _s(time_s: float) -> str:
    return f"{time_s:.3g} s"


def _through_stages(costs: PipelineCosts, question: ShapeQuestion) -> ShapeTimes:
    stages = costs.stages
    budget_s = question.chunk_s * stage_share(stages.count)
    chunks = _cut(costs.stage_s, question, budget_s, _MIN_CHUNK_TOKENS)
    left_s = completions_s(chunks * _PROMPTS_IN_A_ROW, stages)
    prompt_s = left_s[len(chunks) - 1]
    row_s = left_s[-1] - prompt_s
    return ShapeTimes(
        tuple(chunks),
        prompt_s,
        (_PROMPTS_IN_A_ROW - 1) / row_s,
        max(0.0, prompt_s - sum(chunk.time_s for chunk in chunks)),
    )


def _one_after_the_other(cost: ChunkCost, question: ShapeQuestion, min_tokens: int) -> ShapeTimes:
    chunks = _cut(cost, question, question.chunk_s, min_tokens)
    prompt_s = sum(chunk.time_s for chunk in chunks)
    return ShapeTimes(tuple(chunks), prompt_s, 1.0 / prompt_s, min(prompt_s, len(chunks) * cost(1, 0)))


def _cut(cost: ChunkCost, question: ShapeQuestion, budget_s: float, min_tokens: int) -> list[Chunk]:
    if question.chunk_tokens is not None:
        return even_chunks(cost, question.prompt_tokens, question.chunk_tokens)
    return equal_time_chunks(cost, question.prompt_tokens, budget_s, min_tokens=min_tokens)
