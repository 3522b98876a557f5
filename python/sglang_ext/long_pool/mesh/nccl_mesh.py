"""A mesh over NCCL for tensors in the memory of GPUs: communicators of each group, made when it first meets.

    step begins ──links: "mine is called …, I am on GPU …"──▶ first member
                ◀──"use it" / "make another, by these ids" / "none: links"──

Words travel over the links, bulk by NCCL. A group has a communicator for each lane, on a stream of its own: NCCL runs
what a pair has started in the order in which both have started it, so the ring does not wait for earlier KV that
moves. Communicators are kept for later steps of the group. Where a step is given up, or fails, the communicators that
it uses are aborted: what waits for a peer on the device ends, and the group makes others next time. Which ones a member
has left does not matter, as the first member asks for their names in each step.

Starting a call, and waiting for one, returns at once; only `settle` blocks.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from sglang_ext.long_pool.mesh.device_streams import DeviceStreams, Mark, SideStream
from sglang_ext.long_pool.mesh.mesh import Lane, Mesh, MeshError, Pending
from sglang_ext.long_pool.mesh.nccl_library import UNIQUE_ID_BYTES, Nccl, NcclError
from sglang_ext.long_pool.mesh.peer_links import LinkMesh, MeshOver
from sglang_ext.long_pool.mesh.staged_mesh import StagedMeshes

logger = logging.getLogger(__name__)

MOST_GROUPS = 8
_POLL_S = 0.0002
# A thread of NCCL's puts a call on its stream within some ten microseconds: sleeping takes longer than that.
_SPIN_S = 0.0005
_NAME_BYTES = 16
_DEVICE_BYTES = 16
_NO_NAME = bytes(_NAME_BYTES)
_HAS_FAILED = b"\xff" * _NAME_BYTES
# Calls that the host may be ahead of the device: their memory is taken, and a peer that hangs is noticed by then.
_MOST_AHEAD = 4
# Above all tags that orders have.
_TAG = 2**32 - 1


class Agreement(NamedTuple):
    """Describes what the first member of a group says at the beginning of a step."""

    name: bytes  # of the group's communicators; `_NO_NAME`: only links
    unique_ids: tuple[bytes, ...]  # by lane, of new ones; empty: use the existing communicators

    def packed(self) -> bytes:
        ids = b"".join(self.unique_ids).ljust(len(Lane) * UNIQUE_ID_BYTES, b"\0")
        return self.name + bytes([bool(self.unique_ids)]) + ids

    @classmethod
    def unpacked(cls, data: bytes) -> Agreement:
        ids = data[_NAME_BYTES + 1 :]
        parts = tuple(ids[start : start + UNIQUE_ID_BYTES] for start in range(0, len(ids), UNIQUE_ID_BYTES))
        return cls(data[:_NAME_BYTES], parts if data[_NAME_BYTES] else ())


_ANSWER_BYTES = len(Agreement(_NO_NAME, ()).packed())


def decide(names: Sequence[bytes], devices: Sequence[bytes], unique_id: Callable[[], bytes]) -> Agreement:
    """Return how a group's members connect: `names` of the communicators that each of them has, and their `devices`.

    NCCL does not connect two members on one device, and where it has failed it is not tried again.
    """
    if len(set(devices)) < len(devices) or _HAS_FAILED in names:
        return Agreement(_NO_NAME, ())
    if len(set(names)) == 1 and names[0] != _NO_NAME:
        return Agreement(names[0], ())
    return Agreement(secrets.token_bytes(_NAME_BYTES), tuple(unique_id() for _ in Lane))


class _Connection(NamedTuple):
    name: bytes
    communicators: Mapping[Lane, Communicator]

    def abort(self) -> None:
        for communicator in self.communicators.values():
            communicator.abort()


class NcclMeshes:
    """Makes the mesh of each step, for one device. Belongs to the thread that computes."""

    def __init__(
        self,
        nccl: Nccl,
        streams: DeviceStreams,
        *,
        fallback: MeshOver | None = None,
        may_fall_back: bool = True,
        max_groups: int = MOST_GROUPS,
    ) -> None:
        """`may_fall_back`: groups whose GPUs NCCL does not connect go over `fallback`, by default the links.
        `max_groups` of which communicators are kept."""
        self._nccl = nccl
        self._streams = streams
        self._sides = {lane: streams.side_stream() for lane in Lane}
        self._fallback = StagedMeshes(streams).over if fallback is None else fallback
        self._may_fall_back = may_fall_back
        self._max_groups = max_groups
        self._pool_id = b""
        self._groups: OrderedDict[tuple[int, ...], _Connection] = OrderedDict()  # the one used longest ago first
        self._unconnected: set[tuple[int, ...]] = set()  # whose communicators could not be made

    @contextmanager
    def over(self, links: LinkMesh) -> Iterator[Mesh]:
        """See `peer_links.MeshOver`. Raises MeshError."""
        if links.own.pool_id != self._pool_id:
            self.close()
            self._pool_id = links.own.pool_id
        if len(links.members) == 1:
            with self._fallback(links) as mesh:
                yield mesh
            return
        answer = self._meet(links)
        if answer.name == _NO_NAME:
            if not self._may_fall_back:
                raise MeshError(f"NCCL does not connect {list(links.members)}: it has failed, or two share a GPU")
            with self._fallback(links) as mesh:
                yield mesh
            return
        group = self._group(links, answer)
        links.when_failed(group.abort)
        try:
            yield NcclMesh(links, self._nccl, self._streams, self._sides, group.communicators)
        except BaseException:
            self._discard(links.members)
            raise
        finally:
            links.when_failed(None)

    def close(self) -> None:
        """Abort all communicators: those of another pool are of no use."""
        for members in list(self._groups):
            self._discard(members)
        self._unconnected.clear()

    def _meet(self, links: LinkMesh) -> Agreement:
        """Return what the first member of a step sends to all."""
        own, first = links.own.instance, links.members[0]
        known = self._groups.get(links.members)
        name = _NO_NAME if known is None else known.name
        if links.members in self._unconnected:
            name = _HAS_FAILED
        greeting = name + self._streams.identity
        if own != first:
            links.send(_tensor_of(greeting), first, _TAG - 1 - links.members.index(own)).wait()
            data = torch.empty(_ANSWER_BYTES, dtype=torch.uint8)
            links.receive(data, first, _TAG).wait()
            return Agreement.unpacked(bytes(data.numpy()))
        others = links.members[1:]
        greetings = [torch.empty(_NAME_BYTES + _DEVICE_BYTES, dtype=torch.uint8) for _ in others]
        calls = [
            links.receive(data, member, _TAG - 1 - place)
            for place, (member, data) in enumerate(zip(others, greetings, strict=True), start=1)
        ]
        for call in calls:
            call.wait()
        whole = [greeting, *(bytes(data.numpy()) for data in greetings)]
        names, devices = (
            [blob[:_NAME_BYTES] for blob in whole],
            [blob[_NAME_BYTES:] for blob in whole],
        )
        try:
            answer = decide(names, devices, self._nccl.unique_id)
        except NcclError as error:
            raise MeshError(str(error)) from None
        for call in [links.send(_tensor_of(answer.packed()), member, _TAG) for member in others]:
            call.wait()
        return answer

    def _group(self, links: LinkMesh, answer: Agreement) -> _Connection:
        members = links.members
        known = self._groups.get(members)
        if not answer.unique_ids:
            if known is None or known.name != answer.name:
                raise MeshError(f"instance {members[0]} takes other communicators than this one has")
            self._groups.move_to_end(members)
            return known
        self._discard(members)
        while len(self._groups) >= self._max_groups:
            self._discard(next(iter(self._groups)))
        rank = members.index(links.own.instance)
        communicators: dict[Lane, Communicator] = {}
        group = self._groups[members] = _Connection(answer.name, communicators)
        try:
            for lane, unique_id in zip(Lane, answer.unique_ids, strict=True):
                communicators[lane] = Communicator(self._nccl, unique_id, rank, len(members))
            links.when_failed(group.abort)
            for communicator in communicators.values():
                communicator.wait_ready(links)
                communicator.meet(links, self._streams, self._sides[Lane.RING])
        except NcclError as error:
            self._discard(members)
            if self._may_fall_back:
                logger.warning("cdsp: instances %s go over links from now on: NCCL: %s", list(members), error)
                self._unconnected.add(members)
            raise MeshError(f"NCCL does not connect instances {list(members)}: {error}") from None
        except BaseException:
            self._discard(members)
            raise
        finally:
            links.when_failed(None)
        return group

    def _discard(self, members: tuple[int, ...]) -> None:
        group = self._groups.pop(members, None)
        if group is not None:
            group.abort()


class Communicator:
    """One of NCCL's, which may be aborted from any thread while another one uses it."""

    def __init__(self, nccl: Nccl, unique_id: bytes, rank: int, size: int) -> None:
        """Begins to connect. Raises NcclError."""
        self._nccl = nccl
        self._rank = rank
        self._size = size
        self._lock = threading.Lock()  # NCCL's calls, between which it may be aborted
        self._handle: int | None = nccl.begin_connect(unique_id, rank, size)

    def abort(self) -> None:
        """End it and all its calls."""
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:
            self._nccl.abort(handle)

    def start(
        self,
        links: LinkMesh,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
        stream: SideStream,
    ) -> None:
        """Tensors and ranks: sent and received as one call, in the order of the stream. Raises NcclError, MeshError."""
        with self._lock:
            if self._handle is None:
                raise NcclError("it has been aborted")
            self._nccl.begin_group()
            try:
                for tensor, peer in sends:
                    self._nccl.send(self._handle, tensor.data_ptr(), tensor.nbytes, peer, stream.handle)
                for tensor, peer in receives:
                    self._nccl.receive(self._handle, tensor.data_ptr(), tensor.nbytes, peer, stream.handle)
            finally:
                self._nccl.end_group()
        for tensor, _ in (*sends, *receives):
            stream.keep(tensor)
        self.wait_ready(links)

    def wait_ready(self, links: LinkMesh) -> None:
        """Return once all its calls are on its streams: at once but where it connects. Raises NcclError,
        MeshError."""
        began_s = time.monotonic()
        while True:
            with self._lock:
                if self._handle is None:
                    links.check()
                    raise NcclError("it has been aborted")
                if self._nccl.is_ready(self._handle):
                    return
            links.check()
            waited_s = time.monotonic() - began_s
            if waited_s > links.timeout_s:
                raise NcclError(f"it has not connected within {links.timeout_s:g} s")
            if waited_s < _SPIN_S:
                time.sleep(0)  # other threads of this process go on
                continue
            with links.waiting():
                time.sleep(_POLL_S)

    def meet(self, links: LinkMesh, streams: DeviceStreams, stream: SideStream) -> None:
        """Send a byte to every other rank and receive one, so that no pair connects in the middle of a layer. Raises
        NcclError, MeshError."""
        others = [peer for peer in range(self._size) if peer != self._rank]
        ours = torch.zeros(1, dtype=torch.uint8, device=streams.device)
        theirs = [torch.empty_like(ours) for _ in others]
        stream.follow()
        self.start(links, [(ours, peer) for peer in others], list(zip(theirs, others, strict=True)), stream)


