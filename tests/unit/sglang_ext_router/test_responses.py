"""/v1/responses: SGLang's own names of ids, and a stream that begins before there is a token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.raw_client import request_bytes
from support.router_process import cluster
from support.scripted_engine import MODEL, chunk, in_pieces, reply, stream, stream_head

ASKED = {"model": MODEL, "input": "x"}
STREAMED = {**ASKED, "stream": True}
ONE: dict[str, Any] = {"long": 0, "disable_circuit_breaker": True}


def told(kind: str, **fields: Any) -> bytes:
    """An event as SGLang sends it."""
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


# What the client wrote is in the first event: it must not be taken for the next one.
CREATED = told("response.created", response={"instructions": "\nevent: response.failed\n\nevent: x\n"})
BEFORE = (CREATED, told("response.in_progress"))
TOKENS = (told("response.output_item.added"), told("response.output_text.delta", delta="a"), told("response.completed"))
REFUSED = told("response.failed", response={"error": {"message": "too long"}, "usage": None})
ABORTED = told("response.failed", response={"error": {"message": "transfer"}, "usage": {"input_tokens": 1}})


async def test_what_the_instances_get() -> None:
    async with cluster(**ONE) as served:
        for body, beginning in ((ASKED, "resp_"), ({**ASKED, "request_id": "mine", "rid": "x"}, "mine-resp_")):
            assert (await served.ask("POST", "/v1/responses", body)).status == 200
            prefill, decode = served.short[0].requests[-1], served.decode[0].requests[-1]
            assert prefill.body == decode.body
            assert "rid" not in decode.json
            assert decode.json["request_id"].startswith(beginning)
            assert decode.json["request_id"].endswith(f"{decode.room:016x}")
            assert decode.json["input"] == "x"


@pytest.mark.parametrize("field", ["previous_response_id", "conversation", "background"])
async def test_what_needs_a_reply_that_is_kept(field: str) -> None:
    async with cluster(**ONE) as served:
        given = True if field == "background" else "resp_1"
        answer = await served.ask("POST", "/v1/responses", {**ASKED, field: given})
        assert (answer.status, answer.error["param"]) == (400, field)
        assert served.upstream_requests() == 0


@pytest.mark.slow
@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 16])
async def test_a_stream_is_relayed_whole(piece_bytes: int) -> None:
    events = (*BEFORE, *TOKENS)
    async with cluster(**ONE) as served:
        served.short[0].script = stream(*events)
        data = stream_head() + b"".join(chunk(one) for one in events) + chunk(b"")
        served.decode[0].script = in_pieces(data, piece_bytes)
        answer = await served.ask("POST", "/v1/responses", STREAMED)
        assert (answer.status, answer.body) == (200, b"".join(events))


async def test_a_failure_before_the_first_token_is_tried_again() -> None:
    async with cluster(retry_max_retries=1, **ONE) as served:
        served.short[0].script = stream(*BEFORE, *TOKENS)
        served.decode[0].plan(stream(*BEFORE, ABORTED), stream(*BEFORE, *TOKENS))
        answer = await served.ask("POST", "/v1/responses", STREAMED)
        assert answer.body == b"".join((*BEFORE, *TOKENS))
        assert len(served.decode[0].requests) == 2


async def test_a_refusal_is_relayed_at_once() -> None:
    async with cluster(**ONE) as served:
        served.short[0].script = served.decode[0].script = stream(*BEFORE, REFUSED)
        answer = await served.ask("POST", "/v1/responses", STREAMED)
        assert (answer.status, answer.body) == (200, b"".join((*BEFORE, REFUSED)))
        assert len(served.decode[0].requests) == 1


async def test_a_client_that_leaves_aborts_by_the_responses_id() -> None:
    async with cluster(**ONE) as served:
        served.short[0].script = reply(delay_s=5.0)
        served.decode[0].script = reply(delay_s=5.0)
        async with await served.connect() as client:
            await client.send(request_bytes("POST", "/v1/responses", json.dumps(ASKED).encode()))
            (request,) = await served.decode[0].received(1)
            client.reset()
        await served.decode[0].abort_of(request.json["request_id"])
        await served.short[0].abort_of(request.json["request_id"])
