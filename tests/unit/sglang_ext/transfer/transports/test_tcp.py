"""One-sided writes between engines: bytes arrive, bounds hold, failures are reported."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_ext.transfer.pool_layout import RowSet
from sglang_ext.transfer.transports.link_records import (
    BlockBatch,
    Limits,
    LinkStatus,
    RowBatch,
    TransportGreeting,
    pack,
    receive_greeting,
)
from sglang_ext.transfer.transports.tcp import Block, EngineOptions, TcpTransferEngine, TransferError
from support.running_time import running_s

SIZE = 1 << 16
FAST = EngineOptions(connect_timeout_s=2.0, io_timeout_s=2.0)

GREETING = pack(TransportGreeting("tcp"))


def block_batch(*blocks: tuple[int, int]) -> bytes:
    return pack(BlockBatch(0, np.array(blocks, "<u8").tobytes()))


class Memory:
    """A buffer registered with an engine."""

    def __init__(self, engine: TcpTransferEngine, data: bytes = b"", size_bytes: int = SIZE) -> None:
        self.buffer = ctypes.create_string_buffer(data, size_bytes)
        self.address = ctypes.addressof(self.buffer)
        engine.register(self.address, size_bytes)


@pytest.fixture
def writer() -> Iterator[TcpTransferEngine]:
    engine = TcpTransferEngine("127.0.0.1", FAST)
    yield engine
    engine.close()


@pytest.fixture
def owner() -> Iterator[TcpTransferEngine]:
    engine = TcpTransferEngine("127.0.0.1", FAST)
    yield engine
    engine.close()


def connect(engine: TcpTransferEngine) -> socket.socket:
    host, _, port = engine.session_id.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=5)
    connection.settimeout(5)
    return connection


def greet(engine: TcpTransferEngine) -> socket.socket:
    connection = connect(engine)
    connection.sendall(GREETING)
    receive_greeting(connection, "tcp")
    return connection


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_blocks_arrive_at_their_addresses_and_nothing_else_changes(
    writer: TcpTransferEngine, owner: TcpTransferEngine, lengths: list[int], random: object
) -> None:
    source = Memory(writer, bytes(i % 256 for i in range(SIZE)))
    target = Memory(owner)
    expected = bytearray(SIZE)
    blocks, position = [], 0
    for length in lengths:
        blocks.append(Block(source.address + 2 * position % 1000, target.address + position, length))
        expected[position : position + length] = source.buffer.raw[2 * position % 1000 :][:length]
        position += length + 3
    writer.write(owner.session_id, blocks)
    assert target.buffer.raw == bytes(expected)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=30))
def test_any_number_of_blocks_of_any_size_goes_in_bounded_batches(lengths: list[int]) -> None:
    """Both ends refuse what is larger."""
    limits = Limits(max_blocks=3, max_payload_bytes=150)
    here, there = (TcpTransferEngine("127.0.0.1", EngineOptions(limits=limits)) for _ in range(2))
    source, target = Memory(here, bytes(i % 251 for i in range(SIZE))), Memory(there)
    expected, blocks, position = bytearray(SIZE), [], 0
    for length in lengths:
        blocks.append(Block(source.address + 2 * position, target.address + position, length))
        expected[position : position + length] = source.buffer.raw[2 * position :][:length]
        position += length + 1
    here.write(there.session_id, blocks)
    assert target.buffer.raw == bytes(expected)
    here.close()
    there.close()


def test_large_block_crosses_socket_buffers(writer: TcpTransferEngine, owner: TcpTransferEngine) -> None:
    size = 32 << 20
    source = Memory(writer, bytes(range(256)) * (size // 256), size)
    target = Memory(owner, size_bytes=size)
    writer.write(owner.session_id, [Block(source.address, target.address, size)])
    assert target.buffer.raw == source.buffer.raw


def test_many_writers_at_once(writer: TcpTransferEngine, owner: TcpTransferEngine) -> None:
    source, target = Memory(writer, b"x" * SIZE), Memory(owner)
    piece = SIZE // 32

    def write(index: int) -> None:
        offset = index * piece
        writer.write(owner.session_id, [Block(source.address + offset, target.address + offset, piece)])

    threads = [threading.Thread(target=write, args=(index,)) for index in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.buffer.raw == source.buffer.raw


def test_connection_is_reused(writer: TcpTransferEngine, owner: TcpTransferEngine) -> None:
    for _ in range(5):
        writer.probe(owner.session_id)
    assert len(owner._inbound.connections) == 1


def test_source_outside_registered_memory_is_refused_before_sending(
    writer: TcpTransferEngine, owner: TcpTransferEngine
) -> None:
    target = Memory(owner)
    with pytest.raises(TransferError, match="outside"):
        writer.write(owner.session_id, [Block(target.address, target.address, 8)])


@pytest.mark.parametrize("offset", [-1, SIZE - 3, SIZE + 4096])
def test_target_outside_registered_memory_is_refused(
    writer: TcpTransferEngine, owner: TcpTransferEngine, offset: int
) -> None:
    source, target = Memory(writer, b"y" * SIZE), Memory(owner)
    blocks = [Block(source.address, target.address, 4), Block(source.address, target.address + offset, 4)]
    with pytest.raises(TransferError):
        writer.write(owner.session_id, blocks)
    assert target.buffer.raw == bytes(SIZE)
    writer.probe(owner.session_id)


def test_unregistered_memory_is_refused(writer: TcpTransferEngine, owner: TcpTransferEngine) -> None:
    source, target = Memory(writer), Memory(owner)
    owner.unregister(target.address)
    with pytest.raises(TransferError):
        writer.write(owner.session_id, [Block(source.address, target.address, 8)])


def test_a_closed_port(writer: TcpTransferEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(TransferError, match="refused"):
        writer.probe(f"127.0.0.1:{port}")


@pytest.mark.parametrize("session_id", ["", "nonsense", "127.0.0.1:", "127.0.0.1:http"])
def test_malformed_session_is_refused(writer: TcpTransferEngine, session_id: str) -> None:
    with pytest.raises(TransferError, match="host:port"):
        writer.probe(session_id)


def test_peer_that_restarted_is_reached_after_its_connection_broke(writer: TcpTransferEngine) -> None:
    first = TcpTransferEngine("127.0.0.1", FAST)
    writer.probe(first.session_id)
    for connection in first._inbound.connections:
        connection.shutdown(socket.SHUT_RDWR)
    time.sleep(0.05)
    writer.probe(first.session_id)
    first.close()


def test_write_after_the_peer_closed_fails(writer: TcpTransferEngine) -> None:
    peer = TcpTransferEngine("127.0.0.1", FAST)
    writer.probe(peer.session_id)
    peer.close()
    with pytest.raises(TransferError):
        writer.probe(peer.session_id)


@pytest.mark.slow
def test_peer_that_never_answers_times_out(writer: TcpTransferEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start_s = running_s()
        with pytest.raises(TransferError, match="timed out"):
            writer.probe(f"127.0.0.1:{silent.getsockname()[1]}")
        assert running_s() - start_s < 4


def test_closed_engine_refuses_to_write(owner: TcpTransferEngine) -> None:
    engine = TcpTransferEngine("127.0.0.1", FAST)
    engine.close()
    with pytest.raises(TransferError, match="closed"):
        engine.probe(owner.session_id)


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        GREETING.replace(b"\x04", b"\x09"),
        GREETING + b"\xff\xff\xff\xff",
        GREETING + block_batch((0, 1 << 40)),
        GREETING + block_batch((0, 8)) + b"12345678",
        GREETING + pack(RowBatch(0, [RowSet(-1, 8, 8)], bytes(4))) + b"12345678",
    ],
    ids=["http", "version", "huge record", "huge payload", "null address", "negative address"],
)
def test_noise_closes_the_connection_and_the_engine_goes_on(
    writer: TcpTransferEngine, owner: TcpTransferEngine, noise: bytes
) -> None:
    with connect(owner) as connection:
        connection.sendall(noise)
        try:
            while connection.recv(4096):
                pass
        except ConnectionResetError:
            pass
    writer.probe(owner.session_id)


@pytest.mark.slow
def test_writer_that_stalls_in_a_batch_is_dropped(owner: TcpTransferEngine) -> None:
    target = Memory(owner)
    with greet(owner) as connection:
        connection.sendall(block_batch((target.address, 8)) + b"half")
        assert connection.recv(1) == b""
    # The region can be released: no view of it is held any more.
    owner.unregister(target.address)


@pytest.mark.slow
def test_idle_writer_is_kept(owner: TcpTransferEngine) -> None:
    with greet(owner) as connection:
        time.sleep(2 * FAST.io_timeout_s)
        connection.sendall(block_batch())
        assert connection.recv(1) == bytes([LinkStatus.DONE])


def test_too_many_writers_are_refused() -> None:
    engine = TcpTransferEngine("127.0.0.1", EngineOptions(max_inbound_connections=2))
    try:
        kept = [greet(engine), greet(engine)]
        with connect(engine) as third:
            assert third.recv(1) == b""
        for connection in kept:
            connection.close()
    finally:
        engine.close()