class NcclMesh:
    """See `mesh.Mesh`. Belongs to the thread that computes."""

    def __init__(
        self,
        links: LinkMesh,
        nccl: Nccl,
        streams: DeviceStreams,
        sides: Mapping[Lane, SideStream],
        communicators: Mapping[Lane, Communicator],
    ) -> None:
        self.members = links.members
        self._links = links
        self._streams = streams
        self._sides = sides
        self._communicators = communicators
        self._rank = {member: rank for rank, member in enumerate(links.members)}
        self._batch: _Batch | None = None
        self._marks: deque[Mark] = deque()  # of calls that have not been looked at, in their order

    def send(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        return self._add(tensor, instance, is_send=True)

    def receive(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        return self._add(tensor, instance, is_send=False)

    @contextmanager
    def batch(self, lane: Lane = Lane.RING) -> Iterator[None]:
        batch = self._batch = _Batch()
        try:
            yield
        finally:
            self._batch = None
        if not batch.sends and not batch.receives:
            return
        stream = self._sides[lane]
        # What is sent has been computed by then, and what is received into is not used any more.
        stream.follow()
        self._links.check()
        try:
            self._communicators[lane].start(self._links, batch.sends, batch.receives, stream)
        except NcclError as error:
            self._links.check()
            raise self._links.broken(f"NCCL: {error}") from None
        self._links.record_activity()
        batch.mark = stream.mark()
        self._marks.append(batch.mark)
        while len(self._marks) > _MOST_AHEAD:
            self._wait_for(self._marks.popleft())

    def meet(self) -> None:
        self._links.meet()

    def settle(self) -> None:
        self._marks.append(self._streams.mark())
        while self._marks:
            self._wait_for(self._marks.popleft())

    def _wait_for(self, mark: Mark) -> None:
        deadline_s = time.monotonic() + self._links.timeout_s
        while not mark.is_reached():
            self._links.check()
            if time.monotonic() > deadline_s:
                raise self._links.broken(f"nothing has come for {self._links.timeout_s:g} s")
            with self._links.waiting():
                time.sleep(_POLL_S)
        # A call that has been aborted ends, too.
        self._links.check()
        self._links.record_activity()

    def _add(self, tensor: torch.Tensor, instance: int, *, is_send: bool) -> Pending:
        if self._batch is None:
            with self.batch():
                return self._add(tensor, instance, is_send=is_send)
        (self._batch.sends if is_send else self._batch.receives).append((tensor, self._rank[instance]))
        return self._batch


class _Batch:
    """All calls of a batch are done together."""

    def __init__(self) -> None:
        self.sends: list[tuple[torch.Tensor, int]] = []
        self.receives: list[tuple[torch.Tensor, int]] = []
        self.mark: Mark | None = None  # once it has begun

    def wait(self) -> None:
        if self.mark is None:
            raise MeshError("waited for inside of its own batch")
        self.mark.wait()


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
