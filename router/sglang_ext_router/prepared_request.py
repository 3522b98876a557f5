"""A request as it was read: what the client asks for, in its headers and its body, and what the instances get of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_ext_router.http1 import Request
from sglang_ext_router.online_load import OFFLINE_PRIORITY
from sglang_ext_router.prompt import BadRequestError, dump, measure, parse_body
from sglang_ext_router.request_body import PRIORITIES, RequestHints, clean_body, with_bootstrap
from sglang_ext_router.scores import NO_SCORES, ScorePlan, plan_scores

SLO_HEADER = b"x-sgl-ttft-slo-ms"
PRIORITY_HEADER = b"x-sgl-priority"
MAX_REQUEST_ID_BYTES = 256
_LOGPROBS = b"logprob"  # what every field of log-probabilities has in its name
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


class PreparedRequest:
    """One request, parsed and checked; nothing of it changes but `prompt_tokens`, which a tokenizer may correct.

    BadRequestError where the client asks for something that cannot be served.
    """

    __slots__ = (
        "_clean",
        "_hints",
        "headers",
        "is_online",
        "path",
        "prompt",
        "prompt_tokens",
        "scores",
        "started_s",
        "target",
    )

    def __init__(self, request: Request, headers: ClientHeaders, started_s: float) -> None:
        body = parse_body(request.body)
        self.headers = headers
        self.is_online = headers.priority != OFFLINE_PRIORITY
        self.path = request.path
        self.target = request.target
        self.started_s = started_s
        self.prompt = prompt = measure(request.path, body)
        self.prompt_tokens = 0  # of the longest single prompt; known once the request is offered for admission
        if prompt.is_stream and not request.is_http_11:
            raise BadRequestError("a streamed reply needs HTTP/1.1", "stream")
        self.scores: ScorePlan = NO_SCORES if _LOGPROBS not in request.body else plan_scores(request.path, body)
        asked, raw, path = self.scores.body, request.body, request.path
        if asked is not None:  # SGLang is asked in its own words
            body, raw, path = asked, dump(asked), b"/generate"
            self.target = path
        self._clean = clean_body(raw, body)
        self._hints: RequestHints | None = None  # for requests with a deadline or a priority
        if headers.ttft_slo_s is not None or headers.priority is not None:
            self._hints = RequestHints(path, body, self._clean, headers.ttft_slo_s, headers.priority)

    @property
    def own_ids(self) -> str | list[str] | None:
        """The client's own ids of its sequences, under which it finds its reply."""
        return self._clean.request_ids

    def message(self, bootstrap_json: bytes, room: int, made_id: bytes, now_s: float) -> bytes:
        """What both instances get behind their own request heads: the last headers, and the body."""
        hints, headers = self._hints, self.headers
        clean = self._clean if hints is None else hints.body(now_s - self.started_s)
        body = with_bootstrap(clean, bootstrap_json, room, made_id)
        return b"%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n%b" % (
            headers.forwarded,
            headers.request_id or made_id,
            len(body),
            body,
        )


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
