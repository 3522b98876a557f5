"""One batch, one time budget: the short prefills that wait, then long ones in what is left of it.

Every iteration has a fixed cost, so what runs together pays it once (Medha mixes for the same reason). Long prefills
join whole while they fit; at most one request is cut, so that a chunk's tail and the next prompt share an iteration.
Short prefills run by themselves where mixing costs them more than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf, sqrt
from typing import Final, NamedTuple

from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.round_plan import Cut
from sglang_ext.laps.decide.short_batch import FormedBatch
from sglang_ext.laps.decide.urgency import RankedPrefill
from sglang_ext.laps.decide.wait_depth import OfferedLoad

_OVERHEADS: Final = 8.0  # times what every batch costs again a batch takes, of which that is an eighth then
_LEAST_OF_SLO: Final = 0.05
_LEAST_IN_PIPELINE: Final = 0.2  # each chunk waits for the longest stage, and for the stages to fill
_MOST_OF_SLO: Final = 1 / 3  # a short prefill waits for the end of one batch, perhaps a longer one, and for its own
_LONGEST_OF_SLO: Final = 1 / 2  # that longer one
_LEAST_ON_STAGES: Final = 2.4  # fixed costs, at any objective: below, next to nothing is computed
_HELD_OVERHEADS: Final = 6.0  # fixed costs that an objective holds which may cost batches: two batches of three
_MOST_LOST: Final = 0.75  # of the time that the load leaves free, for the fixed costs of batches that hold an objective
_LEAST_SPARE: Final = 0.25  # an estimate of the load that is a little too high must not make batches long
_MOST_OF_SPARE: Final = 1 / 2  # of the time that the load leaves free, for the fixed costs of batches
_SHARE_OF_SPARE: Final = 1 / 5  # where a long prefill has at least five parts then
_PART_OF_LONG: Final = 1 / 5
_RARE_ARRIVALS: Final = 0.05  # during a batch that is longer than the objective allows
_LONG_MODE_ROUNDS: Final = 3.0
_WITHOUT_SHORTS: Final = 1.5  # a request that arrives meanwhile waits for this batch, not for a part of it
_WHOLE_WITHIN: Final = 2.0  # times what is left of the budget: what would stay behind is not worth an iteration
_FIXED_WHOLE_WITHIN: Final = 1.1  # where the budget is given, or stages wait for the longest chunk
_MOST_UTILISATION: Final = 0.95
_OTHERS_WEIGHT: Final = 2.0  # of a second that everybody else waits, against one of the short prefills


def packed_round_s(fixed_s: float, short_slo_s: float, stages: int = 1) -> float:
    """Time budget of a batch that holds short and long prefills on an instance without load, s: on each stage of a
    pipeline.

    A short prefill that arrives during a batch waits for its end, and for that of the next one, which it is in; and
    `fixed_s`, what every batch costs again, is lost with each. So a batch takes eight times that, or a twentieth of the
    short prefills' objective if that is more (a fifth in a pipeline). Of an objective that can be held (`can_hold`),
    and always in a pipeline, it takes a third at most: the longest batch and the next one then end within five sixths
    of it, which leaves the rest to what was not foreseen. In a pipeline it is 2.4 times the fixed cost at least.

    Of a pipeline's `stages` it is the time on each: `stage_share`.
    """
    short_slo_s *= stage_share(stages)
    least_s = (_LEAST_OF_SLO if stages == 1 else _LEAST_IN_PIPELINE) * short_slo_s
    round_s = max(_OVERHEADS * fixed_s, least_s)
    if stages == 1 and not can_hold(fixed_s, short_slo_s):  # shorter batches would cost throughput, and hold nothing
        return round_s
    return max(min(round_s, _MOST_OF_SLO * short_slo_s), _LEAST_ON_STAGES * fixed_s)


def loaded_round_s(fixed_s: float, short_slo_s: float, load: OfferedLoad, long_s: float) -> float:
    """Time budget of a batch under a load, s; `long_s`: what a long prefill takes by itself (`LongWork`).

    With batches of T the fixed cost f takes the share f / T of the time. Under the load u, long prefills wait as in an
    M/G/1 queue of the load u + f / T, as 1 / (1 - u - f / T); a short prefill that arrives during a batch waits for
    half of it and shares the next one. Fixed costs may take half of the free time, T = 2 f / (1 - u): the product of
    both waits is least there. They take a fifth of it, T = 5 f / (1 - u), where a long prefill still has five parts
    then: parts that are nearly whole prompts let short ones wait and bring the others little. Above u = 0.75 a longer
    batch saves little time, and the load is only estimated: 1 - u counts as a quarter.

    An objective that can be held (`can_hold`) is held: no batch is longer than a third of it so that fixed costs take
    less than half of the free time, nor otherwise unless they would take more than three quarters. In any case a batch
    may be as long as the time in which in fewer than one of twenty a request arrives: while nothing comes, nothing is
    cut.
    """
    spare = max(1.0 - load.utilisation, _LEAST_SPARE)
    if load.requests_per_s <= 0:
        return inf
    longest_s = min(fixed_s / (_SHARE_OF_SPARE * spare), _PART_OF_LONG * long_s)
    if can_hold(fixed_s, short_slo_s):
        longest_s = min(longest_s, _MOST_OF_SLO * short_slo_s)
    round_s = max(fixed_s / (_MOST_OF_SPARE * spare), longest_s)
    if can_hold(fixed_s, short_slo_s) and load.utilisation < 1.0:
        least_s = fixed_s / (_MOST_LOST * (1.0 - load.utilisation))
        round_s = min(round_s, max(_MOST_OF_SLO * short_slo_s, least_s))
    return max(round_s, _RARE_ARRIVALS / load.requests_per_s)


def can_hold(fixed_s: float, short_slo_s: float) -> bool:
    """Return whether two batches that lose a third to the fixed cost end within the objective: one to wait for,
    and its own."""
    return _HELD_OVERHEADS * fixed_s <= short_slo_s


def longest_batch_s(fixed_s: float, short_slo_s: float) -> float:
    """Return what a batch may take in which a long prefill runs whole: half of an objective that can be held, which
    leaves a third to the next batch and the rest to what was not foreseen."""
    return _LONGEST_OF_SLO * short_slo_s if can_hold(fixed_s, short_slo_s) else inf


def can_afford(load: OfferedLoad, fixed_s: float, short_slo_s: float, extra_s: float, batch_s: float) -> bool:
    """Return whether deadlines are worth `extra_s` of fixed costs with every batch of `batch_s`.

    The load must leave that much time free. And it must be possible to hold the objective: under a shorter one, a batch
    more makes one prefill on time by a little, and all that wait late by a fixed cost.
    """
    return can_hold(fixed_s, short_slo_s) and extra_s <= (1.0 - load.utilisation) * batch_s


def stage_share(stages: int) -> float:
    """Return what a batch may take on each of P stages, over what it may take on an instance of one stage.

    A short prefill that waits follows the longest batch (1/2 of the objective for one stage) through all stages, and
    ends on the last one with its own (1/3): both shares shrink by (1/2 + 1/3) / (P/2 + 1/3).
    """
    return 5 / (2 + 3 * stages)


def without_shorts_s(round_s: float) -> float:
    """The budget while no short prefill waits."""
    return _WITHOUT_SHORTS * round_s


def long_mode_round_s(round_s: float, kappa_s: float, backlog_s: float, stages: int = 1) -> float:
    """The budget on an instance for long prefills: three rounds.

    In a pipeline less, if that is sooner: chunks of t make a backlog of W on each stage end after W + kappa W / t, and
    the last stage begins (P - 1) t later; the sum is least at t = sqrt(kappa W / (P - 1)).
    """
    max_s = _LONG_MODE_ROUNDS * round_s
    if stages == 1:
        return max_s
    best_s = sqrt(kappa_s * backlog_s / (stages - 1)) / _WITHOUT_SHORTS
    return min(max_s, max(round_s, best_s))


def even_share_s(work_s: float, budget_s: float) -> float:
    """The time of each of the fewest equal parts of this work that keep the budget, or exceed it by a tenth together.

    In a pipeline the stages wait for the longest chunk, and a shorter last chunk brings nothing.
    """
    return work_s / max(1, ceil(work_s / budget_s - (_FIXED_WHOLE_WITHIN - 1))) if budget_s > 0 else budget_s


class LongRoom(NamedTuple):
    """Describes what is left of a batch for long prefills."""

    left_s: float
    is_mixed: bool  # other requests are in the batch
    tokens: int
    requests: int
    free_kv_tokens: int
    chunk_tokens: int  # most of one request
    page_tokens: int
    min_chunk_tokens: int
    max_parked: int
    whole_within: float = _WHOLE_WITHIN  # a prefill that takes this many times `left_s` runs whole
    longest_s: float = inf  # but none that takes longer than this, if that is more than a tenth over `left_s`


def whole_within(*, is_fixed: bool) -> float:
    """Return how many times what is left of the budget a prefill may take to run whole; `is_fixed`: the option fixes
    the budget, or the stages of a pipeline wait for the longest chunk."""
    return _FIXED_WHOLE_WITHIN if is_fixed else _WHOLE_WITHIN


class LongParts(NamedTuple):
    """The long prefills of a batch. `added_s`: what they add to its time, without its fixed cost, and with the cost of
    each further request."""

    whole: tuple[RankedPrefill, ...]
    cut: RankedPrefill | None
    cut_tokens: int
    new_tokens: int
    added_s: float

    @property
    def requests(self) -> int:
        return len(self.whole) + (self.cut is not None)


NO_LONGS = LongParts((), None, 0, 0, 0.0)


def fill_with_longs(
    longs: Sequence[RankedPrefill], started: Sequence[RankedPrefill], cost: CostCoefficients, room: LongRoom
) -> LongParts:
    """Long prefills for the room, `longs` being in the order in which they should run.

    The first one progresses by at least `min_chunk_tokens`, however little time is left. At most one started prefill
    is in a batch, and at most one is cut. A prefill is started only if the memory holds it and the rest of all that
    are started, so that these can always end; a prefill that the batch ends needs room only for itself. What is cached
    of it counts as well: it counts as free as long as nothing holds it, or has to be loaded from the host. `started`:
    all that hold KV. Where none does, even a prompt larger than the memory is begun.
    """
    left_s, tokens = room.left_s, min(room.tokens, room.free_kv_tokens)
    promised_tokens = sum([prefill.request.new_tokens for prefill in started])
    parked = len(started)  # after this batch, without the prefill that it cuts
    has_started = False
    whole: list[RankedPrefill] = []
    new_tokens, added_s = 0, 0.0
    for candidate in longs:
        max_tokens = min(tokens, room.chunk_tokens)
        if max_tokens < 1 or len(whole) >= room.requests:
            break
        request = candidate.request
        if request.is_started and has_started:
            continue
        remaining_tokens, cached_tokens = request.new_tokens, request.cached_tokens
        taken_tokens = remaining_tokens
        # What is taken into account besides the tokens: the fixed cost is paid, that of a further request is not.
        paid_s = cost.kappa_s - (cost.request_s if room.is_mixed or whole else 0.0)
        taken_s = cost.chunk_s(remaining_tokens, cached_tokens) - paid_s
        whole_s = max(min(room.whole_within * left_s, room.longest_s - added_s), _FIXED_WHOLE_WITHIN * left_s)
        if remaining_tokens > max_tokens or taken_s > whole_s:
            if not request.is_started and started:
                promise_tokens = promised_tokens + new_tokens + remaining_tokens + cached_tokens
                if parked > room.max_parked or promise_tokens > room.free_kv_tokens:
                    continue
            if max_tokens < room.page_tokens:
                break
            taken_tokens = choose_chunk(
                cost,
                remaining_tokens,
                cached_tokens,
                left_s + paid_s,
                room.page_tokens,
                room.min_chunk_tokens,
                max_tokens,
            )
            taken_s = cost.chunk_s(taken_tokens, cached_tokens) - paid_s
            if taken_tokens > max_tokens or (whole and taken_s > room.whole_within * left_s):
                break
            if taken_tokens < remaining_tokens:
                return LongParts(tuple(whole), candidate, taken_tokens, new_tokens + taken_tokens, added_s + taken_s)
        whole.append(candidate)
        if request.is_started:
            has_started = True
            parked -= 1
            promised_tokens -= remaining_tokens
        # Whole pages, as the engine gives them out.
        tokens -= -(-taken_tokens // room.page_tokens) * room.page_tokens
        left_s -= taken_s
        new_tokens += taken_tokens
        added_s += taken_s
    return LongParts(tuple(whole), None, 0, new_tokens, added_s)


def run_shorts_alone(
    now_s: float,
    shorts: FormedBatch,
    mixed_s: float,
    saved_s: float,
    waiting: int,
    utilisation: float,
    stages: int = 1,
    *,
    is_affordable: bool = True,
) -> bool:
    """Return whether the short prefills should not share their batch with long ones.

    They do not where one of them would be late for it that is on time by itself and the load leaves time for batches
    apart (`is_affordable`), nor where what they wait for together
    outweighs twice the time that sharing saves (`saved_s`) for everybody else: the `waiting` ones and the next to come,
    1 / (1 - utilisation) times as many in all. With captured graphs little is saved, and they run by themselves.

    In a pipeline (`mixed_s` is the time on each of its `stages`) a short batch follows a long one through the later
    stages, however short it is, and each stage waits meanwhile: sharing saves that as well.
    """
    behind_s = (stages - 1) * mixed_s
    alone_end_s, mixed_end_s = now_s + shorts.predicted_s + behind_s, now_s + mixed_s + behind_s
    if stages > 1:
        saved_s += mixed_s - shorts.predicted_s
    if is_affordable:
        for member in shorts.members:
            if alone_end_s <= member.request.deadline_s < mixed_end_s:
                return True
    others = _OTHERS_WEIGHT * (waiting + 1) / (1.0 - min(utilisation, _MOST_UTILISATION))
    return len(shorts.members) * (mixed_s - shorts.predicted_s) > saved_s * others


def cut_of(parts: LongParts) -> Cut | None:
    """The request of which tokens are left."""
    return None if parts.cut is None else Cut(parts.cut.request.key, parts.cut_tokens)


def choose_chunk(
    cost: CostCoefficients,
    remaining_tokens: int,
    cached_tokens: int,
    budget_s: float,
    page_tokens: int,
    min_tokens: int,
    max_tokens: int,
) -> int:
    """Tokens of the next chunk: the largest multiple of `page_tokens` whose predicted time is within `budget_s`.

    It shrinks as the cache grows (Medha, section 3.2). At least `min_tokens`, at most `max_tokens`; all that is
    left, of any number, if that fits. What would stay behind as a last chunk below `min_tokens` is left a little
    longer, or taken along.
    """
    pages_max = max(1, max_tokens // page_tokens)
    pages_min = min(pages_max, -(-min_tokens // page_tokens))
    if remaining_tokens <= pages_min * page_tokens:
        return remaining_tokens
    if remaining_tokens <= max_tokens and cost.chunk_s(remaining_tokens, cached_tokens) <= budget_s:
        return remaining_tokens
    low, high = pages_min, min(pages_max, remaining_tokens // page_tokens)
    alpha_s, token_s, kappa_s = cost.alpha_s, cost.token_s, cost.kappa_s
    reading_s = cost.read_s * cached_tokens
    while low < high:  # the largest that fits is in [low, high]
        middle = (low + high + 1) // 2
        tokens = middle * page_tokens
        if tokens * (alpha_s * (tokens + 2 * cached_tokens) + token_s) + reading_s + kappa_s <= budget_s:
            low = middle
        else:
            high = middle - 1
    chunk_tokens = low * page_tokens
    least_tokens = pages_min * page_tokens
    if remaining_tokens - chunk_tokens < least_tokens:
        shorter_tokens = (remaining_tokens - least_tokens) // page_tokens * page_tokens
        if shorter_tokens >= least_tokens:
            return shorter_tokens
        if remaining_tokens <= max_tokens:
            return remaining_tokens
    return chunk_tokens
