"""Which prefill instances a request may go to: its length class, seen from each instance's cache.

The same prompt can be short for the instance that holds most of it in its prefix cache and long for all
others. An instance is a candidate when its role serves the class that the prompt has *there*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_ext.policy.length_class import Boundary, classify
from sglang_ext.types import LengthClass, Role

_BOTH = Role.BOTH


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
    class_of = {best_cached: length_class}
    found = []
    for i, role in enumerate(roles):
        cached = cached_tokens[i]
        class_there = class_of.get(cached)
        if class_there is None:
            class_there = class_of[cached] = classify(prompt_tokens - cached, cached, boundary)
        if role is _BOTH or role.serves(class_there):
            found.append(i)
    if found or not roles:
        return PoolChoice(length_class, tuple(found), False)
    if not allow_spill and not (best_cached and length_class is LengthClass.SHORT):
        return PoolChoice(length_class, (), False)
    holders = tuple(i for i, cached in enumerate(cached_tokens) if cached == best_cached)
    # A short re-prefill on the long instance that holds the prefix is no emergency: it is where it belongs.
    return PoolChoice(length_class, holders, best_cached == 0)
