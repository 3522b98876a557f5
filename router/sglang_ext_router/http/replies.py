"""Build the router's own replies: heads, errors in OpenAI's shape, chunked encoding."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus

import orjson

REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
CHUNKED_END = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
MAX_SHOWN_BYTES = 16384  # of an instance's error
# What SGLang says where a prompt, or it and its reply, exceed the context or the KV cache; the last two have numbers.
_OVERFLOW = re.compile(
    r"longer than the model's context length|maximum context length|exceeds the model's context length"
    r"|prompt is too long"
    r"|Input length \((\d+) tokens\) exceeds the maximum allowed length \((\d+) tokens\)"
    r"|exceeds the maximum number of tokens: (\d+) > (\d+)"
)

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
CONTEXT_TOO_LONG = "context_length_exceeded"
SHOWN_NAME_CHARACTERS = 100
SHOWN_NAMES = 20


def error_json(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    """Return an error in OpenAI's shape; without a `code` the status is its code."""
    kind = _error_type(status)
    if code == MODEL_NOT_FOUND:
        kind = "invalid_request_error"  # as OpenAI answers
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code or status}})


def instance_error_json(status: int, body: bytes) -> bytes:
    """Return an instance's error in OpenAI's shape: SGLang has three of its own, and FastAPI one more.

    What does not fit a model's context has OpenAI's code for it, in the words of SGLang that clients look for.
    """
    try:
        given = orjson.loads(body)
    except orjson.JSONDecodeError:
        given = body.decode("utf-8", "replace")
    error = given.get("error", given) if isinstance(given, dict) else given
    fields: dict[str, object] = {"message": error, "type": None, "param": None, "code": None}
    if isinstance(error, dict):
        fields |= {"message": error.get("message", error.get("detail")), "type": error.get("type")}
        fields |= {"param": error.get("param"), "code": error.get("code")}
    message = fields["message"]
    if not isinstance(message, str):
        message = orjson.dumps(message).decode() if message else ""
    fields["message"] = message[:MAX_SHOWN_BYTES] or "an instance refused the request"
    if not isinstance(fields["type"], str):
        fields["type"] = _error_type(status)
    if fields["code"] is None:
        fields["code"] = status
    overflow = _OVERFLOW.search(message) if status == 400 else None
    if overflow is not None:
        fields["code"] = CONTEXT_TOO_LONG
        numbers = [number for number in overflow.groups() if number]
        if len(numbers) == 2 and numbers[0].isdigit():  # not in the words that clients know
            fields["message"] = context_too_long(int(numbers[0]), int(numbers[1]))
    return orjson.dumps({"error": fields})


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ANTHROPIC_STATUSES = {kind.encode(): status for status, kind in _ANTHROPIC_TYPES.items()}
_ANTHROPIC_TYPE = re.compile(rb'"error":\s*\{[^{}]*"type":\s*"([a-z_]+)"')
MESSAGES_PATH = b"/v1/messages"


def anthropic_error_json(status: int, error: bytes) -> bytes:
    """Return an error of OpenAI's shape in Anthropic's, as /v1/messages has it."""
    message = orjson.loads(instance_error_json(status, error))["error"]["message"]
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})


def anthropic_error_status(event: bytes) -> int:
    """Return the status that an error of Anthropic's shape stands for."""
    found = _ANTHROPIC_TYPE.search(event)
    return _ANTHROPIC_STATUSES.get(found[1], 500) if found is not None else 500


def path_error_json(
    target: bytes, status: int, message: str, param: str | None = None, code: str | None = None
) -> bytes:
    """Return an error in the shape that clients of this path or target read."""
    error = error_json(status, message, param, code)
    return anthropic_error_json(status, error) if target.startswith(MESSAGES_PATH) else error


def relayed_error_json(path: bytes, status: int, body: bytes) -> bytes:
    """Return an instance's error in the shape that clients of this path read."""
    return anthropic_error_json(status, body) if path == MESSAGES_PATH else instance_error_json(status, body)


def context_too_long(tokens: int, limit_tokens: int) -> str:
    """Return SGLang's sentence about a prompt that is longer than a model's context."""
    return f"The input ({tokens} tokens) is longer than the model's context length ({limit_tokens} tokens)."


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


def _error_type(status: int) -> str:
    return _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


class Unchunked:
    """Takes a chunked body apart while it comes, for a client of HTTP/1.0."""

    __slots__ = ("_left_bytes", "_size_line", "is_over")

    def __init__(self) -> None:
        self._left_bytes = 0  # of a chunk; below 0: of the line end behind it
        self._size_line = b""
        self.is_over = False

    def feed(self, data: bytes) -> bytes:
        """Return the body's bytes in `data`; what is no chunked encoding ends the body."""
        pieces = []
        at = 0
        while at < len(data) and not self.is_over:
            if self._left_bytes > 0:
                piece = data[at : at + self._left_bytes]
                pieces.append(piece)
                at += len(piece)
                self._left_bytes -= len(piece)
                if not self._left_bytes:
                    self._left_bytes = -2
            elif self._left_bytes < 0:
                at += 1
                self._left_bytes += 1
            else:
                end = data.find(b"\n", at)
                self._size_line += data[at:] if end < 0 else data[at:end]
                at = len(data) if end < 0 else end + 1
                if end >= 0:
                    self._begin_chunk()
        return b"".join(pieces)

    def _begin_chunk(self) -> None:
        line, self._size_line = self._size_line, b""
        try:
            self._left_bytes = int(line.partition(b";")[0], 16)
        except ValueError:
            self._left_bytes = 0
        self.is_over = self._left_bytes <= 0


class Recoded:
    """Changes a chunked reply while it comes: without `removed`, which stands within events, and with chunks or not."""

    __slots__ = ("_body", "_is_chunked", "_kept", "_removed")

    def __init__(self, removed: bytes, is_chunked: bool) -> None:
        self._body = Unchunked()
        self._removed = removed
        self._is_chunked = is_chunked
        self._kept = b""  # of an event that is not here whole, which may end within `removed`

    def feed(self, data: bytes) -> bytes:
        """Return what the client gets for these bytes of an instance's reply."""
        body = self._body.feed(data)
        is_over = self._body.is_over
        if self._removed:
            body = self._kept + body
            end = len(body) if is_over else body.rfind(b"\n\n") + 2 if b"\n\n" in body else 0
            self._kept = body[end:]
            body = body[:end].replace(self._removed, b"")
        if not self._is_chunked:
            return body
        return (chunk(body) if body else b"") + (CHUNKED_END if is_over else b"")
