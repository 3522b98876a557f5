"""A prefill instance of a long pool: its long prefills may be computed by several instances.

A long request that has arrived is offered to the pool's coordinator and leaves the waiting queue. It comes back

- as it was (declined), or with nearly all of its KV in the prefix cache (collected): SGLang goes on with it as with any
  other request;
- computed, with all of its KV on the way to decode (`ending.py`): SGLang samples its first token and waits for the
  transfer's end, without any KV of it here. Where the transfer fails it goes back into the pool, to be collected.

A prompt that does not fit the memory of this instance can only be computed by the pool and sent to decode from there;
it is refused where that cannot be. Of any other prefill, a failure on the way costs time and nothing else. Sampling,
structured output and the transfer to decode are SGLang's own.

Between two batches of its own the scheduler takes part in at most one chunk of any member's request.
"""

from __future__ import annotations

import itertools
import os
import select
from array import array
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import is_aborted, prepare_abort
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import NextBatchPlan
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_ext.engine.options import options_from_environment
from sglang_ext.engine.request_traces import trace_of
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.sglang.instance import LapsInstance
from sglang_ext.laps.sglang.queued_request import LapsEntry, count_wait, entry_of, prefill_tokens, reclassify
from sglang_ext.laps.sglang.scheduler import LengthAwareScheduler
from sglang_ext.long_pool.decide.orders import MeasuredCost, MemberReport
from sglang_ext.long_pool.member.kv_streams import Target
from sglang_ext.long_pool.member.pool_member import (
    Collected,
    Concluded,
    Declined,
    Outcome,
    PoolMember,
    Sendable,
)
from sglang_ext.long_pool.messages import Destination
from sglang_ext.long_pool.sglang.ending import sample, take_back
from sglang_ext.long_pool.sglang.engine import build_member, max_chunk_tokens, prefix_namespace, share_memory
from sglang_ext.transfer.sglang.manager import HandshakeKVManager
from sglang_ext.transfer.sglang.sender import HandshakeKVSender
from sglang_ext.types import LengthClass


@dataclass(frozen=True, slots=True)
class _Shared:
    """A request of this instance that the pool computes."""

    request: Any
    cached_tokens: int
    prefix_slots: torch.Tensor
    lock: Any  # on the cached prefix


