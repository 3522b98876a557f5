"""Whatever two instances and a client do, in whatever order: a clean end for all three, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
from collections import deque

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.event_loops import Stage
from support.examples import examples
from support.raw_client import BrokenReplyError, RawClient, Reply, request_bytes
from support.router_process import Cluster, cluster, until
from support.scripted_engine import (
    DONE,
    STREAM_END,
    Script,
    Turn,
    chunk,
    cut,
    event,
    in_pieces,
    raw,
    reply,
    response,
    status,
    stream,
    stream_head,
)

ABORTED_WITHIN_S = 1.0


async def must_be_aborted(turn: Turn) -> None:
    """Hang; being told to stop within a second is part of the contract, closing the connection is not enough."""
    try:
        await turn.gone.wait()
        async with asyncio.timeout(ABORTED_WITHIN_S):
            await turn.aborted.wait()
    except TimeoutError:
        turn.engine.malformed.append(f"{turn.request.rid} was not aborted")


def then_hang(first: bytes) -> Script:
    async def play(turn: Turn) -> None:
        await turn.write(first)
        await must_be_aborted(turn)

    return play


def late(script: Script, delay_s: float) -> Script:
    async def play(turn: Turn) -> None:
        await asyncio.sleep(delay_s)
        await script(turn)

    return play


ERROR_FIRST = stream(event({"error": {"message": "no", "code": 500}}), DONE)
REFUSED_FIRST = stream(event({"error": {"message": "no", "code": 400}}), DONE)
PIECES = stream_head() + chunk(event(1)) + chunk(event(2) + event(3)) + chunk(DONE) + STREAM_END
PREFILL: dict[str, Script] = {
    "ok": reply(),
    "late ok": late(reply(), 0.02),
    "500": status(500),
    "late 503": late(status(503), 0.01),
    "429": status(429),
    "400": status(400),
    # Not a byte less: a kept connection that ends without any is taken to have been closed before the request.
    "cut": cut(b"H"),
    "late cut": late(cut(b"H"), 0.015),
    "half": cut(response(b'{"a": 1}')[:-3]),
    "hang": must_be_aborted,
    "nonsense": raw(b"nonsense\r\n\r\n", then="close"),
}
DECODE: dict[str, Script] = {
    **PREFILL,
    "late ok": late(reply(), 0.03),
    "stream": stream(event(1), event(2), DONE),
    "slow stream": stream(event(1), event(2), DONE, delay_s=0.01),
    "tiny stream": in_pieces(PIECES, 17),
    "error first": ERROR_FIRST,
    "refused first": REFUSED_FIRST,
    "stream and cut": cut(stream_head() + chunk(event(1))),
    "stream and cut within": cut(stream_head() + chunk(event(1)) + b"20\r\ndata"),
    "stream and hang": then_hang(stream_head() + chunk(event(1))),
    "head and hang": then_hang(stream_head()),
}


def play_in_order(scripts: list[Script]) -> Script:
    """The attempts of one request, on whichever instances, play these; further ones answer."""
    left = deque(scripts)

    async def play(turn: Turn) -> None:
        await (left.popleft() if left else reply())(turn)

    return play


SETTINGS = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.full
def test_every_end_is_clean(stage: Stage) -> None:
    served = stage.enter(cluster(short=2, long=0, decode=2, request_timeout_secs=0.4))

    @SETTINGS
    @given(
        prefill=st.lists(st.sampled_from(sorted(PREFILL)), max_size=4),
        decode=st.lists(st.sampled_from(sorted(DECODE)), max_size=4),
        is_stream=st.booleans(),
        sequences=st.sampled_from([1, 1, 2]),
        joins=st.booleans(),
        own_id=st.booleans(),
        leaves_after_ms=st.none() | st.integers(0, 60),
    )
    def tried(
        prefill: list[str],
        decode: list[str],
        is_stream: bool,
        sequences: int,
        joins: bool,
        own_id: bool,
        leaves_after_ms: int | None,
    ) -> None:
        body: dict[str, object] = {"text": "x" if sequences == 1 else ["x"] * sequences, "stream": is_stream}
        if joins:
            body["return_logprob"] = True
        if own_id:
            body["rid"] = "mine"
        for engines, names, scripts in ((served.short, prefill, PREFILL), (served.decode, decode, DECODE)):
            script = play_in_order([scripts[name] for name in names])
            for engine in engines:
                engine.script = script
        stage.run(scenario(served, body, leaves_after_ms))

    tried()


async def scenario(served: Cluster, body: dict[str, object], leaves_after_ms: int | None) -> None:
    """One request, and what must be true of its end."""
    rooms_before = {request.room for engine in served.engines for request in engine.requests}
    async with await served.connect() as client:
        await client.send(request_bytes("POST", "/generate", json.dumps(body).encode()))
        if leaves_after_ms is None:
            await check_reply(client, is_stream=body["stream"] is True)
        else:
            await asyncio.sleep(leaves_after_ms / 1000)
            client.reset()
    await served.until_idle()
    await until(lambda: not any(engine.turns for engine in served.engines), 2 * ABORTED_WITHIN_S)
    for engine in served.engines:
        assert engine.malformed == []
    for engines in (served.short, served.decode):
        rooms = [request.room for engine in engines for request in engine.requests]
        assert len(set(rooms)) == len(rooms)
    assert rooms_before <= {request.room for engine in served.engines for request in engine.requests}


async def check_reply(client: RawClient, is_stream: bool) -> None:
    """A reply that comes whole is an instance's or an error of ours; else the connection is cut."""
    try:
        answer = await client.reply()
    except BrokenReplyError as error:
        broken = str(error)
    else:
        check_whole_reply(answer, is_stream)
        return
    assert "no reply in time" not in broken


def check_whole_reply(answer: Reply, is_stream: bool) -> None:
    assert answer.status in {200, 400, 429, 500, 502, 503, 504}
    if answer.chunks is not None and is_stream and len(answer.chunks) > 1:
        assert answer.body.endswith(DONE)
    elif answer.chunks is None and answer.status == 200:
        json.loads(answer.body)
