"""Meshes between devices that do nothing before they must: what is sent has been computed, and what is computed with
has come; over links and over NCCL's double."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from sglang_ext.long_pool.decide.sharding import ChunkLayout, Interleaving, lay_out
from sglang_ext.long_pool.link_frames import PeerAddress
from sglang_ext.long_pool.member.chunk_step import StepContext, _ChunkAttention
from sglang_ext.long_pool.member.ring_attention import AttentionRule, Ring, as_tensor
from sglang_ext.long_pool.member.shard import HeldRows
from sglang_ext.long_pool.mesh import nccl_mesh
from sglang_ext.long_pool.mesh.device_streams import Mark
from sglang_ext.long_pool.mesh.mesh import Lane, Membership, Mesh, MeshError, Pending
from sglang_ext.long_pool.mesh.nccl_library import UNIQUE_ID_BYTES
from sglang_ext.long_pool.mesh.nccl_mesh import Agreement, NcclMeshes, decide
from sglang_ext.long_pool.mesh.peer_links import PeerLinks
from sglang_ext.long_pool.mesh.shared_device_mesh import SharedDeviceMeshes
from sglang_ext.long_pool.mesh.staged_mesh import StagedMeshes
from sglang_ext_kernels.block_attention import positioned_block_reference
from support.lazy_device import LazyDevice
from support.nccl_double import NcclDouble, NcclNetwork

KEY = b"a key that all members know"
TIMEOUT_S = 300.0
SOON_S = 60.0
SIZE = 500


class SharedDevice:
    """Memory that members on one device open by name."""

    def __init__(self, blocks: dict[bytes, torch.Tensor]) -> None:
        self._blocks = blocks
        self.exports_fail = self.opening_fails = False
        self.opened = 0

    def export(self, block: torch.Tensor) -> bytes:
        if self.exports_fail:
            raise RuntimeError("operation not supported\nat CUDAException")
        handle = len(self._blocks).to_bytes(4, "little")
        self._blocks[handle] = block
        return handle

    def open(self, handle: bytes) -> torch.Tensor:
        if self.opening_fails:
            raise RuntimeError("invalid resource handle")
        self.opened += 1
        return self._blocks[handle].view(-1)


class Member:
    """A device, its links, and what moves tensors between both."""

    def __init__(
        self,
        instance: int,
        network: NcclNetwork | None,
        sharing: SharedDevice | None,
        *,
        device_number: int,
        may_fall_back: bool,
    ) -> None:
        self.instance = instance
        self.device = LazyDevice(device_number, is_serial=sharing is not None)
        self.nccl = None if network is None else NcclDouble(network, self.device)
        self.sharing = sharing
        over = StagedMeshes(self.device).over if sharing is None else SharedDeviceMeshes(self.device, sharing).over
        if self.nccl is not None:
            self.meshes = NcclMeshes(self.nccl, self.device, fallback=over, may_fall_back=may_fall_back, max_groups=2)
            over = self.meshes.over
        self.links = PeerLinks("127.0.0.1", KEY, TIMEOUT_S, over=over)
        self.enter(b"p")

    def enter(self, pool: bytes) -> None:
        self.links.enter(Membership(16 * pool, self.instance))


class Prompt:
    """A mesh for what computes at once: a caller that has waited sees what has come."""

    def __init__(self, mesh: Mesh, device: LazyDevice) -> None:
        self.members = mesh.members
        self._mesh = mesh
        self._device = device
        self.batch, self.settle = mesh.batch, mesh.settle

    def send(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        return PromptCall(self._mesh.send(tensor, instance, tag), self._device)

    def receive(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        return PromptCall(self._mesh.receive(tensor, instance, tag), self._device)


class PromptCall:
    def __init__(self, call: Pending, device: LazyDevice) -> None:
        self._call = call
        self._device = device

    def wait(self) -> None:
        self._call.wait()
        self._device.mark().synchronize()


MakePool = Callable[..., "Pool"]


class Pool:
    """Members, each with a thread that computes."""

    def __init__(self, members: list[Member], threads: ThreadPoolExecutor) -> None:
        self.members = members
        self._threads = threads
        self._sequence = 0

    def step(self, instances: list[int], work: Callable[[Member, Mesh], object]) -> list[object]:
        """Do something in a step of these; what each returns, or its MeshError."""
        self._sequence += 1
        addresses: dict[int, PeerAddress] = {one: self.members[one].links.address for one in instances}

        def take_part(instance: int, sequence: int) -> object:
            member = self.members[instance]
            try:
                with member.links.step(sequence, addresses) as mesh:
                    found = work(member, mesh)
                    mesh.settle()
                    return found
            except MeshError as error:
                return error

        futures = [self._threads.submit(take_part, instance, self._sequence) for instance in instances]
        return [future.result(SOON_S) for future in futures]


@pytest.fixture
def make() -> Iterator[MakePool]:
    with ExitStack() as stack:
        threads = ThreadPoolExecutor(16)
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)

        def pool(count: int, over: str, devices: tuple[int, ...] = (), *, may_fall_back: bool = True) -> Pool:
            network = NcclNetwork() if over.startswith("nccl") else None
            is_shared = over.endswith("memory")
            blocks: dict[bytes, torch.Tensor] = {}
            numbers = devices or (tuple([1] * count) if is_shared else tuple(range(1, count + 1)))
            members = [
                Member(
                    instance,
                    network,
                    SharedDevice(blocks) if is_shared else None,
                    device_number=numbers[instance],
                    may_fall_back=may_fall_back,
                )
                for instance in range(count)
            ]
            for member in members:
                stack.callback(member.links.close)
            return Pool(members, threads)

        yield pool


def swap(member: Member, mesh: Mesh, rounds: int = 6) -> list[float]:
    """Compute, send, receive, and compute with what has come, in both lanes; nothing is waited for on the host."""
    device, results = member.device, []
    others = [one for one in mesh.members if one != member.instance]
    used: list[torch.Tensor] = []
    for number in range(rounds):
        lane = list(Lane)[number % 2]
        ours, theirs = torch.full((SIZE,), float("nan")), {one: torch.full((SIZE,), float("nan")) for one in others}
        device.compute(lambda tensor=ours, value=100.0 * number + member.instance: tensor.fill_(value))
        with mesh.batch(lane):
            calls = [mesh.receive(tensor, one, number * 100 + one) for one, tensor in theirs.items()]
            calls += [mesh.send(ours, one, number * 100 + member.instance) for one in others]
        for call in calls:
            call.wait()
        # What was sent may be overwritten now.
        device.compute(lambda tensor=ours: tensor.fill_(float("nan")))
        for tensor in theirs.values():
            device.compute(lambda tensor=tensor: results.append(float(tensor.sum() / SIZE)))
        used += [*theirs.values(), *([ours] if others else [])]
    mesh.settle()
    for tensor in used:
        assert any(kept is tensor for kept in device.kept), "its memory may be used again too early"
    return results


def swapped(pool: Pool, instances: list[int], rounds: int = 6) -> None:
    found = pool.step(instances, lambda member, mesh: swap(member, mesh, rounds))
    for instance, values in zip(instances, found, strict=True):
        assert values == [100.0 * number + one for number in range(rounds) for one in instances if one != instance]


@pytest.mark.parametrize("over", ["links", "nccl", "memory", "nccl or memory"])
def test_what_is_sent_has_been_computed_and_what_is_computed_with_has_come(make: MakePool, over: str) -> None:
    pool = make(3, over)
    swapped(pool, [0, 1])
    swapped(pool, [2, 0, 1], rounds=12)
    swapped(pool, [1])


@pytest.mark.parametrize("over", ["links", "nccl", "memory", "nccl or memory"])
@pytest.mark.parametrize("interleaving", list(Interleaving))
def test_a_ring_over_three_devices_is_attention_over_all(make: MakePool, over: str, interleaving: Interleaving) -> None:
    pool = make(3, over)
    tokens, heads, size = 90, 4, 16
    torch.manual_seed(3)
    q, kv = torch.randn(tokens, heads, size), torch.randn(2, tokens, 2, size)
    layout, _ = lay_out({}, (range(tokens),), (0, 1, 2), interleaving, 1)
    wanted, _ = positioned_block_reference(q, kv[0], kv[1], torch.arange(tokens), torch.arange(tokens), 0.25)

    def work(member: Member, mesh: Mesh) -> torch.Tensor:
        place = layout.group.index(member.instance)
        rows = as_tensor(layout.new[place])
        ring = Ring(Prompt(mesh, member.device), layout.group, member.instance, layout.new, 0)
        return ring.attend(q[rows], layout.new[place], kv[:, rows].contiguous(), AttentionRule(0.25), layer=0)

    for place, out in enumerate(pool.step([0, 1, 2], work)):
        assert isinstance(out, torch.Tensor)
        torch.testing.assert_close(out, wanted[as_tensor(layout.new[place])], atol=2e-5, rtol=0)


def communicators(pool: Pool) -> list[int]:
    return [one.nccl.open_count for one in pool.members if one.nccl is not None]


def network(pool: Pool) -> NcclNetwork:
    nccl = pool.members[0].nccl
    assert nccl is not None
    return nccl.network


def test_communicators_are_made_once_for_a_group_and_the_oldest_goes(make: MakePool) -> None:
    pool = make(3, "nccl")
    lanes = len(Lane)
    for _ in range(3):
        swapped(pool, [0, 1])
    assert communicators(pool) == [lanes, lanes, 0]
    assert network(pool).made == lanes
    swapped(pool, [0, 2])
    swapped(pool, [0, 1])
    swapped(pool, [0, 1, 2])  # two groups are kept: the first member forgets that with the third
    assert communicators(pool) == [2 * lanes, 2 * lanes, 2 * lanes]
    assert network(pool).made == 3 * lanes
    # The other one still has what the first one has forgotten: another is made.
    swapped(pool, [0, 2])
    assert network(pool).made == 4 * lanes
    # Another order is another ring.
    swapped(pool, [1, 0])
    assert network(pool).made == 5 * lanes


def test_a_call_that_is_ready_soon_is_not_slept_for(make: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL puts each hop of a layer on its stream by a thread of its own, which takes some ten microseconds."""
    pool = make(2, "nccl")
    swapped(pool, [0, 1])
    for member in pool.members:
        assert member.nccl is not None
        member.nccl.looks_until_ready = 3
    slept: list[float] = []

    def record(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    # Not `time.sleep` itself: other threads of this process sleep, too.
    monkeypatch.setattr(nccl_mesh, "time", SimpleNamespace(sleep=record, monotonic=time.monotonic))
    monkeypatch.setattr(nccl_mesh, "_SPIN_S", SOON_S)  # however slow this machine is

    def work(member: Member, mesh: Mesh) -> None:
        with mesh.batch():
            call = mesh.receive(torch.empty(SIZE), 1 - member.instance, 0)
            mesh.send(torch.zeros(SIZE), 1 - member.instance, 0)
        call.wait()

    pool.step([0, 1], work)
    assert slept
    assert not any(slept)


def test_another_pool_begins_with_none(make: MakePool) -> None:
    pool = make(2, "nccl")
    swapped(pool, [0, 1])
    for member in pool.members:
        member.enter(b"q")
    swapped(pool, [0, 1])
    assert communicators(pool) == [len(Lane)] * 2
    assert network(pool).made == 2 * len(Lane)


def test_a_step_that_is_given_up_ends_what_waits_on_the_device(make: MakePool) -> None:
    """One member never sends; the other one waits for it on its device, and its host for the device."""
    pool = make(2, "nccl")
    swapped(pool, [0, 1])
    has_begun = threading.Event()

    def work(member: Member, mesh: Mesh) -> None:
        if member.instance == 1:
            assert has_begun.wait(SOON_S)
            raise MeshError("on purpose")
        mesh.receive(torch.empty(SIZE), 1, 0).wait()
        has_begun.set()
        mesh.settle()

    errors = pool.step([0, 1], work)
    assert "on purpose" in str(errors[0])
    assert communicators(pool) == [0, 0]
    swapped(pool, [0, 1])
    assert communicators(pool) == [len(Lane)] * 2


def test_a_step_that_the_coordinator_gives_up_ends_at_all_members(make: MakePool) -> None:
    pool = make(3, "nccl")
    waiting = threading.Barrier(4)

    def work(member: Member, mesh: Mesh) -> None:
        mesh.receive(torch.empty(SIZE), (member.instance + 1) % 3, 0).wait()
        waiting.wait(SOON_S)
        mesh.settle()

    def give_up() -> None:
        waiting.wait(SOON_S)
        for member in pool.members:
            member.links.give_up(1, "it is given up")

    thread = threading.Thread(target=give_up, daemon=True)
    thread.start()
    assert all(isinstance(error, MeshError) for error in pool.step([0, 1, 2], work))
    assert communicators(pool) == [0, 0, 0]
    swapped(pool, [0, 1, 2])


def test_members_on_one_gpu_go_over_links(make: MakePool) -> None:
    pool = make(3, "nccl", (7, 7, 8))
    swapped(pool, [0, 1])
    assert communicators(pool) == [0, 0, 0]
    swapped(pool, [1, 2])
    assert communicators(pool) == [0, len(Lane), len(Lane)]


@pytest.mark.parametrize("failing", [0, 1])
def test_where_nccl_fails_the_group_goes_over_links_from_then_on(make: MakePool, failing: int) -> None:
    pool = make(2, "nccl")
    nccl = pool.members[failing].nccl
    assert nccl is not None
    nccl.fails_to_connect = True
    errors = pool.step([0, 1], lambda member, mesh: swap(member, mesh))
    assert "NCCL does not connect instances [0, 1]: unhandled system error" in str(errors[failing])
    assert all(isinstance(error, MeshError) for error in errors)
    swapped(pool, [0, 1])
    assert communicators(pool) == [0, 0]


def test_without_a_fallback_members_on_one_gpu_are_refused(make: MakePool) -> None:
    pool = make(2, "nccl", (7, 7), may_fall_back=False)
    errors = pool.step([0, 1], lambda member, mesh: swap(member, mesh))
    assert any("two share a GPU" in str(error) for error in errors)
    assert all(isinstance(error, MeshError) for error in errors)


def names(pool: Pool, instances: list[int]) -> list[object]:
    return pool.step(instances, lambda member, mesh: type(mesh).__name__)


def test_members_on_one_device_share_its_memory_and_open_each_block_once(make: MakePool) -> None:
    pool = make(2, "memory")
    for _ in range(3):
        swapped(pool, [0, 1], rounds=20)
    assert names(pool, [0, 1]) == ["SharedDeviceMesh"] * 2
    for member in pool.members:
        assert member.sharing is not None
        assert member.sharing.opened <= 3  # messages that are under way, however many there are in a step


def test_where_memory_cannot_be_shared_tensors_go_through_the_host(make: MakePool) -> None:
    pool = make(2, "memory", (1, 2))
    assert names(pool, [0, 1]) == ["StagedMesh"] * 2
    swapped(pool, [0, 1])
    for number, fails in enumerate(("exports_fail", "opening_fails", "exports_fail", "opening_fails")):
        pool = make(2, "memory")
        setattr(pool.members[number // 2].sharing, fails, True)
        assert names(pool, [0, 1]) == ["StagedMesh"] * 2
        swapped(pool, [0, 1])


def test_a_member_on_another_device_is_reached_through_the_host(make: MakePool) -> None:
    pool = make(3, "memory", (1, 1, 2))
    assert names(pool, [0, 1, 2]) == ["SharedDeviceMesh", "SharedDeviceMesh", "StagedMesh"]
    swapped(pool, [0, 1, 2])


def test_after_a_step_that_has_failed_no_block_is_used_that_another_member_may_read(make: MakePool) -> None:
    pool = make(2, "memory")
    swapped(pool, [0, 1])

    def work(member: Member, mesh: Mesh) -> None:
        tensor = torch.full((SIZE,), 1.0 + member.instance)
        if member.instance == 0:
            mesh.send(tensor, 1, 7).wait()
            mesh.settle()
        raise MeshError("on purpose")

    assert all("on purpose" in str(error) for error in pool.step([0, 1], work))
    swapped(pool, [0, 1])
    assert names(pool, [0, 1]) == ["SharedDeviceMesh"] * 2


def test_messages_of_all_sizes_at_once(make: MakePool) -> None:
    """More of them, and larger ones, than blocks are kept for."""
    pool = make(2, "memory")
    sizes = [1, 1000, 600_000, 3, 2_000_000, *[700_000] * 12]

    def work(member: Member, mesh: Mesh) -> list[float]:
        other, device = 1 - member.instance, member.device
        ours = [torch.full((size,), float(10 * number + member.instance)) for number, size in enumerate(sizes)]
        theirs = [torch.full((size,), float("nan")) for size in sizes]
        with mesh.batch(Lane.MOVES):
            calls = [mesh.send(tensor, other, number) for number, tensor in enumerate(ours)]
            calls += [mesh.receive(tensor, other, number) for number, tensor in enumerate(theirs)]
        for call in calls:
            call.wait()
        found: list[float] = []
        for tensor in theirs:
            device.compute(lambda tensor=tensor: found.append(float(tensor.min())))
        mesh.settle()
        return found

    for _ in range(2):
        found = pool.step([0, 1], work)
        assert found == [[float(10 * number + other) for number in range(len(sizes))] for other in (1, 0)]


def test_words_that_make_no_sense_break_the_step(make: MakePool) -> None:
    pool = make(2, "memory")

    def work(member: Member, mesh: Mesh) -> None:
        if member.instance == 0:
            mesh.send(torch.zeros(SIZE), 1, 0).wait()
        else:
            mesh.receive(torch.zeros(SIZE + 1), 0, 0).wait()
        mesh.settle()

    errors = pool.step([0, 1], work)
    assert "2000 bytes of instance 0 instead of 2004" in str(errors[1])
    assert isinstance(errors[0], MeshError)
    swapped(pool, [0, 1])


def test_answers_arrive_as_they_were() -> None:
    ids = tuple(bytes([number]) * UNIQUE_ID_BYTES for number in range(1, len(Lane) + 1))
    for answer in (Agreement(b"n" * 16, ids), Agreement(b"n" * 16, ()), Agreement(bytes(16), ())):
        assert Agreement.unpacked(answer.packed()) == answer


def test_what_a_group_decides() -> None:
    def unique_id() -> bytes:
        return b"u" * UNIQUE_ID_BYTES

    none, one, other = bytes(16), b"1" * 16, b"2" * 16
    apart, same = [b"a" * 16, b"b" * 16], [b"a" * 16, b"a" * 16]
    assert decide([one, one], apart, unique_id) == Agreement(one, ())
    for names in ([none, none], [one, none], [one, other]):
        answer = decide(names, apart, unique_id)
        assert answer.unique_ids == (unique_id(),) * len(Lane)
        assert answer.name not in (none, one, other)
    assert decide([one, one], same, unique_id).name == none
    assert decide([one, b"\xff" * 16], apart, unique_id).name == none


def test_rows_leave_for_decode_behind_what_computes_them() -> None:
    """Of each layer the sender gets a mark: who waits for it finds keys and values, who does not finds nothing yet."""
    device = LazyDevice()
    layers, tokens, size = 3, 8, 4
    pool = torch.zeros(layers, tokens, size)
    told: list[tuple[int, bool]] = []

    def ready(layer: int, computed: Mark | None) -> None:
        assert computed is not None
        was_there = bool(pool[layer].any())
        computed.synchronize()
        told.append((layer, not was_there and bool((pool[layer] == layer + 1).all())))

    class Moving:
        def finish(self, layer: int) -> None: ...

        def start(self, layer: int) -> None: ...

    class Resting:
        def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
            return pool[layer][None, :, None]

    positions = (range(tokens),)
    attention = _ChunkAttention(
        StepContext(Resting(), 0, 0, streams=device),  # type: ignore[arg-type]
        Resting(),  # type: ignore[arg-type]
        ChunkLayout((0,), (), ((),), (positions,)),
        [positions],
        HeldRows(positions, torch.arange(tokens)),
        Moving(),  # type: ignore[arg-type]
        ready,
    )
    for layer in range(layers):
        device.compute(lambda layer=layer: pool[layer].fill_(layer + 1))
        attention.attend(layer, torch.zeros(tokens, 1, size), AttentionRule(1.0))
    assert told == [(layer, True) for layer in range(layers)]
