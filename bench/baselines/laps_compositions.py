"""LAPS as printed, one class at a time, and Medha's mixed batches: two compositions to compare ours with.

Both look at the whole queue in every decision. Short prefills and the chunks of long ones share the time by an account
(`TimeAccount`); the long prefill that runs is the one with the least relative slack. Where a long prefill that is
late would take all of the time, `rho_min` of it is left to the short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from typing import NamedTuple

from baselines.prefill_orders import relative_slack
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.instance_model import (
    InstanceModel,
    batch_of_shorts,
    has_deadline,
    nearest_deadline_s,
)
from sglang_ext.laps.decide.packed_batch import choose_chunk
from sglang_ext.laps.decide.policy import Composition, TimeShare
from sglang_ext.laps.decide.prefill_queue import PrefillQueue, is_batched
from sglang_ext.laps.decide.round_plan import (
    Cut,
    DispatchReason,
    LapsMode,
    PrefillBatch,
    QueuedPrefill,
    RoundPlan,
)
from sglang_ext.laps.decide.short_batch import BatchBounds, FormedBatch, form_batch, lone_batch
from sglang_ext.laps.decide.urgency import RankedPrefill, Urgency, aged_class
from sglang_ext.laps.decide.wait_depth import Verdict

MAX_SHARE = 0.4
"""`LapsOptions.rho_max` of these compositions in the comparisons."""
_LONG_MODE_ROUNDS = 3.0  # an instance for long prefills runs chunks of this many rounds
_SPENT_SLACK = 0.8  # of the time to its deadline that a short prefill spends on waiting for more batch members
_MUST_LEAVE = (DispatchReason.SLACK, DispatchReason.HEAD_WAIT)
_LEAST_OF_SLO = 0.25
_MOST_OF_SLO = 3.0
_MOST_OVERHEAD = 0.05  # share of a round that may go to what every chunk costs again
_LONG_WEIGHT = 8.0  # time lost to overhead also delays what arrives later: by 1 / (1 - load) in all


class Rules(NamedTuple):
    """The parameters of a composition."""

    is_mixed: bool = False  # a batch holds short prefills and one long chunk, as Medha's
    rho_min: float = 0.3  # share of the time that short prefills keep while a long one waits that is late
    preempt_margin: float = 1.0  # how much lower another long prefill's relative slack must be to park the current one

    def composition(self) -> Composition:
        """Return it as `Laps` takes it."""

        def choose(model: InstanceModel, queue: PrefillQueue, now_s: float, free_kv_tokens: int) -> RoundPlan:
            return _choose(self, model, queue, now_s, free_kv_tokens)

        def time_share(model: InstanceModel, queue: PrefillQueue, now_s: float, free_kv_tokens: int) -> TimeShare:
            state = survey(self, model, queue, now_s, free_kv_tokens)
            has_longs = any(not is_batched(ranked.request) for ranked in queue)
            return TimeShare(has_longs, state.share, state.round_s)

        return Composition(choose, time_share)


SEPARATE = Rules().composition()
MEDHA = Rules(is_mixed=True).composition()


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


def survey(rules: Rules, model: InstanceModel, queue: PrefillQueue, now_s: float, free_kv_tokens: int) -> Survey:
    """Rank everything that waits, by its relative slack now."""
    options = model.options
    cost = model.cost
    requests = [ranked.request for ranked in queue]
    chunk_s = round_of(model, 0, 0.0)
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
    choice = choose_long(longs, free_kv_tokens, options.max_parked, rules.preempt_margin)
    # Work without deadlines does not make the rounds longer that others wait for.
    backlog_s = sum(ranked.remaining_s for ranked in longs if is_offline or has_deadline(ranked.request))
    round_s = round_of(model, 0 if choice is None else choice.ranked.request.cached_tokens, backlog_s)
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
        share, is_more_urgent = _compare(rules, model, shorts[0], choice.ranked)
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


def _choose(rules: Rules, model: InstanceModel, queue: PrefillQueue, now_s: float, free_kv_tokens: int) -> RoundPlan:
    """A short batch, a long chunk, or until when to wait; with Medha's composition both together."""
    state = survey(rules, model, queue, now_s, free_kv_tokens)
    if state.batch is None:
        return RoundPlan(_last_resorts(model, state), now_s if len(queue) else inf)
    if state.long is None:
        verdict = verdict_of(model, state, state.batch)
        if verdict.reason is None:
            return RoundPlan((), verdict.wake_s)
        return RoundPlan((batch_of_shorts(state.batch, verdict.reason),), now_s)
    return _choose_between(rules, model, state, state.batch, state.long)


