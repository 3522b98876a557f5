"""Iterations as they are measured: features, durations with and without overlap, and the share of busy time."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.laps.decide.cost_model import IterationSample
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.sglang.instance import BUSY_WINDOW_S, IterationClock, with_write_cost
from sglang_ext.types import LengthClass

SHORT, LONG = LengthClass.SHORT, LengthClass.LONG


def test_features_of_a_batch() -> None:
    """The work of attention is the sum of L (L + 2 H)."""
    clock = IterationClock()
    clock.record_launch(1.0, SHORT, new_tokens=[10, 3], cached_tokens=[0, 100])
    sample = clock.record_result(1.25)
    assert sample == IterationSample(
        10 * 10 + 3 * (3 + 2 * 100), new_tokens=13, cached_tokens=100, requests=2, duration_s=0.25, is_first=True
    )


def test_an_iteration_that_overlaps_counts_from_the_end_of_the_one_before() -> None:
    clock = IterationClock()
    clock.record_launch(0.0, SHORT, [8], [0])
    clock.record_launch(0.5, SHORT, [16], [0])  # while the first one still computes
    first, second = clock.record_result(1.0), clock.record_result(3.0)
    assert (first.new_tokens, first.duration_s) == (8, 1.0)
    assert (second.new_tokens, second.duration_s) == (16, 2.0)


def test_an_iteration_of_a_pipeline_takes_what_one_stage_takes() -> None:
    """Three stages of 1 s each: the first batch passes them in 3 s, those that follow at once come 1 s apart."""
    clock = IterationClock(stages=3)
    for round_s in range(3):
        clock.record_round(float(round_s))
        clock.record_launch(float(round_s), LONG, [8], [0])
    clock.record_round(3.0)
    clock.record_idle()
    samples = [clock.record_result(3.0), clock.record_result(4.0), clock.record_result(5.0)]
    assert [(one.is_first, one.duration_s) for one in samples if one is not None] == [
        (True, 1.0),
        (False, 1.0),
        (False, 1.0),
    ]
    assert clock.utilisation(5.0) == 1.0


def test_what_a_batch_took_behind_another_one_in_a_pipeline_cannot_be_told() -> None:
    """It came into a pipeline that was neither empty nor full."""
    clock = IterationClock(stages=2)
    clock.record_round(0.0)
    clock.record_launch(0.0, LONG, [8], [0])
    clock.record_round(1.0)
    clock.record_idle()
    clock.record_round(1.5)
    clock.record_launch(1.5, SHORT, [8], [0])
    first, second = clock.record_result(2.0), clock.record_result(3.5)
    assert first is not None
    assert first.duration_s == 1.0
    assert second is None
    clock.record_idle()
    clock.record_round(4.0)
    clock.record_launch(4.0, SHORT, [8], [0])
    third = clock.record_result(6.0)
    assert third is not None
    assert third.duration_s == 1.0


def test_idle_time_between_two_iterations_belongs_to_neither() -> None:
    clock = IterationClock()
    clock.record_launch(0.0, SHORT, [8], [0])
    clock.record_result(1.0)
    clock.record_idle()
    clock.record_launch(5.0, SHORT, [8], [0])
    assert clock.record_result(5.5).duration_s == 0.5


def test_an_iteration_takes_from_the_end_of_the_one_before_while_the_instance_is_busy() -> None:
    """Intake, polls and the preparation of the batch are part of it."""
    clock = IterationClock()
    clock.record_round(0.0)
    clock.record_launch(0.1, SHORT, [8], [0])
    first = clock.record_result(1.0)
    assert (first.duration_s, first.is_first) == (1.0, True)
    clock.record_round(1.2)
    clock.record_launch(1.3, SHORT, [8], [0])
    second = clock.record_result(2.0)
    assert (second.duration_s, second.is_first) == (1.0, False)


def test_after_a_round_without_a_launch_it_takes_from_the_round_that_launches() -> None:
    clock = IterationClock()
    clock.record_launch(0.0, SHORT, [8], [0])
    clock.record_result(1.0)
    for now_s in (1.1, 3.0, 5.0):
        clock.record_round(now_s)
        clock.record_idle()
    clock.record_round(7.0)
    clock.record_launch(7.1, SHORT, [8], [0])
    sample = clock.record_result(8.0)
    assert (sample.duration_s, sample.is_first) == (1.0, True)
    assert clock.utilisation(8.0) == pytest.approx(2 / 8)


def test_a_round_that_launches_nothing_while_a_batch_runs() -> None:
    clock = IterationClock()
    clock.record_round(0.0)
    clock.record_launch(0.0, SHORT, [8], [0])
    clock.record_round(0.5)
    clock.record_idle()
    clock.record_round(0.8)
    clock.record_launch(0.8, SHORT, [16], [0])
    assert clock.record_result(1.0).duration_s == 1.0
    assert clock.record_result(2.5).duration_s == 1.5


def test_a_replayed_batch_computes_the_tokens_of_its_shape() -> None:
    clock = IterationClock()
    clock.record_launch(0.0, SHORT, [8], [0])
    clock.record_launch(0.0, SHORT, [10, 20, 25], [0, 4, 0])
    clock.record_replay(32 * 4)
    assert clock.record_result(1.0) == IterationSample(64.0, 8, 0, 1, 1.0, is_first=True)
    work = 10.0 * 10 + 20 * 28 + 25 * 25
    assert clock.record_result(2.0) == IterationSample(work, 128, 4, 3, 1.0, is_replayed=True)


def test_a_result_without_a_launch_is_an_error() -> None:
    with pytest.raises(IndexError):
        IterationClock().record_result(1.0)


def test_lengths_of_unequal_number_are_an_error() -> None:
    with pytest.raises(ValueError):
        IterationClock().record_launch(0.0, SHORT, [1, 2], [0])


def test_before_the_first_iteration_nothing_is_busy() -> None:
    assert IterationClock().utilisation(123.0) == 0.0


def test_utilisation_since_the_start() -> None:
    clock = IterationClock()
    clock.record_launch(100.0, SHORT, [8], [0])
    clock.record_result(101.0)
    assert clock.utilisation(104.0) == pytest.approx(1 / 4)


def test_utilisation_counts_the_running_iteration() -> None:
    clock = IterationClock()
    clock.record_launch(100.0, SHORT, [8], [0])
    assert clock.utilisation(103.0) == pytest.approx(1.0)
    clock.record_launch(102.0, SHORT, [8], [0])
    clock.record_result(104.0)
    # The second one runs since the end of the first, not since its launch.
    assert clock.utilisation(106.0) == pytest.approx(1.0)


def test_each_class_has_its_share() -> None:
    clock = IterationClock()
    clock.record_launch(0.0, SHORT, [8], [0])
    clock.record_result(1.0)
    clock.record_idle()
    clock.record_launch(2.0, LONG, [8], [0])
    clock.record_result(4.0)
    assert clock.utilisation(5.0, SHORT) == pytest.approx(1 / 5)
    assert clock.utilisation(5.0, LONG) == pytest.approx(2 / 5)
    assert clock.utilisation(5.0) == pytest.approx(3 / 5)
    clock.record_idle()
    clock.record_launch(5.0, LONG, [8], [0])
    # What runs counts for its own class.
    assert clock.utilisation(8.0, SHORT) == pytest.approx(1 / 8)
    assert clock.utilisation(8.0, LONG) == pytest.approx(5 / 8)
    assert clock.utilisation(BUSY_WINDOW_S + 1.5, SHORT) == 0.0


def test_utilisation_forgets_after_ten_seconds() -> None:
    clock = IterationClock()
    clock.record_launch(0.0, SHORT, [8], [0])
    clock.record_result(5.0)
    assert clock.utilisation(BUSY_WINDOW_S + 4.9) == pytest.approx(0.5)
    assert clock.utilisation(BUSY_WINDOW_S + 5.1) == 0.0


def test_utilisation_never_leaves_its_range() -> None:
    random = Random(7)
    clock = IterationClock()
    now_s = 0.0
    launched = 0
    for _ in range(2000):
        now_s += random.choice((0.0, 0.001, 0.2, 3.0))
        if launched < 2 and (launched == 0 or random.random() < 0.5):
            clock.record_launch(
                now_s, random.choice((SHORT, LONG)), [random.randrange(1, 100)], [random.randrange(100)]
            )
            launched += 1
        else:
            assert clock.record_result(now_s).duration_s >= 0
            launched -= 1
        shares = [clock.utilisation(now_s, length_class) for length_class in (SHORT, LONG, None)]
        assert all(0.0 <= share <= 1.0 for share in shares)
        assert min(1.0, shares[0] + shares[1]) == pytest.approx(shares[2])


def scheduler(page_tokens: int, page_bytes: list[int], device: str = "cpu") -> Any:
    """What SGLang's scheduler has of its KV pool."""
    pool = SimpleNamespace(get_contiguous_buf_infos=lambda: ([0] * len(page_bytes), [1 << 20], page_bytes))
    return SimpleNamespace(
        page_size=page_tokens,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(device=device)),
    )


def test_what_writing_kv_takes_is_measured() -> None:
    options = with_write_cost(LapsOptions(), scheduler(4, [512, 512, 512, 512]))
    assert options.kv_bytes_per_token == 512
    assert options.kv_bandwidth_gb_per_s is not None
    assert 0.1 < options.kv_bandwidth_gb_per_s < 10_000
    assert options.write_s == pytest.approx(512 / options.kv_bandwidth_gb_per_s / 1e9)


@pytest.mark.parametrize(
    "given", [LapsOptions(boundary_tokens=64), LapsOptions(kv_bytes_per_token=7, kv_bandwidth_gb_per_s=5.0)]
)
def test_what_is_given_is_not_measured(given: LapsOptions) -> None:
    assert with_write_cost(given, None) == given


def test_without_room_to_measure_it_is_left_open() -> None:
    assert with_write_cost(LapsOptions(), scheduler(1, [512], "no-such-device")) == LapsOptions()
