"""The replies that the router makes itself."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_router.http import replies


@given(status=st.integers(400, 599), message=st.text(max_size=50), param=st.none() | st.just("n"))
def test_errors_have_openais_shape(status: int, message: str, param: str | None) -> None:
    if message != message.encode("utf-8", "ignore").decode():
        return
    error = json.loads(replies.error_json(status, message, param))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["message"], error["param"], error["code"]) == (message, param, status)
    assert error["type"].endswith("_error")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (408, "timeout_error"),
        (418, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_the_type_of_an_error_follows_its_status(status: int, kind: str) -> None:
    assert json.loads(replies.error_json(status, "m"))["error"]["type"] == kind


def test_a_whole_reply() -> None:
    assert replies.complete(200, b"ab", b"text/plain", b"x: y\r\n", True, True) == (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\nx: y\r\n\r\nab"
    )


def test_a_reply_without_its_body_keeps_the_length() -> None:
    assert replies.complete(404, b"abc", b"text/plain", b"", False, False) == (
        b"HTTP/1.1 404 Not Found\r\ncontent-type: text/plain\r\ncontent-length: 3\r\nconnection: close\r\n\r\n"
    )


@given(data=st.binary(min_size=1, max_size=5000))
def test_a_chunk(data: bytes) -> None:
    size, _, rest = replies.chunk(data).partition(b"\r\n")
    assert int(size, 16) == len(data)
    assert rest == data + b"\r\n"


@pytest.mark.parametrize("target", [b"/generate", b"/v1/chat/completions", b"/v1/messages?beta=true"])
def test_an_error_is_one_line_so_that_it_fits_an_event(target: bytes) -> None:
    error = replies.path_error_json(target, 502, "lost\nit")
    assert b"\n" not in error
    assert "lost\nit" in json.loads(error)["error"]["message"]
    assert ("type" in json.loads(error)) == target.startswith(b"/v1/messages")
