"""The comparison of schedulers: who is late, which chunk size is a policy's best, and how sure its ratios are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))

from support.idle_ttft import IdleTtft
from support.mixed_load import Arrival, Outcome
from support.policy_comparison import (
    FAILED_S,
    Figures,
    MachineSpeed,
    Round,
    Run,
    figures,
    headline,
    intervals,
    order_chunk_sizes,
)

IDLE = IdleTtft([(10, 0.01), (1000, 0.5)])  # objectives: 0.4 s and 2.5 s


def run(shorts: list[float | None], longs: list[float | None], slowdown: float = 1.0) -> Run:
    """One request a second of the machine's time."""
    given = [(False, 10, ttft_s) for ttft_s in shorts] + [(True, 1000, ttft_s) for ttft_s in longs]
    return Run(
        [
            Outcome(Arrival(number * slowdown, is_long, tokens), ttft_s, ttft_s)
            for number, (is_long, tokens, ttft_s) in enumerate(given)
        ],
        slowdown,
    )


def test_figures_of_several_runs() -> None:
    row = figures([run([0.1, 0.2], [3.0]), run([0.5], [1.0, 2.0])], IDLE)
    assert (row.requests, row.failed) == (6, 0)
    assert (row.short_p50_s, row.short_p90_s, row.long_p90_s) == (0.2, 0.5, 3.0)
    assert row.violation_share == pytest.approx(2 / 6)  # 0.5 s and 3.0 s
    assert row.requests_per_s == pytest.approx(6 / (5.0 + 4.0))


def test_a_slower_machine_is_no_slower_policy() -> None:
    fast, slow = run([0.1, 0.2], [1.0]), run([0.2, 0.4], [2.0], slowdown=2.0)
    assert figures([slow], IDLE) == figures([fast], IDLE)


def test_a_failed_request_is_late_and_slow() -> None:
    row = figures([run([0.1, None], [1.0])], IDLE)
    assert row.failed == 1
    assert row.violation_share == pytest.approx(1 / 3)
    assert row.short_p99_s == FAILED_S
    assert row.requests_per_s < 3 / FAILED_S


def tried(late: float, long_p90_s: float) -> Figures:
    return Figures(100, 0, 0.1, 0.2, 0.3, 1.0, long_p90_s, 9.0, 5.0, late)


def test_the_best_chunk_size() -> None:
    sizes = {256: tried(0.30, 1.0), 512: tried(0.101, 5.0), 1024: tried(0.104, 4.0), 2048: tried(0.12, 1.0)}
    assert order_chunk_sizes(sizes) == [1024, 512, 2048, 256]


def rounds(count: int = 4) -> list[Round]:
    return [
        Round(
            {
                "ours": run([0.1, 0.1], [2.0 + number / 10]),
                "fcfs": run([0.6, 0.6], [2.2]),
                "other": run([0.3, 0.3], [2.0]),
            },
            {"ours": 10.0 + number, "fcfs": 10.0, "other": 11.0},
        )
        for number in range(count)
    ]


def test_the_best_peer_is_looked_for_in_each_figure() -> None:
    found = headline(rounds(), "ours", ("fcfs", "other"), IDLE)
    assert found.short_p90_gain_over_fcfs == pytest.approx(6.0)
    assert found.short_p90_gain_over_best == pytest.approx(3.0)
    assert found.long_p90_over_fcfs == pytest.approx(2.3 / 2.2)
    assert found.long_p90_over_best == pytest.approx(2.3 / 2.0)
    assert found.capacity_over_best == pytest.approx(11.5 / 11.0)


def test_intervals_hold_the_figure_and_are_wider_for_what_varies() -> None:
    def measure(some: object) -> object:
        return headline(some, "ours", ("fcfs", "other"), IDLE)  # type: ignore[arg-type]

    found = intervals(rounds(), measure)  # type: ignore[arg-type]
    assert found == intervals(rounds(), measure)  # type: ignore[arg-type]
    assert found["short_p90_gain_over_best"] == pytest.approx((3.0, 3.0))
    low, high = found["capacity_over_best"]
    assert 10.0 / 11.0 <= low < 11.5 / 11.0 < high <= 13.0 / 11.0


def test_the_speed_follows_jumps_and_not_noise() -> None:
    speed = MachineSpeed(10.0)
    assert speed.observe(10.0) == 1.0
    assert speed.observe(10.4) == pytest.approx(10.0 / 10.2)
    assert speed.observe(9.6) == 1.0
    assert [speed.observe(11.0) for _ in range(4)][-1] == pytest.approx(10.0 / 11.0)  # the median of five
    assert speed.observe(7.0) == pytest.approx(10.0 / 7.0)  # another machine
    assert speed.observe(7.2) == pytest.approx(10.0 / 7.1)
