"""The client's side of one request: its reply, relayed from an instance, joined from two, or the router's own error."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_ext_router.decide.pd_actions import FailureReason
from sglang_ext_router.http import replies
from sglang_ext_router.observe.request_record import RequestRecord
from sglang_ext_router.request.migration import ContinuedStream, Delivered, SentStream
from sglang_ext_router.request.reply_builder import BuildFailure, ReplyBuilder
from sglang_ext_router.request.routing import Route
from sglang_ext_router.request.scores import NO_SCORES, ScorePlan
from sglang_ext_router.request.upstream import UpstreamConnection

if TYPE_CHECKING:
    from sglang_ext_router.http.http1 import ClientConnection
    from sglang_ext_router.http.request_parser import Request

REASON_TEXT = {
    FailureReason.NO_INSTANCE: "no instance can serve the request now",
    FailureReason.CONNECT_FAILED: "an instance could not be reached",
    FailureReason.LEG_LOST: "an instance was lost while it served the request",
    FailureReason.LOST_AGAIN: "two instances were lost while they served the request, and it is not sent to a third",
    FailureReason.LEG_FAILED: "an instance failed while it served the request",
    FailureReason.QUEUE_TIMEOUT: "the request waited too long in the router's queue",
    FailureReason.RETRY_BUDGET: "an instance failed, and too many requests are tried again already",
    FailureReason.TIMEOUT: "the request took longer than the router allows",
}
NO_RETRY = b"x-should-retry: false\r\n"  # OpenAI's and Anthropic's libraries look for it
BROKEN_STATUS = 502  # of a reply that its instance did not end
_ERROR_EVENT = b'data: {"error"'
# What /v1/responses sends before there is a token, and in place of one.
_RESPONSE_CREATED = b"event: response.created"
_RESPONSE_FAILED = b"\nevent: response.failed\n"
# The same of /v1/messages.
_MESSAGE_START = b"event: message_start"
_MESSAGE_ERROR = b"\nevent: error\n"
_EVENT = b"\nevent: "
_EVENTS_BEFORE_TOKENS = 2
_ABORTED_OUTPUT = b'"finish_reason":{"type":"abort"'
_STREAM_HEADERS = b"content-type: text/event-stream\r\ncache-control: no-cache\r\n"
_CHUNKED_CODING = b"transfer-encoding: chunked\r\n"
_CODING_HEADER = re.compile(rb"(?<=\n)transfer-encoding:[^\n]*\n", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"(?<=\n)retry-after:[^\n]*\n", re.IGNORECASE)
_HOP_HEADER = re.compile(rb"(?<=\n)(?:connection|keep-alive):[^\n]*\n", re.IGNORECASE)


class Relay:
    """Writes one reply to one client; nothing is written once the client has it whole, or has left.

    What the client was sent is written into the request's record; `route` goes into the head of the reply.
    """

    __slots__ = (
        "_builder",
        "_chunk",
        "_client",
        "_continued",
        "_delivered",
        "_end",
        "_has_decode",
        "_id_end",
        "_is_http_11",
        "_is_own_head",
        "_joined",
        "_keeps_stream",
        "_kept_alive_s",
        "_path",
        "_record",
        "_scores",
        "_sent",
        "_shapes_errors",
        "_source",
        "is_building",
        "route",
        "when_built",
    )

    def __init__(
        self, client: ClientConnection, request: Request, builder: ReplyBuilder, record: RequestRecord
    ) -> None:
        self._record = record
        self._is_own_head = False  # the client was sent the head of a stream before there was one
        self._kept_alive_s = 0.0  # when it was last sent an empty line
        self._builder = builder
        self._client: ClientConnection | None = client  # None once it has its reply, or has left
        is_http_11 = request.is_http_11
        self._is_http_11 = is_http_11
        self._id_end = b""  # what follows the client's own ids at the instances; the client does not see it
        self._chunk: Callable[[bytes], bytes] = replies.chunk if is_http_11 else _unchanged
        self._end = replies.CHUNKED_END if is_http_11 else b""
        self._path = request.path
        self._shapes_errors = request.path != b"/generate"  # which keeps SGLang's own
        self._source: UpstreamConnection | None = None  # the leg whose bytes go to the client as they come
        self._keeps_stream = False  # so that other instances can go on with it
        self._sent: SentStream | None = None
        self._delivered: Delivered | None = None  # what the client had when an instance was lost
        self._continued: ContinuedStream | None = None
        self._joined: list[bytes | None] | None = None  # the instances' replies, where the client's is made of them
        self._scores: ScorePlan = NO_SCORES
        self._has_decode = True
        self.is_building = False  # the client's reply is being made, and will be written
        self.when_built: Callable[[], None] | None = None  # called when it is written, or the client has left
        self.route: Route | None = None  # None: the client is not shown it

    @property
    def is_open(self) -> bool:
        """Return whether the client still waits for its reply, or for the rest of it."""
        return self._client is not None

    def begin_attempt(
        self,
        request_id: bytes,
        route: Route | None,
        scores: ScorePlan,
        id_end: bytes = b"",
        *,
        has_decode: bool = True,
        keeps_stream: bool = False,
    ) -> None:
        """Prepare for the replies of a new attempt; parts of a joined reply from an earlier attempt are dropped.

        `id_end`: what was appended to the client's own ids. `has_decode`: whether there is a reply of decode to join.
        `keeps_stream`: other instances can go on with the stream.
        """
        self._keeps_stream = keeps_stream
        self._record.request_id = request_id
        self._id_end = id_end
        self.route = route
        self._scores = scores
        self._has_decode = has_decode
        if scores.is_joined:
            self._joined = [None, None]

    def lose_client(self, *, has_all: bool = False) -> None:
        """The client has left, with all of its reply or before it had that."""
        if self._client is not None:
            self._record.has_left = not has_all
        self._client = None
        self._on_built()

    # -- an instance's reply ----------------------------------------------------------------------------

    def take_head(self, leg: UpstreamConnection) -> None:
        """Send the leg's head with the router's own headers, and all of its body that is here.

        An error is kept until it is whole: clients get it in the shape of the path.
        """
        client = self._client
        if client is None:
            return
        self._record.status = leg.status
        if self._joined is not None and leg.status == 200:
            return
        head, rest = split_head(leg.raw)
        self._source = leg
        if self._is_own_head:
            self._continue_stream(leg, head, rest)
            return
        if (leg.status >= 400 and self._shapes_errors) or (leg.keeps_reply and (self._id_end or leg.status == 200)):
            if leg.is_complete:
                self.take_complete(leg)
            return
        sink: Callable[[bytes], None] = self.write
        kept = rest[2:]
        if is_chunked(head) and (self._id_end or not self._is_http_11):
            recoded = replies.Recoded(self._id_end, self._is_http_11)
            sink = self._write_recoded(recoded)
            rest = b"\r\n" + recoded.feed(kept)
            if not self._is_http_11:  # it ends with the connection
                head = _CODING_HEADER.sub(b"", head)
        leg.sink = sink
        self._keep(leg, kept)
        client.write(b"%b%b%b%b" % (head, self._own_headers(), client.reply_headers, rest))
        if leg.is_complete:  # here whole already
            leg.sink = None
            self._source = None
            self._finish()

    def write(self, data: bytes) -> None:
        """Write more of the relayed reply."""
        client = self._client
        if client is not None:
            client.write(data)

    def _write_recoded(self, recoded: replies.Recoded) -> Callable[[bytes], None]:
        def write(data: bytes) -> None:
            changed = recoded.feed(data)
            if changed:
                self.write(changed)

        return write

    def _keep(self, leg: UpstreamConnection, begun: bytes) -> None:
        """Keep the stream that a leg brings, if it may migrate; `begun` is here already."""
        if self._keeps_stream:
            self._sent = leg.sent = SentStream(self._path)
            leg.sent.keep(begun)

    def take_complete(self, leg: UpstreamConnection) -> None:
        """A leg's reply is here whole: if it was relayed, so is the client's; else it may be a half of a joined one."""
        if leg is self._source:
            self._source = None
            if leg.sink is not None:
                self._finish()
            elif self._is_own_head:
                error = replies.relayed_error_json(self._path, leg.status, reply_body(leg.raw))
                self._end_with_error(leg.status, error)
            else:
                self._answer_whole(leg)
        elif self._joined is not None and leg.status == 200:
            self._joined[leg.kind] = leg.raw
            self._join()

    def _answer_whole(self, leg: UpstreamConnection) -> None:
        """Answer with a leg's reply that was kept until it is whole."""
        client, self._client = self._client, None
        if client is None:
            return
        status, headers, body = leg.status, self._own_headers(), reply_body(leg.raw)
        if status >= 400 and self._shapes_errors:
            body = replies.relayed_error_json(self._path, status, body)
            for line in _RETRY_AFTER.findall(leg.raw[: leg.raw.index(b"\r\n\r\n") + 2]):
                headers += line
        client.respond(status, body.replace(self._id_end, b"") if self._id_end else body, extra=headers)

    # -- a stream that is kept alive --------------------------------------------------------------------

    def keep_alive(self, now_s: float, since_s: float, interval_s: float) -> None:
        """Send a stream's client an empty line if it was sent nothing for `interval_s`; `since_s`: its last bytes.

        Parsers of events skip it. What follows then follows within a reply of status 200, errors as an event.
        """
        client = self._client
        if client is None or self._joined is not None or now_s - max(since_s, self._kept_alive_s) < interval_s:
            return
        source = self._source
        if source is None:
            if not self._is_own_head:
                self._is_own_head = True
                coding = _CHUNKED_CODING if self._is_http_11 else b""
                client.write(replies.head(200, _STREAM_HEADERS + coding + self._id_header() + client.reply_headers))
        elif source.sink is None or source.status != 200 or not source.tail_ends_an_event():
            return
        client.write(self._chunk(b"\n"))
        self._kept_alive_s = now_s

    def _continue_stream(self, leg: UpstreamConnection, head: bytes, rest: bytes) -> None:
        """Send an instance's reply behind the head that the client has."""
        if is_chunked(head) and leg.status == 200:
            kept = rest[2:]  # behind the blank line
            is_changed = bool(self._id_end) or not self._is_http_11
            if self._continued is not None:
                sink = self._write_continued(self._continued, leg)
            elif is_changed:
                sink = self._write_recoded(replies.Recoded(self._id_end, self._is_http_11))
            else:
                sink = self.write
            leg.sink = sink
            self._keep(leg, kept)
            sink(kept)
        if leg.is_complete:
            self.take_complete(leg)
            leg.sink = None

    # -- a stream that goes on on other instances -------------------------------------------------------

    def delivered(self, leg: UpstreamConnection) -> Delivered | None:
        """Return what the client has of the stream of a lost leg; None where no other instance can go on behind it."""
        sent, continued = self._sent, self._continued
        if self._client is None or leg is not self._source or sent is None or not leg.tail_ends_an_event():
            return None
        if continued is not None and not continued.is_level:
            return None
        self._delivered = sent.delivered()
        return self._delivered

    def continue_stream(self) -> int:
        """Let the next attempt go on behind what the client has; return how many tokens that is."""
        delivered = self._delivered
        assert delivered is not None
        self._source = None
        self._is_own_head = True
        self._continued = ContinuedStream(self._path, delivered, self._id_end, self._is_http_11)
        return len(delivered.ids)

    def _write_continued(self, continued: ContinuedStream, leg: UpstreamConnection) -> Callable[[bytes], None]:
        def write(data: bytes) -> None:
            new = continued.feed(data)
            if continued.has_differed:
                self._end_differed(leg)
            elif new:
                self.write(new)

        return write

    def _end_differed(self, leg: UpstreamConnection) -> None:
        """The instances go on with another text than the client has."""
        message = REASON_TEXT[FailureReason.LEG_LOST]
        self._record.error = message
        self._end_with_error(BROKEN_STATUS, replies.path_error_json(self._path, BROKEN_STATUS, message))
        asyncio.get_running_loop().call_soon(leg.lose)

    def _end_with_error(self, status: int, error: bytes) -> None:
        """End a stream that the client has the head of by an error."""
        client = self._client
        if client is not None:
            self._record.status, self._record.is_broken = status, True
            client.write(self._last_events(error))
            self._finish()

    def _last_events(self, error: bytes) -> bytes:
        """Return what ends a stream by an error."""
        if self._path == replies.MESSAGES_PATH:
            return self._chunk(b"event: error\ndata: %b\n\n" % error) + self._end
        return self._chunk(b"data: %b\n\n" % error) + self._chunk(b"data: [DONE]\n\n") + self._end

    def _id_header(self) -> bytes:
        return b"x-request-id: %b\r\n" % self._record.request_id if self._record.request_id else b""

    def pause(self) -> None:
        """The client reads too slowly: read no more from the instance."""
        if self._source is not None:
            self._source.pause_reading()

    def resume(self) -> None:
        """The client reads again."""
        if self._source is not None:
            self._source.resume_reading()

    def _join(self) -> None:
        """Answer once all replies that are needed are there."""
        assert self._joined is not None
        prefill, decode = self._joined
        if prefill is None or self._client is None or (decode is None and self._has_decode):
            return
        self.is_building = True
        self._joined = None
        form = self._scores.form
        decode_body = None if decode is None else reply_body(decode)
        self._builder.build(form, reply_body(prefill), decode_body, self._answer, lambda: self._client is not None)

    def _answer(self, body: bytes | BuildFailure) -> None:
        """Send the joined reply, or the error where it cannot be made."""
        self.is_building = False
        if isinstance(body, BuildFailure):
            self.answer_error(503 if body is BuildFailure.OVERLOAD else 502, body.value)
            self._on_built()
            return
        client, self._client = self._client, None
        if client is not None:
            body = body.replace(self._id_end, b"") if self._id_end else body
            client.respond(200, body, extra=self._own_headers())
        self._on_built()

    def _on_built(self) -> None:
        when_built, self.when_built = self.when_built, None
        if when_built is not None:
            when_built()

    def _finish(self) -> None:
        """The whole reply is written: the connection is free, the request may still have a prefill leg."""
        client, self._client = self._client, None
        if client is not None:
            client.finish(client.keeps_alive)

    def _own_headers(self) -> bytes:
        return route_headers(self._record.request_id, self.route, self._record.queue_s)

    # -- the router's own ends of a reply ---------------------------------------------------------------

    def fail(self, status: int, reason: FailureReason, detail: str = "") -> None:
        """Reply that the request has failed. Client libraries must not send again what may end every instance."""
        text = f"{REASON_TEXT[reason]}: {detail}" if detail else REASON_TEXT[reason]
        self.answer_error(status, text, may_retry=reason is not FailureReason.LOST_AGAIN)

    def answer_error(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        may_retry: bool = True,
        retry_after_s: int = 1,
    ) -> None:
        """Reply with an error of the router's own, unless the client has left."""
        if self._is_own_head:
            self._record.error = message
            self._end_with_error(status, replies.path_error_json(self._path, status, message, param, code))
            return
        client, self._client = self._client, None
        if client is None:
            return
        self._record.status = status
        self._record.error = message
        headers = b"retry-after: %d\r\n" % retry_after_s if status in (429, 503) and may_retry else b""
        if not may_retry:
            headers += NO_RETRY
        if self._record.request_id:
            headers += b"x-request-id: %b\r\n" % self._record.request_id
        client.respond_error(status, message, param, headers, code)

    def emit_error_event(self, reason: FailureReason) -> None:
        """End a stream whose instance failed by an error event, or cut it where no event fits behind what was sent."""
        leg, self._source = self._source, None
        client = self._client
        if client is None:
            return
        if self._continued is None and (leg is None or not leg.tail_ends_an_event()):
            self.cut(reason)
            return
        self._break(reason)
        client.write(self._last_events(replies.path_error_json(self._path, BROKEN_STATUS, REASON_TEXT[reason])))
        self._finish()

    def cut(self, reason: FailureReason) -> None:
        """Close the client's connection, so that a half-sent reply does not look like a whole one."""
        source = self._source
        if not self._is_own_head and (self._joined is not None if source is None else source.sink is None):
            self._source = None
            self.answer_error(BROKEN_STATUS, REASON_TEXT[FailureReason.LEG_FAILED])  # nothing has been relayed
            return
        client, self._client = self._client, None
        self._source = None
        if client is not None:
            self._break(reason)
            client.abort()

    def _break(self, reason: FailureReason) -> None:
        self._record.is_broken = True
        self._record.status = BROKEN_STATUS
        self._record.error = REASON_TEXT[reason]


