"""Each transport alone: rows arrive, permits hold and are cut off, refusals are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from sglang_ext.kv_transfer.errors import TransferError
from sglang_ext.kv_transfer.pool_layout import ItemBuffer, RowCopy
from sglang_ext.kv_transfer.shared_memory_transport import SharedMemoryTransport
from sglang_ext.kv_transfer.tcp_transport import EngineOptions, TcpTransport
from sglang_ext.kv_transfer.transport import Transport, create_transport, why_unavailable

ROWS, WIDTH = 64, 48


def make(name: str) -> Transport:
    if name == "tcp":
        return TcpTransport("127.0.0.1", EngineOptions(connect_timeout_s=1.0, io_timeout_s=2.0))
    return SharedMemoryTransport(staging_bytes=1000, io_timeout_s=2.0)  # so that writes need several batches


@pytest.fixture(params=["tcp", "shared_memory"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Transport]]:
    sender, receiver = make(request.param), make(request.param)
    yield sender, receiver
    sender.close()
    receiver.close()
    receiver.close()


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


def test_rows_arrive_under_a_permit(pair: tuple[Transport, Transport]) -> None:
    sender, receiver = pair
    source, target = memory(sender, 1), memory(receiver, 2)
    expected = target.copy()
    slots = [5, 6, 7, 1, 60, 33, *range(10, 30)]
    expected[slots[::-1], 8:28] = source[slots, 8:28]
    receiver.allow(7)
    copies = [copy(source, target, slots), copy(source, target, [])]
    assert sender.write(receiver.address, 7, copies) == len(slots) * 20
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
def test_rows_outside_of_registered_memory_are_refused(pair: tuple[Transport, Transport], slots: list[int]) -> None:
    sender, receiver = pair
    source, target = memory(sender, 1), memory(receiver, 2)
    receiver.allow(7)
    inside = np.ones(len(slots), np.uint32)
    with pytest.raises(TransferError, match="outside"):
        sender.write(receiver.address, 7, [copy(source, target, slots)])
    with pytest.raises(TransferError, match="outside"):
        sender.write(receiver.address, 7, [copy(source, target, slots)._replace(source_slots=inside)])


def test_a_receiver_that_is_gone(pair: tuple[Transport, Transport]) -> None:
    sender, receiver = pair
    source, target = memory(sender, 1), memory(receiver, 2)
    receiver.allow(7)
    sender.write(receiver.address, 7, [copy(source, target, [1])])
    receiver.close()
    with pytest.raises(TransferError):
        sender.write(receiver.address, 7, [copy(source, target, [1])])


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


def test_a_row_larger_than_the_staging_memory_is_refused() -> None:
    sender, receiver = SharedMemoryTransport(staging_bytes=16), SharedMemoryTransport()
    source, target = memory(sender, 1), memory(receiver, 2)
    receiver.allow(7)
    with pytest.raises(TransferError, match="staging"):
        sender.write(receiver.address, 7, [copy(source, target, [1])])
    sender.close()
    receiver.close()


def test_names_of_transports() -> None:
    for name in ("tcp", "shared_memory"):
        transport = create_transport(name, "127.0.0.1")
        assert transport.name == name
        transport.close()
    with pytest.raises(ValueError, match="no handshake transport 'carrier pigeon'; choose one of tcp, shared_memory"):
        create_transport("carrier pigeon", "127.0.0.1")


@pytest.mark.parametrize("name", ["mooncake", "nixl", "nccl"])
def test_transports_that_are_not_there_say_so_in_one_line(name: str) -> None:
    problem = why_unavailable(name)
    assert problem is not None
    assert problem.startswith(f"handshake transport {name} ")
    assert "\n" not in problem
