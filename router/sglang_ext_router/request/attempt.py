"""One attempt of one request on two instances: its legs, and what they cost the instances."""

from __future__ import annotations

from sglang_ext_router.decide.pd_actions import Leg
from sglang_ext_router.instances.workers import Worker
from sglang_ext_router.request.prepared_request import PreparedRequest
from sglang_ext_router.request.request_ids import abort_ids
from sglang_ext_router.request.routing import PoolPlace, Route
from sglang_ext_router.request.services import Services
from sglang_ext_router.request.upstream import LegOwner, UpstreamConnection

_PREFILL, _DECODE = Leg.PREFILL, Leg.DECODE
# SGLang's own warm-up address (`FAKE_BOOTSTRAP_HOST`): a prefill instance finishes such a request without a peer.
WITHOUT_DECODE_JSON = b'"bootstrap_host":"2.2.2.2","bootstrap_room":'


class Attempt:
    """Takes its load upon the instances, and off them leg by leg: every leg ends with exactly one verdict.

    The verdicts are `record_success`, `release_trial` and `record_failure`; the instances' circuit breakers and the
    planner's picture of their prefix caches learn from them.
    """

    __slots__ = (
        "_has_first_byte",
        "_legs",
        "_new_tokens",
        "_request",
        "_services",
        "predicted_s",
        "request_id",
        "route",
        "started_s",
    )

    def __init__(self, services: Services, request: PreparedRequest, route: Route, now_s: float) -> None:
        self._services = services
        self._request = request
        self.started_s = now_s
        self._has_first_byte = False
        self._legs: list[UpstreamConnection | None] = [None, None]
        self.route = route
        self.request_id = b""  # made of its room
        prompt, prompt_tokens = request.prompt, request.prompt_tokens
        self._new_tokens = new_tokens = route.decision.new_tokens * prompt.sequence_count
        prefill, decode = route.prefill, route.decode
        # Until the prefill has ended, from now on.
        self.predicted_s = route.decision.predicted_wait_s + new_tokens / prefill.rate.tokens_per_s
        prefill.in_flight += 1
        if prefill.pending_tokens == 0:
            prefill.progress.begin(now_s, new_tokens)
        prefill.pending_tokens += new_tokens
        if decode is not None:
            decode.in_flight += 1
            decode.reserved_tokens += prompt_tokens
        if services.registry.suspects:
            prefill.breaker.on_start(now_s)
            if decode is not None:
                decode.breaker.on_start(now_s)
        services.metrics.count_route(route, prompt_tokens)

    # -- legs -------------------------------------------------------------------------------------------

    def send(self, owner: LegOwner, number: int, on_new_connections: bool, place: PoolPlace | None = None) -> None:
        """Send the same body to each instance; what comes back is told to `owner` under this attempt's number.

        Under the room of its `place` in a long pool, where that has become the route, else under a new one.
        """
        services, request, route = self._services, self._request, self.route
        if place is not None and place.prefill is route.prefill and services.pool_offers is not None:
            room = place.room
            services.pool_offers.note_sent(room, route.prefill, request.prompt)
        else:
            room = services.rooms.take(request.prompt.sequence_count)
            services.learn_prefix(request.prompt, route.prefill)
        self.request_id = made_id = request.made_id(room)
        decode_worker = route.decode
        bootstrap_json = WITHOUT_DECODE_JSON if decode_worker is None else route.prefill.bootstrap_json
        head, body, tail = request.message(bootstrap_json, room, made_id, self.started_s)
        target = request.target
        start = services.pools.start
        prefill_head = route.prefill.request_head(target) + head
        prefill = start(route.prefill, owner, _PREFILL, number, prefill_head, on_new_connections, body, tail)
        if request.prompt.is_stream or decode_worker is None:
            prefill.tells_body = True  # which may be an error
        prefill.keeps_reply = is_joined = request.scores.is_joined
        self._legs = [prefill, None]
        if decode_worker is not None:
            decode_head = decode_worker.request_head(target) + head
            decode = start(decode_worker, owner, _DECODE, number, decode_head, on_new_connections, body, tail)
            decode.keeps_reply = is_joined
            self._legs[_DECODE] = decode

    def leg(self, kind: Leg) -> UpstreamConnection | None:
        """The leg's connection; None once it has ended."""
        return self._legs[kind]

    def forget_leg(self, leg: UpstreamConnection) -> None:
        """The leg has ended by itself: there is nothing to abort."""
        if self._legs[leg.kind] is leg:
            self._legs[leg.kind] = None

    def abort_leg(self, kind: Leg) -> None:
        """Close the leg and tell the instance, which would notice a closed connection only later."""
        leg, self._legs[kind] = self._legs[kind], None
        if leg is None:
            return
        leg.abort()  # it may still be relayed: its last bytes tell whether an error event fits behind them
        self.tell_aborted(leg.worker)

    def tell_aborted(self, worker: Worker) -> None:
        """Have an instance drop the request, by the ids that it knows."""
        prompt = self._request.prompt
        ids = abort_ids(
            self._request.own_ids,
            self.request_id,
            prompt.sequence_count,
            prompt.samples_per_prompt,
            worker.aborts_families,
        )
        self._services.aborter.abort(worker, ids)

    # -- the instances' account -------------------------------------------------------------------------

    def worker(self, leg: Leg) -> Worker:
        decode = self.route.decode
        if leg is _PREFILL or decode is None:
            return self.route.prefill
        return decode

    def note_first_byte(self) -> None:
        """The KV has arrived: no longer on its way but used, which decode's next report will say."""
        self._has_first_byte = True
        prompt_tokens = self._request.prompt_tokens
        decode = self.route.decode
        if decode is None:
            return
        decode.reserved_tokens -= prompt_tokens
        decode.reported_free_kv_tokens -= prompt_tokens
        decode.reported_awaiting_tokens = max(0, decode.reported_awaiting_tokens - prompt_tokens)

    def record_success(self, leg: Leg) -> None:
        """The instance did its part."""
        worker = self.worker(leg)
        registry = self._services.registry
        if registry.suspects and worker.id in registry.suspects:
            worker.breaker.record_success(self._services.loop.time(), self.started_s)
            if worker.breaker.is_quiet:
                registry.suspects.discard(worker.id)
        self._release(leg, worker)

    def release_trial(self, leg: Leg) -> None:
        """The leg has ended and says nothing about the instance."""
        worker = self.worker(leg)
        if worker.id in self._services.registry.suspects:
            worker.breaker.release_trial()
        self._release(leg, worker)
        self._learn_not_prefilled(leg, worker)

    def record_failure(self, leg: Leg) -> None:
        """The instance failed."""
        worker = self.worker(leg)
        registry = self._services.registry
        worker.breaker.record_failure(self.started_s, self._services.loop.time())
        if registry.contains(worker):
            registry.suspects.add(worker.id)
        worker.failed_legs += 1
        self._release(leg, worker)
        self._learn_not_prefilled(leg, worker)

    def _release(self, leg: Leg, worker: Worker) -> None:
        worker.in_flight -= 1
        if leg is _PREFILL:
            worker.pending_tokens -= self._new_tokens
            worker.progress.begin(self._services.loop.time(), worker.pending_tokens)
        elif not self._has_first_byte:
            worker.reserved_tokens -= self._request.prompt_tokens

    def _learn_not_prefilled(self, leg: Leg, worker: Worker) -> None:
        if leg is _PREFILL:
            request = self._request
            held_tokens = self.route.decision.cached_tokens
            self._services.planner.learn_not_prefilled(request.prompt, worker, held_tokens, request.prompt_tokens)
