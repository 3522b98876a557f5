"""One generation request, from the client's bytes to the last byte of the reply.

`begin` → `_admit` → `start` → `_send_legs` is the path of a request; what happens then is decided by the
state machine `PDExchange`, whose actions `_act` carries out.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from sglang_ext.policy.routing.admission import Admission
from sglang_ext.policy.routing.pd_actions import (
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
from sglang_ext.policy.routing.pd_protocol import PDExchange
from sglang_ext.types import RequestState
from sglang_ext_router import replies
from sglang_ext_router.account import AttemptAccount
from sglang_ext_router.client_headers import ClientHeaders, read_headers
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
from sglang_ext_router.relaying import begins_unclear, is_chunked, route_headers, split_head, stream_error_status
from sglang_ext_router.request_hints import RequestHints
from sglang_ext_router.routing import NoInstanceError
from sglang_ext_router.services import Services
from sglang_ext_router.upstream import UpstreamConnection

if TYPE_CHECKING:
    from sglang_ext_router.http1 import ClientConnection, Request

logger = logging.getLogger(__name__)

_PREFILL, _DECODE = Leg.PREFILL, Leg.DECODE

_REASON_TEXT = {
    FailureReason.NO_INSTANCE: "no instance can serve the request now",
    FailureReason.CONNECT_FAILED: "an instance could not be reached",
    FailureReason.LEG_LOST: "an instance was lost while it served the request",
    FailureReason.LEG_FAILED: "an instance failed while it served the request",
    FailureReason.QUEUE_TIMEOUT: "the request waited too long in the router's queue",
    FailureReason.TIMEOUT: "the request took longer than the router allows",
}


class Exchange:
    """Serves one request; also its client connection's Call and its legs' owner."""

    __slots__ = (
        "_account",
        "_clean",
        "_client",
        "_exact_tokens",
        "_excluded",
        "_headers",
        "_hints",
        "_is_queued",
        "_joined",
        "_legs",
        "_machine",
        "_prompt",
        "_prompt_tokens",
        "_relaying",
        "_request",
        "_room_id",
        "_services",
        "_status",
        "_timer",
        "queue_s",
        "started_s",
    )

    def __init__(self, services: Services, client: ClientConnection, request: Request, now_s: float) -> None:
        self._services = services
        self._client: ClientConnection | None = client  # None once it has its reply, or has left
        self._request = request
        self.started_s = now_s
        self.queue_s = 0.0
        self._headers = _NO_HEADERS
        self._prompt: Prompt
        self._clean: CleanBody
        self._hints: RequestHints | None = None  # for requests with a deadline or a priority
        self._exact_tokens: int | None = None
        self._prompt_tokens = 0
        self._is_queued = False
        self._machine: PDExchange | None = None
        self._account: AttemptAccount | None = None  # of the latest attempt
        self._room_id = b""
        self._legs: list[UpstreamConnection | None] = [None, None]
        self._relaying: UpstreamConnection | None = None
        self._joined: list[bytes | None] | None = None  # both replies, where they must be joined
        self._excluded: tuple[set[int], set[int]] | None = None  # prefill and decode that have failed this request
        self._timer: asyncio.TimerHandle | None = None
        self._status = 0

    # -- the path of a request --------------------------------------------------------------------------

    def begin(self) -> None:
        """Read the body and find out how large the prompt is."""
        request = self._request
        try:
            self._headers = read_headers(request.headers, self._services.authorization)
            body = parse_body(request.body)
            self._prompt = prompt = measure(request.path, body)
            if prompt.is_stream and not request.is_http_11:
                raise BadRequestError("a streamed reply needs HTTP/1.1", "stream")
            self._clean = clean_body(request.body, body)
            slo_s, priority = self._headers.ttft_slo_s, self._headers.priority
            if slo_s is not None or priority is not None:
                self._hints = RequestHints(request.path, body, self._clean, slo_s, priority)
            if wants_input_logprobs(request.path, body):
                self._joined = [None, None]
        except BadRequestError as error:
            self._refuse(400, str(error), "bad_request", error.param)
            return
        services = self._services
        self._machine = PDExchange(
            services.max_retries, is_stream=prompt.is_stream, is_single_sequence=prompt.sequence_count == 1
        )
        if services.tokeniser is not None and services.planner.needs_exact_count(prompt):
            services.metrics.tokenised += 1
            services.tokeniser.count(prompt.texts, self._on_counted)
        else:
            self._admit()

    def _on_counted(self, counts: list[int] | None) -> None:
        if self._client is None:  # left in the meantime
            return
        if counts:
            # The chat template's own tokens are what the estimator adds to an empty prompt.
            self._exact_tokens = max(counts) + int(self._services.planner.estimator.overhead_tokens)
        self._admit()

    def _admit(self) -> None:
        """Refuse what cannot fit anywhere, then wait for a place."""
        services = self._services
        planner = services.planner
        tokens = self._exact_tokens if self._exact_tokens is not None else planner.estimate_tokens(self._prompt)
        self._prompt_tokens = max(1, tokens)
        limit = services.registry.longest_prompt_tokens
        if limit is not None and tokens > limit:
            message = f"the prompt has about {tokens} tokens, more than the {limit} that a decode instance can hold"
            self._refuse(400, message, "too_long")
            return
        slo_s = self._headers.ttft_slo_s
        deadline_s = None if slo_s is None else self.started_s + slo_s
        outcome = services.admission.offer(self, self.started_s, deadline_s)
        if outcome is Admission.ADMITTED:
            self.start(self.started_s)
        elif outcome is Admission.QUEUED:
            self._is_queued = True
        else:
            self._refuse(429, "too many requests are waiting; try again later", "queue_full")

    def start(self, now_s: float) -> None:
        """There is a place: send the request."""
        self._is_queued = False
        self.queue_s = now_s - self.started_s
        self._services.running[self] = None
        assert self._machine is not None
        self._act(self._machine.start())

    def _send_legs(self, machine: PDExchange, attempt: int) -> None:
        """Choose the instances and send the same body to both."""
        services = self._services
        prompt = self._prompt
        now_s = services.loop.time()
        excluded = self._excluded or _NONE_EXCLUDED
        try:
            route = services.planner.route(prompt, self._prompt_tokens, excluded[0], excluded[1], now_s)
        except NoInstanceError as error:
            services.metrics.count(services.metrics.refused, "no_instance")
            logger.warning("no instance for a request: %s", error)
            self._act(machine.on_no_instance(attempt))
            return
        if prompt.samples_per_prompt > 1 and not (
            route.prefill.serves_parallel_samples and route.decode.serves_parallel_samples
        ):
            self._answer(400, "n > 1 needs instances started by `sglang-ext worker`", "n")
            self._act(machine.on_no_instance(attempt))
            return
        self._account = AttemptAccount(services, route, prompt, self._prompt_tokens, now_s)
        room = services.rooms.take(prompt.sequence_count)
        self._room_id = room_id = b"%016x" % room
        hints = self._hints
        clean = self._clean if hints is None else hints.body(now_s - self.started_s)
        body = with_bootstrap(clean, route.prefill.bootstrap_json, room, room_id)
        headers = self._headers
        rest = b"%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n%b" % (
            headers.forwarded,
            headers.request_id or room_id,
            len(body),
            body,
        )
        target = self._request.target
        start = services.pools.start
        prefill = start(route.prefill, self, _PREFILL, attempt, route.prefill.request_head(target) + rest)
        decode = start(route.decode, self, _DECODE, attempt, route.decode.request_head(target) + rest)
        self._legs = [prefill, decode]
        if prompt.is_stream:
            prefill.tells_body = True  # which may be an error
        if self._joined is not None:
            self._joined = [None, None]
            prefill.keeps_reply = decode.keeps_reply = True

    # -- what the legs and the client say ---------------------------------------------------------------

    def on_leg_head(self, leg: UpstreamConnection) -> None:
        machine = self._machine
        assert machine is not None
        actions = machine.on_leg_head(leg.kind, leg.attempt, leg.status)
        if actions:
            self._act(actions)

    def on_leg_body(self, leg: UpstreamConnection) -> None:
        machine = self._machine
        if leg.status != 200 or machine is None:
            return
        if self._prompt.is_stream:
            if begins_unclear(leg):
                leg.body_told = False  # ask again when more is there
                return
            status = stream_error_status(leg)
            if status is not None:
                self._act(machine.on_error_event(leg.kind, leg.attempt, status))
                return
        if leg.kind is _DECODE:
            self._first_byte()
            self._act(machine.on_first_body(_DECODE, leg.attempt))

    def on_leg_complete(self, leg: UpstreamConnection) -> None:
        kind = leg.kind
        machine = self._machine
        assert machine is not None
        if kind is _PREFILL and leg.status == 200 and self._services.planner.wants_token_count():
            # Its reply says how many tokens the prompt had.
            tokens = find_int(leg.raw, b'"prompt_tokens":')
            if tokens:
                self._services.planner.learn_tokens(self._prompt, tokens)
        actions = machine.on_leg_complete(kind, leg.attempt)
        if leg is self._relaying:
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
        self._services.prober.check_now(leg.worker)
        machine = self._machine
        assert machine is not None
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
            self._services.admission.remove(self)
            self._is_queued = False
        if self._machine is not None:
            self._services.metrics.count(self._services.metrics.aborts, "client_gone")
            self._act(self._machine.on_client_gone())

    def on_retry_timer(self, machine: PDExchange, attempt: int) -> None:
        self._timer = None
        self._act(machine.on_retry_timer(attempt))

    def on_timeout(self) -> None:
        """The request has used up `--request-timeout-secs`."""
        if self._machine is not None:
            self._services.metrics.count(self._services.metrics.aborts, "timeout")
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
        machine, account = self._machine, self._account
        assert machine is not None
        for action in actions:
            match action:
                case Credit():
                    assert account is not None
                    account.credit(action.leg)
                case Finished():
                    self._end(action.state)
                case StartLegs():
                    self._send_legs(machine, action.attempt)
                case RelayHead():
                    self._relay_head(action.leg)
                case RelayBody():
                    pass  # follows the head by itself
                case Blame():
                    assert account is not None
                    account.blame(action.leg)
                case Absolve():
                    assert account is not None
                    account.absolve(action.leg)
                case AbortLeg():
                    self._abort_leg(action.leg)
                case Exclude():
                    assert account is not None
                    self._exclude(action.leg, account)
                case ScheduleRetry():
                    self._schedule_retry(machine, action.backoff_index)
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
        self._status = leg.status
        if self._joined is not None and leg.status == 200:
            return
        head, rest = split_head(leg.raw)
        if not self._request.is_http_11 and is_chunked(head):
            self._answer(400, "a streamed reply needs HTTP/1.1")
            assert self._machine is not None
            self._act(self._machine.on_client_gone())
            return
        leg.is_relaying = True
        self._relaying = leg
        connection = b"" if client.keeps_alive else b"connection: close\r\n"
        client.write(b"%b%b%b%b" % (head, self._reply_headers(), connection, rest))
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
        except (ValueError, KeyError, TypeError, AttributeError):  # whatever odd JSON makes of it
            self._status = 502
            client.respond_error(502, "the instances' replies do not match")
            return
        client.respond(200, body, extra=self._reply_headers())

    def _first_byte(self) -> None:
        account = self._account
        assert account is not None
        elapsed_s = self._services.loop.time() - self.started_s
        one = self._services.metrics.of(account.route.decision.length_class)
        one.ttft_s.observe(elapsed_s)
        slo_s = self._headers.ttft_slo_s
        if slo_s is not None:
            if elapsed_s <= slo_s:
                one.slo_met += 1
            else:
                one.slo_missed += 1
        account.first_byte()

    def _client_served(self) -> None:
        """The whole reply is written: the connection is free, the request may still have a prefill leg."""
        client, self._client = self._client, None
        if client is not None:
            client.finish(client.keeps_alive)

    def _reply_headers(self) -> bytes:
        account = self._account
        is_told = account is not None and not self._services.config.disable_route_headers
        route = account.route if account is not None and is_told else None
        return route_headers(self._headers.request_id or self._room_id, route, self.queue_s)

    def _answer(self, status: int, message: str, param: str | None = None, extra: bytes = b"") -> None:
        """Reply with an error of the router's own."""
        client, self._client = self._client, None
        if client is None:
            return
        self._status = status
        if status in (429, 503):
            extra = b"retry-after: 1\r\n"
        request_id = self._headers.request_id or self._room_id
        if request_id:
            extra += b"x-request-id: %b\r\n" % request_id
        client.respond_error(status, message, param, extra)

    def _refuse(self, status: int, message: str, reason: str, param: str | None = None) -> None:
        """Answer a request that never was admitted."""
        metrics = self._services.metrics
        metrics.count(metrics.refused, reason)
        metrics.count_request(self._request.path.decode(), "none", status)
        self._answer(status, message, param)

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
        self._services.aborter.abort(leg.worker, ids)

    def _exclude(self, kind: Leg, account: AttemptAccount) -> None:
        if self._excluded is None:
            self._excluded = (set(), set())
        self._excluded[kind].add(account.worker(kind).id)
        self._services.metrics.count(self._services.metrics.retries, kind.name.lower())

    def _schedule_retry(self, machine: PDExchange, backoff_index: int) -> None:
        services = self._services
        delay_s = services.retry_policy.backoff_s(backoff_index, services.draw())
        self._timer = services.loop.call_later(delay_s, self.on_retry_timer, machine, machine.attempt)

    def _end(self, state: RequestState) -> None:
        """Count the request and let the next one in."""
        services = self._services
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._client is not None:  # relayed nothing, answered nothing: prefill's half of a joined reply failed
            self._answer(502, _REASON_TEXT[FailureReason.LEG_FAILED])
        now_s = services.loop.time()
        status = 499 if state is RequestState.ABORTED else self._status
        services.metrics.count_end(
            self._request.path.decode(),
            self._account.route.decision if self._account is not None else None,
            status,
            now_s - self.started_s,
            self.queue_s,
        )
        services.on_ended(self, now_s)


_NONE_EXCLUDED: tuple[set[int], set[int]] = (set(), set())
_NO_HEADERS = ClientHeaders(b"", b"", None, None)
