"""The account keeps the shares over time."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.laps.decide.instance_model import TimeAccount


def test_an_idle_account_lets_the_shorts_start() -> None:
    account = TimeAccount()
    assert account.can_run_short()
    assert account.short_share() == 0.0
    account.spend(1.5, 1.0)
    assert not account.can_run_short()
    account.clear()
    assert account.can_run_short()


@given(
    share=st.floats(0, 0.6),
    chunk_s=st.floats(0.1, 0.6),  # earns no more than the balance that an account holds
    batch_s=st.floats(0.01, 1.0),
    seed=st.integers(0, 1000),
)
def test_shorts_get_their_share_and_no_more(share: float, chunk_s: float, batch_s: float, seed: int) -> None:
    random = Random(seed)
    account = TimeAccount()
    short_s = long_s = 0.0
    for _ in range(400):
        if account.can_run_short():
            duration_s = batch_s * random.uniform(0.2, 1)
            account.spend(duration_s, 1.0)
            short_s += duration_s
        else:
            duration_s = chunk_s * random.uniform(0.2, 1)
            account.earn(duration_s, share, 0.6, 1.0)
            long_s += duration_s
        assert short_s <= share / (1 - share) * long_s + 1.0 + batch_s + 1e-9
    assert short_s >= share / (1 - share) * long_s - 1.0
    assert 0 <= account.short_share() <= 1


def test_urgent_shorts_are_bounded_by_the_largest_share() -> None:
    account = TimeAccount()
    short_s = long_s = 0.0
    for _ in range(1000):
        if account.can_run_urgent():
            account.spend(0.3, 1.0)
            short_s += 0.3
        else:
            account.earn(0.5, 0.0, 0.4, 1.0)
            long_s += 0.5
    assert short_s / (short_s + long_s) == pytest.approx(0.4, abs=0.01)
    assert account.short_share() == pytest.approx(0.4, abs=0.05)


def test_the_balance_does_not_pile_up() -> None:
    account = TimeAccount()
    account.spend(1.0, 1.0)
    for _ in range(100):
        account.earn(1.0, 0.4, 0.4, 1.0)
    runs = 0
    while account.can_run_short():
        account.spend(0.25, 1.0)
        runs += 1
    assert runs == 4
