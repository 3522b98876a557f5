"""SGLang's scheduler with a short and a long queue on every prefill instance.

One round, once per scheduler iteration (`get_new_batch_prefill`):

1. the long prefill whose chunk has just run is parked: it keeps its KV, its row and its lock on the prefix tree;
2. the policy sees everything that has prefill work left, waiting or parked, and plans: all-short batch, one
   long chunk, or nothing yet;
3. SGLang's own batch construction runs over exactly the planned requests; everybody else stays in
   `waiting_queue`, where aborts, timeouts, load reports and flushes find them.

SGLang knows one unfinished (chunked) request. Here there may be several, and `chunked_req` is only ever the one
whose chunk is being built or has just been launched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from http import HTTPStatus
from typing import Any

import msgspec
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import DisaggregationMode, poll_and_all_reduce_attn_cp_tp_group
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    AbortReq,
    GetInternalStateReqOutput,
    SetInternalStateReq,
    SetInternalStateReqOutput,
)
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.managers.schedule_batch import NextBatchPlan
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.load_inquirer import SchedulerLoadInquirer

from sglang_ext.policy.laps.round_plan import LapsMode, RoundPlan, RoundSnapshot
from sglang_ext.sglang_plugin.graphs.runner import graph_status, replayed_shape
from sglang_ext.sglang_plugin.laps.instance import LapsInstance, build_instance
from sglang_ext.sglang_plugin.laps.queued_request import (
    LapsEntry,
    as_queued_prefill,
    entry_of,
    match_again,
    match_prefix,
    prefill_tokens,
    prefix_tokens,
    reclassify,
    remember,
    requested_priority,
    requested_slo_s,
)
from sglang_ext.sglang_plugin.laps.rank_agreement import Step
from sglang_ext.sglang_plugin.laps.status import MODE_PARAMETER, MODES, STATUS_KEY, status_of
from sglang_ext.types import LengthClass

# Of the first so many requests that wait, those with more new tokens than this are matched with the prefix cache
# again when it has grown. Neither depends on a rank's own clock: every rank must touch the cache alike.
_REMATCHED_REQUESTS = 32
_REMATCHED_TOKENS = 128


class LengthAwareScheduler(Scheduler):  # type: ignore[misc]  # SGLang has no type information here
    """REPLACE `Scheduler` on a prefill instance: two queues, and long prefills that yield between chunks."""

    # SGLang's own, untyped there.
    load_inquirer: Any
    waiting_queue: list[Any]
    chunked_req: Any
    chunked_prefill_size: int
    _pending_chunked_abort_req: Any

    _laps: LapsInstance | None = None  # None until everything that it needs has been set up

    def init_load_inquirer(self) -> None:
        super().init_load_inquirer()
        self._parked: list[Any] = []
        self._aborted_while_parked: list[Any] = []
        self._held: list[Any] = []  # waiting requests that are not in the batch that SGLang builds just now
        self._next_key = 0
        self.load_inquirer = ParkedLoadInquirer.over(self.load_inquirer, lambda: self._parked, lambda: self._held)

    def run_event_loop(self) -> None:
        if self.disaggregation_mode is DisaggregationMode.PREFILL:
            self._laps = build_instance(self)
        super().run_event_loop()

    # ---------------------------------------------------------------- a round

    def get_new_batch_prefill(self, running_batch: Any) -> NextBatchPlan:
        laps = self._laps
        if laps is None:
            return super().get_new_batch_prefill(running_batch)
        laps.clock.note_round(laps.now_s())
        plan = self._plan_batch(laps, running_batch)
        if plan.batch_to_run is None:
            laps.clock.note_idle()
        return plan

    def _plan_batch(self, laps: LapsInstance, running_batch: Any) -> NextBatchPlan:
        self._park()
        self._end_failed()
        self._admit_ready_grammars()
        self._classify_arrivals(laps)
        # Here and not with a result, so that an instance that has become idle says so.
        laps.publish(laps.now_s(), lambda: self._snapshot(laps))
        if not self.waiting_queue and not self._parked:
            return super().get_new_batch_prefill(running_batch)
        snapshot = self._snapshot(laps) if laps.agreement.is_deciding else None
        plan, steps = laps.agreement.agree(lambda: _decide(laps, snapshot))
        for position, step in enumerate(steps):
            next_plan = self._carry_out(step, running_batch)
            if next_plan.batch_to_run is not None:
                if plan is not None and snapshot is not None:
                    laps.note_dispatch(snapshot, plan.actions[position])
                return next_plan
            running_batch = next_plan.running_batch
        return NextBatchPlan(batch_to_run=None, running_batch=running_batch)

    def _park(self) -> None:
        if self.chunked_req is not None:
            self._parked.append(self.chunked_req)
            self.chunked_req = None

    def _end_failed(self) -> None:
        """End the started prefills whose transfer has failed, as SGLang does with waiting ones.

        SGLang asks a started one when its last chunk is done: its decode instance may have died long before.
        """
        if not self._parked:
            return
        polls = poll_and_all_reduce_attn_cp_tp_group(
            [request.disagg_kv_sender for request in self._parked], self.attn_cp_cpu_group, self.attn_tp_cpu_group
        )
        for request, poll in zip(list(self._parked), polls, strict=True):
            if poll == KVPoll.Failed:
                self._parked.remove(request)
                self.handle_bootstrap_failure(request)

    def _admit_ready_grammars(self) -> None:
        # Stock SGLang does this at the head of every batch construction; a round that holds constructs none.
        if self.grammar_manager.has_waiting_grammars():
            for request in self.grammar_manager.get_ready_grammar_requests():
                self._add_request_to_queue(request)

    def _classify_arrivals(self, laps: LapsInstance) -> None:
        """Give every request that is new in the waiting queue its entry; look at those again that wait."""
        now_s = laps.now_s()
        for position, request in enumerate(self.waiting_queue):
            entry = entry_of(request)
            if entry is None:
                match_prefix(request, self.tree_cache)
                remember(request, self._new_entry(laps, request, now_s))
            elif (
                laps.has_tree_grown
                and position < _REMATCHED_REQUESTS
                and prefill_tokens(request)[0] > _REMATCHED_TOKENS
            ):
                # A prompt that shares its beginning with one that has just been computed may be short now.
                match_prefix(request, self.tree_cache)
                reclassify(request, entry, laps.policy, now_s)
        laps.has_tree_grown = False

    def _new_entry(self, laps: LapsInstance, request: Any, now_s: float) -> LapsEntry:
        new_tokens, cached_tokens = prefill_tokens(request)
        length_class = laps.policy.classify(new_tokens, cached_tokens)
        # The time until decode has made room is part of what the client waits.
        arrival_s = min(now_s, request.time_stats.prefill_bootstrap_queue_entry_time or now_s)
        priority = requested_priority(request)
        deadline_s = laps.policy.deadline_s(
            length_class, new_tokens, cached_tokens, arrival_s, requested_slo_s(request), priority
        )
        self._next_key += 1
        laps.policy.note_arrival(now_s, length_class, new_tokens, cached_tokens, deadline_s)
        return LapsEntry(self._next_key, length_class, new_tokens, arrival_s, deadline_s, priority)

    def _snapshot(self, laps: LapsInstance) -> RoundSnapshot:
        queue = []
        # Between two rounds the request in hand is not parked; a report counts it all the same.
        in_hand = () if self.chunked_req is None else (self.chunked_req,)
        for request in (*in_hand, *self._parked, *self.waiting_queue):
            entry = entry_of(request)
            if entry is not None:
                queue.append(as_queued_prefill(request, entry, is_current=entry.key == laps.current_key))
        free_tokens = self.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size()
        return RoundSnapshot(laps.now_s(), tuple(queue), free_tokens)

    def _carry_out(self, step: Step, running_batch: Any) -> NextBatchPlan:
        """Let SGLang build a batch of exactly the requests of `step`; all others wait."""
        wanted = self._requests(step.keys)
        if step.chunk_tokens is None:
            wanted = self._without_evicted(wanted)
            if not wanted:
                return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        waiting, started = self.waiting_queue, [request for request in wanted if request in self._parked]
        self.waiting_queue = [request for request in wanted if request not in started]
        self._held = [request for request in waiting if request not in wanted]
        stock_chunk_tokens = self.chunked_prefill_size
        self.chunked_prefill_size = step.chunk_tokens or _whole_tokens(wanted, self.page_size)
        if started:
            self.chunked_req = started[0]
            self._parked.remove(started[0])
        # A refusal of the step before this one must not close this one's door.
        running_batch.batch_is_full = False
        try:
            next_plan = super().get_new_batch_prefill(running_batch)
        finally:
            self.chunked_prefill_size = stock_chunk_tokens
            self._held = []
            left = set(self.waiting_queue)
            taken = {request for request in wanted if request not in left and request not in started}
            known = set(waiting)
            self.waiting_queue = [
                *(request for request in self.waiting_queue if request not in known),
                *(request for request in waiting if request not in taken),
            ]
        if next_plan.batch_to_run is None:
            # The started request found no room; it still is unfinished, and not the one in hand.
            self._park()
            return next_plan
        for request in next_plan.batch_to_run.reqs:
            entry = entry_of(request)
            if entry is not None:
                entry.is_started = True
        return next_plan

    def _without_evicted(self, wanted: Sequence[Any]) -> list[Any]:
        """Those of a short batch that are as short as it was planned for.

        The others have lost cached tokens since they were looked up. They are looked at again in the next round: a
        batch runs its requests whole, and would hold everything up.
        """
        kept = []
        for request in wanted:
            _, cached_tokens = prefill_tokens(request)
            entry = entry_of(request)
            if cached_tokens and entry is not None and match_again(request, self.tree_cache):
                if self._laps is not None:
                    reclassify(request, entry, self._laps.policy, self._laps.now_s())
            else:
                kept.append(request)
        return kept

    def _requests(self, keys: Sequence[int]) -> list[Any]:
        """The requests with these keys, in their order.

        Raises KeyError: this rank's queues are not those of the rank that decided.
        """
        by_key = {
            entry.key: request
            for request in (*self._parked, *self.waiting_queue)
            if (entry := entry_of(request)) is not None
        }
        return [by_key[key] for key in keys]

    # ---------------------------------------------------------------- measurements

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        laps = self._laps
        if laps is not None and batch.forward_mode.is_extend():
            # A batch is of one class; a health check alone has no entry.
            entry = entry_of(batch.reqs[0])
            length_class = LengthClass.SHORT if entry is None else entry.length_class
            laps.clock.note_launch(laps.now_s(), length_class, batch.extend_lens, batch.prefix_lens)
            result = super().run_batch(batch, *args, **kwargs)
            shape = replayed_shape(self.tp_worker.model_runner)
            if shape is not None:
                laps.clock.note_replay(shape)
            return result
        return super().run_batch(batch, *args, **kwargs)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        ending = [request for request in batch.reqs if request.inflight_middle_chunks <= 0]
        super().process_batch_result(batch, result)
        laps = self._laps
        if laps is None or not batch.forward_mode.is_extend():
            return
        now_s = laps.now_s()
        laps.policy.note_iteration(laps.clock.note_result(now_s))
        for request in ending:
            entry = entry_of(request)
            if entry is not None:
                laps.has_tree_grown = True
                laps.policy.note_first_token(now_s, entry.length_class, entry.arrival_s, entry.deadline_s)

    # ---------------------------------------------------------------- parked requests, wherever SGLang counts

    def is_fully_idle(self, *args: Any, **kwargs: Any) -> bool:
        return not self._parked and bool(super().is_fully_idle(*args, **kwargs))

    def held_requests(self) -> list[Any]:
        """Live requests that are in no queue or batch of SGLang's."""
        return self._parked

    # SGLang 0.5.17 calls neither this nor `_poll_timeout_aborts`: there, prefill ends no request for its age.
    def collect_inflight_reqs(self) -> set[Any]:
        return {*super().collect_inflight_reqs(), *self.held_requests()}

    def abort_request(self, recv_req: AbortReq) -> None:
        super().abort_request(recv_req)
        for request in self._parked:
            if (recv_req.abort_all or request.rid.startswith(recv_req.rid)) and (
                request not in self._aborted_while_parked
            ):
                self._aborted_while_parked.append(request)

    def process_pending_chunked_abort(self) -> None:
        super().process_pending_chunked_abort()
        aborted, self._aborted_while_parked = self._aborted_while_parked, []
        for request in aborted:
            if request in self._parked:
                self._end_parked(request)

    def _end_parked(self, request: Any) -> None:
        """Tear a parked request down as SGLang does with the chunked one: abort the sender, free KV and row."""
        in_hand, pending = self.chunked_req, self._pending_chunked_abort_req
        self._parked.remove(request)
        self.chunked_req = self._pending_chunked_abort_req = request
        super().process_pending_chunked_abort()
        self.chunked_req, self._pending_chunked_abort_req = in_hand, pending

    def _poll_timeout_aborts(self) -> list[AbortReq]:
        aborts: list[AbortReq] = super()._poll_timeout_aborts()
        timeout_s = envs.SGLANG_REQ_RUNNING_TIMEOUT.get()
        if timeout_s > 0:
            limit_s = time.perf_counter() - timeout_s
            aborts += [
                _timeout_abort(request)
                for request in self._parked
                if 0 < request.time_stats.forward_entry_time < limit_s and request not in self._aborted_while_parked
            ]
        return aborts

    # ---------------------------------------------------------------- administration

    def get_internal_state(self, recv_req: Any) -> GetInternalStateReqOutput:
        output = super().get_internal_state(recv_req)
        laps = self._laps
        if laps is not None and laps.agreement.is_deciding:
            status = status_of(laps, self._snapshot(laps), locked_tokens=self.tree_cache.protected_size())
            graphs = graph_status(self.tp_worker.model_runner)
            output.internal_state[STATUS_KEY] = status if graphs is None else {**status, "graphs": graphs}
        return output

    def set_internal_state(self, recv_req: SetInternalStateReq) -> SetInternalStateReqOutput:
        number = recv_req.server_args.get(MODE_PARAMETER)
        if number is None:
            return super().set_internal_state(recv_req)
        if self._laps is None or number not in MODES:
            return SetInternalStateReqOutput(updated=False)
        self._laps.switch_mode(LapsMode(MODES[int(number)]))
        return SetInternalStateReqOutput(updated=True)


