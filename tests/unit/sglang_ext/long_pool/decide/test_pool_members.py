"""What members of a long pool can compute at once."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_ext.long_pool.decide.orders import MemberReport
from sglang_ext.long_pool.decide.pool_members import PoolMembers
from sglang_ext.long_pool.decide.sharding import Interleaving, count_tokens
from support.sharding import split_chunk

PAGES_AT_LEAST = 4  # of a bound: below, it is about as much


@pytest.mark.slow
@given(
    group=st.integers(1, 5),
    page=st.sampled_from([1, 4, 16]),
    more=st.integers(0, 600),
    tokens=st.integers(1, 4000),
    start=st.integers(0, 60),
    interleaving=st.sampled_from(Interleaving),
)
# Without a margin for unequal shares it would be 324, 66 and 57 tokens.
@example(group=3, page=16, more=322 - 64, tokens=932, start=23, interleaving=Interleaving.ZIGZAG)
@example(group=4, page=16, more=0, tokens=210, start=40, interleaving=Interleaving.ZIGZAG)
@example(group=2, page=4, more=56 - 16, tokens=109, start=2, interleaving=Interleaving.ZIGZAG)
def test_a_chunk_fits_every_member_of_its_group(
    group: int, page: int, more: int, tokens: int, start: int, interleaving: Interleaving
) -> None:
    bound = PAGES_AT_LEAST * page + more
    members = PoolMembers(0.0)
    for instance in range(group):
        members.add(instance, 0, MemberReport(0.0, 10_000, bound + 100 * instance))
    fitting, compute_s = members.fit_chunk(range(group), tokens, 3.0, page)
    assert 1 <= fitting <= tokens
    assert math.isclose(compute_s, 3.0 * fitting / tokens)
    assert max(count_tokens(part) for part in split_chunk(start, fitting, group, interleaving, page)) <= bound
    if fitting < tokens:
        assert fitting >= group * bound / 4, "not much less than they could"


def test_no_step_begins_where_one_runs_or_something_is_kept_or_others_do_not_reach_it() -> None:
    members = PoolMembers(0.05)
    for instance in (3, 5, 7, 9):
        members.add(instance, 0, MemberReport(1.0, 10_000))
    members.begin_step(1, (5,), 10.0, 1.0)
    members[9].record_unreachable(10.0)
    assert members.begin_in_s(10.5, (7,)) == [0.0, math.inf, math.inf, math.inf]
    members.end_step(1, (5,), 11.0)
    assert members.begin_in_s(11.5, ()) == [0.0] * 4


def test_a_step_begins_when_the_running_batch_ends_whatever_is_queued_behind_it() -> None:
    members = PoolMembers(0.05)
    members.add(3, 0, MemberReport(0.0, 10_000))
    members.report(3, MemberReport(9.0, 10_000, running_s=0.4), 10.0, None)
    assert members.begin_in_s(10.1, ()) == [pytest.approx(0.3)]
    assert members.begin_in_s(11.0, ()) == [0.0]
    members.begin_step(1, (3,), 11.0, 0.5)
    assert members[3].begins_in_s(11.2) == pytest.approx(0.3)


def test_an_instance_works_on_what_it_has_reported_but_not_during_a_step() -> None:
    members = PoolMembers(0.05)
    members.add(3, 0, MemberReport(0.0, 10_000))
    members.report(3, MemberReport(2.0, 10_000, running_s=0.4, short_backlog_s=0.5), 10.0, None)
    assert members[3].backlog_s(10.6) == pytest.approx(1.4)
    assert members.shorts_s(10.2) == [pytest.approx(0.5)]  # the batch that runs is not theirs
    assert members.shorts_s(10.6) == [pytest.approx(0.3)]
    members.begin_step(1, (3,), 10.2, 1.0)
    assert members[3].backlog_s(11.0) == pytest.approx(1.8)
    # The batch has ended before the chunk began.
    members.end_step(1, (3,), 11.4)
    assert members[3].backlog_s(11.4) == pytest.approx(1.6)
    assert members.shorts_s(11.4) == [pytest.approx(0.5)]
    assert members.begin_in_s(11.4, ()) == [0.0]
    assert members.shorts_s(11.6) == [pytest.approx(0.3)]


@pytest.mark.parametrize(("reported_s", "expected_s"), [(10.0, 0.5), (10.6, 0.3), (11.0, 0.1)])
def test_short_prefills_are_expected_to_have_come_since_the_report_of_a_member_in_a_step(
    reported_s: float, expected_s: float
) -> None:
    members = PoolMembers(0.05)
    members.add(3, 0, MemberReport(0.0, 10_000))
    members.begin_step(1, (3,), 10.2, 0.8)
    report = MemberReport(0.1, 10_000, short_per_s=5.0, short_slo_s=1.0, short_work_s=0.5, short_backlog_s=0.1)
    members.report(3, report, reported_s, None)
    members.end_step(1, (3,), 11.0)
    began_s = 0.2 if reported_s == 10.0 else 0.0  # until the step begins it works on them
    assert members.shorts_s(11.0) == [pytest.approx(max(0.0, 0.1 - began_s) + min(0.8, 11.0 - reported_s) * 0.5)]
    assert members.shorts_s(11.0)[0] == pytest.approx(expected_s - (0.1 if began_s else 0.0))


def test_without_a_bound_it_is_as_planned() -> None:
    members = PoolMembers(0.0)
    members.add(0, 0, MemberReport(0.0, 10_000))
    assert members.fit_chunk([0], 10**6, 3.0, 16) == (10**6, 3.0)
