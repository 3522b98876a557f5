"""However bytes arrive: the same as one request after the other, and never an exception or a hang."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.event_loops import Stage
from support.examples import examples
from support.raw_client import BrokenReplyError, RawClient, request_bytes
from support.router_process import Cluster, cluster
from support.scripted_engine import Turn, response

FUZZ = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)

BODY = b'{"text": "x"}'
CHUNKED_REQUEST = (
    b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\n" + BODY[:5] + b"\r\n8;e=1\r\n" + BODY[5:] + b"\r\n0\r\nX-T: 1\r\n\r\n"
)
PIECES = [
    request_bytes("POST", "/generate", BODY),
    CHUNKED_REQUEST,
    request_bytes("POST", "/v1/completions", b'{"prompt": ["a", "b"], "n": 2}', {"x-request-id": "r"}),
    request_bytes("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}]}'),
    request_bytes("POST", "/generate", b"{"),
    request_bytes("POST", "/generate", BODY, {"x-sgl-ttft-slo-ms": "x"}),
    request_bytes("GET", "/generate"),
    request_bytes("GET", "/health"),
    request_bytes("GET", "/nowhere?a=b"),
    b"\r\n" + request_bytes("DELETE", "/workers/x:1"),
]


async def echo(turn: Turn) -> None:
    """Answer with what was asked, so that replies cannot be mixed up unnoticed."""
    asked = {key: value for key, value in turn.request.json.items() if key not in {"rid", "bootstrap_room"}}
    await turn.write(response(json.dumps([turn.request.target, asked]).encode()))


def fuzz_cluster(stage: Stage) -> Cluster:
    served = stage.enter(cluster())
    for engine in served.engines:
        engine.script = echo
    return served


async def send_split(client: RawClient, data: bytes, cuts: list[int]) -> None:
    """Send `data` in the packets that the cuts make."""
    borders = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in pairwise(borders):
        await client.send(data[start:end])
        await asyncio.sleep(0)


async def one_by_one(served: Cluster, pieces: list[bytes]) -> list[tuple[int, bytes]]:
    answers = []
    for piece in pieces:
        async with await served.connect() as client:
            await client.send(piece)
            answer = await client.reply()
            answers.append((answer.status, answer.body))
    return answers


@pytest.mark.full
def test_a_pipeline_in_any_packets_equals_requests_one_by_one(stage: Stage) -> None:
    served = fuzz_cluster(stage)
    alone = stage.run(one_by_one(served, PIECES))

    @FUZZ
    @given(
        order=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12),
        cuts=st.lists(st.integers(0, 1 << 14), max_size=30),
        ends_with_garbage=st.booleans(),
    )
    def pipelined(order: list[int], cuts: list[int], ends_with_garbage: bool) -> None:
        async def scenario() -> None:
            data = b"".join(PIECES[index] for index in order) + (b"\x00\r\n" if ends_with_garbage else b"")
            async with await served.connect() as client:
                sending = asyncio.create_task(send_split(client, data, cuts))
                answers = [await client.reply() for _ in order]
                await sending
                assert [(answer.status, answer.body) for answer in answers] == [alone[index] for index in order]
                if ends_with_garbage:
                    assert (await client.reply()).status == 400

        stage.run(scenario())

    pipelined()


NASTY = [
    *(
        b"\r",
        b"\n",
        b"\r\n",
        b"\r\n\r\n",
        b" ",
        b"\t",
        b"\x00",
        b":",
        b";",
        b",",
        b"0",
        b"1",
        b"-",
        b"+",
        b"\x0b",
        b"\xff",
    ),
    *(b"0\r\n\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"HTTP/1.0", b"Connection: close\r\n"),
    *(b"GET / HTTP/1.1\r\n\r\n", b"POST ", b"Upgrade: h2c\r\nConnection: upgrade\r\n", b"Expect: 100-continue\r\n"),
    *(b"Host: b\r\n", b"?", b"#", b"%00", b"http://x/", b'"', b"\\", b"}", b"bootstrap_room", b"a" * 3000),
]
EDITS = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 12), st.one_of(st.sampled_from(NASTY), st.binary(max_size=4))),
    max_size=4,
)


def edited(data: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    """Replace stretches of `data`."""
    for at, length, new in edits:
        start = at % (len(data) + 1)
        data = data[:start] + new + data[start + length :]
    return data


async def settled(served: Cluster) -> None:
    """Wait until the router has dealt with all that it was sent so far."""
    quiet = 0
    while quiet < 4:
        await asyncio.sleep(0.001)
        busy = any(one.request is not None or one._pending for one in served.router.ports.clients.open)
        quiet = 0 if busy else quiet + 1


@pytest.mark.full
@pytest.mark.parametrize("base", range(4))
def test_edited_requests_never_harm(stage: Stage, base: int) -> None:
    served = fuzz_cluster(stage)

    @FUZZ
    @given(edits=EDITS, cuts=st.lists(st.integers(0, 1 << 12), max_size=5))
    def tried(edits: list[tuple[int, int, bytes]], cuts: list[int]) -> None:
        async def scenario() -> None:
            before = len(served.decode[0].requests)
            async with await served.connect() as client:
                try:
                    await send_split(client, edited(PIECES[base], edits) + PIECES[0], cuts)
                except ConnectionError:
                    pass
                await settled(served)
                served_count = sum(code == 200 for code in await received_statuses(client))
                assert len(served.decode[0].requests) - before <= served_count
            assert served.decode[0].malformed == served.short[0].malformed == served.long[0].malformed == []

        stage.run(scenario())

    tried()


async def received_statuses(client: RawClient) -> list[int]:
    """Statuses of the replies that have come already."""
    statuses = []
    try:
        async with asyncio.timeout(0.01):
            while True:
                statuses.append((await client.reply()).status)
    except (TimeoutError, BrokenReplyError):
        return statuses


@pytest.mark.slow
def test_bytes_never_harm(stage: Stage) -> None:
    served = fuzz_cluster(stage)

    @FUZZ
    @given(data=st.lists(st.one_of(st.binary(max_size=40), st.sampled_from(NASTY)), max_size=8))
    def tried(data: list[bytes]) -> None:
        async def scenario() -> None:
            async with await served.connect() as client:
                try:
                    for piece in data:
                        await client.send(piece)
                except ConnectionError:
                    pass
                await settled(served)
            assert served.upstream_requests() == 0

        stage.run(scenario())

    tried()
