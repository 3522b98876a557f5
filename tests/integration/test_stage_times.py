"""What the stages of a real pipeline say of themselves: busy time and bubbles, as metrics, over HTTP, as a picture."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.live.timeline import Activity, draw_timeline, read_stages_of, timeline_of_stages
from support.engines import FLEET, Engine
from support.laps import Pair
from support.pipeline import DECODE, SHAPE, STAGES

pytestmark = pytest.mark.integration

_SAMPLE = re.compile(r'sglang_ext:stage_(\w+)\{pp_rank="(\d)"\} (\S+)')
PUBLISHED_WITHIN_S = 60.0
CLOCKS_S = 0.002  # what the stages' clocks may differ by, and times are rounded by


@pytest.fixture
def pair() -> Iterator[Pair]:
    prefill, decode = FLEET.get(STAGES, DECODE)
    with ThreadPoolExecutor(8) as threads:
        yield Pair(prefill, decode, threads, SHAPE)
        prefill.wait_idle()


def metrics_of(engine: Engine) -> dict[tuple[str, int], float]:
    """The stages' metrics by name and stage."""
    text = engine.get("/metrics").body
    return {(name, int(stage)): float(value) for name, stage, value in _SAMPLE.findall(text)}


def stages_of(engine: Engine) -> list[dict[str, Any]]:
    reply = engine.get("/laps/stages")
    assert reply.status == 200, reply.body
    stages: list[dict[str, Any]] = reply.body["stages"]
    return stages


def rounds_since(engine: Engine, since_s: float, tokens: int) -> list[list[dict[str, Any]]]:
    """Each stage's rounds since then, once all have computed so many tokens."""
    deadline = time.monotonic() + PUBLISHED_WITHIN_S
    while True:
        rounds = [[one for one in stage["rounds"] if one["start_s"] >= since_s] for stage in stages_of(engine)]
        if all(sum(one["new_tokens"] for one in stage) >= tokens for stage in rounds):
            return rounds
        assert time.monotonic() < deadline, rounds
        time.sleep(0.05)


def settled_metrics(engine: Engine, since_busy_s: list[float]) -> dict[tuple[str, int], float]:
    """The metrics once nothing is under way and both stages have counted what they have computed."""
    deadline = time.monotonic() + PUBLISHED_WITHIN_S
    while True:
        found = metrics_of(engine)
        stages = stages_of(engine)
        if all(
            found["rounds_under_way", one["pp_rank"]] == one["rounds_under_way"] == 0
            and one["busy_s"] > before
            and found["busy_seconds_total", one["pp_rank"]] == pytest.approx(one["busy_s"])
            and found["bubble_seconds_total", one["pp_rank"]] == pytest.approx(one["bubble_s"])
            for one, before in zip(stages, since_busy_s, strict=True)
        ):
            return found
        assert time.monotonic() < deadline, (found, stages)
        time.sleep(0.05)


def counted(pair: Pair, seed: int) -> tuple[dict[tuple[str, int], float], list[float]]:
    """Both stages' metrics when they have computed something and have nothing to do, and their busy times."""
    since_s = time.time()
    assert pair.send(20, seed=seed).is_exact()
    pair.prefill.wait_idle()
    rounds_since(pair.prefill, since_s, 20)
    found = settled_metrics(pair.prefill, [0.0, 0.0])
    return found, [found["busy_seconds_total", stage] for stage in (0, 1)]


@pytest.mark.full
def test_a_short_prompt_alone_leaves_each_stage_a_bubble(pair: Pair) -> None:
    """While one of the two computes it the other one cannot."""
    before, busy_s = counted(pair, seed=3000)
    since_s = time.time()
    assert pair.send(24, seed=3001).is_exact()
    first, second = rounds_since(pair.prefill, since_s, 24)
    after = settled_metrics(pair.prefill, busy_s)
    assert (len(first), len(second)) == (1, 1)
    assert first[0]["end_s"] <= second[0]["start_s"] + CLOCKS_S
    bubble_s = [after["bubble_seconds_total", stage] - before["bubble_seconds_total", stage] for stage in (0, 1)]
    assert bubble_s[1] >= first[0]["end_s"] - first[0]["start_s"] - CLOCKS_S
    assert bubble_s[0] >= second[0]["end_s"] - second[0]["start_s"] - CLOCKS_S


@pytest.mark.full
def test_busy_time_and_bubbles_add_up_to_the_time_with_work(pair: Pair) -> None:
    """The same for both stages, and as long as the rounds say."""
    before, busy_s = counted(pair, seed=3009)
    since_s = time.time()
    longs = [pair.send(1500 + number, seed=3010 + number) for number in range(2)]
    assert all(one.is_exact() for one in longs)
    first, second = rounds_since(pair.prefill, since_s, 3001)
    after = settled_metrics(pair.prefill, busy_s)
    work_s = [
        sum(after[name, stage] - before[name, stage] for name in ("busy_seconds_total", "bubble_seconds_total"))
        for stage in (0, 1)
    ]
    assert work_s[0] == pytest.approx(work_s[1], abs=CLOCKS_S)
    for stage, rounds in enumerate((first, second)):
        computed_s = sum(one["end_s"] - one["start_s"] for one in rounds)
        assert after["busy_seconds_total", stage] - before["busy_seconds_total", stage] == pytest.approx(
            computed_s, abs=CLOCKS_S
        )
        assert work_s[stage] >= computed_s - CLOCKS_S
    # Each chunk is on the second stage after it was on the first, and the stages overlap.
    assert [one["new_tokens"] for one in first] == [one["new_tokens"] for one in second]
    assert all(one["end_s"] <= other["start_s"] + CLOCKS_S for one, other in zip(first, second, strict=True))
    assert any(later["start_s"] < other["end_s"] for later, other in zip(first[1:], second, strict=False))


@pytest.mark.full
def test_a_timeline_has_a_lane_for_each_stage(pair: Pair, tmp_path: Path) -> None:
    since_s = time.time()
    assert pair.send(600, seed=3020).is_exact()
    rounds_since(pair.prefill, since_s, 600)
    address = f"127.0.0.1:{pair.prefill.port}"
    timeline = timeline_of_stages({address: read_stages_of(address)})
    assert timeline.instances == (f"{address} stage 0", f"{address} stage 1")
    shown = {(bar.instance, bar.activity) for bar in timeline.bars}
    assert shown >= {
        (lane, activity) for lane in timeline.instances for activity in (Activity.COMPUTE, Activity.BUBBLE)
    }
    draw_timeline(timeline, tmp_path / "stages.svg")
    assert (tmp_path / "stages.svg").stat().st_size > 1000


@pytest.mark.full
def test_an_instance_without_stages_has_none_to_show(pair: Pair) -> None:
    assert pair.decode.get("/laps/stages").status == 404
