"""What a client's request headers say, and which of them the instances see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_ext_router.prompt import BadRequestError
from sglang_ext_router.request_hints import PRIORITIES

SLO_HEADER = b"x-sgl-ttft-slo-ms"
PRIORITY_HEADER = b"x-sgl-priority"
MAX_REQUEST_ID_BYTES = 256
_FORWARDED = frozenset((b"traceparent", b"tracestate", b"baggage", SLO_HEADER, b"x-sgl-tps-slo", b"x-smg-routing-key"))


class ClientHeaders(NamedTuple):
    """Header lines for the instances, the client's own request id (may be empty), its deadline and priority."""

    forwarded: bytes
    request_id: bytes
    ttft_slo_s: float | None
    priority: str | None  # one of PRIORITIES


def read_headers(headers: Sequence[tuple[bytes, bytes]], authorization: bytes) -> ClientHeaders:
    """Read headers with lower-case names. `authorization`, if any, replaces the client's.

    BadRequestError for a deadline or a priority that is none.
    """
    forwarded = authorization
    request_id = b""
    slo_s: float | None = None
    priority: str | None = None
    for name, value in headers:
        if name in _FORWARDED:
            forwarded += b"%b: %b\r\n" % (name, value)
            if name == SLO_HEADER:
                slo_s = _slo_seconds(value)
        elif name == b"authorization":
            if not authorization:
                forwarded += b"authorization: %b\r\n" % value
        elif name == b"x-request-id" and len(value) <= MAX_REQUEST_ID_BYTES:
            request_id = value
        elif name == PRIORITY_HEADER:
            priority = _priority(value)
    return ClientHeaders(forwarded, request_id, slo_s, priority)


def _slo_seconds(value: bytes) -> float:
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = -1.0
    if not 0 < milliseconds < float("inf"):
        raise BadRequestError("x-sgl-ttft-slo-ms must be a positive number of milliseconds", "x-sgl-ttft-slo-ms")
    return milliseconds / 1000


def _priority(value: bytes) -> str:
    given = value.decode("latin-1").lower()
    if given not in PRIORITIES:
        raise BadRequestError(f"x-sgl-priority must be one of {', '.join(PRIORITIES)}", "x-sgl-priority")
    return given
