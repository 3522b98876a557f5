"""Moves that an operator asks for: which are refused, and that there is one at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.laps_engine import ADMIN, SLOW, controlled, ended, laps, move, press_long
from support.scripted_engine import MODEL


async def test_moves_that_are_refused() -> None:
    async with controlled(stock=1, both=1, controller="off", **SLOW) as served:
        urls = {
            "short": served.short[0].url,
            "stock": served.short[2].url,
            "both": served.both[0].url,
            "decode": served.decode[0].url,
        }
        for body, code, text in (
            ({"url": "http://10.0.0.1:1", "to": "long"}, 404, "10.0.0.1"),
            ({"worker_id": "10.0.0.1:1", "to": "long"}, 404, "10.0.0.1"),
            ({"url": "ftp://a:1", "to": "long"}, 400, "url"),
            ({"to": "long"}, 400, "either url or worker_id"),
            ({"url": urls["short"], "worker_id": "a:1", "to": "long"}, 400, "either url or worker_id"),
            ({"url": urls["short"]}, 400, "to"),
            ({"url": urls["short"], "to": "decode"}, 409, "--enable-pd-role-switch"),
            ({"url": urls["short"], "to": "medium"}, 400, "to"),
            ({"url": urls["short"], "to": "long", "now": True}, 400, "now"),
            ({"url": urls["short"], "to": "short"}, 409, "already"),
            ({"url": urls["both"], "to": "long"}, 409, "neither pool"),
            ({"url": urls["decode"], "to": "long"}, 409, "neither pool"),
            ({"url": urls["stock"], "to": "long"}, 409, "cannot be switched"),
        ):
            answer = await served.ask("POST", "/pools/move", body, ADMIN)
            assert (answer.status, text in answer.error["message"]) == (code, True), (body, answer.body)
        assert (await served.pools())["controller"]["under_way"] is None
        served.router.drain_worker(served.worker(urls["short"]), True)
        assert (await move(served, served.short[0])).status == 409
        assert (await served.ask("POST", "/pools/move", {"url": urls["short"], "to": "long"})).status == 401
        assert len(served.router.controller.moves) == 0


async def test_one_move_at_a_time() -> None:
    async with controlled(controller="off", controller_drain_timeout_secs=1.0, **SLOW) as served:
        for engine in served.short:
            laps(engine).behaviour = "ignore"
        answers = await asyncio.gather(*(move(served, engine) for engine in served.short))
        assert sorted(answer.status for answer in answers) == [202, 409]
        assert (await move(served, served.short[1])).status == 409
        assert "one at a time" in (await move(served, served.short[1])).error["message"]


@pytest.mark.slow
async def test_the_controller_waits_for_an_operators_move() -> None:
    async with controlled(short=3, controller_drain_timeout_secs=0.3) as served:
        laps(served.short[0]).behaviour = "ignore"
        assert (await move(served, served.short[0])).status == 202
        press_long(served)
        refreshed_s = served.router.controller.monitor.refreshed_s or 0.0
        await served.until(lambda: (served.router.controller.monitor.refreshed_s or 0.0) > refreshed_s + 0.2)
        assert served.router.controller.current is not None
        assert all(laps(engine).switches == [] for engine in served.short[1:])
        await served.until(lambda: len(served.router.controller.moves) == 2)
        assert [record.reason for record in served.router.controller.moves] == ["operator", "pressure"]


async def test_a_move_that_breaks_the_router_leaves_nothing_held_back(
    complaints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with controlled(controller="off", **SLOW) as served:
        monkeypatch.setattr(served.router.controller, "_relabel", lambda *_: 1 / 0)
        assert (await move(served, served.short[0])).status == 202
        done = await ended(served)
        assert done["outcome"] == "not_undone"
        assert "ZeroDivisionError" in done["detail"]
        assert served.worker(served.short[0].url).is_ready
        assert served.router.controller.current is None
    assert complaints.messages == [f"sglang_ext_router.control.controller: the move of {served.short[0].url} failed"]
    complaints.messages.clear()


@pytest.mark.slow
async def test_there_and_back_by_name() -> None:
    async with controlled(controller="off", **SLOW) as served:
        name = f"127.0.0.1:{served.short[0].port}"
        for to in ("long", "short"):
            answer = await served.ask("POST", "/pools/move", {"worker_id": name, "to": to}, ADMIN)
            assert answer.status == 202
            await served.until(lambda: served.router.controller.current is None)
            assert served.role(served.short[0]).value == to
        moves = await served.moves()
        assert [(one["from"], one["to"], one["outcome"]) for one in moves] == [
            ("long", "short", "moved"),
            ("short", "long", "moved"),
        ]
        assert laps(served.short[0]).mode == "short"
        assert 50.0 < (await served.pools())["controller"]["cooldown_left_s"] <= 60.0


@pytest.mark.slow
async def test_without_a_controller_no_instance_is_asked_until_pools_are_read() -> None:
    async with controlled(controller="off") as served:
        await asyncio.sleep(0.15)
        assert served.router.controller.monitor.refreshed_s is None
        member = (await served.pools())["pools"]["short"]["members"][0]
        assert member["mode"] == "both"
        assert served.router.controller.control(MODEL).decision is None


async def test_several_processes_do_not_move() -> None:
    async with controlled(controller="off", processes=2, **SLOW) as served:
        answer = await move(served, served.short[0])
        assert answer.status == 409
        assert "--processes 1" in answer.error["message"]
