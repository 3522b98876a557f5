"""SGLang's waiting queue as it changes: what is new in it and what has gone, found without looking at all of it.

SGLang appends arrivals to a list, and takes out of it what was aborted, has timed out or has lost its decode
instance. A round looks only at the end of the list as long as nothing was taken out of its middle.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import filterfalse
from typing import Any, NamedTuple

from sglang_ext.laps.sglang.queued_request import LapsEntry, entry_of


class QueueChanges(NamedTuple):
    """Since the last look."""

    new: Sequence[Any]  # in their order
    gone: Sequence[int]  # their keys


class WaitingRequests:
    """The requests that wait on one rank, by key. A request is in it from `enter` until it has gone, or has run."""

    def __init__(self) -> None:
        self._by_key: dict[int, Any] = {}
        self._seen: list[Any] = []  # SGLang's list at the last look
        self._is_sorted = True  # by key
        self._largest_key = 0

    def changes(self, waiting: list[Any]) -> QueueChanges:
        """Look at SGLang's list. New ones are to `enter`; requests that have gone are forgotten."""
        known = len(self._seen)
        # The same objects, compared in C: some nanoseconds for each.
        if waiting[:known] == self._seen:
            new = waiting[known:]
            gone: list[int] = []
        else:
            here = set(map(id, waiting))
            gone = [key for key, request in self._by_key.items() if id(request) not in here]
            for key in gone:
                del self._by_key[key]
            new = [request for request in waiting if _key_of(request) not in self._by_key]
            known_keys = [key for request in waiting if (key := _key_of(request)) in self._by_key]
            self._is_sorted = waiting[len(known_keys) :] == new and known_keys == sorted(known_keys)
            self._largest_key = max(known_keys, default=0)
        self._note(waiting)
        return QueueChanges(new, gone)

    def enter(self, request: Any, entry: LapsEntry) -> None:
        """It waits. Keys of requests that come later are larger, unless it has been here before."""
        self._is_sorted = self._is_sorted and entry.key > self._largest_key
        self._largest_key = max(self._largest_key, entry.key)
        self._by_key[entry.key] = request

    def requests(self, keys: Iterable[int]) -> list[Any]:
        """Return the requests with these keys, in their order. KeyError for a key that does not wait."""
        return [self._by_key[key] for key in keys]

    def __contains__(self, key: int) -> bool:
        return key in self._by_key

    def take(self, waiting: list[Any], taken: Sequence[Any]) -> None:
        """Remove requests that run from SGLang's list, in place."""
        if self._is_sorted:
            for request in taken:
                del waiting[bisect_left(waiting, _key_of(request), key=_key_of)]
        else:
            ids = set(map(id, taken))
            waiting[:] = filterfalse(lambda request: id(request) in ids, waiting)
        for request in taken:
            del self._by_key[_key_of(request)]
        self._note(waiting)

    def _note(self, waiting: list[Any]) -> None:
        self._seen = waiting.copy()
        if not waiting:
            self._is_sorted, self._largest_key = True, 0


def _key_of(request: Any) -> int:
    """0 for a request that has no entry yet."""
    entry = entry_of(request)
    return 0 if entry is None else entry.key
