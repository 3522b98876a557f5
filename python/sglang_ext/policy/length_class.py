"""Whether a prefill is short or long: its new tokens against a boundary that depends on its cached tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sglang_ext.types import LengthClass


class Boundary(Protocol):
    """Where short ends. A fitted cost model gives LAPS's L_m(H); until there is one, a fixed limit serves."""

    def new_tokens_limit(self, cached_tokens: int) -> int:
        """Most new tokens of a short prefill whose prefix of `cached_tokens` is in the cache."""
        ...


@dataclass(frozen=True, slots=True)
class FixedBoundary:
    """The same limit whatever is cached. Raises ValueError when the limit leaves no short prefill."""

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
    """Whether a prompt of `low_tokens` to `high_tokens` (cached ones included) could be of either class.

    Only then is counting its tokens exactly worth the time.
    """
    limit_tokens = boundary.new_tokens_limit(cached_tokens)
    return low_tokens - cached_tokens <= limit_tokens < high_tokens - cached_tokens
