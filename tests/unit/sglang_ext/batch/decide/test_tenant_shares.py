"""Shares of work: in proportion to weights while there is work, and nothing saved up by a pause."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.batch.decide.line_order import TenantShares
from support.examples import examples

MAX_WORK = 1000
WEIGHTS = st.dictionaries(st.sampled_from("abcde"), st.sampled_from([0.25, 1.0, 2.0, 3.0, 10.0]), min_size=2)
WORKS = st.lists(st.tuples(st.integers(1, MAX_WORK), st.integers(0, MAX_WORK), st.booleans()), min_size=1, max_size=300)


@settings(max_examples=examples(200), deadline=None)
@given(WEIGHTS, WORKS)
def test_tenants_with_work_get_it_by_weight(weights: dict[str, float], works: list[tuple[int, int, bool]]) -> None:
    """Work is known in part when it begins, and the rest later, with up to four under way."""
    shares = TenantShares()
    had: Counter[str] = Counter()
    open_work: list[tuple[str, int]] = []
    for known, rest, ends_one in works:
        tenant = shares.choose(weights)
        shares.charge(tenant, known, weights[tenant])
        had[tenant] += known
        open_work.append((tenant, rest))
        if len(open_work) > 4 or ends_one:
            ended, more = open_work.pop(0)
            shares.correct(ended, more, weights[ended])
            had[ended] += more
        times = {name: had[name] / weight for name, weight in weights.items()}
        for name, other in [(a, b) for a in weights for b in weights]:
            # One piece of work ahead, and what it did not know of those under way.
            assert times[name] - times[other] <= 6 * MAX_WORK / weights[name] + 1e-6


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 50), st.integers(1, 50), st.floats(0.1, 10))
def test_a_pause_saves_nothing_up(before: int, meanwhile: int, weight: float) -> None:
    shares = TenantShares()
    weights = {"busy": 1.0, "pausing": weight}
    for _ in range(before):
        tenant = shares.choose(weights)
        shares.charge(tenant, 1, weights[tenant])
    for _ in range(meanwhile):
        shares.charge("busy", 1, 1.0)
    latest = []
    for _ in range(40):
        latest.append(tenant := shares.choose(weights))
        shares.charge(tenant, 1, weights[tenant])
    fair = 40 * weight / (1 + weight)
    assert abs(latest.count("pausing") - fair) <= 1 + weight


def test_who_comes_back_is_next() -> None:
    shares = TenantShares()
    for _ in range(1000):
        shares.charge("flood", 500, 1.0)
    assert shares.choose(["flood", "small"]) == "small"
