"""Describes what a packed instance runs next: which group, which short batch, and what of the long prefills next to it.

A decision looks at the first requests of each order of the queue (`prefill_queue`), however many wait.
"""

from __future__ import annotations

from math import inf
from typing import Final

from sglang_ext.laps.decide.instance_model import InstanceModel, batch_of_shorts, nearest_deadline_s
from sglang_ext.laps.decide.packed_batch import (
    LongParts,
    LongRoom,
    cut_of,
    even_share_s,
    fill_with_longs,
    long_mode_round_s,
    longest_batch_s,
    run_shorts_alone,
    whole_within,
    without_shorts_s,
)
from sglang_ext.laps.decide.prefill_queue import Group, PrefillQueue
from sglang_ext.laps.decide.round_plan import DispatchReason, LapsMode, PrefillBatch, RoundPlan
from sglang_ext.laps.decide.short_batch import BatchBounds, FormedBatch, form_batch, lone_batch
from sglang_ext.laps.decide.urgency import RankedPrefill

_MOST_SHORTS: Final = 128  # candidates
_SPARE_SHORTS: Final = 16  # more than a batch holds: some are put back
_MOST_LONGS: Final = 8  # in addition to the started ones
_ONLINE: Final = Group.WITH_DEADLINE  # looking a member up in its class takes longer than comparing it
_OFFLINE: Final = Group.WITHOUT_DEADLINE
_SHORT_MODE: Final = LapsMode.SHORT
_LONG_MODE: Final = LapsMode.LONG
_SHARE: Final = DispatchReason.SHARE
_MIXED: Final = DispatchReason.MIXED


def choose_packed(model: InstanceModel, queue: PrefillQueue, now_s: float, free_kv_tokens: int) -> RoundPlan:
    """The batch of this round, and smaller ones should the memory refuse it; or until when to wait."""
    if not len(queue):
        return RoundPlan((), inf)
    queue.advance(now_s)
    first = _group(queue, now_s)
    plan = _choose_of_group(model, queue, now_s, free_kv_tokens, first)
    waste_tokens = model.limits.page_tokens - 1  # of each request's last page
    if plan.batches:
        may_run = any(batch.new_tokens + waste_tokens * len(batch.keys) <= free_kv_tokens for batch in plan.batches)
    else:
        may_run = plan.wake_s < inf
    if may_run:
        return plan
    # What the memory refuses may be waiting for a request of the other group, which holds it.
    other = _choose_of_group(model, queue, now_s, free_kv_tokens, _OFFLINE if first is _ONLINE else _ONLINE)
    return RoundPlan((*plan.batches, *other.batches), now_s if plan.batches else other.wake_s)


