"""Reading the start of an instance's reply, and turning its head into the client's."""

from __future__ import annotations

import re

from sglang_ext_router.prompt import find_int
from sglang_ext_router.routing import Route
from sglang_ext_router.upstream import UpstreamConnection

_ERROR_EVENT = b'data: {"error"'
_ABORTED_OUTPUT = b'"finish_reason":{"type":"abort"'
_HOP_HEADER = re.compile(rb"(?<=\n)(?:connection|keep-alive):[^\n]*\n", re.IGNORECASE)


def begins_unclear(leg: UpstreamConnection) -> bool:
    """Whether too little of a stream is here to tell a token from an error."""
    body = leg.body_so_far()
    return len(body) < len(_ERROR_EVENT) and _ERROR_EVENT.startswith(body)


def stream_error_status(leg: UpstreamConnection) -> int | None:
    """Status of the failure that a streamed reply begins with; None if it begins with a token.

    The OpenAI endpoints say it as `{"error": ...}`, `/generate` as an output whose finish reason is abort.
    """
    if leg.body_so_far().startswith(_ERROR_EVENT):
        return find_int(leg.raw, b'"code":') or 500
    if _ABORTED_OUTPUT in leg.raw:
        return find_int(leg.raw, b'"status_code":') or 500
    return None


def split_head(raw: bytes) -> tuple[bytes, bytes]:
    """A reply's head without the blank line and without headers of the connection; the rest."""
    split = raw.index(b"\r\n\r\n") + 2
    head = raw[:split]
    if b"onnection:" in head or b"eep-alive:" in head or b"EEP-ALIVE:" in head or b"ONNECTION:" in head:
        head = _HOP_HEADER.sub(b"", head)
    return head, raw[split:]


def is_chunked(head: bytes) -> bool:
    """Whether the reply comes in chunks, which a client of HTTP/1.0 does not know."""
    return b"\ntransfer-encoding:" in head.lower()


def route_headers(request_id: bytes, route: Route | None, queue_s: float) -> bytes:
    """The router's own header lines: what was decided, unless `route` is None."""
    if route is None:
        return b"x-request-id: %b\r\n" % request_id
    return b"x-request-id: %b\r\nx-sglang-ext-class: %b\r\n%b%bx-sglang-ext-queue-ms: %d\r\n" % (
        request_id,
        route.decision.length_class.encode(),
        route.prefill.route_header,
        route.decode.route_header,
        int(queue_s * 1000),
    )
