"""Whatever happens to a request, there is one answer that says what it means."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest

from sglang_ext.batch.endpoint import Answer, AnswerKind, EndpointClient, LoadUnknownError, ReportedLoad, count_tokens
from sglang_ext.batch.lines import BatchLine, LineOptions, parse_line
from sglang_ext.types import LengthClass
from support.faulty_endpoint import FaultyEndpoint


def prompt(text: str) -> BatchLine:
    return parse_line({"prompt": text}, LineOptions(model="m"))


def send(url: str, lines: Sequence[BatchLine], **options: float) -> list[Answer]:
    async def run() -> list[Answer]:
        async with EndpointClient(url, api_key="k", **options) as client:  # type: ignore[arg-type]
            return [await client.send(line) for line in lines]

    return asyncio.run(run())


def test_answers_by_status() -> None:
    expected = {
        "fine": (AnswerKind.OK, 200),
        "status=400": (AnswerKind.FINAL_ERROR, 400),
        "status=404": (AnswerKind.FINAL_ERROR, 404),
        "status=429 after": (AnswerKind.OVERLOADED, 429),
        "status=503": (AnswerKind.OVERLOADED, 503),
        "status=500": (AnswerKind.FAILED, 500),
        "status=502": (AnswerKind.FAILED, 502),
        "lost": (AnswerKind.FAILED, None),
    }
    with FaultyEndpoint() as endpoint:
        answers = send(endpoint.url + "/v1", [prompt(text) for text in expected])
        assert [(one.kind, one.status_code) for one in answers] == list(expected.values())
        assert answers[0].parsed["choices"][0]["text"] == "reply to fine"
        assert (answers[0].error, answers[0].request_id) == (None, "x-1")
        assert answers[1].error == "HTTP 400: as asked"
        assert answers[3].retry_after_s == 1.0
        assert answers[7].error is not None
        assert answers[7].error.startswith("connection lost")
        assert endpoint.headers[0]["x-sgl-priority"] == "low"
        assert endpoint.headers[0]["Authorization"] == "Bearer k"
        assert endpoint.headers[0]["Content-Type"] == "application/json"


@pytest.mark.slow
def test_no_connection_and_no_reply_in_time() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        (answer,) = send(f"http://127.0.0.1:{unused.getsockname()[1]}", [prompt("x")])
    assert (answer.kind, answer.status_code) == (AnswerKind.UNREACHABLE, None)
    with FaultyEndpoint() as endpoint:
        (answer,) = send(endpoint.url, [prompt("slow=5")], request_timeout_s=0.2)
    assert (answer.kind, answer.error) == (AnswerKind.FAILED, "no reply within 0.2 s")


def test_what_the_router_tells_of_its_load() -> None:
    told = {
        "length_boundary_tokens": 512,
        "queued": 0,
        "classes": {
            "short": {"online_wait_s": 0.05, "backlog_s": 0.4},
            "long": {"online_wait_s": None, "backlog_s": None},
        },
    }

    async def run(endpoint: FaultyEndpoint) -> None:
        async with EndpointClient(endpoint.url) as client:
            load = await client.load()
            assert load is not None
            assert load.length_boundary_tokens == 512
            assert load.classes == {
                LengthClass.SHORT: ReportedLoad(0.05, 0.4),
                LengthClass.LONG: ReportedLoad(None, 0.0),
            }
            for unknown in (None, {"classes": {}}, [1], {"length_boundary_tokens": 1, "classes": {"short": 3}}):
                endpoint.load = unknown  # type: ignore[assignment]
                with pytest.raises(LoadUnknownError):
                    await client.load()
            endpoint.stop()
            assert await client.load() is None
            assert not await client.is_reachable()
            endpoint.start()
            assert await client.is_reachable()

    with FaultyEndpoint(load=told) as endpoint:
        asyncio.run(run(endpoint))


def test_a_refused_key_is_noticed() -> None:
    async def accepted(url: str, key: str) -> bool:
        async with EndpointClient(url, api_key=key) as client:
            return await client.is_key_accepted()

    with FaultyEndpoint(api_key="right") as endpoint:
        assert asyncio.run(accepted(endpoint.url, "right"))
        assert not asyncio.run(accepted(endpoint.url, "wrong"))


@pytest.mark.parametrize("url", ["", "127.0.0.1:30000", "ftp://host", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must be a URL"):
        EndpointClient(url)


@pytest.mark.parametrize(
    ("parsed", "counts"),
    [
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 2}}, (3, 2)),
        ({"meta_info": {"prompt_tokens": 3, "completion_tokens": 2}}, (3, 2)),
        ([{"meta_info": {"prompt_tokens": 3}}, {"meta_info": {"completion_tokens": 2}}], (3, 2)),
        ({"usage": None}, (0, 0)),
        ("text", (0, 0)),
    ],
)
def test_tokens_of_a_reply(parsed: object, counts: tuple[int, int]) -> None:
    assert count_tokens(parsed) == counts