def verdict_of(model: InstanceModel, state: Survey, batch: FormedBatch) -> Verdict:
    """Return whether the short batch should leave."""
    return model.verdict(state.now_s, batch, nearest_deadline_s(state.shorts), has_longs=state.long is not None)


def _compare(rules: Rules, model: InstanceModel, short: RankedPrefill, long: RankedPrefill) -> tuple[float, bool]:
    """The shorts' share of the time against this long prefill, and whether the short one is more urgent.

    Ageing makes a long prefill at most equal to a short one: from there slack and shares decide, or else every
    long prefill would hold up the short ones once it has waited for some time.
    """
    options = model.options
    short_class = short.urgency.aged_class
    long_class = max(long.urgency.aged_class, min(int(long.request.priority), short_class))
    long_slack = long.urgency.sort_value
    is_more_urgent = (short_class, short.urgency.sort_value) < (long_class, long_slack)
    if model.mode is LapsMode.SHORT:
        is_pressing = long_slack <= 0 or long.urgency.aged_class < long.request.priority
        return (model.max_share() if is_pressing else 1.0), is_more_urgent
    if short_class != long_class:
        if short_class > long_class:
            return 0.0, is_more_urgent
        is_yielding = has_deadline(short.request) and not has_deadline(long.request)
        return (1.0 if is_yielding else options.rho_max), is_more_urgent
    return choose_share(long_slack, rules.rho_min, options.rho_max), is_more_urgent


def _choose_between(
    rules: Rules, model: InstanceModel, state: Survey, batch: FormedBatch, long: LongChoice
) -> RoundPlan:
    """Both classes wait: the shorts go first while they are within their share, or more urgent."""
    verdict = verdict_of(model, state, batch)
    if state.share >= 1 and verdict.reason is None:
        return RoundPlan((), verdict.wake_s)
    chunk = _long_chunk(model, state, long)
    late = batch_of_shorts(batch, DispatchReason.SHARE)
    if rules.is_mixed and _can_mix(model, batch, chunk):
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
        model.mode is LapsMode.BOTH
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


def rank(
    request: QueuedPrefill, now_s: float, cost: CostCoefficients, round_s: float, age_s: float, stretch: float
) -> RankedPrefill:
    """A request's urgency at `now_s`. It is lifted every `age_s`, or `stretch` times its own length if that is more:
    what is normal for a long prefill must not lift it above later ones.
    """
    computed_tokens = request.total_tokens - request.new_tokens
    remaining_s = cost.prefill_s(request.new_tokens, request.cached_tokens, round_s)
    if computed_tokens > 0:
        total_s = cost.prefill_s(request.total_tokens, request.cached_tokens - computed_tokens, round_s)
    else:
        total_s = remaining_s
    total_s = max(total_s, 1e-9)
    lift_s = max(age_s, stretch * total_s)
    urgency = Urgency(
        aged_class(request.priority, now_s - request.arrival_s, lift_s),
        relative_slack(request.deadline_s, now_s, remaining_s, total_s),
        request.arrival_s,
        request.key,
    )
    return RankedPrefill(urgency, request, remaining_s, total_s)


def choose_share(long_slack: float, rho_min: float, rho_max: float) -> float:
    """x: the shorts' share of the time while a long prefill of this relative slack waits.

    Medha's clip(rho, 0, rho_max) for `rho_min` 0. With a larger one the shorts keep that much when the long prefill
    is late: its deadline is then lost, theirs are not.
    """
    return min(rho_max, max(rho_min, long_slack))


