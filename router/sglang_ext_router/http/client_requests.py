"""A client's request as the connection reads it, and what is asked about it before its body is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from sglang_ext_router.http.http1 import ClientConnection
    from sglang_ext_router.observe.access_log import AccessLog


HEADER_COST_BYTES = 200  # of the objects that hold one header line, beside its text


class Request:
    """One parsed request. Header names are lower case."""

    __slots__ = (
        "body",
        "headers",
        "is_http_11",
        "keep_alive",
        "max_body_bytes",
        "method",
        "path",
        "reply_headers",
        "size_bytes",
        "target",
    )

    def __init__(self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], is_http_11: bool) -> None:
        self.method = method
        self.target = target
        end = target.find(b"?")
        self.path = target if end < 0 else target[:end]
        self.headers = headers
        self.is_http_11 = is_http_11
        self.body: bytes | bytearray = b""
        self.keep_alive = False
        self.max_body_bytes = 0  # set by the gate
        self.reply_headers = b""  # further lines for the head of its reply, each ended by CRLF; set by the gate
        self.size_bytes = 0  # what it counts for among what is buffered

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Sizes in bytes, times in seconds."""

    max_header_bytes: int
    max_pipelined_bytes: int  # of one connection
    max_buffered_bytes: int  # of all connections: requests being received, waiting, or being served
    max_connections: int
    header_timeout_s: float
    body_timeout_s: float
    keep_alive_timeout_s: float
    write_timeout_s: float


class RequestRefusal(NamedTuple):
    """A reply to what is not served, behind the replies before it; the connection ends with it.

    `extra` holds further header lines, each ended by CRLF.
    """

    status: int
    message: str
    extra: bytes = b""


OVERLOADED = RequestRefusal(503, "too much is buffered for other requests; try again later", b"retry-after: 1\r\n")


class Gate(Protocol):
    """Decides about a request by its head alone."""

    def check_head(self, request: Request) -> RequestRefusal | None:
        """None lets it in, with its `max_body_bytes` set."""

    def refuse_body(self, request: Request) -> RequestRefusal:
        """The refusal of a body where none is taken."""


class Clients:
    """The open connections of one router process, and what they have buffered."""

    __slots__ = ("access_log", "buffered_bytes", "gate", "is_ending", "limits", "open", "refusals", "refused")

    def __init__(self, gate: Gate, limits: ConnectionLimits, access_log: AccessLog | None = None) -> None:
        self.access_log = access_log
        self.gate = gate
        self.limits = limits
        self.open: set[ClientConnection] = set()
        self.buffered_bytes = 0
        self.is_ending = False  # each connection closes behind its next reply
        self.refused = 0  # connections beyond `max_connections`
        self.refusals: dict[str, int] = {}  # status → requests that were refused by their head, or not whole

    def count_refusal(self, status: int) -> None:
        """A connection was refused, or a request on one, which ends it."""
        key = str(status)
        self.refusals[key] = self.refusals.get(key, 0) + 1
