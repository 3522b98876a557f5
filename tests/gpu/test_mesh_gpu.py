"""Meshes between GPUs: two members in threads of one process. One GPU is enough for links, NCCL wants two."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from sglang_ext.long_pool.mesh.device_streams import CudaStreams
from sglang_ext.long_pool.mesh.mesh import Membership, Mesh, MeshError
from sglang_ext.long_pool.mesh.nccl_library import NcclLibrary
from sglang_ext.long_pool.mesh.nccl_mesh import Communicator, NcclMeshes
from sglang_ext.long_pool.mesh.peer_links import PeerLinks
from sglang_ext.long_pool.mesh.staged_mesh import StagedMeshes

pytestmark = pytest.mark.gpu
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
TIMEOUT_S = 30.0
ROWS = 100_000


def send_and_receive(mesh: Mesh, instance: int, others: list[int], device: torch.device) -> None:
    """Rounds of computing, sending and receiving what was computed, and computing with what has come."""
    for number in range(20):
        ours = torch.full((ROWS,), float(instance), device=device) + number
        theirs = [torch.empty_like(ours) for _ in others]
        with mesh.batch():
            calls = [mesh.receive(tensor, other, number) for other, tensor in zip(others, theirs, strict=True)]
            calls += [mesh.send(ours, other, number) for other in others]
        for call in calls:
            call.wait()
        sums = [float(tensor.double().sum()) for tensor in theirs]
        assert sums == [ROWS * float(other + number) for other in others]
    mesh.settle()


class Pair:
    """Members 0 and 1 of a pool, by the numbers of their devices."""

    def __init__(self, devices: tuple[int, int], over: str) -> None:
        self._devices = [torch.device("cuda", number) for number in devices]
        self.links = []
        for instance, device in enumerate(self._devices):
            streams = CudaStreams(device)
            meshes = NcclMeshes(NcclLibrary(), streams) if over == "nccl" else StagedMeshes(streams)
            self.links.append(PeerLinks("127.0.0.1", b"", TIMEOUT_S, over=meshes.over))
            self.links[-1].enter(Membership(16 * b"p", instance))

    def step(self, sequence: int, is_lost: bool = False) -> list[str]:
        """A step of both; the name of the mesh's class, or the error."""
        addresses = {instance: one.address for instance, one in enumerate(self.links)}

        def take_part(instance: int) -> str:
            device = self._devices[instance]
            torch.cuda.set_device(device)
            try:
                with self.links[instance].step(sequence, addresses) as mesh:
                    if is_lost and instance == 1:
                        raise MeshError("on purpose")
                    if is_lost:
                        mesh.receive(torch.empty(ROWS, device=device), 1, 0).wait()
                        mesh.settle()
                    send_and_receive(mesh, instance, [1 - instance], device)
                    return type(mesh).__name__
            except MeshError as error:
                return str(error)

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(take_part, (0, 1), timeout=4 * TIMEOUT_S))


@contextmanager
def pair(devices: tuple[int, int], over: str) -> Iterator[Pair]:
    one = Pair(devices, over)
    try:
        yield one
    finally:
        for links in one.links:
            links.close()


@needs_a_gpu
def test_over_links_between_two_on_one_gpu() -> None:
    with pair((0, 0), "links") as both:
        assert both.step(1) == ["StagedMesh", "StagedMesh"]
        assert all("on purpose" in error for error in both.step(2, is_lost=True))
        assert both.step(3) == ["StagedMesh", "StagedMesh"]


@needs_a_gpu
def test_nccl_leaves_two_on_one_gpu_to_links() -> None:
    with pair((0, 0), "nccl") as both:
        assert both.step(1) == ["StagedMesh", "StagedMesh"]


@needs_a_gpu
def test_nccl_connects_a_rank_with_itself_and_is_aborted_while_it_connects() -> None:
    nccl, device = NcclLibrary(), torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with pair((0, 0), "links") as both, both.links[0].step(1, {0: both.links[0].address}):
        links = both.links[0]._step
        assert links is not None
        alone, stream = Communicator(nccl, nccl.unique_id(), 0, 1), CudaStreams(device).side_stream()
        alone.wait_ready(links)
        ours, theirs = torch.arange(ROWS, device=device), torch.empty(ROWS, dtype=torch.int64, device=device)
        stream.follow()
        alone.start(links, [(ours, 0)], [(theirs, 0)], stream)
        stream.mark().wait()
        assert torch.equal(ours, theirs)
        alone.abort()
        waiting = Communicator(nccl, nccl.unique_id(), 0, 2)
        waiting.abort()


@needs_two_gpus
def test_over_nccl_between_two() -> None:
    with pair((0, 1), "nccl") as both:
        assert both.step(1) == ["NcclMesh", "NcclMesh"]
        assert all("on purpose" in error for error in both.step(2, is_lost=True))
        assert both.step(3) == ["NcclMesh", "NcclMesh"]
