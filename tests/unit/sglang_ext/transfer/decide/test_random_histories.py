"""Random histories: messages lost, repeated, delayed and reordered, processes crash, requests are aborted at any time.

Half of the requests have helpers: when one of those fails, the request begins again in the same slots, and its owner
sends everything. What the cluster checks at every step: KV is written to slots of its own request only, a ready request
has every byte in its place, no backend takes two chunks at a time or gets lost, and a backend that a request does not
hold yet goes to the earliest first handshake that has a chunk waiting. At the end of every history the cluster does its
work without faults and everything must end, with nothing held, allowed or occupied.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_ext.transfer.decide.protocol import TransferOutcome
from sglang_ext.transfer.decide.shards import KVShard, TokenSpan
from support.examples import examples
from support.handshake_cluster import Cell, SimulatedCluster, WriteKey, quick_options

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
        self.cluster = SimulatedCluster(quick_options(backends, hold_idle_s), can_fence=can_fence)
        self.random = Random(seed)
        self.next_transfer = 1
        self.next_epoch = 2

    @rule(seed=st.integers(0, 1 << 30), tells_count=st.booleans())
    @precondition(lambda self: self.next_transfer <= 6)
    def add_request(self, seed: int, tells_count: bool) -> None:
        random = Random(seed)
        transfer_id, self.next_transfer = self.next_transfer, self.next_transfer + 1
        count = random.choice(SENDER_COUNTS)
        senders = [f"prefill-{index}:1" for index in random.sample(range(64), count)]
        tokens = random.randint(1, 8) if count < 64 else 24
        first = random.choice((0, 5))
        whole = KVShard((TokenSpan(first, first + tokens),), 1, random.choice((1, 2)), 3, random.choice((1, 2)), True)
        whole = whole._replace(has_aux=random.random() < 0.7)
        shards = split_request(random, whole, senders)
        owner = random.choice(senders) if random.random() < 0.5 else None
        self.cluster.add_request(transfer_id, whole, shards, owner)
        for address in senders:
            self.cluster.start_sender(address, transfer_id, self.next_epoch, tells_count=tells_count)
            self.next_epoch += 1

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(
        lambda self: any(one.slots is None and one.outcome is None for one in self.cluster.transfers.values())
    )
    def expect(self, choice: Random) -> None:
        waiting = [key for key, one in self.cluster.transfers.items() if one.slots is None and one.outcome is None]
        self.cluster.expect(choice.choice(waiting))

    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, 40))
    @precondition(lambda self: self.cluster.network)
    def deliver(self, choice: Random, count: int) -> None:
        for _ in range(min(count, len(self.cluster.network))):
            self.cluster.deliver(choice.randrange(len(self.cluster.network)))

    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, 20))
    @precondition(lambda self: self.cluster.network)
    def repeat(self, choice: Random, count: int) -> None:
        for _ in range(count):
            self.cluster.deliver(choice.randrange(len(self.cluster.network)), is_kept=True)

    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, 20))
    @precondition(lambda self: self.cluster.network)
    def lose(self, choice: Random, count: int) -> None:
        for _ in range(min(count, len(self.cluster.network))):
            self.cluster.network.pop(choice.randrange(len(self.cluster.network)))

    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, 40))
    def offer_and_compute(self, choice: Random, count: int) -> None:
        for _ in range(count):
            can_offer = [key for key in self.cluster.machines if self.cluster.can_offer(*key)]
            can_compute = [key for key in self.cluster.machines if self.cluster.can_compute(*key)]
            if can_offer and (choice.random() < 0.5 or not can_compute):
                self.cluster.offer(*choice.choice(can_offer))
            elif can_compute:
                self.cluster.compute(*choice.choice(can_compute))

    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, 20))
    @precondition(lambda self: self.cluster.writes)
    def end_writes(self, choice: Random, count: int) -> None:
        for _ in range(min(count, len(self.cluster.writes))):
            self.cluster.end_write(choice.choice(list(self.cluster.writes)))

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.cluster.writes)
    def fail_write(self, choice: Random) -> None:
        self.cluster.end_write(choice.choice(list(self.cluster.writes)), is_failing=True)

    @rule()
    @precondition(lambda self: self.cluster.fences)
    def fence_done(self) -> None:
        self.cluster.fence_done()

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.3, 0.6, 2.5, 10.0]))
    def advance(self, seconds: float) -> None:
        self.cluster.advance(seconds)

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.cluster.machines)
    def crash_sender(self, choice: Random) -> None:
        self.cluster.crash_sender(choice.choice(list(self.cluster.machines))[0])

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.cluster.orphans)
    def land_orphan(self, choice: Random) -> None:
        self.cluster.land_orphan(choice.randrange(len(self.cluster.orphans)))

    @rule()
    @precondition(lambda self: self.random.random() < 0.1)
    def crash_receiver(self) -> None:
        self.cluster.crash_receiver()

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.cluster.machines)
    def abort_sender(self, choice: Random) -> None:
        self.cluster.abort_sender(*choice.choice(list(self.cluster.machines)))

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(
        lambda self: any(
            self.cluster.transfers[transfer_id].owner is not None for _, transfer_id in self.cluster.machines
        )
    )
    def restart_sender(self, choice: Random) -> None:
        helped = [key for key in self.cluster.machines if self.cluster.transfers[key[1]].owner is not None]
        self.cluster.restart_sender(*choice.choice(helped))

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.cluster.can_begin_again())
    def begin_again(self, choice: Random) -> None:
        self.cluster.begin_again(choice.choice(self.cluster.can_begin_again()), self.next_epoch)
        self.next_epoch += 1

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.cluster.transfers)
    def cancel(self, choice: Random) -> None:
        self.cluster.cancel(choice.choice(list(self.cluster.transfers)))

    @invariant()
    def promises_hold(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check()

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.settle(self.random, loss=0.2)


TestHistories = pytest.mark.slow(Histories.TestCase)
TestHistories.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
@pytest.mark.parametrize("backends", [None, 1, 2, 3, 8])
@pytest.mark.parametrize("senders", [1, 2, 3, 4, 8, 16, 64])
@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_without_crashes_every_request_is_complete(backends: int | None, senders: int, loss: float) -> None:
    random = Random(f"{backends} {senders} {loss}")
    cluster = SimulatedCluster(quick_options(backends), can_fence=True, slot_count=200)
    whole = KVShard((TokenSpan(0, max(4, senders)),), 0, 2, 0, 2, True)
    for transfer_id in (1, 2, 3):
        addresses = [f"prefill-{index}:1" for index in range(senders)]
        cluster.add_request(transfer_id, whole, split_request(random, whole, addresses))
        for index, address in enumerate(addresses):
            cluster.start_sender(address, transfer_id, index)
        assert cluster.expect(transfer_id)
    cluster.settle(random, loss)
    assert [state.outcome for state in cluster.transfers.values()] == ["ready"] * 3
    assert {record.outcome for record in cluster.send_records} == {TransferOutcome.COMPLETE}
    assert len(cluster.send_records) == 3 * senders


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_a_helper_may_go_at_any_time(seed: int, loss: float) -> None:
    random = Random(f"{seed} {loss}")
    cluster = SimulatedCluster(quick_options(random.choice((None, 1, 2))), can_fence=random.random() < 0.7)
    whole = KVShard((TokenSpan(0, 12),), 0, 2, 0, 2, True)
    addresses = [f"prefill-{index}:1" for index in range(4)]
    cluster.add_request(1, whole, split_request(random, whole, addresses), owner=addresses[0])
    for index, address in enumerate(addresses):
        cluster.start_sender(address, 1, index)
    assert cluster.expect(1)
    for _ in range(random.randrange(40)):
        step = random.randrange(4)
        if step == 0 and cluster.network:
            cluster.deliver(random.randrange(len(cluster.network)))
        elif step == 1 and cluster.writes:
            cluster.end_write(random.choice(list(cluster.writes)))
        else:
            key = random.choice(list(cluster.machines))
            if cluster.can_offer(*key):
                cluster.offer(*key)
            elif cluster.can_compute(*key):
                cluster.compute(*key)
    gone = random.sample(addresses[1:], random.randint(1, 3))
    for address in gone:
        cluster.crash_sender(address)
    if any((address, 1) not in cluster.received for address in gone):
        cluster.restart_sender(addresses[0], 1)  # decode has no report of it: the helper that has sent one tells
    cluster.settle(random, loss)
    assert [state.outcome for state in cluster.transfers.values()][-1] == "ready"


def test_the_cluster_notices_a_write_to_a_slot_of_another_request() -> None:
    cluster = SimulatedCluster(quick_options(None), can_fence=True)
    whole = KVShard((TokenSpan(0, 1),), 0, 1, 0, 1)
    cluster.add_request(1, whole, {"prefill:1": [whole]})
    cluster.start_sender("prefill:1", 1)
    cluster.expect(1)
    cluster.deliver(0)
    cluster.offer("prefill:1", 1)
    cluster.compute("prefill:1", 1)
    while cluster.network:
        cluster.deliver(0)
    cluster.slot_transfer = dict.fromkeys(cluster.slot_transfer, 2)
    with pytest.raises(AssertionError, match="another request"):
        cluster.end_write(WriteKey("prefill:1", 1, 0, 0))
    assert Cell(1, 0, 0, 0) not in cluster.memory.values()
