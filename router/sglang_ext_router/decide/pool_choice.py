"""A request's length class, and which prefill instances it may go to: its class, seen from each instance's cache.

A prefill is short or long by its new tokens against a boundary that depends on its cached tokens. The same prompt can
therefore be short for the instance that holds most of it in its prefix cache and long for all others. A short-pool
instance is a candidate when the prompt is short there. A long-pool instance is one when the prompt is long without any
cache: a later turn of a long conversation stays where its prefix is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sglang_ext.types import LengthClass, Role

_BOTH, _LONG = Role.BOTH, Role.LONG
_SHORT_CLASS, _LONG_CLASS = LengthClass.SHORT, LengthClass.LONG


class Boundary(Protocol):
    """Describes where short prompts end. A fitted cost model gives LAPS's L_m(H); until there is one, a fixed limit
    serves."""

    def new_tokens_limit(self, cached_tokens: int) -> int:
        """Most new tokens of a short prefill whose prefix of `cached_tokens` is in the cache."""
        ...


@dataclass(frozen=True, slots=True)
class FixedBoundary:
    """The same limit for any length of cached prefix. Raises ValueError when the limit leaves no short prefill."""

    limit_tokens: int

    def __post_init__(self) -> None:
        if self.limit_tokens < 1:
            raise ValueError(f"limit_tokens must be at least 1, got {self.limit_tokens}")

    def new_tokens_limit(self, cached_tokens: int) -> int:
        return self.limit_tokens


def classify(new_tokens: int, cached_tokens: int, boundary: Boundary) -> LengthClass:
    """The class of a prefill of `new_tokens` after a cached prefix of `cached_tokens`."""
    return LengthClass.SHORT if new_tokens <= boundary.new_tokens_limit(cached_tokens) else LengthClass.LONG


def is_in_doubt(low_tokens: int, high_tokens: int, cached_tokens: int, boundary: Boundary) -> bool:
    """Return whether a prompt of `low_tokens` to `high_tokens` (cached ones included) could be of either class.

    Only then is counting its tokens exactly worth the time.
    """
    limit_tokens = boundary.new_tokens_limit(cached_tokens)
    return low_tokens - cached_tokens <= limit_tokens < high_tokens - cached_tokens


class PoolChoice(NamedTuple):
    """Class of the request, positions of its candidates, and whether another pool had to help out."""

    length_class: LengthClass
    candidates: tuple[int, ...]
    is_spilled: bool


def choose_pool(
    prompt_tokens: int,
    roles: Sequence[Role],
    cached_tokens: Sequence[int],
    boundary: Boundary,
    allow_spill: bool,
) -> PoolChoice:
    """Choose among usable prefill instances given as parallel sequences of role and cached tokens.

    The request's class is the one it has where most of it is cached. Without any candidate the instances
    with the longest cached prefix help out, if `allow_spill`; else `candidates` is empty.
    """
    best_cached = max(cached_tokens, default=0)
    length_class = classify(prompt_tokens - best_cached, best_cached, boundary)
    uncached_class = classify(prompt_tokens, 0, boundary) if best_cached else length_class
    found = []
    for i, role in enumerate(roles):
        if role is _BOTH:
            found.append(i)
        elif role is _LONG:
            if uncached_class is _LONG_CLASS:
                found.append(i)
        elif uncached_class is _SHORT_CLASS:
            found.append(i)
        else:
            cached = cached_tokens[i]
            if cached and classify(prompt_tokens - cached, cached, boundary) is _SHORT_CLASS:
                found.append(i)
    if found or not roles or not allow_spill:
        return PoolChoice(length_class, tuple(found), False)
    return PoolChoice(length_class, tuple(i for i, cached in enumerate(cached_tokens) if cached == best_cached), True)
