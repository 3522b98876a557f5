"""Large bodies are read beside the event loop, with the same outcome as small ones."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from concurrent.futures import Future

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_router.request import body_reader
from sglang_ext_router.request.body_reader import BodyReader, Outcome, count_values, is_read_at_once
from sglang_ext_router.request.prepared_request import ReadBody, read_body
from sglang_ext_router.request.prompt import BadRequestError
from support.raw_client import request_bytes
from support.router_process import cluster, until
from support.running_time import running_s

TEXT = "word " * 250_000
LARGE = {
    "text": (b"/generate", {"text": TEXT}),
    "texts": (b"/v1/completions", {"prompt": [TEXT, "x"], "n": 2, "stream": True}),
    "token ids": (b"/generate", {"input_ids": list(range(400_000))}),
    "chat": (b"/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 60_000}),
    "own fields": (b"/generate", {"text": TEXT, "rid": "mine", "bootstrap_room": 3}),
    "scores": (b"/v1/completions", {"prompt": TEXT, "prompt_logprobs": 1, "max_tokens": 1}),
    "scores of ids": (b"/v1/completions", {"prompt": [list(range(200_000))], "prompt_logprobs": 1, "max_tokens": 1}),
    "parameters": (b"/generate", {"text": TEXT, "sampling_params": {"n": 1}}),
    "not an object": (b"/generate", [TEXT]),
    "without a prompt": (b"/generate", {"x": TEXT}),
    "large parameters": (b"/generate", {"text": "x", "sampling_params": {"custom_params": {"a": TEXT}}}),
}


async def outcome(reader: BodyReader, path: bytes, raw: bytes, has_hints: bool = False) -> Outcome:
    read: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    reader.read(path, raw, has_hints, read.set_result)
    return await asyncio.wait_for(read, 30.0)


def read_at_once(path: bytes, raw: bytes, has_hints: bool) -> Outcome:
    try:
        return read_body(path, raw, has_hints)
    except BadRequestError as error:
        return error


def comparable(outcome: Outcome) -> object:
    """All of it but the texts, which are not brought from the process."""
    if isinstance(outcome, BadRequestError):
        return str(outcome), outcome.param
    assert outcome is not None
    return outcome._replace(prompt=outcome.prompt._replace(texts=()))


@pytest.mark.slow
async def test_the_outcome_is_that_of_reading_at_once() -> None:
    reader = BodyReader(asyncio.get_running_loop())
    try:
        for path, content in LARGE.values():
            raw = orjson.dumps(content)
            assert len(raw) > body_reader.SMALL_BYTES
            for has_hints in (False, True):
                got = await outcome(reader, path, raw, has_hints)
                assert comparable(got) == comparable(read_at_once(path, raw, has_hints))
        assert len(reader._all) == 1  # one process for all, as they came one after the other
    finally:
        await reader.stop()


@pytest.mark.parametrize("drawn", [0.0, 0.5, 0.999])
def test_what_is_worth_a_process(drawn: float) -> None:
    def at_once(raw: bytes) -> bool:
        return is_read_at_once(raw, lambda: drawn)

    assert at_once(b"," * body_reader.SMALL_BYTES)
    assert not at_once(b"," * (body_reader.SMALL_BYTES + 1))
    assert at_once(b"x" * body_reader.SIMPLE_BYTES)
    assert not at_once(b"x" * (body_reader.SIMPLE_BYTES + 1))


@pytest.mark.slow
@given(st.integers(0, 1 << 20), st.floats(0, 1, exclude_max=True))
def test_values_in_one_place_of_a_long_text_are_seen(start: int, drawn: float) -> None:
    """As many as would hold others up: half a megabyte of them."""
    raw = b"x" * start + b"1," * (1 << 18) + b"x" * (3 * 1024 * 1024 - start)
    assert not is_read_at_once(raw, lambda: drawn)


@given(st.floats(0, 1, exclude_max=True))
def test_a_long_text_with_its_commas_is_read_at_once(drawn: float) -> None:
    assert is_read_at_once(b"some words and, after a while, a comma " * 35_000, lambda: drawn)


@pytest.mark.parametrize("raw", [b"[1,2,3]", b'{"a":1,"b":{}}', b"[[[[1]]],[[]]]", b'["a","b"]', b'[{"a":1},{"b":2}]'])
def test_values_are_never_more_than_counted(raw: bytes) -> None:
    def values(value: object) -> int:
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return 1 + sum(map(values, items))

    assert count_values(raw) + 1 >= values(orjson.loads(raw))


@pytest.mark.slow
async def test_a_body_of_too_many_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster() as served:
        answer = await served.ask("POST", "/generate", b'{"text":"x","a":[' + b"{}," * 8_000_000 + b"{}]}")
        assert answer.status == 400
        assert "values" in answer.error["message"]


@pytest.mark.slow
async def test_a_process_that_dies_fails_its_body_only(complaints: object) -> None:
    reader = BodyReader(asyncio.get_running_loop())
    try:
        raw = orjson.dumps({"input_ids": list(range(2_000_000))})
        read: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        reader.read(b"/generate", raw, False, read.set_result)
        await until(lambda: bool(reader._all))
        (process,) = reader._all
        os.kill(process.pid, signal.SIGKILL)
        assert await asyncio.wait_for(read, 10.0) is None
        assert isinstance(await outcome(reader, b"/generate", raw), ReadBody)
    finally:
        await reader.stop()
        complaints.messages.clear()  # type: ignore[attr-defined]


@pytest.mark.slow
async def test_what_was_cancelled_is_not_told() -> None:
    reader = BodyReader(asyncio.get_running_loop())
    raw = orjson.dumps({"text": TEXT})
    told: list[Outcome] = []
    futures: list[Future[Outcome]] = [reader.read(b"/generate", raw, False, told.append) for _ in range(6)]
    cancelled = [future for future in futures if future.cancel()]
    await until(lambda: all(future.done() for future in futures))
    await asyncio.sleep(0.05)
    assert len(cancelled) >= 4
    assert len(told) == 6 - len(cancelled)
    await reader.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    "raw",
    [
        b'{"n":0,"input_embeds":[' + b"[0.1,0.2,0.3]," * 1_500_000 + b'[1]],"sampling_params":{"n":0}}',
        b'{"input_ids":[' + b"1," * 6_000_000 + b'"x"]}',
    ],
    ids=["embeddings", "token ids"],
)
async def test_a_large_body_holds_no_other_request_up(raw: bytes) -> None:
    """Its parsing takes a second and more."""
    async with cluster(client_write_timeout_secs=60.0) as served, await served.connect() as client:
        await client.send(request_bytes("POST", "/generate", raw)[:-1])
        await served.until(lambda: served.router.clients.buffered_bytes == len(raw), 20.0)
        longest_s = 0.0
        await client.send(raw[-1:])
        answering = asyncio.create_task(client.reply())
        while not answering.done():
            start_s, started_s = running_s(), time.thread_time()
            await asyncio.sleep(0.002)
            # What the loop itself computed; the clock alone would also count what the machine did elsewhere.
            longest_s = max(longest_s, min(running_s() - start_s, time.thread_time() - started_s))
        assert (await answering).status == 400
        assert longest_s < 0.15


async def test_a_client_that_leaves_while_its_body_is_read() -> None:
    async with cluster() as served:
        raw = orjson.dumps({"input_ids": list(range(600_000))})
        async with await served.connect() as client:
            await client.send(request_bytes("POST", "/generate", raw))
            await served.until(lambda: bool(served.router.services.body_reader._all))
            client.reset()
        await served.until(lambda: served.router.clients.buffered_bytes == 0)
        assert served.upstream_requests() == 0


@pytest.mark.slow
async def test_a_large_prompt_reaches_both_instances_as_it_came() -> None:
    async with cluster(length_boundary_tokens=1 << 24) as served:
        for worker in served.router.registry:
            worker.max_prompt_tokens = 1 << 30
        served.router.registry.refresh()
        text = "long words, and more of them " * 400_000
        for headers in ({}, {"x-sgl-priority": "low"}):
            assert (await served.ask("POST", "/generate", {"text": text}, headers)).status == 200
        for engine in (served.decode[0], served.short[0]):
            assert [request.json["text"] == text for request in engine.requests] == [True, True]
        assert served.decode[0].requests[1].json["sampling_params"]["custom_params"]["sglang_ext_priority"] == "low"


@pytest.mark.slow
async def test_a_process_that_the_other_thread_has_taken_is_replaced() -> None:
    class JustTaken(list[subprocess.Popen[bytes]]):
        """Looks as if there was one left."""

        def __bool__(self) -> bool:
            return True

    reader = BodyReader(asyncio.get_running_loop())
    try:
        reader._idle = JustTaken()
        path, content = LARGE["text"]
        assert isinstance(await outcome(reader, path, orjson.dumps(content)), ReadBody)
    finally:
        reader._idle = list(reader._idle)
        await reader.stop()
