"""The order in which the lines of a run leave: lines that share a prefix one after another, per length class.

An engine's prefix cache holds what it computed last. Lines that begin alike therefore leave together, however far
apart they are in the input. The order is a key of a few bytes per line, so that a store can keep it in an index:
digests of the prompt's first 64, 256, 1024, … bytes, the shortest first. Two prompts with the same first 1024 bytes
have the first three digests in common, so sorting by the key puts them side by side. `TenantShares`
says whose lines are next where several tenants have some.
"""

from __future__ import annotations

from collections.abc import Iterable

from xxhash import xxh3_64_digest

from sglang_ext.types import LengthClass

PREFIX_BYTES = (64, 256, 1024, 4096, 16384)
DIGEST_BYTES = 4
PRIOR_BYTES_PER_TOKEN = 4  # of text that is not tokenised yet; what the router begins with, too


def prefix_key(prompt: bytes) -> bytes:
    """A key of at most 20 bytes: sorted by it, prompts that share leading blocks are adjacent.

    A prompt shorter than the first block has the empty key: there is nothing worth sharing.
    """
    size = len(prompt)
    return b"".join(xxh3_64_digest(prompt[:end])[:DIGEST_BYTES] for end in PREFIX_BYTES if end <= size)


def estimate_tokens(text_bytes: int, known_tokens: int = 0) -> int:
    """L of a prompt: `known_tokens` where it is token ids, else a quarter of its bytes; at least 1."""
    return max(1, known_tokens, -(-text_bytes // PRIOR_BYTES_PER_TOKEN))


def token_ranges(length_boundary_tokens: int | None) -> dict[LengthClass | None, tuple[int, int | None]]:
    """Each class with the prompt tokens that belong to it: from, and below what (None: no end).

    The class None takes all, where the endpoint has no boundary.

    A prompt of exactly the boundary is short, as in the router.
    """
    if length_boundary_tokens is None:
        return {None: (0, None)}
    if length_boundary_tokens < 0:
        raise ValueError(f"length_boundary_tokens must be at least 0, got {length_boundary_tokens}")
    first_long = length_boundary_tokens + 1
    return {LengthClass.SHORT: (0, first_long), LengthClass.LONG: (first_long, None)}


class TenantShares:
    """Weighted fair queueing: tenants get work in proportion to their weights. Work is in any unit, the same for all.

    Each tenant has a virtual time, the work that it has had for its weight; the tenant that is furthest behind is next
    (start-time fair queueing: Goyal, Vin, Cheng, SIGCOMM 1996). A tenant that had nothing to send goes on from the
    present: a pause saves nothing up.
    """

    __slots__ = ("_now", "_times")

    def __init__(self) -> None:
        self._now = 0.0  # at which the latest work began
        self._times: dict[str, float] = {}

    def choose(self, tenants: Iterable[str]) -> str:
        """Return whose work is next; the first of several that are equally far behind."""
        return min(tenants, key=self._start)

    def charge(self, tenant: str, work: float, weight: float) -> None:
        """Record that work of a tenant begins."""
        self._now = start = self._start(tenant)
        self._times[tenant] = start + work / weight

    def correct(self, tenant: str, work: float, weight: float) -> None:
        """Record by how much `work` that began earlier was larger than what was charged."""
        self._times[tenant] = self._times.get(tenant, self._now) + work / weight

    def _start(self, tenant: str) -> float:
        return max(self._now, self._times.get(tenant, 0.0))
