"""Random planning problems whose arithmetic is exact in doubles: everything is a small multiple of a power of two."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from hypothesis import strategies as st

from baselines.tetris_planner import CdspRequest, ChunkPlan, PlannerConfig
from sglang_ext.long_pool.decide.price_planner import PrefillSnapshot
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost, TabulatedCost
from sglang_ext.long_pool.decide.table1 import LATENCY_S, PROMPT_TOKENS

RATES = (0.0, 1 / 16, 1 / 4, 1 / 2)
PLENTY = 1 << 30
waits = st.sampled_from([0.0, 0.0, 0.125, 3.0])


class Case(NamedTuple):
    config: PlannerConfig
    snapshot: PrefillSnapshot
    request: CdspRequest
    rate: float


@st.composite
def polynomial_costs(draw: st.DrawFn, size: int) -> SpCost:
    """A cost that mostly falls with the size, as real ones do, so that larger groups and chunks are worth while."""
    per_token = draw(st.integers(1, 64)) / size if size & (size - 1) == 0 else draw(st.integers(1, 16))
    return SpCost(
        draw(st.integers(0, 8 * size)) * 2.0**-8,
        per_token * 2.0**-14,
        draw(st.integers(0, 64)) * 2.0**-30,
        draw(st.integers(0, 64)) * 2.0**-30,
    )


@st.composite
def tabulated_costs(draw: st.DrawFn) -> TabulatedCost:
    first = draw(st.sampled_from([0, 256]))
    lengths = (first, *(first + (256 << step) for step in range(draw(st.integers(1, 6)))))
    gaps = draw(st.lists(st.integers(0, 400), min_size=len(lengths), max_size=len(lengths)))
    return TabulatedCost(lengths, tuple(value * 2.0**-8 for value in accumulate(gaps)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to 12 instances on unequal nodes, up to five SP sizes, requests that may have begun."""
    count = draw(st.integers(1, 12))
    sizes = draw(st.lists(st.integers(1, min(12, count + 1)), min_size=1, max_size=5, unique=True))
    if draw(st.integers(0, 3)) == 0:
        candidates = tuple(
            SpCandidate(size, draw(st.one_of(tabulated_costs(), polynomial_costs(size)))) for size in sizes
        )
    else:
        candidates = tuple(SpCandidate(size, draw(polynomial_costs(size))) for size in sizes)
    members = draw(st.lists(st.integers(0, count - 1), max_size=3, unique=True)) if draw(st.booleans()) else []
    cached = draw(st.integers(1, 3000)) if members else 0
    request = CdspRequest(draw(st.integers(1, 6000)), cached, tuple(members), draw(waits))
    return draw(_around(candidates, count, request))


@st.composite
def scaling_cases(draw: st.DrawFn) -> Case:
    """Costs that fall with the size and delays of their order: what is planned in chunks."""
    count = draw(st.integers(4, 12))
    sizes = draw(st.sampled_from([(1, 2, 4), (1, 2, 4, 8), (2, 4, 8), (1, 3, 4, 6, 12), (2, 3, 5, 7, 11)]))
    work = draw(st.integers(16, 64)) * 840  # divisible by all sizes but 11
    overhead = draw(st.integers(0, 4))
    quadratic = draw(st.integers(0, 840))
    candidates = tuple(
        SpCandidate(
            size,
            SpCost(
                overhead * index * 2.0**-8,
                (work // size) * 2.0**-24,
                2 * (quadratic // size) * 2.0**-34,
                (quadratic // size) * 2.0**-34,
            ),
        )
        for index, size in enumerate(sizes)
    )
    members = draw(st.lists(st.integers(0, count - 1), max_size=2, unique=True)) if draw(st.integers(0, 4)) == 0 else []
    request = CdspRequest(draw(st.integers(500, 6000)), 300 if members else 0, tuple(members), draw(waits))
    return draw(_around(candidates, count, request))


@st.composite
def _around(draw: st.DrawFn, candidates: tuple[SpCandidate, ...], count: int, request: CdspRequest) -> Case:
    config = PlannerConfig(
        candidates,
        min_chunk_tokens=draw(st.sampled_from([1, 1, 64, 1000])),
        page_tokens=draw(st.sampled_from([1, 3, 64])),
        is_chunking=draw(st.integers(0, 9)) != 0,
    )
    total = request.cached_tokens + request.new_tokens
    tight = st.one_of(st.just(PLENTY), st.integers(total // 12, total + 100))
    is_tight = draw(st.integers(0, 2)) == 0
    columns: tuple[st.SearchStrategy[float], ...] = (
        st.integers(0, 3),
        st.one_of(st.just(0.0), st.integers(0, 4000).map(lambda value: value * 2.0**-10)),
        tight if is_tight else st.just(PLENTY),
    )
    snapshot = PrefillSnapshot(*(draw(st.lists(column, min_size=count, max_size=count)) for column in columns))  # type: ignore[arg-type]
    return Case(config, snapshot, request, draw(st.sampled_from(RATES)))


def tabulated_candidates() -> tuple[SpCandidate, ...]:
    """Return the SP sizes of Table 1 with its own entries."""
    return tuple(
        SpCandidate(size, TabulatedCost(PROMPT_TOKENS[: len(times_s)], times_s)) for size, times_s in LATENCY_S.items()
    )


def queue_delays_after(plan: ChunkPlan, queue_delays_s: Sequence[float]) -> tuple[float, ...]:
    """Return the delays (s, from the same moment) once `plan` is committed.

    All instances of a plan are members of its last group, so all of them are busy until it ends.
    """
    delays = list(queue_delays_s)
    for instance in plan.chunks[-1].instances:
        delays[instance] = plan.ttft_s
    return tuple(delays)
