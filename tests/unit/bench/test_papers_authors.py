"""The closed loop in which the runs of LAPS's authors are predicted, by hand and by what holds in every closed loop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))

from sglang_ext.planner.simulation.host_times import H200_HOST, NO_HOST
from support.papers_authors import (
    LEVELS,
    MODELS,
    OPEN_PROMPTS,
    PROMPTS,
    TIMES,
    Figures,
    Prompts,
    Times,
    compare_schedulers,
    device_s,
    errors,
    fit,
    iteration_s,
    laps_policy,
    pauses,
    predict,
    read_prompts,
    read_rows,
    serve,
)

SMALL, LARGE = MODELS["Qwen2.5-32B"], MODELS["Qwen2.5-72B-Instruct"]
HEADER = (
    "folder,model,tp,setting,concurrency,request_rate,requests_per_s,"
    "ttft_median_ms,ttft_mean_ms,ttft_p90_ms,ttft_p99_ms\n"
)
NOTHING = Times(NO_HOST, pause_s=1.0, computed_share=0.1)


def test_one_client_waits_for_every_part_of_the_way() -> None:
    figures = serve(SMALL, TIMES, [50] * 10, 1, is_cached=False, is_eager=True)
    host = H200_HOST
    kv_bytes = 50 * 2 * 2 * 64 * 8 * 128
    whole_s = host.front_s + host.way_s + iteration_s(SMALL, host, 50, 1, is_eager=True)
    whole_s += host.transfer_s_per_byte * kv_bytes + device_s(SMALL, 1) + host.reply_s
    assert figures == pytest.approx((1 / whole_s, *[whole_s] * 4))


def test_a_pause_is_of_the_first_iteration_alone() -> None:
    calm, paused = (
        serve(SMALL, NOTHING, [10] * 4, 4, is_cached=True, is_eager=False, pauses=pauses) for pauses in (False, True)
    )
    # The first request is an iteration by itself, and the other three of the first wave wait for it.
    first_s, others_s = (iteration_s(SMALL, NO_HOST, number, number, is_eager=False) for number in (1, 3))
    assert calm.p99_s == pytest.approx(first_s + others_s + device_s(SMALL, 3))
    assert paused.p99_s == pytest.approx(1.0 + calm.p99_s)
    assert 4 / paused.per_s == pytest.approx(1.0 + 4 / calm.per_s)


def test_the_front_takes_requests_and_replies_one_at_a_time() -> None:
    times = NOTHING._replace(host=NO_HOST._replace(front_s=0.7, reply_s=0.3))
    figures = serve(SMALL, times, [10] * 50, 25, is_cached=True, is_eager=False)
    assert figures.per_s == pytest.approx(1.0, rel=0.05)
    # All at once: the replies leave after all requests have come.
    at_once = serve(SMALL, times, [10] * 50, [0.0] * 50, is_cached=True, is_eager=False)
    assert at_once.median_s == pytest.approx(50 * 0.7 + 25 * 0.3, rel=0.02)


def test_requests_that_come_slowly_wait_for_nobody() -> None:
    alone = serve(SMALL, TIMES, [50], 1, is_cached=False, is_eager=False)
    slow = serve(SMALL, TIMES, [50] * 20, [float(place) for place in range(20)], is_cached=False, is_eager=False)
    assert slow.median_s == pytest.approx(alone.median_s)
    assert slow.p99_s == pytest.approx(alone.median_s)


def test_a_result_without_a_graph_waits_until_the_next_iteration_is_launched() -> None:
    slow = NOTHING._replace(host=NO_HOST._replace(launch_s=1.0))
    # The second request arrives while the first is computed, for 64 s, and both leave after 128 s.
    figures = serve(SMALL, slow, [10] * 2, [0.0, 1.0], is_cached=True, is_eager=True)
    assert figures.p99_s == pytest.approx(128.0, abs=0.1)
    assert figures.mean_s == pytest.approx(127.5, abs=0.1)
    assert serve(SMALL, slow, [10], 1, is_cached=True, is_eager=True).mean_s == pytest.approx(64.0, abs=0.1)


def test_what_an_iteration_takes() -> None:
    computing_s = iteration_s(SMALL, NO_HOST, 64, 8, is_eager=False)
    assert iteration_s(SMALL, NO_HOST, 64, 8, is_eager=True) == computing_s == device_s(SMALL, 64)
    slow = NO_HOST._replace(launch_s=1e-3, launch_tp_s=2e-3, request_s=1e-4, eager_s=1e-2, replayed_s=2e-2)
    assert iteration_s(SMALL, slow, 64, 8, is_eager=True) == pytest.approx(64e-3 + 1e-2 + 8e-4)
    assert iteration_s(LARGE, slow, 64, 8, is_eager=True) == pytest.approx(160e-3 + 1e-2 + 8e-4)
    assert iteration_s(SMALL, slow, 64, 8, is_eager=False) == pytest.approx(computing_s + 2e-2 + 8e-4)


@given(st.integers(1, 40), st.booleans(), st.integers(0, 300), st.booleans())
def test_clients_wait_for_their_number_over_the_throughput(
    clients: int, is_eager: bool, more: int, is_ours: bool
) -> None:
    """Little's law: in a closed loop without pauses the mean wait is N over the throughput, but for both ends."""
    requests = 20 * clients + more
    policy = laps_policy(SMALL, H200_HOST) if is_ours else None
    figures = serve(SMALL, TIMES, [100] * requests, clients, is_cached=True, is_eager=is_eager, policy=policy)
    busy_share = 1 - 2 * clients / requests
    assert figures.mean_s * figures.per_s <= clients * (1 + 1e-9)
    assert figures.mean_s * figures.per_s >= busy_share * clients
    assert figures.median_s <= figures.p90_s <= figures.p99_s


