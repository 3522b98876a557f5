"""A request's length class, and which instances it may go to: its class, seen from each instance's cache.

The class of a prefill is decided by its new tokens, by default against one boundary between short and long. The same
prompt can therefore be short for the instance that holds most of it in its prefix cache and long for all others. An
instance is a candidate when it serves a class between the prompt's class there and its class without any cache: a
later turn of a long conversation stays where its prefix is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sglang_ext.types import LengthClass, Role

_LAST = 1 << 30  # beyond any class


class Boundary(Protocol):
    """Describes where each class ends; classes are numbered from 0, the smallest."""

    def class_of(self, new_tokens: int, cached_tokens: int) -> int:
        """Return the class of a prefill of `new_tokens` after a cached prefix of `cached_tokens`."""
        ...


@dataclass(frozen=True, slots=True)
class FixedBoundary:
    """The same limit between short and long for any length of cached prefix.

    Raises ValueError when the limit leaves no short prefill.
    """

    limit_tokens: int

    def __post_init__(self) -> None:
        if self.limit_tokens < 1:
            raise ValueError(f"limit_tokens must be at least 1, got {self.limit_tokens}")

    def class_of(self, new_tokens: int, cached_tokens: int) -> int:
        return 0 if new_tokens <= self.limit_tokens else 1


@dataclass(frozen=True, slots=True)
class FixedBounds:
    """Any number of classes: the upper bounds of all but the last, ascending."""

    limits_tokens: tuple[int, ...]

    def class_of(self, new_tokens: int, cached_tokens: int) -> int:
        return bisect_left(self.limits_tokens, new_tokens)


class ServedClasses(NamedTuple):
    """The classes that an instance serves: from `first` to `last`, both included."""

    first: int
    last: int


EVERY_CLASS = ServedClasses(0, _LAST)
_OF_ROLE = {Role.SHORT: ServedClasses(0, 0), Role.LONG: ServedClasses(1, _LAST)}


def classes_of_role(role: Role) -> ServedClasses:
    """Return what an instance serves whose own classes are not given."""
    return _OF_ROLE.get(role, EVERY_CLASS)


def classify(new_tokens: int, cached_tokens: int, boundary: Boundary) -> LengthClass:
    """Return whether a prefill of `new_tokens` after a cached prefix of `cached_tokens` is short or long."""
    return LengthClass.LONG if boundary.class_of(new_tokens, cached_tokens) else LengthClass.SHORT


def is_in_doubt(low_tokens: int, high_tokens: int, cached_tokens: int, boundary: Boundary) -> bool:
    """Return whether a prompt of `low_tokens` to `high_tokens` (cached ones included) could be of several classes.

    Only then is counting its tokens exactly worth the time.
    """
    low = boundary.class_of(low_tokens - cached_tokens, cached_tokens)
    return low != boundary.class_of(high_tokens - cached_tokens, cached_tokens)


class PoolChoice(NamedTuple):
    """Number of the request's class, positions of its candidates, and whether another pool had to help out."""

    class_number: int
    candidates: tuple[int, ...]
    is_spilled: bool


def choose_pool(
    prompt_tokens: int,
    served: Sequence[ServedClasses],
    cached_tokens: Sequence[int],
    boundary: Boundary,
    allow_spill: bool,
) -> PoolChoice:
    """Choose among usable prefill instances given as parallel sequences of served classes and cached tokens.

    The request's class is the one it has where most of it is cached. Without any candidate instances of the nearest
    classes help out, those with the longest cached prefix, if `allow_spill`; else `candidates` is empty.
    """
    best_cached = max(cached_tokens, default=0)
    class_number = boundary.class_of(prompt_tokens - best_cached, best_cached)
    uncached_class = boundary.class_of(prompt_tokens, 0) if best_cached else class_number
    found = []
    for i, (first, last) in enumerate(served):
        if first <= uncached_class:
            if uncached_class <= last:
                found.append(i)
            else:
                cached = cached_tokens[i]
                if cached and boundary.class_of(prompt_tokens - cached, cached) <= last:
                    found.append(i)
    if found or not served or not allow_spill:
        return PoolChoice(class_number, tuple(found), False)
    nearest = _nearest(uncached_class, served)
    best_cached = max([cached_tokens[i] for i in nearest])
    return PoolChoice(class_number, tuple([i for i in nearest if cached_tokens[i] == best_cached]), True)


def choose_decode_pool(class_number: int, served: Sequence[ServedClasses], allow_spill: bool) -> Sequence[int]:
    """Return the positions of the decode instances that serve a class; without any, if `allow_spill`, the nearest."""
    found = [i for i, (first, last) in enumerate(served) if first <= class_number <= last]
    return found if found or not served or not allow_spill else _nearest(class_number, served)


def _nearest(class_number: int, served: Sequence[ServedClasses]) -> list[int]:
    """Return the positions of the instances whose classes are least far from this class."""
    distances = [max(class_number - last, first - class_number, 0) for first, last in served]
    smallest = min(distances)
    return [i for i, distance in enumerate(distances) if distance == smallest]
