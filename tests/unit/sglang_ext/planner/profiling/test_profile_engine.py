"""`sglang-ext profile` against a scripted instance: what it asks, what it writes, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.cli import main
from sglang_ext.costs.engine_profile import IterationCost, load_profile
from sglang_ext.costs.flow_shop import Chunk
from sglang_ext.planner.profiling.measurement import HAND_OVER_ROUNDS
from sglang_ext.planner.simulation.engines import load_engine
from support.settings import sets
from support.timed_instance import STAND_IN, TimedInstance, timed_instance

COST = IterationCost(0.02, 0.0, 4e-5, 0.0, 0.0, 2e-9, 1e-9)  # both papers' forms hold
FEW = sets("points.new_tokens=64,512", "points.cached_tokens=0,1024", "points.batch_tokens=16", "points.batch_sizes=4")
QUICK = (*FEW, *sets("points.repeats=1"))


@pytest.fixture
def instance() -> Iterator[TimedInstance]:
    with timed_instance(COST.iteration_s) as running:
        yield running


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines on standard error that are not progress."""
    return [line for line in capsys.readouterr().err.splitlines() if not line.endswith("points measured")]


def profile(instance: TimedInstance, out: Path, *options: str) -> int:
    return main(["profile", "--url", instance.url, "--out", str(out), *options])