class SequenceParallelScheduler(LengthAwareScheduler):
    """REPLACE `Scheduler` on a member of a long pool."""

    _member: PoolMember | None = None  # None until everything that it needs has been set up
    _min_tokens = 0
    _max_chunk_tokens: int | None = None
    # Prompts of this many tokens or more are the pool's; None: SGLang refuses them.
    _own_input_tokens: int | None = None
    max_req_len: int
    max_req_input_len: int
    disagg_prefill_inflight_queue: list[Any]

    def init_load_inquirer(self) -> None:
        super().init_load_inquirer()
        self._is_batch_next = False  # before the next chunk of the pool
        self._has_offered = False  # in this round
        self._shared: dict[int, _Shared] = {}
        self._ending: dict[int, _Shared] = {}  # computed, and on their way to decode, without KV here
        self._at_decode: dict[int, _Shared] = {}  # the pool may still read their cached prefix here
        self._sending: dict[int, HandshakeKVSender] = {}  # of requests that have come back, until all KV is at decode
        self._resumed: list[
            tuple[Any, Any]
        ] = []  # requests that have come back and wait, locks on what is cached of them

    def run_event_loop(self) -> None:
        options = options_from_environment(os.environ)
        if options is not None and options.cdsp is not None:
            self._member = build_member(self, options.cdsp)
            share_memory(self.tree_cache, self._member.kept)
            self._min_tokens = options.cdsp.min_tokens
            self._max_chunk_tokens = max_chunk_tokens(self, options.cdsp)
            manager = self.disagg_prefill_bootstrap_queue.kv_manager
            if isinstance(manager, HandshakeKVManager) and manager.shared_from_tokens is not None:
                self._admit_any_length()
            if self.idle_sleeper is not None and self._member.wake_descriptor is not None:
                self.idle_sleeper.poller.register(self._member.wake_descriptor, select.POLLIN)
        super().run_event_loop()

    # ---------------------------------------------------------------- prompts that do not fit this instance

    def _admit_any_length(self) -> None:
        """Admit every prompt that the model and the pool can hold, also above this instance's own limit."""
        queue = self.disagg_prefill_bootstrap_queue
        self._own_input_tokens = min(self.max_req_input_len, queue.max_input_len + 1)
        margin = self.max_req_len - self.max_req_input_len
        self.max_req_len = self.model_config.context_len - 1
        self.max_req_input_len = self.max_req_len - margin
        queue.max_input_len = max(queue.max_input_len, self.max_req_input_len)

    def _is_too_long(self, request: Any) -> bool:
        limit = self._own_input_tokens
        return limit is not None and len(request.origin_input_ids) >= limit

    def init_req_max_new_tokens(self, req: Any) -> None:
        # SGLang leaves no token to a prompt that fills the memory, and clips the least number of tokens with it.
        if not self._is_too_long(req):
            super().init_req_max_new_tokens(req)
        elif req.sampling_params.max_new_tokens is None:
            req.sampling_params.max_new_tokens = 1

    def _refuse(self, request: Any, why: str) -> None:
        """It is in no queue, and cannot be computed."""
        tokens, limit = len(request.origin_input_ids), self._own_input_tokens
        message = f"A prompt of {tokens} tokens does not fit this instance's KV memory ({limit} tokens), and {why}."
        if isinstance(request.disagg_kv_sender, HandshakeKVSender):
            request.disagg_kv_sender.refuse(message)
        self.release_aborted_prefill_waiting_req(request)
        self._release_aborted_request(request)
        prepare_abort(request, message, status_code=HTTPStatus.SERVICE_UNAVAILABLE)
        self.output_streamer.stream_output([request], request.return_logprob)

    # ---------------------------------------------------------------- a round

    def get_new_batch_prefill(self, running_batch: Any) -> NextBatchPlan:
        """Return the next batch, or none after a chunk of the pool: chunks and batches alternate.

        SGLang takes in requests between two calls, so a batch behind a chunk has the requests that came meanwhile.
        """
        member, plan = self._member, NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        if member is not None:
            self._has_offered = False
            for outcome in member.take_orders():
                self._resume(outcome)
            self._count_follow_ups(member)
            self._withdraw_failed(member)
            self._follow_ending(member)
        if member is None or self._is_batch_next or not member.has_step:
            plan = super().get_new_batch_prefill(running_batch)
        self._release_locks()
        if member is not None:
            if plan.batch_to_run is None:
                self._is_batch_next = self._compute_shared(member)
            else:
                self._is_batch_next = False
            self._report_load(member, plan.batch_to_run)
            self._report_transferred(member)
        return plan

    def _compute_shared(self, member: PoolMember) -> bool:
        """Take part in the chunk that is due; False where there is none. The next batch begins behind its end."""
        is_due = member.has_step
        for outcome in member.compute():
            self._resume(outcome)
        if is_due and self._laps is not None:
            self._laps.clock.record_idle()
        return is_due

    def _gives_way(self) -> bool:
        """Return whether the coordinator has answered the offers of this round: a chunk is due, or a prompt is back.

        An answer takes a round trip, and a batch that is begun meanwhile keeps the chunk waiting, on all its members.
        """
        member = self._member
        if member is None or not self._has_offered:
            return False
        outcomes = member.await_step()
        for outcome in outcomes:
            self._resume(outcome)
        return bool(outcomes) or member.has_step

    def _count_follow_ups(self, member: PoolMember) -> None:
        """Count the short follow-ups that the pool computes here as arrivals of short prefills.

        They are in as much of a hurry: neither batches nor chunks may become long while they keep coming.
        """
        laps = self._laps
        for new_tokens, cached_tokens in member.take_follow_ups():
            if laps is not None and laps.policy.classify(new_tokens, cached_tokens) is LengthClass.SHORT:
                now_s = laps.now_s()
                deadline_s = laps.policy.deadline_s(LengthClass.SHORT, new_tokens, cached_tokens, now_s, None)
                laps.policy.record_arrival(now_s, LengthClass.SHORT, new_tokens, cached_tokens, deadline_s)

    def _follow_queue(self, laps: LapsInstance) -> None:
        super()._follow_queue(laps)
        member = self._member
        if member is not None and member.is_joined:
            self._offer_all(member, laps)
        unfit = [request for request in self.waiting_queue if self._is_too_long(request) and not is_aborted(request)]
        if unfit:
            self.waiting_queue = [
                request for request in self.waiting_queue if not any(request is too_long for too_long in unfit)
            ]
            for request in unfit:
                why = "a pool cannot share it" if member is not None and member.is_joined else "it is in no pool now"
                self._refuse(request, why)
            self._forget_gone(laps)

    def _offer_all(self, member: PoolMember, laps: LapsInstance) -> None:
        """All long prefills in the queue that can be shared leave it."""
        candidates = {
            entry.key: (request, entry)
            for request in self.waiting_queue
            if (entry := entry_of(request)) is not None and self._can_be_shared(request, entry)
        }
        if not candidates:
            return
        # What is long follows from measurements, which are not the same on every rank.
        chosen = member.ranks.share(
            lambda: [
                key
                for key, (request, entry) in candidates.items()
                if entry.length_class is LengthClass.LONG or self._is_too_long(request)
            ]
        )
        now_s = laps.now_s()
        for key in chosen:
            self._offer(member, *candidates[key], now_s)
        self._forget_gone(laps)

    def _can_be_shared(self, request: Any, entry: LapsEntry) -> bool:
        """Decided alike on every rank."""
        return (
            not entry.was_offered
            and prefill_tokens(request)[0] >= self._min_tokens
            # These want more of the prompt's computation than its KV.
            and not request.return_logprob
            and not request.return_hidden_states
            and request.input_embeds is None
            and request.multimodal_inputs is None
            and request.lora_id is None
        )

    def _offer(self, member: PoolMember, request: Any, entry: LapsEntry, now_s: float) -> None:
        entry.was_offered = True
        # What was found when it came may have been evicted since.
        match_kv_cache(request, self.tree_cache)
        # The last token is the engine's, unless all goes to decode without it: its logits are wanted.
        tokens = (len(request.origin_input_ids) - 1) // self.page_size * self.page_size
        if tokens <= request.prefix_len:
            return
        lock = self.tree_cache.lock(request.last_node)
        cached_tokens = request.prefix_len
        prefix_slots = self.tree_cache.path_device_indices(request.last_node)[:cached_tokens].to(torch.int64)
        slack_s = entry.deadline_s - now_s
        sender, ranks = request.disagg_kv_sender, member.ranks
        destinations: tuple[Destination, ...] = ()
        targets: tuple[Target, ...] = ()
        if isinstance(sender, HandshakeKVSender) and ranks.all(sender.can_be_shared):
            of_rank, targets = sender.share(cached_tokens, prefix_slots.cpu())
            # Several ranks may send to the same one of decode.
            destinations = tuple(dict.fromkeys(itertools.chain.from_iterable(ranks.gather(of_rank))))
        if destinations:
            tokens = len(request.origin_input_ids)
        elif self._is_too_long(request):
            self.tree_cache.unlock(lock)
            return
        self._has_offered = True
        number = member.offer(
            request.origin_input_ids[:tokens],
            cached_tokens,
            prefix_slots,
            waited_s=now_s - entry.arrival_s,
            slack_s=slack_s if slack_s < float("inf") else None,
            destinations=destinations,
            targets=targets,
            room=request.bootstrap_room,
            fits_owner=not self._is_too_long(request),
            namespace=None if self.tree_cache.disable else prefix_namespace(request.extra_key, request.cache_salt),
        )
        trace = trace_of(request)
        if trace is not None:
            trace.leave_queue()
        self._shared[number] = _Shared(request, cached_tokens, prefix_slots, lock)
        self.waiting_queue.remove(request)

    def _resume(self, outcome: Outcome) -> None:
        """A request that was shared goes on here."""
        if isinstance(outcome, Sendable):
            self._end(outcome)
        elif isinstance(outcome, Concluded):
            self.tree_cache.unlock(self._at_decode.pop(outcome.request).lock)
        else:
            self._take_over(outcome)

    def _take_over(self, outcome: Declined | Collected) -> None:
        """The pool leaves a request to this instance."""
        if outcome.request in self._ending and not self._has_come_back(outcome.request):
            if isinstance(outcome, Collected) and outcome.slots.numel():
                # Decode has got all of it after all; what has been collected of it is a prefix of the next turn.
                self._insert(self._ending[outcome.request], outcome.slots)
            return
        shared = self._shared.pop(outcome.request, None)
        if shared is None:
            return
        request = shared.request
        if self._is_too_long(request):
            self.tree_cache.unlock(shared.lock)
            if isinstance(outcome, Collected) and outcome.slots.numel():
                self.token_to_kv_pool_allocator.free(outcome.slots)
            how = f"({outcome.reason})" if isinstance(outcome, Declined) else "(collected)"
            self._refuse(request, f"its pool could not compute it {how}")
            return
        is_taken_twice = False
        if isinstance(outcome, Collected) and outcome.slots.numel():
            # The cache frees slots of what it has already, even while members still read them.
            is_taken_twice = self._insert(shared, outcome.slots) > shared.cached_tokens
        if isinstance(request.disagg_kv_sender, HandshakeKVSender):
            self._sending[outcome.request] = request.disagg_kv_sender
        _send_the_rest(request.disagg_kv_sender, shared, outcome, is_taken_twice=is_taken_twice)
        self.tree_cache.unlock(shared.lock)
        match_kv_cache(request, self.tree_cache)
        # Decode may get it from where it lies, and has been informed, before SGLang takes a lock of its own.
        self._resumed.append((request, self.tree_cache.lock(request.last_node)))
        entry = entry_of(request)
        laps = self._laps
        if entry is not None and laps is not None:
            if isinstance(outcome, Declined) and outcome.waited_s is not None:
                count_wait(request, entry, outcome.waited_s, laps.now_s())
            reclassify(request, entry, laps.policy, laps.now_s())
        self.waiting_queue.insert(0, request)

    def _insert(self, shared: _Shared, slots: torch.Tensor) -> int:
        """Put what lies behind the cached prefix into the prefix cache; how much of all that was there already."""
        request, end = shared.request, shared.cached_tokens + slots.numel()
        inserted = self.tree_cache.insert(
            InsertParams(
                key=RadixKey(
                    array("q", request.origin_input_ids[:end]), request.extra_key, cache_salt=request.cache_salt
                ),
                value=torch.cat([shared.prefix_slots, slots]),
                prev_prefix_len=shared.cached_tokens,
                priority=request.priority or 0,
            )
        )
        there_tokens: int = inserted.prefix_len
        return there_tokens

    # ---------------------------------------------------------------- requests without KV here

    def _end(self, outcome: Sendable) -> None:
        """All of a request is on its way to decode: its first token, and then nothing but waiting."""
        number, shared, member = outcome.request, self._shared.get(outcome.request), self._member
        if shared is None or member is None:
            return
        request, sender = shared.request, shared.request.disagg_kv_sender
        if not member.ranks.all(not sender.is_restarted):
            member.stream_failed(number)
            return
        self._ending[number] = self._shared.pop(number)
        request.cached_tokens = request.cached_tokens_device = outcome.cached_tokens
        batch, result = sample(self, request, outcome.logits)
        self.process_batch_result_disagg_prefill(batch, result)

    def _follow_ending(self, member: PoolMember) -> None:
        """Follow prompts whose transfer has ended, and prompts that have to be sent again."""
        if not self._ending:
            return
        waiting = set(map(id, self.disagg_prefill_inflight_queue))
        for number, shared in list(self._ending.items()):
            if id(shared.request) not in waiting:
                del self._ending[number]
                sender = shared.request.disagg_kv_sender
                if sender.conclude_state != KVPoll.Success:
                    member.withdraw(number)
                elif member.transferred(number, *(sender.transfer_times or (0.0, 0.0))):
                    self._at_decode[number] = shared
                    continue
                self.tree_cache.unlock(shared.lock)
        numbers = list(self._ending)
        are_well = member.ranks.all_of(
            [not self._ending[number].request.disagg_kv_sender.is_restarted for number in numbers]
        )
        for number, is_well in zip(numbers, are_well, strict=True):
            if not is_well:
                self._take_back(number)
                member.stream_failed(number)

    def _has_come_back(self, number: int) -> bool:
        """The pool keeps it no more: whether it has to go on here, as its transfer has not ended."""
        request, member = self._ending[number].request, self._member
        if member is None or not any(inflight is request for inflight in self.disagg_prefill_inflight_queue):
            return False
        if member.ranks.all(request.disagg_kv_sender.poll() == KVPoll.Success):
            return False
        self._take_back(number)
        return True

    def _take_back(self, number: int) -> None:
        """Return a request to the pool as it was before its first token; the rows that were sent are lost."""
        shared = self._shared[number] = self._ending.pop(number)
        waiting = self.disagg_prefill_inflight_queue
        self.disagg_prefill_inflight_queue = [
            waiting_prompt for waiting_prompt in waiting if waiting_prompt is not shared.request
        ]
        take_back(shared.request)

    def _is_ending(self, request: Any) -> bool:
        return any(shared.request is request for shared in self._ending.values())

    def checkpoint_disagg_prefill(self, req: Any) -> None:
        if not self._is_ending(req):
            super().checkpoint_disagg_prefill(req)

    def send_kv_chunk(self, req: Any, last_chunk: bool = False, end_idx: int | None = None) -> None:
        if not self._is_ending(req):
            super().send_kv_chunk(req, last_chunk, end_idx)
            return
        self.disagg_metadata_buffers.set_buf(req)
        req.disagg_kv_sender.send_metadata(len(req.origin_input_ids))

    def _release_locks(self) -> None:
        """Requests that wait no more are locked by SGLang, or have ended."""
        if self._resumed:
            waiting = set(map(id, self.waiting_queue))
            for request, lock in self._resumed:
                if id(request) not in waiting:
                    self.tree_cache.unlock(lock)
            self._resumed = [entry for entry in self._resumed if id(entry[0]) in waiting]

    def _report_transferred(self, member: PoolMember) -> None:
        for number, sender in list(self._sending.items()):
            if sender.conclude_state is not None:
                del self._sending[number]
                if sender.transfer_times is not None:
                    member.transferred(number, *sender.transfer_times)

    def _withdraw_failed(self, member: PoolMember) -> None:
        """Decode has given them up, or is lost; in the queue SGLang finds that, too."""
        if not self._shared:
            return
        numbers = list(self._shared)
        are_well = member.ranks.all_of(
            [not _has_failed(shared.request.disagg_kv_sender) for shared in self._shared.values()]
        )
        for number, is_well in zip(numbers, are_well, strict=True):
            if not is_well:
                self._withdraw(number)

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_extend():
            # What is computed here is sent from here; decode is informed before it is computed.
            for request in batch.reqs:
                sender = getattr(request, "disagg_kv_sender", None)
                if isinstance(sender, HandshakeKVSender):
                    sender.go_on_alone(())
        return super().run_batch(batch, *args, **kwargs)

    def _report_load(self, member: PoolMember, batch: Any) -> None:
        """Report the queued work, and that of `batch`, which is about to run without a report meanwhile."""
        laps = self._laps
        if laps is None:
            return
        batch_s = begun_s = 0.0
        if batch is not None:
            batch_s = laps.policy.predicted_s(batch.extend_lens, batch.prefix_lens)
            # A prompt that goes on after this batch is counted as queued, with all that is left of it.
            rows = zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True)
            begun = [lengths for request, *lengths in rows if request is not self.chunked_req]
            begun_s = laps.policy.predicted_s(*zip(*begun, strict=True)) if begun else 0.0
        if member.is_report_due(laps.now_s(), batch_s):
            report = laps.policy.report(self._snapshot(laps))
            backlog_s = begun_s + report.short.backlog_s + report.long.backlog_s
            short_slo_s = laps.policy.short_slo_s
            member.report(
                MemberReport(
                    backlog_s,
                    member.free_tokens,
                    self._max_chunk_tokens,
                    report.short_rate_per_s,
                    short_slo_s,
                    laps.policy.short_work_s(laps.now_s()),
                    _batch_cost(laps.policy.measured_cost, is_extrapolated=not laps.policy.has_measured_long),
                    batch_s,
                    report.short.backlog_s,
                )
            )

    # ---------------------------------------------------------------- shared requests, wherever SGLang counts

    def is_fully_idle(self, for_health_check: bool = False, *args: Any, **kwargs: Any) -> bool:
        member = self._member
        is_ours = (
            self._shared
            or self._ending
            or self._at_decode
            or (member is not None and member.is_busy and not for_health_check)
        )
        return not is_ours and bool(super().is_fully_idle(for_health_check, *args, **kwargs))

    def held_requests(self) -> list[Any]:
        return [*super().held_requests(), *(shared.request for shared in self._shared.values())]

    def abort_request(self, recv_req: AbortReq) -> None:
        # Back in the queue, where SGLang finds what it aborts.
        for number, shared in list(self._shared.items()):
            if recv_req.abort_all or shared.request.rid.startswith(recv_req.rid):
                self._withdraw(number)
        if recv_req.abort_all and self._member is not None:
            for number in self._at_decode:
                self._member.withdraw(number)
        super().abort_request(recv_req)

    def _withdraw(self, number: int) -> None:
        shared = self._shared.pop(number)
        assert self._member is not None
        self._member.withdraw(number)
        self.tree_cache.unlock(shared.lock)
        self.waiting_queue.append(shared.request)

    def _poll_timeout_aborts(self) -> list[AbortReq]:
        waiting = self.waiting_queue
        self.waiting_queue = [*waiting, *(shared.request for shared in self._shared.values())]
        try:
            return super()._poll_timeout_aborts()
        finally:
            self.waiting_queue = waiting


def _send_the_rest(sender: Any, shared: _Shared, outcome: Declined | Collected, *, is_taken_twice: bool) -> None:
    """Send the rows that members have not sent to decode from the request's own instance; all where they failed."""
    if not isinstance(sender, HandshakeKVSender):
        return
    streamed = outcome.streamed
    if streamed is None:
        sender.go_on_alone([range(shared.cached_tokens)])
    elif isinstance(outcome, Collected) and streamed.is_intact and not is_taken_twice:
        sender.go_on_alone([range(streamed.end_tokens)])
    else:
        sender.send_anew("members of the pool could not send it")
        sender.go_on_alone(())


def _batch_cost(cost: CostCoefficients | None, *, is_extrapolated: bool) -> MeasuredCost | None:
    if cost is None:
        return None
    return MeasuredCost(cost.kappa_s + cost.request_s, cost.token_s, cost.alpha_s, is_extrapolated)


def _has_failed(sender: Any) -> bool:
    return isinstance(sender, HandshakeKVSender) and sender.poll() == KVPoll.Failed
