"""Kept rows on their way from the members that computed them to a single one, which computes what follows.

A prefix whose rows are spread over several members, or whose only holder is busy, can be pulled: the holders send their
rows in the background, and go on with their work meanwhile. The target then has all of the prefix and needs no group.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_ext.long_pool.decide.kept_prompts import KeptPrefix

_PRIOR_BYTES_PER_S = 10e9  # until a pull has been measured: about what a network of 100 Gb/s carries
_MEASURED = 16  # pulls
_LEAST_TIMEOUT_S = 5.0
_TIMEOUT_FACTOR = 8.0  # of the predicted time


class Pull(NamedTuple):
    """Ask `target` to take room for a prefix, and all who keep rows of it to send them there. Once they have come they
    are kept there under the number of the pull."""

    pull: int
    target: int
    sources: tuple[int, ...]  # who keep rows of it; `target` may be one of them
    parts: tuple[KeptPrefix, ...]

    @property
    def tokens(self) -> int:
        """Return the length of the prefix."""
        return self.parts[-1].tokens

    @property
    def members(self) -> tuple[int, ...]:
        """Return all that take part."""
        return tuple(sorted({self.target, *self.sources}))


@dataclass(slots=True)
class _UnderWay:
    order: Pull
    moved_tokens: int
    began_s: float
    predicted_s: float


class RowPulls:
    """The pulls of a pool that are under way, and how fast the latest ones were.

    An instance takes part in one at a time, so that a pull has its links for itself.
    """

    def __init__(self, kv_token_bytes: int) -> None:
        self._prior_token_s = kv_token_bytes / _PRIOR_BYTES_PER_S
        self._under_way: dict[int, _UnderWay] = {}
        self._busy: set[int] = set()
        self._measured: deque[tuple[int, float]] = deque(maxlen=_MEASURED)  # tokens, seconds
        self._count = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def predict_s(self, tokens: int) -> float:
        """Return how long it takes to pull this many rows."""
        if not self._measured:
            return tokens * self._prior_token_s
        measured_tokens, measured_s = map(sum, zip(*self._measured, strict=True))
        return tokens * measured_s / measured_tokens

    def may_join(self, instances: Collection[int]) -> bool:
        """Return whether none of these takes part in a pull."""
        return self._busy.isdisjoint(instances)

    def room_tokens(self) -> dict[int, int]:
        """Return the room that pulls need, by instance."""
        return {pull.order.target: pull.order.tokens for pull in self._under_way.values()}

    def begin(
        self, target: int, sources: Sequence[int], parts: tuple[KeptPrefix, ...], moved_tokens: int, now_s: float
    ) -> Pull:
        """Return the order for a pull in which `moved_tokens` rows come from other instances; its number is below 0, as
        no request's is."""
        self._count += 1
        order = Pull(-self._count, target, tuple(sources), parts)
        self._under_way[order.pull] = _UnderWay(order, moved_tokens, now_s, self.predict_s(moved_tokens))
        self._busy.update(order.members)
        return order

    def end(self, pull: int, now_s: float, *, is_done: bool) -> Pull | None:
        """A pull has ended; the order, or None where it is not known or has ended before."""
        ended = self._under_way.pop(pull, None)
        if ended is None:
            return None
        self._busy.difference_update(ended.order.members)
        if is_done:
            self._measured.append((ended.moved_tokens, max(1e-6, now_s - ended.began_s)))
        return ended.order

    def needing(self, instance: int, prompts: Collection[int] | None = None) -> list[int]:
        """Return the pulls in which an instance takes part; with `prompts`, the pulls that read rows of these there."""
        return [
            number
            for number, pull in self._under_way.items()
            if instance in pull.order.members
            and (prompts is None or any(part.prompt in prompts for part in pull.order.parts))
        ]

    def reading(self, prompts: Collection[int]) -> list[int]:
        """Return the pulls that read rows of these prompts, wherever these are."""
        return [
            number
            for number, pull in self._under_way.items()
            if any(part.prompt in prompts for part in pull.order.parts)
        ]

    def overdue(self, now_s: float) -> list[int]:
        """Return the pulls that take far longer than they should."""
        return [
            number
            for number, pull in self._under_way.items()
            if now_s > pull.began_s + max(_LEAST_TIMEOUT_S, _TIMEOUT_FACTOR * pull.predicted_s)
        ]


class PullPlan(NamedTuple):
    """One way to pull a prefix: its target, and its cost."""

    target: int
    moved_tokens: int
    end_s: float  # when the prompt would end, from now
    cost_s: float  # that, and what its instance's time costs others


def cheapest_pull(
    prefix_tokens: int,
    compute_s: float,
    price: float,
    held_tokens: Sequence[int],
    free_in_s: Sequence[float],
    may_be_target: Sequence[bool],
    pulls: RowPulls,
) -> PullPlan | None:
    """Return the best instance to pull a prefix to, by position; None where there is none.

    Args:
        prefix_tokens: length of the prefix.
        compute_s: time that one instance takes for the rest of the prompt behind the prefix.
        price: what a second of an instance costs others.
        held_tokens: rows of the prefix that each instance has.
        free_in_s: when each instance has done what it is committed to, from now.
        may_be_target: whether each instance has the room, and no other pull.
    """
    best: PullPlan | None = None
    for position, may_be in enumerate(may_be_target):
        moved_tokens = prefix_tokens - held_tokens[position]
        if not may_be or moved_tokens <= 0 or compute_s == math.inf:
            continue
        begin_s = max(free_in_s[position], pulls.predict_s(moved_tokens))
        end_s = begin_s + compute_s
        plan = PullPlan(position, moved_tokens, end_s, end_s + price * compute_s)
        if best is None or plan.cost_s < best.cost_s:
            best = plan
    return best
