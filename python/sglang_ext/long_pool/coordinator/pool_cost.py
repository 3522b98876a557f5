"""Describes what chunks cost on each SP size: from a profile, or from what members measure of their own batches, and
corrected by what chunks really took.

Before members know, a prior serves: whether two instances are worth it depends on ratios. One ratio corrects all sizes,
because queue delays, which are real seconds, are compared with costs, and the first chunk counts at once: what is
believed before it may be far off, and a chunk cannot be interrupted. It cannot separate a chunk's fixed cost from the
cost of its tokens, as members can, and how long a chunk may take depends on that: of a prior that is too fast only the
cost of the tokens is corrected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from sglang_ext.costs.engine_profile import EngineProfile
from sglang_ext.long_pool.decide.orders import MeasuredCost
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost, TabulatedCost
from sglang_ext.long_pool.decide.table1 import fitted_cost

# Both describe Table 1 of Tetris (SP 1 to 16) within a third.
RING_EFFICIENCY = 0.92
RING_OVERHEAD_S = 0.02  # for each further instance
_SAMPLES = 15
_KEPT = 64
_LEAST_SAMPLES = 3
_LEAST_CHANGE = 1.1
_REMEMBERED_S = 300.0
_USUAL_TOKENS = 2048


class UnknownCostError(ValueError):
    """A profile does not contain what a chunk costs; the text is one line for the user."""


def divided(single: SpCost, size: int) -> SpCost:
    """Return what a chunk costs on `size` instances where its cost on one is known."""
    share = 1.0 if size == 1 else 1.0 / (size * RING_EFFICIENCY)
    return SpCost(
        single.a_s + RING_OVERHEAD_S * (size - 1),
        single.b_s_per_token * share,
        single.c_s_per_token2 * share,
        single.d_s_per_token2 * share,
    )


def prior_candidates(sizes: Sequence[int]) -> tuple[SpCandidate, ...]:
    """Costs without any measurement: LLaMA3-8B on one A100 (Tetris, Table 1), divided."""
    single = fitted_cost(1)
    return tuple(SpCandidate(size, divided(single, size)) for size in sizes)


def profiled_candidates(profile: EngineProfile, sizes: Sequence[int]) -> tuple[SpCandidate, ...]:
    """Costs of a profile; sizes that were not measured are what one instance takes, divided.

    UnknownCostError where a size was not measured, nor a single instance.
    """
    known = {candidate.size: candidate.cost for candidate in profile.candidates}
    if 1 not in known and profile.coefficients is not None:
        # LAPS's work of a request is L (L + 2 C): Eq. 1 of Tetris with c = 2d.
        single_cost = profile.coefficients
        known[1] = SpCost(single_cost.kappa_s, single_cost.token_s, 2 * single_cost.alpha_s, single_cost.alpha_s)
    candidates = []
    for size in sizes:
        cost = known.get(size)
        if cost is None:
            single = known.get(1)
            if not isinstance(single, SpCost):
                raise UnknownCostError(f"neither SP size {size} nor 1 is in the profile")
            cost = divided(single, size)
        candidates.append(SpCandidate(size, cost))
    return tuple(candidates)


class _Ratio(NamedTuple):
    """Describes by how much the time of one chunk differed from its prediction."""

    at_s: float
    size: int
    ratio: float


class PoolCosts:
    """Costs that follow what chunks take: all sizes times the median of the last 15 ratios of measured to predicted.

    A ratio to a prior that is too fast is that of what a chunk takes beyond its fixed cost. Where members have measured
    what a batch costs, that is what a single instance takes, and each size of a group is corrected by its own ratios:
    what a ring of two adds is not known before, and a size that looks better than it is wastes instances. A size that
    looks worse is not used, and would remain what it was in its worst minute: ratios are forgotten after five minutes.

    A pool learns what groups are worth from the single instance up. While its members have measured nothing, a group is
    expected to take as long as one instance does: prompts go to one where they fit. What members have found with short
    prefills alone counts until one has measured long ones; ratios begin again then. It is not certain for long prompts,
    and what looks slow is not tried: groups that are faster than it admits show that one instance is, too.
    """

    def __init__(self, candidates: Sequence[SpCandidate], *, is_prior: bool = False) -> None:
        """`is_prior`: what members have measured counts instead, once they know."""
        self._candidates = tuple(candidates)
        self._is_prior = is_prior
        self._measured: dict[int, MeasuredCost] = {}  # by member
        self._single: SpCost | None = None  # that the candidates are made of
        self._is_extrapolated = False  # it is of short prefills
        self._ratios: deque[_Ratio] = deque(maxlen=_KEPT)
        self._scales = {candidate.size: 1.0 for candidate in candidates}

    @property
    def scale(self) -> float:
        """Return what the given costs are multiplied with; where that is not the same for all, the largest size's."""
        return self._scales[max(self._scales)] if self._scales else 1.0

    @property
    def candidates(self) -> tuple[SpCandidate, ...]:
        """The costs to plan with."""
        scaled = tuple(
            SpCandidate(candidate.size, self._scaled(candidate.cost, self._scales[candidate.size]))
            for candidate in self._candidates
        )
        if self._is_guessed:
            smallest = min(scaled, key=lambda candidate: candidate.size)
            return tuple(SpCandidate(candidate.size, smallest.cost) for candidate in scaled)
        return scaled

    @property
    def _is_guessed(self) -> bool:
        """Return whether nothing but the prior and chunks says what a chunk costs."""
        return self._is_prior and self._single is None

    def _scaled(self, cost: SpCost | TabulatedCost, scale: float) -> SpCost | TabulatedCost:
        if isinstance(cost, TabulatedCost):
            return TabulatedCost(cost.prompt_tokens, tuple(duration_s * scale for duration_s in cost.duration_s))
        fixed_s = cost.a_s * (min(1.0, scale) if self._is_guessed else scale)
        return SpCost(fixed_s, cost.b_s_per_token * scale, cost.c_s_per_token2 * scale, cost.d_s_per_token2 * scale)

    def learn(self, instance: int, cost: MeasuredCost | None, now_s: float) -> bool:
        """A member reports what its batches cost; whether the costs to plan with have changed by a tenth or more."""
        has_forgotten = self._forget_ratios(now_s) and self._rescale()
        if not self._is_prior or cost is None:
            return has_forgotten
        before = self._measured.get(instance)
        if cost.is_extrapolated and before is not None and not before.is_extrapolated:
            return has_forgotten
        self._measured[instance] = cost
        known = [one for one in self._measured.values() if not one.is_extrapolated]
        believed = known or list(self._measured.values())
        fixed_s, token_s, work_s = (median(values) for values in zip(*(one[:3] for one in believed), strict=True))
        single = SpCost(fixed_s, token_s, 2 * work_s, work_s)
        is_first = self._single is None or (bool(known) and self._is_extrapolated)
        if not is_first and self._single is not None and not _differ(single, self._single):
            return has_forgotten
        if is_first:  # the ratios are those to something else
            self._ratios.clear()
            self._scales = dict.fromkeys(self._scales, 1.0)
        self._single, self._is_extrapolated = single, not known
        self._candidates = tuple(
            SpCandidate(candidate.size, divided(single, candidate.size)) for candidate in self._candidates
        )
        return True

    def forget(self, instance: int) -> None:
        """A member has gone."""
        self._measured.pop(instance, None)

    def observe(self, size: int, cached_tokens: int, new_tokens: int, duration_s: float, now_s: float) -> bool:
        """A chunk has taken this long; whether the costs to plan with have changed by a tenth or more."""
        cost = next((candidate.cost for candidate in self._candidates if candidate.size == size), None)
        if cost is None:
            return False
        predicted_s = cost.predict_s(cached_tokens, new_tokens)
        if not 0 < predicted_s < float("inf") or duration_s <= 0:
            return False
        fixed_s = cost.predict_s(0, 0) if self._is_guessed and duration_s > predicted_s else 0.0
        if predicted_s <= fixed_s:
            return False
        self._forget_ratios(now_s)
        self._ratios.append(_Ratio(now_s, size, (duration_s - fixed_s) / (predicted_s - fixed_s)))
        return self._rescale()

    def _forget_ratios(self, now_s: float) -> bool:
        """Return whether there were old ones. They are kept where only they correct a prior or a profile."""
        if self._single is None:
            return False
        count = len(self._ratios)
        while self._ratios and self._ratios[0].at_s < now_s - _REMEMBERED_S:
            self._ratios.popleft()
        return len(self._ratios) < count

    def _rescale(self) -> bool:
        """Return whether the ratios correct a size by a tenth more or less than before."""
        scales = {size: self._scale_of(size) for size in self._scales}
        if all(1 / _LEAST_CHANGE < scales[size] / scale < _LEAST_CHANGE for size, scale in self._scales.items()):
            return False
        self._scales = scales
        return True

    def _scale_of(self, size: int) -> float:
        """Return the ratio of a size; where it was seldom run, that of all groups. Members measure one instance."""
        if self._single is None:
            return _median_of(self._ratios, 1 if self._is_guessed else _LEAST_SAMPLES)
        groups = [one for one in self._ratios if one.size > 1]
        if size == 1:
            return min(1.0, _median_of(groups, _LEAST_SAMPLES)) if self._is_extrapolated else 1.0
        own = [one for one in groups if one.size == size]
        return _median_of(own if len(own) >= _LEAST_SAMPLES else groups, _LEAST_SAMPLES)


def _median_of(ratios: Sequence[_Ratio], least_samples: int) -> float:
    """Return the median of the latest ratios; 1 where there are too few."""
    return median([one.ratio for one in ratios][-_SAMPLES:]) if len(ratios) >= least_samples else 1.0


def _differ(one: SpCost, other: SpCost) -> bool:
    """Return whether a chunk's fixed cost, or all of a chunk of 2,048 tokens, differs by a tenth or more."""
    pairs = ((one.a_s, other.a_s), (one.predict_s(0, _USUAL_TOKENS), other.predict_s(0, _USUAL_TOKENS)))
    return any(not 1 / _LEAST_CHANGE < (first + 1e-9) / (second + 1e-9) < _LEAST_CHANGE for first, second in pairs)
