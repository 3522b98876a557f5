"""Decides whether a long pool has room for a prompt, and whether it is worth to wait for that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from sglang_ext.long_pool.decide.coordination_settings import CoordinationSettings
from sglang_ext.long_pool.decide.pool_members import PoolMembers
from sglang_ext.long_pool.decide.pool_requests import (
    AnnouncedPrompt,
    SharedPrefill,
    promised_tokens,
)
from sglang_ext.long_pool.decide.sharding import KvSegment, count_tokens

Held = dict[int, tuple[KvSegment, ...]]


class PoolRoom:
    """Describes what fits, and what is worth waiting for."""

    def __init__(self, members: PoolMembers, settings: CoordinationSettings) -> None:
        self._members = members
        self._settings = settings
        self.freed_s = 0.0  # when what a request held was dropped; infinity since the last plan

    def fits_at_its_end(self, prefill: SharedPrefill, others: Iterable[SharedPrefill]) -> bool:
        """Return whether it can be handed back once it is computed: what has to come to its owner must fit there."""
        if prefill.is_streamed:
            return True
        owner = prefill.offer.owner
        promised = prefill.promised_tokens + promised_tokens(other for other in others if other is not prefill).get(
            owner, 0
        )
        return prefill.offer.fits_owner and promised <= self._members[owner].free_tokens

    def first_part_tokens(self, prefill: SharedPrefill, group: Sequence[int], largest: int) -> int:
        """Return the tokens of a chunk that is not the last one, so that each of its group has room for a share of the
        rest as well, on the largest group.

        What a member hands over to a growing group is free one chunk later.
        """
        page, size = self._settings.page_tokens, max(len(group), min(largest, len(self._members)))
        todo = count_tokens(prefill.todo)
        if len(group) == size:
            return todo
        free = min(self._members[instance].free_tokens for instance in group)
        part = (free - 2 * page - todo / size) / (1 / len(group) - 1 / size)
        return max(0, int(part)) // page * page

    def kept_for(self, prefill: SharedPrefill, reserved: Mapping[int, int]) -> dict[int, int]:
        """Return the tokens that are free on instances and reserved for this one; `reserved`: for all."""
        kept = {}
        for instance, tokens in prefill.reserved_tokens(self._settings.page_tokens).items():
            if instance in self._members:
                free = self._members[instance].free_tokens
                for_others = max(0, free - reserved[instance])
                kept[instance] = max(0, free - reserved[instance] + tokens) - for_others
        return kept

    def may_come(
        self,
        prefill: SharedPrefill | AnnouncedPrompt,
        others: Iterable[SharedPrefill],
        now_s: float,
        *,
        is_working: bool,
    ) -> bool:
        """Return whether something runs that may make room for it, and it has not waited too long where it fits one
        alone.

        `is_working`: a step runs somewhere.
        """
        prefill.no_room_s = now_s if prefill.no_room_s is None else prefill.no_room_s
        is_known = prefill.fastest_s < math.inf
        is_sent = any(other.is_finishing for other in others)
        works = any(self._members[instance].backlog_s(now_s) > 0 for instance in self._members)
        # A member whose processor is short of time reports late, and what it has free is known only then. A member
        # that never reports again is lost.
        newer_s = max(prefill.no_room_s, self.freed_s) + self._settings.report_timeout_s
        is_report_due = not prefill.fits_owner and self._members.oldest_report_s() < newer_s
        is_busy = is_working or is_sent or works or is_report_due
        waits_on = (
            now_s <= prefill.no_room_s + self._settings.room_timeout_s or prefill.tokens > self._members.max_tokens()
        )
        return is_known and is_busy and waits_on
