"""SGLang's scheduler with a short and a long queue on every prefill instance, and on undivided instances that want it.

One round, once per scheduler iteration (`get_new_batch_prefill`):

1. the prefill that was cut is parked: it keeps its KV, its row and its lock on the prefix tree;
2. the policy, which follows the queue from round to round, plans: which requests run whole, and which one in part;
3. SGLang's own batch construction runs over exactly the planned requests; everybody else stays in
   `waiting_queue`, where aborts, timeouts, load reports and flushes find them.

SGLang knows one unfinished (chunked) request. Here there may be several, and `chunked_req` is only ever the one
whose chunk is being built or has just been launched.

On an undivided instance a decode step follows every prefill, and parked prefills give their memory back before running
requests have to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from http import HTTPStatus
from typing import Any

import msgspec
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
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
from sglang.srt.managers.schedule_batch import FINISH_ABORT, NextBatchPlan
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.load_inquirer import SchedulerLoadInquirer
from sglang.srt.mem_cache.common import release_kv_cache

from sglang_ext.engine.request_traces import record_launch, trace_of
from sglang_ext.graphs.sglang.runner import graph_status, replay_of
from sglang_ext.laps.decide.round_plan import LapsMode, PrefillBatch, RoundSnapshot
from sglang_ext.laps.sglang.instance import LapsInstance, build_instance, data_parallel_rank
from sglang_ext.laps.sglang.queued_request import (
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
from sglang_ext.laps.sglang.rank_agreement import Step
from sglang_ext.laps.sglang.status import MODE_PARAMETER, MODES, RANK_KEY, STATUS_KEY, status_of, work_wanted
from sglang_ext.laps.sglang.waiting_requests import WaitingRequests
from sglang_ext.live.decide.instance_work import WORK_KEY, BatchMember
from sglang_ext.transfer.sglang.late_slots import late_tokens
from sglang_ext.types import LengthClass

# Of this many requests at the head of the queue, those with more new tokens than this are matched with the prefix cache
# again when it has grown. Neither depends on a rank's own clock: every rank must touch the cache alike.
_REMATCHED_REQUESTS = 32
_REMATCHED_TOKENS = 128


class LengthAwareScheduler(Scheduler):  # type: ignore[misc]  # SGLang has no type information here
    """REPLACE `Scheduler` where it prefills: two queues, and long prefills that yield between chunks."""

    # SGLang's own, untyped there.
    load_inquirer: Any
    waiting_queue: list[Any]
    chunked_req: Any
    chunked_prefill_size: int
    _pending_chunked_abort_req: Any

    _laps: LapsInstance | None = None  # None until everything that it needs has been set up
    _is_undivided = False
    _must_decode = False  # before the next prefill, on an undivided instance

    def init_load_inquirer(self) -> None:
        super().init_load_inquirer()
        self._parked: list[Any] = []
        self._aborted_while_parked: list[Any] = []
        self._waiting = WaitingRequests()
        self._uncounted: list[Any] = []  # requests that have come, and may still go to a pool
        self._loading: dict[int, Any] = {}  # requests whose prefix is on its way from storage, by key
        self._held: list[Any] = []  # SGLang's queue, while it builds a batch of some of it
        self._started_tokens: int | None = None  # most of the started prefill in the batch that is built
        self._building_s = 0.0  # that SGLang took for building batches in this round
        self._next_key = 0
        self.load_inquirer = ParkedLoadInquirer.over(self.load_inquirer, lambda: self._parked, self._held_back)

    def run_event_loop(self) -> None:
        self._is_undivided = self.disaggregation_mode is DisaggregationMode.NULL
        if self._is_undivided or self.disaggregation_mode is DisaggregationMode.PREFILL:
            self._laps = build_instance(self)
            if self._laps is not None:
                self.policy.shortest_prefill_chunk_limit = lambda *_: self._started_tokens
        super().run_event_loop()

    # ---------------------------------------------------------------- a round

    def get_new_batch_prefill(self, running_batch: Any) -> NextBatchPlan:
        laps = self._laps
        if laps is None:
            return super().get_new_batch_prefill(running_batch)
        if self._must_decode and not (running_batch.is_empty() or running_batch.is_prefill_only):
            self._must_decode = False
            self._park(laps)
            laps.clock.record_idle()
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        if laps.stage is not None:
            laps.stage.begin_round()
        began_s = laps.now_s()
        laps.clock.record_round(began_s)
        self._building_s = 0.0
        plan = self._plan_batch(laps, running_batch)
        if plan.batch_to_run is None:
            laps.clock.record_idle()
        else:
            laps.decisions.note(laps.now_s() - began_s - self._building_s)
            self._must_decode = self._is_undivided
        return plan

    def _plan_batch(self, laps: LapsInstance, running_batch: Any) -> NextBatchPlan:
        if laps.stages > 1:
            # SGLang's loop over stages ends an aborted prefill with its last chunk. Its chunks that are on their way
            # through later stages are forgotten there as here: each stage aborts in the same round.
            self.process_pending_chunked_abort()
        self._park(laps)
        if not self._is_undivided:
            self._end_failed(laps)
        self._admit_ready_grammars()
        self._follow_queue(laps)
        self._count_arrivals(laps)
        # Here and not with a result, so that an instance that has become idle says so.
        laps.publish(laps.now_s(), lambda: self._snapshot(laps))
        if not self.waiting_queue and not self._parked:
            return super().get_new_batch_prefill(running_batch)
        if self._gives_way():
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        plan, steps = laps.agreement.agree(lambda: laps.policy.choose(laps.now_s(), self._free_tokens()))
        for position, step in enumerate(steps):
            batch = None if plan is None else plan.batches[position]
            next_plan = self._carry_out(laps, step, batch, running_batch)
            if next_plan.batch_to_run is not None:
                return next_plan
            running_batch = next_plan.running_batch
        return NextBatchPlan(batch_to_run=None, running_batch=running_batch)

    def _gives_way(self) -> bool:
        """Return whether something else runs before the next batch."""
        return False

    def _free_tokens(self) -> int:
        allocator, tree = self.token_to_kv_pool_allocator, self.tree_cache
        if not self.is_hybrid_swa:
            return int(allocator.available_size() + tree.evictable_size())
        whole = allocator.full_available_size() + tree.full_evictable_size()
        windows = allocator.swa_available_size() + tree.swa_evictable_size()
        # Rows that no window needs any more are free while their prompt is computed: what counts is the other pool,
        # unless this one cannot hold a batch and the windows before it.
        needed = self.max_prefill_tokens + self.sliding_window_size
        return int(whole if windows >= needed else min(whole, windows))

    def _park(self, laps: LapsInstance) -> None:
        request = self.chunked_req
        if request is None:
            return
        self._parked.append(request)
        self.chunked_req = None
        entry = entry_of(request)
        if entry is not None:  # what has been computed is known by now
            laps.put(request, entry, laps.now_s())

    def _end_failed(self, laps: LapsInstance) -> None:
        """End the started prefills whose transfer has failed, as SGLang does with waiting ones.

        SGLang asks a started one when its last chunk is done: its decode instance may have died long before. Of a
        pipeline the first stage asks. What only a later one knows ends the prefill with its last chunk.
        """
        if not self._parked:
            return
        failed = set(laps.agreement.agree_keys(self._failed_parked))
        for request in list(self._parked):
            entry = entry_of(request)
            if entry is not None and entry.key in failed:
                self._unpark(request)
                self.handle_bootstrap_failure(request)

    def _failed_parked(self) -> list[int]:
        """Keys of the parked prefills whose transfer has failed, as this stage's ranks see it."""
        polls = poll_and_all_reduce_attn_cp_tp_group(
            [request.disagg_kv_sender for request in self._parked], self.attn_cp_cpu_group, self.attn_tp_cpu_group
        )
        return [
            entry.key
            for request, poll in zip(self._parked, polls, strict=True)
            if poll == KVPoll.Failed and (entry := entry_of(request)) is not None
        ]

    def _admit_ready_grammars(self) -> None:
        # Stock SGLang does this at the head of every batch construction; a round that holds constructs none.
        if self.grammar_manager.has_waiting_grammars():
            for request in self.grammar_manager.get_ready_grammar_requests():
                self._add_request_to_queue(request)

    def _unpark(self, request: Any) -> None:
        self._parked.remove(request)
        entry = entry_of(request)
        if entry is not None and self._laps is not None:
            self._laps.policy.remove(entry.key)

    def _follow_queue(self, laps: LapsInstance) -> None:
        """Give every new request in the waiting queue its entry, and inform the policy of it and of what has gone.

        Every rank looks its requests up in the prefix cache alike.
        """
        now_s = laps.now_s()
        new = self._forget_gone(laps)
        if laps.has_tree_grown:
            known = len(self.waiting_queue) - len(new)
            for request in self.waiting_queue[: min(known, _REMATCHED_REQUESTS)]:
                entry = entry_of(request)
                if entry is None or entry.key in self._loading:
                    continue
                if prefill_tokens(request)[0] > _REMATCHED_TOKENS:
                    # A prompt that shares its beginning with a prompt that has just been computed may be short now.
                    match_prefix(request, self.tree_cache)
                    reclassify(request, entry, laps.policy, now_s)
                    laps.put(request, entry, now_s)
            laps.has_tree_grown = False
        for request in new:
            entry = entry_of(request)
            if entry is None:
                match_prefix(request, self.tree_cache)
                entry = self._new_entry(laps, request, now_s)
                remember(request, entry)
            elif request.is_retracted:  # and has its output to prefill, too
                match_prefix(request, self.tree_cache)
                reclassify(request, entry, laps.policy, now_s)
            entry.is_started = False
            self._waiting.enter(request, entry)
            laps.put(request, entry, now_s)
            if not entry.is_counted:
                self._uncounted.append(request)
        self._take_loaded(laps, now_s)
        # SGLang may have ended the request in hand itself.
        parked = {entry.key for request in self._parked if (entry := entry_of(request)) is not None}
        for key in [key for key in laps.policy.queue.started if key not in parked]:
            laps.policy.remove(key)

    def _take_loaded(self, laps: LapsInstance, now_s: float) -> None:
        """Let the policy have the requests whose prefix has come from storage. Every rank asks SGLang alike."""
        for key, request in list(self._loading.items()):
            if key in self._waiting and not self.tree_cache.check_prefetch_progress(request.cache_request_handle):
                continue
            del self._loading[key]
            entry = entry_of(request)
            if key in self._waiting and entry is not None:
                match_prefix(request, self.tree_cache)
                reclassify(request, entry, laps.policy, now_s)
                laps.put(request, entry, now_s)

    def _set_loading_aside(self, laps: LapsInstance, left: Sequence[Any]) -> None:
        """Take from the policy what SGLang has not run because its prefix is on its way from storage.

        The policy would choose it again, and it would hold up everything that it goes before: even the started prefill
        for whose memory on the host it may be waiting.
        """
        for request in left:
            entry = entry_of(request)
            if entry is not None and self.tree_cache.has_ongoing_prefetch(request.cache_request_handle):
                self._loading[entry.key] = request
                laps.policy.remove(entry.key)

    def _count_arrivals(self, laps: LapsInstance) -> None:
        """Inform the policy of the prefills that have come and stay here: what a pool computes is no work of its
        queues."""
        for request in self._uncounted:
            entry = entry_of(request)
            if entry is not None and entry.key in self._waiting and not entry.is_counted:
                entry.is_counted = True
                lengths = prefill_tokens(request)
                laps.policy.record_arrival(laps.now_s(), entry.length_class, *lengths, entry.deadline_s)
        self._uncounted = []

    def _forget_gone(self, laps: LapsInstance) -> Sequence[Any]:
        """Inform the policy of requests that wait no more, and return the new ones in SGLang's queue."""
        changes = self._waiting.changes(self.waiting_queue)
        for key in changes.gone:
            laps.policy.remove(key)
        return changes.new

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
        return LapsEntry(self._next_key, length_class, new_tokens, arrival_s, deadline_s, priority)

    def _snapshot(self, laps: LapsInstance) -> RoundSnapshot:
        queue = []
        # Between two rounds the request in hand is not parked; a report counts it all the same.
        in_hand = () if self.chunked_req is None else (self.chunked_req,)
        for request in (*in_hand, *self._parked, *self.waiting_queue):
            entry = entry_of(request)
            if entry is not None:
                queue.append(as_queued_prefill(request, entry, is_current=entry.key == laps.current_key))
        return RoundSnapshot(laps.now_s(), tuple(queue), self._free_tokens())

    def _carry_out(
        self, laps: LapsInstance, step: Step, planned: PrefillBatch | None, running_batch: Any
    ) -> NextBatchPlan:
        """Let SGLang build a batch of exactly the requests of `step`; all others wait. `planned`: on the rank that
        decides.
        """
        parked = {entry.key: request for request in self._parked if (entry := entry_of(request)) is not None}
        cut_key = None if step.cut is None else step.cut.key
        keys = step.whole if cut_key is None else (*step.whole, cut_key)
        started = [parked[key] for key in keys if key in parked]
        whole = self._without_evicted(laps, self._waiting.requests([key for key in step.whole if key not in parked]))
        cut = self._waiting.requests([cut_key] if cut_key is not None and cut_key not in parked else [])
        if not (whole or cut or started):
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        wanted = [*whole, *cut]  # the cut request comes last: what is left of the tokens is its
        waiting, self.waiting_queue = self.waiting_queue, wanted.copy()
        self._held = waiting
        stock_chunk_tokens = self.chunked_prefill_size
        self.chunked_prefill_size = _most_tokens(step, [*started, *whole], cut, self.page_size)
        if started:
            self.chunked_req = started[0]
            self._parked.remove(started[0])
            self._started_tokens = step.cut.tokens if step.cut is not None and not cut else None
        # A refusal of the step before this one must not close this one's door.
        running_batch.batch_is_full = False
        began_s = laps.now_s()
        try:
            next_plan = super().get_new_batch_prefill(running_batch)
        finally:
            self._building_s += laps.now_s() - began_s
            self.chunked_prefill_size = stock_chunk_tokens
            self._started_tokens = None
            self._held = []
            left, self.waiting_queue = self.waiting_queue, waiting
            still = set(map(id, left))
            self._waiting.take(waiting, [request for request in wanted if id(request) not in still])
            waiting.extend([request for request in left if request not in wanted])
            if self.enable_hicache_storage:
                self._set_loading_aside(laps, [request for request in wanted if id(request) in still])
        if next_plan.batch_to_run is None:
            # The started request found no room; it still is unfinished, and not the one in hand.
            self._park(laps)
            return next_plan
        for request in next_plan.batch_to_run.reqs:
            entry = entry_of(request)
            if entry is not None:
                entry.is_started = True
        if planned is not None:
            laps.record_dispatch(laps.now_s(), planned)
            self._record_deviations(laps, planned, next_plan.batch_to_run)
        return next_plan

    def _record_deviations(self, laps: LapsInstance, planned: PrefillBatch, batch: Any) -> None:
        """Inform the policy of what SGLang has built otherwise: memory was refused, or a prefix has grown or shrunk.

        A request that was cut is looked at when it is parked.
        """
        built = {entry.key for request in batch.reqs if (entry := entry_of(request)) is not None}
        for key in planned.keys:
            if key not in built and key in self._waiting and key not in self._loading:
                (request,) = self._waiting.requests([key])
                entry = entry_of(request)
                assert entry is not None
                laps.put(request, entry, laps.now_s())
        in_hand = None if self.chunked_req is None else entry_of(self.chunked_req)
        cut = planned.cut
        if cut is not None and cut.key in built and (in_hand is None or in_hand.key != cut.key):
            laps.policy.remove(cut.key)

    def _without_evicted(self, laps: LapsInstance, wanted: Sequence[Any]) -> list[Any]:
        """Return the requests that run whole and are as short as was planned.

        The others have lost cached tokens since they were looked up. They are looked at again in the next round: a
        batch runs its requests whole, and would hold everything up.
        """
        kept = []
        for request in wanted:
            _, cached_tokens = prefill_tokens(request)
            entry = entry_of(request)
            if cached_tokens and entry is not None and match_again(request, self.tree_cache):
                reclassify(request, entry, laps.policy, laps.now_s())
                laps.put(request, entry, laps.now_s())
            else:
                kept.append(request)
        return kept

    def update_running_batch(self, batch: Any) -> Any:
        while self._parked and not batch.check_decode_mem():
            self._give_back(min(self._parked, key=prefix_tokens))
        return super().update_running_batch(batch)

    def _give_back(self, request: Any) -> None:
        """Let a parked prefill begin again later: its memory goes to the running requests."""
        self._unpark(request)
        release_kv_cache(request, self.tree_cache, checkpoint=False)
        request.reset_for_retract()
        self._add_request_to_queue(request, is_retracted=True)

    def _held_back(self) -> list[Any]:
        """Waiting requests that are not in the batch that SGLang builds just now."""
        if not self._held:
            return []
        building = set(map(id, self.waiting_queue))
        return [request for request in self._held if id(request) not in building]

    # ---------------------------------------------------------------- measurements

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        laps = self._laps
        if laps is not None and batch.forward_mode.is_extend():
            # A mixed batch counts for the class of most of its tokens; a health check has no entry.
            long_tokens = sum(
                tokens
                for request, tokens in zip(batch.reqs, batch.extend_lens, strict=True)
                if (entry := entry_of(request)) is not None and entry.length_class is LengthClass.LONG
            )
            length_class = LengthClass.LONG if 2 * long_tokens > sum(batch.extend_lens) else LengthClass.SHORT
            now_s = laps.now_s()
            laps.clock.record_launch(now_s, length_class, batch.extend_lens, batch.prefix_lens)
            laps.work.record_launch(now_s, _members(batch))
            traces = record_launch(batch.reqs, batch.extend_lens, batch.prefix_lens)
            if laps.stage is not None:
                laps.stage.record_launch()
            result = super().run_batch(batch, *args, **kwargs)
            if laps.stage is not None:
                laps.stage.record_launched(batch.extend_lens, batch.prefix_lens)
            replay = replay_of(self.tp_worker.model_runner, sum(batch.extend_lens), result)
            if replay is not None:
                laps.clock.record_replay(replay.tokens)
                laps.work.record_shape(replay.graph)
                for trace in traces:
                    trace.record_shape(replay.graph)
            return result
        return super().run_batch(batch, *args, **kwargs)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        traces = [trace for request in batch.reqs if (trace := trace_of(request)) is not None]
        ending = [request for request in batch.reqs if request.inflight_middle_chunks <= 0 and not request.output_ids]
        super().process_batch_result(batch, result)
        laps = self._laps
        if laps is None or not batch.forward_mode.is_extend():
            return
        for trace in traces:
            trace.record_result()
        if laps.stage is not None:
            laps.stage.record_result()
        now_s = laps.now_s()
        sample = laps.clock.record_result(now_s)
        laps.work.record_result(*laps.clock.latest_s)
        if sample is not None:
            laps.policy.record_iteration(sample)
        for request in ending:
            entry = entry_of(request)
            if entry is not None:
                laps.has_tree_grown = True
                laps.policy.record_first_token(now_s, entry.length_class, entry.arrival_s, entry.deadline_s)

    def process_disagg_prefill_inflight_queue(self, *args: Any, **kwargs: Any) -> list[Any]:
        # Before SGLang ends them: a backend may forget what it knows of a transfer then.
        began_s = {id(request): _transfer_start_s(request) for request in self.disagg_prefill_inflight_queue}
        done: list[Any] = super().process_disagg_prefill_inflight_queue(*args, **kwargs)
        laps = self._laps
        if laps is not None and done:
            sent = [
                (start_s, request)
                for request in done
                if (start_s := began_s.get(id(request))) is not None
                and not isinstance(request.finished_reason, FINISH_ABORT)
            ]
            if sent:
                laps.work.record_transfers(
                    min(start_s for start_s, _ in sent),
                    laps.now_s(),
                    sum(len(request.origin_input_ids) for _, request in sent),
                    [request.rid for _, request in sent],
                )
        return done

    # ---------------------------------------------------------------- parked requests, wherever SGLang counts

    def is_fully_idle(self, *args: Any, **kwargs: Any) -> bool:
        return not self._parked and bool(super().is_fully_idle(*args, **kwargs))

    def held_requests(self) -> list[Any]:
        """Live requests that are in no queue or batch of SGLang's."""
        return self._parked

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
        self._unpark(request)
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
            status = self.queue_status()
            graphs = graph_status(self.tp_worker.model_runner)
            wanted = work_wanted(recv_req.rid)
            if wanted is not None:
                parked = {entry.key for request in self._parked if (entry := entry_of(request)) is not None}
                status[WORK_KEY] = laps.work.answer(laps.now_s(), parked, *wanted)
            output.internal_state[STATUS_KEY] = status if graphs is None else {**status, "graphs": graphs}
        return output

    def queue_status(self) -> dict[str, Any]:
        """Return the status of both queues on the rank that decides."""
        laps = self._laps
        assert laps is not None
        status = status_of(laps, self._snapshot(laps), locked_tokens=self.tree_cache.protected_size())
        if self.server_args.dp_size > 1:
            status[RANK_KEY] = data_parallel_rank()
        return status

    def set_internal_state(self, recv_req: SetInternalStateReq) -> SetInternalStateReqOutput:
        number = recv_req.server_args.get(MODE_PARAMETER)
        if number is None:
            return super().set_internal_state(recv_req)
        if self._laps is None or number not in MODES:
            return SetInternalStateReqOutput(updated=False)
        self._laps.switch_mode(LapsMode(MODES[int(number)]))
        return SetInternalStateReqOutput(updated=True)


