"""A long pool in one process: members as threads, a mesh of queues, a coordinator without a network.

What fails is drawn: calls that no peer answers, steps that do not begin.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from sglang_ext.long_pool.coordinator.pool_protocol import NewMember, PoolProtocol
from sglang_ext.long_pool.decide.orders import MemberReport
from sglang_ext.long_pool.link_frames import PeerAddress
from sglang_ext.long_pool.member.pool_link import ReplicatedLink
from sglang_ext.long_pool.member.pool_member import Collected, Outcome, PoolMember
from sglang_ext.long_pool.member.ranks import SINGLE_RANK, Ranks
from sglang_ext.long_pool.mesh.mesh import Lane, Membership, MeshError, Pending
from sglang_ext.long_pool.messages import (
    PROTOCOL_VERSION,
    AddressedMessage,
    FromMember,
    Hello,
    PullOrder,
    ToMember,
    Welcome,
)
from support.toy_engine import LAYERS, ToyEngine, ToyPool

RECEIVE_TIMEOUT_S = 0.3


POOL_ID = 16 * "ab"
_MEETING_TAG = -1


class FakeLink:
    """Orders in, messages out, and a session that a test may change."""

    wake_descriptor = None

    def __init__(self, instance: int = 0) -> None:
        self.welcome: Welcome | None = Welcome(instance, POOL_ID, 1.0)
        self.inbox: deque[ToMember] = deque()
        self.sent: deque[FromMember] = deque()
        self.woken = threading.Event()

    def session(self) -> Welcome | None:
        return self.welcome

    def receive(self) -> list[ToMember]:
        return [self.inbox.popleft() for _ in range(len(self.inbox))]

    def send(self, message: FromMember) -> None:
        self.sent.append(message)

    def wake(self) -> None:
        self.woken.set()


class Wires:
    """What is under way between members, of all steps."""

    def __init__(self, failure_rate: float = 0.0, seed: int = 0, timeout_s: float = RECEIVE_TIMEOUT_S) -> None:
        """`timeout_s`: how long a message is waited for. A machine that stands still takes longer than a short one."""
        self.timeout_s = timeout_s
        self._queues: dict[tuple[int, int, int, int], queue.SimpleQueue[torch.Tensor]] = defaultdict(queue.SimpleQueue)
        self._random = random.Random(seed)
        self.failure_rate = failure_rate

    def queue(self, sequence: int, source: int, target: int, tag: int) -> queue.SimpleQueue[torch.Tensor]:
        return self._queues[sequence, source, target, tag]

    def fails(self) -> bool:
        return self._random.random() < self.failure_rate


class MemoryMeshes:
    """See `long_pool.mesh.mesh.Meshes`."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self._instance: int | None = None
        self._given_up: set[int] = set()

    def enter(self, membership: Membership | None) -> None:
        self._instance = None if membership is None else membership.instance
        self._given_up = set()

    @contextmanager
    def step(self, sequence: int, addresses: Mapping[int, PeerAddress]) -> Iterator[MemoryMesh]:
        assert self._instance in addresses
        if self._wires.fails() or sequence in self._given_up:
            raise MeshError("drawn")
        yield MemoryMesh(self._wires, sequence, tuple(addresses), self._instance)

    def give_up(self, sequence: int, reason: str) -> None:
        self._given_up.add(sequence)

    def record_activity(self) -> None:
        pass

    def record_computed(self) -> None:
        pass