def _decide(laps: LapsInstance, snapshot: RoundSnapshot | None) -> RoundPlan:
    if snapshot is None:
        raise AssertionError("only the deciding rank is asked, and it has a snapshot")
    return laps.policy.choose(snapshot)


def _whole_tokens(requests: Sequence[Any], page_tokens: int) -> int:
    """A chunk size that splits none of `requests`, whatever of their prefixes has left the cache since."""
    return 1 + sum(int(request.seqlen) + page_tokens for request in requests)


def _timeout_abort(request: Any) -> AbortReq:
    message = "Request running timeout reached."
    reason = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": message}
    return AbortReq(rid=request.rid, abort_message=message, finished_reason=reason)


@dataclass(kw_only=True, frozen=True)
class ParkedLoadInquirer(SchedulerLoadInquirer):  # type: ignore[misc]  # SGLang has no type information
    """A parked request waits like a queued one, but only for what it has left, and its KV is in use already."""

    get_parked: Callable[[], Sequence[Any]]

    @classmethod
    def over(
        cls,
        stock: SchedulerLoadInquirer,
        get_parked: Callable[[], Sequence[Any]],
        get_held: Callable[[], Sequence[Any]],
    ) -> ParkedLoadInquirer:
        """The same inquirer, with parked requests, and with those held back while SGLang builds a batch of others."""
        values = {field.name: getattr(stock, field.name) for field in fields(stock)}
        get_waiting = stock.get_waiting_queue
        values["get_waiting_queue"] = lambda: [*get_waiting(), *get_held()]
        return cls(**values, get_parked=get_parked)

    def _get_num_pending_tokens(self, chunk_deduct: int = 0) -> int:
        return int(super()._get_num_pending_tokens(chunk_deduct)) + self._parked_tokens()

    def get_num_waiting_uncached_tokens(self) -> int:
        return int(super().get_num_waiting_uncached_tokens()) + self._parked_tokens()

    def get_loads(self) -> LoadSnapshot:
        loads = super().get_loads()
        parked = self.get_parked()
        if not parked:
            return loads
        # What a parked request has computed counts as used already.
        tokens = self._parked_tokens()
        return msgspec.structs.replace(
            loads,
            num_waiting_reqs=loads.num_waiting_reqs + len(parked),
            num_total_tokens=loads.num_total_tokens + tokens,
            num_active_tokens=loads.num_active_tokens + tokens,
        )

    def _parked_tokens(self) -> int:
        return sum(max(0, request.seqlen - prefix_tokens(request)) for request in self.get_parked())
