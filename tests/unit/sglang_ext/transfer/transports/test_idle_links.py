"""Idle connections are used again, and go when their peer has gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from sglang_ext.transfer.pool_layout import ItemBuffer, RowCopy
from sglang_ext.transfer.transports import idle_links
from sglang_ext.transfer.transports.idle_links import IdleLinks
from sglang_ext.transfer.transports.shared_memory import SharedMemoryTransport
from sglang_ext.transfer.transports.tcp import Block, EngineOptions, TcpTransferEngine


class Pair:
    """A link, and its peer's end."""

    def __init__(self) -> None:
        self.connection, self.peer = socket.socketpair()

    def close(self) -> None:
        self.connection.close()


@pytest.fixture
def idle() -> IdleLinks[Pair]:
    return IdleLinks(Pair.close)


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made = [Pair() for _ in range(4)]
    yield made
    for pair in made:
        pair.close()
        pair.peer.close()


def test_the_last_one_put_aside_is_used_first(idle: IdleLinks[Pair], pairs: list[Pair]) -> None:
    first, second, *_ = pairs
    idle.keep("a", first)
    idle.keep("a", second)
    assert idle.take("b") is None
    assert (idle.take("a"), idle.take("a"), idle.take("a")) == (second, first, None)


def test_where_one_is_missing_those_of_peers_that_have_gone_are_dropped(
    idle: IdleLinks[Pair], pairs: list[Pair]
) -> None:
    links = {"a": pairs[:2], "b": pairs[2:]}
    for peer, of_peer in links.items():
        for link in of_peer:
            idle.keep(peer, link)
    for link in links["a"]:
        link.peer.close()
    assert idle.take("c") is None
    assert idle.count == 2
    assert [link.connection.fileno() for link in links["a"]] == [-1, -1]
    assert idle.take("a") is None
    assert idle.take("b") is links["b"][1]


def test_they_are_dropped_too_where_none_is_ever_missing(
    idle: IdleLinks[Pair], pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_links, "_LOOK_EVERY_S", 0.0)
    gone, used, *_ = pairs
    idle.keep("a", gone)
    gone.peer.close()
    idle.keep("b", used)
    assert idle.count == 1
    assert idle.take("b") is used


def test_once_closed_none_is_kept(idle: IdleLinks[Pair], pairs: list[Pair]) -> None:
    kept, late, *_ = pairs
    idle.keep("a", kept)
    idle.close()
    idle.keep("a", late)
    assert (kept.connection.fileno(), late.connection.fileno()) == (-1, -1)
    with pytest.raises(ConnectionError, match="closed"):
        idle.take("a")


def test_a_tcp_engine_keeps_nothing_of_an_engine_that_has_gone() -> None:
    options = EngineOptions(io_timeout_s=10.0)
    writer, gone, other = (TcpTransferEngine("127.0.0.1", options) for _ in range(3))
    data = np.zeros(1 << 16, np.uint8)
    for engine in (writer, gone, other):
        engine.register(data.ctypes.data, data.nbytes)
    block = Block(data.ctypes.data, data.ctypes.data, data.nbytes)
    barrier = threading.Barrier(4)

    def write() -> None:
        barrier.wait()
        for _ in range(20):
            writer.write(gone.session_id, [block])

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer._idle.count >= 1
    gone.close()
    writer.write(other.session_id, [block])
    assert writer._idle.count == 1
    assert not writer._turns
    for engine in (writer, other):
        engine.close()
    assert writer._idle.count == 0


def test_so_does_shared_memory() -> None:
    writer, gone, other = (SharedMemoryTransport(1000, 10.0) for _ in range(3))
    data = np.zeros((4, 8), np.uint8)
    slots = np.arange(4, dtype=np.uint32)
    for transport in (writer, gone, other):
        transport.register([ItemBuffer(data.ctypes.data, 8, 4)])
        transport.allow(1)
    rows = [RowCopy(data.ctypes.data, 8, slots, data.ctypes.data, 8, slots, 8)]
    writer.write(gone.address, 1, rows)
    assert writer._idle.count == 1
    gone.close()
    writer.write(other.address, 1, rows)
    assert writer._idle.count == 1
    for transport in (writer, other):
        transport.close()
