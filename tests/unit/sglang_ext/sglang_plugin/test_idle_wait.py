"""How long a CPU engine sleeps that has requests and nothing to run."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from sglang_ext.sglang_plugin.hooks import idle_wait
from sglang_ext.sglang_plugin.hooks.idle_wait import wait_a_little
from sglang_ext.waker import Waker


@pytest.fixture(autouse=True)
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that no test confuses with another one."""
    monkeypatch.setattr(idle_wait, "_SHORTEST_WAIT_MS", 100)
    monkeypatch.setattr(idle_wait, "_LONGEST_WAIT_MS", 300)
    monkeypatch.setattr(idle_wait, "_LONGEST_NOTIFIED_WAIT_MS", 800)


@pytest.fixture
def waker() -> Iterator[Waker]:
    one = Waker()
    yield one
    one.close()


@pytest.fixture
def request_sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def scheduler(waker: Waker, request_sockets: tuple[socket.socket, socket.socket]) -> Any:
    poller = zmq.Poller()
    poller.register(request_sockets[0], zmq.POLLIN)
    manager = SimpleNamespace(endpoint=SimpleNamespace(waker=waker))
    return SimpleNamespace(
        device="cpu",
        tp_group=SimpleNamespace(world_size=1),
        is_fully_idle=lambda: False,
        idle_sleeper=SimpleNamespace(poller=poller),
        waiting_queue=[],
        disagg_decode_prealloc_queue=SimpleNamespace(kv_manager=manager),
    )


def waited_s(one: Any) -> float:
    began_s = time.monotonic()
    wait_a_little(None, one)
    return time.monotonic() - began_s


def test_waits_grow_while_nothing_happens(scheduler: Any, waker: Waker) -> None:
    for wait_s in (0.1, 0.2, 0.4, 0.8, 0.8):
        assert wait_s - 0.01 < waited_s(scheduler)
    waker.notify()
    assert waited_s(scheduler) < 0.7
    assert 0.09 < waited_s(scheduler) < 0.7  # rung once is heard once


def test_a_waker_ends_a_wait(scheduler: Any, waker: Waker) -> None:
    for _ in range(3):
        wait_a_little(None, scheduler)
    threading.Timer(0.1, waker.notify).start()
    assert waited_s(scheduler) < 0.7


def test_a_request_ends_a_wait(scheduler: Any, request_sockets: tuple[socket.socket, socket.socket]) -> None:
    for _ in range(3):
        wait_a_little(None, scheduler)
    threading.Timer(0.1, request_sockets[1].send, [b"request"]).start()
    assert waited_s(scheduler) < 0.7
    request_sockets[0].recv(10)


@pytest.mark.parametrize(
    ("name", "value", "longest_s"),
    [
        ("disagg_decode_prealloc_queue", SimpleNamespace(kv_manager=SimpleNamespace()), 0.3),
        ("waiting_queue", ["a request in its window"], 0.1),
        ("tp_group", SimpleNamespace(world_size=2), 0.3),
        ("idle_sleeper", None, 0.1),
    ],
)
def test_where_nobody_rings_waits_are_short(scheduler: Any, name: str, value: object, longest_s: float) -> None:
    setattr(scheduler, name, value)
    for _ in range(4):
        wait_a_little(None, scheduler)
    assert longest_s - 0.01 < waited_s(scheduler) < longest_s + 0.25


@pytest.mark.parametrize(("name", "value"), [("device", "cuda"), ("is_fully_idle", lambda: True)])
def test_others_do_not_wait(scheduler: Any, name: str, value: object) -> None:
    setattr(scheduler, name, value)
    assert waited_s(scheduler) < 0.09
