"""At log level debug the router prints what happened to each request, in order."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from support.router_process import cluster
from support.scripted_engine import DONE, event, hang, status, stream

LINE = re.compile(r"request (\S+): +(\d+\.\d{3}) s (.*)")


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, float, str]]:
    """Request id, seconds from the arrival, and event of each line."""
    matches = (LINE.fullmatch(record.getMessage()) for record in caplog.records)
    return [(match[1], float(match[2]), match[3]) for match in matches if match is not None]


async def test_the_events_of_a_request_are_printed_in_order(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="sglang_ext_router.request.flow")
    tokens = [event({"meta_info": {"prompt_tokens": 3, "completion_tokens": count}}) for count in (1, 2)]
    async with cluster() as served:
        served.short[0].script = stream(tokens[0], DONE)
        served.decode[0].script = stream(*tokens, DONE, delay_s=0.02)
        served.decode[0].plan(status(503))  # the first attempt comes to nothing
        client = await served.connect()
        body = {"input_ids": [1, 2, 3], "stream": True}
        await client.ask("POST", "/generate", body, {"x-request-id": "mine"})
        prefill, decode = served.short[0].url.partition("://")[2], served.decode[0].url.partition("://")[2]
    events = logged(caplog)
    assert {name for name, _, _ in events} == {"mine"}
    assert [at_s for _, at_s, _ in events] == sorted(at_s for _, at_s, _ in events)
    texts = [text for _, _, text in events]
    assert texts[0] == "arrived: /generate"
    assert texts[1] == "admitted: about 3 prompt tokens"
    sent = [re.sub("room [0-9a-f]{16}", "room R", text) for text in texts if text.startswith("sent")]
    where = f"sent: short, 0 tokens cached, prefill {prefill}, then decode {decode}, room R"
    assert sent == [f"{where}, attempt 1", f"{where}, attempt 2"]
    assert texts.index(f"attempt 1 failed at decode {decode}") == 3, "between the two"
    assert texts[-1] == "ended: ok, status 200"
    assert {"prefilled", "first token", "first byte sent to the client"} <= set(texts)


async def test_nothing_is_printed_at_another_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sglang_ext_router.request.flow")
    async with cluster() as served:
        client = await served.connect()
        await client.ask("POST", "/generate", {"input_ids": [1, 2, 3]})
    assert logged(caplog) == []


async def test_a_request_that_waits_is_admitted_when_its_turn_comes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="sglang_ext_router.request.flow")
    waited_s = 0.05
    async with cluster(max_concurrent_requests=1) as served:
        served.decode[0].plan(hang())
        first, second = [await served.connect() for _ in range(2)]
        body = {"input_ids": [1, 2, 3]}
        holding = asyncio.create_task(first.ask("POST", "/generate", body, {"x-request-id": "first"}))
        await served.until(lambda: len(served.router.running) == 1)
        waiting = asyncio.create_task(second.ask("POST", "/generate", body, {"x-request-id": "second"}))
        await served.until(lambda: served.router.requests_queued == 1)
        await asyncio.sleep(waited_s)
        first.close()
        await waiting
        holding.cancel()
    events = logged(caplog)
    (admitted_s,) = (at_s for name, at_s, text in events if name == "second" and text.startswith("admitted"))
    assert admitted_s >= waited_s
    assert [text.partition(":")[0] for name, _, text in events if name == "second"][:3] == [
        "arrived",
        "admitted",
        "sent",
    ]


async def test_an_attempt_in_which_both_legs_fail_is_sent_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="sglang_ext_router.request.flow")
    async with cluster() as served:
        served.short[0].plan(status(500))
        served.decode[0].plan(status(500))
        client = await served.connect()
        await client.ask("POST", "/generate", {"input_ids": [1, 2, 3]}, {"x-request-id": "mine"})
    texts = [text.partition(" ")[0] for _, _, text in logged(caplog)]
    assert texts[:6] == ["arrived:", "admitted:", "sent:", "attempt", "attempt", "sent:"]
