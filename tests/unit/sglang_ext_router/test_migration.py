"""A stream whose instance is lost goes on on others: what these are sent, what the client gets, and when it ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sglang_ext.token_marks import MARKS_HEADER, mark
from support.raw_client import BrokenReplyError, request_bytes
from support.router_process import Cluster, cluster
from support.scripted_engine import (
    DONE,
    Script,
    ScriptedEngine,
    Turn,
    chunk,
    cut,
    event,
    hang,
    raw,
    reply,
    status,
    stream,
    stream_head,
)

pytestmark = pytest.mark.slow

IN_TURN: dict[str, Any] = {"prefill_policy": "round_robin", "decode_policy": "round_robin"}
BODY = {"prompt": "x", "stream": True, "max_tokens": 9}
PATH = "/v1/completions"
TEXTS = ["one", " two", " three", " four"]


def tokens(texts: list[str], rid: str = "r", first: int = 1, end: str | None = None) -> list[bytes]:
    """The events of a completion's stream, as an instance of this project's worker marks them."""
    events = []
    for number, text in enumerate(texts, first):
        choice = {"index": 0, "text": text, "finish_reason": None}
        body = json.dumps({"id": rid, "created": 5, "choices": [choice]})
        events.append(f"data: {body}{mark([number])}\n\n".encode())
    if end is not None:
        events.append(event({"id": rid, "created": 6, "choices": [{"index": 0, "text": "", "finish_reason": end}]}))
        events.append(DONE)
    return events


def lost_after(texts: list[str]) -> Script:
    return raw(stream_head() + b"".join(map(chunk, tokens(texts))), then="cut")


def text_of(body: bytes) -> str:
    lines = [line for line in body.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line[6:]).get("choices", []))


def marked(served: Cluster, *, is_ours: bool = True) -> Cluster:
    """Let the router know that all instances take the output of a request."""
    for worker in served.router.registry:
        worker.takes_output = is_ours
    return served


def first_asked(served: Cluster) -> tuple[ScriptedEngine, ScriptedEngine]:
    one, other = sorted(served.decode, key=lambda engine: engine.requests[0].at_s)
    return one, other


async def play(served: Cluster, first: Script, second: Script) -> None:
    """The first request of any decode instance plays one script, all later ones the other."""

    async def turn(turn: Turn) -> None:
        await (first if sum(len(engine.requests) for engine in served.decode) == 1 else second)(turn)

    for engine in served.decode:
        engine.script = turn


async def test_a_stream_goes_on_behind_what_its_client_has() -> None:
    async with cluster(decode=2, **IN_TURN) as served:
        marked(served)
        await play(served, lost_after(TEXTS[:2]), stream(*tokens(["one two three", " four"], "r2", end="stop")))
        answer = await served.ask("POST", PATH, {**BODY, "custom_params": {"a": 1}})
        assert answer.status == 200
        assert text_of(answer.body) == "".join(TEXTS)
        assert b"error" not in answer.body
        assert b"r2" not in answer.body
        assert answer.body.endswith(DONE)
        before, after = (engine.requests[0] for engine in first_asked(served))
        assert before.header(MARKS_HEADER) == "1"
        assert before.json["custom_params"] == {"a": 1}
        assert after.json["custom_params"] == {"a": 1, "sglang_ext_output_ids": [1, 2]}
        assert after.json["prompt"] == "x"
        assert after.room != before.room
        metrics = served.router.metrics
        assert (metrics.migrated, metrics.retries) == (1, {"decode": 1})
        assert [(key[2], key[3]) for key in metrics.requests] == [(200, "ok")]


async def test_an_only_instance_that_accepts_while_it_is_dying_loses_a_stream_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster(health_check_interval_secs=60.0, load_poll_interval_secs=60.0) as served:
        marked(served)
        monkeypatch.setattr(served.router.prober, "check_now", lambda worker: None)  # it would be answered
        rest = stream(*tokens(["one two three", " four"], "r2", end="stop"))
        served.decode[0].plan(lost_after(TEXTS[:2]), cut(), rest)
        answer = await served.ask("POST", PATH, BODY)
        assert text_of(answer.body) == "".join(TEXTS)
        assert b"error" not in answer.body


async def test_an_only_instance_that_answers_again_loses_a_stream_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(health_check_interval_secs=60.0, load_poll_interval_secs=60.0, max_migrations=2) as served:
        marked(served)
        monkeypatch.setattr(served.router.prober, "check_now", lambda worker: None)
        rest = stream(*tokens(["one two three", " four"], "r3", end="stop"))
        served.decode[0].plan(lost_after(TEXTS[:1]), lost_after(["one two"]), rest)
        answer = await served.ask("POST", PATH, BODY)
        assert text_of(answer.body) == "".join(TEXTS)
        assert b"error" not in answer.body


async def test_the_clients_own_id_stays_in_all_events() -> None:
    async with cluster(decode=2, **IN_TURN) as served:
        marked(served)
        await play(served, lost_after_named, rest_named)
        answer = await served.ask("POST", PATH, {**BODY, "rid": "mine"})
        assert text_of(answer.body) == "".join(TEXTS)
        ids = {json.loads(line[6:])["id"] for line in answer.body.split(b"\n") if line.startswith(b"data: {")}
        assert ids == {"mine"}


async def test_a_client_of_http_1_0_gets_one_stream_without_chunks() -> None:
    async with cluster(decode=2, **IN_TURN) as served:
        marked(served)
        await play(served, lost_after(TEXTS[:2]), stream(*tokens(["one two three", " four"], "r2", end="stop")))
        client = await served.connect()
        request = request_bytes("POST", PATH, json.dumps(BODY).encode()).replace(b"HTTP/1.1", b"HTTP/1.0")
        await client.send(request)
        body = await client.rest()
        assert b"chunked" not in body
        assert text_of(body) == "".join(TEXTS)
        assert body.endswith(DONE)


async def lost_after_named(turn: Turn) -> None:
    events = tokens(TEXTS[:2], turn.request.rid)
    await raw(stream_head() + b"".join(map(chunk, events)), then="cut")(turn)


async def rest_named(turn: Turn) -> None:
    await stream(*tokens(["one two three", " four"], turn.request.rid, end="stop"))(turn)


async def test_it_goes_on_once_and_then_ends_with_an_error_event() -> None:
    async with cluster(decode=3, **IN_TURN) as served:
        marked(served)
        await play(served, lost_after(TEXTS[:2]), lost_after(TEXTS[:3]))
        answer = await served.ask("POST", PATH, BODY)
        assert text_of(answer.body) == "one two three"
        assert b'"error"' in answer.body
        assert answer.body.endswith(DONE)
        assert sum(len(engine.requests) for engine in served.decode) == 2
        assert served.router.metrics.migrated == 1


async def test_it_may_go_on_more_often() -> None:
    async with cluster(decode=3, max_migrations=2, **IN_TURN) as served:
        marked(served)

        async def turn(turn: Turn) -> None:
            count = sum(len(engine.requests) for engine in served.decode)
            scripts = [lost_after(TEXTS[:2]), lost_after(TEXTS[:3]), stream(*tokens(TEXTS, end="stop"))]
            await scripts[count - 1](turn)

        for engine in served.decode:
            engine.script = turn
        answer = await served.ask("POST", PATH, BODY)
        assert served.router.metrics.migrated == 2
        assert text_of(answer.body) == "".join(TEXTS)
        last = max((request for engine in served.decode for request in engine.requests), key=lambda one: one.at_s)
        assert last.json["custom_params"] == {"sglang_ext_output_ids": [1, 2, 3]}


@pytest.mark.parametrize("options", [{"max_migrations": 0}, {"disable_retries": True}])
async def test_it_can_be_switched_off(options: dict[str, Any]) -> None:
    async with cluster(decode=2, **options, **IN_TURN) as served:
        marked(served)
        await play(served, lost_after(TEXTS[:2]), stream(*tokens(TEXTS, end="stop")))
        answer = await served.ask("POST", PATH, BODY)
        assert text_of(answer.body) == "one two"
        assert b'"error"' in answer.body
        requests = [request for engine in served.decode for request in engine.requests]
        assert len(requests) == 1
        assert (requests[0].header(MARKS_HEADER) is None) == (options == {"max_migrations": 0})


async def test_what_cannot_go_on_ends_with_an_error_event() -> None:
    for further in ({"logprobs": 1}, {"regex": "a"}, {"n": 1, "frequency_penalty": 1}):
        async with cluster(decode=2, **IN_TURN) as served:
            marked(served)
            await play(served, lost_after(TEXTS[:2]), stream(*tokens(TEXTS, end="stop")))
            answer = await served.ask("POST", PATH, {**BODY, **further})
            assert b'"error"' in answer.body
            assert sum(len(engine.requests) for engine in served.decode) == 1


async def test_instances_that_take_no_output_generate_it_again_where_it_is_greedy() -> None:
    """Stock SGLang: no event is marked. Another text than the client has ends the stream."""
    unmarked = [one.rstrip().rstrip(b" \t") + b"\n\n" for one in tokens(TEXTS[:2])]
    first = raw(stream_head() + b"".join(map(chunk, unmarked)), then="cut")
    async with cluster(decode=2, **IN_TURN) as served:
        await play(served, first, stream(*tokens(TEXTS, end="stop")))
        answer = await served.ask("POST", PATH, {**BODY, "temperature": 0})
        assert text_of(answer.body) == "".join(TEXTS)
        assert "custom_params" not in first_asked(served)[1].requests[0].json
    async with cluster(decode=2, **IN_TURN) as served:
        await play(served, first, stream(*tokens(TEXTS, end="stop")))
        answer = await served.ask("POST", PATH, {**BODY, "temperature": 0.5})
        assert b'"error"' in answer.body
        assert served.router.metrics.migrated == 0
    async with cluster(decode=2, **IN_TURN) as served:
        await play(served, first, stream(*tokens(["one", " ten", "x"], end="stop")))
        answer = await served.ask("POST", PATH, {**BODY, "temperature": 0})
        assert text_of(answer.body) == "one two"
        assert b'"error"' in answer.body
        assert answer.body.endswith(DONE)


@pytest.mark.parametrize("failure", [status(400, "too long"), status(500), reply({"error": "x"}, 503)])
async def test_an_answer_of_the_others_that_is_no_stream_is_an_error_event(failure: Script) -> None:
    async with cluster(decode=2, retry_max_retries=1, **IN_TURN) as served:
        marked(served)
        await play(served, lost_after(TEXTS[:2]), failure)
        answer = await served.ask("POST", PATH, BODY)
        assert text_of(answer.body) == "one two"
        assert b'"error"' in answer.body
        assert answer.body.endswith(DONE)
        assert [(key[3]) for key in served.router.metrics.requests] == ["error_after"]


async def test_half_an_event_is_the_end() -> None:
    async with cluster(decode=2, **IN_TURN) as served:
        marked(served)
        first = raw(stream_head() + chunk(tokens(TEXTS[:1])[0]) + chunk(tokens(TEXTS[1:2])[0])[:40], then="cut")
        await play(served, first, stream(*tokens(TEXTS, end="stop")))
        with pytest.raises(BrokenReplyError):
            await served.ask("POST", PATH, BODY)


async def test_an_undivided_instance_is_survived_too() -> None:
    async with cluster(short=0, long=0, decode=0, plain=2) as served:
        marked(served)
        for engine in served.plain:
            engine.script = turn_of(served.plain)
        answer = await served.ask("POST", PATH, BODY)
        assert text_of(answer.body) == "".join(TEXTS)
        assert served.router.metrics.migrated == 1


def turn_of(engines: list[ScriptedEngine]) -> Script:
    async def turn(turn: Turn) -> None:
        is_first = sum(len(engine.requests) for engine in engines) == 1
        await (lost_after(TEXTS[:2]) if is_first else stream(*tokens(TEXTS, end="stop")))(turn)

    return turn


async def test_the_stream_waits_for_its_only_instance_to_return() -> None:
    async with cluster(decode=1, queue_timeout_secs=5.0) as served:
        marked(served)
        (engine,) = served.decode
        engine.script = lost_after(TEXTS[:2])
        task = asyncio.ensure_future(served.ask("POST", PATH, BODY))
        await served.until(lambda: bool(engine.requests))
        await engine.stop()
        await asyncio.sleep(0.3)
        assert not task.done()
        engine.script = stream(*tokens(TEXTS, end="stop"))
        await engine.start()
        assert text_of((await task).body) == "".join(TEXTS)


async def test_a_client_that_leaves_meanwhile_frees_the_others() -> None:
    async with cluster(decode=2, **IN_TURN) as served:
        marked(served)
        await play(served, lost_after(TEXTS[:2]), hang())
        client = await served.connect()
        await client.send(request_bytes("POST", PATH, json.dumps(BODY).encode()))
        await served.until(lambda: all(engine.requests for engine in served.decode))
        other = first_asked(served)[1]
        client.close()
        await served.until_idle()
        await other.abort_of(other.requests[0].rid, 1.0)
