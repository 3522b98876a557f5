"""What SGLang gets for the name of a transfer backend, nixl in host memory, and how long an engine sleeps for KV."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from sglang_ext.transfer.sglang.transfer_backend import OWN_BACKENDS
from sglang_ext.waker import Waker
from support.running_time import running_s

pytestmark = pytest.mark.usefixtures("sglang_imported")


def host_memory_agent(agent: type) -> Any:
    from sglang_ext.transfer.sglang import transfer_backends

    return transfer_backends.host_memory_agent(agent)


def wait_a_little(scheduler: Any) -> None:
    from sglang_ext.transfer.sglang import transfer_backends

    transfer_backends.wait_a_little(None, scheduler)


@pytest.mark.parametrize("name", OWN_BACKENDS)
def test_our_backends_have_every_class_that_sglang_asks_for(name: str) -> None:
    from sglang.srt.disaggregation.utils import KVClassType

    from sglang_ext.transfer.sglang.transfer_backends import ExtendedTransferBackend, get_kv_class

    def stock(transfer_backend: object, class_type: object) -> type:
        raise AssertionError("older versions of SGLang refuse what they do not know")

    backend = ExtendedTransferBackend(name)
    classes = [get_kv_class(stock, backend, kind) for kind in KVClassType]
    assert all(isinstance(found, type) for found in classes)


class Agent:
    def register_memory(self, addresses: list[int], mem_type: str = "", backends: tuple[str, ...] = ()) -> object:
        return addresses, mem_type, backends

    def get_xfer_descs(self, addresses: list[int], mem_type: str) -> object:
        # The real one calls a method that is translated, too.
        return self.register_memory(addresses, mem_type)

    def get_notifs(self, kind: str) -> str:
        return kind


def test_device_memory_becomes_host_memory_in_every_position() -> None:
    agent = host_memory_agent(Agent)()
    assert agent.register_memory([1], "VRAM", backends=("UCX",)) == ([1], "DRAM", ("UCX",))
    assert agent.register_memory([1], mem_type="VRAM") == ([1], "DRAM", ())
    assert agent.get_xfer_descs([2], "VRAM") == ([2], "DRAM", ())


def test_everything_else_is_unchanged() -> None:
    agent = host_memory_agent(Agent)()
    assert agent.register_memory([1], "DRAM") == ([1], "DRAM", ())
    assert agent.get_notifs("VRAM") == "VRAM"
    assert isinstance(agent, Agent)


def test_translating_twice_is_translating_once() -> None:
    assert host_memory_agent(host_memory_agent(Agent)) is host_memory_agent(Agent)


@pytest.fixture(autouse=True)
def long_waits(sglang_imported: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that cannot be confused with another one."""
    from sglang_ext.transfer.sglang import transfer_backends

    monkeypatch.setattr(transfer_backends, "_SHORTEST_WAIT_MS", 100)
    monkeypatch.setattr(transfer_backends, "_LONGEST_WAIT_MS", 300)
    monkeypatch.setattr(transfer_backends, "_LONGEST_NOTIFIED_WAIT_MS", 800)


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


def waited(one: Any) -> tuple[float, float]:
    """Seconds of the clock and of this process."""
    began_s, began_running_s = time.monotonic(), running_s()
    wait_a_little(one)
    return time.monotonic() - began_s, running_s() - began_running_s


def at_most_s(one: Any) -> float:
    return waited(one)[1]


@pytest.mark.slow
def test_waits_grow_while_nothing_happens(scheduler: Any, waker: Waker) -> None:
    for wait_s in (0.1, 0.2, 0.4, 0.8, 0.8):
        assert wait_s - 0.01 < waited(scheduler)[0]
    waker.notify()
    assert at_most_s(scheduler) < 0.7
    clock_s, own_s = waited(scheduler)
    assert clock_s > 0.09
    assert own_s < 0.7  # notified once, ended once


@pytest.mark.slow
def test_a_waker_ends_a_wait(scheduler: Any, waker: Waker) -> None:
    for _ in range(3):
        wait_a_little(scheduler)
    threading.Timer(0.1, waker.notify).start()
    assert at_most_s(scheduler) < 0.7


@pytest.mark.slow
def test_a_request_ends_a_wait(scheduler: Any, request_sockets: tuple[socket.socket, socket.socket]) -> None:
    for _ in range(3):
        wait_a_little(scheduler)
    threading.Timer(0.1, request_sockets[1].send, [b"request"]).start()
    assert at_most_s(scheduler) < 0.7
    request_sockets[0].recv(10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "longest_s"),
    [
        ("disagg_decode_prealloc_queue", SimpleNamespace(kv_manager=SimpleNamespace()), 0.3),
        ("waiting_queue", ["a request in its window"], 0.1),
        ("tp_group", SimpleNamespace(world_size=2), 0.3),
        ("idle_sleeper", None, 0.1),
    ],
)
def test_without_a_waker_waits_are_short(scheduler: Any, name: str, value: object, longest_s: float) -> None:
    setattr(scheduler, name, value)
    for _ in range(4):
        wait_a_little(scheduler)
    clock_s, own_s = waited(scheduler)
    assert longest_s - 0.01 < clock_s
    assert own_s < longest_s + 0.25


@pytest.mark.parametrize(("name", "value"), [("device", "cuda"), ("is_fully_idle", lambda: True)])
def test_others_do_not_wait(scheduler: Any, name: str, value: object) -> None:
    setattr(scheduler, name, value)
    assert at_most_s(scheduler) < 0.09


def test_a_room_that_is_cleared_meanwhile_has_failed() -> None:
    """SGLang's transfer threads look whether a room is there, then ask for its status."""
    from sglang.srt.disaggregation.base import KVPoll
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    from sglang_ext.transfer.sglang.transfer_backends import room_status

    class ClearedOnceSeen(dict[int, Any]):
        def __contains__(self, room: object) -> bool:
            return self.pop(room, None) is not None  # type: ignore[call-overload]

    manager = SimpleNamespace(request_status=ClearedOnceSeen({7: KVPoll.Success, 8: KVPoll.Success}))
    assert room_status(CommonKVManager.check_status, manager, 8) == KVPoll.Success
    assert 7 in manager.request_status
    assert room_status(CommonKVManager.check_status, manager, 7) == KVPoll.Failed


def test_decode_that_registers_while_prefill_opens_the_room_is_not_forgotten() -> None:
    from sglang.srt.disaggregation.base import KVPoll
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    from sglang_ext.transfer.sglang.transfer_backends import update_room

    stock = getattr(CommonKVManager.update_status, "__wrapped__", CommonKVManager.update_status)
    has_read, has_registered = threading.Event(), threading.Event()

    class Statuses(dict[int, Any]):
        def get(self, room: int, default: Any = None) -> Any:
            found = super().get(room, default)
            if threading.current_thread() is not registering:
                has_read.set()
                has_registered.wait(0.2)  # longer than a thread may run before others
            return found

    manager = SimpleNamespace(
        request_status=Statuses(),
        _deferred_ack_targets={},
        _deferred_ack_poisoned_rooms=set(),
        _staging_outstanding={},
    )

    def register() -> None:
        has_read.wait()
        update_room(stock, manager, 7, KVPoll.WaitingForInput)
        has_registered.set()

    registering = threading.Thread(target=register)
    registering.start()
    update_room(stock, manager, 7, KVPoll.Bootstrapping)
    registering.join()
    assert manager.request_status[7] == KVPoll.WaitingForInput
