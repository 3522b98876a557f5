"""Decides which decode instance a request goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sglang_ext.types import DecodeLoad
from sglang_ext_router.decide.draws import LeastRecent, two_positions


class DecodePolicy(Protocol):
    """Chooses among decode instances that can hold the request."""

    def choose(self, loads: Sequence[DecodeLoad], draw: float) -> int:
        """Position in `loads` (not empty) to take; `draw` in [0, 1) is the only randomness."""
        ...


def fits(load: DecodeLoad, prompt_tokens: int) -> bool:
    """Return whether the instance can ever hold a prompt of this length; what is free just now does not matter."""
    return prompt_tokens <= load.max_prompt_tokens


def freeness(load: DecodeLoad) -> float:
    """KV tokens left to each request of the batch (Tetris, "Decode choice").

    (free - reserved) / batch size, where reserved is the virtual usage of transfers under way. The quotient
    is not defined for an empty batch, which counts as one request: an idle instance is worth its free slots.
    When more is reserved than is free, dividing would make the instance with the larger batch look better, so
    the shortage is multiplied instead. An instance that holds the beginning of the prompt counts as freer, by the share
    that it holds: it saves that much of the transfer, but no memory, as what it holds may have been evicted otherwise.
    So it gets the next turn of a conversation unless another one is twice as free.
    """
    left_tokens = load.free_kv_tokens - load.reserved_tokens
    batch_size = max(1, load.batch_size)
    value = left_tokens / batch_size if left_tokens > 0 else float(left_tokens * batch_size)
    return _with_held(value, load.held_share)


def _with_held(value: float, held_share: float) -> float:
    return value * (1.0 + held_share) if value > 0 else value / (1.0 + held_share)


class Freeness:
    """Highest freeness; ties by the smaller batch, then by the draw."""

    def choose(self, loads: Sequence[DecodeLoad], draw: float) -> int:
        if len(loads) == 1:
            return 0
        best = 0
        best_freeness = float("-inf")
        best_batch = 0
        ties: list[int] | None = None
        for position, (_, free_kv_tokens, reserved_tokens, batch_size, _, held_share) in enumerate(loads):
            left_tokens = free_kv_tokens - reserved_tokens
            if batch_size > 1:
                value = left_tokens / batch_size if left_tokens > 0 else left_tokens * batch_size
            else:
                value = left_tokens
            if held_share:
                value = _with_held(value, held_share)
            if value > best_freeness or (value == best_freeness and batch_size < best_batch):
                best, best_freeness, best_batch, ties = position, value, batch_size, None
            elif value == best_freeness and batch_size == best_batch:
                if ties is None:
                    ties = [best]
                ties.append(position)
        return best if ties is None else ties[int(draw * len(ties))]


class DecodeRoundRobin:
    """Each instance in turn: the one whose last turn is longest ago."""

    def __init__(self) -> None:
        self._turns = LeastRecent()

    def choose(self, loads: Sequence[DecodeLoad], draw: float) -> int:
        return self._turns.take([load.worker_id for load in loads])


class DecodeRandomChoice:
    """Any instance with equal probability."""

    def choose(self, loads: Sequence[DecodeLoad], draw: float) -> int:
        return int(draw * len(loads))


class DecodePowerOfTwo:
    """The freer of two instances drawn at random."""

    def choose(self, loads: Sequence[DecodeLoad], draw: float) -> int:
        if len(loads) == 1:
            return 0
        first, second = two_positions(len(loads), draw)
        return first if freeness(loads[first]) >= freeness(loads[second]) else second


_POLICIES: dict[str, Callable[[], DecodePolicy]] = {
    "freeness": Freeness,
    "round_robin": DecodeRoundRobin,
    "random": DecodeRandomChoice,
    "power_of_two": DecodePowerOfTwo,
}
DECODE_POLICIES: tuple[str, ...] = tuple(_POLICIES)


def decode_policy(name: str) -> DecodePolicy:
    """A new policy of this name. Raises ValueError that lists the names."""
    if name not in _POLICIES:
        raise ValueError(f"unknown decode policy {name!r}; choose one of {', '.join(DECODE_POLICIES)}")
    return _POLICIES[name]()
