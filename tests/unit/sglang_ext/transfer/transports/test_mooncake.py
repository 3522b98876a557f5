"""Mooncake's own engine below the transport: what is not the same as with other transports."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest

from sglang_ext.transfer.pool_layout import ItemBuffer, RowCopy
from sglang_ext.transfer.transports import mooncake
from sglang_ext.transfer.transports.mooncake import MooncakeDeviceTransport, MooncakeTransport
from sglang_ext.transfer.transports.registry import unavailable_reason
from sglang_ext.transfer.transports.transport import GpuBuffers, TransferError
from support.handshake_process import wait_until
from support.mooncake_folder import needs_mooncake
from support.preloaded import preloaded_context

ROWS, WIDTH = 8192, 2048
PERMIT = 3
real = [pytest.mark.full, needs_mooncake]


def test_a_missing_library_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    folder = os.path.join(str(tmp_path), "mooncake")
    os.mkdir(folder)
    with open(os.path.join(folder, "__init__.py"), "w"):
        pass
    with open(os.path.join(folder, "engine.py"), "w") as module:
        module.write("raise ImportError('libibverbs.so.1: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from sglang_ext.transfer.transports import registry

    registry._mooncake_problem.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    problem = unavailable_reason("mooncake")
    registry._mooncake_problem.cache_clear()
    assert problem is not None
    assert "(libibverbs.so.1: cannot open shared object file)" in problem
    assert "\n" not in problem


def serve(pipe: Connection) -> None:
    """A receiver in a process of its own, whose rows are all zero."""
    transport = MooncakeTransport("127.0.0.1")
    rows = np.zeros((ROWS, WIDTH), np.uint8)
    transport.register([ItemBuffer(rows.ctypes.data, WIDTH, ROWS)])
    transport.allow(PERMIT)
    pipe.send((transport.address, rows.ctypes.data))
    while True:
        if pipe.recv() == "rows":
            pipe.send(rows)
        else:
            pipe.send(transport.retired_count)


class Receiver:
    """The parent's side."""

    def __init__(self) -> None:
        context = preloaded_context()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.poll(60)
        self.address, self.rows_at = self.pipe.recv()

    def ask(self, what: str) -> object:
        self.pipe.send(what)
        assert self.pipe.poll(60)
        return self.pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    one = Receiver()
    yield one
    one.process.kill()
    one.process.join()


def sending(transport: MooncakeTransport | MooncakeDeviceTransport) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    rows = np.random.default_rng(5).integers(0, 256, (ROWS, WIDTH), np.uint8)
    transport.register([ItemBuffer(rows.ctypes.data, WIDTH, ROWS)])
    return rows


def all_rows(source: int, target: int) -> RowCopy:
    """To the same slots in another order: no two of them follow each other on both sides."""
    here = np.random.default_rng(6).permutation(ROWS).astype(np.uint32)
    return RowCopy(source, WIDTH, here, target, WIDTH, here[::-1].copy(), WIDTH)