@pytest.mark.full
def test_the_costs_of_the_instance_come_out(
    instance: TimedInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.json"
    assert profile(instance, out, *sets("output.device_name=H200")) == 0
    content = json.loads(out.read_text())
    read = load_profile(out)
    assert read.iteration is not None
    assert read.coefficients is not None
    for lengths in ([(512, 0)], [(64, 1024)], [(8, 0)] * 16, [(100, 3000)]):
        assert read.iteration.iteration_s(lengths) == pytest.approx(COST.iteration_s(lengths), rel=1e-3)
    assert read.coefficients.chunk_s(512, 3000) == pytest.approx(COST.iteration_s([(512, 3000)]), rel=1e-3)
    assert (read.model, read.device) == ("models/tiny-llama", "H200")
    assert read.gap_s == pytest.approx(0.003, rel=1e-3)
    assert read.front_end is not None
    assert read.front_end.before_s == pytest.approx(0.002, rel=1e-3)
    provenance = content["provenance"]
    assert provenance["sglang"] == "0.5.23"
    assert provenance["server_arguments"]["chunked_prefill_size"] == 512
    assert provenance["command"].startswith("sglang-ext")
    assert all(abs(error) < 1e-3 for point in content["points"] for error in point["error"].values())
    assert (tmp_path / "profile.png").stat().st_size > 1000
    assert not (tmp_path / "profile.json.partial").exists()
    table = capsys.readouterr().out
    assert "P90 of the relative error" in table
    assert len(table.splitlines()) == 5 + len(content["points"])


@pytest.mark.slow
def test_cached_prefixes_are_real_and_batches_whole(instance: TimedInstance, tmp_path: Path) -> None:
    assert profile(instance, tmp_path / "p.json", *QUICK) == 0
    runs = set(instance.measured)
    assert {((64, 0),), ((512, 0),), ((64, 1024),), ((512, 1024),), ((16, 0),) * 4} <= runs
    others = runs - {((64, 0),), ((512, 0),), ((64, 1024),), ((512, 1024),), ((16, 0),) * 4}
    assert others == {((1024, 0),)}  # the prefix itself
    assert all("bootstrap_host" not in body for body in instance.bodies)


@pytest.mark.full
def test_a_prefill_instance_alone_has_no_cached_points(
    instance: TimedInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.server_info["disaggregation_mode"] = "prefill"
    assert profile(instance, tmp_path / "p.json", *sets("points.repeats=1")) == 0
    assert "cached tokens are left out: a prefill instance needs --decode for them" in capsys.readouterr().err
    rooms = [room for body in instance.bodies for room in body["bootstrap_room"]]
    assert len(set(rooms)) == len(rooms)
    assert {host for body in instance.bodies for host in body["bootstrap_host"]} == {STAND_IN}
    assert all(cached == 0 for lengths in instance.measured for _, cached in lengths)
    assert profile(instance, tmp_path / "q.json", *QUICK) == 2
    (error,) = errors(capsys)
    assert "a prefill instance caches only what it sends to a decode instance: give --decode" in error


@pytest.mark.full
def test_with_a_decode_instance_prefixes_and_hand_overs_are_measured(instance: TimedInstance, tmp_path: Path) -> None:
    instance.server_info["disaggregation_mode"] = "prefill"
    with timed_instance(COST.iteration_s) as decode:
        decode.server_info["disaggregation_mode"] = "decode"
        assert profile(instance, tmp_path / "p.json", *QUICK, "--decode", decode.url) == 0
        pairs = [(body["bootstrap_room"], len(body["input_ids"])) for body in decode.bodies]
    real = [body for body in instance.bodies if body["bootstrap_host"] == "127.0.0.1"]
    rounds = 1 + HAND_OVER_ROUNDS
    first = 1 + 3 * rounds  # the prefix, then hand-overs
    alone, at_once = pairs[:first], pairs[first:]
    legs = [(body["bootstrap_room"], len(body["input_ids"])) for body in real]
    assert legs[:first] == alone
    assert sorted(legs[first:]) == sorted(at_once)
    assert {body["bootstrap_port"] for body in real} == {8998}
    assert [length for _, length in alone] == [1024, *[16] * rounds, *[128] * rounds, *[1024] * rounds]
    assert [length for _, length in at_once] == [16] * 16 * 6  # as many as the instance runs, and a warm-up
    content = json.loads((tmp_path / "p.json").read_text())
    assert [one["prompt_tokens"] for one in content["hand_over"]] == [16, 128, 1024]
    assert [sum(run["batches"]) for run in content["busy"]] == [16] * 5
    assert {point["cached_tokens"] for point in content["points"]} == {0, 1024}


# ---- pipelines ----

ONE_STAGE = IterationCost(0.01, 0.0, 2e-5, 0.0, 0.0, 1e-9, 5e-10)


@pytest.fixture
def pipeline() -> Iterator[TimedInstance]:
    with timed_instance(ONE_STAGE.iteration_s) as running:
        running.stages = running.server_info["pp_size"] = 3
        yield running


@pytest.mark.full
def test_what_a_stage_takes_and_a_hop(
    pipeline: TimedInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.hop_s = 0.004
    pipeline.refused_flushes = 2
    out = tmp_path / "p.json"
    points = sets("points.new_tokens=16,128,512", "points.cached_tokens=0,1024", "points.batch_sizes=1")
    assert profile(pipeline, out, *points, *sets("points.repeats=2")) == 0
    read = load_profile(out)
    assert (read.candidates, read.coefficients, read.iteration) == ((), None, None)
    (costs,) = read.pipelines
    assert (costs.stages.count, costs.stages.relative, costs.kv_tokens) == (3, (), 20_000)
    # By the pace of full chunks; of what is left of a passage hops and a share of short chunks cannot be told apart.
    assert costs.stage_s(512, 0) == pytest.approx(ONE_STAGE.iteration_s([(512, 0)]), rel=1e-3)
    for tokens in (16, 128, 512):
        passage_s = costs.stages.passage_s(Chunk(costs.stage_s(tokens, 0), tokens))
        assert passage_s == pytest.approx(3 * ONE_STAGE.iteration_s([(tokens, 0)]) + 0.008, rel=0.02)
    assert costs.stages.hop.time_s(512) == pytest.approx(0.004, rel=0.05)
    printed = capsys.readouterr().out
    assert "times are those of a passage through 3 stages. A chunk of 512 tokens passes in 69.11" in printed
    assert "results follow each other every 20.37" in printed
    assert "A hop takes" in printed
    engine = load_engine(str(out))
    assert engine.on_stages(3) == costs
    assert engine.coefficients.chunk_s(512, 0) == pytest.approx(3 * ONE_STAGE.iteration_s([(512, 0)]), rel=1e-3)


@pytest.mark.slow
def test_stages_of_unequal_speed(pipeline: TimedInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.faster = 0.75
    out = tmp_path / "p.json"
    assert profile(pipeline, out, *QUICK) == 0
    (costs,) = load_profile(out).pipelines
    assert costs.stages.relative == pytest.approx((0.75, 0.75, 1.0), rel=0.02)
    assert costs.stage_s(512, 1024) == pytest.approx(ONE_STAGE.iteration_s([(512, 1024)]), rel=0.02)
    assert "Hops cannot be derived from that." in capsys.readouterr().out


@pytest.mark.full
def test_numbers_of_stages_are_added_to_each_other(
    instance: TimedInstance, pipeline: TimedInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single, both, again, other = (tmp_path / f"{number}.json" for number in range(4))
    assert profile(instance, single, *QUICK) == 0
    assert profile(pipeline, both, *QUICK, "--add-to", str(single)) == 0
    alone, read = load_profile(single), load_profile(both)
    assert read._replace(pipelines=()) == alone
    assert [one.stages.count for one in read.pipelines] == [3]
    # In the other direction, and a number of stages that is there already.
    assert profile(instance, again, *QUICK, "--add-to", str(both)) == 0
    assert load_profile(again)._replace(front_end=None) == read._replace(front_end=None)
    assert profile(pipeline, both, *QUICK, "--add-to", str(both)) == 0
    assert load_profile(both).pipelines == read.pipelines
    assert load_engine(str(both)).on_stages(2).stages.count == 2  # reckoned
    pipeline.model_info["model_path"] = "models/another"
    capsys.readouterr()
    assert profile(pipeline, other, *QUICK, "--add-to", str(single)) == 2
    (error,) = errors(capsys)
    assert error.endswith("the profile is of model models/tiny-llama, the instance serves models/another")


@pytest.mark.slow
def test_a_pipeline_without_room_for_its_pace(
    pipeline: TimedInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.server_info["max_total_num_tokens"] = 2000
    assert profile(pipeline, tmp_path / "p.json", *QUICK) == 2
    (error,) = errors(capsys)
    assert "the time of a stage is measured with 5 prompts of a chunk each: --chunked-prefill-size of the" in error
    assert error.endswith("is 512, its KV cache holds 2000 tokens")


@pytest.mark.slow
def test_an_interrupted_measurement_goes_on(
    instance: TimedInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.json"
    instance.calls_left = 8  # all runs without cached tokens, and those of one point with them
    assert profile(instance, out, *QUICK) == 2
    assert "cannot be reached" in capsys.readouterr().err
    assert not out.exists()
    instance.calls_left = None
    instance.measured.clear()
    assert profile(instance, out, *QUICK) == 0
    assert ((64, 0),) not in instance.measured
    assert ((64, 1024),) not in instance.measured
    assert ((512, 1024),) in instance.measured
    assert len(json.loads(out.read_text())["points"]) == 5


@pytest.mark.slow
def test_another_server_does_not_go_on_with_it(
    instance: TimedInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.json"
    instance.calls_left = 6
    assert profile(instance, out, *QUICK) == 2
    instance.calls_left = None
    instance.server_info["dtype"] = "float8"
    capsys.readouterr()
    assert profile(instance, out, *QUICK) == 2
    error = capsys.readouterr().err
    assert "was measured with dtype bfloat16, the instance has float8" in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_bad_fit_is_not_written_unless_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def odd(lengths: Sequence[tuple[int, int]]) -> float:
        work_s = sum(2e-4 * new + 1e-7 * cached * cached for new, cached in lengths)
        return 0.01 + 0.05 * len(lengths) + work_s

    out = tmp_path / "p.json"
    with timed_instance(odd) as instance:
        assert profile(instance, out, *QUICK) == 1
        error = capsys.readouterr().err
        assert "bad fit of sp 1: relative error " in error
        assert "bad fit of iteration" not in error
        assert not out.exists()
        instance.measured.clear()
        assert profile(instance, out, *QUICK, *sets("output.accept_bad_fit=true")) == 0
        assert instance.measured == []  # what was measured is kept
    assert json.loads(out.read_text())["has_bad_fit"] is True
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n512,4\n")
    arguments = [
        "simulate",
        *sets(f"workload.file={lengths}", "workload.rate=1", "workload.requests=2", f"instances.engine={out}"),
    ]
    capsys.readouterr()
    for policy, is_told in (("pool", True), ("fcfs", False)):
        assert main([*arguments, *sets(f"policy.name={policy}", "instances.prefill=1")]) == 0
        assert ("fits badly" in capsys.readouterr().err) is is_told


@pytest.mark.full
def test_points_that_laps_cuts_are_left_out_or_refused(
    instance: TimedInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.has_laps = True
    instance.laps_cut_tokens = 256
    assert profile(instance, tmp_path / "p.json", *sets("points.repeats=1", "points.batch_sizes=1")) == 0
    output = capsys.readouterr().out
    assert "left out: the instance runs 512 tokens after 0 cached ones in 2 iterations" in output
    content = json.loads((tmp_path / "p.json").read_text())
    assert {point["new_tokens"] for point in content["left_out"]} == {512}
    assert profile(instance, tmp_path / "q.json", *QUICK) == 2
    (error,) = errors(capsys)
    assert "--laps-mode off leaves them whole" in error


@pytest.mark.slow
def test_a_batch_that_the_instance_splits_is_not_taken_for_one(
    instance: TimedInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.batch_limit = 2
    assert profile(instance, tmp_path / "p.json", *QUICK) == 2
    assert "4 prompts of 16 tokens do not run in one batch on this instance" in capsys.readouterr().err


@pytest.mark.slow
def test_the_key_is_sent_and_not_written(
    instance: TimedInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["profile", "--url", instance.url, "--out", str(tmp_path / "p.json"), "--api-key", "s3cret"]
    monkeypatch.setattr("sys.argv", ["sglang-ext", *arguments, *QUICK])
    assert main([*arguments, *QUICK]) == 0
    assert instance.headers["Authorization"] == "Bearer s3cret"
    text = (tmp_path / "p.json").read_text()
    assert "s3cret" not in text
    assert "--api-key ..." in json.loads(text)["provenance"]["command"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "options", "message"),
    [
        ({}, sets("points.repeats=0"), "points.repeats must be at least 1, got 0"),
        ({}, sets("points.timeout_s=0"), "points.timeout_s must be above 0, got 0"),
        ({}, ["--model", "other/llama-2"], "--model other/llama-2: the instance serves models/tiny-llama"),
        ({}, sets("points.new_tokens=513"), "chunked prefill cuts it, --chunked-prefill-size of the instance is 512"),
        ({}, sets("points.cached_tokens=4090"), "a prompt has at most 4090 tokens on this instance"),
        ({"disable_radix_cache": True}, [], "the instance has no prefix cache (--disable-radix-cache)"),
        ({"enable_metrics": False}, [], "start it with --enable-metrics"),
        ({"disaggregation_mode": "decode"}, [], "this is a decode instance"),
        ({"dp_size": 2}, [], "several data-parallel ranks"),
        ({"max_total_num_tokens": None}, [], "it does not report its max_total_num_tokens"),
        ({}, ["--decode", "http://127.0.0.1:9"], "--decode needs a prefill instance"),
        ({}, [*sets("output.plot=/nowhere/p.png"), *QUICK], "output.plot /nowhere/p.png: the folder does not exist"),
    ],
)
def test_an_error_is_one_line(
    server: dict[str, Any],
    options: list[str],
    message: str,
    instance: TimedInstance,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    instance.server_info |= server
    assert profile(instance, tmp_path / "p.json", *options) == 2
    (error,) = errors(capsys)
    assert message in error


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1", "http://127.0.0.1:1 cannot be reached: Connection refused"),
        ("localhost:30000", "localhost:30000 is not an address such as http://127.0.0.1:30000"),
        ("http://host:x", "http://host:x: the port is no number from 0 to 65535"),
    ],
)
def test_an_address_that_is_none(url: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--url", url, "--out", str(tmp_path / "p.json")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_instance_that_serves_others_is_left_alone(
    instance: TimedInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.running_requests = 3
    assert profile(instance, tmp_path / "p.json", *QUICK) == 2
    assert "serves 3 requests: profile an instance without traffic" in capsys.readouterr().err
    assert instance.bodies == []


@pytest.mark.slow
def test_a_cache_that_forgets_is_noticed(
    instance: TimedInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.keeps_prefixes = False
    assert profile(instance, tmp_path / "p.json", *QUICK) == 2
    assert "the instance found 0 tokens in its cache instead of 1024" in capsys.readouterr().err


@pytest.mark.slow
def test_a_refusal_of_the_instance_is_passed_on(
    instance: TimedInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.server_info["max_req_input_len"] = 600

    def shrink(lengths: Sequence[tuple[int, int]]) -> float:
        instance.server_info["max_req_input_len"] = 100
        return COST.iteration_s(lengths)

    instance.cost = shrink
    assert profile(instance, tmp_path / "p.json", *sets("points.batch_sizes=1", "points.cached_tokens=0")) == 2
    assert "/generate answered 400: the prompt is longer than the model's context" in capsys.readouterr().err


@pytest.mark.slow
def test_the_simulator_takes_the_profile(
    instance: TimedInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.json"
    assert profile(instance, out, *QUICK) == 0
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n512,4\n")
    figures = tmp_path / "figures.json"
    arguments = [
        "simulate",
        *sets(f"workload.file={lengths}", "workload.rate=0.01", "workload.requests=5", "instances.prefill=1"),
    ]
    arguments += [*sets("policy.name=fcfs", f"instances.engine={out}"), "--json", str(figures)]
    assert main([*arguments, *sets("instances.model=elsewhere/tiny-llama")]) == 0
    (run,) = json.loads(figures.read_text())["runs"]
    read = load_profile(out)
    assert read.front_end is not None
    iteration_s = COST.iteration_s([(512, 0)]) + read.gap_s
    returned = read.front_end._replace(after_s=max(0.0, read.front_end.after_s - read.gap_s))
    expected_s = read.front_end.entry_delay_s(512) + iteration_s + returned.return_delay_s(512)
    assert run["ttft"]["all"]["p50_s"] == pytest.approx(expected_s, rel=1e-2)
    capsys.readouterr()
    assert main([*arguments, *sets("instances.model=llama-70b")]) == 2
    error = capsys.readouterr().err
    assert f"instances.engine: {out} is of model models/tiny-llama, not of llama-70b" in error
    assert error.count("\n") == 1
