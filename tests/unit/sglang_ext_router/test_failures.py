"""One leg fails: tried again elsewhere before the first byte, told honestly after it, the other leg always freed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from support.event_loops import Complaints
from support.raw_client import BrokenReplyError
from support.router_process import Cluster, cluster
from support.running_time import running_s
from support.scripted_engine import (
    DONE,
    Script,
    ScriptedEngine,
    Turn,
    chunk,
    cut,
    event,
    hang,
    in_pieces,
    raw,
    reply,
    response,
    status,
    stream,
    stream_head,
)

PROMPT = {"text": "x"}
STREAMED = {"text": "x", "stream": True}


IN_TURN: dict[str, Any] = {"prefill_policy": "round_robin", "decode_policy": "round_robin"}
# As a real decode instance, this one has nothing to say before prefill is done.
AFTER_PREFILL = reply({"text": "ok"}, delay_s=0.04)


def legs(served: Cluster, leg: str) -> list[ScriptedEngine]:
    return served.short if leg == "prefill" else served.decode


def attempts(served: Cluster, leg: str) -> list[Any]:
    requests = [request for engine in legs(served, leg) for request in engine.requests]
    return sorted(requests, key=lambda request: request.at_s)


def drop_first_of(served: Cluster) -> Script:
    """The first request that any prefill instance gets is dropped."""

    async def play(turn: Turn) -> None:
        await (cut() if sum(len(engine.requests) for engine in served.short) == 1 else reply())(turn)

    return play


@pytest.mark.slow
@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize(
    "failure",
    [status(500), status(503), status(429), status(408), status(502), status(504), cut(), cut(b"HTTP/1.1 20")],
)
async def test_a_failed_attempt_is_repeated_elsewhere_in_a_new_room(leg: str, failure: Any) -> None:
    async with cluster(short=2, long=0, decode=2, **IN_TURN) as served:
        for engine in served.decode:
            engine.script = AFTER_PREFILL
        legs(served, leg)[0].script = failure
        for _ in range(4):
            answer = await served.ask("POST", "/generate", PROMPT)
            assert (answer.status, answer.json["text"]) == (200, "ok")
        tried = legs(served, leg)[0].requests
        assert tried
        rooms = [request.room for request in attempts(served, leg)]
        assert len(set(rooms)) == len(rooms) == 4 + len(tried)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_retries_are_bounded_and_the_last_error_is_relayed(leg: str) -> None:
    async with cluster(long=0, retry_max_retries=2, disable_circuit_breaker=True) as served:
        served.decode[0].script = AFTER_PREFILL
        (engine,) = legs(served, leg)
        engine.script = status(503, "I am full")
        answer = await served.ask("POST", "/generate", PROMPT)
        assert (answer.status, answer.json["error"]["message"]) == (503, "I am full")
        assert len(engine.requests) == 3


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_instance_that_always_drops_the_connection_gives_502(leg: str) -> None:
    async with cluster(long=0, retry_max_retries=1) as served:
        served.decode[0].script = AFTER_PREFILL
        (engine,) = legs(served, leg)
        engine.script = cut()
        answer = await served.ask("POST", "/generate", PROMPT)
        assert answer.status == 502
        assert answer.error["type"] == "server_error"
        assert len(engine.requests) == 2


async def test_retries_can_be_switched_off() -> None:
    async with cluster(disable_retries=True) as served:
        served.decode[0].script = status(503)
        assert (await served.ask("POST", "/generate", PROMPT)).status == 503
        assert len(served.decode[0].requests) == 1


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("code", [400, 401, 404, 422])
async def test_an_answer_is_relayed_with_its_body_and_the_other_leg_is_aborted(leg: str, code: int) -> None:
    async with cluster() as served:
        other = served.decode[0] if leg == "prefill" else served.short[0]
        other.script = hang()
        legs(served, leg)[0].script = status(code, "your fault")
        answer = await served.ask("POST", "/generate", PROMPT)
        assert (answer.status, answer.json) == (code, {"error": {"message": "your fault", "code": code}})
        await other.abort_of(other.requests[0].rid, 1.0)
        assert len(other.requests) == len(legs(served, leg)[0].requests) == 1


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("failure", [status(500, delay_s=0.05), cut()])
async def test_a_leg_that_hangs_is_aborted_when_the_other_fails(leg: str, failure: Any) -> None:
    async with cluster(retry_max_retries=0) as served:
        other = served.decode[0] if leg == "prefill" else served.short[0]
        other.script = hang()
        legs(served, leg)[0].script = failure
        answer = await served.ask("POST", "/generate", PROMPT)
        assert answer.status in {500, 502}
        await other.abort_of(other.requests[0].rid, 1.0)


async def test_an_error_as_the_first_event_is_repeated_elsewhere() -> None:
    error = event({"error": {"message": "KV transfer failed", "code": 500}})
    async with cluster(decode=2, **IN_TURN) as served:
        served.decode[0].script = stream(error, DONE)
        served.decode[1].script = stream(event({"text": "fine"}), DONE)
        for _ in range(4):
            answer = await served.ask("POST", "/generate", STREAMED)
            assert answer.chunks == (event({"text": "fine"}), DONE)
        assert served.decode[0].requests


@pytest.mark.parametrize("piece_bytes", [1, 3, 10, 25])
async def test_an_error_as_the_first_event_is_recognised_in_small_packets(piece_bytes: int) -> None:
    error = stream_head() + chunk(event({"error": {"message": "KV transfer failed", "code": 503}})) + b"0\r\n\r\n"
    async with cluster() as served:
        served.decode[0].plan(in_pieces(error, piece_bytes), stream(event({"text": "fine"}), DONE))
        answer = await served.ask("POST", "/generate", STREAMED)
        assert answer.chunks == (event({"text": "fine"}), DONE)


async def test_a_refusal_as_the_first_event_is_relayed() -> None:
    error = event({"error": {"message": "bad grammar", "code": 400}})
    async with cluster() as served:
        served.decode[0].script = stream(error, DONE)
        answer = await served.ask("POST", "/generate", STREAMED)
        assert (answer.status, answer.chunks) == (200, (error, DONE))
        assert len(served.decode[0].requests) == 1


@pytest.mark.parametrize("piece_bytes", [4, 1 << 20])
async def test_a_stream_that_breaks_between_events_ends_with_an_error_event(piece_bytes: int) -> None:
    first = event({"text": "a"})
    async with cluster() as served:
        start = stream_head() + chunk(first)

        async def play(turn: Turn) -> None:
            await turn.write_in_pieces(start, piece_bytes)
            await asyncio.sleep(0.05)
            turn.cut()

        served.decode[0].script = play
        async with await served.connect() as client:
            answer = await client.ask("POST", "/generate", STREAMED)
            assert answer.chunks is not None
            assert answer.chunks[0] == first
            assert answer.chunks[-1] == DONE
            told = json.loads(answer.chunks[1].removeprefix(b"data: "))
            assert set(told) == {"error"}
            assert told["error"]["code"] == 502
            served.decode[0].script = reply()
            assert (await client.ask("POST", "/generate", PROMPT)).status == 200  # the connection lives on
        assert len(served.short[0].requests) == 2


@pytest.mark.parametrize(
    "broken",
    [
        chunk(event({"text": "abc"}))[:-9],  # within an event
        chunk(event({"text": "abc"}))[:-1],  # within the chunk's end
        chunk(b"data: half an event"),  # chunk whole, event not
        b"40\r\ndata: a\n\n\r\n",  # looks like the end of an event, is the middle of a chunk
        b"4",
    ],
)
async def test_a_stream_whose_framing_is_lost_is_cut(broken: bytes) -> None:
    async with cluster() as served:
        served.decode[0].script = cut(stream_head() + chunk(event({"text": "a"})) + broken)
        async with await served.connect() as client:
            with pytest.raises(BrokenReplyError) as caught:
                await client.ask("POST", "/generate", STREAMED)
            assert caught.value.got.endswith(broken)


async def test_a_whole_reply_that_breaks_off_is_cut() -> None:
    async with cluster() as served:
        served.decode[0].script = cut(response(b'{"text": "half of it"}')[:-5])
        with pytest.raises(BrokenReplyError):
            await served.ask("POST", "/generate", PROMPT)


@pytest.mark.slow
async def test_prefill_failing_after_the_first_byte_does_no_harm() -> None:
    async with cluster() as served:
        served.short[0].script = status(500, delay_s=0.1)
        served.decode[0].script = stream(event(1), event(2), event(3), DONE, delay_s=0.1)
        answer = await served.ask("POST", "/generate", STREAMED)
        assert answer.chunks == (event(1), event(2), event(3), DONE)


@pytest.mark.slow
async def test_prefill_failing_after_the_first_byte_ends_a_request_of_several_sequences() -> None:
    async with cluster() as served:
        served.short[0].script = status(500, delay_s=0.15)
        served.decode[0].script = raw(stream_head() + chunk(event(1)), then="hang")
        body = {"text": ["a", "b"], "stream": True}
        answer = await served.ask("POST", "/generate", body)
        assert answer.chunks is not None
        assert answer.chunks[0] == event(1)
        assert b'"error"' in answer.chunks[1]
        base = served.decode[0].requests[0].rid
        for index in range(2):
            await served.decode[0].abort_of(f"{base}_{index}", 1.0)


async def test_no_instance_of_a_kind() -> None:
    async with cluster(decode=0) as served:
        answer = await served.ask("POST", "/generate", PROMPT)
        assert answer.status == 503
        assert "decode" in answer.error["message"] or "no instance" in answer.error["message"]
        assert served.upstream_requests() == 0


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_instance_that_cannot_be_reached_is_avoided(leg: str) -> None:
    async with cluster(
        short=2, decode=2, health_check_interval_secs=60.0, load_poll_interval_secs=60.0, **IN_TURN
    ) as served:
        await legs(served, leg)[0].stop()
        for _ in range(4):
            assert (await served.ask("POST", "/generate", PROMPT)).status == 200
        await served.until(lambda: not served.worker(legs(served, leg)[0].url).is_healthy)


async def test_an_only_instance_that_accepts_while_it_is_dying_is_lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(health_check_interval_secs=60.0, load_poll_interval_secs=60.0) as served:
        monkeypatch.setattr(served.router.prober, "check_now", lambda worker: None)  # it would be answered
        served.decode[0].plan(cut(), cut(), reply())
        assert (await served.ask("POST", "/generate", PROMPT)).status == 200


async def test_an_only_instance_that_dies_with_a_kept_connection_is_lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(health_check_interval_secs=60.0, load_poll_interval_secs=60.0) as served:
        assert (await served.ask("POST", "/generate", PROMPT)).status == 200
        monkeypatch.setattr(served.router.prober, "check_now", lambda worker: None)  # it would be answered
        served.decode[0].plan(cut(), cut(), cut(), reply())
        assert (await served.ask("POST", "/generate", PROMPT)).status == 200
        assert [request.is_reused for request in served.decode[0].requests] == [False, True, False, False, False]


async def test_an_instance_that_dies_and_comes_back() -> None:
    async with cluster(queue_timeout_secs=0.2) as served:
        await served.decode[0].stop()
        answer = await served.ask("POST", "/generate", PROMPT)
        assert answer.status == 503
        await served.decode[0].start()
        await served.until_ready()
        assert (await served.ask("POST", "/generate", PROMPT)).status == 200


async def test_requests_under_way_when_an_instance_is_killed_end_at_once() -> None:
    async with cluster(short=1, decode=2, retry_max_retries=1, queue_timeout_secs=0.2) as served:
        for engine in served.decode:
            engine.script = hang()
        asks = [asyncio.create_task(served.ask("POST", "/generate", PROMPT)) for _ in range(20)]
        await served.until(lambda: sum(len(engine.requests) for engine in served.decode) == 20)
        start_s = running_s()
        for engine in served.decode:
            await engine.stop()
        answers = await asyncio.gather(*asks)
        assert {answer.status for answer in answers} <= {502, 503}
        assert running_s() - start_s < 1.0


@pytest.mark.slow
async def test_the_attempt_after_a_failure_is_not_hit_by_the_first_ones_abort() -> None:
    """SGLang aborts by the beginning of an id, and the client's own id is the same in every attempt."""
    async with cluster(short=2) as served:
        for engine in served.short:
            engine.script = drop_first_of(served)
        decode = served.decode[0]
        decode.plan(hang(), stream(*[event(i) for i in range(10)], DONE, delay_s=0.1))
        answer = await served.ask("POST", "/generate", {**STREAMED, "rid": "my-own-request"})
        assert answer.chunks is not None
        assert answer.chunks[-1] == DONE
        first, second = decode.requests
        assert first.rid.startswith("my-own-request")
        assert first.room != second.room
        assert decode.aborts
        assert not [abort for abort in decode.aborts if second.rid.startswith(abort.rid)]


