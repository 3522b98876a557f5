"""A mesh between members on one GPU: tensors go from memory to memory of the device, links carry words only.

    computing ──mark──▶ copied to a block ──mark──▶ word: "block 7, 4096 bytes"
    the word has come ──▶ copied out of the block, which this process has opened ──mark──▶ computing goes on
                                                        └──mark──▶ word: "block 7 is free"

NCCL connects no two processes on one GPU, and through host memory and TCP a tensor takes a hundred times as long. A
block is opened when it is first named, and used again once it is free. Two members find out at the beginning of a step
whether each can open what the other one has; where not, their tensors go through host memory. A step that fails forgets
the blocks that are not free: another member may still read them.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import torch

from sglang_ext.long_pool.mesh.device_streams import DeviceStreams, Mark, SideStream
from sglang_ext.long_pool.mesh.mesh import Lane, Pending
from sglang_ext.long_pool.mesh.peer_links import LinkMesh, WaitedCall
from sglang_ext.long_pool.mesh.staged_mesh import StagedMesh, StagedMeshes

T = TypeVar("T", bound=msgspec.Struct)

logger = logging.getLogger(__name__)

_WORD_BYTES = 1024
_LENGTH_BYTES = 4
_MIN_BLOCK_BYTES = 2 << 20
_MAX_FREE_BLOCKS = 8  # that are kept for a member
_MAX_OPEN_BLOCKS = 32  # of a member, that are kept open
# Above all tags that orders have; the free word of a message has its tag in the upper half.
_FREE_TAG = 2**31 + 1
_GREETING_TAG = 2**32 - 2**16
_ANSWER_TAG = _GREETING_TAG + 1


class DeviceSharing(Protocol):
    """Access of processes on one device to each other's memory."""

    def export(self, block: torch.Tensor) -> bytes:
        """Return what another process opens a block of its own allocation with. Raises RuntimeError."""

    def open(self, handle: bytes) -> torch.Tensor:
        """Return another process's block, uint8. Raises RuntimeError."""


class CudaSharing:
    """`DeviceSharing` by CUDA's IPC handles, as `torch.multiprocessing` passes tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def export(self, block: torch.Tensor) -> bytes:
        _, *handle = block.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call, unused-ignore]
        return msgspec.msgpack.encode(handle)

    def open(self, handle: bytes) -> torch.Tensor:
        # The device has another number in a process that sees other devices.
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        storage = torch.UntypedStorage._new_shared_cuda(index, *msgspec.msgpack.decode(handle))
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)  # type: ignore[call-overload, no-any-return, unused-ignore]


class _BlockWord(msgspec.Struct, frozen=True, array_like=True):
    """A block, and what of it is meant."""

    name: bytes
    handle: bytes
    size_bytes: int


class _Greeting(msgspec.Struct, frozen=True, array_like=True):
    """The device of a member, and a block to try."""

    identity: bytes
    block: _BlockWord


class _Block(NamedTuple):
    """Belongs to this process, for one other member."""

    name: bytes
    memory: torch.Tensor
    handle: bytes

    def word(self, size_bytes: int) -> _BlockWord:
        return _BlockWord(self.name, self.handle, size_bytes)


class _SharedWith:
    """Holds the memory that is shared with another member, as long as the pool lives."""

    def __init__(self) -> None:
        self.free: list[_Block] = []
        self._opened: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # what was used longest ago first

    def opened(self, sharing: DeviceSharing, word: _BlockWord) -> torch.Tensor:
        """Return the peer's block. Raises RuntimeError."""
        block = self._opened.pop(word.name, None)
        if block is None:
            block = sharing.open(word.handle)
        self._opened[word.name] = block
        while len(self._opened) > _MAX_OPEN_BLOCKS:
            self._opened.popitem(last=False)
        return block


