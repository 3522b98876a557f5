"""What came of a request is counted as it was for its client, with exact numbers beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from sglang_ext_router.observe.metrics import ClassMetrics
from sglang_ext_router.observe.request_record import RequestOutcome
from support.raw_client import BrokenReplyError, RawClient, request_bytes
from support.router_process import Cluster, cluster
from support.running_time import pause
from support.scripted_engine import (
    DONE,
    STREAM_END,
    Script,
    Turn,
    chunk,
    cut,
    event,
    hang,
    reply,
    status,
    stream,
    stream_head,
)

WHOLE = {"text": "x"}
STREAMED = {"text": "x", "stream": True}
TOKENS = [event({"text": "a", "meta_info": {"completion_tokens": count}}) for count in (1, 2, 3)]
ERROR = event({"error": {"message": "scripted", "code": 500}})
ABORTED = b'data: {"text":"","meta_info":{"finish_reason":{"type":"abort","status_code":503}}}\n\n'
ONE_TOKEN = stream_head() + chunk(TOKENS[0])


def counted(served: Cluster) -> dict[tuple[int, str], int]:
    """Requests by status and outcome."""
    found: dict[tuple[int, str], int] = {}
    for (_, _, code, outcome), count in served.router.metrics.requests.items():
        found[code, outcome] = found.get((code, outcome), 0) + count
    return found


async def sent(served: Cluster, body: dict[str, Any]) -> RawClient:
    client = await served.connect()
    await client.send(request_bytes("POST", "/generate", json.dumps(body).encode()))
    return client


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "decode", "code", "outcome"),
    [
        (WHOLE, reply(), 200, "ok"),
        (STREAMED, stream(*TOKENS, DONE), 200, "ok"),
        (WHOLE, status(400), 400, "error_before"),
        (WHOLE, status(503), 503, "error_before"),
        (WHOLE, cut(), 502, "error_before"),
        (STREAMED, status(500), 500, "error_before"),
        (STREAMED, stream(ERROR, DONE), 500, "error_before"),  # within a reply of status 200
        (STREAMED, cut(), 502, "error_before"),
        (STREAMED, cut(ONE_TOKEN), 502, "error_after"),  # the client gets an error event
        (STREAMED, cut(ONE_TOKEN + b"9\r\ndata"), 502, "error_after"),  # the client's connection is cut
        (STREAMED, stream(TOKENS[0], ERROR, DONE), 500, "error_after"),  # the engine's own error event
        (STREAMED, stream(TOKENS[0], ERROR, DONE, delay_s=0.02), 500, "error_after"),
        (STREAMED, stream(TOKENS[0], ABORTED, DONE, delay_s=0.02), 503, "error_after"),
        (WHOLE, cut(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"), 502, "error_after"),
    ],
)
async def test_what_came_of_it(body: dict[str, Any], decode: Script, code: int, outcome: RequestOutcome) -> None:
    async with cluster(retry_max_retries=0) as served:
        served.short[0].script = stream(TOKENS[0], DONE) if body is STREAMED else reply()
        served.decode[0].script = decode
        client = await sent(served, body)
        try:
            await client.reply()
        except BrokenReplyError:
            assert outcome == "error_after"
        await served.until_idle()
        assert counted(served) == {(code, outcome): 1}


async def test_a_failed_attempt_that_another_made_good_is_none() -> None:
    """Prefill's error event, too, is forgotten with its attempt."""
    async with cluster(retry_max_retries=2) as served:
        served.short[0].script = served.decode[0].script = stream(*TOKENS, DONE)
        served.decode[0].plan(status(503))
        served.short[0].plan(stream(ERROR, DONE))
        client = await sent(served, STREAMED)
        assert (await client.reply()).chunks == (*TOKENS, DONE)
        await served.until_idle()
        assert counted(served) == {(200, "ok"): 1}


async def test_an_error_event_of_an_earlier_attempt_is_forgotten() -> None:
    async with cluster(retry_max_retries=1) as served:
        served.short[0].script = stream(*TOKENS, DONE)
        served.decode[0].script = cut()
        served.decode[0].plan(stream(ERROR, DONE))
        client = await sent(served, STREAMED)
        assert (await client.reply()).status == 502
        await served.until_idle()
        assert counted(served) == {(502, "error_before"): 1}


