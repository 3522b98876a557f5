"""A mesh over links for tensors on a device: through pinned host memory, on streams of their own.

    computing ──mark──▶ copied to the host ──mark──▶ the link's writer sends it
    the link's reader has received it ──▶ copied to the device ──mark──▶ computing goes on

It is what connects GPUs that NCCL cannot connect, and needs nothing besides the links. The thread that computes waits
for what others send, so it is at most one message ahead of the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sglang_ext.long_pool.mesh.device_streams import DeviceStreams, SideStream
from sglang_ext.long_pool.mesh.mesh import Lane, Pending
from sglang_ext.long_pool.mesh.peer_links import LinkMesh


class StagedMeshes:
    """Makes the mesh of each step, for one device."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        # What one lane waits for another one does not.
        self._outgoing = {lane: streams.side_stream() for lane in Lane}
        self._incoming = {lane: streams.side_stream() for lane in Lane}

    @contextmanager
    def over(self, links: LinkMesh) -> Iterator[StagedMesh]:
        """See `peer_links.MeshOver`."""
        yield StagedMesh(links, self._streams, self._outgoing, self._incoming)


class StagedMesh:
    """See `mesh.Mesh`. Belongs to the thread that computes."""

    def __init__(
        self,
        links: LinkMesh,
        streams: DeviceStreams,
        outgoing: dict[Lane, SideStream],
        incoming: dict[Lane, SideStream],
    ) -> None:
        self.members = links.members
        self._links = links
        self._streams = streams
        self._outgoing = outgoing
        self._incoming = incoming
        self._lane = Lane.RING

    def send(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        host = self._streams.host_buffer(tensor)
        stream = self._outgoing[self._lane]
        stream.follow()
        stream.copy(host, tensor)
        # Once its bytes have gone the tensor has been read: waiting for the link is enough.
        return self._links.send(host, instance, tag, ready=stream.mark())

    def receive(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        host = self._streams.host_buffer(tensor)
        stream = self._incoming[self._lane]
        # The memory may be that of something that is still computed with.
        stream.follow()
        return _Arriving(self._links.receive(host, instance, tag), host, tensor, stream)

    @contextmanager
    def batch(self, lane: Lane = Lane.RING) -> Iterator[None]:
        before, self._lane = self._lane, lane
        try:
            yield
        finally:
            self._lane = before

    def meet(self) -> None:
        self._links.meet()

    def settle(self) -> None:
        self._links.settle()
        self._streams.mark().synchronize()


class _Arriving:
    def __init__(self, call: Pending, host: torch.Tensor, tensor: torch.Tensor, stream: SideStream) -> None:
        self._call = call
        self._host = host
        self._tensor = tensor
        self._stream = stream

    def wait(self) -> None:
        self._call.wait()
        self._stream.copy(self._tensor, self._host)
        self._stream.mark().wait()