# -- reading an instance's reply --------------------------------------------------------------------------


def begins_unclear(leg: UpstreamConnection) -> bool:
    """Return whether too little of a stream is here to distinguish a token from an error."""
    body = leg.body_so_far()
    if body.startswith(_RESPONSE_CREATED):
        return _first_of_response(leg.raw) is None
    if body.startswith(_MESSAGE_START):
        return _event_behind(leg.raw, 1) is None
    if len(body) < len(_RESPONSE_CREATED) and (_RESPONSE_CREATED.startswith(body) or _MESSAGE_START.startswith(body)):
        return True
    return len(body) < len(_ERROR_EVENT) and _ERROR_EVENT.startswith(body)


def _first_of_response(raw: bytes) -> bytes | None:
    """The event of a response's stream that follows those which announce it; None if it is not here whole yet."""
    return _event_behind(raw, _EVENTS_BEFORE_TOKENS)


def _event_behind(raw: bytes, count: int) -> bytes | None:
    """The event that follows the first `count`; None if it is not here whole yet. Its JSON holds no line feed."""
    start = raw.find(b"\r\n\r\n")
    for _ in range(count + 1):
        start = raw.find(_EVENT, start + 1)
        if start < 0:
            return None
    end = raw.find(b"\n\n", start)
    return None if end < 0 else raw[start:end]


