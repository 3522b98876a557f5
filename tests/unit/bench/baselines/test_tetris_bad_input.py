"""Bad input: one line that names the field."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from baselines.tetris_planner import CdspPlanner, CdspRequest, PlannerConfig
from sglang_ext.long_pool.decide.price_planner import PrefillSnapshot
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost, TabulatedCost
from sglang_ext.long_pool.decide.table1 import fitted_candidates

GOOD = PrefillSnapshot((0, 0), (0.0, 1.0), (10**6, 10**6))
A_STRING: Any = "1"
COST = SpCost(0.1, 1e-5, 0.0, 0.0)


@pytest.mark.parametrize(
    ("snapshot", "request_", "rate", "message"),
    [
        (GOOD._replace(queue_delays_s=(0.0, math.nan)), CdspRequest(1), 0.0, r"queue_delays_s\[1\]: a finite number"),
        (GOOD._replace(queue_delays_s=(-0.1, 0.0)), CdspRequest(1), 0.0, r"queue_delays_s\[0\]: a finite number"),
        (GOOD._replace(queue_delays_s=(0.0, math.inf)), CdspRequest(1), 0.0, r"queue_delays_s\[1\]: a finite number"),
        (GOOD._replace(queue_delays_s=(0.0, A_STRING)), CdspRequest(1), 0.0, r"queue_delays_s\[1\]: a finite number"),
        (GOOD._replace(queue_delays_s=(0.0,)), CdspRequest(1), 0.0, "queue_delays_s: one entry per entry of node_ids"),
        (GOOD._replace(free_kv_tokens=(1, 2, 3)), CdspRequest(1), 0.0, "free_kv_tokens: one entry per entry"),
        (GOOD._replace(free_kv_tokens=(1, -1)), CdspRequest(1), 0.0, r"free_kv_tokens\[1\]: a whole number"),
        (GOOD._replace(free_kv_tokens=(1, 2**70)), CdspRequest(1), 0.0, r"free_kv_tokens\[1\]: a whole number"),
        (GOOD._replace(node_ids=(0, -1)), CdspRequest(1), 0.0, r"node_ids\[1\]: a number of at least 0"),
        (GOOD._replace(node_ids=(0, 2**20)), CdspRequest(1), 0.0, r"node_ids\[1\]: a number of at least 0"),
        (PrefillSnapshot((), (), ()), CdspRequest(1), 0.0, "node_ids: at least one instance"),
        (GOOD, CdspRequest(0), 0.0, "new_tokens: at least 1"),
        (GOOD, CdspRequest(1, -1), 0.0, "cached_tokens: at least 0"),
        (GOOD, CdspRequest(1, 0, (2,)), 0.0, r"group\[0\]: the position of an instance"),
        (GOOD, CdspRequest(1, 0, (1, 1)), 0.0, r"group\[1\]: the position of an instance"),
        (GOOD, CdspRequest(1, waited_s=-1.0), 0.0, "waited_s: a finite number"),
        (GOOD, CdspRequest(1, waited_s=math.inf), 0.0, "waited_s: a finite number"),
        (GOOD, CdspRequest(1), 1.0, "improvement_rate: a share"),
        (GOOD, CdspRequest(1), math.nan, "improvement_rate: a share"),
    ],
)
def test_a_wrong_field_is_named(snapshot: Any, request_: CdspRequest, rate: float, message: str) -> None:
    planner = CdspPlanner(PlannerConfig(fitted_candidates()))
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
        planner.plan(snapshot, request_, rate)
    assert planner.plan(GOOD, CdspRequest(1000), 0.05) == planner.plan(GOOD, CdspRequest(1000), 0.05)


def test_a_column_that_is_no_sequence_is_named() -> None:
    planner = CdspPlanner(PlannerConfig(fitted_candidates()))
    with pytest.raises(TypeError, match="queue_delays_s: a sequence is needed"):
        planner.plan(GOOD._replace(queue_delays_s=1.0), CdspRequest(1), 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PlannerConfig(()), "candidates: at least one"),
        (lambda: PlannerConfig((SpCandidate(2, COST), SpCandidate(2, COST))), "candidates: SP size 2 is there twice"),
        (lambda: PlannerConfig(fitted_candidates(), min_chunk_tokens=0), "min_chunk_tokens: 0 is less than 1"),
        (lambda: PlannerConfig(fitted_candidates(), page_tokens=0), "page_tokens: 0 is less than 1"),
        (lambda: SpCandidate(0, COST), "size: 0 instances"),
        (lambda: SpCost(math.nan, 0.0, 0.0, 0.0), "a_s: nan is not"),
        (lambda: SpCost(0.0, 0.0, 0.0, -1.0), "d_s_per_token2: -1.0 is not"),
        (lambda: TabulatedCost((1,), (1.0,)), "prompt_tokens: two entries"),
        (lambda: TabulatedCost((1, 2), (1.0,)), "prompt_tokens: two entries"),
        (lambda: TabulatedCost((2, 2), (1.0, 1.0)), "prompt_tokens: lengths must rise"),
        (lambda: TabulatedCost((1, 2), (1.0, 0.5)), "duration_s: a longer prompt"),
        (lambda: TabulatedCost((1, 2), (1.0, math.inf)), "duration_s: finite numbers"),
    ],
)
def test_a_wrong_record_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make()
