"""Meshes between GPUs. One GPU is enough for a member that sends to itself; two are wanted for a pair."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from sglang_ext.sequence_parallel.mesh import Mesh, MeshError
from sglang_ext.sequence_parallel.nccl_mesh import NcclMesh

pytestmark = pytest.mark.gpu
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
TIMEOUT_S = 30.0
ROWS = 100_000


def new_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))


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


@needs_a_gpu
def test_nccl_with_itself() -> None:
    device = torch.device("cuda", 0)
    send_and_receive(NcclMesh(new_store(), "mesh/1/rank0", (7,), 7, TIMEOUT_S, device), 7, [7], device)


@needs_a_gpu
def test_nccl_without_the_other_member() -> None:
    with pytest.raises(MeshError, match="mesh/1/rank0 of instances"):
        NcclMesh(new_store(), "mesh/1/rank0", (7, 8), 7, 1.0, torch.device("cuda", 0))


@needs_a_gpu
def test_nvshmem_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without nvshmem4py, which `requirements/cuda.lock` has: a skip would look like a pass."""
    monkeypatch.setenv("NVSHMEM_REMOTE_TRANSPORT", "none")  # no network between machines is looked for
    from sglang_ext.sequence_parallel.mailbox_mesh import MailboxMesh
    from sglang_ext.sequence_parallel.nvshmem_memory import NvshmemMemory

    device = torch.device("cuda", 0)
    memory = NvshmemMemory(new_store(), "mesh/1/rank0", 0, 1, TIMEOUT_S, device)
    send_and_receive(MailboxMesh(memory, (7,), 7, TIMEOUT_S, piece_bytes=2**16), 7, [7], device)
    memory.close()


@needs_two_gpus
def test_nccl_between_two() -> None:
    store = new_store()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for instance in (3, 4):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_member, args=(theirs, store.port, instance), daemon=True))
        pipes.append(ours)
        processes[-1].start()
    try:
        for pipe in pipes:
            assert pipe.poll(120)
            assert pipe.recv() == "done"
        # One goes; the other one, in the middle of a transfer, does not wait for it for ever.
        processes[1].kill()
        pipes[0].send("again")
        assert pipes[0].poll(120)
        assert pipes[0].recv().startswith("settle: ")
    finally:
        for process in processes:
            process.kill()
            process.join()


def _member(pipe: Connection, port: int, instance: int) -> None:
    device = torch.device("cuda", instance - 3)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    mesh = NcclMesh(store, "mesh/1/rank0", (3, 4), instance, 5.0, device)
    send_and_receive(mesh, instance, [7 - instance], device)
    pipe.send("done")
    pipe.recv()
    mesh.receive(torch.empty(ROWS, device=device), 7 - instance, 0).wait()
    try:
        mesh.settle()
    except MeshError as error:
        pipe.send(str(error))
