"""A prefill pipeline as a flow shop: when a prompt is through, how many a second, and chunks of equal time.

Chunks pass the stages one behind the other (Medha, section 3.3): chunk i begins on a stage when the stage has done
chunk i - 1 and the stage before has handed chunk i on,

    C[i][s] = max(C[i-1][s], C[i][s-1] + h_i) + t_i r_s,

with t_i the time of chunk i on the slowest stage, r_s what stage s takes of that, and h_i the hop from one stage to the
next. Hops occupy no stage. On P equal stages the longest path to C[n][P] goes through all chunks and takes each of its
P - 1 hops where the chunk that passes is the most expensive, so that a prompt takes

    sum t_i + (P - 1) max (t_i + h_i),

of n chunks of equal time (n + P - 1) t + (P - 1) h. The slowest stage is busy for sum t_i of each prompt, which is what
prompts that follow each other take at least.

SGLang has one chunk under way for each stage: chunk i enters when chunk i - P has left (`completions_s`). Of one
prompt, whose chunks do not become shorter, that costs only hops. Prompts that follow each other in chunks of unequal
time lose more: while a dear chunk passes all stages, the P - 1 behind it have to be as dear for the first stage to be
busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ChunkCost = Callable[[int, int], float]  # seconds of (new tokens, cached tokens)


class Hop(NamedTuple):
    """Describes what the activations of an iteration take from one stage to the next; none of the two is negative."""

    fixed_s: float = 0.0
    token_s: float = 0.0  # per new token

    @classmethod
    def over_link(cls, bytes_per_token: float, bytes_per_s: float, latency_s: float) -> Hop:
        """Over a link of its own. ValueError for a bandwidth that is not above 0, or what is negative."""
        if not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be above 0, got {bytes_per_s:g}")
        if not (bytes_per_token >= 0 and latency_s >= 0):
            raise ValueError(
                f"bytes_per_token and latency_s must be at least 0, got {bytes_per_token:g} and {latency_s:g}"
            )
        return cls(latency_s, bytes_per_token / bytes_per_s)

    def time_s(self, tokens: int) -> float:
        return self.fixed_s + self.token_s * tokens


NO_HOP = Hop()


class Chunk(NamedTuple):
    """A chunk of a prompt, or a batch: its time on the slowest stage, and its new tokens."""

    time_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a pipeline. ValueError for numbers that make none."""

    count: int = 1
    hop: Hop = NO_HOP
    relative: tuple[float, ...] = ()  # time of each stage over that of the slowest, above 0 to 1; empty: all equal

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"a pipeline has at least one stage, got {self.count}")
        if min(self.hop) < 0:
            raise ValueError(f"the time of a hop must be at least 0, got {self.hop}")
        if self.relative and (len(self.relative) != self.count or max(self.relative) != 1 or min(self.relative) <= 0):
            raise ValueError(
                f"relative times of {self.count} stages are as many numbers above 0, the largest 1: {self.relative}"
            )

    @property
    def shares(self) -> tuple[float, ...]:
        return self.relative or (1.0,) * self.count

    def passage_s(self, chunk: Chunk) -> float:
        """Seconds of a chunk through the empty pipeline."""
        return chunk.time_s * sum(self.shares) + (self.count - 1) * self.hop.time_s(chunk.tokens)


def completions_s(chunks: Sequence[Chunk], stages: Stages) -> list[float]:
    """Return when each chunk has left the last stage, with as many under way as there are stages: what SGLang takes."""
    free_s = [0.0] * stages.count  # by stage: when it has done the chunk before
    left_s: list[float] = []
    for number, chunk in enumerate(chunks):
        handed_s = left_s[number - stages.count] if number >= stages.count else 0.0
        hop_s = stages.hop.time_s(chunk.tokens)
        for stage, share in enumerate(stages.shares):
            free_s[stage] = max(free_s[stage], handed_s) + chunk.time_s * share
            handed_s = free_s[stage] + hop_s
        left_s.append(free_s[-1])
    return left_s


def prompts_per_s(chunks: Sequence[Chunk]) -> float:
    """Most prompts of these chunks a second, one behind the other, if the slowest stage never waits.

    ValueError for none.
    """
    total_s = sum(chunk.time_s for chunk in chunks)
    if not total_s > 0:
        raise ValueError("a prompt has at least one chunk, which takes time")
    return 1.0 / total_s


def equal_time_chunks(
    cost: ChunkCost,
    prompt_tokens: int,
    budget_s: float,
    *,
    page_tokens: int = 1,
    min_tokens: int = 1,
    max_tokens: int | None = None,
) -> list[Chunk]:
    """A prompt in chunks of at most `budget_s` on a stage each: fewer tokens as the prefix grows (Medha, section 3.2).

    Every chunk but the last is a multiple of `page_tokens`, and has at least `min_tokens`, at any cost. `cost`
    never falls with more new tokens. ValueError for tokens below 1.
    """
    most = prompt_tokens if max_tokens is None else max_tokens
    if min(prompt_tokens, page_tokens, min_tokens, most) < 1:
        raise ValueError("prompt_tokens, page_tokens, min_tokens and max_tokens must be at least 1")
    min_pages = -(-min_tokens // page_tokens)
    chunks: list[Chunk] = []
    done = 0
    while done < prompt_tokens:
        left = prompt_tokens - done
        tokens = left
        if left > most or cost(left, done) > budget_s:
            low, high = min_pages, max(min_pages, min(left, most) // page_tokens)
            while low < high:  # the largest number of pages within the budget is in [low, high]
                middle = (low + high + 1) // 2
                if cost(middle * page_tokens, done) <= budget_s:
                    low = middle
                else:
                    high = middle - 1
            tokens = min(left, low * page_tokens)
        chunks.append(Chunk(cost(tokens, done), tokens))
        done += tokens
    return chunks


def even_chunks(cost: ChunkCost, prompt_tokens: int, chunk_tokens: int) -> list[Chunk]:
    """A prompt in chunks of this many tokens each, the last one perhaps fewer: SGLang's chunked prefill."""
    if min(prompt_tokens, chunk_tokens) < 1:
        raise ValueError("prompt_tokens and chunk_tokens must be at least 1")
    sizes = [min(chunk_tokens, prompt_tokens - done) for done in range(0, prompt_tokens, chunk_tokens)]
    return [Chunk(cost(size, number * chunk_tokens), size) for number, size in enumerate(sizes)]
