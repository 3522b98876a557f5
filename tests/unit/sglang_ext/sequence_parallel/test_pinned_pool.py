"""Pages that somebody reads are not free before he has done, however often they are pinned and freed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_ext.sequence_parallel.pinned_pool import Pin, PinnedPool
from sglang_ext.sequence_parallel.shard import NoRoomError
from support.toy_engine import ToyPool

TOKENS = 48


class Histories(RuleBasedStateMachine):
    """Any order of taking, pinning, freeing and letting go; the toy pool notices what is freed twice."""

    @initialize(page=st.sampled_from([1, 4]))
    def begin(self, page: int) -> None:
        self.page = page
        self.inner = ToyPool(TOKENS, page)
        self.pool = PinnedPool(self.inner)
        self.held: list[torch.Tensor] = []
        self.pins: list[Pin] = []

    @rule(tokens=st.integers(1, 20))
    def allocate(self, tokens: int) -> None:
        try:
            self.held.append(self.pool.allocate(tokens))
        except NoRoomError:
            pages = -(-tokens // self.page)
            assert pages * self.page > self.inner.free_tokens

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.held)
    def pin(self, choice: object) -> None:
        self.pins.append(self.pool.pin(choice.choice(self.held)))  # type: ignore[attr-defined]

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.held)
    def free(self, choice: object) -> None:
        slots = self.held.pop(choice.randrange(len(self.held)))  # type: ignore[attr-defined]
        self.pool.free(slots)

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.pins)
    def unpin(self, choice: object) -> None:
        self.pool.unpin(self.pins.pop(choice.randrange(len(self.pins))))  # type: ignore[attr-defined]

    @invariant()
    def nothing_that_is_held_or_read_is_free(self) -> None:
        if hasattr(self, "pool"):
            held = {page for slots in self.held for page in (slots // self.page).tolist()}
            pinned = {page for pin in self.pins for page in pin.pages}
            assert self.inner.free_tokens == TOKENS - len(held | pinned) * self.page
            assert self.pool.condemned_tokens == len(pinned - held) * self.page


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("page", [1, 4])
def test_a_part_of_what_is_freed_is_pinned(page: int) -> None:
    inner = ToyPool(TOKENS, page)
    pool = PinnedPool(inner)
    slots = pool.allocate(12)
    pin = pool.pin(slots[:5])
    pool.free(slots)
    kept = -(-5 // page) * page
    assert (inner.free_tokens, pool.condemned_tokens) == (TOKENS - kept, kept)
    pool.unpin(pin)
    assert (inner.free_tokens, pool.condemned_tokens) == (TOKENS, 0)
