"""Aborts that reach everything they are about: all sequences of a request, and decode's half of it.

SGLang names the members of a request `x` with several sequences `x_0`, `x_1` … and forgets `x` itself, so that
an abort of `x` finds nothing.

Decode is notified of an abort on the prefill instance, so that it does not wait for KV in vain. It registers for a room
on a thread of the prefill instance; whether that is before or after the abort, is chance.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from sglang.srt.disaggregation.base.conn import KVPoll

_MAX_ROOMS = 10_000
_REASON = "the request was aborted on the prefill instance"


class AbortedRooms:
    """The rooms that were aborted last; safe to use from several threads."""

    def __init__(self, max_rooms: int = _MAX_ROOMS) -> None:
        self._max_rooms = max_rooms
        self._rooms: dict[int, None] = {}  # oldest first
        self._lock = threading.Lock()

    def add(self, room: int) -> None:
        """Remember a room; the oldest one is forgotten when there are too many."""
        with self._lock:
            self._rooms[room] = None
            if len(self._rooms) > self._max_rooms:
                del self._rooms[next(iter(self._rooms))]

    def discard(self, room: int) -> None:
        """Forget a room: another request has it now."""
        with self._lock:
            self._rooms.pop(room, None)

    def __contains__(self, room: int) -> bool:
        return room in self._rooms


_aborted: WeakKeyDictionary[Any, AbortedRooms] = WeakKeyDictionary()


def notify_decode(result: None, sender: Any) -> None:
    """AFTER `CommonKVSender.abort()`: send the failure to every decode rank that registered for the room."""
    manager, room = sender.kv_mgr, sender.bootstrap_room
    _aborted.setdefault(manager, AbortedRooms()).add(room)
    _send_failure(manager, room)


def notify_late_decode(stock: Callable[..., None], manager: Any, bootstrap_room: int, status: Any) -> None:
    """AROUND `CommonKVManager.update_status(room, status)`.

    `WaitingForInput` says on a prefill instance that all decode ranks have registered. Stock would open the room
    again for a request that has been aborted, and no decode rank would ever hear of it.
    """
    rooms = _aborted.get(manager)
    if rooms is not None and bootstrap_room in rooms:
        if status == KVPoll.Bootstrapping:
            rooms.discard(bootstrap_room)
        elif status == KVPoll.WaitingForInput:
            _send_failure(manager, bootstrap_room)
            manager.transfer_infos.pop(bootstrap_room, None)
            manager.req_to_decode_prefix_len.pop(bootstrap_room, None)
            return
    stock(manager, bootstrap_room, status)


def _send_failure(manager: Any, room: int) -> None:
    manager.send_kv_status_message(
        targets=manager._room_notify_targets(room),
        bootstrap_room=room,
        status=KVPoll.Failed,
        failure_reason=_REASON,
    )


def abort_request(stock: Callable[..., None], manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """AROUND `TokenizerManager.abort_request(rid, abort_all)`."""
    members = [] if abort_all or not rid or rid in manager.rid_to_state else family(rid, manager.rid_to_state)
    for member in members or [rid]:
        stock(manager, member, abort_all)


_MEMBER = re.compile(r"(?:-(?:resp_)?[0-9a-f]{16})?(?:_[0-9]+)*")


def family(rid: str, known: Iterable[str]) -> list[str]:
    """Return the ids in `known` that stand for `rid`: a router has appended to it, or they name one sequence of it."""
    begins = [other for other in known if len(other) > len(rid) and other.startswith(rid)]
    return [other for other in begins if _MEMBER.fullmatch(other, len(rid)) is not None]
