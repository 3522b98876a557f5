"""What a client's request headers say, and which of them the instances see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_ext_router.prompt import BadRequestError

SLO_HEADER = b"x-sgl-ttft-slo-ms"
MAX_REQUEST_ID_BYTES = 256
_FORWARDED = frozenset((b"traceparent", b"tracestate", b"baggage", SLO_HEADER, b"x-sgl-tps-slo", b"x-smg-routing-key"))


class ClientHeaders(NamedTuple):
    """Header lines for the instances, the client's own request id (may be empty), its deadline."""

    forwarded: bytes
    request_id: bytes
    ttft_slo_s: float | None


def read_headers(headers: Sequence[tuple[bytes, bytes]], authorization: bytes) -> ClientHeaders:
    """Read headers with lower-case names. `authorization`, if any, replaces the client's.

    BadRequestError for a deadline that is none.
    """
    forwarded = authorization
    request_id = b""
    slo_s: float | None = None
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
    return ClientHeaders(forwarded, request_id, slo_s)


def _slo_seconds(value: bytes) -> float:
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = -1.0
    if not 0 < milliseconds < float("inf"):
        raise BadRequestError("x-sgl-ttft-slo-ms must be a positive number of milliseconds", "x-sgl-ttft-slo-ms")
    return milliseconds / 1000
