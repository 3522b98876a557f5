"""Decides which prefill instance of its pool a request goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sglang_ext.types import PrefillLoad
from sglang_ext_router.decide.draws import LeastRecent, two_positions

_MOST_HELPER_WAIT = 0.5  # of what the request would wait in its own pool


class PrefillPolicy(Protocol):
    """Chooses among the prefill instances of a pool."""

    def choose(self, loads: Sequence[PrefillLoad], new_prompt_tokens: int, draw: float, price: float = 0.0) -> int:
        """Position in `loads` (not empty) of the instance to take.

        `new_prompt_tokens` is the length of the newly arrived prompt, what is cached included (each load says
        how much of it that instance has); `draw` in [0, 1) is the only randomness. `price`: seconds by which a
        second of an instance's time delays others.
        """
        ...


def predicted_wait_s(load: PrefillLoad) -> float:
    """Time until the instance has worked off what it has: its uncached tokens, less what is computed, over its rate.

    Without a rate it is never done, unless it has nothing to do.
    """
    left_tokens = load.pending_tokens - load.computed_tokens
    if load.tokens_per_s > 0:
        return left_tokens / load.tokens_per_s
    return float("inf") if left_tokens > 0 else 0.0


def predicted_end_s(load: PrefillLoad, new_prompt_tokens: int) -> float:
    """Time until the instance would have ended this prefill, too. Infinite without a rate."""
    if load.tokens_per_s <= 0:
        return float("inf")
    # The engine computes at least the last token, however much is cached.
    own_tokens = max(1, new_prompt_tokens - load.cached_tokens)
    return (load.pending_tokens - load.computed_tokens + own_tokens) / load.tokens_per_s


def choose_helper(
    own: PrefillLoad, others: Sequence[PrefillLoad], new_prompt_tokens: int, longest_wait_s: float, draw: float
) -> int | None:
    """Position in `others`, instances of the other pool, of the instance that serves the request instead of `own`.

    Pools keep classes apart, and that must not cost more than it brings: a request leaves its pool when `own`, the
    choice there, would keep it waiting for more than `longest_wait_s`, and the best of the others less than half as
    long, so that two crowded pools do not swap their work. None if it stays.
    """
    own_s = predicted_wait_s(own)
    if own_s <= longest_wait_s or not others:
        return None
    helper = _PREDICTED_WAIT.choose(others, new_prompt_tokens, draw)
    helper_s = predicted_wait_s(others[helper])
    if helper_s >= _MOST_HELPER_WAIT * own_s:
        return None
    # What is cached at the own instance may be worth the longer wait.
    is_sooner = predicted_end_s(others[helper], new_prompt_tokens) < predicted_end_s(own, new_prompt_tokens)
    return helper if is_sooner else None


class PredictedWait:
    """Least delay for this prefill and for others: wait + (1 + price) * own time is lowest.

    Wait and own time are (pending - computed) / rate and (prompt - cached) / rate. Prefix affinity is part of the
    formula: a cached prefix is worth the time that it saves this prefill and those that arrive behind it. Ties go
    to the fewest requests in flight, then by the draw, so that an idle pool is not served by its first instance
    alone.
    """

    def choose(self, loads: Sequence[PrefillLoad], new_prompt_tokens: int, draw: float, price: float = 0.0) -> int:
        if len(loads) == 1:
            return 0
        weight = 1.0 + price
        best = 0
        best_s = float("inf")
        best_in_flight = -1
        ties: list[int] | None = None
        for position, (_, pending_tokens, in_flight, cached_tokens, tokens_per_s, computed_tokens) in enumerate(loads):
            if tokens_per_s > 0:
                # The engine computes at least the last token, however much is cached.
                own_tokens = new_prompt_tokens - cached_tokens if new_prompt_tokens > cached_tokens else 1
                delay_s = (pending_tokens - computed_tokens + weight * own_tokens) / tokens_per_s
            else:
                delay_s = float("inf")
            if delay_s < best_s or best_in_flight < 0 or (delay_s == best_s and in_flight < best_in_flight):
                best, best_s, best_in_flight, ties = position, delay_s, in_flight, None
            elif delay_s == best_s and in_flight == best_in_flight:
                if ties is None:
                    ties = [best]
                ties.append(position)
        return best if ties is None else ties[int(draw * len(ties))]


_PREDICTED_WAIT = PredictedWait()


class PrefillRoundRobin:
    """Each instance in turn: the one whose last turn is longest ago."""

    def __init__(self) -> None:
        self._turns = LeastRecent()

    def choose(self, loads: Sequence[PrefillLoad], new_prompt_tokens: int, draw: float, price: float = 0.0) -> int:
        return self._turns.take([load.worker_id for load in loads])


class PrefillRandomChoice:
    """Any instance with equal probability."""

    def choose(self, loads: Sequence[PrefillLoad], new_prompt_tokens: int, draw: float, price: float = 0.0) -> int:
        return int(draw * len(loads))


class PrefillPowerOfTwo:
    """The one with fewer pending tokens, then fewer requests in flight, of two instances drawn at random."""

    def choose(self, loads: Sequence[PrefillLoad], new_prompt_tokens: int, draw: float, price: float = 0.0) -> int:
        if len(loads) == 1:
            return 0
        first, second = two_positions(len(loads), draw)
        return first if _queue(loads[first]) <= _queue(loads[second]) else second


class CacheAware:
    """Choose as sglang_router's `cache_aware` does, with its defaults.

    When the pool is out of balance (most in flight > least + `balance_abs` and > least * `balance_rel`) the
    shortest queue; else the longest cached prefix, if it is at least `cache_threshold` of the prompt; else
    the shortest queue. Upstream's last case takes the instance with the smallest prefix tree, which a load
    does not say.
    """

    def __init__(self, cache_threshold: float = 0.3, balance_abs: int = 64, balance_rel: float = 1.5) -> None:
        if not 0 <= cache_threshold <= 1:
            raise ValueError(f"cache_threshold must be in [0, 1], got {cache_threshold}")
        if balance_abs < 0:
            raise ValueError(f"balance_abs must be at least 0, got {balance_abs}")
        if not balance_rel >= 1:
            raise ValueError(f"balance_rel must be at least 1, got {balance_rel}")
        self.cache_threshold = cache_threshold
        self.balance_abs = balance_abs
        self.balance_rel = balance_rel

    def choose(self, loads: Sequence[PrefillLoad], new_prompt_tokens: int, draw: float, price: float = 0.0) -> int:
        in_flight = [load.in_flight for load in loads]
        most, least = max(in_flight), min(in_flight)
        is_balanced = most - least <= self.balance_abs or most <= least * self.balance_rel
        if is_balanced:
            cached = [load.cached_tokens for load in loads]
            longest = max(cached)
            if longest > 0 and longest >= self.cache_threshold * new_prompt_tokens:
                return _lowest([(-load.cached_tokens, *_queue(load)) for load in loads], draw)
        return _lowest([(load.in_flight, load.pending_tokens) for load in loads], draw)


def _queue(load: PrefillLoad) -> tuple[int, int]:
    return load.pending_tokens, load.in_flight


def _lowest(keys: Sequence[tuple[int, ...]], draw: float) -> int:
    lowest = min(keys)
    ties = [position for position, key in enumerate(keys) if key == lowest]
    return ties[int(draw * len(ties))]


_POLICIES: dict[str, Callable[[], PrefillPolicy]] = {
    "predicted_wait": PredictedWait,
    "round_robin": PrefillRoundRobin,
    "random": PrefillRandomChoice,
    "power_of_two": PrefillPowerOfTwo,
    "cache_aware": CacheAware,
}
PREFILL_POLICIES: tuple[str, ...] = tuple(_POLICIES)


def prefill_policy(name: str) -> PrefillPolicy:
    """A new policy of this name. Raises ValueError that lists the names."""
    if name not in _POLICIES:
        raise ValueError(f"unknown prefill policy {name!r}; choose one of {', '.join(PREFILL_POLICIES)}")
    return _POLICIES[name]()
