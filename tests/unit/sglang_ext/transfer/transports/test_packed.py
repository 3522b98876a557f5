"""Short rows packed around a one-sided transport, both in this process's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.transfer.pool_layout import ItemBuffer, RowCopy
from sglang_ext.transfer.transports import packed
from sglang_ext.transfer.transports.nixl import NixlTransport
from sglang_ext.transfer.transports.packed import PackedTransport
from sglang_ext.transfer.transports.transport import TransferError
from support.nixl_folder import needs_nixl
from support.one_sided import OneSidedTransport

ROWS, WIDTH = 64, 48
Memory = npt.NDArray[np.uint8]


def make(
    *, block_bytes: int = 512, blocks: int = 2, before_write: Callable[[], None] = lambda: None
) -> tuple[PackedTransport, OneSidedTransport, list[OneSidedTransport]]:
    """A transport, what it moves long rows with, and what it has moved its blocks with."""
    direct, movers = OneSidedTransport(), []

    def make_mover(staging: ItemBuffer) -> OneSidedTransport:
        movers.append(OneSidedTransport(before_write))
        return movers[-1]

    transport = PackedTransport(
        direct, make_mover, "127.0.0.1", torch.device("cpu"), None, block_bytes=block_bytes, blocks=blocks
    )
    return transport, direct, movers


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def memory(transport: PackedTransport, seed: int, rows: int = ROWS, width: int = WIDTH) -> Memory:
    found = np.random.default_rng(seed).integers(0, 256, (rows, width), np.uint8)
    transport.register([ItemBuffer(found.ctypes.data, width, rows)])
    return found


def copy(source: Memory, target: Memory, slots: list[int], to: list[int], *, at: int = 8, length: int = 20) -> RowCopy:
    """Bytes `at` to `at + length` of some rows, to bytes of other rows that begin at the same place."""
    return RowCopy(
        source.ctypes.data + at,
        source.shape[1],
        np.array(slots, np.uint32),
        target.ctypes.data + at,
        target.shape[1],
        np.array(to, np.uint32),
        length,
    )


def test_scattered_rows_travel_in_few_pieces(stack: ExitStack) -> None:
    (sender, direct, movers), (receiver, _, _) = make(block_bytes=4096), make(block_bytes=4096)
    stack.callback(sender.close)
    stack.callback(receiver.close)
    source, target = memory(sender, 1), memory(receiver, 2)
    slots, to = list(range(0, 60, 2)), list(range(59, 29, -1))
    expected = target.copy()
    expected[to, 8:28] = source[slots, 8:28]
    receiver.allow(7)
    assert sender.write(receiver.address, 7, [copy(source, target, slots, to)]) == 30 * 20
    np.testing.assert_array_equal(target, expected)
    (mover,) = movers
    assert (mover.pieces, direct.pieces) == (1, 0)


def test_what_follows_each_other_and_is_long_goes_as_it_is(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PACK_BELOW_BYTES", 4 * WIDTH)
    (sender, direct, movers), (receiver, _, _) = make(), make()
    stack.callback(sender.close)
    stack.callback(receiver.close)
    source, target = memory(sender, 1), memory(receiver, 2)
    receiver.allow(7)
    rows = list(range(10, 30))
    sender.write(receiver.address, 7, [copy(source, target, rows, rows, at=0, length=WIDTH)])
    np.testing.assert_array_equal(target[10:30], source[10:30])
    assert (direct.pieces, movers) == (1, [])


def test_rows_that_exceed_a_block_take_turns_in_its_halves(stack: ExitStack) -> None:
    (sender, _, movers), (receiver, _, _) = make(block_bytes=160, blocks=1), make(block_bytes=160, blocks=1)
    stack.callback(sender.close)
    stack.callback(receiver.close)
    source, target = memory(sender, 1), memory(receiver, 2)
    order = np.random.default_rng(3).permutation(ROWS)
    receiver.allow(7)
    for _ in range(3):
        source[:] += 1
        sender.write(receiver.address, 7, [copy(source, target, order.tolist(), order[::-1].tolist())])
        np.testing.assert_array_equal(target[order[::-1], 8:28], source[order, 8:28])
    assert movers[0].pieces == 3 * 16  # four rows of 20 bytes in each half


def test_metadata_and_long_rows_go_along(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PACK_BELOW_BYTES", 2 * WIDTH)
    (sender, direct, movers), (receiver, _, _) = make(), make()
    stack.callback(sender.close)
    stack.callback(receiver.close)
    source, target = memory(sender, 1), memory(receiver, 2)
    other_source, other_target = memory(sender, 3), memory(receiver, 4)
    receiver.allow(7)
    copies = [
        copy(source, target, [1, 9, 5], [3, 2, 1]),
        copy(other_source, other_target, [5, 6, 7, 8], [5, 6, 7, 8], at=0, length=WIDTH),
        copy(other_source, other_target, [1], [2]),
    ]
    assert sender.write(receiver.address, 7, copies) == 3 * 20 + 4 * WIDTH + 20
    np.testing.assert_array_equal(target[[3, 2, 1], 8:28], source[[1, 9, 5], 8:28])
    np.testing.assert_array_equal(other_target[5:9], other_source[5:9])
    np.testing.assert_array_equal(other_target[2, 8:28], other_source[1, 8:28])
    assert (direct.pieces, movers[0].pieces) == (2, 1)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_rows_arrive_as_they_were(data: st.DataObject) -> None:
    """Other widths of rows on both sides, as of ranks with other heads; any places, alignments and lengths."""
    with ExitStack() as stack:
        transports = [make(block_bytes=data.draw(st.sampled_from([64, 200, 1000])))[0] for _ in range(2)]
        for transport in transports:
            stack.callback(transport.close)
        sender, receiver = transports
        length = data.draw(st.integers(1, 30))
        copies, expected, found, sources = [], [], [], []
        receiver.allow(7)
        for number in range(data.draw(st.integers(1, 3))):
            widths = [length + data.draw(st.integers(0, 20)) for _ in range(2)]
            source, target = (memory(one, number, width=width) for one, width in zip(transports, widths, strict=True))
            offsets = [data.draw(st.integers(0, width - length)) for width in widths]
            count = data.draw(st.integers(0, ROWS))
            slots = data.draw(st.lists(st.integers(0, ROWS - 1), min_size=count, max_size=count))
            to = data.draw(st.permutations(range(ROWS)))[:count]
            wanted = target.copy()
            wanted[to, offsets[1] : offsets[1] + length] = source[slots, offsets[0] : offsets[0] + length]
            copies.append(
                RowCopy(
                    *(source.ctypes.data + offsets[0], widths[0], np.array(slots, np.uint32)),
                    *(target.ctypes.data + offsets[1], widths[1], np.array(to, np.uint32), length),
                )
            )
            expected.append(wanted)
            found.append(target)
            sources.append(source)  # its memory is read later
        sender.write(receiver.address, 7, copies)
        for got, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("permit", [0, 6, 7])
def test_nothing_is_written_without_a_permit_or_after_it(stack: ExitStack, permit: int) -> None:
    (sender, _, _), (receiver, _, _) = make(), make()
    stack.callback(sender.close)
    stack.callback(receiver.close)
    source, target = memory(sender, 1), memory(receiver, 2)
    before = target.copy()
    receiver.allow(7)
    receiver.revoke(7)
    with pytest.raises(TransferError, match="does not allow"):
        sender.write(receiver.address, permit, [copy(source, target, [1, 5], [2, 9])])
    np.testing.assert_array_equal(target, before)
    receiver.allow(8)
    sender.write(receiver.address, 8, [copy(source, target, [1, 5], [2, 9])])
    np.testing.assert_array_equal(target[[2, 9], 8:28], source[[1, 5], 8:28])


def test_a_permit_that_is_taken_back_in_the_middle_ends_the_write_and_the_block_is_free(stack: ExitStack) -> None:
    written, revoked = threading.Event(), threading.Event()

    def before_write() -> None:
        if written.is_set():
            assert revoked.wait(60)
        written.set()

    (sender, _, movers), (receiver, _, _) = make(block_bytes=160, blocks=1, before_write=before_write), make(blocks=1)
    stack.callback(sender.close)
    stack.callback(receiver.close)
    source, target = memory(sender, 1), memory(receiver, 2)
    receiver.allow(7)

    def revoke() -> None:
        assert written.wait(60)
        receiver.revoke(7)
        target[:] = 0
        revoked.set()

    thread = threading.Thread(target=revoke)
    thread.start()
    slots = list(range(0, ROWS, 2))
    with pytest.raises(TransferError, match="does not allow"):
        sender.write(receiver.address, 7, [copy(source, target, slots, slots)])
    thread.join(60)
    assert not target.any()
    receiver.allow(8)
    pieces = movers[0].pieces
    sender.write(receiver.address, 8, [copy(source, target, slots, slots)])
    assert movers[0].pieces > pieces
    np.testing.assert_array_equal(target[slots, 8:28], source[slots, 8:28])


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_without_a_free_block_rows_go_one_by_one(stack: ExitStack, side: str) -> None:
    (sender, direct, movers), (receiver, _, _) = make(blocks=1), make(blocks=1)
    stack.callback(sender.close)
    stack.callback(receiver.close)
    source, target = memory(sender, 1), memory(receiver, 2)
    receiver.allow(7)
    taken = sender._outgoing.take() if side == "sender" else receiver._incoming.take()
    assert taken is not None
    sender.write(receiver.address, 7, [copy(source, target, [1, 5], [2, 9])])
    np.testing.assert_array_equal(target[[2, 9], 8:28], source[[1, 5], 8:28])
    assert direct.pieces == 2
    assert not sum(mover.pieces for mover in movers)


def test_a_block_whose_sender_has_gone_in_the_middle_is_not_lent_at_once(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it wrote last may still be on its way into the block."""

    def fail() -> None:
        raise TransferError("it is unknown whether all of it has arrived")

    (lost, _, _), (sender, direct, movers) = make(before_write=fail), make()
    (receiver, _, _) = make(blocks=1)
    for one in (lost, sender, receiver):
        stack.callback(one.close)
    source, target = memory(lost, 1), memory(receiver, 2)
    other = memory(sender, 3)
    receiver.allow(7)
    with pytest.raises(TransferError, match="unknown whether"):
        lost.write(receiver.address, 7, [copy(source, target, [1, 5], [2, 9])])
    end_s = time.monotonic() + 60
    while not receiver._incoming._retired:
        assert time.monotonic() < end_s
        time.sleep(0.005)
    sender.write(receiver.address, 7, [copy(other, target, [1, 5], [2, 9])])
    assert (direct.pieces, sum(mover.pieces for mover in movers)) == (2, 0)
    now_s = time.monotonic()
    monkeypatch.setattr(packed.time, "monotonic", lambda: now_s + packed._RETIRED_S + 1)
    sender.write(receiver.address, 7, [copy(other, target, [1, 5], [2, 9])])
    assert sum(mover.pieces for mover in movers) == 1
    np.testing.assert_array_equal(target[[2, 9], 8:28], other[[1, 5], 8:28])


