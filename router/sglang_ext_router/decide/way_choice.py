"""Decides whether a request goes to an undivided instance, or is divided between a prefill and a decode instance.

Divided, a request pays for the way of its KV cache and for the slower of two instances; undivided, it pays for sharing
its instance with the tokens that are decoded there, and holds these up while it is prefilled. So the way with the
earlier predicted first token is taken, and a prefill that would hold up the others for long is always divided, as with
Dynamo's `max_local_prefill_length` and llm-d's threshold of uncached tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_ext.types import PrefillLoad
from sglang_ext_router.decide.prefill_choice import predicted_end_s, predicted_wait_s

MEMORY_S = 30.0  # time after which what was learned of a way counts half
WEIGHT = 0.1  # of a new observation


class PlainLoad(NamedTuple):
    """One undivided instance at the moment of a decision."""

    load: PrefillLoad
    free_kv_tokens: int


class WayCost:
    """Describes what one way costs beyond the predicted prefill: transfer, scheduling, tokens decoded at the same time.

    It is a moving average over the streams that could have gone either way and went this one.
    """

    __slots__ = ("_at_s", "_cost_s")

    def __init__(self) -> None:
        self._cost_s = 0.0
        self._at_s = float("-inf")

    def observe(self, first_token_s: float, predicted_s: float, now_s: float) -> None:
        """A request that was to be prefilled after `predicted_s` had its first token after `first_token_s`."""
        weight = max(WEIGHT, 1.0 - self.certainty(now_s))
        self._cost_s += weight * (max(0.0, first_token_s - predicted_s) - self._cost_s)
        self._at_s = now_s

    def certainty(self, now_s: float) -> float:
        """Return how much is known of the way now, from 0 to 1: half of it is lost with every `MEMORY_S` unused."""
        certainty: float = 0.5 ** (max(0.0, now_s - self._at_s) / MEMORY_S)
        return certainty

    @property
    def last_s(self) -> float:
        """Return the cost as it was observed last."""
        return self._cost_s


def way_costs_s(plain: WayCost, divided: WayCost, now_s: float) -> tuple[float, float]:
    """Return the cost that is to be expected now of the undivided way and of the divided one.

    What is not known of a way is taken from what is known of both. So a way that is not used is not believed to cost
    nothing, and a way that was slow once is tried again.
    """
    plain_certainty, divided_certainty = plain.certainty(now_s), divided.certainty(now_s)
    certainty = plain_certainty + divided_certainty
    if not certainty:
        return 0.0, 0.0
    common_s = (plain_certainty * plain.last_s + divided_certainty * divided.last_s) / certainty
    return (
        common_s + plain_certainty * (plain.last_s - common_s),
        common_s + divided_certainty * (divided.last_s - common_s),
    )


def choose_plain(
    plains: Sequence[PlainLoad],
    divided: PrefillLoad | None,
    prompt_tokens: int,
    reply_tokens: int,
    sequences: int,
    max_local_tokens: int,
    rate_tokens_per_s: float,
    plain_cost_s: float,
    divided_cost_s: float,
) -> int | None:
    """Return the position in `plains` of the instance that serves the request undivided; None: it is divided.

    `divided` is the prefill instance that would get it otherwise; without one it is never divided. `reply_tokens` is
    the longest reply of a sequence, `max_local_tokens` the most new tokens of all `sequences` that an undivided
    instance prefills where the request can be divided. Which way is sooner is decided with the request's own tokens
    computed at one rate (`common_rate`) on both.
    """
    best: int | None = None
    best_key = (True, float("inf"), 0)
    for position, (load, free_kv_tokens) in enumerate(plains):
        new_tokens = prompt_tokens - load.cached_tokens
        is_full = (new_tokens + reply_tokens) * sequences > free_kv_tokens
        if divided is not None and (is_full or new_tokens * sequences > max_local_tokens):
            continue
        key = (is_full, predicted_end_s(load, prompt_tokens), load.in_flight)
        if best is None or key < best_key:
            best, best_key = position, key
    if best is None or divided is None:
        return best
    own = plains[best].load
    plain_s = predicted_wait_s(own) + _own_s(own, prompt_tokens, rate_tokens_per_s) + plain_cost_s
    divided_s = predicted_wait_s(divided) + _own_s(divided, prompt_tokens, rate_tokens_per_s) + divided_cost_s
    return best if plain_s <= divided_s else None


def common_rate(loads: Sequence[PrefillLoad]) -> float:
    """Return the largest rate in tokens/s that an instance shows, at which the ways are compared.

    A rate is that of the lengths which an instance gets. Each prefill has a fixed cost, so an instance that gets only
    short prompts shows a low rate, and would take no longer than another one for a short prompt. What an instance is
    slower at the same length shows in the cost of its way.
    """
    return max(load.tokens_per_s for load in loads)


def _own_s(load: PrefillLoad, prompt_tokens: int, rate_tokens_per_s: float) -> float:
    """Return the time for the request's own tokens at this rate."""
    own_tokens = max(1, prompt_tokens - load.cached_tokens)
    return own_tokens / rate_tokens_per_s if rate_tokens_per_s > 0 else 0.0
