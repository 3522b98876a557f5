"""The HTTP parser without a connection: bytes in, events out, and memory counted exactly."""

from __future__ import annotations

import pytest

from sglang_ext_router.http.request_parser import (
    LONG_BYTES,
    OVERLOADED,
    BufferedBytes,
    ContinueExpected,
    Event,
    Request,
    RequestParser,
    RequestRefusal,
)
from support.raw_client import request_bytes

REFUSED = RequestRefusal(401, "no")


class SecretGate:
    """Refuses `/secret` and takes bodies everywhere else."""

    def check_head(self, request: Request) -> RequestRefusal | None:
        request.max_body_bytes = 1 << 20
        return REFUSED if request.path == b"/secret" else None

    def refuse_body(self, request: Request) -> RequestRefusal:
        raise AssertionError


def new_parser(limit_bytes: int = 1 << 30) -> tuple[RequestParser, BufferedBytes]:
    buffered = BufferedBytes(limit_bytes)
    return RequestParser(SecretGate(), 8192, buffered), buffered


def events_of(parser: RequestParser) -> list[Event]:
    events = []
    while (event := parser.next_event()) is not None:
        events.append(event)
    return events


@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 20])
def test_requests_come_as_events_in_their_order(piece_bytes: int) -> None:
    parser, buffered = new_parser()
    data = request_bytes("POST", "/a?b=1", b"first") + request_bytes("POST", "/b", b"second")
    events: list[Event] = []
    for start in range(0, len(data), piece_bytes):
        parser.receive(data[start : start + piece_bytes])
        events += events_of(parser)
    first, second = events
    assert isinstance(first, Request)
    assert isinstance(second, Request)
    assert (first.path, bytes(first.body), second.path, bytes(second.body)) == (b"/a", b"first", b"/b", b"second")
    assert buffered.used_bytes == first.size_bytes + second.size_bytes == 11
    assert not parser.in_message


def test_nothing_is_parsed_after_a_refusal() -> None:
    parser, _ = new_parser()
    parser.receive(request_bytes("POST", "/a", b"x") + request_bytes("POST", "/secret", b"x"))
    parser.receive(request_bytes("POST", "/a", b"x"))
    served, refused = events_of(parser)
    assert isinstance(served, Request)
    assert refused is REFUSED


def test_a_client_that_waits_for_continue_is_an_event() -> None:
    parser, _ = new_parser()
    parser.receive(b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
    (expected,) = events_of(parser)
    assert isinstance(expected, ContinueExpected)
    parser.receive(b"{}")
    (request,) = events_of(parser)
    assert isinstance(request, Request)


def test_a_long_body_is_received_into_its_buffer() -> None:
    parser, buffered = new_parser()
    body = bytes(range(256)) * 1000
    data = request_bytes("POST", "/a", body)
    sent = len(data) - len(body) + 100
    parser.receive(data[:sent])
    parser.begin_long_body()
    assert parser.long_body is not None
    while (long_body := parser.long_body) is not None:
        assert events_of(parser) == []
        space = long_body.free_space()
        piece = data[sent : sent + min(len(space), 50_000)]
        space[: len(piece)] = piece
        del space
        sent += len(piece)
        parser.receive_long_body(len(piece))
    (request,) = events_of(parser)
    assert isinstance(request, Request)
    assert request.body == body
    assert buffered.used_bytes == len(body)
    parser.receive(request_bytes("POST", "/b", b"next"))
    assert len(events_of(parser)) == 1


@pytest.mark.parametrize("is_long", [False, True])
def test_forgetting_releases_all_memory(is_long: bool) -> None:
    parser, buffered = new_parser()
    data = request_bytes("POST", "/a", b"x") + request_bytes("POST", "/b", bytes(2 * LONG_BYTES))
    parser.receive(data[:-LONG_BYTES])  # the first request is an event that nobody fetches
    if is_long:
        parser.begin_long_body()
    assert buffered.used_bytes > LONG_BYTES // 2
    parser.forget()
    assert buffered.used_bytes == 0
    assert events_of(parser) == []


def test_a_head_and_a_body_beyond_the_memory_of_all_are_refused() -> None:
    parser, _ = new_parser(limit_bytes=1000)
    parser.receive(b"GET /a HTTP/1.1\r\n" + b"x: y\r\n" * 10)
    assert events_of(parser) == [OVERLOADED]
    parser, _ = new_parser(limit_bytes=1000)
    parser.receive(request_bytes("POST", "/a", bytes(1001)))
    assert events_of(parser) == [OVERLOADED]
