"""The instance of each conversation's last turn, so that the next one goes there while that is no later than elsewhere.

What prompts share is known by their text (`prefix_index.py`), in blocks of 256 bytes and more. A client that names its
conversation says more: that a short prompt, or one with images, goes on where the one before it went. The name is a
hint. It counts as tokens that the instance may hold, in the choice among instances only, so that a conversation stays
as long as its instance would end at most as much later as those tokens take to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from sglang_ext.types import PrefillLoad

NO_SESSION = 0


class SessionTurn(NamedTuple):
    """Holds the last turn of a conversation: its instance, and the blocks with which a prompt behind it begins."""

    worker_id: int
    prompt_tokens: int
    block_count: int  # full blocks of its text
    last_hash: int  # of the last of these, which covers all before it; 0 without any


def session_key(name: bytes | str) -> int:
    """Return the number by which a conversation is known, which is never NO_SESSION."""
    return xxh3_64_intdigest(name.encode("utf-8", "replace") if isinstance(name, str) else name) or 1


class SessionHints:
    """The last turns of at most `capacity` conversations; those used least recently are forgotten.

    An entry takes about 300 bytes. Raises ValueError for a capacity below 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._turns: dict[int, SessionTurn] = {}  # the one used last is last

    def __len__(self) -> int:
        return len(self._turns)

    def record(self, session: int, worker_id: int, prompt_tokens: int, hashes: Sequence[int]) -> None:
        """A turn of `prompt_tokens`, whose blocks have these hashes, goes to this instance."""
        self._turns.pop(session, None)
        self._turns[session] = SessionTurn(worker_id, prompt_tokens, len(hashes), hashes[-1] if hashes else 0)
        if len(self._turns) > self._capacity:
            del self._turns[next(iter(self._turns))]

    def forget(self, session: int, worker_id: int) -> None:
        """The instance did not compute the turn; without effect where another one has it."""
        turn = self._turns.get(session)
        if turn is not None and turn.worker_id == worker_id:
            del self._turns[session]

    def forget_worker(self, worker_id: int) -> None:
        """The instance has lost what it held. Takes time in proportion to the number of conversations."""
        self._turns = {session: turn for session, turn in self._turns.items() if turn.worker_id != worker_id}

    def hinted(
        self, session: int, loads: Sequence[PrefillLoad], hashes: Sequence[int], prompt_tokens: int
    ) -> Sequence[PrefillLoad]:
        """Return the loads, that of the conversation's instance with what it may hold as cached.

        `hashes` are those of the prompt's blocks. A prompt that does not begin as the turn before goes on behind
        nothing: the loads are returned as they are.
        """
        turn = self._turns.get(session)
        if turn is None:
            return loads
        count = turn.block_count
        if count and (len(hashes) < count or hashes[count - 1] != turn.last_hash):
            return loads
        held_tokens = min(turn.prompt_tokens, prompt_tokens - 1)  # the last token is always computed again
        for position, load in enumerate(loads):
            if load.worker_id == turn.worker_id and load.cached_tokens < held_tokens:
                changed = list(loads)
                changed[position] = load._replace(cached_tokens=held_tokens)
                return changed
        return loads
