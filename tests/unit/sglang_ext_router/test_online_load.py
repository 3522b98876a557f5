"""What `GET /load` tells a batch run: waits of online requests alone, work that lies before them, by class."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.types import LengthClass
from sglang_ext_router.online_load import MAX_WAITS, WINDOW_S, OnlineWaits
from support.router_process import cluster
from support.scripted_engine import hang, reply

SHORT, LONG = LengthClass.SHORT, LengthClass.LONG
LOW = {"x-sgl-priority": "low"}


def test_nothing_is_told_without_requests() -> None:
    assert OnlineWaits().quantile_s(SHORT, 0.0) is None


@given(st.lists(st.floats(-1.0, 100.0), min_size=1, max_size=300))
def test_the_quantile_is_a_wait_that_nine_of_ten_did_not_exceed(given_waits: list[float]) -> None:
    waits = OnlineWaits()
    for wait_s in given_waits:
        waits.note(LONG, wait_s, 5.0)
    told = waits.quantile_s(LONG, 5.0)
    assert told is not None
    assert told in [max(0.0, wait_s) for wait_s in given_waits]
    assert sum(wait_s <= told for wait_s in given_waits) >= 0.9 * len(given_waits)
    assert waits.quantile_s(SHORT, 5.0) is None


def test_old_waits_are_forgotten_and_memory_is_bounded() -> None:
    waits = OnlineWaits()
    for number in range(3 * MAX_WAITS):
        waits.note(SHORT, 9.0, number / 1000)
    assert waits.quantile_s(SHORT, 6.0) == 9.0
    waits.note(SHORT, 1.0, 7.0 + WINDOW_S)
    assert waits.quantile_s(SHORT, 7.0 + WINDOW_S) == 1.0
    assert waits.quantile_s(SHORT, 7.1 + 2 * WINDOW_S) is None


async def test_online_requests_are_told_of_and_those_of_low_priority_are_not() -> None:
    async with cluster() as served:
        empty = (await served.ask("GET", "/load")).json
        assert empty["length_boundary_tokens"] == served.router.config.length_boundary_tokens
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
        assert told["classes"]["short"]["backlog_s"] == pytest.approx(8 / rate, abs=1e-3)
        assert told["classes"]["long"]["backlog_s"] == 0.0
        online.close()
        low.close()


async def test_it_needs_the_key() -> None:
    async with cluster(api_key="secret") as served:
        assert (await served.ask("GET", "/load")).status == 401
        assert (await served.ask("GET", "/load", None, {"authorization": "Bearer secret"})).status == 200