def automatic_round_s(fixed_s: float, long_backlog_s: float, short_slo_s: float, longest_short_s: float) -> float:
    """Time budget of a round, s: a short prefill waits for a long chunk of at most this.

    A short prefill that arrives during a chunk waits T / 2 for its end, and chunks of T make the long prefills that
    wait (`long_backlog_s` of work) end later by backlog * fixed / T, `fixed_s` being what every chunk costs again.
    The sum, with a weight of 8 on the latter, is smallest at T = sqrt(2 * 8 * fixed * backlog). So T is short at
    light load and long where time is scarce. It is at least a quarter of the short prefills' objective and twenty
    times the fixed cost, and at most three times that objective, or `longest_short_s`, their own time, if that is
    more.
    """
    min_s = max(_LEAST_OF_SLO * short_slo_s, fixed_s / _MOST_OVERHEAD)
    max_s = max(min_s, _MOST_OF_SLO * max(short_slo_s, longest_short_s))
    return min(max(sqrt(2 * _LONG_WEIGHT * fixed_s * long_backlog_s), min_s), max_s)


def round_of(model: InstanceModel, cached_tokens: int, long_backlog_s: float) -> float:
    """Time budget of a round while this much long work waits and the next chunk follows `cached_tokens`."""
    if model.options.round_ms is not None:
        return model.options.round_ms / 1e3
    fixed_s = model.cost.kappa_s + model.cost.read_s * cached_tokens
    longest_short_s = model.cost.chunk_s(model.boundary.tokens, 0)
    return automatic_round_s(fixed_s, long_backlog_s, model.short_slo_s, longest_short_s)


class LongChoice(NamedTuple):
    """The long prefill that should run, and whether the memory as it is holds the rest of it."""

    ranked: RankedPrefill
    fits: bool


def choose_long(
    ranked: Sequence[RankedPrefill], free_kv_tokens: int, max_parked: int, preempt_margin: float
) -> LongChoice | None:
    """The long prefill to run next, `ranked` being in order of urgency; None if none waits.

    A prefill is started only if the memory holds it and the rest of all that are started, so that these can always
    end. A prefill that waits for memory longer than it takes to be lifted a class keeps others from being started
    before it. When none is started, the most urgent prefill that fits is, or else the most urgent: no other one holds
    memory.
    """
    if not ranked:
        return None
    started = [candidate for candidate in ranked if candidate.request.is_started]
    promised_tokens = sum(candidate.request.new_tokens for candidate in started)
    may_start = len(started) <= max_parked if started else True
    current = next((candidate for candidate in started if candidate.request.is_current), None)
    for candidate in ranked:
        if candidate is current:
            return LongChoice(candidate, _fits(candidate, free_kv_tokens))
        if not candidate.request.is_started:
            if not may_start:
                continue
            if candidate.request.new_tokens + promised_tokens > free_kv_tokens:
                if candidate.urgency.aged_class < candidate.request.priority:
                    may_start = False
                continue
        if current is not None and not _preempts(candidate, current, preempt_margin):
            continue
        return LongChoice(candidate, _fits(candidate, free_kv_tokens))
    first = current or (started[0] if started else ranked[0])
    return LongChoice(first, _fits(first, free_kv_tokens))


def _fits(candidate: RankedPrefill, free_kv_tokens: int) -> bool:
    return candidate.request.new_tokens <= free_kv_tokens


def _preempts(candidate: RankedPrefill, current: RankedPrefill, margin: float) -> bool:
    """Return whether the candidate is of a more urgent class, or of the same and by the margin lower in relative
    slack."""
    theirs, ours = candidate.urgency, current.urgency
    if theirs.aged_class != ours.aged_class:
        return theirs.aged_class < ours.aged_class
    return theirs.sort_value < ours.sort_value - margin
