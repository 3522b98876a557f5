"""The controller in a running router: it decides on what instances report, and moves them for real."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from sglang_ext.types import Role
from support.laps_engine import SLOW, LapsEngine, controlled, ended, laps, move, press_long, told
from support.scripted_engine import hang, reply

SHORT_PROMPT = {"text": "x"}
LONG_PROMPT = {"input_ids": list(range(2000))}


# -- moving by itself -----------------------------------------------------------------------------------------


async def test_a_pressed_pool_gets_an_instance(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sglang_ext_router.control.controller")
    async with controlled() as served:
        laps(served.short[0]).tell(backlog_s=0.05)
        press_long(served)
        done = await ended(served)
        assert (done["outcome"], done["reason"], done["from"], done["to"]) == ("moved", "pressure", "short", "long")
        assert done["url"] == served.short[1].url  # the one with less backlog
        assert laps(served.short[1]).switches == ["long"]
        assert served.role(served.short[1]) is Role.LONG
        assert served.role(served.short[0]) is Role.SHORT
        shown = await served.pools()
        assert set(shown["pools"]["long"]["workers"]) == {served.long[0].url, served.short[1].url}
        await served.until(lambda: "hold at_minimum" in told(served))
        assert len(served.router.controller.moves) == 1
        # Requests follow the label.
        assert (await served.ask("POST", "/generate", SHORT_PROMPT)).status == 200
        assert len(served.short[0].requests) == 1
        served.router.drain_worker(served.worker(served.long[0].url), True)
        assert (await served.ask("POST", "/generate", LONG_PROMPT)).status == 200
        assert [len(engine.requests) for engine in served.short] == [1, 1]
    lines = [record.getMessage() for record in caplog.records]
    assert any("moves" in line and "(pressure)" in line for line in lines)
    assert any("is in the long pool now" in line for line in lines)


async def test_advice_moves_nothing() -> None:
    async with controlled(controller="advise") as served:
        press_long(served)
        await served.until(lambda: told(served).get("advise pressure", 0) >= 3)
        assert all(laps(engine).switches == [] for engine in served.short)
        shown = await served.pools()
        for _ in range(20):  # on a busy machine an instance may not have answered in time for the latest decision
            if shown["controller"]["decision"]["reason"] != "signals_missing":
                break
            await asyncio.sleep(0.1)
            shown = await served.pools()
        assert shown["controller"]["mode"] == "advise"
        assert shown["controller"]["decision"] == {"reason": "pressure", "wanted": "long", "moves": True}
        assert shown["controller"]["moves"] == []


@pytest.mark.slow
async def test_what_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sglang_ext_router.control.controller")
    async with controlled(short=1, stock=1, both=1) as served:
        await served.until(lambda: told(served).get("hold balanced", 0) >= 5)
        shown = await served.pools()
        short, long, both = (shown["pools"][role] for role in ("short", "long", "both"))
        assert (short["pressure"], long["pressure"]) == (0.05, 0.05)
        ours, stock = short["members"]
        assert (ours["url"], ours["mode"], ours["generation"]) == (served.short[0].url, "both", 0)
        assert (ours["state"], ours["can_switch"], ours["pressure"]) == ("ready", True, 0.05)
        assert ours["signals"]["utilisation"] == 0.1
        assert ours["signals"]["short"]["tokens"] == 100
        assert (stock["can_switch"], stock["mode"], stock["signals"], stock["pressure"]) == (False, None, None, None)
        assert both["members"][0]["pressure"] is None
        assert "members" not in shown["pools"]["decode"]
        metrics = (await served.ask("GET", "/metrics")).body.decode()
        for line in (
            'sglang_ext_router_pool_pressure{model="m",pool="short"} 0.05',
            'sglang_ext_router_pool_instances{model="m",pool="short"} 2.0',
            'sglang_ext_router_pool_instances{model="m",pool="decode"} 1.0',
        ):
            assert line in metrics
        assert 'controller_decisions_total{reason="balanced",result="hold"}' in metrics
    decisions = [record for record in caplog.records if "the controller" in record.getMessage()]
    assert len(decisions) <= 2  # the same decision again is no news


async def test_a_stock_engine_is_never_moved() -> None:
    async with controlled(short=0, stock=2) as served:
        press_long(served)
        await served.until(lambda: told(served).get("hold signals_missing", 0) >= 3)
        assert len(served.router.controller.moves) == 0
        assert all(request.path != "/laps/mode" for engine in served.short for request in engine.control)


@pytest.mark.parametrize("broken", [500, 503])
async def test_a_report_that_is_missing_stops_the_controller(broken: int) -> None:
    async with controlled(controller_interval_secs=0.02) as served:
        laps(served.short[0]).laps_status = broken
        press_long(served)
        await served.until(lambda: told(served).get("hold signals_missing", 0) >= 3)
        assert len(served.router.controller.moves) == 0
        laps(served.short[0]).laps_status = 200
        assert (await ended(served))["outcome"] == "moved"


@pytest.mark.slow
@pytest.mark.parametrize(
    "field",
    [
        {"mode": "medium"},
        {"mode": None},
        {"generation": "3"},
        {"utilisation": float("nan")},
        {"utilisation": -1},
        {"short": None},
        {"short": {}},
        {"parked": True},
    ],
)
async def test_an_odd_report_is_no_report(field: dict[str, Any]) -> None:
    async with controlled() as served:
        engine = laps(served.short[0])
        good = dict(engine.report)
        engine._control = lambda request: (  # type: ignore[method-assign]
            reply({**good, "mode": "both", "generation": 0, **field})
            if request.path == "/laps"
            else LapsEngine._control(engine, request)
        )
        press_long(served)
        await served.until(lambda: told(served).get("hold signals_missing", 0) >= 2)
        assert served.worker(engine.url).id not in served.router.controller.monitor.reports


@pytest.mark.slow
async def test_an_instance_that_was_moved_before_the_router_started_is_believed() -> None:
    async with controlled() as served:
        laps(served.short[0]).mode = "long"
        await served.until(lambda: served.role(served.short[0]) is Role.LONG)
        assert laps(served.short[0]).switches == []
        laps(served.long[0]).mode = "long"  # as its label
        await asyncio.sleep(0.15)
        assert served.role(served.long[0]) is Role.LONG


async def test_a_round_that_fails_is_not_the_last(complaints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with controlled() as served:
        controller = served.router.controller
        monkeypatch.setattr(controller, "_adopt_modes", lambda: 1 / 0)
        await served.until(lambda: len(complaints.messages) > 0)
        monkeypatch.undo()
        press_long(served)
        assert (await ended(served))["outcome"] == "moved"
    assert set(complaints.messages) == {"sglang_ext_router.control.controller: the controller's round failed"}
    complaints.messages.clear()


# -- how a move goes ------------------------------------------------------------------------------------------


async def test_a_moving_instance_is_drained_first() -> None:
    async with controlled(controller="off", controller_drain_timeout_secs=10.0, **SLOW) as served:
        first, second = served.short
        first.script = second.script = served.decode[0].script = hang()
        busy = asyncio.create_task(served.ask("POST", "/generate", SHORT_PROMPT))
        await served.until(lambda: served.upstream_requests() == 2)
        engine, other = (first, second) if first.requests else (second, first)
        answer = await move(served, engine)
        assert (answer.status, answer.json["outcome"], answer.json["reason"]) == (202, None, "operator")
        await served.until(lambda: served.worker(engine.url).is_moving)
        shown = (await served.pools())["controller"]["under_way"]
        assert (shown["url"], shown["to"]) == (engine.url, "long")
        (one,) = [w for w in (await served.ask("GET", "/workers")).json["workers"] if w["url"] == engine.url]
        assert (one["state"], one["role"]) == ("moving", "short")
        other.script = served.decode[0].script = reply()
        for _ in range(5):
            assert (await served.ask("POST", "/generate", SHORT_PROMPT)).status == 200
        assert len(other.requests) == 5
        assert laps(engine).switches == []
        busy.cancel()
        for client in served.clients:
            client.close()
        done = await ended(served)
        assert (done["outcome"], served.role(engine)) == ("moved", Role.LONG)
        assert not served.worker(engine.url).is_moving


async def test_what_does_not_drain_is_moved_all_the_same() -> None:
    async with controlled(controller="off", controller_drain_timeout_secs=0.1, **SLOW) as served:
        for engine in (*served.short, served.decode[0]):
            engine.script = hang()
        busy = asyncio.create_task(served.ask("POST", "/generate", SHORT_PROMPT))
        await served.until(lambda: served.upstream_requests() == 2)
        engine = next(one for one in served.short if one.requests)
        assert (await move(served, engine)).status == 202
        assert (await ended(served))["outcome"] == "moved"
        assert served.worker(engine.url).in_flight == 1
        busy.cancel()
        for client in served.clients:
            client.close()


async def test_the_last_of_a_pool_goes_on_serving() -> None:
    async with controlled(short=1, controller="off", controller_drain_timeout_secs=10.0, **SLOW) as served:
        served.short[0].script = served.decode[0].script = hang()
        busy = asyncio.create_task(served.ask("POST", "/generate", SHORT_PROMPT))
        await served.until(lambda: served.upstream_requests() == 2)
        assert (await move(served, served.short[0])).status == 202
        assert (await ended(served))["outcome"] == "moved"  # long before the drain timeout
        busy.cancel()
        for client in served.clients:
            client.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "outcome", "detail", "switches"),
    [
        ("ignore", "failed", "had no effect", ["long", "both"]),
        ("lie", "failed", "had no effect", ["long", "both"]),
        ("refuse", "failed", "answered 500", ["long", "both"]),
        ("cut", "failed", "had no effect", ["long", "both"]),
        ("silent", "failed", "had no effect", ["long", "both"]),
    ],
)
async def test_a_switch_that_did_nothing_is_noticed_and_undone(
    behaviour: str, outcome: str, detail: str, switches: list[str]
) -> None:
    async with controlled(controller="off", controller_drain_timeout_secs=0.3, **SLOW) as served:
        engine = laps(served.short[0])
        engine.behaviour = behaviour
        assert (await move(served, engine)).status == 202
        done = await ended(served)
        assert done["outcome"] == outcome
        assert detail in done["detail"]
        assert engine.switches == switches
        assert served.role(engine) is Role.SHORT
        assert served.worker(engine.url).is_ready
        metrics = (await served.ask("GET", "/metrics")).body.decode()
        assert 'sglang_ext_router_pool_moves_total{outcome="failed",source="short",target="long"} 1.0' in metrics


@pytest.mark.full
async def test_an_instance_that_fails_to_move_is_left_alone_for_a_while() -> None:
    async with controlled(controller_drain_timeout_secs=0.05, controller_cooldown_secs=5.0) as served:
        for engine in served.short:
            laps(engine).behaviour = "ignore"
        press_long(served)
        await served.until(lambda: len(served.router.controller.moves) == 2, 10.0)
        first, second = (record.url for record in served.router.controller.moves)
        assert {first, second} == {engine.url for engine in served.short}
        await served.until(lambda: "hold no_movable" in told(served))


async def test_an_instance_that_dies_in_the_middle() -> None:
    async with controlled(controller="off", controller_drain_timeout_secs=10.0, **SLOW) as served:
        engine = laps(served.short[0])
        engine.behaviour = "ignore"
        assert (await move(served, engine)).status == 202
        await served.until(lambda: engine.switches == ["long"])
        await engine.stop()
        done = await ended(served)
        assert done["outcome"] == "lost"
        worker = served.worker(engine.url)
        assert (worker.role, worker.is_moving) == (Role.SHORT, False)


async def test_an_instance_that_is_removed_in_the_middle() -> None:
    async with controlled(controller="off", controller_drain_timeout_secs=10.0, **SLOW) as served:
        engine = laps(served.short[0])
        engine.behaviour = "ignore"
        assert (await move(served, engine)).status == 202
        await served.until(lambda: engine.switches == ["long"])
        served.router.remove_worker(served.worker(engine.url))
        done = await ended(served)
        assert (done["outcome"], done["detail"]) == ("lost", "it was removed")


async def test_a_router_that_stops_in_the_middle_stops() -> None:
    async with controlled(controller="off", controller_drain_timeout_secs=60.0, **SLOW) as served:
        laps(served.short[0]).behaviour = "ignore"
        assert (await move(served, served.short[0])).status == 202
        await served.until(lambda: laps(served.short[0]).switches == ["long"])


@pytest.mark.slow
async def test_where_short_ends_is_what_the_prefill_instances_find() -> None:
    """The middle one of their numbers, and the next one when they find another."""
    async with controlled(short=2, long=1, health_check_interval_secs=0.05, **SLOW) as served:
        assert (await served.pools())["length_boundary_tokens"] == 512
        for engine, tokens in zip((*served.short, *served.long), (256, 384, 1024), strict=True):
            laps(engine).info = {**engine.info, "sglang_ext": {"fits_length_boundary": True}}
            laps(engine).report["boundary_tokens"] = tokens
            served.worker(engine.url).has_info = False  # it is asked again
        members = [served.worker(engine.url) for engine in (*served.short, *served.long)]
        await served.until(lambda: [one.length_boundary_tokens for one in members] == [256, 384, 1024])
        pools = await served.pools()
        assert pools["length_boundary_tokens"] == 384
        assert [one["length_boundary_tokens"] for one in pools["pools"]["short"]["members"]] == [256, 384]
        (model,) = pools["models"].values()
        assert model["length_boundary_tokens"] == 384
        assert (await served.ask("GET", "/load")).json["length_boundary_tokens"] == 384
        planner, model_pools = served.router.planner, served.model
        assert planner.boundary(model_pools).limit_tokens == 384
        for engine in served.short:
            laps(engine).report["boundary_tokens"] = 192
        await served.until(lambda: planner.boundary(model_pools).limit_tokens == 192)
        laps(served.short[0]).report["boundary_tokens"] = "many"  # the last that made sense holds
        await asyncio.sleep(0.2)
        assert planner.boundary(model_pools).limit_tokens == 192


async def test_a_boundary_that_is_given_holds() -> None:
    async with controlled(
        short=1, long=1, health_check_interval_secs=0.05, length_boundary_tokens=100, **SLOW
    ) as served:
        for engine in (*served.short, *served.long):
            laps(engine).info = {**engine.info, "sglang_ext": {"fits_length_boundary": True}}
            laps(engine).report["boundary_tokens"] = 256
            served.worker(engine.url).has_info = False
        members = [served.worker(engine.url) for engine in (*served.short, *served.long)]
        await served.until(lambda: all(one.length_boundary_tokens == 256 for one in members))
        assert (await served.pools())["length_boundary_tokens"] == 100
        assert served.router.planner.boundary(served.model).limit_tokens == 100
