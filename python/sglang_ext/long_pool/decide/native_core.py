"""The planners' C++ core. Importing this module raises ImportError with one line where the core is not built."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost, TabulatedCost

try:
    from sglang_ext.long_pool.decide._core import Planner as NativePlanner
    from sglang_ext.long_pool.decide._core import PricePlanner as NativePricePlanner
except ImportError as error:
    raise ImportError(
        f"the CDSP planner's C++ core is not usable ({error}): with a C++ compiler run `make compiled` in a checkout "
        "or install sglang-ext from source"
    ) from None

__all__ = ["CoreCost", "NativePlanner", "NativePricePlanner", "core_candidates"]

CoreCost = tuple[float, float, float, float] | tuple[list[float], list[float]]


def core_candidates(candidates: Sequence[SpCandidate]) -> tuple[list[int], list[CoreCost]]:
    """SP sizes, ascending, and their costs as the core takes them: the coefficients of Eq. 1, or tokens and seconds."""
    ascending = sorted(candidates, key=lambda candidate: candidate.size)
    return [one.size for one in ascending], [_core_cost(one.cost) for one in ascending]


def _core_cost(cost: SpCost | TabulatedCost) -> CoreCost:
    if isinstance(cost, SpCost):
        return cost.a_s, cost.b_s_per_token, cost.c_s_per_token2, cost.d_s_per_token2
    return [float(tokens) for tokens in cost.prompt_tokens], list(cost.duration_s)
