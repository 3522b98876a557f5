"""A small handshake in every order in which its steps can happen, with one message lost or repeated anywhere.

The states are found by breadth: in each one, every message under way may arrive, get lost or arrive twice, every
write may end, a sender may abort or crash, decode may cancel (as far as a budget allows). From each state that has not
been seen the cluster then goes on without faults, and must end clean. Nothing is left to chance.

Two things keep the number of states in bounds and change no result: an answer that would tell its sender nothing is
taken off the network (what is known only grows, so it would never tell it anything), and in the largest models a
write ends at once (it concerns its sender alone until the sender reports it). Equal messages count
once; `repeats` are on top.
"""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import pytest

from sglang_ext.transfer.decide.protocol import Message, ReceiverReport
from sglang_ext.transfer.decide.shards import KVShard, TokenSpan
from support.handshake_cluster import SimulatedCluster, quick_options


@dataclass(frozen=True)
class Budget:
    """How many faults of each kind may still happen."""

    losses: int = 0
    repeats: int = 0
    aborts: int = 0
    cancels: int = 0
    crashes: int = 0


def begin(requests: int, senders: int, backends: int, *, can_fence: bool = True) -> SimulatedCluster:
    """Each sender has shaken hands and offered its only chunk, computed already; no message has arrived."""
    cluster = SimulatedCluster(quick_options(backends), can_fence=can_fence, slot_count=requests * senders)
    for transfer_id in range(1, requests + 1):
        whole = KVShard((TokenSpan(0, senders),), 0, 1, 0, 1)
        shards = {
            f"prefill-{index}": [whole._replace(tokens=(TokenSpan(index, index + 1),))] for index in range(senders)
        }
        cluster.add_request(transfer_id, whole, shards)
        assert cluster.expect(transfer_id)
        for address in shards:
            cluster.start_sender(address, transfer_id)
            cluster.network.pop()  # the report of the offer says all that the first one did
            cluster.offer(address, transfer_id)
            cluster.compute(address, transfer_id)
    return cluster


def steps(cluster: SimulatedCluster, budget: Budget) -> list[tuple[str, int, Budget]]:
    """Everything that can happen now: what, which, and the budget after it."""
    found = [("deliver", index, budget) for index in range(len(cluster.network))]
    found += [("write", index, budget) for index in range(len(cluster.writes))]
    found += [("fence", 0, budget)] * bool(cluster.fences)
    if budget.losses:
        less = Budget(budget.losses - 1, budget.repeats, budget.aborts, budget.cancels, budget.crashes)
        found += [("lose", index, less) for index in range(len(cluster.network))]
    if budget.repeats:
        less = Budget(budget.losses, budget.repeats - 1, budget.aborts, budget.cancels, budget.crashes)
        found += [("repeat", index, less) for index in range(len(cluster.network))]
    if budget.aborts:
        less = Budget(budget.losses, budget.repeats, budget.aborts - 1, budget.cancels, budget.crashes)
        found += [("abort", index, less) for index in range(len(cluster.machines))]
    if budget.cancels:
        less = Budget(budget.losses, budget.repeats, budget.aborts, budget.cancels - 1, budget.crashes)
        found += [
            ("cancel", transfer_id, less) for transfer_id, state in cluster.transfers.items() if state.outcome is None
        ]
    if budget.crashes:
        less = Budget(budget.losses, budget.repeats, budget.aborts, budget.cancels, budget.crashes - 1)
        found += [("crash", index, less) for index in range(len(cluster.machines))]
    return found


def take(cluster: SimulatedCluster, what: str, index: int, *, is_eager: bool) -> None:
    if what == "deliver":
        cluster.deliver(index)
    elif what == "repeat":
        cluster.deliver(index, is_kept=True)
    elif what == "lose":
        cluster.network.pop(index)
    elif what == "write":
        cluster.end_write(list(cluster.writes)[index])
    elif what == "fence":
        cluster.fence_done()
    elif what == "abort":
        cluster.abort_sender(*list(cluster.machines)[index])
    elif what == "cancel":
        cluster.cancel(index)
    elif what == "crash":
        cluster.crash_sender(list(cluster.machines)[index][0])
    while is_eager and cluster.writes:
        cluster.end_write(next(iter(cluster.writes)))
    cluster.network = [entry for entry in dict.fromkeys(cluster.network) if tells_something(cluster, *entry)]
    cluster.check()


