"""LAPS's own composition, one class at a time, and Medha's: to compare with (`laps.composition separate|medha`).

Both look at the whole queue in every decision. Short prefills and the chunks of long ones share the time by an account
(`time_sharing`); the long prefill is the one with the least relative slack (`slack`, `long_prefill`).
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from sglang_ext.laps.decide.instance_model import (
    InstanceModel,
    batch_of_shorts,
    has_deadline,
    nearest_deadline_s,
)
from sglang_ext.laps.decide.long_prefill import LongChoice, choose_chunk, choose_long
from sglang_ext.laps.decide.prefill_queue import PrefillQueue
from sglang_ext.laps.decide.round_plan import (
    Composition,
    Cut,
    DispatchReason,
    LapsMode,
    PrefillBatch,
    QueuedPrefill,
    RoundPlan,
)
from sglang_ext.laps.decide.short_batch import BatchBounds, FormedBatch, form_batch, lone_batch
from sglang_ext.laps.decide.slack import RankedPrefill, rank
from sglang_ext.laps.decide.time_sharing import choose_share
from sglang_ext.laps.decide.wait_depth import Verdict
from sglang_ext.types import LengthClass

_LONG_MODE_ROUNDS = 3.0  # an instance for long prefills runs chunks of this many rounds
_SPENT_SLACK = 0.8  # of the time to its deadline that a short prefill spends on waiting for more batch members
_MUST_LEAVE = (DispatchReason.SLACK, DispatchReason.HEAD_WAIT)


class Survey(NamedTuple):
    """Describes what a decision is about: both queues in order of urgency, the batch and the long prefill that could
    run."""

    now_s: float
    round_s: float
    shorts: list[RankedPrefill]
    longs: list[RankedPrefill]
    batch: FormedBatch | None
    long: LongChoice | None
    share: float  # x: the shorts' share of the time
    short_is_more_urgent: bool  # than the long prefill
    free_kv_tokens: int
    offline_round_s: float  # time budget of a batch or chunk without a deadline
    is_offline: bool  # nothing that waits has a deadline, and nothing with one came recently


def survey(model: InstanceModel, queue: PrefillQueue, now_s: float, free_kv_tokens: int) -> Survey:
    """Rank everything that waits, by its relative slack now."""
    options = model.options
    cost = model.cost
    requests = [ranked.request for ranked in queue]
    chunk_s = model.round_s(0, 0.0)
    is_offline = not model.is_online(now_s) and not any(map(has_deadline, requests))
    yield_s = model.yield_s()
    shorts: list[RankedPrefill] = []
    longs: list[RankedPrefill] = []
    for request in requests:
        ranked = rank(request, now_s, cost, chunk_s, options.age_s, options.long_slo_stretch)
        is_cut = not is_offline and not has_deadline(request) and ranked.remaining_s > yield_s
        (shorts if is_batched(request) and not is_cut else longs).append(ranked)
    shorts.sort()
    longs.sort()
    choice = choose_long(longs, free_kv_tokens, options.max_parked, options.preempt_margin)
    # Work without deadlines does not make the rounds longer that others wait for.
    backlog_s = sum(ranked.remaining_s for ranked in longs if is_offline or has_deadline(ranked.request))
    round_s = model.round_s(0 if choice is None else choice.ranked.request.cached_tokens, backlog_s)
    offline_round_s = round_s
    if options.round_ms is None:
        offline_round_s = max(round_s, model.short_slo_s) if is_offline else min(round_s, yield_s)
    candidates, budget_s = shorts, offline_round_s
    if shorts and has_deadline(shorts[0].request):  # nothing without a deadline joins, as it would take longer
        candidates, budget_s = [ranked for ranked in shorts if has_deadline(ranked.request)], round_s
    bounds = BatchBounds(
        model.max_requests,
        model.limits.max_batch_tokens,
        free_kv_tokens,
        model.limits.page_tokens,
        budget_s,
        model.margin(),
    )
    batch = form_batch(candidates, now_s, cost, model.grid, bounds)
    share, is_more_urgent = 0.0, True
    if shorts and choice is not None:
        share, is_more_urgent = _compare(model, shorts[0], choice.ranked)
    return Survey(
        now_s,
        round_s,
        shorts,
        longs,
        batch,
        choice,
        share,
        is_more_urgent,
        free_kv_tokens,
        offline_round_s,
        is_offline,
    )


def choose_separate(model: InstanceModel, queue: PrefillQueue, now_s: float, free_kv_tokens: int) -> RoundPlan:
    """A short batch, a long chunk, or until when to wait; with Medha's composition both together."""
    state = survey(model, queue, now_s, free_kv_tokens)
    if state.batch is None:
        return RoundPlan(_last_resorts(model, state), now_s if len(queue) else inf)
    if state.long is None:
        verdict = verdict_of(model, state, state.batch)
        if verdict.reason is None:
            return RoundPlan((), verdict.wake_s)
        return RoundPlan((batch_of_shorts(state.batch, verdict.reason),), now_s)
    return _choose_between(model, state, state.batch, state.long)