class SharedDeviceMeshes:
    """Makes the mesh of each step, for one device. Belongs to the thread that computes."""

    def __init__(self, streams: DeviceStreams, sharing: DeviceSharing) -> None:
        self._streams = streams
        self._sharing = sharing
        self._outgoing = {lane: streams.side_stream() for lane in Lane}
        self._incoming = {lane: streams.side_stream() for lane in Lane}
        self._staged = StagedMeshes(streams)
        self._pool_id = b""
        self._peers: dict[int, _SharedWith] = {}

    @contextmanager
    def over(self, links: LinkMesh) -> Iterator[StagedMesh]:
        """See `peer_links.MeshOver`. Raises MeshError."""
        if links.own.pool_id != self._pool_id:
            self._pool_id, self._peers = links.own.pool_id, {}
        near = self._near(links)
        if not near:
            with self._staged.over(links) as staged:
                yield staged
            return
        mesh = SharedDeviceMesh(links, self._streams, self._outgoing, self._incoming, self._sharing, near)
        yield mesh

    def block(self, peer: _SharedWith, size_bytes: int) -> _Block:
        """Return a block of at least this size. Raises RuntimeError."""
        return _take(peer, self._sharing, self._streams.device, size_bytes)

    def _near(self, links: LinkMesh) -> dict[int, _SharedWith]:
        """Return the members with which this one shares memory, both ways."""
        others = [member for member in links.members if member != links.own.instance]
        peers = {member: self._peers.setdefault(member, _SharedWith()) for member in others}
        tried = {member: self._try_block(peer) for member, peer in peers.items()}
        greetings = {member: torch.zeros(_WORD_BYTES, dtype=torch.uint8) for member in others}
        calls = [links.receive(word, member, _GREETING_TAG) for member, word in greetings.items()]
        for member, block in tried.items():
            word = _BlockWord(b"", b"", 0) if block is None else block.word(0)
            calls.append(links.send(_packed(_Greeting(self._streams.identity, word)), member, _GREETING_TAG))
        _wait_for(calls)
        answers = {member: torch.zeros(1, dtype=torch.uint8) for member in others}
        can_open = {member: self._can_open(peers[member], word) for member, word in greetings.items()}
        calls = [links.receive(answer, member, _ANSWER_TAG) for member, answer in answers.items()]
        for member, is_open in can_open.items():
            calls.append(links.send(torch.tensor([is_open], dtype=torch.uint8), member, _ANSWER_TAG))
        _wait_for(calls)
        for member, block in tried.items():
            if block is not None:
                peers[member].free.append(block)
        return {
            member: peer
            for member, peer in peers.items()
            if tried[member] is not None and can_open[member] and int(answers[member])
        }

    def _try_block(self, peer: _SharedWith) -> _Block | None:
        try:
            return self.block(peer, _MIN_BLOCK_BYTES)
        except RuntimeError as error:
            logger.info("cdsp: memory of this device cannot be shared: %s", str(error).partition("\n")[0])
            return None

    def _can_open(self, peer: _SharedWith, word: torch.Tensor) -> bool:
        try:
            greeting = _unpacked(word, _Greeting)
            if greeting.identity != self._streams.identity or not greeting.block.handle:
                return False
            peer.opened(self._sharing, greeting.block)
        except (RuntimeError, msgspec.MsgspecError) as error:
            logger.info("cdsp: memory of a member on this device cannot be opened: %s", str(error).partition("\n")[0])
            return False
        return True


