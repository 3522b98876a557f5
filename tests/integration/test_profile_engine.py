"""`sglang-ext profile` on real instances: cached tokens are hits, batches whole, and the simulator reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from sglang_ext.cli import main
from sglang_ext.planner.profiling.http_client import InstanceError
from sglang_ext.planner.profiling.instance import HttpInstance
from sglang_ext.planner.profiling.points import Point
from sglang_ext.planner.simulation.engines import load_engine
from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.pipeline import DECODE as PIPELINE_DECODE
from support.pipeline import STOCK_STAGES
from support.settings import sets

pytestmark = pytest.mark.integration

STOCK = EngineSpec(Role.LONG, worker_options=("--laps-mode", "off"))
DECODE = EngineSpec(Role.DECODE)
# Long enough for its time to be told from that of 16 tokens on any machine.
CHUNK_TOKENS = 2048
STAGES = replace(STOCK_STAGES, arguments=("--pp-size", "2", "--chunked-prefill-size", str(CHUNK_TOKENS)))
POINTS = sets(
    "points.new_tokens=16,256", "points.cached_tokens=0,512", "points.batch_tokens=16", "points.batch_sizes=8"
)


def samples(engine: Engine, name: str) -> float:
    """The sum of a counter of SGLang's own /metrics."""
    lines = engine.get("/metrics").body.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.full
def test_a_profile_of_prefill_and_hand_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefill, decode = FLEET.get(STOCK, DECODE)
    out = tmp_path / "profile.json"
    hits = samples(prefill, "sglang:cached_tokens_total")
    arguments = ["profile", "--url", prefill.url, "--decode", decode.url, "--out", str(out), *POINTS]
    assert main([*arguments, *sets("points.repeats=2", "output.accept_bad_fit=true")]) == 0, capsys.readouterr().err
    content = json.loads(out.read_text())
    measured = {(one["cached_tokens"], one["new_tokens"], one["requests"]): one for one in content["points"]}
    assert set(measured) == {(0, 16, 1), (0, 256, 1), (512, 16, 1), (512, 256, 1), (0, 16, 8)}
    assert all(0 < one["duration_s"] < 30 for one in measured.values())
    # SGLang counted the hits too: 512 tokens for every run after a prefix.
    runs = sum(len(one["durations_s"]) for one in content["points"] if one["cached_tokens"] == 512) + 2
    assert samples(prefill, "sglang:cached_tokens_total") - hits == 512 * runs
    # A batch shares what a prompt alone pays for itself.
    assert measured[0, 16, 8]["duration_s"] < 8 * measured[0, 16, 1]["duration_s"]
    assert [one["prompt_tokens"] for one in content["hand_over"]] == [16, 128]
    front_end = content["front_end"]
    assert 0 < front_end["before_s"] + front_end["after_s"] < 5
    assert content["provenance"]["model_shape"]["num_hidden_layers"] == 2
    assert content["provenance"]["mode"] == "prefill"
    assert (tmp_path / "profile.png").stat().st_size > 1000
    engine = load_engine(str(out), model=content["model"])
    assert engine.iteration is not None
    for (cached, new, requests), one in measured.items():
        # What an instance that has more to do pays beside its iterations is part of them in a simulation.
        beside_s = content["gap_s"] + requests * content["busy_request_s"]
        assert engine.iteration.iteration_s([(new, cached)] * requests) - beside_s == pytest.approx(
            one["duration_s"] * (1 + one["error"]["iteration"]), rel=1e-6
        )
    for running in (prefill, decode):
        running.wait_idle()


def test_what_queues_behind_a_chunk_follows_it_at_once() -> None:
    prefill, decode = FLEET.get(STOCK, DECODE)
    instance = HttpInstance.connect(prefill.url, decode_url=decode.url)
    try:
        gaps_s = instance.run_queued_chunks()
        assert len(gaps_s) == 3
        assert all(gap_s < 1 for gap_s in gaps_s)
        instance.prepare(128)
        longer = Point(256, 16)
        with pytest.raises(InstanceError, match="found 128 tokens in its cache instead of 256"):
            instance.run(longer)
    finally:
        instance.close()
    prefill.wait_idle()


@pytest.mark.full
def test_what_a_stage_of_a_pipeline_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages: the file has what one takes, beside an instance of one stage, and a simulation with it adds up."""
    prefill, decode = FLEET.get(STAGES, PIPELINE_DECODE)
    out = tmp_path / "profile.json"
    points = sets(f"points.new_tokens=16,{CHUNK_TOKENS}", "points.cached_tokens=0,512", "points.batch_sizes=1")
    arguments = ["profile", "--url", prefill.url, "--decode", decode.url, "--out", str(out), *points]
    assert main([*arguments, *sets("points.repeats=2", "output.accept_bad_fit=true")]) == 0, capsys.readouterr().err
    assert f"through 2 stages. A chunk of {CHUNK_TOKENS} tokens passes in " in capsys.readouterr().out
    content = json.loads(out.read_text())
    assert "prefill" not in content
    (entry,) = content["pipelines"]
    pace = entry["pace"]
    assert (entry["stages"], pace["chunk_tokens"]) == (2, CHUNK_TOKENS)
    # Two alone, and twice three behind the first of four.
    assert (len(pace["passages_s"]), len(pace["intervals_s"])) == (2, 6)
    assert all(interval_s > 0 for interval_s in pace["intervals_s"])
    engine = load_engine(str(out), model=content["model"])
    costs = engine.on_stages(2)
    share = min(1.0, median(pace["intervals_s"]) / median(pace["passages_s"]))
    for point in entry["points"]:
        fitted_s = point["duration_s"] * (1 + point["error"]["iteration"])
        assert costs.stage_s(point["new_tokens"], point["cached_tokens"]) == pytest.approx(share * fitted_s, rel=1e-6)
    for running in (prefill, decode):
        running.wait_idle()
