"""Decode is notified of aborts on prefill, before and after it registers; an id names all sequences of its request."""

from __future__ import annotations

import types
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("sglang_imported")


ROOM = 42
DECODE = ("10.0.0.1", 7000)


class Manager:
    def __init__(self) -> None:
        self.transfer_infos: dict[int, dict[str, Any]] = {}
        self.req_to_decode_prefix_len: dict[int, int] = {}
        self.told: list[tuple[int, tuple[tuple[str, int], ...]]] = []
        self.statuses: list[int] = []

    def register(self) -> None:
        self.transfer_infos[ROOM] = {"decode": object()}

    def _room_notify_targets(self, room: int) -> list[tuple[str, int]]:
        return [DECODE for _ in self.transfer_infos.get(room, {})]

    def send_kv_status_message(self, **message: Any) -> None:
        self.told.append((message["bootstrap_room"], tuple(message["targets"])))


def update(manager: Manager, status: Any) -> None:
    from sglang_ext.engine.hooks.aborts import notify_late_decode

    notify_late_decode(lambda manager, room, status: manager.statuses.append(status), manager, ROOM, status)


def abort(manager: Manager) -> None:
    from sglang_ext.engine.hooks.aborts import notify_decode

    notify_decode(None, SimpleNamespace(kv_mgr=manager, bootstrap_room=ROOM))


def test_decode_that_has_registered() -> None:
    manager = Manager()
    manager.register()
    abort(manager)
    assert manager.told == [(ROOM, (DECODE,))]


def test_decode_that_registers_later() -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    manager = Manager()
    abort(manager)
    manager.register()
    update(manager, KVPoll.WaitingForInput)
    assert manager.told == [(ROOM, ()), (ROOM, (DECODE,))]
    assert manager.transfer_infos == {}
    assert manager.statuses == []


def test_a_room_without_an_abort() -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    manager = Manager()
    manager.register()
    for status in (KVPoll.Bootstrapping, KVPoll.WaitingForInput):
        update(manager, status)
    assert manager.statuses == [KVPoll.Bootstrapping, KVPoll.WaitingForInput]
    assert manager.told == []


def test_the_next_request_of_a_room() -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    manager = Manager()
    abort(manager)
    manager.register()
    for status in (KVPoll.Bootstrapping, KVPoll.WaitingForInput):
        update(manager, status)
    assert manager.statuses == [KVPoll.Bootstrapping, KVPoll.WaitingForInput]


def test_only_the_last_rooms_are_remembered() -> None:
    from sglang_ext.engine.hooks.aborts import AbortedRooms

    rooms = AbortedRooms(max_rooms=2)
    for room in (1, 2, 3):
        rooms.add(room)
    assert [room in rooms for room in (1, 2, 3)] == [False, True, True]


KNOWN = ["x_0", "x_1", "x_1_0", "x_a", "x_", "xy_0", "x", "ax_0"]


def test_members() -> None:
    from sglang_ext.engine.hooks.aborts import family

    assert family("x", KNOWN) == ["x_0", "x_1", "x_1_0"]
    of_a_router = ["x-0123456789abcdef", "x-0123456789abcdef_1", "x-resp_0123456789abcdef"]
    others = ["x-0123456789abcde", "x-0123456789abcdefg", "x-y", "xx-0123456789abcdef", "x-0123456789abcdef-"]
    assert family("x", [*of_a_router, *others]) == of_a_router


@pytest.mark.parametrize(
    ("rid", "abort_all", "calls"),
    [
        ("x", False, ["x"]),
        ("f", False, ["f_0", "f_1"]),
        ("unknown", False, ["unknown"]),
        ("", False, [""]),
        ("f", True, ["f"]),
    ],
)
def test_abort_reaches_every_member(rid: str, abort_all: bool, calls: list[str]) -> None:
    manager = types.SimpleNamespace(rid_to_state=dict.fromkeys([*KNOWN, "f_0", "f_1"]))
    seen: list[str] = []
    from sglang_ext.engine.hooks.aborts import abort_request

    abort_request(lambda _, member, all_of_them: seen.append(member), manager, rid, abort_all)
    assert seen == calls
