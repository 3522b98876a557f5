"""The sequence of a publisher's batches against a network that loses them and a publisher that is started again."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from sglang_ext_router.decide.event_sequence import (
    ApplyBatch,
    AskReplay,
    EventSequence,
    ForgetBlocks,
    SequenceAction,
)
from support.examples import examples

KEPT = 6  # batches that a publisher keeps for replays


def payload(made_at: int, number: int, content: str) -> bytes:
    """A batch as the sequence sees it: its first ten bytes hold when it was made."""
    return b"%010d%s" % (made_at, content.encode())


class LossyNetwork(RuleBasedStateMachine):
    """Batches store or remove one letter; the router must never believe in a letter that the engine does not hold."""

    @initialize(can_replay=st.booleans())
    def begin(self, can_replay: bool) -> None:
        self.clock = 0
        self.can_replay = can_replay
        self.sequence = EventSequence(can_replay, max_held_bytes=60)
        self.known: set[str] = set()
        self.lives = 0
        self.requests: deque[int] = deque()  # replays that the publisher has not seen
        self.replay: deque[tuple[int, bytes] | None] = deque()  # on its way to the router; None: its end
        self._start()
        self.act(self.sequence.on_connected())

    def _start(self) -> None:
        self.engine: set[str] = set()
        self.next_number = 0
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)

    def act(self, actions: list[SequenceAction]) -> None:
        for action in actions:
            match action:
                case ApplyBatch():
                    content = action.payload[10:].decode()
                    (self.known.add if content[0] == "+" else self.known.discard)(content[1])
                case ForgetBlocks():
                    self.known.clear()
                case AskReplay():
                    self.requests.append(action.first)

    @rule(letter=st.sampled_from("abcdef"), is_stored=st.booleans(), is_lost=st.booleans())
    def publish(self, letter: str, is_stored: bool, is_lost: bool) -> None:
        self.clock += 1
        batch = self.next_number, payload(self.clock, self.next_number, ("+" if is_stored else "-") + letter)
        self.next_number += 1
        self.kept.append(batch)
        (self.engine.add if is_stored else self.engine.discard)(letter)
        if not is_lost:
            self.act(self.sequence.on_batch(*batch))

    @rule()
    def serve_replay(self) -> None:
        if self.requests:
            first = self.requests.popleft()
            self.replay += [batch for batch in self.kept if batch[0] >= first]
            self.replay.append(None)

    @rule(count=st.integers(1, 5))
    def bring_replay(self, count: int) -> None:
        for _ in range(min(count, len(self.replay))):
            batch = self.replay.popleft()
            self.act(self.sequence.on_replay_end() if batch is None else self.sequence.on_replayed(*batch))

    @rule()
    def lose_replay(self) -> None:
        """The connection for replays breaks, and with it all that was on its way."""
        if self.can_replay:
            self.requests.clear()
            self.replay.clear()
            self.act(self.sequence.on_replay_failed())

    @rule(published=st.lists(st.sampled_from("abcdef"), max_size=8), is_noticed=st.booleans())
    def restart(self, published: list[str], is_noticed: bool) -> None:
        """The engine starts again, and publishes before the router has connected again."""
        self._start()
        self.requests.clear()
        self.replay.clear()
        self.act(self.sequence.on_replay_failed())
        if is_noticed:
            self.act(self.sequence.on_instance_lost())
        for letter in published:
            self.publish(letter, True, True)
        self.act(self.sequence.on_connected())

    @rule()
    def reconnect(self) -> None:
        self.act(self.sequence.on_connected())

    @rule()
    def settle(self) -> None:
        """Whatever was lost: with a look at the last batch the router knows all, or knows that it does not."""
        if not self.can_replay:
            return
        for is_late in (False, True):
            if is_late:
                self.act(self.sequence.on_quiet())
            while self.requests or self.replay:
                self.serve_replay()
                self.bring_replay(5)
        assert not self.sequence.is_replaying
        if self.sequence.is_whole:
            assert self.known == self.engine
        if self.next_number <= KEPT:
            assert self.sequence.is_whole
        # What was removed before the router's time may come again only by a batch that it has.
        assert self.known <= self.engine


TestLossyNetwork = pytest.mark.slow(LossyNetwork.TestCase)
TestLossyNetwork.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)


def connected() -> EventSequence:
    sequence = EventSequence(can_replay=True)
    assert sequence.on_connected() == [AskReplay(0)]
    assert sequence.on_replay_end() == []
    assert sequence.is_whole
    return sequence


def test_batches_in_order_are_applied() -> None:
    sequence = connected()
    for number in range(3):
        batch = payload(number, number, "+a")
        assert sequence.on_batch(number, batch) == [ApplyBatch(batch)]
    assert (sequence.gaps, sequence.restarts, sequence.losses) == (0, 0, 0)


def test_a_gap_is_replayed_from_the_last_batch_that_was_applied() -> None:
    sequence = connected()
    batches = [payload(number, number, f"+{number}") for number in range(5)]
    sequence.on_batch(0, batches[0])
    assert sequence.on_batch(3, batches[3]) == [AskReplay(0)]
    assert sequence.on_batch(4, batches[4]) == []  # held
    assert sequence.on_replayed(0, batches[0]) == []
    assert sequence.on_replayed(1, batches[1]) == [ApplyBatch(batches[1])]
    assert sequence.on_replayed(2, batches[2]) == [ApplyBatch(batches[2])]
    assert sequence.on_replayed(3, batches[3]) == [ApplyBatch(batches[3])]
    assert sequence.on_replay_end() == [ApplyBatch(batches[4])]
    assert (sequence.gaps, sequence.losses, sequence.is_whole) == (1, 0, True)


def test_what_the_publisher_does_not_keep_any_more_is_lost() -> None:
    sequence = connected()
    sequence.on_batch(0, payload(0, 0, "+a"))
    sequence.on_batch(9, payload(9, 9, "+b"))
    actions = sequence.on_replayed(5, payload(5, 5, "+c"))
    assert actions == [ForgetBlocks(), ApplyBatch(payload(5, 5, "+c"))]
    assert (sequence.losses, sequence.is_whole) == (1, False)
    sequence.on_cleared()
    assert sequence.is_whole


def test_a_publisher_that_was_started_again_is_noticed_though_its_numbers_fit() -> None:
    sequence = connected()
    sequence.on_batch(0, payload(0, 0, "+a"))
    assert sequence.on_connected() == [AskReplay(0)]
    others = [payload(100 + number, number, "+b") for number in range(3)]
    assert sequence.on_replayed(0, others[0]) == [ForgetBlocks(), AskReplay(0)]
    assert sequence.on_replayed(1, others[1]) == []
    assert sequence.on_replay_end() == []
    assert [sequence.on_replayed(number, others[number]) for number in range(3)] == [
        [ApplyBatch(batch)] for batch in others
    ]
    assert sequence.on_replay_end() == []
    assert (sequence.restarts, sequence.is_whole) == (1, True)


def test_without_replays_a_gap_makes_all_unknown() -> None:
    sequence = EventSequence(can_replay=False)
    assert sequence.on_connected() == [ForgetBlocks()]
    assert sequence.on_batch(7, payload(7, 7, "+a")) == [ForgetBlocks(), ApplyBatch(payload(7, 7, "+a"))]
    assert (sequence.gaps, sequence.is_whole) == (0, False)
    assert sequence.on_batch(9, payload(9, 9, "+a")) == [ForgetBlocks(), ApplyBatch(payload(9, 9, "+a"))]
    assert (sequence.gaps, sequence.losses) == (1, 1)
    assert sequence.on_batch(0, payload(10, 0, "+a")) == [ForgetBlocks(), ApplyBatch(payload(10, 0, "+a"))]
    assert (sequence.restarts, sequence.is_whole) == (1, True)
    assert sequence.on_quiet() == []