@pytest.mark.slow
async def test_tokens_that_are_not_relayed_are_no_first_byte() -> None:
    """Decode begins, but its prefill has failed already: the request goes elsewhere."""
    async with cluster(retry_initial_backoff_ms=300, retry_max_backoff_ms=300) as served:
        served.short[0].script = stream(ERROR, DONE)
        served.long[0].script = stream(TOKENS[0], DONE)
        served.decode[0].script = stream(*TOKENS, DONE, delay_s=0.05)
        client = await sent(served, STREAMED)
        assert (await client.reply()).chunks == (*TOKENS, DONE)
        await served.until_idle()
        assert len(served.decode[0].requests) == 2
        assert counted(served) == {(200, "ok"): 1}
        metrics = served.router.metrics
        assert sum(metrics.short.ttft_s.counts) + sum(metrics.long.ttft_s.counts) == 1


async def leave_in_queue(served: Cluster) -> None:
    first = await sent(served, WHOLE)
    await served.decode[0].received(1)
    second = await sent(served, WHOLE)
    await served.until(lambda: served.router.requests_queued == 1)
    second.close()
    await served.until(lambda: served.router.requests_queued == 0)
    first.close()
    await served.until(lambda: sum(counted(served).values()) == 2)
    del served.router.metrics.requests["/generate", "none", 499, "client_left"]


async def leave_before_first_byte(served: Cluster) -> None:
    client = await sent(served, STREAMED)
    await served.decode[0].received(1)
    client.close()


async def leave_after_first_byte(served: Cluster) -> None:
    served.decode[0].script = hang(ONE_TOKEN)
    client = await sent(served, STREAMED)
    await client.head()
    await client.chunk()
    client.close()


@pytest.mark.parametrize("leave", [leave_in_queue, leave_before_first_byte, leave_after_first_byte])
async def test_the_client_left(leave: Callable[[Cluster], Any]) -> None:
    async with cluster(max_concurrent_requests=1) as served:
        served.short[0].script = served.decode[0].script = hang()
        await leave(served)
        await served.until(lambda: bool(counted(served)))
        assert counted(served) == {(499, "client_left"): 1}


LOGPROBS = {"text": "x", "return_logprob": True, "logprob_start_len": 0}
HALF = {"text": "a", "meta_info": {"input_token_logprobs": [[-0.25, 2, None]], "completion_tokens": 5}}
LARGE = {"text": "a" * 200_000, "meta_info": {"input_token_logprobs": [[-0.25, 2, None]], "completion_tokens": 5}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("half", "code", "outcome"),
    [(HALF, 200, "ok"), (LARGE, 200, "ok"), ([], 502, "error_before"), ([1] * 200_000, 502, "error_before")],
)
async def test_a_joined_reply_is_counted_once_it_is_made(half: Any, code: int, outcome: RequestOutcome) -> None:
    async with cluster() as served:
        served.short[0].script = reply(HALF)
        served.decode[0].script = reply(half)
        assert (await served.ask("POST", "/generate", LOGPROBS)).status == code
        await served.until_idle()
        assert counted(served) == {(code, outcome): 1}


async def test_a_client_that_leaves_while_its_reply_is_joined_has_left() -> None:
    async with cluster() as served:
        served.short[0].script = reply(HALF)
        served.decode[0].script = reply(LARGE)
        client = await sent(served, LOGPROBS)
        await served.until(lambda: bool(served.router.services.reply_builder._processes))
        assert counted(served) == {}
        client.close()
        await served.until(lambda: bool(counted(served)))
        assert counted(served) == {(499, "client_left"): 1}


# -- numbers --------------------------------------------------------------------------------------------------


def observed(one: ClassMetrics) -> dict[str, tuple[int, float]]:
    """Number and sum of what each histogram has seen."""
    return {
        name: (sum(histogram.counts), histogram.total)
        for name in ("ttft_s", "tpot_s", "stall_s", "output_tokens", "prompt_tokens", "new_tokens", "duration_s")
        for histogram in (getattr(one, name),)
    }


def stream_with_pauses(*pauses_s: float) -> Script:
    async def play(turn: Turn) -> None:
        await turn.write(stream_head())
        for one, pause_s in zip((*TOKENS, DONE), (*pauses_s, 0.0), strict=True):
            await pause(pause_s)
            await turn.write(chunk(one))
        await turn.write(STREAM_END)

    return play