@pytest.mark.slow
async def test_the_whole_time_of_a_request_is_bounded() -> None:
    async with cluster(request_timeout_secs=0.3) as served:
        served.decode[0].script = hang()
        answer = await served.ask("POST", "/generate", PROMPT)
        assert answer.status == 504
        assert answer.error["type"] == "server_error"
        await served.decode[0].abort_of(served.decode[0].requests[0].rid, 1.0)


@pytest.mark.slow
async def test_the_whole_time_of_a_stream_is_bounded() -> None:
    async with cluster(request_timeout_secs=0.3) as served:
        served.decode[0].script = hang(stream_head() + chunk(event(1)))
        answer = await served.ask("POST", "/generate", STREAMED)
        assert answer.chunks is not None
        assert answer.chunks[0] == event(1)
        assert b'"error"' in answer.chunks[1]
        await served.decode[0].abort_of(served.decode[0].requests[0].rid, 1.0)


@pytest.mark.parametrize("which", ["_prefill_policy", "_decode_policy"])
async def test_a_policy_that_fails_keeps_no_place(which: str, complaints: Complaints) -> None:
    class Broken:
        def choose(self, *_: object) -> int:
            return 99

    async with cluster(max_concurrent_requests=1) as served:
        working = getattr(served.router.planner, which)
        setattr(served.router.planner, which, Broken())
        for _ in range(2):
            answer = await served.ask("POST", "/generate", PROMPT)
            assert (answer.status, answer.error["type"]) == (503, "server_error")
        assert served.router.requests_in_flight == 0
        assert len(complaints.messages) == 2
        complaints.messages.clear()
        setattr(served.router.planner, which, working)
        assert (await served.ask("POST", "/generate", PROMPT)).status == 200