class SharedDeviceMesh(StagedMesh):
    """See `mesh.Mesh`. Belongs to the thread that computes."""

    def __init__(
        self,
        links: LinkMesh,
        streams: DeviceStreams,
        outgoing: dict[Lane, SideStream],
        incoming: dict[Lane, SideStream],
        sharing: DeviceSharing,
        near: dict[int, _SharedWith],
    ) -> None:
        """`near`: members on this device; the others are reached through host memory."""
        super().__init__(links, streams, outgoing, incoming)
        self._sharing = sharing
        self._near = near
        self._sent: list[tuple[_SharedWith, _Block, WaitedCall, WaitedCall]] = []  # word, and when the block is free
        self._freed: list[Pending] = []  # words of which the other members wait

    def send(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        peer = self._near.get(instance)
        if peer is None:
            return super().send(tensor, instance, tag)
        self._take_back([sent for sent in self._sent if sent[2].is_over and sent[3].is_over])
        try:
            block = _take(peer, self._sharing, self._streams.device, tensor.nbytes)
        except RuntimeError as error:
            raise self._links.broken(str(error).partition("\n")[0]) from None
        free = self._links.receive(torch.zeros(1, dtype=torch.uint8), instance, _FREE_TAG + tag)
        stream = self._outgoing[self._lane]
        stream.follow()
        stream.copy(block.memory[: tensor.nbytes], _as_bytes(tensor))
        stream.keep(tensor)
        mark = stream.mark()
        word = self._links.send(_packed(block.word(tensor.nbytes)), instance, tag, ready=mark)
        self._sent.append((peer, block, word, free))
        return _Copied(mark)

    def receive(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        peer = self._near.get(instance)
        if peer is None:
            return super().receive(tensor, instance, tag)
        stream = self._incoming[self._lane]
        # The memory may be that of something that is still computed with.
        stream.follow()
        word = torch.zeros(_WORD_BYTES, dtype=torch.uint8)
        return _Named(self, peer, self._links.receive(word, instance, tag), word, tensor, stream, instance, tag)

    def settle(self) -> None:
        freed, self._freed = self._freed, []
        _wait_for(freed)
        self._take_back(self._sent)
        super().settle()

    def _take_back(self, done: list[tuple[_SharedWith, _Block, WaitedCall, WaitedCall]]) -> None:
        """Wait for the free words of these blocks. Raises MeshError."""
        self._sent = [sent for sent in self._sent if not any(sent is one for one in done)]
        for peer, block, word, free in done:
            word.wait()
            free.wait()
            peer.free.append(block)

    def copy_out(
        self, peer: _SharedWith, word: torch.Tensor, tensor: torch.Tensor, stream: SideStream, instance: int, tag: int
    ) -> None:
        """Copy what has come out of its block, and return the block when that is done. Raises MeshError."""
        try:
            named = _unpacked(word, _BlockWord)
            block = peer.opened(self._sharing, named)
        except (RuntimeError, msgspec.MsgspecError) as error:
            raise self._links.broken(f"instance {instance}: {str(error).partition(chr(10))[0]}", instance) from None
        if named.size_bytes != tensor.nbytes or named.size_bytes > block.nbytes:
            raise self._links.broken(f"{named.size_bytes} bytes of instance {instance} instead of {tensor.nbytes}")
        stream.copy(_as_bytes(tensor), block[: tensor.nbytes])
        stream.keep(tensor)
        mark = stream.mark()
        self._freed.append(self._links.send(torch.zeros(1, dtype=torch.uint8), instance, _FREE_TAG + tag, ready=mark))
        mark.wait()


class _Copied:
    """A call whose tensor has been read when `mark` is reached."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark

    def wait(self) -> None:
        self._mark.wait()


class _Named:
    """A call of which the block is not known yet."""

    def __init__(
        self,
        mesh: SharedDeviceMesh,
        peer: _SharedWith,
        call: Pending,
        word: torch.Tensor,
        tensor: torch.Tensor,
        stream: SideStream,
        instance: int,
        tag: int,
    ) -> None:
        self._mesh = mesh
        self._call = call
        self._rest = (peer, word, tensor, stream, instance, tag)

    def wait(self) -> None:
        self._call.wait()
        self._mesh.copy_out(*self._rest)


def _take(peer: _SharedWith, sharing: DeviceSharing, device: torch.device, size_bytes: int) -> _Block:
    """Return the smallest free block of this size, or another one. Raises RuntimeError."""
    fitting = [block for block in peer.free if block.memory.nbytes >= size_bytes]
    if fitting:
        found = min(fitting, key=lambda block: block.memory.nbytes)
        peer.free = [block for block in peer.free if block is not found]
        return found
    # Those that are too small go: the largest have the best chance of being used again.
    peer.free = sorted(peer.free, key=lambda block: block.memory.nbytes)[-(_MAX_FREE_BLOCKS - 1) :]
    whole = max(_MIN_BLOCK_BYTES, 1 << (size_bytes - 1).bit_length())
    memory = torch.empty(whole, dtype=torch.uint8, device=device)
    return _Block(secrets.token_bytes(16), memory, sharing.export(memory))


def _packed(record: msgspec.Struct) -> torch.Tensor:
    """Return a record as a word of fixed size. Raises RuntimeError for one that is too long."""
    data = msgspec.msgpack.encode(record)
    if len(data) > _WORD_BYTES - _LENGTH_BYTES:
        raise RuntimeError(f"a word of {len(data)} bytes is too long")
    whole = bytearray(_WORD_BYTES)
    whole[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "little")
    whole[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data
    return torch.frombuffer(whole, dtype=torch.uint8)


def _unpacked(word: torch.Tensor, kind: type[T]) -> T:
    whole = bytes(word.numpy())
    length = int.from_bytes(whole[:_LENGTH_BYTES], "little")
    return msgspec.msgpack.decode(whole[_LENGTH_BYTES : _LENGTH_BYTES + length], type=kind)


def _wait_for(calls: Sequence[Pending]) -> None:
    for call in calls:
        call.wait()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
