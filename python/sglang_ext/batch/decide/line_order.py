"""The order in which the lines of a run leave: lines that share a prefix one after another, per length class.

An engine's prefix cache holds what it computed last. Lines that begin alike therefore leave together, however far
apart they are in the input. The order is a key of a few bytes per line, so that a store can keep it in an index:
digests of the prompt's first 64, 256, 1024, … bytes, the shortest first. Two prompts with the same first 1024 bytes
have the first three digests in common, so sorting by the key puts them side by side.
"""

from __future__ import annotations

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
