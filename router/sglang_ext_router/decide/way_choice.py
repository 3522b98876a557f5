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
from sglang_ext_router.decide.prefill_choice import predicted_end_s

MEMORY_S = 30.0  # time after which what was learned of a way counts half
WEIGHT = 0.1  # of a new observation


class PlainLoad(NamedTuple):
    """One undivided instance at the moment of a decision."""

    load: PrefillLoad
    free_kv_tokens: int


class WayCost:
    """Describes what one way costs beyond the predicted prefill: transfer, scheduling, tokens decoded at the same time.

    It is a moving average over the streams that went this way; unused for a while it goes back to nothing, so that a
    way that was slow once is tried again.
    """

    __slots__ = ("_at_s", "_cost_s")

    def __init__(self) -> None:
        self._cost_s = 0.0
        self._at_s = 0.0

    def observe(self, first_token_s: float, predicted_s: float, now_s: float) -> None:
        """A request that was to be prefilled after `predicted_s` had its first token after `first_token_s`."""
        known_s = self.cost_s(now_s)
        self._cost_s = known_s + WEIGHT * (max(0.0, first_token_s - predicted_s) - known_s)
        self._at_s = now_s

    def cost_s(self, now_s: float) -> float:
        """Return the cost that is to be expected now."""
        fading: float = 0.5 ** (max(0.0, now_s - self._at_s) / MEMORY_S)
        return self._cost_s * fading


def choose_plain(
    plains: Sequence[PlainLoad],
    divided: PrefillLoad | None,
    prompt_tokens: int,
    reply_tokens: int,
    sequences: int,
    max_local_tokens: int,
    plain_cost_s: float,
    divided_cost_s: float,
) -> int | None:
    """Return the position in `plains` of the instance that serves the request undivided; None: it is divided.

    `divided` is the prefill instance that would get it otherwise; without one it is never divided. `reply_tokens` is
    the longest reply of a sequence, `max_local_tokens` the most new tokens of all `sequences` that an undivided
    instance prefills where the request can be divided.
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
    is_sooner = best_key[1] + plain_cost_s <= predicted_end_s(divided, prompt_tokens) + divided_cost_s
    return best if is_sooner else None
