"""A request that has been admitted: the prefill-decode protocol decides what happens to it, and this carries it out.

Events of the legs, of the client and of timers go into the state machine `PDProtocol`; the actions that come out are
carried out on the `Attempt` under way and on the client's `Relay`.
"""

from __future__ import annotations

import asyncio
import logging

from sglang_ext.live.decide.view import SeenRequest
from sglang_ext.types import LengthClass
from sglang_ext_router.decide.pd_actions import (
    RELAY_DECODE,
    AbortLeg,
    Actions,
    CloseClient,
    EmitErrorEvent,
    Exclude,
    FailureReason,
    Leg,
    RecordFailure,
    RecordSuccess,
    RelayReply,
    ReleaseTrial,
    ReplyError,
    RequestFinished,
    ScheduleRetry,
    StartLegs,
)
from sglang_ext_router.decide.pd_protocol import PDProtocol, RequestPhase
from sglang_ext_router.observe.access_log import AccessEntry
from sglang_ext_router.observe.metrics import RequestOutcome
from sglang_ext_router.request.attempt import Attempt
from sglang_ext_router.request.prepared_request import PreparedRequest
from sglang_ext_router.request.relay import (
    REASON_TEXT,
    Relay,
    begins_unclear,
    end_error_status,
    find_int,
    stream_error_status,
)
from sglang_ext_router.request.routing import NoInstanceError, PoolPlace
from sglang_ext_router.request.services import Services
from sglang_ext_router.request.upstream import UpstreamConnection

logger = logging.getLogger(__name__)

_DECODE = Leg.DECODE
_OWN_FAULT = frozenset({400, 404, 413, 422})  # statuses of requests that cannot be served
# Chunks of a stream that bring no token: `[DONE]`, the end of the body, a chat's role and finish reason.
_OTHER_CHUNKS = {b"/v1/chat/completions": 4}
_NONE_EXCLUDED: tuple[set[int], set[int]] = (set(), set())


