"""Describes what a chunk costs in a simulation: the Tetris Table 1 fit, H200 operator times, or an engine profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePath
from typing import NamedTuple

from sglang_ext.costs.engine_profile import (
    BadFit,
    EngineProfile,
    FrontEnd,
    IterationCost,
    PipelineCosts,
    ProfileError,
    load_measured_server,
    load_profile,
)
from sglang_ext.costs.flow_shop import NO_HOP, Hop, Stages
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from sglang_ext.long_pool.decide.table1 import fitted_candidates
from sglang_ext.planner.simulation.host_times import NO_HOST
from sglang_ext.planner.simulation.operator_engine import BARE, EAGER, OPERATOR_MODELS, operator_model

TABLE1 = "table1"
TABLE1_MODEL, TABLE1_LAYERS = "LLaMA3-8B", 32
ENGINE_NAMES = ", ".join([TABLE1, *OPERATOR_MODELS]) + f" (these also with {EAGER} or {BARE})"


class EngineError(ValueError):
    """The engine cannot be used; the text is one line for the user."""


class SimEngine(NamedTuple):
    """Costs of one model on one device."""

    name: str
    candidates: tuple[SpCandidate, ...]  # SP sizes; at least one
    coefficients: CostCoefficients  # of a single instance
    iteration: IterationCost | None = None  # measured, more exact than the coefficients; None: what these say
    front_end: FrontEnd | None = None  # None: no time outside of iterations
    bad_fits: tuple[BadFit, ...] = ()  # forms of a profile that do not describe what was measured
    pipelines: tuple[PipelineCosts, ...] = ()  # numbers of stages that were measured
    activation_bytes_per_token: int | None = None  # that go from stage to stage; None: unknown
    layers: int | None = None  # of the model; None: unknown, any number of stages divides them

    def on_stages(self, count: int, hop: Hop | None = None) -> PipelineCosts:
        """An instance of this many stages: as measured, else each with its layers' share of one instance's iteration.

        The last stages have one layer more where the model's cannot be divided, as SGLang has it. `hop`: from stage to
        stage, where it was not measured or another one is asked for. EngineError for more stages than layers.
        """
        measured = next((pipeline for pipeline in self.pipelines if pipeline.stages.count == count), None)
        if measured is not None:
            return measured if hop is None else measured._replace(stages=replace(measured.stages, hop=hop))
        layers = self.layers or count
        if count > layers:
            raise EngineError(f"a model of {layers} layers has no {count} stages")
        fewest, longer = divmod(layers, count)
        most = fewest + (longer > 0)
        relative = (fewest / most,) * (count - longer) + (1.0,) * longer if longer else ()
        share = most / layers
        iteration = self.iteration
        if iteration is not None:
            iteration = IterationCost(*(share * value for value in iteration))
        stages = Stages(count, NO_HOP if hop is None or count == 1 else hop, relative)
        return PipelineCosts(stages, self.coefficients.times(share), iteration)


def load_engine(name: str, largest_size: int = 16, *, model: str | None = None) -> SimEngine:
    """Return `table1` (LLaMA3-8B on A100), one of OPERATOR_MODELS or the profile in the file `name`.

    The first two have the SP sizes that are powers of two up to `largest_size` (operators: 8 devices at most).

    A profile with only one of the two parts gives the other: Eq. 1 of Tetris with c = 2d is LAPS's model on SP 1. Of
    a profile of only pipelines, one instance takes what all stages of the shortest take together.
    EngineError for a file that is none, or is of another model than `model` (the last part of the names counts).
    """
    if name == TABLE1:
        _check_model(name, TABLE1_MODEL, model)
        candidates = fitted_candidates(largest_size)
        title = f"Tetris Table 1 fit, {TABLE1_MODEL} on A100"
        return SimEngine(title, candidates, _single(candidates), layers=TABLE1_LAYERS)
    operators = operator_model(name)
    if operators is not None:
        shape = operators.shape
        _check_model(name, operators.name.removesuffix(f"-tp{shape.tp}"), model)
        host = "" if operators.host == NO_HOST else " and host times"
        if operators.is_eager:
            host += " without graphs"
        return SimEngine(
            f"{operators.name} on H200, from operator times{host}",
            operators.candidates(largest_size),
            operators.coefficients(),
            front_end=operators.front_end(),
            activation_bytes_per_token=4 * shape.hidden_size,
            layers=shape.layers,
        )
    path = Path(name)
    if not path.exists():
        raise EngineError(f"{name} is neither {ENGINE_NAMES} nor a profile that can be read: No such file or directory")
    try:
        profile = load_profile(path)
        server = load_measured_server(path)
    except ProfileError as error:
        raise EngineError(str(error)) from None
    _check_model(name, profile.model, model)
    # Hidden state and residual, in 16 bits each.
    activation_bytes = None if server.hidden_size is None else 4 * server.hidden_size
    return _engine(profile)._replace(activation_bytes_per_token=activation_bytes, layers=server.layers)


def _engine(profile: EngineProfile) -> SimEngine:
    """The gap between iterations is part of each: the next one starts later, and only then is the instance free.

    So is what a request costs a busy instance; on an idle one it is part of the way to the client and back.
    """
    title = profile.model if profile.device is None else f"{profile.model} on {profile.device}"
    candidates, coefficients = profile.candidates, profile.coefficients
    pipelines = tuple(_while_busy(pipeline, profile.busy_request_s) for pipeline in profile.pipelines)
    iteration, front_end = profile.iteration, profile.front_end
    if not candidates and coefficients is None:
        shortest = profile.pipelines[0]
        total = sum(shortest.stages.shares)
        coefficients = shortest.coefficients.times(total)
        if shortest.iteration is not None:
            iteration = IterationCost(*(total * value for value in shortest.iteration))
    elif coefficients is not None:
        coefficients = coefficients._replace(kappa_s=coefficients.kappa_s + profile.gap_s)
    if not candidates:
        assert coefficients is not None
        alpha_s = coefficients.alpha_s
        candidates = (SpCandidate(1, SpCost(coefficients.kappa_s, coefficients.token_s, 2 * alpha_s, alpha_s)),)
    if iteration is not None:
        iteration = iteration._replace(
            fixed_s=iteration.fixed_s + profile.gap_s, request_s=iteration.request_s + profile.busy_request_s
        )
    if front_end is not None:
        counted_s = profile.gap_s + profile.busy_request_s
        front_end = front_end._replace(after_s=max(0.0, front_end.after_s - counted_s))
    coefficients = coefficients or _single(candidates)
    return SimEngine(title, candidates, coefficients, iteration, front_end, profile.bad_fits, pipelines)


def _while_busy(costs: PipelineCosts, busy_request_s: float) -> PipelineCosts:
    """The gap between iterations is in the times of a stage already: they are those of results behind each other."""
    if costs.iteration is None:
        return costs
    return costs._replace(iteration=costs.iteration._replace(request_s=costs.iteration.request_s + busy_request_s))


def _check_model(name: str, model: str, asked: str | None) -> None:
    if asked is not None and PurePath(asked).name != PurePath(model).name:
        raise EngineError(f"{name} is of model {model}, not of {asked}")


def _single(candidates: tuple[SpCandidate, ...]) -> CostCoefficients:
    smallest = min(candidates, key=lambda candidate: candidate.size)
    cost = smallest.cost
    assert isinstance(cost, SpCost)
    return CostCoefficients(cost.d_s_per_token2, cost.b_s_per_token, 0.0, cost.a_s)