class TestHostMemory:
    pytestmark = real

    def test_rows_without_order_reach_another_process(self, receiver: Receiver) -> None:
        transport = MooncakeTransport("127.0.0.1")
        rows = sending(transport)
        copy = all_rows(rows.ctypes.data, receiver.rows_at)
        assert transport.write(receiver.address, PERMIT, [copy]) == ROWS * WIDTH
        expected = np.empty_like(rows)
        expected[copy.target_slots] = rows[copy.source_slots]
        np.testing.assert_array_equal(receiver.ask("rows"), expected)
        transport.close()

    def test_a_killed_receiver(self, receiver: Receiver) -> None:
        transport = MooncakeTransport("127.0.0.1", io_timeout_s=60.0)
        rows = sending(transport)
        copy = all_rows(rows.ctypes.data, receiver.rows_at)
        transport.write(receiver.address, PERMIT, [copy])
        receiver.process.kill()
        receiver.process.join()
        begun_s = time.monotonic()
        for _ in range(3):
            with pytest.raises(TransferError):
                transport.write(receiver.address, PERMIT, [copy])
        assert time.monotonic() - begun_s < 30, "it waited for as long as for one that is silent"
        wait_until(lambda: transport.retired_count == 0)
        assert transport._idle.count == 0
        transport.close()

    def test_a_receiver_that_is_stopped_costs_its_own_time_and_nothing_stays(
        self, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        transport = MooncakeTransport("127.0.0.1", io_timeout_s=1.0)
        rows = sending(transport)
        copy = all_rows(rows.ctypes.data, receiver.rows_at)
        transport.write(receiver.address, PERMIT, [copy])
        receiver.signal(signal.SIGSTOP)
        with pytest.raises(TransferError, match=r"not ended within 1 s|timed out"):
            transport.write(receiver.address, PERMIT, [copy])
        # Mooncake still reads the staging memory, which therefore stays.
        assert transport.retired_count == 1
        receiver.signal(signal.SIGCONT)
        wait_until(lambda: transport.retired_count == 0)
        wait_until(lambda: receiver.ask("retired") == 1)  # what was under way has come before it is freed
        transport.write(receiver.address, PERMIT, [copy])
        transport.close()

    def test_staging_memory_of_senders_that_have_gone_is_freed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mooncake, "_RETIRED_S", 0.0)
        transport = MooncakeTransport("127.0.0.1", staging_bytes=1 << 16)
        rows = np.zeros((4, 8), np.uint8)
        slots = np.arange(4, dtype=np.uint32)
        transport.allow(PERMIT)
        copies = [RowCopy(rows.ctypes.data, 8, slots, rows.ctypes.data, 8, slots, 8)]
        transport.register([ItemBuffer(rows.ctypes.data, 8, 4)])
        for _ in range(3):
            transport.write(transport.address, PERMIT, copies)
            transport._idle.drop_ended()
            link = transport._idle.take(transport.address)
            assert link is not None
            link.close()
            wait_until(lambda: not transport._inbound.connections and transport.retired_count == 0)
        transport.close()


class TestDeviceMemory:
    """Mooncake's package for machines without a GPU takes every address as the host's."""

    pytestmark = real

    @pytest.fixture
    def pair(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[tuple[MooncakeDeviceTransport, MooncakeDeviceTransport]]:
        monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
        memory = GpuBuffers(0, ())
        sender, receiver = (MooncakeDeviceTransport("127.0.0.1", memory) for _ in range(2))
        yield sender, receiver
        sender.close()
        receiver.close()
        receiver.close()

    def test_more_pieces_than_mooncake_takes_at_a_time(
        self, pair: tuple[MooncakeDeviceTransport, MooncakeDeviceTransport]
    ) -> None:
        sender, receiver = pair
        rows = sending(sender)
        target = np.zeros_like(rows)
        receiver.register([ItemBuffer(target.ctypes.data, WIDTH, ROWS)])
        copy = all_rows(rows.ctypes.data, target.ctypes.data)
        assert sender.write(receiver.address, PERMIT, [copy]) == ROWS * WIDTH
        np.testing.assert_array_equal(target[copy.target_slots], rows[copy.source_slots])

    def test_outside_of_registered_memory(self, pair: tuple[MooncakeDeviceTransport, MooncakeDeviceTransport]) -> None:
        sender, receiver = pair
        rows, target = sending(sender), np.zeros((4, WIDTH), np.uint8)
        with pytest.raises(TransferError, match="outside"):
            sender.write(receiver.address, PERMIT, [all_rows(rows.ctypes.data, target.ctypes.data)])
        with pytest.raises(TransferError, match="outside the 1 registered"):
            sender.write(receiver.address, PERMIT, [all_rows(rows.ctypes.data + 1, target.ctypes.data)])
        assert not target.any()

    def test_a_receiver_that_has_gone(self, pair: tuple[MooncakeDeviceTransport, MooncakeDeviceTransport]) -> None:
        sender, receiver = pair
        rows = sending(sender)
        receiver.close()
        with pytest.raises(TransferError):
            sender.write(receiver.address, PERMIT, [all_rows(rows.ctypes.data, rows.ctypes.data)])