@pytest.mark.parametrize("slots", [[ROWS, 3], [1, ROWS + 7]])
def test_rows_outside_of_registered_memory_are_refused(stack: ExitStack, slots: list[int]) -> None:
    (sender, _, _), (receiver, _, _) = make(), make()
    stack.callback(sender.close)
    stack.callback(receiver.close)
    source, target = memory(sender, 1), memory(receiver, 2)
    before = target.copy()
    receiver.allow(7)
    for from_slots, to in ((slots, [1, 3]), ([1, 3], slots)):
        with pytest.raises(TransferError, match="outside"):
            sender.write(receiver.address, 7, [copy(source, target, from_slots, to)])
    np.testing.assert_array_equal(target, before)


def test_a_receiver_that_is_gone(stack: ExitStack) -> None:
    (sender, _, _), (receiver, _, _) = make(), make()
    stack.callback(sender.close)
    source, target = memory(sender, 1), memory(receiver, 2)
    receiver.allow(7)
    copies = [copy(source, target, [1, 5], [2, 9])]
    sender.write(receiver.address, 7, copies)
    receiver.close()
    receiver.close()
    for _ in range(2):
        with pytest.raises(TransferError):
            sender.write(receiver.address, 7, copies)


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_process_without_room_for_blocks_writes_as_before(
    stack: ExitStack, side: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sender, direct, _), (receiver, _, _) = make(), make()
    stack.callback(sender.close)
    stack.callback(receiver.close)
    source, target = memory(sender, 1), memory(receiver, 2)
    receiver.allow(7)

    def no_memory(staging: ItemBuffer) -> OneSidedTransport:
        raise RuntimeError("CUDA out of memory\nof it")

    blocks = sender._outgoing if side == "sender" else receiver._incoming
    monkeypatch.setattr(blocks, "_make_mover", no_memory)
    for _ in range(2):
        sender.write(receiver.address, 7, [copy(source, target, [1, 5], [2, 9])])
    np.testing.assert_array_equal(target[[2, 9], 8:28], source[[1, 5], 8:28])
    assert direct.pieces == 4
    (record,) = caplog.records
    assert record.getMessage() == "no staging memory for KV, short rows go one by one: CUDA out of memory"


@needs_nixl
def test_over_nixl(stack: ExitStack) -> None:
    def begin() -> PackedTransport:
        transport = PackedTransport(
            NixlTransport(), lambda staging: NixlTransport(), "127.0.0.1", torch.device("cpu"), None, block_bytes=1000
        )
        stack.callback(transport.close)
        return transport

    sender, receiver = begin(), begin()
    source, target = memory(sender, 1), memory(receiver, 2)
    order = np.random.default_rng(3).permutation(ROWS)
    receiver.allow(7)
    for _ in range(3):
        source[:] += 1
        sender.write(receiver.address, 7, [copy(source, target, order.tolist(), order[::-1].tolist())])
        np.testing.assert_array_equal(target[order[::-1], 8:28], source[order, 8:28])
