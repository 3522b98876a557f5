"""A client that leaves frees both instances within a second, wherever its request stands."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from support.raw_client import RawClient, request_bytes
from support.router_process import Cluster, cluster
from support.running_time import running_s
from support.scripted_engine import chunk, cut, event, hang, raw, reply, status, stream_head

PROMPT = {"text": "x"}
STREAMED = {"text": "x", "stream": True}


async def sent(served: Cluster, body: dict[str, Any]) -> RawClient:
    """A client that has sent a request and waits."""
    client = await served.connect()
    await client.send(request_bytes("POST", "/generate", json.dumps(body).encode()))
    return client


async def leave(client: RawClient, how: str) -> float:
    """Leave; the running time of it."""
    if how == "reset":
        client.reset()
    else:
        client.close()
    return running_s()


def refused(served: Cluster) -> int:
    return served.router.metrics.aborts.get("client_gone", 0)


@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_before_the_first_byte(event_loop: str, how: str) -> None:
    async with cluster() as served:
        served.short[0].script = hang()
        served.decode[0].script = hang()
        client = await sent(served, PROMPT)
        for engine in (served.short[0], served.decode[0]):
            await engine.received(1)
        left_s = await leave(client, how)
        for engine in (served.short[0], served.decode[0]):
            await engine.abort_of(engine.requests[0].rid, 1.0)
        assert running_s() - left_s < 1.0
        await served.until_idle()
        assert running_s() - left_s < 1.0


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_in_the_middle_of_a_stream(how: str) -> None:
    async with cluster() as served:
        served.short[0].script = hang()
        served.decode[0].script = hang(stream_head() + chunk(event(1)))
        client = await sent(served, STREAMED)
        await client.head()
        await client.chunk()
        left_s = await leave(client, how)
        for engine in (served.short[0], served.decode[0]):
            await engine.abort_of(engine.requests[0].rid, 1.0)
        assert running_s() - left_s < 1.0
        await served.until_idle()
        assert served.router.metrics.requests == {("/generate", "short", 499, "client_left"): 1}


async def test_in_the_queue() -> None:
    async with cluster(max_concurrent_requests=1) as served:
        served.decode[0].script = hang()
        first = await sent(served, PROMPT)
        await served.decode[0].received(1)
        second = await sent(served, PROMPT)
        await served.until(lambda: served.router.requests_queued == 1)
        await leave(second, "close")
        await served.until(lambda: served.router.requests_queued == 0)
        await leave(first, "close")
        await served.until_idle()
        assert len(served.decode[0].requests) == 1


@pytest.mark.slow
async def test_during_the_back_off_before_a_retry() -> None:
    async with cluster(retry_initial_backoff_ms=300, retry_max_backoff_ms=300) as served:
        served.short[0].script = cut()
        served.decode[0].script = hang()
        client = await sent(served, PROMPT)
        await served.decode[0].abort_of((await served.decode[0].received(1))[0].rid)
        await leave(client, "close")
        await served.until_idle()
        await asyncio.sleep(0.5)
        assert len(served.decode[0].requests) == 1


async def test_while_a_5xx_waits_for_what_the_other_leg_says() -> None:
    async with cluster(retry_initial_backoff_ms=300, retry_max_backoff_ms=300) as served:
        served.short[0].script = status(500)
        served.decode[0].script = hang()
        client = await sent(served, PROMPT)
        await served.decode[0].received(1)
        await served.short[0].received(1)
        await asyncio.sleep(0.05)
        left_s = await leave(client, "close")
        await served.decode[0].abort_of(served.decode[0].requests[0].rid, 1.0)
        assert running_s() - left_s < 1.0
        await served.until_idle()
        assert len(served.decode[0].requests) == 1


async def test_while_its_prompt_is_being_tokenised() -> None:
    class Held:
        """A tokeniser that answers when told."""

        def __init__(self) -> None:
            self.waiting: list[Any] = []

        def count(self, texts: Any, done: Any) -> None:
            self.waiting.append(done)

        def close(self) -> None:
            """Nothing to free."""

    async with cluster(length_boundary_tokens=300) as served:
        held: Any = Held()
        served.model.tokeniser = held
        client = await sent(served, {"text": "x" * 1200})
        await served.until(lambda: len(held.waiting) == 1)
        await leave(client, "close")
        await served.until(lambda: refused(served) == 1)
        held.waiting[0]([350])
        await asyncio.sleep(0.05)
        assert served.upstream_requests() == 0


async def test_while_a_slow_tokeniser_thread_counts() -> None:
    released = threading.Event()

    class Slow:
        def encode_batch_fast(self, texts: list[str]) -> list[Any]:
            released.wait(5)
            return []

    from sglang_ext_router.request.tokenising import PromptTokeniser

    async with cluster(length_boundary_tokens=300) as served:
        tokeniser = PromptTokeniser.__new__(PromptTokeniser)
        vars(tokeniser).update(_tokenizer=Slow(), _loop=served.router.loop)
        from concurrent.futures import ThreadPoolExecutor

        tokeniser._threads = ThreadPoolExecutor(1)
        served.model.tokeniser = tokeniser
        client = await sent(served, {"text": "x" * 1200})
        await served.until(lambda: served.router.metrics.tokenised == 1)
        await leave(client, "close")
        await served.until(lambda: refused(served) == 1)
        released.set()
        await asyncio.sleep(0.05)
        assert served.upstream_requests() == 0


async def test_while_it_still_sends_its_body() -> None:
    async with cluster() as served:
        client = await served.connect()
        await client.send(request_bytes("POST", "/generate", b'{"text": "x"}')[:-3])
        await asyncio.sleep(0.02)
        await leave(client, "reset")
        await asyncio.sleep(0.05)
        assert served.upstream_requests() == 0


async def test_a_client_that_pipelined_more_and_leaves() -> None:
    async with cluster() as served:
        served.decode[0].script = hang()
        served.short[0].script = hang()
        client = await served.connect()
        await client.send(request_bytes("POST", "/generate", json.dumps(PROMPT).encode()) * 5)
        await served.decode[0].received(1)
        await leave(client, "close")
        await served.decode[0].abort_of(served.decode[0].requests[0].rid, 1.0)
        await served.until_idle()
        assert len(served.decode[0].requests) == 1


async def test_its_own_id_is_the_one_aborted() -> None:
    async with cluster() as served:
        served.decode[0].script = hang()
        client = await sent(served, {**PROMPT, "rid": "chatcmpl-1234"})
        rid = (await served.decode[0].received(1))[0].rid
        assert rid.startswith("chatcmpl-1234")
        await leave(client, "close")
        await served.decode[0].abort_of(rid, 1.0)


async def test_every_sequence_of_a_batch_is_aborted() -> None:
    async with cluster() as served:
        served.decode[0].script = hang()
        client = await sent(served, {"text": ["a", "b"], "sampling_params": {"n": 2}})
        base = (await served.decode[0].received(1))[0].rid
        await leave(client, "close")
        for index in range(4):
            await served.decode[0].abort_of(f"{base}_{index}", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("rid", ["", "0"])
async def test_a_clients_id_cannot_abort_the_requests_of_others(rid: str) -> None:
    """SGLang aborts every request whose id starts with the one given."""
    async with cluster() as served:
        served.decode[0].script = hang()
        other = asyncio.create_task(served.ask("POST", "/generate", PROMPT))
        victim = (await served.decode[0].received(1))[0].rid
        client = await sent(served, {**PROMPT, "rid": rid})
        await served.decode[0].received(2)
        await leave(client, "close")
        await served.until(lambda: len(served.decode[0].aborts) == 2)  # it is told again
        assert not [abort.rid for abort in served.decode[0].aborts if victim.startswith(abort.rid)]
        served.decode[0].turns[0].aborted.set()
        other.cancel()


@pytest.mark.slow
async def test_an_abort_is_told_again_in_case_it_overtook_the_request() -> None:
    async with cluster() as served:
        served.decode[0].script = hang()
        client = await sent(served, PROMPT)
        rid = (await served.decode[0].received(1))[0].rid
        await leave(client, "close")
        await served.until(lambda: [abort.rid for abort in served.decode[0].aborts] == [rid, rid])
        first, second = served.decode[0].aborts
        assert 0.2 < second.at_s - first.at_s < 2.0


async def test_aborts_carry_the_key() -> None:
    async with cluster(api_key="secret") as served:
        served.decode[0].script = hang()
        client = await served.connect()
        await client.send(
            request_bytes("POST", "/generate", json.dumps(PROMPT).encode(), {"Authorization": "Bearer secret"})
        )
        rid = (await served.decode[0].received(1))[0].rid
        await leave(client, "close")
        await served.decode[0].abort_of(rid, 1.0)
        (told,) = [request for request in served.decode[0].control if request.path == "/abort_request"][:1]
        assert told.header("authorization") == "Bearer secret"


@pytest.mark.slow
async def test_leaving_after_the_whole_reply_is_no_abort() -> None:
    async with cluster() as served:
        served.short[0].script = reply(delay_s=0.3)
        answer = await served.ask("POST", "/generate", PROMPT)
        assert answer.status == 200
        await served.until_idle()
        assert served.short[0].aborts == served.decode[0].aborts == []
        assert refused(served) == 0


async def test_an_instance_that_answers_slowly_piece_by_piece_is_dropped_with_the_client() -> None:
    async with cluster() as served:
        served.decode[0].script = raw(stream_head(), *[chunk(event(i)) for i in range(1000)], pause_s=0.005)
        client = await sent(served, STREAMED)
        await client.head()
        await leave(client, "reset")
        (turn,) = served.decode[0].turns
        async with asyncio.timeout(1.0):
            await turn.gone.wait()
