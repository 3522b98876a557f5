"""One attempt of one request on two instances: its legs, and what they cost the instances."""

from __future__ import annotations

import re
from typing import Final

from sglang_ext.long_pool.decide.late_binding import ends_much_sooner
from sglang_ext.types import LengthClass
from sglang_ext_router.decide.block_index import PromptKind
from sglang_ext_router.decide.pd_actions import Leg
from sglang_ext_router.instances.workers import RankLoad, Worker
from sglang_ext_router.observe.request_record import RequestRecord
from sglang_ext_router.request.prepared_request import PreparedRequest
from sglang_ext_router.request.relay import end_error_status, find_int
from sglang_ext_router.request.request_ids import abort_ids
from sglang_ext_router.request.routing import PoolPlace, Route
from sglang_ext_router.request.services import Services
from sglang_ext_router.request.upstream import LegOwner, UpstreamConnection

# As /v1/chat/completions and /generate name them, and as /v1/responses and /v1/messages do.
PROMPT_TOKENS: Final = (b'"prompt_tokens":', b'"input_tokens":')
OUTPUT_TOKENS: Final = (b'"completion_tokens":', b'"output_tokens":')
_PREFILL, _DECODE = Leg.PREFILL, Leg.DECODE
# SGLang's own warm-up address (`FAKE_BOOTSTRAP_HOST`): a prefill instance finishes such a request without a peer.
WITHOUT_DECODE_JSON = b'"bootstrap_host":"2.2.2.2","bootstrap_room":'
# Chunks of a stream that bring no token: `[DONE]`, the end of the body, a chat's role and finish reason.
_OTHER_CHUNKS = {b"/v1/chat/completions": 4}


def _rank_lines(rank: int | None) -> bytes:
    """Return the header lines by which an instance gives the request to one of its data-parallel ranks.

    The first is read on the paths of chats and of /generate, the second on the others.
    """
    return b"" if rank is None else b"x-override-routed-dp-rank: %d\r\nx-data-parallel-rank: %d\r\n" % (rank, rank)


