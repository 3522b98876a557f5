"""A client's own id: its reply has it, and it aborts the request, at the router and at the instances."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_router.http.replies import CHUNKED_END, Recoded, Unchunked, chunk
from support.router_process import Cluster, cluster
from support.scripted_engine import DONE, Turn, event, hang, reply, response, stream_head

ADMIN = {"Authorization": "Bearer admin"}


def with_id(form: str, delay_s: float = 0.0) -> Any:
    """A reply that names the request by the id that the instance got: whole, or as a stream in pieces."""

    async def play(turn: Turn) -> None:
        rid = turn.request.rid.encode()
        if form == "whole":
            await turn.write(response(b'{"text": "ok", "meta_info": {"id": "%b"}}' % rid))
            return
        one = b'data: {"id": "%b", "text": "a"}\n\n' % rid
        await turn.write(stream_head())
        if form == "cut":
            await turn.write_in_pieces(chunk(one) + chunk(one) + chunk(DONE) + CHUNKED_END, 7)
            return
        for piece in (one, one, DONE):
            await asyncio.sleep(delay_s)
            await turn.write(chunk(piece))
        await turn.write(CHUNKED_END)

    return play


@pytest.mark.parametrize("rid", ["mine", "a" * 300, "-", "with spaces", "ü"])
async def test_a_reply_has_the_clients_id(rid: str) -> None:
    async with cluster() as served:
        served.decode[0].script = with_id("whole")
        answer = await served.ask("POST", "/generate", {"text": "x", "rid": rid})
        assert (answer.status, answer.json["meta_info"]["id"]) == (200, rid)
        sent = served.decode[0].requests[0].rid
        assert sent.startswith(rid + "-"), "an id of its own, for SGLang aborts all that begin with one"


@pytest.mark.parametrize("form", ["events", "cut"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_every_event_has_it(form: str, version: str) -> None:
    async with cluster() as served:
        served.decode[0].script = with_id(form)
        async with await served.connect() as client:
            body = {"text": "x", "stream": True, "rid": "mine"}
            answer = await client.ask("POST", "/generate", body, version=version)
        one = b'data: {"id": "mine", "text": "a"}\n\n'
        assert answer.body == one + one + DONE
        assert (answer.chunks is None) == (version == "1.0")


async def test_a_retried_request_has_it_too() -> None:
    async with cluster(decode=2, retry_initial_backoff_ms=1) as served:
        for engine in served.decode:
            engine.plan(reply({"error": {"message": "full"}}, 503))
            engine.script = with_id("whole")
        answer = await served.ask("POST", "/generate", {"text": "x", "rid": "mine"})
        assert answer.json["meta_info"]["id"] == "mine"


async def test_an_error_in_a_stream_still_fits_behind_it() -> None:
    async with cluster() as served:

        async def play(turn: Turn) -> None:
            await turn.write(stream_head() + chunk(event({"id": turn.request.rid})))
            await asyncio.sleep(0.05)
            turn.cut()

        served.decode[0].script = play
        answer = await served.ask("POST", "/generate", {"text": "x", "stream": True, "rid": "mine"})
        assert answer.chunks is not None
        assert answer.chunks[0] == event({"id": "mine"})
        assert b'"error"' in answer.chunks[1]


@given(
    st.lists(st.sampled_from([b"a", b"-end", b"data: x-end\n\n", b"-en", b"d", b"\n\n", b"-end-end"]), max_size=8),
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.booleans(),
)
def test_the_end_of_an_id_is_removed_wherever_a_reply_is_cut(
    pieces: list[bytes], cuts: list[int], is_chunked: bool
) -> None:
    coded = b"".join(map(chunk, pieces)) + CHUNKED_END
    recoded, got, at = Recoded(b"-end", is_chunked), b"", 0
    while at < len(coded):
        size = cuts[at % len(cuts)]
        got += recoded.feed(coded[at : at + size])
        at += size
    body = Unchunked().feed(got) if is_chunked else got
    events = b"".join(pieces).split(b"\n\n")
    assert body == b"\n\n".join(one.replace(b"-end", b"") for one in events)


# -- aborting -------------------------------------------------------------------------------------------------------


async def started(served: Cluster, body: dict[str, Any]) -> asyncio.Task[Any]:
    task = asyncio.create_task(served.ask("POST", "/generate", body))
    await served.decode[0].received(1)
    return task


@pytest.mark.parametrize("rid", ["mine", ["other", "mine"]])
async def test_both_legs_are_aborted_by_it(rid: Any) -> None:
    async with cluster() as served:
        release = asyncio.Event()

        async def play(turn: Turn) -> None:
            await release.wait()
            await with_id("whole")(turn)

        served.decode[0].script = play
        task = await started(served, {"text": "x", "rid": "mine"})
        answer = await served.ask("POST", "/abort_request", {"rid": rid})
        assert answer.status == 200
        for engine in (served.decode[0], served.short[0]):
            await engine.abort_of(engine.requests[0].rid, 1.0)
        release.set()
        assert (await task).json["meta_info"]["id"] == "mine", "what there is comes back"


async def test_instances_are_asked_by_the_clients_id_for_other_routers_requests() -> None:
    async with cluster() as served:
        await served.ask("POST", "/abort_request", {"rid": "elsewhere", "abort_message": "as SGLang's clients send"})
        for engine in served.engines:
            await engine.abort_of("elsewhere", 1.0)


@pytest.mark.parametrize("rid", ["min", "mine2", "", []])
async def test_other_requests_go_on(rid: Any) -> None:
    async with cluster() as served:
        served.decode[0].script = with_id("events", delay_s=0.1)
        task = await started(served, {"text": "x", "rid": "mine", "stream": True})
        assert (await served.ask("POST", "/abort_request", {"rid": rid})).status == 200
        assert (await task).status == 200
        assert served.decode[0].requests[0].rid not in {abort.rid for abort in served.decode[0].aborts}


async def test_an_aborted_request_is_not_tried_again() -> None:
    async with cluster() as served:

        async def play(turn: Turn) -> None:
            await served.until(lambda: bool(served.decode[0].aborts))
            await turn.write(response(b'{"error": {"message": "aborted"}}', 503))

        served.decode[0].script = play
        task = await started(served, {"text": "x", "rid": "mine"})
        await served.ask("POST", "/abort_request", {"rid": "mine"})
        assert (await task).status == 503
        assert len(served.decode[0].requests) == 1


async def test_a_request_in_the_queue_ends_at_once() -> None:
    async with cluster(max_concurrent_requests=1) as served:
        served.decode[0].script = hang()
        first = await started(served, {"text": "x"})
        second = asyncio.create_task(served.ask("POST", "/generate", {"text": "x", "rid": "mine"}))
        await served.until(lambda: served.router.requests_queued == 1)
        await served.ask("POST", "/abort_request", {"rid": "mine"})
        answer = await second
        assert (answer.status, served.router.requests_queued) == (503, 0)
        assert "aborted" in answer.error["message"]
        first.cancel()


async def test_between_two_attempts_it_ends_at_once() -> None:
    async with cluster(retry_initial_backoff_ms=20_000, retry_max_backoff_ms=20_000) as served:
        served.decode[0].script = reply({"error": {"message": "full"}}, 429)
        task = await started(served, {"text": "x", "rid": "mine"})
        await served.until(lambda: any(flow._timer is not None for flow in served.router.running))
        await served.ask("POST", "/abort_request", {"rid": "mine"})
        answer = await task
        assert (answer.status, len(served.decode[0].requests)) == (503, 1)
        assert "aborted" in answer.error["message"]
        await served.until_idle()


async def test_all_are_aborted_by_the_administrator_only() -> None:
    async with cluster(admin_api_key="admin", api_key="key") as served:
        key = {"Authorization": "Bearer key"}
        assert (await served.ask("POST", "/abort_request", {"abort_all": True}, key)).status == 401
        assert (await served.ask("POST", "/abort_request", {"rid": "a"})).status == 401
        assert (await served.ask("POST", "/abort_request", {"abort_all": True}, ADMIN)).status == 200
        for engine in served.engines:
            await served.until(lambda engine=engine: bool(engine.aborts))  # type: ignore[misc]
            assert engine.aborts[0].rid == ""


@pytest.mark.parametrize("body", [b"", b"[]", b'{"rid": 5}', b'{"rid": [1]}', b'{"abort_all": "maybe"}'])
async def test_bad_bodies(body: bytes) -> None:
    async with cluster() as served:
        answer = await served.ask("POST", "/abort_request", body)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
