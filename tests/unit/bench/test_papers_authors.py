"""The closed loop in which the runs of LAPS's authors are predicted, by hand and by what holds in every closed loop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))

from support.papers_authors import (
    HOST,
    LEVELS,
    MODELS,
    PROMPTS,
    Figures,
    HostTimes,
    closed_loop,
    compare_schedulers,
    errors,
    fit,
    iteration_s,
    laps_policy,
    predict,
    read_prompts,
    read_rows,
)

SMALL, LARGE = MODELS["Qwen2.5-32B"], MODELS["Qwen2.5-72B-Instruct"]
HEADER = (
    "folder,model,tp,setting,concurrency,request_rate,requests_per_s,"
    "ttft_median_ms,ttft_mean_ms,ttft_p90_ms,ttft_p99_ms\n"
)
NOTHING = HostTimes(*(0.0 for _ in HostTimes._fields))


def test_one_client_waits_for_every_part_of_the_way() -> None:
    figures = closed_loop(SMALL, HOST, [50] * 10, 1, is_eager=True, pause_s=0.0)
    whole_s = HOST.front_s + HOST.there_s + iteration_s(SMALL, HOST, 50, 1, is_eager=True) + HOST.back_s + HOST.reply_s
    assert figures == pytest.approx((1 / whole_s, *[whole_s] * 4))


def test_a_pause_is_of_the_first_iteration_alone() -> None:
    calm, paused = (closed_loop(SMALL, NOTHING, [1] * 4, 4, is_eager=False, pause_s=pause_s) for pause_s in (0.0, 1.0))
    # The first request is an iteration by itself, and the other three of the first wave wait for it.
    first_s, others_s = (iteration_s(SMALL, NOTHING, number, number, is_eager=False) for number in (1, 3))
    assert calm.p99_s == pytest.approx(first_s + others_s)
    assert paused.p99_s == pytest.approx(1.0 + first_s + others_s)
    assert 4 / paused.per_s == pytest.approx(1.0 + 4 / calm.per_s)


def test_the_front_takes_one_request_at_a_time() -> None:
    host = NOTHING._replace(front_s=1.0)
    figures = closed_loop(SMALL, host, [1] * 50, 25, is_eager=False, pause_s=0.0)
    assert figures.per_s == pytest.approx(1.0, rel=0.05)


def test_what_an_iteration_takes() -> None:
    device_s = iteration_s(SMALL, NOTHING, 64, 8, is_eager=False)
    assert iteration_s(SMALL, NOTHING, 64, 8, is_eager=True) == device_s
    slow = NOTHING._replace(launch_s=1e-3, launch_tp_s=2e-3, request_s=1e-4, request_tp_s=2e-4, eager_s=1e-2)
    assert iteration_s(SMALL, slow, 64, 8, is_eager=True) == pytest.approx(64e-3 + 1e-2 + 8e-4)
    assert iteration_s(LARGE, slow, 64, 8, is_eager=True) == pytest.approx(160e-3 + 1e-2 + 16e-4)
    assert iteration_s(SMALL, slow, 64, 8, is_eager=False) == pytest.approx(device_s + 8e-4)


@given(st.integers(1, 40), st.booleans(), st.integers(0, 300), st.booleans())
def test_clients_wait_for_their_number_over_the_throughput(
    clients: int, is_eager: bool, more: int, is_ours: bool
) -> None:
    """Little's law: in a closed loop without pauses the mean wait is N over the throughput, but for both ends."""
    requests = 20 * clients + more
    policy = laps_policy(SMALL, HOST) if is_ours else None
    figures = closed_loop(SMALL, HOST, [20] * requests, clients, is_eager=is_eager, pause_s=0.0, policy=policy)
    busy_share = 1 - 2 * clients / requests
    assert figures.mean_s * figures.per_s <= clients * (1 + 1e-9)
    assert figures.mean_s * figures.per_s >= busy_share * clients
    assert figures.median_s <= figures.p90_s <= figures.p99_s


def test_schedulers_are_compared_in_the_same_loop() -> None:
    found = compare_schedulers(HOST, [100, 200, 50, 20] * 40)
    table = {tuple(row[:3]): row[3:] for row in cast(list[list[object]], found["schedulers"])}
    assert len(table) == 2 * 3 * len(LEVELS)
    # Who is alone is served alike in any order.
    assert table["Qwen2.5-32B", "laps", 1] == pytest.approx(table["Qwen2.5-32B", "replayed", 1], rel=0.01)
    ours, best = table["Qwen2.5-32B", "laps", 128], table["Qwen2.5-32B", "replayed", 128]
    assert found["ttft_p99_over_best_128_Qwen2.5-32B"] == pytest.approx(ours[4] / best[4], abs=5e-3)  # type: ignore[operator]


def test_rows_and_prompts_are_read(tmp_path: Path) -> None:
    line = "{},Qwen2.5-32B,1,laps,{},,400,250,260,370,480\n"
    (tmp_path / "rows.csv").write_text(
        HEADER + line.format("a", 128) + line.format("b", 128) + line.format("a", "") + line.format("a", 1)
    )
    first, second = read_rows(tmp_path / "rows.csv")  # a run that two folders have counts once
    assert (first.clients, second.clients) == (128, 1)
    assert first.figures == Figures(400, 0.25, 0.26, 0.37, 0.48)
    assert not first.is_fitted
    assert not first.is_eager
    (tmp_path / "prompts.csv").write_text("chars,tokens_estimated\n" + "400,100\n" * (PROMPTS + 10))
    assert read_prompts(tmp_path / "prompts.csv") == [102] * PROMPTS


def test_a_fit_finds_what_made_the_rows(tmp_path: Path) -> None:
    text = HEADER
    text += "".join(f"a,Qwen2.5-32B,1,batch_prefill,{clients},,1,1,1,1,1\n" for clients in (4, 16))
    (tmp_path / "rows.csv").write_text(text)
    prompts = [100] * 60
    rows = [row._replace(figures=predict(row, HOST, prompts)) for row in read_rows(tmp_path / "rows.csv")]
    found = fit(HOST._replace(there_s=2 * HOST.there_s), rows, prompts)
    for row in rows:
        assert max(errors(row.figures, predict(row, found, prompts))) < 0.03
