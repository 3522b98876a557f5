"""The life of one generation request in the router, from top to bottom.

    read -> count tokens -> admit -> place -> attempts -> relay -> account

`RequestFlow.begin` reads the request, `_prepare` checks it and has its prompt counted, `_admit` offers it to the
admission queue, `start` has the long pool's coordinator place it, `_send` begins the attempts, and `_account` closes
its record. From the first attempt on `PDProtocol` decides: what the legs, the client and the timers do are its events,
and `_act` carries out the actions that it answers with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set
from concurrent.futures import Future
from typing import TYPE_CHECKING

from sglang_ext.live.decide.view import SeenRequest
from sglang_ext.types import LengthClass
from sglang_ext_router.decide.admission import AdmissionOutcome, is_in_danger
from sglang_ext_router.decide.pd_actions import (
    RELAY_DECODE,
    AbortLeg,
    Actions,
    CloseClient,
    ContinueStream,
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
from sglang_ext_router.instances.pool_offers import OfferOutcome, PoolAnswer
from sglang_ext_router.observe.access_log import peer_of
from sglang_ext_router.observe.request_record import QUEUE_TIMEOUT_STATUS, RequestRecord
from sglang_ext_router.request.attempt import Attempt
from sglang_ext_router.request.body_reader import SMALL_BYTES, Outcome, is_read_at_once
from sglang_ext_router.request.counting import count_tokens
from sglang_ext_router.request.prepared_request import (
    ClientHeaders,
    PreparedRequest,
    ReadBody,
    RefusedError,
    check_request,
    find_model,
    read_body,
    read_headers,
)
from sglang_ext_router.request.prompt import BadRequestError
from sglang_ext_router.request.relay import REASON_TEXT, Relay, begins_unclear, stream_error_status
from sglang_ext_router.request.routing import NoInstanceError, PoolPlace, capacity_refusal
from sglang_ext_router.request.services import Services
from sglang_ext_router.request.upstream import UpstreamConnection
from sglang_ext_router.tenants.accounts import Charge, refusal_text

if TYPE_CHECKING:
    from sglang_ext_router.http.http1 import ClientConnection
    from sglang_ext_router.http.request_parser import Request
    from sglang_ext_router.tenants.accounts import Tenants

logger = logging.getLogger(__name__)

ABORTED_EARLY = "the request was aborted before it had any output"
REFUSED_STATUS = 400
_DECODE = Leg.DECODE
_NONE_EXCLUDED: tuple[set[int], set[int]] = (set(), set())


class RequestFlow:
    """One generation request: it serves its client's connection, and it owns the legs of its attempts.

    It waits in the admission queue, runs from `start` to `_leave`, and may outlive its client by a prefill leg that
    has not ended.
    """

    __slots__ = (
        "_asking",
        "_attempt",
        "_avoided",
        "_charge",
        "_counted_tokens",
        "_excluded",
        "_headers",
        "_is_queued",
        "_is_waiting",
        "_lacking",
        "_lost",
        "_place",
        "_protocol",
        "_reading",
        "_relay",
        "_relayed",
        "_request",
        "_services",
        "_timer",
        "_unread",
        "record",
        "started_s",
    )

    def __init__(self, services: Services, client: ClientConnection, request: Request, now_s: float) -> None:
        self._services = services
        self._unread = request
        self.started_s = now_s  # when it arrived
        self.record = RequestRecord(request.path, now_s)
        if services.access_log is not None:
            self.record.peer = peer_of(client.transport)
        self._relay = Relay(client, request, services.reply_builder, self.record)
        self._reading: Future[Outcome] | None = None
        self._headers: ClientHeaders
        self._request: PreparedRequest
        self._charge: Charge | None = None  # in the account of its tenant, where there are tenants
        self._is_queued = False
        self._is_waiting = False  # for an instance: none is ready, and one may return
        self._lacking = ""  # what was not ready last
        self._lost: tuple[int, float] | None = None  # the instance that was lost last, by id, and when
        self._asking: asyncio.Task[PoolAnswer] | None = None  # the coordinator
        self._place: PoolPlace | None = None  # for the first attempt
        self._protocol: PDProtocol | None = None  # from the first attempt on
        self._relayed = _DECODE
        self._counted_tokens = 0  # of the longest prompt, by an instance that cannot hold it
        self._attempt: Attempt | None = None  # the latest
        self._excluded: tuple[set[int], set[int]] | None = None  # prefill and decode that have failed this request
        self._avoided: Set[int] = frozenset()  # prefill instances that the next attempt goes to only without others
        self._timer: asyncio.TimerHandle | None = None

    # -- read -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Read headers and body; a large body is read by another process."""
        services, unread = self._services, self._unread
        try:
            forwarded, relays_own = services.forwarded_headers, services.relays_authorization
            headers = read_headers(unread.headers, services.authorization, relays_own, forwarded)
            if services.tracer is not None:
                headers = services.tracer.join(unread.headers, headers)
            if services.tenants is not None:
                headers = services.tenants.limit_priority(unread.tenant, headers)
            self._headers = headers
            self.record.request_id = headers.request_id
            has_hints = headers.ttft_slo_s is not None or headers.priority is not None
            if len(unread.body) <= SMALL_BYTES or is_read_at_once(unread.body, services.draw):
                self._prepare(read_body(unread.path, unread.body, has_hints))
                return
        except BadRequestError as error:
            self._refuse(400, str(error), "bad_request", error.param)
            return
        read = services.body_reader.read
        self._reading = read(unread.path, unread.body, has_hints, self._on_read)

    def _on_read(self, outcome: Outcome) -> None:
        """The other process has read a large body."""
        self._reading = None
        if not self._relay.is_open:  # the client has left in the meantime
            return
        if outcome is None:
            self._refuse(503, "the body could not be read; try again later", "unreadable")
        elif isinstance(outcome, BadRequestError):
            self._refuse(400, str(outcome), "bad_request", outcome.param)
        else:
            self._prepare(outcome)

    def _prepare(self, body: ReadBody) -> None:
        """Find the instances of the request's model, check what is asked of them, and count the prompt's tokens."""
        services = self._services
        try:
            model = find_model(services.registry, body)
            request = PreparedRequest(self._unread, self._headers, body, model, self.started_s)
            request.may_migrate = request.may_migrate and services.max_migrations > 0
            self._request = self.record.request = request
            self._unread.body = b""  # the prepared request has what is needed of it
            check_request(services.registry, request, services.config.max_sequences_per_request)
        except RefusedError as error:
            self._refuse(error.status, str(error), error.reason, error.param, error.code)
            return
        count_tokens(services, request, self._admit)

    # -- admit ------------------------------------------------------------------------------------------

    def _admit(self, tokens: int, counted_tokens: int | None) -> None:
        """Wait for a place. `tokens`: of the longest prompt; `counted_tokens`: of all, None where they are estimated.

        A prompt that is longer than any instance holds is theirs to refuse: they count all of it.
        """
        if not self._relay.is_open:  # the client has left in the meantime
            return
        services, request = self._services, self._request
        prompt, config = request.prompt, services.config
        if prompt.images or prompt.audios:
            tokens += prompt.images * config.image_tokens + prompt.audios * config.audio_tokens
        request.prompt_tokens = max(1, tokens)
        if request.scores.entries_per_token and counted_tokens is not None:
            try:
                request.scores.check_size(counted_tokens)
            except BadRequestError as error:
                self._refuse(400, str(error), "too_long", error.param)
                return
        if services.tenants is not None and not self._is_within_budgets(services.tenants):
            return
        slo_s = self._headers.ttft_slo_s
        deadline_s = None if slo_s is None else self.started_s + slo_s
        claim = None if self._charge is None else self._charge.claim
        outcome = services.admission.offer(self, self.started_s, deadline_s, claim)
        if outcome is AdmissionOutcome.ADMITTED:
            self.start(self.started_s)
        elif outcome is AdmissionOutcome.QUEUED:
            self._is_queued = True
        else:
            self._refuse(429, "too many requests are waiting; try again later", "queue_full")

    def _is_within_budgets(self, tenants: Tenants) -> bool:
        """Reserve what the request is expected to use of its tenant's budgets, or refuse it."""
        unread = self._unread
        self._charge = charge = tenants.charge(unread.tenant, self._request, self.started_s)
        unread.reply_headers += charge.reply_headers
        if charge.refusal is None:
            return True
        message, code, retry_after_s = refusal_text(charge, charge.refusal)
        self._refuse(429, message, "rate_limited", None, code, retry_after_s)
        return False

    def on_queue_timeout(self) -> None:
        """The request waited in the queue until its deadline or the queue's limit."""
        self._is_queued = False
        self._refuse(QUEUE_TIMEOUT_STATUS, REASON_TEXT[FailureReason.QUEUE_TIMEOUT], "queue_timeout")

    def _refuse(
        self,
        status: int,
        message: str,
        reason: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = 1,
    ) -> None:
        """Answer a request that is not admitted; `retry_after_s` None: it never will be."""
        metrics = self._services.metrics
        metrics.count(metrics.refused, reason)
        is_final = retry_after_s is None
        self._relay.answer_error(status, message, param, code, may_retry=not is_final, retry_after_s=retry_after_s or 0)
        self._account()

    # -- place ------------------------------------------------------------------------------------------

    def start(self, now_s: float) -> None:
        """Begin to run: there is a place. A coordinator is asked first which instance shall get a long prompt."""
        services = self._services
        self._is_queued = False
        services.running[self] = None
        if self._protocol is not None:  # it has made room for another request
            self._act(self._protocol.on_instance_back(self._protocol.attempt))
            return
        self.record.admitted_s = now_s
        offers = services.pool_offers
        if offers is not None and offers.wants(self._request):
            self.record.is_offered = True
            self._asking = offers.ask(self._request, max(0.0, now_s - self.started_s), self._on_placed)
        else:
            self._send(now_s)

    @property
    def may_be_evicted(self) -> bool:
        """Return whether it may make room: no online client waits for it, and nothing of a reply has come."""
        protocol = self._protocol
        return (
            protocol is not None
            and protocol.phase is RequestPhase.OPEN
            and not self._request.is_online
            and self.record.evictions < self._services.config.max_evictions
        )

    def is_urgent(self, deadline_s: float, now_s: float) -> bool:
        """Return whether an online client waits for it that it may fail, as long as it is in the queue."""
        return self._request.is_online and is_in_danger(self.started_s, deadline_s, now_s)

    def evict(self, now_s: float) -> None:
        """Make room for a more urgent request, and wait for a place again."""
        services, protocol, record = self._services, self._protocol, self.record
        assert protocol is not None
        record.evictions += 1
        record.earlier = (*record.earlier, (now_s, "made room for a more urgent request"))
        services.metrics.evicted += 1
        self._act(protocol.on_evicted())
        self._is_queued = True
        services.on_ended(self, now_s)
        services.admission.wait_again(self, now_s, None if self._charge is None else self._charge.claim)

    def _on_placed(self, place: PoolPlace | None) -> None:
        """The coordinator has named an instance, or will not."""
        services = self._services
        self._asking = None
        self._place = place
        self.record.placed_s = services.loop.time()
        self._send(services.loop.time())
        if place is not None and services.pool_offers is not None:
            route = self.record.route
            is_used = route is not None and route.prefill.name == place.prefill.name
            services.pool_offers.count(OfferOutcome.NAMED if is_used else OfferOutcome.UNUSABLE)
            if is_used and place.chunk_s:
                for other in tuple(services.running):
                    other.avoid_chunk(place, services.loop.time())

    def avoid_chunk(self, place: PoolPlace, now_s: float) -> None:
        """Go to another instance, if it waits where a chunk is about to run, and ends much sooner elsewhere."""
        attempt, protocol, record = self._attempt, self._protocol, self.record
        if attempt is None or protocol is None or protocol.phase is not RequestPhase.OPEN or record.is_taken_back:
            return
        if not attempt.ends_sooner_elsewhere(place, now_s):
            return
        record.is_taken_back = True
        record.earlier = (*record.earlier, (now_s, f"taken back from {attempt.route.prefill.name}, which has a chunk"))
        self._services.metrics.taken_back += 1
        self._avoided = {worker.id for worker in place.members}
        self._act(protocol.on_evicted())
        self._act(protocol.on_instance_back(protocol.attempt))

    # -- attempts ---------------------------------------------------------------------------------------

    def _send(self, now_s: float) -> None:
        """Let the protocol begin the first attempt."""
        services, request = self._services, self._request
        self.record.queue_s = now_s - self.started_s
        needs_decode = not request.scores.is_prefill_only
        self._relayed = _DECODE if needs_decode else Leg.PREFILL
        self._protocol = protocol = PDProtocol(
            services.max_retries,
            max_migrations=services.max_migrations if request.may_migrate else 0,
            is_stream=request.prompt.is_stream,
            is_single_sequence=request.prompt.sequence_count == 1,
            needs_decode=needs_decode,
        )
        services.retry_budget.record_request(services.loop.time())
        self._act(protocol.start())

    def _start_attempt(self, number: int, on_new_connections: bool) -> None:
        """Choose the instances and send the same body to each."""
        services, request, relay, record = self._services, self._request, self._relay, self.record
        prompt, protocol = request.prompt, self._protocol
        assert protocol is not None
        now_s = services.loop.time()
        record.attempts = number + 1
        request.prompt_tokens = max(request.prompt_tokens, self._counted_tokens)
        excluded = self._excluded or _NONE_EXCLUDED
        if self._avoided:
            excluded = (excluded[0] | self._avoided, excluded[1])
            self._avoided = frozenset()
        place, self._place = self._place, None
        try:
            if request.is_undivided:
                route = services.planner.route_undivided(
                    request.model, prompt, request.prompt_tokens, excluded[0], now_s
                )
            else:
                route = services.planner.route(
                    request.model,
                    prompt,
                    request.prompt_tokens,
                    excluded[0],
                    excluded[1],
                    now_s,
                    not request.scores.is_prefill_only,
                    place,
                    not (request.scores.is_prefill_only or request.scores.is_joined),
                    request.session,
                )
        except NoInstanceError as error:
            self._lacking = str(error)
            if self._wait_for_instance(error, now_s):
                self._act(protocol.on_no_instance_yet(number))
                return
            services.metrics.count(services.metrics.refused, "no_instance")
            logger.warning("no instance for a request: %s", error)
            self._act(protocol.on_no_instance(number))
            return
        except Exception:  # of a policy; the request must not keep its place for ever
            services.metrics.count(services.metrics.refused, "policy_failed")
            logger.exception("the policy for prefill or decode has failed")
            self._act(protocol.on_no_instance(number))
            return
        if self._is_waiting:
            self._stop_waiting()
        if self._charge is not None and services.tenants is not None:
            services.tenants.record_route(self._charge, route.decision.cached_tokens, services.admission)
        decode = route.decode
        self._relayed = Leg.PREFILL if decode is None else _DECODE
        record.error_status = record.prefilled_s = None
        if record.first_byte_s is None:
            record.first_token_s = None
        if route.is_plain:
            protocol.serve_undivided(number)
        elif prompt.samples_per_prompt > 1 and not (
            route.prefill.serves_parallel_samples and decode is not None and decode.serves_parallel_samples
        ):
            relay.answer_error(400, "n > 1 needs instances started by `sglang-ext worker`", "n")
            self._act(protocol.on_no_instance(number))
            return
        self._attempt = attempt = Attempt(services, request, record, route, now_s, place)
        attempt.send(self, number, on_new_connections)
        relay.begin_attempt(
            self._headers.request_id or record.room_id,
            None if services.config.disable_route_headers else route,
            request.scores,
            b"" if request.own_ids is None else b"-" + record.room_id,
            has_decode=decode is not None,
            keeps_stream=request.may_migrate,
        )

    def _wait_for_instance(self, error: NoInstanceError, now_s: float) -> bool:
        """Wait until an instance returns, where one may; a deadline counts for a request that was never sent."""
        services = self._services
        if not services.registry.may_return(self._request.model, error.kind):
            return False
        end_s = now_s + services.config.queue_timeout_secs
        if self._attempt is None and self._headers.ttft_slo_s is not None:
            end_s = min(end_s, self.started_s + self._headers.ttft_slo_s)
        if not services.instance_waits.add(self, end_s):
            return False
        if not self._is_waiting:
            self._is_waiting = True
            services.metrics.waited_for_instance += 1
            logger.info("a request waits for an instance: %s", error)
        return True

    def _stop_waiting(self) -> None:
        self._is_waiting = False
        self._services.instance_waits.remove(self)

    def on_instances_changed(self) -> None:
        """Other instances may be ready now."""
        assert self._protocol is not None
        self._act(self._protocol.on_instance_back(self._protocol.attempt))

    def on_no_instance_came(self) -> None:
        """The request waited for an instance until its deadline or the queue's limit."""
        services, protocol = self._services, self._protocol
        assert protocol is not None
        self._is_waiting = False
        services.metrics.count(services.metrics.refused, "no_instance")
        self._act(protocol.on_no_instance(protocol.attempt))

    def on_leg_head(self, leg: UpstreamConnection) -> None:
        """A leg's response head has come. A refusal is judged by its reason, when it is here whole."""
        if leg.status == REFUSED_STATUS:
            return
        protocol = self._protocol
        assert protocol is not None
        actions = protocol.on_leg_head(leg.kind, leg.attempt, leg.status)
        if actions:
            self._act(actions)

    def on_leg_body(self, leg: UpstreamConnection) -> None:
        """The first bytes of a leg's body have come; of a stream they may be an error."""
        if leg.status != 200:
            return
        record, protocol = self.record, self._protocol
        assert protocol is not None
        if self._request.prompt.is_stream:
            if begins_unclear(leg):
                leg.body_reported = False  # ask again when more is there
                return
            status = stream_error_status(leg)
            if status == REFUSED_STATUS and self._moves_on(leg):
                return
            if status is not None:
                if record.first_byte_s is None or leg.kind is self._relayed:
                    record.error_status = status
                self._act(protocol.on_error_event(leg.kind, leg.attempt, status))
                return
        if leg.kind is self._relayed:
            actions = protocol.on_first_body(leg.kind, leg.attempt)
            attempt = self._attempt
            assert attempt is not None
            # Where the reply is not relayed, the attempt has failed already.
            attempt.on_first_byte(is_relayed=protocol.phase is RequestPhase.RELAYING)
            self._act(actions)

    def on_leg_complete(self, leg: UpstreamConnection) -> None:
        """A leg's response is here whole."""
        attempt, protocol = self._attempt, self._protocol
        assert attempt is not None
        assert protocol is not None
        if leg.status == 200:
            if leg.kind is not _DECODE:
                attempt.learn_from_prefill(leg)
            if leg.kind is self._relayed:
                attempt.learn_from_reply(leg)
        elif leg.status == REFUSED_STATUS:
            if self._moves_on(leg):
                attempt.forget_leg(leg)
                return
            self._act(protocol.on_leg_head(leg.kind, leg.attempt, leg.status))
        actions = protocol.on_leg_complete(leg.kind, leg.attempt)
        self._relay.take_complete(leg)
        self._act(actions)
        attempt.forget_leg(leg)

    def _moves_on(self, leg: UpstreamConnection) -> bool:
        """Let an instance that holds more, if there is one, serve what this leg's instance refuses as too long."""
        attempt, protocol, request, planner = self._attempt, self._protocol, self._request, self._services.planner
        assert attempt is not None
        assert protocol is not None
        refusal = capacity_refusal(leg.raw)
        if refusal is None or leg.attempt != protocol.attempt:
            return False
        excluded = self._excluded or _NONE_EXCLUDED
        worker = attempt.worker(leg.kind)
        smaller = planner.too_small(request.model, worker, refusal.needed_tokens, excluded[leg.kind])
        actions = protocol.on_leg_too_small(leg.kind, leg.attempt) if smaller else ()
        if not actions:
            return False
        if self._excluded is None:
            self._excluded = (set(), set())
        self._excluded[leg.kind].update(smaller)
        self._counted_tokens = refusal.prompt_tokens
        self._act(actions)
        return True

    def on_leg_lost(self, leg: UpstreamConnection) -> None:
        """A leg's connection could not be made, or has ended before its response was whole."""
        attempt, protocol = self._attempt, self._protocol
        assert attempt is not None
        assert protocol is not None
        if leg.status == REFUSED_STATUS:  # a refusal that breaks off is relayed as far as it came
            self._act(protocol.on_leg_head(leg.kind, leg.attempt, leg.status))
        attempt.forget_leg(leg)
        self._services.prober.check_now(leg.worker)
        is_gone = self._lose(leg)
        if leg.has_connected and not is_gone:
            event = protocol.on_stream_lost if self._can_go_on(leg) else protocol.on_leg_lost
        else:
            event = protocol.on_leg_connect_failed
        self._act(event(leg.kind, leg.attempt))

    def _lose(self, leg: UpstreamConnection) -> bool:
        """Note that a leg's instance was lost; return whether this is a loss that was noted before.

        An instance that was killed may accept connections until it is gone. If it has neither been heard of since its
        last loss nor begun an answer, it counts as lost once.
        """
        worker, lost = leg.worker, self._lost
        self._lost = worker.id, self._services.loop.time()
        return lost is not None and lost[0] == worker.id and worker.heard_s < lost[1] and not leg.status

    def _can_go_on(self, leg: UpstreamConnection) -> bool:
        """Return whether the stream of a lost leg can go on on other instances, and prepare for that."""
        protocol = self._protocol
        assert protocol is not None
        if leg.kind is not self._relayed or leg.attempt != protocol.attempt or not protocol.may_migrate:
            return False
        delivered = self._relay.delivered(leg)
        return delivered is not None and self._request.continue_behind(delivered)

    def on_leg_stale(self, leg: UpstreamConnection) -> None:
        """A kept connection was closed instead of answered."""
        attempt, protocol = self._attempt, self._protocol
        assert attempt is not None
        assert protocol is not None
        attempt.forget_leg(leg)
        self._lose(leg)
        self._avoid(leg.kind, attempt)
        self._act(protocol.on_leg_stale(leg.kind, leg.attempt))

    def _on_retry_timer(self, number: int) -> None:
        self._timer = None
        assert self._protocol is not None
        self._act(self._protocol.on_retry_timer(number))

    def _act(self, actions: Actions) -> None:
        """Carry out the protocol's actions in order."""
        if actions is RELAY_DECODE:
            self._relay_reply(_DECODE)
            return
        attempt = self._attempt
        for action in actions:
            match action:
                case RecordSuccess():
                    assert attempt is not None
                    attempt.record_success(action.leg)
                case RequestFinished():
                    self._finish()
                case StartLegs():
                    self._start_attempt(action.attempt, action.on_new_connections)
                case RelayReply():
                    self._relay_reply(action.leg)
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
                    self._avoid(action.leg, attempt)
                    now_s, name = self._services.loop.time(), attempt.worker(action.leg).name
                    self.record.record_failure(now_s, action.leg.name.lower(), name)
                    self._services.metrics.count(self._services.metrics.retries, action.leg.name.lower())
                case ScheduleRetry():
                    self._schedule_retry(action.backoff_index)
                case ReplyError():
                    is_lacking = action.reason is FailureReason.NO_INSTANCE
                    self._relay.fail(action.status, action.reason, self._lacking if is_lacking else "")
                case EmitErrorEvent():
                    self._relay.emit_error_event(action.reason)
                case ContinueStream():
                    tokens = self._relay.continue_stream()
                    self.record.record_migration(self._services.loop.time(), tokens)
                    self._services.metrics.migrated += 1
                    logger.info("a stream goes on on other instances behind %d tokens", tokens)
                case CloseClient():
                    self._relay.cut(action.reason)

    def _avoid(self, kind: Leg, attempt: Attempt) -> None:
        """Use this attempt's instance again only if there is no other."""
        if self._excluded is None:
            self._excluded = (set(), set())
        self._excluded[kind].add(attempt.worker(kind).id)

    def _schedule_retry(self, backoff_index: int) -> None:
        services, protocol = self._services, self._protocol
        assert protocol is not None
        if not services.retry_budget.spend(services.loop.time(), len(services.running)):
            services.metrics.count(services.metrics.retries_refused, "budget")
            self._act(protocol.on_retry_refused(protocol.attempt))
            return
        delay_s = services.retry_policy.backoff_s(backoff_index, services.draw())
        self._timer = services.loop.call_later(delay_s, self._on_retry_timer, protocol.attempt)

    # -- relay ------------------------------------------------------------------------------------------

    def _relay_reply(self, kind: Leg) -> None:
        attempt = self._attempt
        assert attempt is not None
        leg = attempt.leg(kind)
        if leg is not None:
            self._relay.take_head(leg)

    def pause(self) -> None:
        """The client does not read: read no more from the instance."""
        self._relay.pause()

    def resume(self) -> None:
        """The client reads again."""
        self._relay.resume()

    def on_client_gone(self) -> None:
        """The client has closed its connection before its reply had ended.

        Clients of streams commonly do so behind the last event: these have their whole reply.
        """
        services, attempt = self._services, self._attempt
        leg = None if attempt is None else attempt.leg(self._relayed)
        has_all = leg is not None and leg.sink is not None and leg.has_all_events and self._request.prompt.is_stream
        self._relay.lose_client(has_all=has_all)
        if has_all and leg is not None and attempt is not None:
            attempt.learn_from_reply(leg)
        else:
            services.metrics.count(services.metrics.aborts, "client_gone")
        if self._protocol is not None:
            self._act(self._protocol.on_client_gone())
            return
        if self._reading is not None:
            self._reading.cancel()
        if self._is_queued:
            services.admission.remove(self)
            self._is_queued = False
        self._account()
        if self.record.is_admitted:
            self._leave()

    def has_id(self, ids: Set[str]) -> bool:
        """Return whether the client has given it one of these ids."""
        given = self._request.own_ids
        return given is not None and not ids.isdisjoint([given] if isinstance(given, str) else given)

    def on_abort(self) -> None:
        """A client has asked for its end: what was generated is the reply, and nothing is tried again."""
        services, protocol, attempt = self._services, self._protocol, self._attempt
        services.metrics.count(services.metrics.aborts, "asked")
        if self._is_queued:
            services.admission.remove(self)
            self._is_queued = False
            self._refuse(503, ABORTED_EARLY, "aborted")
        elif protocol is None or (attempt is None and not self._is_waiting):  # the coordinator has not answered
            self._refuse(503, ABORTED_EARLY, "aborted")
            self._leave()
        elif self._timer is not None or self._is_waiting:  # between two attempts
            self._relay.answer_error(503, ABORTED_EARLY)
            self._act(protocol.on_client_gone())
        else:
            protocol.max_retries = 0
            assert attempt is not None
            for worker in {attempt.worker(Leg.PREFILL), attempt.worker(_DECODE)}:
                attempt.abort_on(worker)

    def on_timeout(self) -> None:
        """The request has run for `--request-timeout-secs`, or the router ends."""
        self._services.metrics.count(self._services.metrics.aborts, "timeout")
        if self._protocol is not None:
            self._act(self._protocol.on_timeout())
            return
        self._relay.answer_error(504, REASON_TEXT[FailureReason.TIMEOUT])
        self._account()
        self._leave()

    def keep_alive(self, now_s: float) -> None:
        """Send a stream's client something while it waits: nothing has been sent to any instance."""
        if self._request.prompt.is_stream:
            self._relay.keep_alive(now_s, self.started_s, self._services.config.sse_keep_alive_secs)

    def check_progress(self, now_s: float) -> None:
        """Keep a stream alive that brings nothing; give up a leg whose first byte, or whose next one, is overdue.

        A late first byte is prefill's failure while it has not answered. The time in which the client does not
        read is not the instance's.
        """
        attempt, protocol, config = self._attempt, self._protocol, self._services.config
        if not self._request.prompt.is_stream:
            return
        if protocol is None:
            if config.sse_keep_alive_secs:
                self.keep_alive(now_s)
            return
        if attempt is None:
            if self._is_waiting and config.sse_keep_alive_secs:
                self.keep_alive(now_s)
            return
        phase = protocol.phase
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
        attempt.abort_on(leg.worker)
        leg.lose()

    # -- account ----------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Both legs have ended: close the record once the client's reply is written, and let the next request in."""
        relay = self._relay
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_waiting:
            self._stop_waiting()
        # Relayed nothing, answered nothing: prefill's half of a joined reply failed.
        if relay.is_open and not relay.is_building:
            relay.answer_error(502, REASON_TEXT[FailureReason.LEG_FAILED])
        if relay.is_building:
            relay.when_built = self._account
        else:
            self._account()
        self._leave()

    def _leave(self) -> None:
        """Give the place to the next request in the queue."""
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        if self._is_queued:  # it had made room
            self._is_queued = False
            self._services.admission.remove(self)
            return
        self._services.on_ended(self, self._services.loop.time())

    def _account(self) -> None:
        """Close the record and hand it to everything that is made of it."""
        services, record = self._services, self.record
        record.close(services.loop.time())
        if self._charge is not None and services.tenants is not None:
            services.tenants.settle(self._charge, record, services.admission)
        if logger.isEnabledFor(logging.DEBUG):
            for at_s, what in record.events():
                logger.debug("request %s: %8.3f s %s", record.request_id.decode("latin-1"), at_s, what)
        services.metrics.record_end(record)
        if services.access_log is not None:
            services.access_log.add(record.access_entry())
        if services.view is not None and record.is_admitted and services.view.wants_end(self):
            services.view.note_end(self, record.seen())
        if services.tracer is not None and record.is_admitted:
            services.tracer.record_end(record)

    # -- what others ask of it --------------------------------------------------------------------------

    def seen(self) -> SeenRequest:
        """Return the request as the live page shows it."""
        return self.record.seen()

    @property
    def online_class(self) -> tuple[str, LengthClass] | None:
        """Return model and length class of a request for which an online client waits; None before it has a class."""
        length_class = self.record.length_class
        if length_class is None or not self._request.is_online:
            return None
        return self._request.model.name, length_class

    def online_wait(self, now_s: float) -> tuple[str, float] | None:
        """Return the prefill instance and the time waited there, while an online client waits for its prefill."""
        attempt = self._attempt
        if attempt is None or not self._request.is_online or not attempt.is_prefilling:
            return None
        return attempt.route.prefill.url, max(0.0, attempt.waited_s(now_s))

    def online_wait_s(self, now_s: float) -> float | None:
        """Return the time in the queue of a request for which an online client waits."""
        return max(0.0, now_s - self.started_s) if self._request.is_online else None