class Attempt:
    """Adds its load to the two instances, and takes it off leg by leg: every leg ends with exactly one verdict.

    The verdicts are `record_success`, `release_trial` and `record_failure`; the instances' circuit breakers and the
    planner's picture of their prefix caches learn from them.
    """

    __slots__ = (
        "_decode_rank",
        "_has_first_byte",
        "_is_prefilling",
        "_legs",
        "_new_tokens",
        "_place",
        "_prefill_rank",
        "_prefills",
        "_record",
        "_request",
        "_services",
        "predicted_s",
        "route",
        "started_s",
    )

    def __init__(
        self,
        services: Services,
        request: PreparedRequest,
        record: RequestRecord,
        route: Route,
        now_s: float,
        place: PoolPlace | None = None,
    ) -> None:
        """`place`: in a long pool, which counts where its instance has become the route's."""
        self._services = services
        self._request = request
        self._record = record
        self.started_s = record.sent_s = now_s
        self._has_first_byte = False
        self._is_prefilling = True  # its new tokens count as pending at the prefill instance
        self._legs: list[UpstreamConnection | None] = [None, None]
        self.route = record.route = route
        prompt, prompt_tokens = request.prompt, request.prompt_tokens
        prefill, decode = route.prefill, route.decode
        self._place = place if place is not None and place.prefill is prefill else None
        # A prompt that several instances compute together is work of each of them.
        self._prefills = (prefill,) if self._place is None else self._place.members
        self._new_tokens = new_tokens = route.decision.new_tokens * prompt.sequence_count // len(self._prefills)
        # Until the prefill has ended, from now on.
        self.predicted_s = route.decision.predicted_wait_s + new_tokens / prefill.rate.tokens_per_s
        prefill.in_flight += 1
        if self._place is None and not route.is_plain:
            work_s = new_tokens / prefill.rate.tokens_per_s
            request.model.prefill_loads[prefill.served_classes].record_arrival(now_s, work_s)
        for worker in self._prefills:
            if worker.pending_tokens == 0:
                worker.progress.begin(now_s, new_tokens)
            worker.pending_tokens += new_tokens
        self._prefill_rank = None if route.prefill_rank is None else prefill.ranks[route.prefill_rank]
        if self._prefill_rank is not None:
            self._prefill_rank.in_flight += 1
            self._prefill_rank.pending_tokens += new_tokens
        self._decode_rank: RankLoad | None = None
        if decode is not None:
            decode.in_flight += 1
            decode.reserved_tokens += prompt_tokens
            if route.decode_rank is not None:
                self._decode_rank = decode.ranks[route.decode_rank]
                self._decode_rank.in_flight += 1
                self._decode_rank.reserved_tokens += prompt_tokens
        if services.registry.suspects:
            prefill.breaker.on_start(now_s)
            if decode is not None:
                decode.breaker.on_start(now_s)
        services.metrics.count_route(route, prompt_tokens)

    # -- legs -------------------------------------------------------------------------------------------

    def send(self, owner: LegOwner, number: int, on_new_connections: bool) -> None:
        """Send the same body to each instance; `owner` gets the events of the legs, under this attempt's number.

        The room is that of its place in a long pool, where it has one, otherwise a new one.
        """
        services, request, route = self._services, self._request, self.route
        if self._place is not None and services.pool_offers is not None:
            room = self._place.room
            services.pool_offers.on_sent(room, route.prefill, request.prompt)
        else:
            room = services.rooms.take(request.prompt.sequence_count)
            services.learn_prefix(request.prompt, route.prefill, route.prefill_rank)
        if request.session:
            hashes = request.prompt.hashes
            services.planner.prefixes.sessions.record(request.session, route.prefill.id, request.prompt_tokens, hashes)
        self._record.room_id = made_id = request.made_id(room)
        decode_worker = route.decode
        if decode_worker is not None and decode_worker.caches_at_decode:
            services.learn_prefix(request.prompt, decode_worker, route.decode_rank)
        bootstrap_json = route.prefill.bootstrap_json
        if decode_worker is None:
            bootstrap_json = b"" if route.is_plain else WITHOUT_DECODE_JSON
        elif route.prefill_rank is not None:  # from which decode gets the KV of all sequences
            bootstrap_json = b'"disagg_prefill_dp_rank":%d,%b' % (route.prefill_rank, bootstrap_json)
        takes_output = route.prefill.takes_output and (decode_worker is None or decode_worker.takes_output)
        head, body, tail = request.message(bootstrap_json, room, made_id, self.started_s, takes_output)
        target = request.target
        start = services.pools.start
        if body is not None:
            route.prefill.reading.add(len(body), self.started_s)
            if decode_worker is not None:
                decode_worker.reading.add(len(body), self.started_s)
        prefill_head = route.prefill.request_head(target) + _rank_lines(route.prefill_rank) + head
        prefill = start(route.prefill, owner, _PREFILL, number, prefill_head, on_new_connections, body, tail)
        if request.prompt.is_stream or decode_worker is None:
            prefill.reports_body = True  # which may be an error
        is_renamed = request.own_ids is not None and not request.prompt.is_stream
        # Of many sequences /generate reports no sum.
        counts_each = services.tenants is not None and request.path == b"/generate"
        counts_each = counts_each and request.prompt.sequence_count > 1 and not request.prompt.is_stream
        keeps_own = is_renamed or counts_each
        prefill.keeps_reply = request.scores.is_joined or (keeps_own and decode_worker is None)
        self._legs = [prefill, None]
        if decode_worker is not None:
            decode_head = decode_worker.request_head(target) + _rank_lines(route.decode_rank) + head
            decode = start(decode_worker, owner, _DECODE, number, decode_head, on_new_connections, body, tail)
            decode.keeps_reply = request.scores.is_joined or keeps_own
            self._legs[_DECODE] = decode

    def leg(self, kind: Leg) -> UpstreamConnection | None:
        """Return the leg's connection; None once it has ended."""
        return self._legs[kind]

    def forget_leg(self, leg: UpstreamConnection) -> None:
        """The leg has ended by itself: there is nothing to abort."""
        if self._legs[leg.kind] is leg:
            self._legs[leg.kind] = None
        self._count_sent(leg)

    def abort_leg(self, kind: Leg) -> None:
        """Close the leg and abort the request on its instance, which would notice a closed connection only later."""
        leg, self._legs[kind] = self._legs[kind], None
        if leg is None:
            return
        self._count_sent(leg)
        has_all = leg.has_all_events
        leg.abort()  # it may still be relayed: its last bytes decide whether an error event fits behind them
        if not has_all:
            self.abort_on(leg.worker)

    def abort_on(self, worker: Worker) -> None:
        """Have an instance drop the request, by the ids that it knows."""
        prompt = self._request.prompt
        ids = abort_ids(
            self._request.own_ids,
            self._record.room_id,
            prompt.sequence_count,
            prompt.samples_per_prompt,
            worker.aborts_families and not self._request.is_undivided,  # which has a list of ids
        )
        self._services.aborter.abort(worker, ids)

    # -- what the replies say ---------------------------------------------------------------------------

    def on_first_byte(self, *, is_relayed: bool) -> None:
        """The first byte of the reply has come, so the KV has arrived: decode's next report counts it as used."""
        self._has_first_byte = True
        request, record, services = self._request, self._record, self._services
        decode = self.route.decode
        if decode is not None:
            decode.reserved_tokens -= request.prompt_tokens
            decode.reported_free_kv_tokens -= request.prompt_tokens
            decode.reported_awaiting_tokens = max(0, decode.reported_awaiting_tokens - request.prompt_tokens)
            rank = self._decode_rank
            if rank is not None:
                rank.reserved_tokens -= request.prompt_tokens
                rank.free_kv_tokens -= request.prompt_tokens
                rank.awaiting_tokens = max(0, rank.awaiting_tokens - request.prompt_tokens)
            if not request.prompt.is_stream or request.prompt.sequence_count == 1:
                self._release_prefill()  # it has ended, although its own reply may come later than decode's
        if is_relayed:
            now_s = services.loop.time()
            goes_on = record.first_byte_s is not None  # the client has the beginning of its stream
            if not goes_on:
                record.first_byte_s = now_s
            if request.prompt.is_stream:
                if not goes_on:
                    record.first_token_s = now_s
                    services.metrics.record_ttft(self.route.decision, now_s - record.started_s)
                rate = self.route.compared_rate
                if rate:
                    way = request.model.divided_cost if decode is not None else request.model.plain_cost
                    predicted_s = self.route.decision.predicted_wait_s + self._new_tokens / rate
                    way.observe(now_s - self.started_s, predicted_s, now_s)
                if self.route.is_plain:
                    self._record_prefilled(now_s)
                    self._release_prefill()

    def _record_prefilled(self, now_s: float) -> None:
        """The prefill has ended: learn how long it took."""
        services, request, record = self._services, self._request, self._record
        record.prefilled_s = now_s
        services.metrics.of(self.route.decision.length_class).record_prefill(now_s - self.started_s, self.predicted_s)
        if request.is_online:
            services.online_waits.record(self.route.prefill.url, self.waited_s(now_s), now_s)

    def learn_from_prefill(self, leg: UpstreamConnection) -> None:
        """Prefill's reply is whole: learn how long it took, and how many tokens the prompt had.

        That of an undivided instance is the whole reply, of which only a stream's first byte shows when prefill ended.
        """
        services, request, record = self._services, self._request, self._record
        now_s = leg.received_s
        if not request.prompt.is_stream:
            record.first_token_s = now_s
        if not self.route.is_plain:
            self._record_prefilled(now_s)
        if services.planner.wants_token_count():
            tokens = find_int(leg.raw, b'"prompt_tokens":')
            if tokens:
                services.planner.learn_tokens(request.model, request.prompt, tokens)

    def learn_from_reply(self, leg: UpstreamConnection) -> None:
        """The reply that the client gets is whole: count its tokens, and the pauses of a stream."""
        services, request, record = self._services, self._request, self._record
        prompt = request.prompt
        record.reply_end_s = leg.received_s
        end = leg.end_of_body()
        reads_prompt = services.access_log is not None and prompt.sequence_count == 1
        if reads_prompt or services.tenants is not None:
            record.known_prompt_tokens = self._reported(leg, end, PROMPT_TOKENS)
        if request.is_undivided:  # nothing is generated
            return
        if PromptKind.RESPONSES in prompt.needs and prompt.blocks is not None:
            tokens = find_int(end, b'"input_tokens":')
            if tokens is not None and tokens != prompt.blocks.tokens:
                services.planner.learn_misread(self.route.prefill, PromptKind.RESPONSES)
        metrics = services.metrics.of(self.route.decision.length_class)
        if not prompt.is_stream:
            tokens = self._reported(leg, end, OUTPUT_TOKENS)
        elif record.error_status is None:
            record.error_status = end_error_status(end)
            tokens = self._reported(leg, end, OUTPUT_TOKENS) if prompt.sequence_count == 1 else None
            if tokens is None:
                others = _OTHER_CHUNKS.get(request.path, 2) - (not leg.is_complete)
                tokens = leg.chunks - others + request.output_tokens
            metrics.stall_s.observe(leg.longest_gap_s)
            if tokens > 1 and prompt.sequence_count == 1 and record.first_byte_s is not None:
                metrics.tpot_s.observe((leg.received_s - record.first_byte_s) / (tokens - 1))
        else:
            return
        record.output_tokens = tokens
        if tokens is not None:
            metrics.output_tokens.observe(tokens)

    def _reported(self, leg: UpstreamConnection, end: bytes, names: tuple[bytes, bytes]) -> int | None:
        """Return a count of tokens that a reply reports, over all sequences; None where it reports none.

        /generate has a count for each sequence, which are added up where the reply is kept.
        """
        prompt = self._request.prompt
        if prompt.sequence_count > 1 and self._request.path == b"/generate":
            if prompt.is_stream or not leg.keeps_reply:
                return None
            counts = [int(count) for count in re.findall(names[0] + rb"\s*(\d+)", leg.raw)]
            # Each sample of a prompt reports the whole prompt.
            samples = prompt.samples_per_prompt if names is PROMPT_TOKENS else 1
            return sum(counts) // samples if counts else None
        tokens = find_int(end, names[0])
        return find_int(end, names[1]) if tokens is None else tokens

    def _count_sent(self, leg: UpstreamConnection) -> None:
        """A leg has ended before its stream: what the client has of that was made for it.

        The last event of /generate says how many tokens that is, and so may that of other paths.
        """
        record, request = self._record, self._request
        if leg.sink is None or leg.is_complete or not request.prompt.is_stream or request.is_undivided:
            return
        if record.reply_end_s is not None:  # the client had all of it, and left before its end
            return
        tokens: int | None = None
        if request.prompt.sequence_count == 1:
            end = leg.end_of_body()
            tokens = self._reported(leg, end, OUTPUT_TOKENS)
            record.known_prompt_tokens = self._reported(leg, end, PROMPT_TOKENS)
        if tokens is None:
            heads = 1 if request.path == b"/v1/chat/completions" else 0  # which brings no token
            tokens = max(0, leg.chunks - heads) + request.output_tokens
        record.output_tokens = tokens

    def waited_s(self, now_s: float) -> float:
        """Return the time since the request came, without the time that computing its prefill should take."""
        computing_s = self._new_tokens / self.route.prefill.rate.tokens_per_s
        return now_s - self.started_s + self._record.queue_s - computing_s

    # -- the instances' account -------------------------------------------------------------------------

    def worker(self, leg: Leg) -> Worker:
        decode = self.route.decode
        if leg is _PREFILL or decode is None:
            return self.route.prefill
        return decode

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
        rank = self._prefill_rank if leg is _PREFILL else self._decode_rank
        if rank is not None:
            rank.in_flight -= 1
        if leg is _PREFILL:
            self._release_prefill()
        elif not self._has_first_byte:
            worker.reserved_tokens -= self._request.prompt_tokens
            if rank is not None:
                rank.reserved_tokens -= self._request.prompt_tokens

    def _release_prefill(self) -> None:
        if self._is_prefilling:
            self._is_prefilling = False
            now_s = self._services.loop.time()
            for worker in self._prefills:
                worker.pending_tokens -= self._new_tokens
                worker.released_tokens += self._new_tokens
                worker.progress.begin(now_s, worker.pending_tokens)
            if self._prefill_rank is not None:
                self._prefill_rank.pending_tokens -= self._new_tokens
                self._prefill_rank.released_tokens += self._new_tokens

    def ends_sooner_elsewhere(self, place: PoolPlace, now_s: float) -> bool:
        """Return whether it waits at a member of a place, and ends much sooner on an instance without the chunk.

        What instances have begun is not known: it counts as begun once the wait that was predicted for it is over.
        """
        decision, passed_s = self.route.decision, now_s - self.started_s
        if (
            not self._is_prefilling
            or self.route.prefill not in place.members
            or decision.length_class is not LengthClass.SHORT
            or passed_s >= decision.predicted_wait_s
        ):
            return False
        request = self._request
        here_s = self.predicted_s - passed_s + place.chunk_s
        elsewhere_s = self._services.planner.soonest_end_s(
            request.model, request.prompt, request.prompt_tokens, place.members, now_s
        )
        return ends_much_sooner(elsewhere_s, here_s)

    @property
    def is_prefilling(self) -> bool:
        """Return whether its prefill has not ended, as far as is known."""
        return self._is_prefilling

    def _learn_not_prefilled(self, leg: Leg, worker: Worker) -> None:
        if leg is _PREFILL and not (self._has_first_byte and self.route.is_plain):
            request = self._request
            held_tokens = self.route.decision.cached_tokens
            self._services.planner.prefixes.forget_sent(
                *(request.prompt, worker, held_tokens, request.prompt_tokens, request.session, self.route.prefill_rank)
            )
        elif leg is _DECODE and worker.caches_at_decode and not self._has_first_byte:  # nor has it the prompt's KV
            held_tokens = self.route.decision.decode_cached_tokens
            self._services.planner.prefixes.forget_sent(
                self._request.prompt, worker, held_tokens, self._request.prompt_tokens, rank=self.route.decode_rank
            )
