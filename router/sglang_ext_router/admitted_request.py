"""A request that has been admitted: the prefill-decode protocol decides what happens to it, and this carries it out.

Events of the legs, of the client and of timers go into the state machine `PDProtocol`; the actions that come out are
carried out on the `Attempt` under way and on the client's `Relay`.
"""

from __future__ import annotations

import asyncio
import logging

from sglang_ext.policy.routing.pd_actions import (
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
    RelayBody,
    RelayHead,
    ReleaseTrial,
    ReplyError,
    RequestFinished,
    ScheduleRetry,
    StartLegs,
)
from sglang_ext.policy.routing.pd_protocol import PDProtocol, RequestPhase
from sglang_ext.types import LengthClass, RequestState
from sglang_ext_router.attempt import Attempt
from sglang_ext_router.prepared_request import PreparedRequest
from sglang_ext_router.relay import REASON_TEXT, Relay, begins_unclear, find_int, stream_error_status
from sglang_ext_router.routing import NoInstanceError
from sglang_ext_router.services import Services
from sglang_ext_router.upstream import UpstreamConnection

logger = logging.getLogger(__name__)

_DECODE = Leg.DECODE
_NONE_EXCLUDED: tuple[set[int], set[int]] = (set(), set())


class AdmittedRequest:
    """Its client connection's Call and its legs' owner, from its start to the end of both legs."""

    __slots__ = (
        "_attempt",
        "_excluded",
        "_protocol",
        "_relay",
        "_relayed",
        "_request",
        "_services",
        "_timer",
        "started_s",
    )

    def __init__(self, services: Services, request: PreparedRequest, relay: Relay, now_s: float) -> None:
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

    @property
    def online_class(self) -> LengthClass | None:
        """Its length class, if an online client waits for it."""
        attempt = self._attempt
        return attempt.route.decision.length_class if attempt is not None and self._request.is_online else None

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
        try:
            route = services.planner.route(
                request.model,
                prompt,
                request.prompt_tokens,
                excluded[0],
                excluded[1],
                now_s,
                not request.scores.is_prefill_only,
            )
        except NoInstanceError as error:
            services.metrics.count(services.metrics.refused, "no_instance")
            logger.warning("no instance for a request: %s", error)
            self._act(self._protocol.on_no_instance(number))
            return
        decode = route.decode
        if prompt.samples_per_prompt > 1 and not (
            route.prefill.serves_parallel_samples and decode is not None and decode.serves_parallel_samples
        ):
            relay.answer_error(400, "n > 1 needs instances started by `sglang-ext worker`", "n")
            self._act(self._protocol.on_no_instance(number))
            return
        self._attempt = attempt = Attempt(services, request, route, now_s)
        attempt.send(self, number, on_new_connections)
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
                self._act(self._protocol.on_error_event(leg.kind, leg.attempt, status))
                return
        if leg.kind is self._relayed:
            self._note_first_byte()
            self._act(self._protocol.on_first_body(leg.kind, leg.attempt))

    def on_leg_complete(self, leg: UpstreamConnection) -> None:
        attempt = self._attempt
        assert attempt is not None
        planner = self._services.planner
        if leg.kind is not _DECODE and leg.status == 200 and planner.wants_token_count():
            # Its reply says how many tokens the prompt had.
            tokens = find_int(leg.raw, b'"prompt_tokens":')
            if tokens:
                planner.learn_tokens(self._request.model, self._request.prompt, tokens)
        if leg.kind is not _DECODE and leg.status == 200 and self._request.is_online:
            now_s = self._services.loop.time()
            self._services.online_waits.note(attempt.route.prefill.url, self._waited_s(attempt, now_s), now_s)
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
        """Give up a leg of a stream whose first byte, or whose next one, is overdue.

        A late first byte is prefill's failure while it has not answered. The time in which the client does not
        read is not the instance's.
        """
        attempt = self._attempt
        if attempt is None or not self._request.prompt.is_stream:
            return
        config, phase = self._services.config, self._protocol.phase
        leg: UpstreamConnection | None
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
                    self._end(action.state)
                case StartLegs():
                    self._send_legs(action.attempt, action.on_new_connections)
                case RelayHead():
                    self._relay_head(action.leg)
                case RelayBody():
                    pass  # follows the head by itself
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
                    self._relay.cut()

    def _relay_head(self, kind: Leg) -> None:
        attempt = self._attempt
        assert attempt is not None
        leg = attempt.leg(kind)
        if leg is not None and not self._relay.take_head(leg):
            self._act(self._protocol.on_client_gone())

    def _note_first_byte(self) -> None:
        attempt = self._attempt
        assert attempt is not None
        elapsed_s = self._services.loop.time() - self.started_s
        one = self._services.metrics.of(attempt.route.decision.length_class)
        one.ttft_s.observe(elapsed_s)
        slo_s = self._request.headers.ttft_slo_s
        if slo_s is not None:
            if elapsed_s <= slo_s:
                one.slo_met += 1
            else:
                one.slo_missed += 1
        attempt.note_first_byte()

    def _exclude(self, kind: Leg, attempt: Attempt) -> None:
        if self._excluded is None:
            self._excluded = (set(), set())
        self._excluded[kind].add(attempt.worker(kind).id)
        self._services.metrics.count(self._services.metrics.retries, kind.name.lower())

    def _schedule_retry(self, backoff_index: int) -> None:
        services = self._services
        if not services.retry_budget.spend(services.loop.time(), len(services.running)):
            services.metrics.count(services.metrics.retries_refused, "budget")
            self._act(self._protocol.on_retry_refused(self._protocol.attempt))
            return
        delay_s = services.retry_policy.backoff_s(backoff_index, services.draw())
        self._timer = services.loop.call_later(delay_s, self.on_retry_timer, self._protocol.attempt)

    def _end(self, state: RequestState) -> None:
        """Count the request and let the next one in."""
        services, relay = self._services, self._relay
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # Relayed nothing, answered nothing: prefill's half of a joined reply failed.
        if relay.is_open and not relay.is_building:
            relay.answer_error(502, REASON_TEXT[FailureReason.LEG_FAILED])
        now_s = services.loop.time()
        services.metrics.count_end(
            self._request.path.decode(),
            self._attempt.route.decision if self._attempt is not None else None,
            499 if state is RequestState.ABORTED else relay.status,
            now_s - self.started_s,
            relay.queue_s,
        )
        services.on_ended(self, now_s)
