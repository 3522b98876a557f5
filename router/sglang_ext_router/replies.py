"""Bytes of the replies that the router makes itself: heads, OpenAI-shaped errors, chunk framing."""

from __future__ import annotations

from http import HTTPStatus

import orjson

REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
CHUNKED_END = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


def error_json(status: int, message: str, param: str | None = None) -> bytes:
    """An error in OpenAI's shape."""
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})


def head(status: int, headers: bytes) -> bytes:
    """Status line and headers (each `name: value\\r\\n`), with the blank line."""
    return b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, REASONS.get(status, b"Status"), headers)


def complete(status: int, body: bytes, content_type: bytes, extra: bytes, keep_alive: bool, send_body: bool) -> bytes:
    """A whole reply; `extra` holds further header lines, each ended by CRLF."""
    connection = b"" if keep_alive else b"connection: close\r\n"
    headers = b"content-type: %b\r\ncontent-length: %d\r\n%b%b" % (content_type, len(body), extra, connection)
    return head(status, headers) + (body if send_body else b"")


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def sse_error_event(status: int, message: str) -> bytes:
    """The event that ends a stream whose instance failed after the first byte."""
    return b"data: " + error_json(status, message) + b"\n\n"