@pytest.mark.slow
def test_schedulers_are_compared_in_the_same_loop() -> None:
    found = compare_schedulers(TIMES, [100, 200, 50, 20] * 40)
    table = {tuple(row[:3]): row[3:] for row in cast(list[list[object]], found["schedulers"])}
    assert len(table) == 2 * 3 * len(LEVELS)
    # Who is alone is served alike in any order.
    assert table["Qwen2.5-32B", "laps", 1] == pytest.approx(table["Qwen2.5-32B", "replayed", 1], rel=0.01)
    ours, best = table["Qwen2.5-32B", "laps", 128], table["Qwen2.5-32B", "replayed", 128]
    assert found["ttft_p99_over_best_128_Qwen2.5-32B"] == pytest.approx(ours[4] / best[4], abs=5e-3)  # type: ignore[operator]


def test_rows_and_prompts_are_read(tmp_path: Path) -> None:
    line = "{},Qwen2.5-32B,1,laps,{},{},400,250,260,370,480\n"
    runs = [("a", 128, ""), ("b", 128, ""), ("a", "", "inf"), ("a", "", 100), ("a", 1, "")]
    (tmp_path / "rows.csv").write_text(HEADER + "".join(line.format(*run) for run in runs))
    first, at_once, slow, last = read_rows(tmp_path / "rows.csv")  # a run that two folders have counts once
    assert [row.load for row in (first, at_once, slow, last)] == [128, "at once", "100 per s", 1]
    assert first.figures == Figures(400, 0.25, 0.26, 0.37, 0.48)
    assert not first.is_fitted
    assert not first.is_eager
    fitted = first._replace(setting="no_cuda_graph", clients=16)
    assert (fitted.is_fitted, fitted.is_eager) == (True, True)
    assert not fitted._replace(clients=8).is_fitted
    assert not fitted._replace(setting="piecewise").is_fitted
    (tmp_path / "prompts.csv").write_text("chars,tokens_estimated\n" + "400,100\n" * (OPEN_PROMPTS + 10))
    assert read_prompts(tmp_path / "prompts.csv") == ([102] * PROMPTS, [113] * OPEN_PROMPTS)


def test_a_pause_is_found_in_the_duration_and_the_p90(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(HEADER + "a,Qwen2.5-32B,1,laps,64,,1,1,1,1,1\n")
    prompts = Prompts([100] * PROMPTS, [])
    (row,) = read_rows(tmp_path / "rows.csv")
    ((*key, longer_s, p90_s),) = pauses([row._replace(figures=predict(row, TIMES, prompts))], TIMES, prompts)
    assert key == ["Qwen2.5-32B", "laps", 64]
    assert longer_s == pytest.approx(TIMES.pause_s, abs=0.05)
    assert p90_s == pytest.approx(TIMES.pause_s, abs=0.1)


@pytest.mark.slow
def test_a_fit_finds_what_made_the_rows(tmp_path: Path) -> None:
    text = HEADER
    text += "".join(f"a,Qwen2.5-32B,1,batch_prefill,{clients},,1,1,1,1,1\n" for clients in (4, 16))
    (tmp_path / "rows.csv").write_text(text)
    prompts = Prompts([100] * 60, [100] * 60)
    rows = [row._replace(figures=predict(row, TIMES, prompts)) for row in read_rows(tmp_path / "rows.csv")]
    found = fit(TIMES.with_constant("way_s", 3 * H200_HOST.way_s), rows, prompts)
    for row in rows:
        assert max(errors(row.figures, predict(row, found, prompts))) < 0.03