def _choose_of_group(
    model: InstanceModel, queue: PrefillQueue, now_s: float, free_kv_tokens: int, group: Group
) -> RoundPlan:
    patience_s = model.patience_s(now_s, queue.count(_ONLINE)) if group is _ONLINE else 0.0
    due = queue.due(group, now_s, patience_s, model.max_requests)
    shorts = queue.shorts(group, min(model.max_requests + _SPARE_SHORTS, _MOST_SHORTS))
    is_online = queue.count(_ONLINE) > 0 or model.is_online(now_s)
    longs = queue.longs(group, _MOST_LONGS)
    round_s = _round_s(model, queue, now_s, group, longs, is_online=is_online)
    if group is _OFFLINE and is_online:
        yield_s = model.yield_s()
        due, longs = _cut_long_ones(yield_s, due, longs)
        shorts, longs = _cut_long_ones(yield_s, shorts, longs)
    first_long = longs[0] if longs else None
    first_short = min([ranked[0] for ranked in (due, shorts) if ranked], key=_class_of, default=None)
    short_class = 0 if first_short is None else first_short.urgency.aged_class
    # Ageing makes a long prefill at most equal to a short one, or else each would hold up the short ones in its turn.
    is_long_first = (
        first_long is not None
        and first_short is not None
        and max(first_long.urgency.aged_class, min(int(first_long.request.priority), short_class)) < short_class
    )
    if first_long is not None:
        short_budget_s = model.max_share() * round_s
    elif group is _ONLINE and model.options.round_ms is None:  # their deadlines bound it, and a denser one serves more
        short_budget_s = max(round_s, model.short_slo_s)
    else:
        short_budget_s = round_s
    bounds = BatchBounds(
        model.max_requests,
        model.limits.max_batch_tokens,
        free_kv_tokens,
        model.limits.page_tokens,
        short_budget_s,
        model.margin(),
        model.keeps_deadlines(now_s),
    )
    batch = None if is_long_first else form_batch(shorts, now_s, model.cost, model.grid, bounds, due)
    if batch is None:
        batches = _without_shorts(model, queue, first_short, longs, round_s, free_kv_tokens)
        return RoundPlan(batches, now_s if batches else inf)
    deadline_s = min(nearest_deadline_s(due), nearest_deadline_s(shorts))
    verdict = model.verdict(now_s, batch, deadline_s, has_longs=first_long is not None)
    if first_long is None or not _may_run(model, now_s, first_long):
        is_idle = first_long is not None or not queue.count(_OFFLINE if group is _ONLINE else _ONLINE)
        if verdict.reason is None and is_idle:
            return RoundPlan((), verdict.wake_s)
        # Without a reason: others are there to use the time.
        return RoundPlan((batch_of_shorts(batch, verdict.reason or _SHARE),), now_s)
    if group is _OFFLINE and not is_online and _gathers(model, now_s, batch):
        # No client waits for an answer: short ones join when their batch is full, for decode is not to run dry.
        long_batches = _without_shorts(model, queue, None, longs, round_s, free_kv_tokens)
        if long_batches:
            return RoundPlan((*long_batches, batch_of_shorts(batch, DispatchReason.SHARE)), now_s)
    # On the ordinary kernels, even if the short ones would have a captured shape.
    cost = model.cost
    shorts_s = cost.iteration_s(batch.attention_work, batch.new_tokens, batch.cached_tokens, len(batch.members))
    mixed = _mixed(model, queue, batch, longs, shorts_s, round_s, free_kv_tokens)
    short = batch_of_shorts(batch, verdict.reason or _SHARE)
    if mixed is None:
        return RoundPlan((short,), now_s)
    saved_s = max(0.0, batch.predicted_s - (shorts_s - cost.kappa_s) - cost.request_s)
    waiting = len(queue) - len(batch.members)
    if model.account.can_run_short() and run_shorts_alone(
        now_s,
        batch,
        mixed.predicted_s,
        saved_s,
        waiting,
        model.busy.share,
        model.limits.stages,
        is_affordable=model.can_afford(now_s, saved_s, mixed.predicted_s),
    ):
        return RoundPlan((short, mixed), now_s)
    return RoundPlan((mixed, short), now_s)


def _group(queue: PrefillQueue, now_s: float) -> Group:
    """Requests with deadlines first, unless one without has been lifted above all of them."""
    if not queue.count(_OFFLINE):
        return _ONLINE
    return _OFFLINE if queue.head_class(_OFFLINE, now_s) < queue.head_class(_ONLINE, now_s) else _ONLINE


def _class_of(ranked: RankedPrefill) -> int:
    return ranked.urgency.aged_class


def _round_s(
    model: InstanceModel,
    queue: PrefillQueue,
    now_s: float,
    group: Group,
    longs: list[RankedPrefill],
    *,
    is_online: bool,
) -> float:
    """The time budget of the batch."""
    backlog_s = queue.long_work_s[_ONLINE]
    if not is_online:
        backlog_s += queue.long_work_s[_OFFLINE]
    cached_tokens = longs[0].request.cached_tokens if longs else 0
    round_s = model.idle_round_s(cached_tokens)
    if model.options.round_ms is not None:
        return round_s
    if group is _OFFLINE:
        return min(round_s, model.yield_s()) if is_online else max(round_s, model.short_slo_s)
    round_s = model.round_s(now_s, cached_tokens)
    if model.mode is _LONG_MODE:
        head_s = longs[0].total_s - longs[0].remaining_s if longs else 0.0  # what has been computed of it
        return long_mode_round_s(round_s, model.cost.kappa_s, backlog_s + head_s, model.limits.stages)
    return round_s


def _cut_long_ones(
    yield_s: float, shorts: list[RankedPrefill], longs: list[RankedPrefill]
) -> tuple[list[RankedPrefill], list[RankedPrefill]]:
    """While clients with deadlines are near, a short prefill without a deadline that takes longer is cut like a long
    one."""
    cut = [ranked for ranked in shorts if ranked.remaining_s > yield_s]
    return [ranked for ranked in shorts if ranked.remaining_s <= yield_s], [*longs, *cut]