def verdict_of(model: InstanceModel, state: Survey, batch: FormedBatch) -> Verdict:
    """Return whether the short batch should leave."""
    return model.verdict(state.now_s, batch, nearest_deadline_s(state.shorts), has_longs=state.long is not None)


def _compare(model: InstanceModel, short: RankedPrefill, long: RankedPrefill) -> tuple[float, bool]:
    """The shorts' share of the time against this long prefill, and whether the short one is more urgent.

    Ageing makes a long prefill at most equal to a short one: from there slack and shares decide, or else every
    long prefill would hold up the short ones once it has waited for some time.
    """
    options = model.options
    short_class = short.urgency.aged_class
    long_class = max(long.urgency.aged_class, min(int(long.request.priority), short_class))
    long_slack = long.urgency.relative_slack
    is_more_urgent = (short_class, short.urgency.relative_slack) < (long_class, long_slack)
    if model.mode is LapsMode.SHORT:
        is_pressing = long_slack <= 0 or long.urgency.aged_class < long.request.priority
        return (model.max_share() if is_pressing else 1.0), is_more_urgent
    if short_class != long_class:
        if short_class > long_class:
            return 0.0, is_more_urgent
        is_yielding = has_deadline(short.request) and not has_deadline(long.request)
        return (1.0 if is_yielding else options.max_share), is_more_urgent
    return choose_share(long_slack, options.rho_min, options.max_share), is_more_urgent


def _choose_between(model: InstanceModel, state: Survey, batch: FormedBatch, long: LongChoice) -> RoundPlan:
    """Both classes wait: the shorts go first while they are within their share, or more urgent."""
    verdict = verdict_of(model, state, batch)
    if state.share >= 1 and verdict.reason is None:
        return RoundPlan((), verdict.wake_s)
    chunk = _long_chunk(model, state, long)
    late = batch_of_shorts(batch, DispatchReason.SHARE)
    if _can_mix(model, batch, chunk):
        return RoundPlan((_mixed(model, batch, chunk, long), late, chunk), state.now_s)
    if (state.is_offline or verdict.reason not in _MUST_LEAVE) and _can_wait(model, state, batch, chunk):
        return RoundPlan((chunk, late), state.now_s)
    is_within_share = state.share >= 1 or (state.share > 0 and model.account.can_run_short())
    if is_within_share or (state.short_is_more_urgent and model.account.can_run_urgent()):
        # with a long prefill at hand there is no idle waiting for a deeper batch
        reason = (verdict.reason or DispatchReason.SHARE) if is_within_share else DispatchReason.URGENT
        return RoundPlan((batch_of_shorts(batch, reason), chunk), state.now_s)
    return RoundPlan((chunk, late), state.now_s)


def _can_mix(model: InstanceModel, batch: FormedBatch, chunk: PrefillBatch) -> bool:
    limits = model.limits
    return (
        model.options.composition is Composition.MEDHA
        and model.mode is LapsMode.BOTH
        and batch.new_tokens + chunk.new_tokens <= limits.max_batch_tokens
        and len(batch.members) < model.max_requests
    )


