"""Engines of a simulation: Table 1, profiles, and what a measured instance adds to an iteration and around it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_ext.costs.engine_profile import FORMAT, BadFit, FrontEnd, IterationCost
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.planner.simulation.engines import TABLE1, EngineError, load_engine
from sglang_ext.planner.simulation.events import EventLoop, PrefillListener, SimRequest
from sglang_ext.planner.simulation.instances import InstancePool, InstancesSpec, router_policy
from sglang_ext.planner.simulation.iteration_policies import ChunkedPrefill, QueueOrder
from sglang_ext.planner.simulation.run import RunOptions, simulate_for_clients
from sglang_ext.types import Role

HEAD = {"format": FORMAT, "version": 1, "model": "models/m", "device": "d"}
PREFILL = {"alpha_s": 1e-10, "token_s": 2e-5, "read_s": 0.0, "kappa_s": 0.01}
SP = [{"size": 1, "a_s": 0.03, "b_s_per_token": 5e-5, "c_s_per_token2": 2e-9, "d_s_per_token2": 1e-9}]
ITERATION = IterationCost(0.5, 0.25, 0.01, 0.0, 0.0, 0.0, 0.0)
FRONT_END = FrontEnd(0.1, 0.001, 0.2, 0.002)


def write(path: Path, **content: object) -> str:
    path.write_text(json.dumps({**HEAD, **content}), encoding="utf-8")
    return str(path)


def test_table_1() -> None:
    table1 = load_engine(TABLE1)
    assert [candidate.size for candidate in table1.candidates] == [1, 2, 4, 8, 16]
    alone = table1.candidates[0].cost
    for new, cached in ((4096, 0), (512, 30_000)):
        assert table1.coefficients.chunk_s(new, cached) == pytest.approx(alone.predict_s(cached, new))
    assert table1.iteration is None
    assert table1.front_end is None


def test_either_part_of_a_profile_gives_the_other(tmp_path: Path) -> None:
    engine = load_engine(write(tmp_path / "p.json", prefill=PREFILL))
    assert engine.name == "models/m on d"
    assert engine.candidates[0].cost.predict_s(100, 1000) == pytest.approx(engine.coefficients.chunk_s(1000, 100))
    engine = load_engine(write(tmp_path / "s.json", sp=SP))
    assert engine.coefficients == CostCoefficients(1e-9, 5e-5, 0.0, 0.03)


def test_the_gap_between_iterations_is_part_of_them(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.json",
        prefill=PREFILL,
        iteration=ITERATION._asdict(),
        gap_s=0.05,
        front_end=FRONT_END._asdict(),
    )
    engine = load_engine(path)
    assert engine.coefficients.kappa_s == pytest.approx(0.06)
    assert engine.iteration == ITERATION._replace(fixed_s=0.55)
    assert engine.front_end is not None
    assert engine.front_end.after_s == pytest.approx(0.15)


@pytest.mark.parametrize("model", ["m", "models/m", "elsewhere/m", None])
def test_the_last_part_of_a_models_name_counts(model: str | None, tmp_path: Path) -> None:
    load_engine(write(tmp_path / "p.json", prefill=PREFILL), model=model)
    load_engine(TABLE1, model="LLaMA3-8B")


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", prefill=PREFILL)
    with pytest.raises(EngineError, match=r"p\.json is of model models/m, not of n$"):
        load_engine(path, model="n")
    with pytest.raises(EngineError, match="table1 is of model LLaMA3-8B, not of m"):
        load_engine(TABLE1, model="m")


def test_a_bad_fit_is_known(tmp_path: Path) -> None:
    fit = {"sp 1": {"error_p90": 0.5}, "iteration": {"error_p90": 0.1}}
    engine = load_engine(write(tmp_path / "p.json", prefill=PREFILL, fit=fit, max_error=0.2))
    assert engine.bad_fits == (BadFit("sp 1", 0.5),)


def test_a_wrong_profile_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match='a profile has "sp", "prefill" or "pipelines"') as caught:
        load_engine(write(tmp_path / "p.json"))
    assert "\n" not in str(caught.value)
    with pytest.raises(EngineError, match=r"neither table1, .* nor a profile that can be read"):
        load_engine(str(tmp_path / "none.json"))


# ---- a measured instance in a simulation ----


def _stage(loop: EventLoop, listener: PrefillListener) -> InstancePool:
    spec = InstancesSpec((Role.BOTH,), CostCoefficients(0.0, 1.0, 0.0, 0.0), iteration=ITERATION)
    return InstancePool(
        loop, spec, router_policy("least_loaded"), lambda role: ChunkedPrefill(QueueOrder.FCFS, 100), listener, 0, True
    )


def test_an_iteration_takes_what_was_measured() -> None:
    """One request of 50 tokens: 0.5 + 0.25 + 0.5 s. Two more that arrive meanwhile share the next: 0.5 + 0.5 + 0.2."""
    requests = [SimRequest(0, 0.0, 50, 1), SimRequest(1, 0.1, 10, 1), SimRequest(2, 0.2, 10, 1)]
    outcome = simulate_for_clients(None, requests, _stage, RunOptions())
    assert [one.first_token_s for one in outcome.served] == pytest.approx([1.25, 2.45, 2.45])


def test_clients_stand_behind_the_front_end() -> None:
    """Sent at 0 and 0.14 s, the first with 0.1 + 0.05 s to the queue, the other with 0.1 + 0.001: it overtakes none."""
    requests = [SimRequest(0, 0.0, 50, 1), SimRequest(1, 0.14, 1, 1)]
    outcome = simulate_for_clients(FRONT_END, requests, _stage, RunOptions())
    first, second = outcome.served
    assert first.request == requests[0]
    assert first.start_s == pytest.approx(0.15)
    assert first.ttft_s == pytest.approx(0.15 + 1.25 + 0.2 + 0.1)
    assert second.start_s == pytest.approx(0.15 + 1.25)
    assert second.ttft_s == pytest.approx(0.15 + 1.25 + 0.76 + 0.2 + 0.002 - 0.14)


def test_clients_send_again_when_they_have_the_reply() -> None:
    requests = [SimRequest(key, 0.0, 50, 1) for key in range(3)]
    outcome = simulate_for_clients(FRONT_END, requests, _stage, RunOptions(clients=1))
    whole_s = 0.15 + 1.25 + 0.2 + 0.1
    assert [one.ttft_s for one in outcome.served] == pytest.approx([whole_s] * 3)
    assert [one.request.arrival_s for one in outcome.served] == pytest.approx([0.0, whole_s, 2 * whole_s])


def test_a_short_prompt_may_overtake_a_long_one_on_the_way_in() -> None:
    requests = [SimRequest(0, 0.0, 50, 1), SimRequest(1, 0.01, 1, 1)]
    outcome = simulate_for_clients(FRONT_END, requests, _stage, RunOptions())
    assert [one.request.key for one in outcome.served] == [1, 0]
    assert outcome.served[0].start_s == pytest.approx(0.111)