def _may_run(model: InstanceModel, now_s: float, long: RankedPrefill) -> bool:
    """An instance for short prefills runs a long one next to them when that is late, or has aged."""
    if model.mode is not _SHORT_MODE:
        return True
    request = long.request
    is_late = request.deadline_s - long.remaining_s <= now_s
    return is_late or long.urgency.aged_class < request.priority


def _gathers(model: InstanceModel, now_s: float, batch: FormedBatch) -> bool:
    if batch.is_full or model.options.round_ms is not None:
        return False
    oldest_s = min([member.request.arrival_s for member in batch.members])
    return now_s < oldest_s + model.short_slo_s


def _room(
    model: InstanceModel, left_s: float, free_kv_tokens: int, batch: FormedBatch | None, spent_s: float
) -> LongRoom:
    """Return what is left of a batch that takes `spent_s` without long prefills."""
    limits = model.limits
    taken_tokens = requests = 0
    if batch is not None:
        requests = len(batch.members)
        for member in batch.members:
            taken_tokens += -(-member.request.new_tokens // limits.page_tokens) * limits.page_tokens
    return LongRoom(
        left_s,
        batch is not None,
        limits.max_batch_tokens - taken_tokens,
        model.max_requests - requests,
        free_kv_tokens - taken_tokens,
        limits.max_chunk_tokens,
        limits.page_tokens,
        model.options.min_chunk_tokens,
        model.options.max_parked,
        whole_within(is_fixed=model.options.round_ms is not None or limits.stages > 1),
        longest_batch_s(model.cost.kappa_s, model.short_slo_s) - spent_s,
    )


def _started(queue: PrefillQueue) -> list[RankedPrefill]:
    return list(queue.started.values())


def _mixed(
    model: InstanceModel,
    queue: PrefillQueue,
    batch: FormedBatch,
    longs: list[RankedPrefill],
    shorts_s: float,
    round_s: float,
    free_kv_tokens: int,
) -> PrefillBatch | None:
    """The short batch with long prefills in what it leaves of the round; None where none fits."""
    cost, members = model.cost, batch.members
    room = _room(model, round_s - shorts_s, free_kv_tokens, batch, shorts_s)
    parts = fill_with_longs(longs, _started(queue), cost, room)
    if not parts.requests:
        return None
    predicted_s = shorts_s + parts.added_s
    keys = [member.request.key for member in members]
    return _batch(keys, parts, _MIXED, batch.new_tokens, predicted_s)


def _without_shorts(
    model: InstanceModel,
    queue: PrefillQueue,
    first_short: RankedPrefill | None,
    longs: list[RankedPrefill],
    round_s: float,
    free_kv_tokens: int,
) -> tuple[PrefillBatch, ...]:
    """Only long prefills: there is no short one, no memory for it, or a long one is of a more urgent class."""
    cost = model.cost
    batches: list[PrefillBatch] = []
    if longs:
        has_short = first_short is not None
        budget_s = round_s if has_short or model.options.round_ms is not None else without_shorts_s(round_s)
        left_s = budget_s - cost.kappa_s
        if model.limits.stages > 1 and len(longs) == 1:  # another one would share the last chunk
            request = longs[0].request
            left_s = even_share_s(cost.chunk_s(request.new_tokens, request.cached_tokens) - cost.kappa_s, left_s)
        room = _room(model, left_s, free_kv_tokens, None, cost.kappa_s)
        parts = fill_with_longs(longs, _started(queue), cost, room)
        reason = DispatchReason.URGENT if has_short else DispatchReason.ALONE
        if parts.requests:
            predicted_s = cost.kappa_s + parts.added_s
            batches.append(_batch([], parts, reason, 0, predicted_s))
    if first_short is not None:
        batches.append(batch_of_shorts(lone_batch(first_short, cost, model.grid), DispatchReason.FULL_SHAPE))
    return tuple(batches)


def _batch(
    shorts: list[int], parts: LongParts, reason: DispatchReason, new_tokens: int, predicted_s: float
) -> PrefillBatch:
    whole = (*shorts, *[ranked.request.key for ranked in parts.whole])
    return PrefillBatch(whole, cut_of(parts), reason, None, len(shorts), new_tokens + parts.new_tokens, predicted_s)
