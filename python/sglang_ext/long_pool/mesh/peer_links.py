"""Links between the members of a long pool: made when they are first used, and each one's failure is its own.

    PeerLinks ──one per peer──▶ PeerLink: a TCP connection, a thread that writes, a thread that reads

Each rank of an instance has links to the same ranks of others, and its first rank to its other ranks. The peer that
comes first connects, the other one waits for it. Both prove that they know the pool's key (`shared_key`).

A message names its step and a tag, and goes straight into the tensor that was posted for it. A step is given up by
word: every call of it fails at once, here and at the informed peers; what is still on its way of that step is
read and thrown away. So a failed step costs no connection. A link ends when its connection does, with all calls that
use it; the next call makes another one.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from sglang_ext.long_pool.link_frames import (
    Frame,
    FrameKind,
    Greeting,
    LinkError,
    PeerAddress,
    PeerId,
    answer_greeting,
    close_connection,
    reason_of,
    send_greeting,
)
from sglang_ext.long_pool.mesh.mesh import Lane, Membership, Mesh, MeshError
from sglang_ext.long_pool.mesh.peer_link import LinkCall, PeerLink, Readiness

logger = logging.getLogger(__name__)

_RETRY_S = 0.05
_MOST_REMEMBERED = 64
_BEAT_S = 0.5
_MEETING_TAG = 2**31  # orders have smaller ones
_LAST_BEATS = 4  # a rank from which none of this many has come does not count


class LinkMesh:
    """A `mesh.Mesh` over links, for tensors in host memory, during one step."""

    def __init__(self, links: PeerLinks, sequence: int, addresses: Mapping[int, PeerAddress]) -> None:
        self.members = tuple(addresses)
        self.sequence = sequence
        self._links = links
        self._addresses = addresses
        self._lock = threading.Lock()
        self._open: list[LinkCall] = []
        self._end_reason: str | None = None
        self._is_told = False
        self._on_failure: Callable[[], None] | None = None

    @property
    def own(self) -> Membership:
        """This instance, and the pool. Raises MeshError where it has left it."""
        return self._links.membership

    @property
    def timeout_s(self) -> float:
        """The longest wait for a message."""
        return self._links.step_timeout_s

    def send(self, tensor: torch.Tensor, instance: int, tag: int, ready: Readiness | None = None) -> WaitedCall:
        """See `mesh.Mesh`; `ready` is waited for before the tensor is read."""
        call = LinkCall(Frame(FrameKind.DATA, self.sequence, tag, as_bytes(tensor)), ready)
        self._add(call)
        self._link(instance).put(call)
        return WaitedCall(self, call, instance)

    def receive(self, tensor: torch.Tensor, instance: int, tag: int) -> WaitedCall:
        call = LinkCall(Frame(FrameKind.DATA, self.sequence, tag, as_bytes(tensor)))
        self._add(call)
        self._link(instance).post(call)
        return WaitedCall(self, call, instance)

    @contextmanager
    def batch(self, lane: Lane = Lane.RING) -> Iterator[None]:
        yield

    def meet(self) -> None:
        """See `mesh.Mesh`."""
        others = [member for member in self.members if member != self.own.instance]
        word = torch.zeros(1, dtype=torch.uint8)
        calls = [self.receive(torch.empty_like(word), member, _MEETING_TAG) for member in others]
        for call in [*calls, *(self.send(word, member, _MEETING_TAG) for member in others)]:
            call.wait()

    def settle(self) -> None:
        pass

    def fail(self, reason: str) -> None:
        """End all calls, also those to come; from any thread."""
        with self._lock:
            self._end_reason = self._end_reason or reason
            calls, self._open = self._open, []
            on_failure, self._on_failure = self._on_failure, None
        for call in calls:
            call.end(reason)
        if on_failure is not None:
            on_failure()

    def when_failed(self, call: Callable[[], None] | None) -> None:
        """Have this called when the step fails, from any thread and at once where it has; None: not any more."""
        with self._lock:
            has_failed = self._end_reason is not None
            self._on_failure = None if has_failed else call
        if has_failed and call is not None:
            call()

    def check(self) -> None:
        """Raises MeshError where the step has been given up."""
        if self._end_reason is not None:
            raise self.broken(self._end_reason)

    def waiting(self) -> AbstractContextManager[None]:
        """Inside, the thread that computes waits for a peer."""
        return self._links.waiting()

    def record_activity(self) -> None:
        """The thread that computes goes on."""
        self._links.record_activity()

    def wait(self, call: LinkCall, instance: int) -> None:
        """Raises MeshError."""
        if not call.is_over:
            with self._links.waiting():
                if not call.has_ended_within(self._links.step_timeout_s):
                    call.end(f"nothing has come for {self._links.step_timeout_s:g} s")
        if call.error is not None:
            raise self.broken(f"instance {instance}: {call.error}", instance)
        self._links.record_activity()

    def broken(self, reason: str, instance: int | None = None) -> MeshError:
        """The error for a call that has failed. The others are informed at once: the step may go on for a while
        here."""
        if not self._is_told:
            self._is_told = True
            self._links.release(self.members, self.sequence, reason)
        return MeshError(reason, instance)

    def _link(self, instance: int) -> PeerLink:
        return self._links.link(PeerId(instance, self._links.rank), self._addresses[instance])

    def _add(self, call: LinkCall) -> None:
        with self._lock:
            if self._end_reason is not None:
                raise MeshError(self._end_reason)
            self._open = [*(open_call for open_call in self._open if not open_call.is_over), call]


class WaitedCall:
    """See `mesh.Pending`."""

    def __init__(self, mesh: LinkMesh, call: LinkCall, instance: int) -> None:
        self._mesh = mesh
        self._call = call
        self._instance = instance

    @property
    def is_over(self) -> bool:
        """Return whether `wait` returns, or raises, at once."""
        return self._call.is_over

    def wait(self) -> None:
        self._mesh.wait(self._call, self._instance)


MeshOver = Callable[[LinkMesh], AbstractContextManager[Mesh]]
"""Opens the mesh that moves the tensors of a step over the links."""


class PeerLinks:
    """All links of one rank. `step` belongs to the thread that computes; everything else may be called from any."""

    def __init__(
        self,
        host: str,
        key: bytes,
        step_timeout_s: float,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
        over: MeshOver = nullcontext,
    ) -> None:
        """Listens at `host`, an address of this machine that the others reach. Raises OSError.

        `step_timeout_s` bounds every wait for a message. `over`: what moves tensors, which are in host memory
        otherwise.
        """
        self.step_timeout_s = step_timeout_s
        self.rank = rank
        self._key = key
        self._clock = clock
        self._over = over
        self._lock = threading.Lock()
        self._membership: Membership | None = None
        self._links: dict[PeerId, PeerLink] = {}
        self._step: LinkMesh | None = None
        self._last_step = 0  # the last step that is over
        self._given_up: dict[int, str] = {}
        self._beats: dict[int, tuple[float, bool]] = {}  # by rank: when it last sent one, whether it was waiting
        self._active_s = clock()
        self._is_waiting = False
        self._has_computed = False
        self._is_closed = threading.Event()
        self._listener = socket.create_server((host, 0), family=_family_of(host), backlog=128)
        self.address = PeerAddress(host, int(self._listener.getsockname()[1]))
        self.rank_addresses: tuple[PeerAddress, ...] = (self.address,)  # of all ranks of this instance
        threading.Thread(target=self._accept, name="cdsp-link-listener", daemon=True).start()
        if rank:
            threading.Thread(target=self._beat, name="cdsp-link-beat", daemon=True).start()

    def close(self) -> None:
        """End everything, for good."""
        self._is_closed.set()
        self.enter(None)
        close_connection(self._listener)

    # ---- membership

    @property
    def membership(self) -> Membership:
        """The present one. Raises MeshError without one."""
        membership = self._membership
        if membership is None:
            raise MeshError("this instance has left the pool")
        return membership

    def enter(self, membership: Membership | None) -> None:
        """The pool that this instance belongs to from now on, or none: links of another one end."""
        with self._lock:
            links = [*self._links.values()]
            self._membership = membership
            self._last_step, self._given_up, self._beats = 0, {}, {}
        for link in links:
            link.end("this instance has left the pool")
        if membership is not None and self.rank == 0:
            for rank, address in enumerate(self.rank_addresses[1:], start=1):
                self.link(PeerId(membership.instance, rank), address)

    def forget(self, link: PeerLink) -> None:
        """It has ended."""
        with self._lock:
            if self._links.get(link.peer) is link:
                del self._links[link.peer]

    def link(self, peer: PeerId, address: PeerAddress | None) -> PeerLink:
        """The link to a peer, made where there is none; it is connected soon or ends. Raises MeshError."""
        with self._lock:
            if self._membership is None:
                raise MeshError("this instance has left the pool")
            link = self._links.get(peer)
            if link is None:
                connects = PeerId(self._membership.instance, self.rank) < peer
                link = self._links[peer] = PeerLink(self, peer, address if connects else None)
            return link

    # ---- steps

    @contextmanager
    def step(self, sequence: int, addresses: Mapping[int, PeerAddress]) -> Iterator[Mesh]:
        """Take part in a step with these instances, this one among them. Steps of a member rise. Raises MeshError.

        Where it fails inside, the others are informed.
        """
        mesh = LinkMesh(self, sequence, addresses)
        with self._lock:
            reason = self._given_up.get(sequence)
            self._step = mesh
        self.record_activity()
        try:
            if reason is not None:
                raise MeshError(reason)
            with self._over(mesh) as carrier:
                yield carrier
        except BaseException as error:
            mesh.broken(reason_of(error) if isinstance(error, Exception) else "interrupted")
            raise
        finally:
            with self._lock:
                self._step, self._last_step = None, max(self._last_step, sequence)
                self._given_up = {open_call: why for open_call, why in self._given_up.items() if open_call > sequence}
                links = [*self._links.values()]
            mesh.fail("the step is over")
            for link in links:
                link.forget_past()
            self.record_activity()

    def give_up(self, sequence: int, reason: str) -> None:
        """A step has come to nothing: every wait for it, now or later, fails. The other ranks are informed."""
        self._abandon(sequence, reason)
        with self._lock:
            own = None if self._membership is None or self.rank else self._membership.instance
            known = [link for peer, link in self._links.items() if peer.instance == own]
        word = Frame(FrameKind.GIVE_UP, sequence, 0, memoryview(reason.encode()))
        for link in known:
            link.put(LinkCall(word), is_urgent=True)

    def give_up_now(self, sequence: int | None) -> None:
        """The coordinator gives a step up, or has gone: then the one under way is."""
        if sequence is not None:
            self.give_up(sequence, "the step has been given up")
        elif (step := self._step) is not None:
            self.give_up(step.sequence, "the coordinator has gone")

    def is_past(self, sequence: int) -> bool:
        """Return whether a step is over here, or given up."""
        return sequence <= self._last_step or sequence in self._given_up

    def take_word(self, peer: PeerId, frame: Frame) -> None:
        """A word of a peer, from its link's thread."""
        if frame.kind is FrameKind.GIVE_UP:
            self._abandon(frame.sequence, bytes(frame.data).decode(errors="replace"))
        elif frame.kind is FrameKind.ALIVE:
            self._beats[peer.rank] = self._clock(), frame.tag == 1

    def _abandon(self, sequence: int, reason: str) -> None:
        with self._lock:
            if self.is_past(sequence):
                return
            self._given_up[sequence] = reason
            while len(self._given_up) > _MOST_REMEMBERED:
                del self._given_up[min(self._given_up)]
            step, links = self._step, [*self._links.values()]
        if step is not None and step.sequence == sequence:
            step.fail(reason)
        for link in links:
            link.forget_past()

    def release(self, instances: Iterable[int], sequence: int, reason: str) -> None:
        """Inform the connected ones of these instances that they need not wait for this rank in a step."""
        with self._lock:
            links = [self._links.get(PeerId(instance, self.rank)) for instance in instances]
        word = Frame(FrameKind.GIVE_UP, sequence, 0, memoryview(f"a peer has failed: {reason}"[:400].encode()))
        for link in links:
            if link is not None and link.is_connected:
                link.put(LinkCall(word), is_urgent=True)

    # ---- signs of life

    def record_activity(self) -> None:
        """The thread that computes goes on."""
        self._active_s = self._clock()

    def record_computed(self) -> None:
        """A chunk has been computed here."""
        self._has_computed = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the thread that computes waits for a peer."""
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False
            self.record_activity()

    @property
    def silent_s(self) -> float:
        """Return how long the thread that computes has done nothing; 0 while it, or another rank's, waits for a peer.

        In steps before its first chunk is done that may be compiling: what its peers wait for counts only beyond.
        """
        now_s = self._clock()
        since_s = now_s - _LAST_BEATS * _BEAT_S
        beats = [is_waiting for beaten_s, is_waiting in list(self._beats.values()) if beaten_s >= since_s]
        if self._is_waiting or any(beats):
            return 0.0
        silent_s = now_s - self._active_s
        is_first = self._step is not None and not self._has_computed
        return max(0.0, silent_s - self.step_timeout_s) if is_first else silent_s

    def _beat(self) -> None:
        while not self._is_closed.wait(_BEAT_S):
            with self._lock:
                membership = self._membership
                first = None if membership is None else self._links.get(PeerId(membership.instance, 0))
            if first is not None and first.is_connected:
                word = Frame(FrameKind.ALIVE, 0, int(self._is_waiting), memoryview(b""))
                first.put(LinkCall(word), is_urgent=True)

    # ---- connections

    def connect(
        self, peer: PeerId, address: PeerAddress, deadline_s: float, is_wanted: Callable[[], bool]
    ) -> socket.socket:
        """A connection to a peer, which may not have joined yet; blocks. Raises LinkError."""
        while True:
            membership = self._membership
            if membership is None or not is_wanted():
                raise LinkError("the pool has ended")
            greeting = Greeting(membership.pool_id, PeerId(membership.instance, self.rank), peer)
            try:
                connection = socket.create_connection(address, max(0.1, deadline_s - time.monotonic()))
                try:
                    send_greeting(connection, greeting, self._key)
                except BaseException:
                    connection.close()
                    raise
                return connection
            except (LinkError, OSError) as error:
                if time.monotonic() + _RETRY_S >= deadline_s:
                    raise LinkError(f"{address.host}:{address.port}: {reason_of(error)}") from None
            time.sleep(_RETRY_S)

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closed.is_set():
                    logger.error("cdsp: peers are not listened to any more: %s", reason_of(error))
                return
            threading.Thread(target=self._greet, args=(connection,), name="cdsp-link-greeting", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            greeting = answer_greeting(connection, self._key, self._is_expected)
            for _ in range(2):
                link = self.link(greeting.caller, None)
                if link.take(connection):
                    return
                # The peer has noticed before us that the earlier connection has ended.
                link.end("the peer has connected again")
            raise LinkError("another connection was faster")
        except (LinkError, MeshError, OSError) as error:
            logger.debug("cdsp: a peer is refused: %s", reason_of(error))
            connection.close()

    def _is_expected(self, greeting: Greeting) -> bool:
        membership = self._membership
        return (
            membership is not None
            and greeting.pool_id == membership.pool_id
            and (greeting.callee == PeerId(membership.instance, self.rank) and greeting.caller < greeting.callee)
        )


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def _family_of(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]


def route_to(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached; nothing is sent. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