class AdmittedRequest:
    """Its client connection's Call and its legs' owner, from its start to the end of both legs."""

    __slots__ = (
        "_attempt",
        "_error_status",
        "_excluded",
        "_first_byte_s",
        "_first_token_s",
        "_known_prompt_tokens",
        "_output_tokens",
        "_place",
        "_prefill_s",
        "_protocol",
        "_relay",
        "_relayed",
        "_reply_end_s",
        "_request",
        "_services",
        "_timer",
        "started_s",
    )

    def __init__(
        self, services: Services, request: PreparedRequest, relay: Relay, now_s: float, place: PoolPlace | None = None
    ) -> None:
        self._place = place  # for the first attempt
        self._services = services
        self._request = request
        self._relay = relay
        self.started_s = request.started_s  # when it arrived
        relay.queue_s = now_s - request.started_s
        prompt = request.prompt
        self._relayed = Leg.PREFILL if request.scores.is_prefill_only else Leg.DECODE
        self._protocol = PDProtocol(
            services.max_retries,
            is_stream=prompt.is_stream,
            is_single_sequence=prompt.sequence_count == 1,
            needs_decode=not request.scores.is_prefill_only,
        )
        self._attempt: Attempt | None = None  # the latest
        self._excluded: tuple[set[int], set[int]] | None = None  # prefill and decode that have failed this request
        self._timer: asyncio.TimerHandle | None = None
        # Times of the loop, of the latest attempt
        self._prefill_s: float | None = None  # prefill's reply was whole
        self._first_byte_s: float | None = None  # the client was sent the first byte of a reply's body
        self._first_token_s: float | None = None  # known of streams only, and roughly of others: prefill's end
        self._reply_end_s: float | None = None  # the last byte of the relayed reply came
        self._output_tokens: int | None = None
        self._known_prompt_tokens: int | None = None  # as the instance told; read for the access log only
        self._error_status: int | None = None  # that an instance's stream told within a reply of status 200

    @property
    def online_class(self) -> tuple[str, LengthClass] | None:
        """Its model and length class, if an online client waits for it."""
        attempt = self._attempt
        if attempt is None or not self._request.is_online:
            return None
        return self._request.model.name, attempt.route.decision.length_class

    def online_wait(self, now_s: float) -> tuple[str, float] | None:
        """Its prefill instance and what it has waited there so far, if an online client waits for its prefill."""
        attempt = self._attempt
        if attempt is None or not self._request.is_online or attempt.leg(Leg.PREFILL) is None:
            return None
        return attempt.route.prefill.url, max(0.0, self._waited_s(attempt, now_s))

    def _waited_s(self, attempt: Attempt, now_s: float) -> float:
        """Time since the request came, without what its prefill should take."""
        route = attempt.route
        new_tokens = route.decision.new_tokens * self._request.prompt.sequence_count
        computing_s = new_tokens / route.prefill.rate.tokens_per_s
        return now_s - attempt.started_s + self._relay.queue_s - computing_s

    def start(self) -> None:
        """Send the request; it is one of those that run from here to `RequestFinished`."""
        services = self._services
        services.running[self] = None
        services.retry_budget.note_request(services.loop.time())
        self._act(self._protocol.start())

    def _send_legs(self, number: int, on_new_connections: bool) -> None:
        """Choose the instances and send the same body to each."""
        services, request, relay = self._services, self._request, self._relay
        prompt = request.prompt
        now_s = services.loop.time()
        excluded = self._excluded or _NONE_EXCLUDED
        place, self._place = self._place, None
        try:
            route = services.planner.route(
                request.model,
                prompt,
                request.prompt_tokens,
                excluded[0],
                excluded[1],
                now_s,
                not request.scores.is_prefill_only,
                place,
            )
        except NoInstanceError as error:
            services.metrics.count(services.metrics.refused, "no_instance")
            logger.warning("no instance for a request: %s", error)
            self._act(self._protocol.on_no_instance(number))
            return
        decode = route.decode
        self._error_status = self._prefill_s = self._first_token_s = None
        if prompt.samples_per_prompt > 1 and not (
            route.prefill.serves_parallel_samples and decode is not None and decode.serves_parallel_samples
        ):
            relay.answer_error(400, "n > 1 needs instances started by `sglang-ext worker`", "n")
            self._act(self._protocol.on_no_instance(number))
            return
        self._attempt = attempt = Attempt(services, request, route, now_s)
        attempt.send(self, number, on_new_connections, place)
        relay.begin_attempt(
            request.headers.request_id or attempt.request_id,
            None if services.config.disable_route_headers else route,
            request.scores,
        )

    # -- what the legs and the client say ---------------------------------------------------------------

    def on_leg_head(self, leg: UpstreamConnection) -> None:
        actions = self._protocol.on_leg_head(leg.kind, leg.attempt, leg.status)
        if actions:
            self._act(actions)

    def on_leg_body(self, leg: UpstreamConnection) -> None:
        if leg.status != 200:
            return
        if self._request.prompt.is_stream:
            if begins_unclear(leg):
                leg.body_told = False  # ask again when more is there
                return
            status = stream_error_status(leg)
            if status is not None:
                if self._first_byte_s is None or leg.kind is self._relayed:
                    self._error_status = status
                self._act(self._protocol.on_error_event(leg.kind, leg.attempt, status))
                return
        if leg.kind is self._relayed:
            actions = self._protocol.on_first_body(leg.kind, leg.attempt)
            self._note_first_byte(self._protocol.phase is RequestPhase.RELAYING)
            self._act(actions)

    def on_leg_complete(self, leg: UpstreamConnection) -> None:
        attempt = self._attempt
        assert attempt is not None
        if leg.status == 200:
            if leg.kind is not _DECODE:
                self._note_prefilled(attempt, leg)
            if leg.kind is self._relayed:
                self._note_reply(attempt, leg)
        actions = self._protocol.on_leg_complete(leg.kind, leg.attempt)
        self._relay.take_complete(leg)
        self._act(actions)
        attempt.forget_leg(leg)

    def on_leg_lost(self, leg: UpstreamConnection) -> None:
        attempt = self._attempt
        assert attempt is not None
        attempt.forget_leg(leg)
        self._services.prober.check_now(leg.worker)
        protocol = self._protocol
        event = protocol.on_leg_lost if leg.has_connected else protocol.on_leg_connect_failed
        self._act(event(leg.kind, leg.attempt))

    def on_leg_stale(self, leg: UpstreamConnection) -> None:
        attempt = self._attempt
        assert attempt is not None
        attempt.forget_leg(leg)
        # One that was killed may take a new connection yet, until it is gone, and the request would be lost twice.
        self._avoid(leg.kind, attempt)
        self._act(self._protocol.on_leg_stale(leg.kind, leg.attempt))

    def on_client_gone(self) -> None:
        self._relay.lose_client()
        self._services.metrics.count(self._services.metrics.aborts, "client_gone")
        self._act(self._protocol.on_client_gone())

    def on_retry_timer(self, number: int) -> None:
        self._timer = None
        self._act(self._protocol.on_retry_timer(number))

    def on_timeout(self) -> None:
        """The request has used up `--request-timeout-secs`."""
        self._services.metrics.count(self._services.metrics.aborts, "timeout")
        self._act(self._protocol.on_timeout())

    def check_progress(self, now_s: float) -> None:
        """Keep a stream alive that brings nothing; give up a leg whose first byte, or whose next one, is overdue.

        A late first byte is prefill's failure while it has not answered. The time in which the client does not
        read is not the instance's.
        """
        attempt = self._attempt
        if attempt is None or not self._request.prompt.is_stream:
            return
        config, phase = self._services.config, self._protocol.phase
        leg: UpstreamConnection | None
        if config.sse_keep_alive_secs:
            leg = attempt.leg(self._relayed) if phase is RequestPhase.RELAYING else None
            since_s = self.started_s if leg is None else leg.received_s
            self._relay.keep_alive(now_s, since_s, config.sse_keep_alive_secs)
        if phase is RequestPhase.RELAYING:
            leg = attempt.leg(self._relayed)
            limit_s, reason = config.stream_stall_timeout_secs, "stream_stalled"
            if leg is None or leg.is_paused or now_s - leg.received_s <= limit_s:
                return
        else:
            leg = attempt.leg(Leg.PREFILL) or attempt.leg(_DECODE)
            limit_s, reason = config.first_byte_timeout_secs, "first_byte_late"
            if leg is None or phase is not RequestPhase.OPEN or now_s - attempt.started_s <= limit_s:
                return
        if not limit_s:
            return
        self._services.metrics.count(self._services.metrics.aborts, reason)
        logger.warning("worker %s (%s) sent nothing for more than %g s", leg.worker.url, leg.worker.role, limit_s)
        attempt.tell_aborted(leg.worker)
        leg.lose()

    def pause(self) -> None:
        self._relay.pause()

    def resume(self) -> None:
        self._relay.resume()

    # -- carrying out actions ---------------------------------------------------------------------------

    def _act(self, actions: Actions) -> None:
        if actions is RELAY_DECODE:
            self._relay_head(_DECODE)
            return
        attempt = self._attempt
        for action in actions:
            match action:
                case RecordSuccess():
                    assert attempt is not None
                    attempt.record_success(action.leg)
                case RequestFinished():
                    self._end()
                case StartLegs():
                    self._send_legs(action.attempt, action.on_new_connections)
                case RelayReply():
                    self._relay_head(action.leg)
                case RecordFailure():
                    assert attempt is not None
                    attempt.record_failure(action.leg)
                case ReleaseTrial():
                    assert attempt is not None
                    attempt.release_trial(action.leg)
                case AbortLeg():
                    assert attempt is not None
                    attempt.abort_leg(action.leg)
                case Exclude():
                    assert attempt is not None
                    self._exclude(action.leg, attempt)
                case ScheduleRetry():
                    self._schedule_retry(action.backoff_index)
                case ReplyError():
                    self._relay.answer_error(action.status, REASON_TEXT[action.reason])
                case EmitErrorEvent():
                    self._relay.emit_error_event(action.reason)
                case CloseClient():
                    self._relay.cut(action.reason)

    def _relay_head(self, kind: Leg) -> None:
        attempt = self._attempt
        assert attempt is not None
        leg = attempt.leg(kind)
        if leg is not None and not self._relay.take_head(leg):
            self._act(self._protocol.on_client_gone())

    def _note_first_byte(self, is_relayed: bool) -> None:
        """The body of the reply begins; unless it is relayed, the attempt has failed already."""
        attempt = self._attempt
        assert attempt is not None
        attempt.note_first_byte()
        if not is_relayed:
            return
        self._first_byte_s = now_s = self._services.loop.time()
        if self._request.prompt.is_stream:
            self._first_token_s = now_s
            self._services.metrics.of(attempt.route.decision.length_class).ttft_s.observe(now_s - self.started_s)

    def _note_prefilled(self, attempt: Attempt, leg: UpstreamConnection) -> None:
        """Prefill's reply is whole: learn what it tells, and how long it took."""
        services, request = self._services, self._request
        now_s = leg.received_s
        self._prefill_s = now_s
        if not request.prompt.is_stream:
            self._first_token_s = now_s
        decision = attempt.route.decision
        services.metrics.of(decision.length_class).note_prefill(now_s - attempt.started_s, attempt.predicted_s)
        if services.planner.wants_token_count():
            # Its reply says how many tokens the prompt had.
            tokens = find_int(leg.raw, b'"prompt_tokens":')
            if tokens:
                services.planner.learn_tokens(request.model, request.prompt, tokens)
        if request.is_online:
            services.online_waits.note(attempt.route.prefill.url, self._waited_s(attempt, now_s), now_s)

    def _note_reply(self, attempt: Attempt, leg: UpstreamConnection) -> None:
        """The reply that the client gets has come whole."""
        prompt = self._request.prompt
        self._reply_end_s = leg.received_s
        end = leg.end_of_body()
        if self._services.access_log is not None and prompt.sequence_count == 1:
            self._known_prompt_tokens = find_int(end, b'"prompt_tokens":')
        one = self._services.metrics.of(attempt.route.decision.length_class)
        if not prompt.is_stream:
            tokens = None
            if prompt.sequence_count == 1 or self._request.path != b"/generate":  # which tells it of each sequence
                tokens = find_int(end, b'"completion_tokens":')
        elif self._error_status is None:
            self._error_status = end_error_status(end)
            tokens = find_int(end, b'"completion_tokens":') if prompt.sequence_count == 1 else None
            if tokens is None:
                tokens = leg.chunks - _OTHER_CHUNKS.get(self._request.path, 2)
            one.stall_s.observe(leg.longest_gap_s)
            if tokens > 1 and prompt.sequence_count == 1 and self._first_byte_s is not None:
                one.tpot_s.observe((leg.received_s - self._first_byte_s) / (tokens - 1))
        else:
            return
        self._output_tokens = tokens
        if tokens is not None:
            one.output_tokens.observe(tokens)

    def _avoid(self, kind: Leg, attempt: Attempt) -> None:
        """Use this attempt's instance again only if there is no other."""
        if self._excluded is None:
            self._excluded = (set(), set())
        self._excluded[kind].add(attempt.worker(kind).id)

    def _exclude(self, kind: Leg, attempt: Attempt) -> None:
        self._avoid(kind, attempt)
        self._services.metrics.count(self._services.metrics.retries, kind.name.lower())

    def _schedule_retry(self, backoff_index: int) -> None:
        services = self._services
        if not services.retry_budget.spend(services.loop.time(), len(services.running)):
            services.metrics.count(services.metrics.retries_refused, "budget")
            self._act(self._protocol.on_retry_refused(self._protocol.attempt))
            return
        delay_s = services.retry_policy.backoff_s(backoff_index, services.draw())
        self._timer = services.loop.call_later(delay_s, self.on_retry_timer, self._protocol.attempt)

    def _end(self) -> None:
        """Count the request and let the next one in."""
        services, relay = self._services, self._relay
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # Relayed nothing, answered nothing: prefill's half of a joined reply failed.
        if relay.is_open and not relay.is_building:
            relay.answer_error(502, REASON_TEXT[FailureReason.LEG_FAILED])
        if relay.is_building:
            relay.when_built = self._count
        else:
            self._count()
        services.on_ended(self, services.loop.time())

    def _count(self) -> None:
        """The client has its whole reply, or will not get it: count what came of the request."""
        services, relay, request = self._services, self._relay, self._request
        attempt = self._attempt
        outcome: RequestOutcome = "ok"
        status = relay.status
        if relay.has_left:
            outcome, status = "client_left", 499
        elif relay.is_broken or self._error_status is not None:
            outcome = "error_before" if self._first_byte_s is None else "error_after"
            if not relay.is_broken and self._error_status is not None:
                status = self._error_status
        elif not 200 <= status < 400:
            outcome = "error_before"
        now_s = services.loop.time()
        ended_s = now_s if self._reply_end_s is None or outcome != "ok" else self._reply_end_s
        decision = None if attempt is None else attempt.route.decision
        total_s, path = ended_s - self.started_s, request.path.decode()
        services.metrics.count_end(path, decision, status, outcome, total_s, relay.queue_s, request.prompt_tokens)
        if services.access_log is not None:
            services.access_log.add(self._access_entry(status, outcome, ended_s))
        if services.view is not None and services.view.wants_end(self):
            services.view.note_end(self, self.seen()._replace(ended_s=ended_s, outcome=outcome))
        if services.tracer is not None and request.headers.trace is not None:
            seen, room_id = self.seen()._replace(outcome=outcome), b"" if attempt is None else attempt.request_id
            services.tracer.note_end(request.headers.trace, seen, ended_s, room_id)
        if request.headers.ttft_slo_s is not None:
            self._count_slo(request.headers.ttft_slo_s, outcome, status, now_s)

    def seen(self) -> SeenRequest:
        """It as the live page shows it; times are the loop's."""
        request, attempt = self._request, self._attempt
        route = None if attempt is None else attempt.route
        tokens, known_tokens = request.prompt_tokens, self._known_prompt_tokens
        return SeenRequest(
            self._relay.request_id.decode("latin-1"),
            None if route is None else route.decision.length_class.value,
            tokens if known_tokens is None else known_tokens,
            0 if route is None else route.decision.cached_tokens,
            self._output_tokens,
            None if route is None else route.prefill.name,
            None if route is None or route.decode is None else route.decode.name,
            self.started_s,
            None if attempt is None else attempt.started_s,
            None,
            self._prefill_s,
            self._first_token_s,
            None,
            None,
            self._protocol.attempt + 1,
        )

    def _access_entry(self, status: int, outcome: RequestOutcome, ended_s: float) -> AccessEntry:
        relay, request, attempt, started_s = self._relay, self._request, self._attempt, self.started_s
        route = None if attempt is None else attempt.route
        return AccessEntry(
            request.path.decode(),
            status,
            outcome,
            ended_s - started_s,
            relay.request_id.decode("latin-1"),
            relay.peer,
            model=request.model.name,
            length_class=None if route is None else route.decision.length_class.value,
            stream=request.prompt.is_stream,
            sequences=request.prompt.sequence_count,
            prompt_tokens_estimated=request.prompt_tokens,
            cached_tokens_estimated=None if route is None else route.decision.cached_tokens,
            prompt_tokens=self._known_prompt_tokens,
            output_tokens=self._output_tokens,
            prefill=None if route is None else route.prefill.url,
            decode=None if route is None or route.decode is None else route.decode.url,
            attempts=self._protocol.attempt + 1,
            queued_s=relay.queue_s,
            prefilled_s=None if self._prefill_s is None else self._prefill_s - started_s,
            first_byte_s=None if self._first_byte_s is None else self._first_byte_s - started_s,
            error=relay.error,
        )

    def _count_slo(self, slo_s: float, outcome: RequestOutcome, status: int, now_s: float) -> None:
        """Count whether the first token came in time: a request that never had one has missed its deadline.

        One that is at fault itself, or whose client left before the deadline, tells nothing.
        """
        metrics, attempt = self._services.metrics, self._attempt
        has_token = outcome != "error_before" and self._first_token_s is not None
        first_s = self._first_token_s if has_token and self._first_token_s is not None else now_s
        is_late = first_s - self.started_s > slo_s
        if not has_token:
            if (outcome == "client_left" and not is_late) or (outcome == "error_before" and status in _OWN_FAULT):
                return
            is_late = True
        if attempt is None:
            metrics.unclassified_slo_missed += 1
            return
        one = metrics.of(attempt.route.decision.length_class)
        if is_late:
            one.slo_missed += 1
        else:
            one.slo_met += 1
