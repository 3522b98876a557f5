"""One generation request, from the client's bytes to the last byte of the reply.

`begin` → `_admit` → `start` → `_send_legs` is the path of a request; what happens then is decided by the
state machine `PDExchange`, whose actions `_act` carries out.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from sglang_ext.policy.admission import Admission
from sglang_ext.policy.pd_actions import (
    RELAY_DECODE,
    AbortLeg,
    Absolve,
    Actions,
    Blame,
    CloseClient,
    Credit,
    EmitErrorEvent,
    Exclude,
    FailureReason,
    Finished,
    Leg,
    RelayBody,
    RelayHead,
    ReplyError,
    ScheduleRetry,
    StartLegs,
)
from sglang_ext.policy.pd_exchange import PDExchange
from sglang_ext.types import RequestState
from sglang_ext_router import replies
from sglang_ext_router.logprobs import join, reply_body, wants_input_logprobs
from sglang_ext_router.prompt import (
    BadRequestError,
    CleanBody,
    Prompt,
    abort_ids,
    clean_body,
    find_int,
    measure,
    parse_body,
    with_bootstrap,
)
from sglang_ext_router.routing import NoInstanceError, Route

if TYPE_CHECKING:
    from sglang_ext_router.http1 import ClientConnection, Request
    from sglang_ext_router.router import Router
    from sglang_ext_router.upstream import UpstreamConnection
    from sglang_ext_router.workers import Worker

SLO_HEADER = b"x-sgl-ttft-slo-ms"
# Client headers that the instances may see.
_FORWARDED = frozenset(
    {
        b"authorization",
        b"traceparent",
        b"tracestate",
        b"baggage",
        SLO_HEADER,
        b"x-sgl-tps-slo",
        b"x-smg-routing-key",
    }
)
_ERROR_EVENT = b'data: {"error"'
_HOP_HEADER = re.compile(rb"(?<=\n)(?:connection|keep-alive):[^\n]*\n", re.IGNORECASE)
_PREFILL, _DECODE = Leg.PREFILL, Leg.DECODE

_REASON_TEXT = {
    FailureReason.NO_INSTANCE: "no instance can serve the request now",
    FailureReason.CONNECT_FAILED: "an instance could not be reached",
    FailureReason.LEG_LOST: "an instance was lost while it served the request",
    FailureReason.LEG_FAILED: "an instance failed while it served the request",
    FailureReason.QUEUE_TIMEOUT: "the request waited too long in the router's queue",
    FailureReason.DEADLINE: "the deadline passed before the first token",
    FailureReason.TIMEOUT: "the request took longer than the router allows",
}


class Exchange:
    """Serves one request; also its client connection's Call and its legs' owner."""

    __slots__ = (
        "_attempt_started_s",
        "_cached_tokens",
        "_clean",
        "_client",
        "_exact_tokens",
        "_excluded",
        "_forwarded",
        "_has_first_byte",
        "_is_queued",
        "_joined",
        "_legs",
        "_machine",
        "_prefill_open_tokens",
        "_prompt",
        "_prompt_tokens",
        "_relaying",
        "_request",
        "_request_id",
        "_room_id",
        "_route",
        "_router",
        "_slo_s",
        "_status",
        "_timer",
        "queue_s",
        "started_s",
    )

    def __init__(self, router: Router, client: ClientConnection, request: Request, now_s: float) -> None:
        self._router = router
        self._client: ClientConnection | None = client
        self._request = request
        self.started_s = now_s
        self.queue_s = 0.0
        self._attempt_started_s = now_s
        self._status = 0
        self._legs: list[UpstreamConnection | None] = [None, None]
        self._excluded: tuple[set[int], set[int]] | None = None
        self._route: Route | None = None
        self._relaying: UpstreamConnection | None = None
        self._has_first_byte = False
        self._is_queued = False
        self._joined: list[bytes | None] | None = None  # both replies, where they must be joined
        self._timer: asyncio.TimerHandle | None = None
        self._slo_s: float | None = None
        self._room_id = b""
        self._request_id = b""
        self._forwarded = b""
        self._exact_tokens: int | None = None
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._prefill_open_tokens = 0
        self._clean: CleanBody
        self._prompt: Prompt
        self._machine: PDExchange

    # -- the path of a request --------------------------------------------------------------------------

    def begin(self) -> None:
        """Read the body and find out how large the prompt is."""
        request = self._request
        try:
            self._read_headers(request)
            body = parse_body(request.body)
            self._prompt = prompt = measure(request.path, body)
            self._check_servable(prompt)
            self._clean = clean_body(request.body, body)
            if wants_input_logprobs(request.path, body):
                self._joined = [None, None]
        except BadRequestError as error:
            self._refuse(400, str(error), "bad_request", error.param)
            return
        router = self._router
        self._machine = PDExchange(
            router.max_retries, is_stream=prompt.is_stream, is_single_sequence=prompt.sequence_count == 1
        )
        if router.tokeniser is not None and router.planner.needs_exact_count(prompt):
            router.metrics.tokenised += 1
            router.tokeniser.count(prompt.texts, self._on_counted)
        else:
            self._admit()

    def _on_counted(self, counts: list[int] | None) -> None:
        if self._client is None:  # left in the meantime
            return
        if counts:
            # The chat template's own tokens are what the estimator adds to an empty prompt.
            self._exact_tokens = max(counts) + int(self._router.planner.estimator.overhead_tokens)
        self._admit()

    def _admit(self) -> None:
        """Refuse what cannot fit anywhere, then wait for a place."""
        router = self._router
        planner = router.planner
        tokens = self._exact_tokens if self._exact_tokens is not None else planner.estimate_tokens(self._prompt)
        self._prompt_tokens = max(1, tokens)
        limit = router.registry.longest_prompt_tokens
        if limit is not None and tokens > limit:
            message = f"the prompt has about {tokens} tokens, more than the {limit} that a decode instance can hold"
            self._refuse(400, message, "too_long")
            return
        deadline_s = None if self._slo_s is None else self.started_s + self._slo_s
        outcome = router.admission.offer(self, self.started_s, deadline_s)
        if outcome is Admission.ADMITTED:
            self.start(self.started_s)
        elif outcome is Admission.QUEUED:
            self._is_queued = True
        else:
            self._refuse(
                429,
                "too many requests are waiting; try again later",
                "queue_full",
                extra=b"retry-after: 1\r\n",
            )

    def start(self, now_s: float) -> None:
        """There is a place: send the request."""
        self._is_queued = False
        self.queue_s = now_s - self.started_s
        self._router.running[self] = None
        self._act(self._machine.start())

    def _send_legs(self, attempt: int) -> None:
        """Choose the instances and send the same body to both."""
        router = self._router
        prompt = self._prompt
        now_s = router.loop.time()
        excluded = self._excluded or _NONE_EXCLUDED
        try:
            self._route = route = router.planner.route(prompt, self._prompt_tokens, excluded[0], excluded[1], now_s)
        except NoInstanceError as error:
            router.refused_for(self, str(error))
            self._act(self._machine.on_no_instance(attempt))
            return
        if prompt.samples_per_prompt > 1 and not (
            route.prefill.serves_parallel_samples and route.decode.serves_parallel_samples
        ):
            self._machine.on_no_instance(attempt)
            self._answer(400, "n > 1 needs instances started by `sglang-ext worker`", "n")
            self._end(RequestState.FAILED)
            return
        self._attempt_started_s = now_s
        room = router.rooms.take(prompt.sequence_count)
        self._room_id = room_id = b"%016x" % room
        body = with_bootstrap(self._clean, route.prefill.bootstrap_json, room, room_id)
        rest = b"%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n%b" % (
            self._forwarded,
            self._request_id or room_id,
            len(body),
            body,
        )
        target = self._request.target
        self._cached_tokens = route.decision.cached_tokens
        self._take_load(route, now_s)
        legs = self._legs
        legs[_PREFILL] = router.pool(route.prefill).start(
            self, _PREFILL, attempt, route.prefill.request_head(target) + rest
        )
        legs[_DECODE] = router.pool(route.decode).start(
            self, _DECODE, attempt, route.decode.request_head(target) + rest
        )
        if prompt.is_stream and (leg := legs[_PREFILL]) is not None:
            leg.tells_body = True  # which may be an error
        if self._joined is not None:
            self._joined = [None, None]
            for leg in legs:
                if leg is not None:
                    leg.keeps_reply = True

    # -- what the legs and the client say ---------------------------------------------------------------

    def on_leg_head(self, leg: UpstreamConnection) -> None:
        actions = self._machine.on_leg_head(leg.kind, leg.attempt, leg.status)
        if actions:
            self._act(actions)

    def on_leg_body(self, leg: UpstreamConnection) -> None:
        if leg.status != 200:
            return
        if self._prompt.is_stream:
            body = leg.body_so_far()
            if len(body) < len(_ERROR_EVENT) and _ERROR_EVENT.startswith(body):
                leg.body_told = False  # not enough to tell: ask again when more is there
                return
            status = _error_status(body, leg.raw)
            if status is not None:
                self._act(self._machine.on_error_event(leg.kind, leg.attempt, status))
                return
        if leg.kind is _PREFILL:
            return
        self._first_byte(leg)
        self._act(self._machine.on_first_body(_DECODE, leg.attempt))

    def on_leg_complete(self, leg: UpstreamConnection) -> None:
        kind = leg.kind
        is_relayed = leg is self._relaying
        if kind is _PREFILL and leg.status == 200 and self._router.planner.wants_token_count():
            self._learn(leg.raw)
        actions = self._machine.on_leg_complete(kind, leg.attempt)
        if is_relayed:
            self._relaying = None
            self._client_served()
        elif self._joined is not None and leg.status == 200:
            self._joined[kind] = leg.raw
            self._join()
        self._act(actions)
        if self._legs[kind] is leg:
            self._legs[kind] = None

    def on_leg_lost(self, leg: UpstreamConnection) -> None:
        self._legs[leg.kind] = None
        self._router.prober.check_now(leg.worker)
        machine = self._machine
        event = machine.on_leg_lost if leg.has_connected else machine.on_leg_connect_failed
        self._act(event(leg.kind, leg.attempt))

    def replace_leg(self, lost: UpstreamConnection, fresh: UpstreamConnection) -> None:
        if self._legs[lost.kind] is lost:
            self._legs[lost.kind] = fresh

    def relay(self, data: bytes) -> None:
        client = self._client
        if client is not None:
            client.write(data)

    def on_client_gone(self) -> None:
        self._client = None
        if self._is_queued:
            self._router.admission.remove(self)
            self._is_queued = False
        machine = getattr(self, "_machine", None)
        if machine is not None:
            self._router.count_abort("client_gone")
            self._act(machine.on_client_gone())

    def on_retry_timer(self, attempt: int) -> None:
        self._timer = None
        self._act(self._machine.on_retry_timer(attempt))

    def on_timeout(self) -> None:
        """The request has used up `--request-timeout-secs`."""
        self._router.count_abort("timeout")
        self._act(self._machine.on_timeout())

    def on_queue_timeout(self) -> None:
        """It waited in the queue until its deadline or the queue's limit."""
        self._is_queued = False
        self._refuse(408, _REASON_TEXT[FailureReason.QUEUE_TIMEOUT], "queue_timeout")

    def pause(self) -> None:
        if self._relaying is not None:
            self._relaying.pause_reading()

    def resume(self) -> None:
        if self._relaying is not None:
            self._relaying.resume_reading()

    # -- carrying out actions ---------------------------------------------------------------------------

    def _act(self, actions: Actions) -> None:
        if actions is RELAY_DECODE:
            self._relay_head(_DECODE)
            return
        for action in actions:
            match action:
                case Credit():
                    self._leg_ended(action.leg, is_success=True)
                case Finished():
                    self._end(action.state)
                case StartLegs():
                    self._send_legs(action.attempt)
                case RelayHead():
                    self._relay_head(action.leg)
                case RelayBody():
                    pass  # follows the head by itself
                case Blame():
                    self._leg_failed(action.leg)
                case Absolve():
                    self._leg_ended(action.leg, is_success=False)
                case AbortLeg():
                    self._abort_leg(action.leg)
                case Exclude():
                    self._exclude(action.leg)
                case ScheduleRetry():
                    self._schedule_retry(action.backoff_index)
                case ReplyError():
                    self._answer(action.status, _REASON_TEXT[action.reason])
                case EmitErrorEvent():
                    self._emit_error_event(action.reason)
                case CloseClient():
                    self._cut_client()

    def _relay_head(self, kind: Leg) -> None:
        """Send the leg's head with the router's own headers, and all of its body that is here."""
        leg = self._legs[kind]
        client = self._client
        if leg is None or client is None:
            return
        raw = leg.raw
        split = raw.index(b"\r\n\r\n") + 2
        self._status = leg.status
        if self._joined is not None and leg.status == 200:
            return
        head = raw[:split]
        if b"onnection:" in head or b"eep-alive:" in head or b"EEP-ALIVE:" in head or b"ONNECTION:" in head:
            head = _without_hop_headers(head)
        if not self._request.is_http_11 and b"\ntransfer-encoding:" in head.lower():
            self._answer(400, "a streamed reply needs HTTP/1.1")
            self._act(self._machine.on_client_gone())
            return
        leg.is_relaying = True
        self._relaying = leg
        connection = b"" if client.keeps_alive else b"connection: close\r\n"
        client.write(b"%b%b%b%b" % (head, self._reply_headers(), connection, raw[split:]))
        if leg.is_complete:  # here whole already
            leg.is_relaying = False
            self._relaying = None
            self._client_served()

    def _join(self) -> None:
        """Answer once both replies are there."""
        assert self._joined is not None
        prefill, decode = self._joined
        client = self._client
        if prefill is None or decode is None or client is None:
            return
        self._client = None
        try:
            body = join(reply_body(prefill), reply_body(decode))
        except (ValueError, KeyError, TypeError):
            self._status = 502
            client.respond_error(502, "the instances' replies do not match")
            return
        client.respond(200, body, extra=self._reply_headers())

    def _first_byte(self, leg: UpstreamConnection) -> None:
        router = self._router
        route = self._route
        assert route is not None
        elapsed_s = router.loop.time() - self.started_s
        self._has_first_byte = True
        one = router.metrics.of(route.decision.length_class)
        one.ttft_s.observe(elapsed_s)
        if self._slo_s is not None:
            if elapsed_s <= self._slo_s:
                one.slo_met += 1
            else:
                one.slo_missed += 1
        # The KV has arrived: no longer promised but used, which the instance's next report will say.
        decode = route.decode
        decode.reserved_tokens -= self._prompt_tokens
        decode.reported_free_kv_tokens -= self._prompt_tokens

    def _client_served(self) -> None:
        """The whole reply is written: the connection is free, the request may still have a prefill leg."""
        client, self._client = self._client, None
        if client is not None:
            client.finish(client.keeps_alive)

    def _reply_headers(self) -> bytes:
        request_id = self._request_id or self._room_id
        route = self._route
        if route is None or self._router.config.disable_route_headers:
            return b"x-request-id: %b\r\n" % request_id
        return b"x-request-id: %b\r\nx-sglang-ext-class: %b\r\n%b%bx-sglang-ext-queue-ms: %d\r\n" % (
            request_id,
            route.decision.length_class.encode(),
            route.prefill.route_header,
            route.decode.route_header,
            int(self.queue_s * 1000),
        )

    def _answer(self, status: int, message: str, param: str | None = None) -> None:
        """Reply with an error of the router's own."""
        client, self._client = self._client, None
        self._status = status
        if client is not None:
            extra = b"retry-after: 1\r\n" if status in (429, 503) else b""
            client.respond_error(status, message, param, extra + b"x-request-id: %b\r\n" % (self._request_id or b"-"))

    def _refuse(self, status: int, message: str, reason: str, param: str | None = None, extra: bytes = b"") -> None:
        """Answer a request that never was admitted."""
        router = self._router
        router.count_refusal(reason)
        router.metrics.count_request(self._request.path.decode(), "none", status)
        client, self._client = self._client, None
        if client is not None:
            client.respond_error(status, message, param, extra + b"x-request-id: %b\r\n" % (self._request_id or b"-"))

    def _emit_error_event(self, reason: FailureReason) -> None:
        leg, self._relaying = self._relaying, None
        client = self._client
        if client is None:
            return
        if leg is None or not leg.tail_ends_an_event():
            self._cut_client()
            return
        event = replies.sse_error_event(502, _REASON_TEXT[reason])
        client.write(replies.chunk(event) + replies.chunk(b"data: [DONE]\n\n") + replies.CHUNKED_END)
        self._client_served()

    def _cut_client(self) -> None:
        if self._joined is not None:
            self._answer(502, _REASON_TEXT[FailureReason.LEG_FAILED])  # nothing has been relayed
            return
        client, self._client = self._client, None
        self._relaying = None
        if client is not None:
            client.abort()

    def _abort_leg(self, kind: Leg) -> None:
        """Close the leg and tell the instance, which would notice a closed connection only later."""
        leg, self._legs[kind] = self._legs[kind], None
        if leg is None:
            return
        leg.abort()  # it may stay `_relaying`: its last bytes tell whether an error event fits behind them
        prompt = self._prompt
        ids = abort_ids(self._clean, self._room_id, prompt.sequence_count, prompt.samples_per_prompt)
        self._router.aborter.abort(leg.worker, ids)

    def _exclude(self, kind: Leg) -> None:
        if self._excluded is None:
            self._excluded = (set(), set())
        worker = self._worker(kind)
        self._excluded[kind].add(worker.id)
        self._router.count_retry("prefill" if kind is _PREFILL else "decode")

    def _schedule_retry(self, backoff_index: int) -> None:
        router = self._router
        delay_s = router.retry_policy.backoff_s(backoff_index, router.draw())
        self._timer = router.loop.call_later(delay_s, self.on_retry_timer, self._machine.attempt)

    def _end(self, state: RequestState) -> None:
        """Count the request and let the next one in."""
        router = self._router
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        route = self._route
        now_s = router.loop.time()
        label = "none"
        if route is not None:
            length_class = route.decision.length_class
            label = str.__str__(length_class)
            one = router.metrics.of(length_class)
            one.duration_s.observe(now_s - self.started_s)
            one.queue_s.observe(self.queue_s)
            one.new_tokens.observe(route.decision.new_tokens)
        router.metrics.count_request(
            self._request.path.decode(), label, 499 if state is RequestState.ABORTED else self._status
        )
        if self._client is not None:  # relayed nothing, answered nothing: prefill's half of a joined reply failed
            self._answer(502, _REASON_TEXT[FailureReason.LEG_FAILED])
        router.ended(self, now_s)

    # -- load and learning ------------------------------------------------------------------------------

    def _worker(self, kind: Leg) -> Worker:
        assert self._route is not None
        return self._route.prefill if kind is _PREFILL else self._route.decode

    def _take_load(self, route: Route, now_s: float) -> None:
        router = self._router
        sequences = self._prompt.sequence_count
        new_tokens = route.decision.new_tokens * sequences
        self._prefill_open_tokens = new_tokens
        self._has_first_byte = False
        prefill, decode = route.prefill, route.decode
        prefill.in_flight += 1
        prefill.pending_tokens += new_tokens
        decode.in_flight += 1
        decode.reserved_tokens += self._prompt_tokens
        if router.registry.suspects:
            prefill.breaker.on_start(now_s)
            decode.breaker.on_start(now_s)
        router.planner.learn_route(self._prompt, prefill)
        if router.siblings.shares_prefixes and self._prompt.hashes:
            router.siblings.tell_prefix(prefill.url, self._prompt.hashes)
        metrics = router.metrics
        metrics.prompt_tokens += self._prompt_tokens
        sent = metrics.worker_requests
        sent[prefill.url] = sent.get(prefill.url, 0) + 1
        sent[decode.url] = sent.get(decode.url, 0) + 1
        metrics.cached_tokens += route.decision.cached_tokens
        if route.is_spilled:
            metrics.spilled += 1

    def _leg_ended(self, kind: Leg, is_success: bool) -> None:
        """Verdict without blame; each started leg gets exactly one verdict, so this is where its load ends."""
        worker = self._worker(kind)
        suspects = self._router.registry.suspects
        if suspects and worker.id in suspects:
            now_s = self._router.loop.time()
            if is_success:
                worker.breaker.on_success(now_s, self._attempt_started_s)
                if worker.breaker.is_quiet:
                    suspects.discard(worker.id)
            else:
                worker.breaker.on_abandoned()
        self._release_load(kind, worker, is_success)

    def _leg_failed(self, kind: Leg) -> None:
        worker = self._worker(kind)
        worker.breaker.on_failure(self._attempt_started_s, self._router.loop.time())
        if self._router.registry.contains(worker):
            self._router.registry.suspects.add(worker.id)
        self._router.count_worker_failure(worker)
        self._release_load(kind, worker, False)

    def _release_load(self, kind: Leg, worker: Worker, is_success: bool) -> None:
        worker.in_flight -= 1
        if kind is _DECODE:
            if not self._has_first_byte:
                worker.reserved_tokens -= self._prompt_tokens
            return
        worker.pending_tokens -= self._prefill_open_tokens
        if not is_success:
            self._router.planner.learn_not_prefilled(self._prompt, worker, self._cached_tokens, self._prompt_tokens)

    def _learn(self, raw: bytes) -> None:
        """The prefill instance's reply says how many tokens the prompt had."""
        tokens = find_int(raw, b'"prompt_tokens":')
        if tokens:
            self._router.planner.learn_tokens(self._prompt, tokens)

    def _check_servable(self, prompt: Prompt) -> None:
        if prompt.is_stream and not self._request.is_http_11:
            raise BadRequestError("a streamed reply needs HTTP/1.1", "stream")

    def _read_headers(self, request: Request) -> None:
        forwarded = b""
        request_id = b""
        for name, value in request.headers:
            if name in _FORWARDED:
                forwarded += b"%b: %b\r\n" % (name, value)
                if name == SLO_HEADER:
                    self._slo_s = _slo_seconds(value)
            elif name == b"x-request-id" and len(value) <= 256:
                request_id = value
        self._forwarded = forwarded
        self._request_id = request_id


_NONE_EXCLUDED: tuple[set[int], set[int]] = (set(), set())


def _error_status(first_chunk: bytes, raw: bytes) -> int | None:
    """Status of the failure that a streamed reply begins with; None if it begins with a token.

    The OpenAI endpoints say it as `{"error": ...}`, `/generate` also as an output whose finish reason is abort.
    """
    if first_chunk.startswith(_ERROR_EVENT):
        return find_int(raw, b'"code":') or 500
    if b'"finish_reason":{"type":"abort"' in raw:
        return find_int(raw, b'"status_code":') or 500
    return None


def _slo_seconds(value: bytes) -> float:
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = -1.0
    if not 0 < milliseconds < float("inf"):
        raise BadRequestError("x-sgl-ttft-slo-ms must be a positive number of milliseconds", "x-sgl-ttft-slo-ms")
    return milliseconds / 1000


def _without_hop_headers(head: bytes) -> bytes:
    return _HOP_HEADER.sub(b"", head)
