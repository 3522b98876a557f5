"""Each transport alone: rows arrive, permits hold and are cut off, refusals are told."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_ext.transfer.decide.shards import KVShard, TokenSpan
from sglang_ext.transfer.pool_layout import ItemBuffer, PoolLayout, RowCopy, plan_rows
from sglang_ext.transfer.transports import nixl, row_moves, tcp
from sglang_ext.transfer.transports.link_records import Limits
from sglang_ext.transfer.transports.mooncake import MooncakeTransport
from sglang_ext.transfer.transports.nixl import NixlTransport
from sglang_ext.transfer.transports.registry import create_transport, unavailable_reason
from sglang_ext.transfer.transports.shared_memory import SharedMemoryTransport
from sglang_ext.transfer.transports.tcp import EngineOptions, TcpTransport
from sglang_ext.transfer.transports.transport import TransferError, Transport
from support.examples import examples
from support.mooncake_folder import needs_mooncake
from support.nixl_folder import needs_nixl

ROWS, WIDTH = 64, 48


def make(name: str) -> Transport:
    if name == "nixl":
        return create_transport(name, "127.0.0.1")
    if name == "mooncake":
        return MooncakeTransport("127.0.0.1", staging_bytes=1000, io_timeout_s=10.0)
    if name == "tcp":
        return TcpTransport("127.0.0.1", EngineOptions(connect_timeout_s=1.0, io_timeout_s=2.0))
    return SharedMemoryTransport(staging_bytes=1000, io_timeout_s=2.0)  # so that writes need several batches


NIXL = pytest.param("nixl", marks=needs_nixl)
MOONCAKE = pytest.param("mooncake", marks=(pytest.mark.full, needs_mooncake))  # closing it takes a second
FENCING = ["tcp", "shared_memory", MOONCAKE]


@pytest.fixture(params=FENCING)
def small_pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Transport, Transport]]:
    """Batches and staging buffers are so small that most writes need several, with long runs among them."""
    monkeypatch.setattr(row_moves, "DIRECT_BYTES", 200)
    monkeypatch.setattr(tcp, "SEND_STAGING_BYTES", 320)
    monkeypatch.setattr(tcp, "RECEIVE_STAGING_BYTES", 256)
    limits = Limits(max_blocks=5, max_payload_bytes=1000)
    sender, receiver = (
        TcpTransport("127.0.0.1", EngineOptions(io_timeout_s=2.0, limits=limits))
        if request.param == "tcp"
        else make(request.param)
        for _ in range(2)
    )
    yield sender, receiver
    sender.close()
    receiver.close()


def two_of(name: str) -> Iterator[tuple[Transport, Transport]]:
    sender, receiver = make(name), make(name)
    yield sender, receiver
    sender.close()
    receiver.close()
    receiver.close()


@pytest.fixture(params=FENCING)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Transport]]:
    yield from two_of(request.param)


@pytest.fixture(params=[*FENCING, NIXL])
def any_pair(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Transport]]:
    """Also of the transport that checks no permits."""
    yield from two_of(request.param)


def memory(transport: Transport, seed: int) -> npt.NDArray[np.uint8]:
    rows = np.random.default_rng(seed).integers(0, 256, (ROWS, WIDTH), np.uint8)
    transport.register([ItemBuffer(rows.ctypes.data, WIDTH, ROWS)])
    return rows


def copy(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], slots: list[int], offset: int = 8) -> RowCopy:
    """Bytes offset to offset + 20 of some rows, to rows in another order."""
    index = np.array(slots, np.uint32)
    return RowCopy(
        source.ctypes.data + offset, WIDTH, index, target.ctypes.data + offset, WIDTH, index[::-1].copy(), 20
    )


def test_rows_arrive_under_a_permit(any_pair: tuple[Transport, Transport]) -> None:
    sender, receiver = any_pair
    source, target = memory(sender, 1), memory(receiver, 2)
    expected = target.copy()
    slots = [5, 6, 7, 1, 60, 33, *range(10, 30)]
    expected[slots[::-1], 8:28] = source[slots, 8:28]
    receiver.allow(7)
    copies = [copy(source, target, slots), copy(source, target, [])]
    assert sender.write(receiver.address, 7, copies) == len(slots) * 20
    np.testing.assert_array_equal(target, expected)


def test_copies_of_the_same_source_may_go_to_different_slots(any_pair: tuple[Transport, Transport]) -> None:
    sender, receiver = any_pair
    source, target = memory(sender, 1), memory(receiver, 2)
    expected = target.copy()
    receiver.allow(7)
    first = copy(source, target, [5, 6, 7])
    second = first._replace(target_slots=np.array([30, 31, 40], np.uint32))
    expected[[7, 6, 5], 8:28] = expected[[30, 31, 40], 8:28] = source[[5, 6, 7], 8:28]
    sender.write(receiver.address, 7, [first, second])
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("permit", [0, 6, 7])
def test_nothing_is_written_without_a_permit_or_after_it(pair: tuple[Transport, Transport], permit: int) -> None:
    sender, receiver = pair
    source, target = memory(sender, 1), memory(receiver, 2)
    before = target.copy()
    receiver.allow(7)
    receiver.revoke(7)
    with pytest.raises(TransferError, match="does not allow"):
        sender.write(receiver.address, permit, [copy(source, target, [1, 2])])
    np.testing.assert_array_equal(target, before)


def test_a_refused_sender_can_go_on(pair: tuple[Transport, Transport]) -> None:
    sender, receiver = pair
    source, target = memory(sender, 1), memory(receiver, 2)
    with pytest.raises(TransferError):
        sender.write(receiver.address, 7, [copy(source, target, [1])])
    receiver.allow(7)
    sender.write(receiver.address, 7, [copy(source, target, [1])])
    np.testing.assert_array_equal(target[1, 8:28], source[1, 8:28])


@pytest.mark.parametrize("slots", [[ROWS], [1, ROWS + 7]])
def test_rows_outside_of_registered_memory_are_refused(any_pair: tuple[Transport, Transport], slots: list[int]) -> None:
    sender, receiver = any_pair
    source, target = memory(sender, 1), memory(receiver, 2)
    receiver.allow(7)
    inside = np.ones(len(slots), np.uint32)
    with pytest.raises(TransferError, match="outside"):
        sender.write(receiver.address, 7, [copy(source, target, slots)])
    with pytest.raises(TransferError, match="outside"):
        sender.write(receiver.address, 7, [copy(source, target, slots)._replace(source_slots=inside)])


def test_a_receiver_that_is_gone(any_pair: tuple[Transport, Transport]) -> None:
    sender, receiver = any_pair
    source, target = memory(sender, 1), memory(receiver, 2)
    receiver.allow(7)
    sender.write(receiver.address, 7, [copy(source, target, [1])])
    receiver.close()

    def is_refused() -> bool:
        try:
            sender.write(receiver.address, 7, [copy(source, target, [1])])
        except TransferError:
            return True
        # One that cannot fence its memory off learns of it from its connection, in its own time.
        assert not sender.can_fence
        return False

    end_s = time.monotonic() + 60
    while not is_refused():
        assert time.monotonic() < end_s


@needs_nixl
def test_nixl_forgets_peers_that_it_does_not_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_PEER_IDLE_S", 0.0)
    sender, first, second = (NixlTransport(io_timeout_s=60.0) for _ in range(3))
    source = memory(sender, 1)
    for number, receiver in enumerate((first, second, first)):
        target = memory(receiver, 2 + number)
        sender.write(receiver.address, 7, [copy(source, target, [1, 2])])
        np.testing.assert_array_equal(target[[2, 1], 8:28], source[[1, 2], 8:28])
        assert list(sender._peers) == [receiver.address]
    # One that fails is forgotten at once, and may be written to again.
    with pytest.raises(TransferError, match="outside"):
        sender.write(first.address, 7, [copy(source, target, [ROWS])])
    assert not sender._peers
    sender.write(first.address, 7, [copy(source, target, [3])])
    np.testing.assert_array_equal(target[3, 8:28], source[3, 8:28])
    for transport in (sender, first, second):
        transport.close()


def test_many_threads_write_while_a_permit_is_taken_back(pair: tuple[Transport, Transport]) -> None:
    sender, receiver = pair
    source, target = memory(sender, 1), memory(receiver, 2)
    receiver.allow(7)
    refused = threading.Event()

    def write() -> None:
        try:
            while True:
                sender.write(receiver.address, 7, [copy(source, target, list(range(ROWS)))])
        except TransferError:
            refused.set()

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    time.sleep(0.05)
    receiver.revoke(7)
    target[:] = 0
    for writer in writers:
        writer.join()
    assert refused.is_set()
    assert not target.any(), "something was written after the permit was taken back"


@pytest.mark.parametrize("staging_bytes", [16, 2])
def test_a_row_larger_than_the_staging_memory_goes_in_several_pieces(staging_bytes: int) -> None:
    sender, receiver = SharedMemoryTransport(staging_bytes=staging_bytes), SharedMemoryTransport()
    source, target = memory(sender, 1), memory(receiver, 2)
    receiver.allow(7)
    expected = target.copy()
    expected[[4, 1], 8:28] = source[[1, 4], 8:28]
    assert sender.write(receiver.address, 7, [copy(source, target, [1, 4])]) == 40
    np.testing.assert_array_equal(target, expected)
    sender.close()
    receiver.close()


class Side(NamedTuple):
    """Heads and layers that a rank has memory for."""

    first_head: int
    heads: int
    first_layer: int
    layers: int
    slots: int


class SidePool:
    """K and V per layer as SGLang lays them out, or latent rows; `sizes`: the bytes of a head of a token in each."""

    def __init__(self, side: Side, seed: int, sizes: Sequence[int]) -> None:
        random = np.random.default_rng(seed)
        self.side = side
        self.layers = [
            tuple(random.integers(0, 256, (side.slots, side.heads, size), np.uint8) for size in sizes)
            for _ in range(side.layers)
        ]
        self.layout = PoolLayout(
            "float32",
            side.first_layer,
            tuple(tuple(buffer_of(kind) for kind in layer) for layer in self.layers),
            side.first_head,
            side.heads,
        )


def buffer_of(array: npt.NDArray[np.uint8]) -> ItemBuffer:
    return ItemBuffer(array.ctypes.data, array[0].nbytes, len(array))


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Side, Side, KVShard, list[int], list[int]]:
    """Two ranks of other sizes, what goes from one to the other, and from which slots to which."""
    head_count, layer_count = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    first_head, first_layer = draw(st.integers(0, 6)), draw(st.integers(0, 2))
    tokens = draw(st.integers(1, 40))

    def side() -> Side:
        heads_before, layers_before = draw(st.integers(0, first_head)), draw(st.integers(0, first_layer))
        return Side(
            first_head - heads_before,
            heads_before + head_count + draw(st.integers(0, 3)),
            first_layer - layers_before,
            layers_before + layer_count + draw(st.integers(0, 1)),
            48,
        )

    def slots() -> list[int]:
        page = draw(st.sampled_from([1, 1, 4, 16]))
        pages = draw(st.sampled_from([sorted, lambda pages: pages]))(draw(st.permutations(range(48 // page))))
        return [first * page + offset for first in pages for offset in range(page)][:tokens]

    shard = KVShard((TokenSpan(0, tokens),), first_head, head_count, first_layer, layer_count)
    return side(), side(), shard, slots(), slots()


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(transfers(), st.sampled_from([(24, 16), (40,)]))
def test_every_byte_is_where_it_shall_be(
    small_pair: tuple[Transport, Transport],
    drawn: tuple[Side, Side, KVShard, list[int], list[int]],
    sizes: tuple[int, ...],
) -> None:
    """Heads, pages, slots in any order, layers: against an assignment for each token, head and layer."""
    sender, receiver = small_pair
    here, there, shard, source_slots, target_slots = drawn
    source, target = SidePool(here, 1, sizes), SidePool(there, 2, sizes)
    sender.register(source.layout.buffers)
    receiver.register(target.layout.buffers)
    receiver.allow(7)
    expected = [tuple(kind.copy() for kind in layer) for layer in target.layers]
    for layer in range(shard.first_layer, shard.first_layer + shard.layer_count):
        for head in range(shard.first_head, shard.first_head + shard.head_count):
            for a, b in zip(source_slots, target_slots, strict=True):
                for kind in range(len(sizes)):
                    want = source.layers[layer - here.first_layer][kind][a, head - here.first_head]
                    expected[layer - there.first_layer][kind][b, head - there.first_head] = want
    rows = plan_rows(
        source.layout, target.layout, shard, np.array(source_slots, np.uint32), np.array(target_slots, np.uint32)
    )
    assert sender.write(receiver.address, 7, rows) == shard.cells * 40
    for have, want in zip(target.layers, expected, strict=True):
        for kind in range(len(sizes)):
            np.testing.assert_array_equal(have[kind], want[kind])


def test_a_transfer_may_have_any_number_of_rows(pair: tuple[Transport, Transport]) -> None:
    """More than 2^20: one head of two, of 16,400 tokens and 64 buffers."""
    sender, receiver = SharedMemoryTransport(), SharedMemoryTransport()
    if pair[0].name == "tcp":
        sender, receiver = pair  # type: ignore[assignment]
    elif pair[0].name == "mooncake":
        sender, receiver = MooncakeTransport("127.0.0.1"), MooncakeTransport("127.0.0.1")  # type: ignore[assignment]
    tokens, buffers = 16_400, 64
    source = np.random.default_rng(1).integers(0, 256, (buffers, tokens, 2, 8), np.uint8)
    target = np.zeros((buffers, tokens, 8), np.uint8)
    sender.register([buffer_of(one.reshape(tokens, 16)) for one in source])
    receiver.register([buffer_of(one) for one in target])
    receiver.allow(7)
    slots = np.arange(tokens, dtype=np.uint32)
    order = np.random.default_rng(2).permutation(tokens).astype(np.uint32)
    rows = [
        RowCopy(here.ctypes.data + 8, 16, slots, there.ctypes.data, 8, order, 8)
        for here, there in zip(source, target, strict=True)
    ]
    assert sender.write(receiver.address, 7, rows) == tokens * buffers * 8
    np.testing.assert_array_equal(target[:, order], source[:, :, 1])
    sender.close()
    receiver.close()


def test_names_of_transports() -> None:
    for name in ("tcp", "shared_memory"):
        transport = create_transport(name, "127.0.0.1")
        assert transport.name == name
        transport.close()
    with pytest.raises(
        ValueError, match="no handshake transport 'carrier pigeon'; choose one of tcp, shared_memory, nixl, mooncake"
    ):
        create_transport("carrier pigeon", "127.0.0.1")


@pytest.mark.parametrize("name", ["mooncake", "nixl"])
def test_transports_that_are_not_there_say_so_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    problem = unavailable_reason(name)
    assert problem is not None
    assert problem.startswith(f"handshake transport {name} ")
    assert "\n" not in problem
