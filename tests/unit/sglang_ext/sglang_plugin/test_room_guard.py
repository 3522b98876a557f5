"""A room counts as used in whichever queue its request is, and not any more once it has finished."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

ROOM = 42


def request(room: int | None = ROOM, *, finished: bool = False) -> Any:
    return SimpleNamespace(rid="r", bootstrap_room=room, finished=lambda: finished, return_logprob=False)


def held(room: int = ROOM) -> Any:
    return SimpleNamespace(req=request(room))


def scheduler(mode: str) -> Any:
    from sglang.srt.disaggregation.utils import DisaggregationMode

    return SimpleNamespace(
        disaggregation_mode=DisaggregationMode(mode),
        waiting_queue=[],
        grammar_manager=SimpleNamespace(grammar_queue=[]),
        running_batch=SimpleNamespace(reqs=[]),
        last_batch=None,
        chunked_req=None,
        disagg_prefill_bootstrap_queue=SimpleNamespace(queue=[]),
        disagg_prefill_inflight_queue=[],
        disagg_decode_prealloc_queue=SimpleNamespace(queue=[], retracted_queue=[]),
        disagg_decode_transfer_queue=SimpleNamespace(queue=[]),
    )


PLACES = {
    ("prefill", "waiting"): lambda s: s.waiting_queue.append(request()),
    ("prefill", "grammar"): lambda s: s.grammar_manager.grammar_queue.append(request()),
    ("prefill", "chunked"): lambda s: setattr(s, "chunked_req", request()),
    ("prefill", "parked"): lambda s: setattr(s, "held_requests", lambda: [request()]),
    ("prefill", "last batch"): lambda s: setattr(s, "last_batch", SimpleNamespace(reqs=[request()])),
    ("prefill", "bootstrap"): lambda s: s.disagg_prefill_bootstrap_queue.queue.append(request()),
    ("prefill", "inflight"): lambda s: s.disagg_prefill_inflight_queue.append(request()),
    ("decode", "running"): lambda s: s.running_batch.reqs.append(request()),
    ("decode", "prealloc"): lambda s: s.disagg_decode_prealloc_queue.queue.append(held()),
    ("decode", "transfer"): lambda s: s.disagg_decode_transfer_queue.queue.append(held()),
    ("decode", "retracted"): lambda s: s.disagg_decode_prealloc_queue.retracted_queue.append(request()),
}


@pytest.mark.usefixtures("sglang_imported")
class TestRoomGuard:
    @pytest.mark.parametrize(("mode", "place"), PLACES)
    def test_room_of_a_live_request_is_in_use(self, mode: str, place: str) -> None:
        from sglang_ext.sglang_plugin.hooks.room_guard import room_in_use

        engine = scheduler(mode)
        assert not room_in_use(engine, ROOM)
        PLACES[mode, place](engine)
        assert room_in_use(engine, ROOM)
        assert not room_in_use(engine, ROOM + 1)

    def test_finished_request_and_missing_room_do_not_count(self) -> None:
        from sglang_ext.sglang_plugin.hooks.room_guard import room_in_use

        engine = scheduler("decode")
        engine.running_batch.reqs += [request(finished=True), request(None)]
        assert not room_in_use(engine, ROOM)
        assert not room_in_use(engine, None)

    @pytest.mark.parametrize(("room", "retracted"), [(ROOM + 1, False), (ROOM, True)], ids=["new", "retracted"])
    def test_other_requests_pass(self, room: int, retracted: bool) -> None:
        from sglang_ext.sglang_plugin.hooks.room_guard import add_request_to_queue

        engine = scheduler("decode")
        engine.running_batch.reqs.append(request())
        passed: list[tuple[Any, ...]] = []
        newcomer = request(room)
        add_request_to_queue(lambda *arguments: passed.append(arguments), engine, newcomer, retracted)
        assert passed == [(engine, newcomer, retracted)]