@pytest.mark.slow
async def test_times_of_a_stream() -> None:
    """First byte, time per further token, and the longest pause; each within what the stand-in waits."""
    async with cluster() as served:
        served.short[0].script = stream(TOKENS[0], DONE)
        served.decode[0].script = stream_with_pauses(0.1, 0.05, 0.15)
        assert (await served.ask("POST", "/generate", {"input_ids": [1, 2, 3, 4], "stream": True})).status == 200
        await served.until_idle()
        found = observed(served.router.metrics.short)
        assert {name: count for name, (count, _) in found.items()} == dict.fromkeys(found, 1)
        assert found["ttft_s"][1] >= 0.099
        # The first token may be seen late, which shortens what is between it and the last one.
        last_s = found["ttft_s"][1] + 2 * found["tpot_s"][1]
        assert 0.298 <= last_s <= found["duration_s"][1] + 0.001
        assert found["stall_s"][1] >= found["tpot_s"][1]
        assert found["stall_s"][1] <= last_s - found["ttft_s"][1] + 0.001
        assert (found["output_tokens"][1], found["prompt_tokens"][1], found["new_tokens"][1]) == (3, 4, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "body", "decode", "tokens"),
    [
        ("/generate", WHOLE, reply({"text": "a", "meta_info": {"completion_tokens": 17}}), 17),
        ("/v1/completions", {"prompt": ["x", "y"]}, reply({"choices": [], "usage": {"completion_tokens": 9}}), 9),
        ("/generate", {"text": ["x", "y"]}, reply([{"meta_info": {"completion_tokens": 9}}] * 2), None),  # of one only
        ("/generate", WHOLE, reply({"text": "a"}), None),
        ("/generate", STREAMED, stream(event({"text": "a"}), event({"text": "b"}), DONE), 2),
        ("/generate", {"text": ["x", "y"], "stream": True}, stream(*TOKENS, *TOKENS, DONE), 6),
        ("/v1/completions", {"prompt": "x", "stream": True}, stream(*[event({"choices": []})] * 5, DONE), 5),
        (
            "/v1/completions",
            {"prompt": "x", "stream": True},
            stream(event({}), event({"usage": {"completion_tokens": 40}}), DONE),
            40,
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "stream": True},
            stream(*[event({"choices": []})] * 6, DONE),
            4,
        ),
    ],
)
async def test_output_tokens(target: str, body: dict[str, Any], decode: Script, tokens: int | None) -> None:
    async with cluster() as served:
        served.short[0].script = stream(TOKENS[0], DONE) if body.get("stream") else reply()
        served.decode[0].script = decode
        assert (await served.ask("POST", target, body)).status == 200
        await served.until_idle()
        output = served.router.metrics.short.output_tokens
        assert (sum(output.counts), output.total) == ((0, 0.0) if tokens is None else (1, tokens))


async def test_only_streams_have_a_time_to_first_token() -> None:
    async with cluster() as served:
        for _ in range(3):
            assert (await served.ask("POST", "/generate", WHOLE)).status == 200
        await served.until_idle()
        found = observed(served.router.metrics.short)
        assert found["ttft_s"] == found["tpot_s"] == found["stall_s"] == (0, 0.0)
        assert found["duration_s"][0] == 3


async def test_predicted_and_actual_prefill() -> None:
    # A report of an instance's load would bring the rate back to what it has shown.
    async with cluster(load_poll_interval_secs=3600.0) as served:
        one = served.router.metrics.short
        rate = served.worker(served.short[0].url).rate
        assert (await served.ask("POST", "/generate", {"input_ids": [1] * 200})).status == 200  # 100 ms are expected
        await served.until_idle()
        assert sum(one.predicted_early_s.counts) + sum(one.predicted_late_s.counts) == 1
        late_s = one.predicted_late_s.total
        rate.tokens_per_s = 1e6
        served.short[0].script = reply(delay_s=0.1)
        assert (await served.ask("POST", "/generate", {"input_ids": [2] * 200})).status == 200
        await served.until_idle()
        assert one.predicted_late_s.total - late_s >= 0.09
        rate.tokens_per_s = 1.0
        served.short[0].script = reply()
        assert (await served.ask("POST", "/generate", {"input_ids": [3] * 200})).status == 200
        await served.until_idle()
        assert one.predicted_early_s.total > 150