class MemoryMesh:
    """See `long_pool.mesh.mesh.Mesh`."""

    def __init__(self, wires: Wires, sequence: int, members: Sequence[int], instance: int) -> None:
        self.members = tuple(members)
        self._wires, self._sequence, self._instance = wires, sequence, instance

    def send(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        if self._wires.fails():
            raise MeshError("drawn")
        self._wires.queue(self._sequence, self._instance, instance, tag).put(tensor.clone())
        return _Done()

    def receive(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        source = self._wires.queue(self._sequence, instance, self._instance, tag)
        return _Receiving(source, tensor, self._wires.timeout_s)

    def batch(self, lane: Lane = Lane.RING) -> AbstractContextManager[None]:
        return nullcontext()

    def meet(self) -> None:
        others = [one for one in self.members if one != self._instance]
        for other in others:
            self.send(torch.zeros(1), other, _MEETING_TAG)
        for other in others:
            self.receive(torch.empty(1), other, _MEETING_TAG).wait()

    def settle(self) -> None:
        pass


class _Done:
    def wait(self) -> None:
        pass


class _Receiving:
    def __init__(self, source: queue.SimpleQueue[torch.Tensor], target: torch.Tensor, timeout_s: float) -> None:
        self._source, self._target, self._timeout_s = source, target, timeout_s

    def wait(self) -> None:
        try:
            self._target.copy_(self._source.get(timeout=self._timeout_s))
        except queue.Empty:
            raise MeshError("nothing has come") from None


def member_turn(member: PoolMember) -> list[Outcome]:
    """Carry out what has been ordered, and at most one step."""
    return [*member.take_orders(), *member.compute()]


class MemoryMember:
    """One instance, or one rank of it."""

    def __init__(
        self,
        instance: int,
        wires: Wires,
        pool: ToyPool,
        ranks: Ranks = SINGLE_RANK,
        replicated: ReplicatedLink | None = None,
    ) -> None:
        self.instance = instance
        self.ranks_count = ranks.size
        self.pool = pool
        self.receivers: tuple[str, ...] = ()
        self.link = FakeLink(instance)
        # Where there are several ranks, a model has collectives of its own.
        engine = ToyEngine(pool, on_layer=lambda layer: None if ranks.size == 1 else _expect(ranks.all(True)))
        self.member = PoolMember(engine, replicated or self.link, MemoryMeshes(wires), ranks=ranks)
        pool.kept = self.member.kept
        if ranks.size == 1:
            member_turn(self.member)  # joins
        self.offered: dict[int, tuple[tuple[int, ...], torch.Tensor]] = {}
        self.ended: dict[int, Outcome] = {}
        self.kv: dict[int, torch.Tensor] = {}  # behind the cached prefix, of what was collected

    def offer(self, token_ids: tuple[int, ...], cached: torch.Tensor) -> int:
        """Offer a prompt; its number. `cached`: KV of the prefix, [layers, 2, tokens, heads, size]."""
        prefix = self.pool.allocate(cached.shape[2])
        for layer in range(LAYERS):
            self.pool.write(layer, prefix, cached[layer])
        request = self.member.offer(token_ids, prefix.numel(), prefix, waited_s=0.0, slack_s=None)
        self.offered[request] = token_ids, prefix
        return request

    def turn(self) -> None:
        for outcome in member_turn(self.member):
            self.ended[outcome.request] = outcome
            if isinstance(outcome, Collected):
                self.kv[outcome.request] = self.pool.kv(outcome.slots)
                self.pool.free(outcome.slots)
            self.pool.free(self.offered[outcome.request][1])


def _expect(is_so: bool) -> None:
    assert is_so


class ServedMember(Protocol):
    """What a `MemoryPool` wants of one."""

    instance: int
    link: FakeLink
    ranks_count: int
    receivers: tuple[str, ...]

    @property
    def pool(self) -> ToyPool: ...

    def turn(self) -> None: ...


class MemoryPool:
    """Members, each in a thread of its own, and their coordinator in the caller's."""

    def __init__(self, protocol: PoolProtocol, members: Sequence[ServedMember], page_tokens: int) -> None:
        self._protocol = protocol
        self.members = members
        self._has_ended = threading.Event()
        self.errors: list[BaseException] = []
        self.pulled: dict[int, int] = {}  # by pull: the prompt whose rows it brings to one member
        for one in members:
            report = MemberReport(0.0, one.pool.free_tokens)
            addresses = (PeerAddress("nowhere", 1),) * one.ranks_count
            hello = Hello(
                *(PROTOCOL_VERSION, f"m{one.instance}", "node", "toy", LAYERS, page_tokens, report),
                addresses=addresses,
                receivers=one.receivers,
            )
            answer = protocol.greet(hello)
            assert answer == NewMember(one.instance)
            self._deliver(protocol.join(one.instance, hello, time.monotonic()))

    def run(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Serve until `is_done`."""
        self._has_ended.clear()
        threads = [threading.Thread(target=self._serve, args=(one,)) for one in self.members]
        for thread in threads:
            thread.start()
        deadline_s = time.monotonic() + timeout_s
        try:
            while not is_done() and not self.errors:
                assert time.monotonic() < deadline_s, "requests do not end"
                time.sleep(0.01)
                self.deliver_messages()
        finally:
            self._has_ended.set()
            for thread in threads:
                thread.join()
        assert not self.errors, self.errors

    def _serve(self, one: ServedMember) -> None:
        try:
            while not self._has_ended.is_set():
                one.turn()
                time.sleep(0.001)
        except BaseException as error:
            self.errors.append(error)

    def deliver_messages(self) -> None:
        now_s = time.monotonic()
        for one in self.members:
            while one.link.sent:
                self._deliver(self._protocol.take(one.instance, one.link.sent.popleft(), now_s))
        self._deliver(self._protocol.tick(now_s))

    def _deliver(self, out: Sequence[AddressedMessage]) -> None:
        for instance, message in out:
            if isinstance(message, PullOrder):
                prompt = message.pull.parts[-1].prompt
                self.pulled[message.pull.pull] = self.pulled.get(prompt, prompt)
            self.members[instance].link.inbox.append(message)
