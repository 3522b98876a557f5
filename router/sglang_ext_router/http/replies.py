"""Build the router's own replies: heads, errors in OpenAI's shape, chunked encoding."""

from __future__ import annotations

from collections.abc import Sequence
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


MODEL_NOT_FOUND = "model_not_found"
SHOWN_NAME_CHARACTERS = 100
SHOWN_NAMES = 20


def error_json(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    """Return an error in OpenAI's shape; without a `code` the status is its code."""
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    if code == MODEL_NOT_FOUND:
        kind = "invalid_request_error"  # as OpenAI answers
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code or status}})


def unknown_model(name: str, served: Sequence[str]) -> str:
    """Return the message for a model that is not served; it lists the models that are."""
    shown = name if len(name) <= SHOWN_NAME_CHARACTERS else f"{name[:SHOWN_NAME_CHARACTERS]}..."
    return f"the model {shown!r} does not exist; served: {shown_names(served)}"


def shown_names(names: Sequence[str]) -> str:
    """Return the names of the served models for a message."""
    others = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"{', '.join(names[:SHOWN_NAMES])}{others}"


def head(status: int, headers: bytes) -> bytes:
    """Return status line, headers (each `name: value\\r\\n`) and the blank line."""
    return b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, REASONS.get(status, b"Status"), headers)


def complete(status: int, body: bytes, content_type: bytes, extra: bytes, keep_alive: bool, send_body: bool) -> bytes:
    """Return a complete reply; `extra` holds header lines to add, each ended by CRLF."""
    connection = b"" if keep_alive else b"connection: close\r\n"
    headers = b"content-type: %b\r\ncontent-length: %d\r\n%b%b" % (content_type, len(body), extra, connection)
    return head(status, headers) + (body if send_body else b"")


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def sse_error_event(status: int, message: str) -> bytes:
    """Return the event that ends a stream whose instance failed after the first byte."""
    return b"data: " + error_json(status, message) + b"\n\n"