def stream_error_status(leg: UpstreamConnection) -> int | None:
    """Return the status of the failure that a streamed reply begins with; None if it begins with a token.

    The OpenAI endpoints report a failure as `{"error": ...}`, `/generate` as an output whose finish reason is abort.
    """
    body = leg.body_so_far()
    if body.startswith(_ERROR_EVENT):
        return find_int(leg.raw, b'"code":') or 500
    if body.startswith(_RESPONSE_CREATED):
        event = _first_of_response(leg.raw) or b""
        if not event.startswith(_RESPONSE_FAILED):
            return None
        # SGLang calls everything a server_error. What it refuses before it is queued has no usage.
        return 400 if b'"usage":null' in event else 500
    if body.startswith((_MESSAGE_START, _MESSAGE_ERROR[1:])):
        event = _event_behind(leg.raw, 1 if body.startswith(_MESSAGE_START) else 0) or b""
        return replies.anthropic_error_status(event) if event.startswith(_MESSAGE_ERROR) else None
    if _ABORTED_OUTPUT in leg.raw:
        return find_int(leg.raw, b'"status_code":') or 500
    return None


def end_error_status(end: bytes) -> int | None:
    """Return the status of the failure in the last events of a stream; None if it ended as it should."""
    if _ERROR_EVENT in end:
        return find_int(end, b'"code":') or 500
    if _MESSAGE_ERROR[1:] in end:
        return replies.anthropic_error_status(end)
    if _ABORTED_OUTPUT in end:
        return find_int(end, b'"status_code":')  # without one the output was aborted on demand
    return None


