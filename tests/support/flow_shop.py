"""References for pipelines: the time of chunks of which as many are under way as come."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_ext.costs.flow_shop import Chunk, Stages


def makespan_s(chunks: Sequence[Chunk], stages: Stages) -> float:
    """Return the seconds from the first chunk's start to the end of the last one on the last stage.

    Equal stages by the formula of `flow_shop`, others by the recurrence, which has no closed form.
    """
    if not chunks:
        return 0.0
    if not stages.relative:
        slowest_s = max(chunk.time_s + stages.hop.time_s(chunk.tokens) for chunk in chunks)
        return sum(chunk.time_s for chunk in chunks) + (stages.count - 1) * slowest_s
    free_s = [0.0] * stages.count
    for chunk in chunks:
        handed_s = 0.0
        for stage, share in enumerate(stages.shares):
            free_s[stage] = max(free_s[stage], handed_s) + chunk.time_s * share
            handed_s = free_s[stage] + stages.hop.time_s(chunk.tokens)
    return free_s[-1]


def hop_stall_s(chunks: Sequence[Chunk], stages: Stages) -> float:
    """Return what the formula lacks at most of one prompt whose chunks do not become shorter, all but the last.

    A chunk leaves P equal times and P - 1 hops after it has entered, while the first stage needs P times for the chunks
    between: P - 1 hops are lost for every P chunks.
    """
    if not chunks:
        return 0.0
    longest_s = max(stages.hop.time_s(chunk.tokens) for chunk in chunks)
    return (len(chunks) - 1) // stages.count * (stages.count - 1) * longest_s
