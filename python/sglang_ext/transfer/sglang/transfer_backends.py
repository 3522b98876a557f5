"""KV transfer backends: adds this project's, lets mooncake and nixl run without a GPU, and waits for them asleep; a
room that is cleared meanwhile does not end their threads.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache, wraps
from typing import Any

import zmq
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import KVClassType
from sglang.srt.disaggregation.utils import TransferBackend as _StockTransferBackend

from sglang_ext.engine.device import Device
from sglang_ext.engine.options import options_from_environment
from sglang_ext.transfer.sglang.transfer_backend import HANDSHAKE, STAND_IN, TCP
from sglang_ext.waker import Waker

# SGLang compares members with `==` against its module global, which is replaced everywhere, so a second
# enumeration with the same names serves as the first.
ExtendedTransferBackend = Enum(  # type: ignore[misc]  # members are those of the installed SGLang
    "TransferBackend",
    {
        **{member.name: member.value for member in _StockTransferBackend},
        "SGLANG_EXT_TCP": TCP,
        "SGLANG_EXT_HANDSHAKE": HANDSHAKE,
        "SGLANG_EXT_STAND_IN": STAND_IN,
    },
    module="sglang_ext.transfer.sglang.transfer_backends",
)


def get_kv_class(stock: Callable[..., type | None], transfer_backend: Any, class_type: KVClassType) -> type | None:
    """AROUND `get_kv_class(transfer_backend, class_type)`."""
    if _on_cpu() and transfer_backend.value == "nixl" and class_type is KVClassType.MANAGER:
        use_host_memory()
    own = _OWN_CLASSES.get(transfer_backend.value)
    found = stock(transfer_backend, class_type) if own is None else own()[class_type]
    is_sender = found is not None and class_type is KVClassType.SENDER
    return _without_pinned_memory(found) if is_sender and own is None and _on_cpu() else found


def _tcp_classes() -> Mapping[KVClassType, type]:
    from sglang_ext.transfer.sglang import tcp_transfer

    return tcp_transfer.CLASSES


def _handshake_classes() -> Mapping[KVClassType, type]:
    from sglang.srt.disaggregation.base import KVArgs
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    from sglang_ext.transfer.sglang.manager import HandshakeKVManager
    from sglang_ext.transfer.sglang.receiver import HandshakeKVReceiver
    from sglang_ext.transfer.sglang.sender import HandshakeKVSender

    return {
        KVClassType.KVARGS: KVArgs,
        KVClassType.MANAGER: HandshakeKVManager,
        KVClassType.SENDER: HandshakeKVSender,
        KVClassType.RECEIVER: HandshakeKVReceiver,
        KVClassType.BOOTSTRAP_SERVER: CommonKVBootstrapServer,
    }


def _stand_in_classes() -> Mapping[KVClassType, type]:
    """A prefill instance whose KV goes nowhere, to measure only prefill.

    SGLang has the classes for its warm-up requests, but no prefill instance that has only these; and a request that
    names SGLang's own stand-in (host 2.2.2.2) is kept out of the prefix cache.
    """
    from sglang.srt.disaggregation.base import KVArgs
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
    from sglang.srt.disaggregation.fake import FakeKVManager, FakeKVReceiver, FakeKVSender

    return {
        KVClassType.KVARGS: KVArgs,
        KVClassType.MANAGER: FakeKVManager,
        KVClassType.SENDER: _without_pinned_memory(FakeKVSender) if _on_cpu() else FakeKVSender,
        KVClassType.RECEIVER: FakeKVReceiver,
        KVClassType.BOOTSTRAP_SERVER: CommonKVBootstrapServer,
    }


# Imported when they are asked for: an engine has one backend.
_OWN_CLASSES = {TCP: _tcp_classes, HANDSHAKE: _handshake_classes, STAND_IN: _stand_in_classes}


@cache
def _on_cpu() -> bool:
    options = options_from_environment(os.environ)
    return options is not None and options.device is Device.CPU


@cache
def _without_pinned_memory(sender: type) -> type:
    """The sender, with KV indices as plain arrays: SGLang would put them into pinned memory behind a CUDA event."""
    return type(sender.__name__, (sender,), {"supports_host_tensor_indices": False, "__module__": sender.__module__})


# ---------------------------------------------------------------- nixl without a GPU

DEVICE_MEMORY, HOST_MEMORY = "VRAM", "DRAM"
# Methods of nixl_agent that name a kind of memory in their arguments.
METHODS = ("register_memory", "get_reg_descs", "get_xfer_descs", "prep_xfer_dlist")


def use_host_memory() -> None:
    """Make every NIXL agent of this process treat device memory as host memory. Safe to call again.

    SGLang registers its KV cache as device memory; in a CPU engine it is host memory.
    """
    import nixl._api

    nixl._api.nixl_agent = host_memory_agent(nixl._api.nixl_agent)


@cache
def host_memory_agent(agent: type) -> type:
    """A subclass of `agent` that translates the kind of memory; an already translated class as it is."""
    if getattr(agent, "translates_memory_kind", False):
        return agent
    overrides = {name: _translated(getattr(agent, name)) for name in METHODS if hasattr(agent, name)}
    return type(agent.__name__, (agent,), {**overrides, "translates_memory_kind": True})


def _translated(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def method(*args: Any, **kwargs: Any) -> Any:
        return stock(*map(host_kind, args), **{key: host_kind(value) for key, value in kwargs.items()})

    return method


def host_kind(argument: Any) -> Any:
    """`DRAM` for `VRAM`, anything else unchanged."""
    return HOST_MEMORY if isinstance(argument, str) and argument == DEVICE_MEMORY else argument


# ---------------------------------------------------------------- rooms


def room_status(stock: Callable[..., KVPoll], manager: Any, bootstrap_room: int) -> KVPoll:
    """AROUND `CommonKVManager.check_status(bootstrap_room)`.

    A transfer thread looks whether a room is there before it asks for the status, and the scheduler clears rooms in the
    meantime. The KeyError would end the thread, and the instances whose transfers it has would wait for ever.
    """
    try:
        return stock(manager, bootstrap_room)
    except KeyError:
        return KVPoll.Failed


_room_lock = threading.RLock()


def update_room(stock: Callable[..., None], manager: Any, bootstrap_room: int, status: KVPoll) -> None:
    """AROUND `CommonKVManager.update_status(bootstrap_room, status)`: one thread at a time.

    SGLang reads a room's status and then writes the later one. A prefill instance opens the room on its scheduler's
    thread, while decode may register for it on another: the thread that read first could overwrite the other's status,
    and the request waited until it timed out, as if decode had never registered.
    """
    with _room_lock:
        stock(manager, bootstrap_room, status)


# ---------------------------------------------------------------- waiting for transfers

_SHORTEST_WAIT_MS = 1
# A look costs half a millisecond; nothing has happened in any of the waits before, each twice as long as the last.
_LONGEST_WAIT_MS = 2
_LONGEST_NOTIFIED_WAIT_MS = 50  # where the transfer backend notifies when something has happened
_NEXT_WAIT_MS = "_sglang_ext_next_wait_ms"


def wait_a_little(result: None, scheduler: Any) -> None:
    """AFTER `Scheduler.on_idle()`: nothing to run. Where nothing is there at all, SGLang may have slept itself.

    A CPU engine whose requests all wait for KV of others, or whose ranks look for work together, sleeps between two
    looks, instead of keeping a core busy.
    """
    if str(scheduler.device) != "cpu":
        return
    asleep = getattr(getattr(scheduler, "idle_sleeper", None), "poller", None)
    if asleep is None:
        time.sleep(_SHORTEST_WAIT_MS / 1e3)
        return
    if scheduler.is_fully_idle():
        return
    poller = zmq.Poller()
    for source, flags in asleep.sockets:
        poller.register(source, flags)
    waker = _waker_of(scheduler)
    if waker is not None:
        poller.register(waker.descriptor, zmq.POLLIN)
    # What waits in the queue may wait for its time, of which no notification comes.
    wait_ms = _SHORTEST_WAIT_MS if scheduler.waiting_queue else getattr(scheduler, _NEXT_WAIT_MS, _SHORTEST_WAIT_MS)
    has_happened = poller.poll(wait_ms)
    if waker is not None:
        waker.drain()
    longest_ms = _LONGEST_WAIT_MS if waker is None else _LONGEST_NOTIFIED_WAIT_MS
    setattr(scheduler, _NEXT_WAIT_MS, _SHORTEST_WAIT_MS if has_happened else min(2 * wait_ms, longest_ms))


def _waker_of(scheduler: Any) -> Waker | None:
    """Return the waker of the KV manager, if it has one and this rank has the requests of all ranks."""
    if scheduler.tp_group.world_size > 1:
        return None
    queues = ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue")
    queue = next(filter(None, (getattr(scheduler, name, None) for name in queues)), None)
    endpoint = getattr(getattr(queue, "kv_manager", None), "endpoint", None)
    waker = getattr(endpoint, "waker", None)
    return waker if isinstance(waker, Waker) else None