def tells_something(cluster: SimulatedCluster, to: str, message: Message) -> bool:
    """Whether a message would change its receiver, or be answered."""
    machine = cluster.machines.get((to, message.transfer_id))
    if not isinstance(message, ReceiverReport):
        return True
    if machine is None or machine.is_over:
        return False
    return _tells_something(pickle.dumps(machine), message, cluster.now_s)


@lru_cache(maxsize=100_000)
def _tells_something(frozen: bytes, message: ReceiverReport, now_s: float) -> bool:
    machine, twin = pickle.loads(frozen), pickle.loads(frozen)
    return bool(twin.on_report(message, now_s)) or pickle.dumps(twin) != pickle.dumps(machine)


def key_of(cluster: SimulatedCluster, budget: Budget) -> tuple[object, ...]:
    """What the future depends on; messages under way are a multiset."""
    network = tuple(sorted(repr(message) for message in cluster.network))
    machines = tuple(
        (key, repr(sorted(vars(machine).items(), key=repr))) for key, machine in sorted(cluster.machines.items())
    )
    chunks = tuple(
        (
            key,
            [
                sorted((name, getattr(chunk, name)) for name in ("cells_written", "is_aux_written"))
                for chunk in machine._chunks
            ],
        )
        for key, machine in sorted(cluster.machines.items())
    )
    receiver = cluster.receiver
    requests = tuple(
        (
            transfer_id,
            request.phase,
            request.order,
            request.cells_stored,
            [
                (
                    sender.address,
                    sender.granted,
                    sender.stored,
                    sender.total,
                    sender.outstanding,
                    sender.is_stopped,
                    len(sender.shards),
                )
                for sender in request.senders.values()
            ],
        )
        for transfer_id, request in sorted(receiver._requests.items())
    )
    pool = (
        sorted(receiver.backends._free),
        sorted(receiver.backends._holder.items()),
        list(receiver.backends._idle_since_s),
    )
    rest = (
        list(receiver._ended),
        receiver._queue,
        sorted(cluster.writes),
        cluster.fences,
        sorted(cluster.slot_transfer.items()),
    )
    return (network, strip(repr(machines)), repr(chunks), repr(requests), repr(pool), repr(rest), budget)


def strip(text: str) -> str:
    """Without the addresses of objects."""
    return "".join(piece.split(">", 1)[-1] if index else piece for index, piece in enumerate(text.split(" object at ")))


def explore(cluster: SimulatedCluster, budget: Budget, *, is_eager: bool = False) -> int:
    """Visit every state; returns how many there are."""
    seen = {key_of(cluster, budget)}
    frontier: deque[tuple[bytes, Budget, tuple[str, ...]]] = deque([(pickle.dumps(cluster), budget, ())])
    while frontier:
        frozen, left, story = frontier.popleft()
        for what, index, after in steps(pickle.loads(frozen), left):
            cluster = pickle.loads(frozen)
            path = (*story, f"{what} {index}")
            try:
                take(cluster, what, index, is_eager=is_eager)
                key = key_of(cluster, after)
                if key in seen:
                    continue
                seen.add(key)
                frontier.append((pickle.dumps(cluster), after, path))
                cluster.settle(Random(0))
            except AssertionError as error:
                raise AssertionError(f"{error}: {' → '.join(path)}") from error
    return len(seen)


@pytest.mark.full
@pytest.mark.parametrize(
    ("requests", "senders", "backends", "budget"),
    [
        (1, 1, 1, Budget(losses=1, repeats=1, aborts=1, cancels=1, crashes=1)),
        (2, 1, 1, Budget(losses=1, repeats=1)),
        (1, 2, 1, Budget(losses=1, repeats=1)),
        (1, 2, 1, Budget(aborts=1)),
        (1, 2, 1, Budget(cancels=1)),
        (1, 2, 2, Budget(losses=1, crashes=1)),
    ],
    ids=str,
)
def test_no_state_is_stuck_and_nothing_is_left(requests: int, senders: int, backends: int, budget: Budget) -> None:
    assert explore(begin(requests, senders, backends), budget) > 100


@pytest.mark.slow
@pytest.mark.parametrize("backends", [1, pytest.param(2, marks=pytest.mark.full)])
def test_two_requests_of_two_senders(backends: int) -> None:
    assert explore(begin(2, 2, backends), Budget(), is_eager=True) > 1000
