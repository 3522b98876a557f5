"""Describes which points are measured: chunks of L new tokens after C cached ones, and batches of B prompts of L
tokens.

By default powers of two (powers of four for C), as far as the instance runs them in one iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SHORTEST_TOKENS = 8
LONGEST_BATCHED_TOKENS = 256  # LAPS's grid of short prefills
LARGEST_BATCH = 64
FIRST_CACHED_TOKENS = 256


class Point(NamedTuple):
    """One iteration: `requests` prompts of `new_tokens` each, after `cached_tokens` each, on `sp_size` instances."""

    cached_tokens: int
    new_tokens: int
    requests: int = 1
    sp_size: int = 1

    @property
    def prompt_tokens(self) -> int:
        return self.cached_tokens + self.new_tokens

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(new, cached) tokens of each request."""
        return [(self.new_tokens, self.cached_tokens)] * self.requests

    def __str__(self) -> str:
        if self.requests > 1:
            return f"{self.requests} prompts of {self.new_tokens} tokens"
        return f"{self.new_tokens} tokens after {self.cached_tokens} cached ones"


class PointLimits(NamedTuple):
    """Describes what an instance runs in one iteration."""

    chunk_tokens: int | None  # most new tokens of an iteration; None: no limit
    prompt_tokens: int  # most tokens of a prompt: context and KV capacity
    kv_tokens: int
    page_tokens: int  # a cached prefix is a multiple of this
    requests: int


class PointError(ValueError):
    """A point that was asked for cannot be measured; the text is one line that names the option."""


class AskedPoints(NamedTuple):
    """Describes what the user asks for; None leaves it to the default."""

    new_tokens: Sequence[int] | None = None
    cached_tokens: Sequence[int] | None = None
    batch_tokens: Sequence[int] | None = None
    batch_sizes: Sequence[int] | None = None


def choose_points(asked: AskedPoints, limits: PointLimits) -> list[Point]:
    """The points, by cached tokens; batches, which have none, last.

    A point of the defaults that the instance cannot run in one iteration is left out; PointError for a length or a
    size that was asked for and cannot be run at all, or when nothing is left.
    """
    _check(asked, limits)
    longest = longest_chunk(limits)
    chunks = asked.new_tokens or _doubling(SHORTEST_TOKENS, longest)
    cached = asked.cached_tokens if asked.cached_tokens is not None else _cached(limits, min(chunks))
    points = [
        Point(before, new)
        for before in sorted(set(cached))
        for new in sorted(set(chunks))
        if before + new <= limits.prompt_tokens
    ]
    if not points:
        raise PointError(f"no point is left: a prompt has at most {limits.prompt_tokens} tokens on this instance")
    short = asked.batch_tokens or _doubling(SHORTEST_TOKENS, min(longest, LONGEST_BATCHED_TOKENS))
    sizes = asked.batch_sizes if asked.batch_sizes is not None else _doubling(2, min(limits.requests, LARGEST_BATCH))
    points += [
        Point(0, new, requests)
        for new in sorted(set(short))
        for requests in sorted(set(sizes))
        if requests > 1 and batch_refusal(new, requests, limits) is None
    ]
    return points


def longest_chunk(limits: PointLimits) -> int:
    """Most new tokens of one prompt in one iteration."""
    return limits.prompt_tokens if limits.chunk_tokens is None else min(limits.chunk_tokens, limits.prompt_tokens)


def batch_refusal(new_tokens: int, requests: int, limits: PointLimits) -> str | None:
    """Return why this batch does not run in one iteration; None if it does."""
    if requests > limits.requests:
        return f"the instance runs at most {limits.requests} requests at a time"
    tokens = new_tokens * requests
    if limits.chunk_tokens is not None and tokens > limits.chunk_tokens:
        return f"chunked prefill cuts {tokens} tokens: --chunked-prefill-size of the instance is {limits.chunk_tokens}"
    if tokens > limits.kv_tokens:
        return f"its KV cache holds {limits.kv_tokens} tokens"
    return None


def _check(asked: AskedPoints, limits: PointLimits) -> None:
    for option, values, least in (
        ("points.new_tokens", asked.new_tokens, 1),
        ("points.cached_tokens", asked.cached_tokens, 0),
        ("points.batch_tokens", asked.batch_tokens, 1),
        ("points.batch_sizes", asked.batch_sizes, 1),
    ):
        for value in values or ():
            if value < least:
                raise PointError(f"{option} must be at least {least}, got {value}")
    longest_new = max(asked.new_tokens or (0,))
    if limits.chunk_tokens is not None and longest_new > limits.chunk_tokens:
        raise PointError(
            f"points.new_tokens {longest_new}: chunked prefill cuts it, --chunked-prefill-size of the instance is "
            f"{limits.chunk_tokens}"
        )
    for cached in asked.cached_tokens or ():
        if cached % limits.page_tokens:
            raise PointError(f"points.cached_tokens {cached} is not a multiple of the page size, {limits.page_tokens}")
        for new in asked.new_tokens or (1,):
            if cached + new > limits.prompt_tokens:
                raise PointError(
                    f"points.cached_tokens {cached} with {new} new ones: a prompt has at most {limits.prompt_tokens} "
                    "tokens "
                    "on this instance (context length and KV cache)"
                )
    if asked.batch_tokens and asked.batch_sizes:
        min_batch = min(asked.batch_tokens), max(2, min(asked.batch_sizes))
        reason = batch_refusal(*min_batch, limits)
        if max(asked.batch_sizes) > 1 and reason is not None:
            raise PointError(f"points.batch_sizes {min_batch[1]} of points.batch_tokens {min_batch[0]}: {reason}")


def _doubling(first: int, last: int) -> list[int]:
    """Powers of two times `first` up to `last`, and `last`."""
    values = []
    value = first
    while value < last:
        values.append(value)
        value *= 2
    return [*values, last] if last >= 1 else values


def _cached(limits: PointLimits, min_new_tokens: int) -> list[int]:
    """0 and powers of four up to what leaves room for the shortest chunk, in whole pages."""
    values = [0]
    value = FIRST_CACHED_TOKENS
    while value + min_new_tokens <= limits.prompt_tokens:
        values.append(value // limits.page_tokens * limits.page_tokens)
        value *= 4
    return values