def _members(batch: Any) -> list[BatchMember]:
    """The requests of a batch that is about to be launched."""
    members = []
    for request, new_tokens, prefix in zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True):
        entry = None if request.rid.startswith(HEALTH_CHECK_RID_PREFIX) else entry_of(request)
        key, length_class = (-1, None) if entry is None else (entry.key, entry.length_class)
        tokens_left = 0 if entry is None else int(request.seqlen) - prefix - new_tokens
        members.append(BatchMember(key, request.rid, length_class, new_tokens, tokens_left))
    return members


def _transfer_start_s(request: Any) -> float | None:
    """Return when its first KV was handed over; None before, and where the backend does not report it."""
    start_s: float | None = getattr(request.disagg_kv_sender, "_transfer_start_time", None)
    return start_s


def _most_tokens(step: Step, whole: Sequence[Any], cut: Sequence[Any], page_tokens: int) -> int:
    """SGLang's chunk size for a batch.

    It splits none of the `whole` ones, even if a part of their prefixes has left the cache since; but where a request
    that waits is cut, it gets what the others leave, so that these are counted exactly.
    """
    if cut and step.cut is not None:
        return step.cut.tokens + sum(-(-prefill_tokens(request)[0] // page_tokens) * page_tokens for request in whole)
    tokens = 0 if step.cut is None else step.cut.tokens
    return 1 + tokens + sum(int(request.seqlen) + page_tokens for request in whole)


def _timeout_abort(request: Any) -> AbortReq:
    message = "Request running timeout reached."
    reason = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": message}
    return AbortReq(rid=request.rid, abort_message=message, finished_reason=reason)


@dataclass(kw_only=True, frozen=True)
class ParkedLoadInquirer(SchedulerLoadInquirer):  # type: ignore[misc]  # SGLang has no type information
    """A parked request waits like a queued one, but only for what it has left, and its KV is in use already. One whose
    turn is far away waits, too, though decode has no slots for it."""

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
        tokens = int(super().get_num_waiting_uncached_tokens()) + self._parked_tokens()
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            tokens += late_tokens(self.get_disagg_prefill_bootstrap_queue())
        return tokens

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
