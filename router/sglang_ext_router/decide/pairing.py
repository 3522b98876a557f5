"""Decides which prefill and decode instances serve a request together: of one revision, and near each other if that is
wanted.

While one revision replaces another both serve. KV cache passes only between instances of one revision, so a request
belongs to a revision before it belongs to an instance, and each revision gets as many requests as it can carry.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_ext.types import DecodeLoad

TOPOLOGY_SEPARATOR = "/"  # between domains, the widest first: ZONE/NODE


def revision_shares(prefill: Sequence[str], decode: Sequence[str]) -> dict[str, float]:
    """The share of requests that each revision gets, from the revision of every usable instance of either kind.

    A revision carries what the scarcer of its two kinds carries: the smaller of its fractions of all prefill and of all
    decode instances. One without either kind gets nothing. Empty if that is so of all; else the shares add up to 1.
    """
    carried = {
        name: min(prefill.count(name) / len(prefill), decode.count(name) / len(decode))
        for name in sorted(set(prefill).intersection(decode))
    }
    total = sum(carried.values())
    return {name: share / total for name, share in carried.items()}


def choose_revision(
    prefill: Sequence[str], cached_tokens: Sequence[int], prompt_tokens: int, decode: Sequence[str], draw: float
) -> str | None:
    """The revision of a request, None if none has both kinds.

    `prefill` and `cached_tokens` are parallel: revision of each candidate, and how much of the prompt it holds. A
    prompt of which an instance holds at least half stays with that instance's revision. Any other one is dealt out by
    `revision_shares` and `draw` in [0, 1).
    """
    shares = revision_shares(prefill, decode)
    if not shares:
        return None
    most = max((cached for name, cached in zip(prefill, cached_tokens, strict=True) if name in shares), default=0)
    if most > 0 and 2 * most >= prompt_tokens:
        return next(
            name for name, cached in zip(prefill, cached_tokens, strict=True) if cached == most and name in shares
        )
    chosen = ""
    for name, share in shares.items():
        chosen = name
        draw -= share
        if draw < 0:
            break
    return chosen


def common_domains(topology: str, other: str) -> int:
    """Return how many domains two places share, from the widest on: 0 for places that share none."""
    common = 0
    for own, others in zip(topology.split(TOPOLOGY_SEPARATOR), other.split(TOPOLOGY_SEPARATOR), strict=False):
        if not own or own != others:
            break
        common += 1
    return common


def nearest(place: str, places: Sequence[str], loads: Sequence[DecodeLoad], prompt_tokens: int) -> list[int]:
    """Positions of the decode instances to choose among for a prefill at `place`.

    They are the instances that have the most domains in common with it, of the instances whose KV cache has room for
    the prompt now. That is a preference: where none has room, or none is nearer than the others, all are there to
    choose.
    """
    everywhere = list(range(len(loads)))
    with_room = [i for i in everywhere if loads[i].free_kv_tokens - loads[i].reserved_tokens >= prompt_tokens]
    common = {i: common_domains(place, places[i]) for i in with_room}
    most = max(common.values(), default=0)
    return [i for i in with_room if common[i] == most] if most else everywhere
