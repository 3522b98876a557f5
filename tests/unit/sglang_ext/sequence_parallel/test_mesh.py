"""Meshes over loopback: what one gives up all give up, and an instance has a mesh when all of its ranks have one."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from sglang_ext.sequence_parallel.mesh import GlooMesh, MeshError
from sglang_ext.sequence_parallel.mesh_store import connect_mesh, give_up
from sglang_ext.sequence_parallel.messages import Welcome
from support.memory_ranks import Meeting, MemoryRanks

# Far longer than any test may take: what ends sooner was not ended by it.
TIMEOUT_S = 300.0
SOON_S = 60.0
EPOCH = 7


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def meshes(store: dist.TCPStore, threads: ThreadPoolExecutor, count: int) -> list[GlooMesh]:
    def connect(instance: int) -> GlooMesh:
        welcome = Welcome(instance, "127.0.0.1", store.port, 1.0)
        mesh = connect_mesh(welcome, EPOCH, tuple(range(count)), TIMEOUT_S)
        assert isinstance(mesh, GlooMesh)
        return mesh

    return list(threads.map(connect, range(count)))


def waiting(threads: ThreadPoolExecutor, mesh: GlooMesh, source: int, sequence: int) -> Future[str]:
    """Wait in vain in a step; resolves to the error."""
    has_begun = threading.Event()

    def wait() -> str:
        with mesh.step(sequence):
            call = mesh.receive(torch.empty(1), source, 1)
            has_begun.set()
            try:
                call.wait()
            except MeshError as error:
                return str(error)
            return "received"

    future = threads.submit(wait)
    assert has_begun.wait(SOON_S)
    return future


def test_tensors_arrive_by_tag(store: dist.TCPStore, threads: ThreadPoolExecutor) -> None:
    first, second = meshes(store, threads, 2)
    with first.batch():
        calls = [first.send(torch.full((2, 3), value), 1, int(value)) for value in (1.0, 2.0)]
    got = {tag: torch.empty(2, 3) for tag in (2, 1)}
    for tag, tensor in got.items():
        second.receive(tensor, 0, tag).wait()
    for call in calls:
        call.wait()
    second.settle()
    assert all((tensor == tag).all() for tag, tensor in got.items())


def test_a_step_that_has_been_given_up_ends_for_who_waits(store: dist.TCPStore, threads: ThreadPoolExecutor) -> None:
    """As it is with a member that is stopped: it closes nothing, and others wait for it."""
    first, second, _stopped = meshes(store, threads, 3)
    one = waiting(threads, first, 2, sequence=11)
    other = waiting(threads, second, 2, sequence=12)
    give_up(store, EPOCH, 11)
    assert one.result(SOON_S).startswith("receive from instance 2: ")
    # Only this step: the other one goes on until its own end.
    time.sleep(0.6)
    assert not other.done()
    give_up(store, EPOCH, 12)
    assert other.result(SOON_S).startswith("receive from instance 2: ")


def test_who_fails_tells_the_others(store: dist.TCPStore, threads: ThreadPoolExecutor) -> None:
    first, second, _stopped = meshes(store, threads, 3)
    one = waiting(threads, first, 2, sequence=11)
    with second.step(11):
        second.fail("forward", RuntimeError("on purpose"))
    assert one.result(SOON_S).startswith("receive from instance 2: ")


def test_a_step_that_was_given_up_before_it_began(store: dist.TCPStore, threads: ThreadPoolExecutor) -> None:
    first, _other = meshes(store, threads, 2)
    give_up(store, EPOCH, 11)
    assert waiting(threads, first, 1, sequence=11).result(SOON_S).startswith("receive from instance 1: ")


def test_a_mesh_that_is_dropped_closes_its_connections(store: dist.TCPStore, threads: ThreadPoolExecutor) -> None:
    both = meshes(store, threads, 2)
    future = waiting(threads, both[0], 1, sequence=11)
    gc.disable()
    try:
        with both[1].step(3):
            pass
        del both[1]
        assert future.result(SOON_S).startswith("receive from instance 1: ")
    finally:
        gc.enable()


def test_an_instance_has_a_mesh_when_all_of_its_ranks_have_one(
    store: dist.TCPStore, threads: ThreadPoolExecutor
) -> None:
    """Two instances with two ranks; the second rank of one is late."""
    ranks = [MemoryRanks(Meeting(2), rank) for rank in range(2)]

    def connect(instance: int, rank: int, timeout_s: float = TIMEOUT_S) -> Future[object]:
        welcome = Welcome(instance, "127.0.0.1", store.port, 1.0)
        return threads.submit(connect_mesh, welcome, EPOCH, (0, 1), timeout_s, ranks[rank])

    firsts = [connect(instance, 0) for instance in range(2)]
    seconds = [connect(0, 1)]
    time.sleep(0.3)
    assert not any(future.done() for future in firsts)
    seconds.append(connect(1, 1))
    for future in (*firsts, *seconds):
        assert isinstance(future.result(SOON_S), GlooMesh)


def test_an_instance_has_none_when_one_of_its_ranks_has_none(store: dist.TCPStore, threads: ThreadPoolExecutor) -> None:
    first = threads.submit(
        connect_mesh, Welcome(0, "127.0.0.1", store.port, 1.0), EPOCH, (0,), TIMEOUT_S, MemoryRanks(Meeting(2), 0)
    )
    store.set(f"mesh/{EPOCH}/instance0/rank1", "mesh of rank 1: no peer there")
    with pytest.raises(MeshError, match="mesh of rank 1: no peer there"):
        first.result(SOON_S)