def split_head(raw: bytes) -> tuple[bytes, bytes]:
    """Split a reply into its head, without headers of the connection, and the rest from the blank line on."""
    split = raw.index(b"\r\n\r\n") + 2
    head = raw[:split]
    if b"onnection:" in head or b"eep-alive:" in head or b"EEP-ALIVE:" in head or b"ONNECTION:" in head:
        head = _HOP_HEADER.sub(b"", head)
    return head, raw[split:]


def is_chunked(head: bytes) -> bool:
    """Return whether the reply comes in chunks, which a client of HTTP/1.0 does not understand."""
    return b"\ntransfer-encoding:" in head.lower()


def find_int(data: bytes, key: bytes) -> int | None:
    """Return the value of the last `"key":<int>` in JSON text, without parsing all of it."""
    start = data.rfind(key)
    if start < 0:
        return None
    start += len(key)
    while start < len(data) and data[start] in b": ":
        start += 1
    end = start
    while end < len(data) and 48 <= data[end] <= 57:
        end += 1
    return int(data[start:end]) if end > start else None


def route_headers(request_id: bytes, route: Route | None, queue_s: float) -> bytes:
    """Return the router's own header lines; those of the route are left out where `route` is None."""
    if route is None:
        return b"x-request-id: %b\r\n" % request_id
    decode = route.decode
    return b"x-request-id: %b\r\nx-sglang-ext-class: %b\r\n%b%bx-sglang-ext-queue-ms: %d\r\n" % (
        request_id,
        (route.decision.class_name or route.decision.length_class).encode(),
        route.prefill.route_header,
        b"" if decode is None else decode.route_header,
        int(queue_s * 1000),
    )


def reply_body(raw: bytes) -> bytes:
    """Return the body of a whole reply, given as received."""
    end = raw.index(b"\r\n\r\n")
    body = raw[end + 4 :]
    return replies.Unchunked().feed(body) if is_chunked(raw[: end + 2]) else body


def _unchanged(data: bytes) -> bytes:
    return data
