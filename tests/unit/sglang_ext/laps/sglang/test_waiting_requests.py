"""What is new in SGLang's queue and what has gone, whatever SGLang and the long pool do to the list."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_ext.laps.decide.round_plan import PriorityClass
from sglang_ext.laps.sglang.queued_request import LapsEntry, entry_of, remember
from sglang_ext.laps.sglang.waiting_requests import WaitingRequests
from sglang_ext.types import LengthClass
from support.examples import examples


class Request:
    """Compared by identity, as SGLang's are."""


class ChangingQueue(RuleBasedStateMachine):
    """Requests come and go between two looks, and some come back; at a look the two sides agree."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = WaitingRequests()
        self.waiting: list[Any] = []
        self.apart: list[Any] = []  # left once, and may return: offered to a long pool, or put back
        self.known: dict[int, Any] = {}
        self.last_key = 0

    @rule(count=st.integers(1, 3))
    def arrive(self, count: int) -> None:
        self.waiting += [Request() for _ in range(count)]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), returns=st.booleans(), is_new_list=st.booleans())
    def leave(self, data: st.DataObject, returns: bool, is_new_list: bool) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        if is_new_list:
            self.waiting = [one for one in self.waiting if one is not request]
        else:
            self.waiting.remove(request)
        if returns:
            self.apart.append(request)

    @precondition(lambda self: self.apart)
    @rule(at_front=st.booleans())
    def come_back(self, at_front: bool) -> None:
        self.waiting.insert(0 if at_front else len(self.waiting), self.apart.pop())

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        self.look()
        if not self.known:
            return
        keys = data.draw(st.lists(st.sampled_from(sorted(self.known)), min_size=1, max_size=3, unique=True))
        taken = self.requests.requests(keys)
        assert taken == [self.known.pop(key) for key in keys]
        left = [one for one in self.waiting if all(one is not request for request in taken)]
        self.requests.take(self.waiting, taken)
        assert self.waiting == left
        assert not any(key in self.requests for key in keys)
        self.apart += taken[:1]

    @rule()
    def look(self) -> None:
        changes = self.requests.changes(self.waiting)
        for key in changes.gone:
            del self.known[key]
        for request in changes.new:
            entry = entry_of(request)
            if entry is None:
                self.last_key += 1
                entry = LapsEntry(self.last_key, LengthClass.SHORT, 1, 0.0, 1.0, PriorityClass.NORMAL)
                remember(request, entry)
            assert entry.key not in self.known, "a request is new once"
            self.known[entry.key] = request
            self.requests.enter(request, entry)
        assert sorted(map(id, self.known.values())) == sorted(map(id, self.waiting))

    @invariant()
    def finds_by_key(self) -> None:
        assert all(key in self.requests for key in self.known)


ChangingQueue.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=25, deadline=None)
test_the_queue_is_followed = ChangingQueue.TestCase
