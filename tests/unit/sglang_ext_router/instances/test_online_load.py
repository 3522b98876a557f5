"""What `GET /load` tells a batch run: waits of online requests alone, work that lies before them, by class."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.types import Role
from sglang_ext_router.instances.online_load import MAX_WAITS, WINDOW_S, OnlineWaits, quantile_s
from support.router_process import cluster
from support.scripted_engine import hang, reply

LOW = {"x-sgl-priority": "low"}


def test_nothing_is_told_without_requests() -> None:
    assert quantile_s(()) is None
    assert OnlineWaits().recent(0.0) == []


@pytest.mark.slow
@given(st.lists(st.floats(-1.0, 100.0), min_size=1, max_size=300))
def test_the_quantile_is_a_wait_that_nine_of_ten_did_not_exceed(given_waits: list[float]) -> None:
    waits = OnlineWaits()
    for wait_s in given_waits:
        waits.record("a", wait_s, 5.0)
    told = quantile_s([wait_s for _, wait_s in waits.recent(5.0)])
    assert told is not None
    assert told in [max(0.0, wait_s) for wait_s in given_waits]
    assert sum(wait_s <= told for wait_s in given_waits) >= 0.9 * len(given_waits)


def test_old_waits_are_forgotten_and_memory_is_bounded() -> None:
    waits = OnlineWaits()
    for number in range(3 * MAX_WAITS):
        waits.record("a", 9.0, 6.0 + number / 10_000)
    assert len(waits.recent(7.3)) == MAX_WAITS
    waits.record("b", 1.0, 7.3 + WINDOW_S)
    assert waits.recent(7.3 + WINDOW_S) == [("b", 1.0)]
    assert waits.recent(7.4 + 2 * WINDOW_S) == []


async def test_waits_at_an_instance_hold_for_every_class_that_it_serves() -> None:
    """A job's long prompts stand before the short ones of clients where one instance serves both."""
    async with cluster(short=1, long=1) as served:
        waits, now_s = served.router.services.online_waits, served.router.loop.time()
        waits.record(served.short[0].url, 0.5, now_s)
        told = served.router.describe_load([served.model])["classes"]
        assert (told["short"]["online_wait_s"], told["long"]["online_wait_s"]) == (0.5, None)
        for engine in (*served.short, *served.long):
            worker = served.worker(engine.url)
            worker.role = Role.BOTH
        told = served.router.describe_load([served.model])["classes"]
        assert (told["short"]["online_wait_s"], told["long"]["online_wait_s"]) == (0.5, 0.5)


@pytest.mark.slow
async def test_a_request_is_told_of_while_it_waits_for_prefill_or_for_admission() -> None:
    async with cluster(max_concurrent_requests=1) as served:
        served.short[0].script = served.decode[0].script = hang()
        first, second = await served.connect(), await served.connect()
        body = b'{"input_ids": [5, 5, 5, 5]}'
        await first.send(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await served.short[0].received(1)
        await asyncio.sleep(0.2)
        told = served.router.describe_load([served.model])["classes"]["short"]
        assert (told["online_in_flight"], told["online_wait_s"] > 0.1) == (1, True)
        await second.send(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await served.until(lambda: served.router.requests_queued == 1)
        await asyncio.sleep(0.3)
        assert served.router.describe_load([served.model])["classes"]["long"]["online_wait_s"] >= 0.25
        second.close()
        first.close()


@pytest.mark.slow
async def test_online_requests_are_told_of_and_those_of_low_priority_are_not() -> None:
    async with cluster() as served:
        empty = (await served.ask("GET", "/load")).json
        assert empty["length_boundary_tokens"] == 512
        assert empty["classes"]["short"] == {
            "online_in_flight": 0,
            "online_wait_s": None,
            "backlog_s": 0.0,
            "instances": 1,
        }
        assert (await served.ask("POST", "/generate", {"text": "x"}, LOW)).status == 200
        assert (await served.ask("GET", "/load")).json["classes"]["short"]["online_wait_s"] is None
        served.short[0].script = reply(delay_s=0.3)
        assert (await served.ask("POST", "/generate", {"text": "x"})).status == 200
        # That decode answers late is no wait for prefill.
        served.short[0].script, served.decode[0].script = reply(), reply(delay_s=1.0)
        assert (await served.ask("POST", "/generate", {"input_ids": [5] * 5000})).status == 200
        classes = (await served.ask("GET", "/load")).json["classes"]
        assert classes["short"]["online_wait_s"] >= 0.2
        assert classes["long"]["online_wait_s"] < 0.9


async def test_what_is_under_way() -> None:
    async with cluster() as served:
        for engine in (served.short[0], served.decode[0]):
            engine.script = hang()
        online, low = await served.connect(), await served.connect()
        body = b'{"input_ids": [5, 5, 5, 5]}'
        head = b"POST /generate HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\n\r\n%b"
        await online.send(head % (b"", len(body), body))
        await low.send(head % (b"x-sgl-priority: low\r\n", len(body), body))
        await served.short[0].received(2)
        told = (await served.ask("GET", "/load")).json
        assert (told["in_flight"], told["queued"]) == (2, 0)
        assert told["classes"]["short"]["online_in_flight"] == 1
        rate = served.worker(served.short[0].url).rate.tokens_per_s
        backlog_s = told["classes"]["short"]["backlog_s"]  # the first should be computed by now
        assert 4 / rate - 1e-3 <= backlog_s <= 8 / rate + 1e-3
        assert told["classes"]["long"]["backlog_s"] == 0.0
        online.close()
        low.close()


async def test_it_needs_the_key() -> None:
    async with cluster(api_key="secret") as served:
        assert (await served.ask("GET", "/load")).status == 401
        assert (await served.ask("GET", "/load", None, {"authorization": "Bearer secret"})).status == 200
