"""Random histories: messages lost, repeated, delayed and reordered, processes crash, requests are aborted at any time.

Half of the requests have helpers: when one of those fails, the request begins again in the same slots, and its owner
sends everything. What the world checks at every step: KV is written to slots of its own request only, a ready request
has every byte in its place, no backend takes two chunks at a time or gets lost, and a backend that a request does not
hold yet goes to the earliest first handshake that has a chunk waiting. At the end of every history the world does its
work without faults and everything must end, with nothing held, allowed or occupied.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_ext.policy.handshake.protocol import TransferOutcome
from sglang_ext.policy.handshake.shards import KVShard, TokenSpan
from support.handshake_world import Cell, World, WriteKey, quick_options

SENDER_COUNTS = (1, 1, 2, 3, 4, 8, 64)


def split_request(random: Random, whole: KVShard, senders: list[str]) -> dict[str, list[KVShard]]:
    """Spread `whole` over chunks, and each chunk over some senders by heads, tokens in turn or layers."""
    span = whole.tokens[0]
    cuts = sorted(random.sample(range(span.start + 1, span.stop), min(random.randrange(3), span.token_count - 1)))
    shards: dict[str, list[KVShard]] = {address: [] for address in senders}
    first = 0
    for start, stop in zip([span.start, *cuts], [*cuts, span.stop], strict=True):
        group = [senders[(first + index) % len(senders)] for index in range(random.randint(1, len(senders)))]
        if stop == span.stop:
            group = senders  # so that everybody has something to send, where there is enough
        first += len(group)
        step = min(len(group), stop - start)
        for index, address in enumerate(group[:step]):
            shards[address].append(whole._replace(tokens=(TokenSpan(start + index, stop, step),), has_aux=False))
        if len(group) > stop - start and whole.layer_count > 1:
            address = group[0]
            shard = shards[address].pop()
            shards[address].append(shard._replace(layer_count=1))
            shards[group[-1]].append(
                shard._replace(first_layer=shard.first_layer + 1, layer_count=whole.layer_count - 1)
            )
    if whole.has_aux:
        address = random.choice(senders)
        if shards[address] and random.random() < 0.5:
            shards[address][-1] = shards[address][-1]._replace(has_aux=True)
        else:
            shards[address].append(KVShard((), 0, 0, 0, 0, True))
    return shards


class Histories(RuleBasedStateMachine):
    """See the module's text."""

    @initialize(
        backends=st.sampled_from([None, 1, 1, 2, 3, 8]),
        hold_idle_s=st.sampled_from([None, 0.0, 0.5]),
        can_fence=st.booleans(),
        seed=st.integers(0, 1 << 30),
    )
    def begin(self, backends: int | None, hold_idle_s: float | None, can_fence: bool, seed: int) -> None:
        self.world = World(quick_options(backends, hold_idle_s), can_fence=can_fence)
        self.random = Random(seed)
        self.next_room = 1
        self.next_epoch = 2

    @rule(seed=st.integers(0, 1 << 30), tells_count=st.booleans())
    @precondition(lambda self: self.next_room <= 6)
    def add_request(self, seed: int, tells_count: bool) -> None:
        random = Random(seed)
        room, self.next_room = self.next_room, self.next_room + 1
        count = random.choice(SENDER_COUNTS)
        senders = [f"prefill-{index}:1" for index in random.sample(range(64), count)]
        tokens = random.randint(1, 8) if count < 64 else 24
        first = random.choice((0, 5))
        whole = KVShard((TokenSpan(first, first + tokens),), 1, random.choice((1, 2)), 3, random.choice((1, 2)), True)
        whole = whole._replace(has_aux=random.random() < 0.7)
        shards = split_request(random, whole, senders)
        owner = random.choice(senders) if random.random() < 0.5 else None
        self.world.add_request(room, whole, shards, owner)
        for address in senders:
            self.world.start_sender(address, room, self.next_epoch, tells_count=tells_count)
            self.next_epoch += 1

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: any(room.slots is None and room.outcome is None for room in self.world.rooms.values()))
    def expect(self, choice: Random) -> None:
        waiting = [key for key, room in self.world.rooms.items() if room.slots is None and room.outcome is None]
        self.world.expect(choice.choice(waiting))

    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, 40))
    @precondition(lambda self: self.world.network)
    def deliver(self, choice: Random, count: int) -> None:
        for _ in range(min(count, len(self.world.network))):
            self.world.deliver(choice.randrange(len(self.world.network)))

    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, 20))
    @precondition(lambda self: self.world.network)
    def repeat(self, choice: Random, count: int) -> None:
        for _ in range(count):
            self.world.deliver(choice.randrange(len(self.world.network)), is_kept=True)

    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, 20))
    @precondition(lambda self: self.world.network)
    def lose(self, choice: Random, count: int) -> None:
        for _ in range(min(count, len(self.world.network))):
            self.world.network.pop(choice.randrange(len(self.world.network)))

    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, 40))
    def offer_and_compute(self, choice: Random, count: int) -> None:
        for _ in range(count):
            can_offer = [key for key in self.world.machines if self.world.can_offer(*key)]
            can_compute = [key for key in self.world.machines if self.world.can_compute(*key)]
            if can_offer and (choice.random() < 0.5 or not can_compute):
                self.world.offer(*choice.choice(can_offer))
            elif can_compute:
                self.world.compute(*choice.choice(can_compute))

    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, 20))
    @precondition(lambda self: self.world.writes)
    def end_writes(self, choice: Random, count: int) -> None:
        for _ in range(min(count, len(self.world.writes))):
            self.world.end_write(choice.choice(list(self.world.writes)))

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.world.writes)
    def fail_write(self, choice: Random) -> None:
        self.world.end_write(choice.choice(list(self.world.writes)), is_failing=True)

    @rule()
    @precondition(lambda self: self.world.fences)
    def fence_done(self) -> None:
        self.world.fence_done()

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.3, 0.6, 2.5, 10.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.world.machines)
    def crash_sender(self, choice: Random) -> None:
        self.world.crash_sender(choice.choice(list(self.world.machines))[0])

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.world.orphans)
    def land_orphan(self, choice: Random) -> None:
        self.world.land_orphan(choice.randrange(len(self.world.orphans)))

    @rule()
    @precondition(lambda self: self.random.random() < 0.1)
    def crash_receiver(self) -> None:
        self.world.crash_receiver()

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.world.machines)
    def abort_sender(self, choice: Random) -> None:
        self.world.abort_sender(*choice.choice(list(self.world.machines)))

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: any(self.world.rooms[room].owner is not None for _, room in self.world.machines))
    def restart_sender(self, choice: Random) -> None:
        helped = [key for key in self.world.machines if self.world.rooms[key[1]].owner is not None]
        self.world.restart_sender(*choice.choice(helped))

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.world.can_begin_again())
    def begin_again(self, choice: Random) -> None:
        self.world.begin_again(choice.choice(self.world.can_begin_again()), self.next_epoch)
        self.next_epoch += 1

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.world.rooms)
    def cancel(self, choice: Random) -> None:
        self.world.cancel(choice.choice(list(self.world.rooms)))

    @invariant()
    def promises_hold(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle(self.random, loss=0.2)


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("backends", [None, 1, 2, 3, 8])
@pytest.mark.parametrize("senders", [1, 2, 3, 4, 8, 16, 64])
@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_without_crashes_every_request_is_complete(backends: int | None, senders: int, loss: float) -> None:
    random = Random(f"{backends} {senders} {loss}")
    world = World(quick_options(backends), can_fence=True, slot_count=200)
    whole = KVShard((TokenSpan(0, max(4, senders)),), 0, 2, 0, 2, True)
    for room in (1, 2, 3):
        addresses = [f"prefill-{index}:1" for index in range(senders)]
        world.add_request(room, whole, split_request(random, whole, addresses))
        for index, address in enumerate(addresses):
            world.start_sender(address, room, index)
        assert world.expect(room)
    world.settle(random, loss)
    assert [state.outcome for state in world.rooms.values()] == ["ready"] * 3
    assert {record.outcome for record in world.send_records} == {TransferOutcome.COMPLETE}
    assert len(world.send_records) == 3 * senders


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_whoever_helps_may_go_at_any_time(seed: int, loss: float) -> None:
    random = Random(f"{seed} {loss}")
    world = World(quick_options(random.choice((None, 1, 2))), can_fence=random.random() < 0.7)
    whole = KVShard((TokenSpan(0, 12),), 0, 2, 0, 2, True)
    addresses = [f"prefill-{index}:1" for index in range(4)]
    world.add_request(1, whole, split_request(random, whole, addresses), owner=addresses[0])
    for index, address in enumerate(addresses):
        world.start_sender(address, 1, index)
    assert world.expect(1)
    for _ in range(random.randrange(40)):
        step = random.randrange(4)
        if step == 0 and world.network:
            world.deliver(random.randrange(len(world.network)))
        elif step == 1 and world.writes:
            world.end_write(random.choice(list(world.writes)))
        else:
            key = random.choice(list(world.machines))
            if world.can_offer(*key):
                world.offer(*key)
            elif world.can_compute(*key):
                world.compute(*key)
    gone = random.sample(addresses[1:], random.randint(1, 3))
    for address in gone:
        world.crash_sender(address)
    if any((address, 1) not in world.heard for address in gone):
        world.restart_sender(addresses[0], 1)  # decode has never heard of it: who has sent for it, tells
    world.settle(random, loss)
    assert [state.outcome for state in world.rooms.values()][-1] == "ready"


def test_the_world_notices_a_write_to_a_slot_of_somebody_else() -> None:
    world = World(quick_options(None), can_fence=True)
    whole = KVShard((TokenSpan(0, 1),), 0, 1, 0, 1)
    world.add_request(1, whole, {"prefill:1": [whole]})
    world.start_sender("prefill:1", 1)
    world.expect(1)
    world.deliver(0)
    world.offer("prefill:1", 1)
    world.compute("prefill:1", 1)
    while world.network:
        world.deliver(0)
    world.slot_room = dict.fromkeys(world.slot_room, 2)
    with pytest.raises(AssertionError, match="somebody else"):
        world.end_write(WriteKey("prefill:1", 1, 0, 0))
    assert Cell(1, 0, 0, 0) not in world.memory.values()
