"""Decides where short ends on an instance: one number, from what its iterations cost, that changes seldom.

A prefill is short while memory and launches bound it rather than computation (LAPS's L_m), or while its time is a small
part of the short prefills' objective: a prefill that ends within half of it holds no other up for long, and is served
best in one piece, with others; or while it takes no longer than ten fixed costs of an iteration. The largest of the
three is taken: a boundary below makes prompts wait in chunks that could have been answered in time, or that lose a
tenth and more to fixed costs. However much time the objective leaves, what takes 64 fixed costs is cut at next to no
cost, and does not hold up shorter ones.

Routers and other instances follow the number, so it is coarse (two steps to a factor of two), and holds until the
measurements have contradicted it by far and for long.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import Final

from sglang_ext.laps.decide.cost_model import CostCoefficients, CostFit

DEFAULT_BOUNDARY_TOKENS: Final = 512  # until an instance has measured what its iterations cost
LEAST_BOUNDARY_TOKENS: Final = 32
OBJECTIVE_SHARE: Final = 0.5
_LEAST_FIXED_COSTS: Final = 10.0
_MOST_FIXED_COSTS: Final = 64.0
_SAMPLES: Final = 32  # between two looks at the measurements
_UNFITTED_SAMPLES: Final = 8  # between two looks before there is a fitted number
_LOOKS: Final = 8  # that contradict one after the other, before the number changes
_FIRST_LOOKS: Final = 2  # iterations, from the first on: an instance starts while others do
_FIRST_SAMPLES: Final = 512
_MARGIN: Final = 1.25  # beyond the step above or below


def fitted_boundary_tokens(fit: CostFit, write_s: float | None, objective_s: float, max_tokens: int) -> float | None:
    """Most new tokens of a short prefill without cached ones; None while the samples leave open what this many take.

    `write_s` is gamma_w (None: not known, and taken for nothing); `objective_s` the TTFT objective of short prefills;
    `max_tokens` what one iteration may compute.
    """
    memory_bound = fit.boundary_tokens(write_s or 0.0, 0) or 0.0
    tokens = min(max(memory_bound, _undivided_tokens(fit.fitted, objective_s)), max_tokens)
    return tokens if fit.is_determined(tokens) else None


def expected_boundary_tokens(cost: CostCoefficients, objective_s: float, max_tokens: int) -> int:
    """Return what an instance with these costs will find, where memory does not bound it for longer than the objective
    and the fixed cost do.

    `max_tokens`: what one of its iterations may compute.
    """
    return min(coarse_tokens(min(_undivided_tokens(cost, objective_s), max_tokens)), max_tokens)


def _undivided_tokens(cost: CostCoefficients, objective_s: float) -> float:
    """Return the tokens that take half of the objective, or 10 to 64 fixed costs of an iteration where it is far from
    them."""
    within_s = min(OBJECTIVE_SHARE * objective_s, _MOST_FIXED_COSTS * cost.kappa_s)
    return tokens_within(cost, max(within_s, _LEAST_FIXED_COSTS * cost.kappa_s))


def tokens_within(cost: CostCoefficients, budget_s: float) -> float:
    """New tokens of a lone prefill, without cached ones, that takes `budget_s`; 0 where even none takes longer."""
    spare_s = budget_s - cost.kappa_s
    if spare_s <= 0:
        return 0.0
    if cost.token_s <= 0 and cost.alpha_s <= 0:
        return inf
    root = sqrt(cost.token_s * cost.token_s + 4 * cost.alpha_s * spare_s)
    return 2 * spare_s / (cost.token_s + root)


def coarse_tokens(tokens: float) -> int:
    """The largest of 32, 48, 64, 96, 128, ... that is at most `tokens`; 32 below that."""
    step = LEAST_BOUNDARY_TOKENS
    while _next(step) <= tokens:
        step = _next(step)
    return step


def _next(step: int) -> int:
    """48 after 32, 64 after 48."""
    return step * 3 // 2 if step & (step - 1) == 0 else step * 4 // 3


class ClassBoundary:
    """The boundary that is in force on an instance.

    `given_tokens` holds for ever; without it `expected_tokens`, or 512 if that is more, do until the samples show more,
    and `max_tokens`, what one iteration may compute, bounds what is fitted.
    """

    __slots__ = ("_contradictions", "_given", "_max_tokens", "_samples", "is_fitted", "tokens")

    def __init__(
        self, given_tokens: int | None, max_tokens: int, expected_tokens: int = DEFAULT_BOUNDARY_TOKENS
    ) -> None:
        self._given = given_tokens is not None
        self._max_tokens = max_tokens
        self._samples = 0
        self._contradictions = 0
        self.is_fitted = False
        self.tokens = (
            min(max(expected_tokens, DEFAULT_BOUNDARY_TOKENS), max_tokens) if given_tokens is None else given_tokens
        )

    def record_iteration(self, fit: CostFit, write_s: float | None, objective_s: float) -> None:
        """`fit` has learned from one more iteration."""
        self._samples += 1
        if self._given or self._samples % (_SAMPLES if self.is_fitted else _UNFITTED_SAMPLES):
            return
        fitted = fitted_boundary_tokens(fit, write_s, objective_s, self._max_tokens)
        if fitted is None:
            return
        if not self.is_fitted:
            self._use(fitted)
        elif self._contradicts(fitted):
            self._contradictions += 1
            if self._contradictions >= (_FIRST_LOOKS if self._samples <= _FIRST_SAMPLES else _LOOKS):
                self._use(fitted)
        else:
            self._contradictions = 0

    def _contradicts(self, fitted: float) -> bool:
        return not self.tokens / _MARGIN <= fitted <= _next(self.tokens) * _MARGIN

    def _use(self, fitted: float) -> None:
        self.tokens = min(coarse_tokens(fitted), self._max_tokens)
        self.is_fitted = True
        self._contradictions = 0