def _mixed(model: InstanceModel, batch: FormedBatch, chunk: PrefillBatch, long: LongChoice) -> PrefillBatch:
    """Both in one iteration, on the ordinary kernels."""
    cost, request = model.cost, long.ranked.request
    keys = [member.request.key for member in batch.members]
    predicted_s = cost.iteration_s(
        batch.attention_work + chunk.new_tokens * (chunk.new_tokens + 2.0 * request.cached_tokens),
        batch.new_tokens + chunk.new_tokens,
        batch.cached_tokens + request.cached_tokens,
        len(keys) + 1,
    )
    return PrefillBatch(
        (*keys, *chunk.whole),
        chunk.cut,
        DispatchReason.MIXED,
        None,
        len(keys),
        batch.new_tokens + chunk.new_tokens,
        predicted_s,
    )


def _can_wait(model: InstanceModel, state: Survey, batch: FormedBatch, chunk: PrefillBatch) -> bool:
    """Return whether the shorts let one more chunk run, sharing the fixed cost of their batch with what arrives.

    That loses no time, for a long prefill uses it. It pays where time is scarce: several long prefills wait. A
    round whose length is an option is kept, and so are T_max and the deadlines (the caller sees to these).
    """
    if batch.is_full:
        return False
    if model.options.round_ms is not None:
        return False
    if state.is_offline:  # dense batches are all that counts, but for decode, which is not to run dry
        oldest_s = min(member.request.arrival_s for member in batch.members)
        return state.now_s < oldest_s + model.short_slo_s
    if len(state.longs) < 2:
        return False
    if model.mode is LapsMode.SHORT:
        return False
    if state.shorts[0].urgency.aged_class < state.longs[0].urgency.aged_class:
        return False
    end_s = state.now_s + chunk.predicted_s + batch.predicted_s
    waiting = [member.request for member in batch.members]
    return all(
        end_s <= waiting_prompt.arrival_s + _SPENT_SLACK * (waiting_prompt.deadline_s - waiting_prompt.arrival_s)
        for waiting_prompt in waiting
    )


def _last_resorts(model: InstanceModel, state: Survey) -> tuple[PrefillBatch, ...]:
    """No short batch: there is no short prefill, or no memory for the most urgent one."""
    batches: list[PrefillBatch] = []
    if state.long is not None:
        batches.append(_long_chunk(model, state, state.long))
    if state.shorts:
        single = lone_batch(state.shorts[0], model.cost, model.grid)
        batches.append(batch_of_shorts(single, DispatchReason.FULL_SHAPE))
    return tuple(batches)


def _long_chunk(model: InstanceModel, state: Survey, long: LongChoice) -> PrefillBatch:
    """The next chunk of the long prefill, within the budget, the engine's limit and the free memory."""
    limits = model.limits
    cost = model.cost
    request = long.ranked.request
    max_tokens = limits.max_chunk_tokens
    if not long.fits and state.free_kv_tokens >= limits.page_tokens:
        max_tokens = min(max_tokens, state.free_kv_tokens)
    budget_s = state.round_s
    if model.mode is LapsMode.LONG:
        budget_s *= _LONG_MODE_ROUNDS
    elif state.shorts:
        budget_s *= 1 - state.share
    if not has_deadline(request) and model.options.round_ms is None:
        budget_s = max(budget_s, state.offline_round_s) if state.is_offline else state.offline_round_s
    tokens = choose_chunk(
        cost,
        request.new_tokens,
        request.cached_tokens,
        budget_s,
        limits.page_tokens,
        model.options.min_chunk_tokens,
        max_tokens,
    )
    if not state.shorts:
        reason = DispatchReason.ALONE
    else:
        reason = DispatchReason.SHARE if state.share > 0 else DispatchReason.URGENT
    return long_batch(request, tokens, reason, cost.chunk_s(tokens, request.cached_tokens))


def long_batch(request: QueuedPrefill, tokens: int, reason: DispatchReason, predicted_s: float) -> PrefillBatch:
    """Return a batch with this number of tokens of a single long prefill."""
    if tokens >= request.new_tokens:
        return PrefillBatch((request.key,), None, reason, None, 0, tokens, predicted_s)
    return PrefillBatch((), Cut(request.key, tokens), reason, None, 0, tokens, predicted_s)


def is_batched(request: QueuedPrefill) -> bool:
    """Return whether it runs in a short batch. A short prefill that the engine has cut goes on as a long one."""
    return request.length_class is LengthClass.SHORT and not request.is_started
