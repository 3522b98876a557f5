"""Makes workload and instances of the settings of `sglang-ext simulate`. An error is a line that names the setting."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from itertools import islice

from sglang_ext.costs.engine_profile import PipelineCosts
from sglang_ext.costs.flow_shop import Hop
from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits, LapsMode
from sglang_ext.planner.simulation.cluster_spec import ClusterSpec, Failure
from sglang_ext.planner.simulation.decode import DecodeSpec
from sglang_ext.planner.simulation.engines import SimEngine
from sglang_ext.planner.simulation.events import BusyInterval, EventLoop, PlannedChunks, PrefillListener, SimRequest
from sglang_ext.planner.simulation.instances import InstancePool, InstancesSpec, router_policy
from sglang_ext.planner.simulation.iteration_policies import ChunkedPrefill, IterationPolicy, LapsPolicy, QueueOrder
from sglang_ext.planner.simulation.long_pool import LongPool, LongPoolOptions, usable_candidates
from sglang_ext.planner.simulation.one_pool import OnePool
from sglang_ext.planner.simulation.pool_instances import OnePoolOptions
from sglang_ext.planner.simulation.run import KeepingStage, PlanningStage, RecordedStage, RunOptions, StageBuilder
from sglang_ext.planner.simulation.scaler import ScalerSettings
from sglang_ext.planner.simulation.workload import Workload, drawn_requests, scaled, session_requests
from sglang_ext.types import Role
from sglang_ext_router.decide.instance_pressure import PressureSettings

LAPS, POOL, ONE = "laps", "pool", "one"
POLICIES = (ONE, POOL, *(order.value for order in QueueOrder), LAPS)
DRAWN_REQUESTS = 2000
ACTIVATION_BYTES_PER_TOKEN = 16_384  # hidden state and residual of 4,096 values in 16 bits
HOP_MS, HOP_GB_PER_S = 2.0, 25.0  # where nothing was measured


class ScenarioError(ValueError):
    """Options that make no sense together; the text is one line for the user."""


def make_requests(workload: Workload, args: argparse.Namespace, rate_per_s: float | None) -> list[SimRequest]:
    """The requests of one run. ScenarioError names the setting."""
    _require_positive("workload.rate", rate_per_s)
    _require_positive("workload.burst_shape", args.burst_shape)
    _require_positive("workload.requests", args.requests)
    _require_positive("workload.think_s", args.think_s)
    if not workload.requests:
        if rate_per_s is None:
            raise ScenarioError("workload.rate is needed: the workload has lengths without times")
        count = args.requests or DRAWN_REQUESTS
        if workload.sessions:
            return session_requests(workload.sessions, count, rate_per_s, args.seed, args.think_s, args.burst_shape)
        return list(drawn_requests(workload.lengths, count, rate_per_s, args.seed, args.burst_shape))
    if args.burst_shape != 1.0:
        raise ScenarioError("workload.burst_shape: the workload has times of its own")
    requests = list(islice(workload.requests, args.requests))
    if rate_per_s is None:
        return requests
    try:
        return scaled(requests, rate_per_s)
    except ValueError as error:
        raise ScenarioError(f"workload.rate: {error}") from None


def stage_builder(args: argparse.Namespace, engine: SimEngine, *, is_recorded: bool) -> StageBuilder:
    """Return what builds the prefill stage. ScenarioError names the setting."""
    for name, value in (
        ("instances.prefill", args.prefill),
        ("instances.per_node", args.instances_per_node),
        ("instances.kv_tokens", args.kv_tokens),
        ("instances.chunk_tokens", args.chunk_tokens),
        ("instances.short_pp", args.short_pp),
        ("instances.long_pp", args.long_pp),
        ("policy.boundary_tokens", args.boundary_tokens),
    ):
        _require_positive(name, value)
    _require_positive("policy.chunk_s", args.chunk_s)
    _require_positive("links.kv_gb_per_s", args.kv_gb_per_s)
    if args.chunk_s is not None and args.policy not in (POOL, ONE):
        raise ScenarioError(f"policy.chunk_s needs policy.name pool or one, not {args.policy}")
    if args.policy != LAPS and args.move_pools:
        raise ScenarioError("policy.move_pools needs policy.name laps")
    short = args.short_instances
    if args.scaler and (args.policy != LAPS or not short):
        raise ScenarioError("scaler.kind needs policy.name laps and instances.short")
    if short and args.policy in {ONE, *(order.value for order in QueueOrder)}:
        raise ScenarioError(f"instances.short: policy.name {args.policy} keeps no classes apart")
    if short and not 0 < short < args.prefill:
        raise ScenarioError(f"instances.short must be at least 1 and leave one of {args.prefill}, got {short}")
    if args.long_pp > 1 and args.policy in (POOL, ONE):
        raise ScenarioError(
            f"instances.long_pp: instances that share prompts (policy.name {args.policy}) have one stage"
        )
    if short and args.policy == POOL:
        return _split_builder(args, engine, is_recorded)
    if args.short_pp > 1 and not short:
        raise ScenarioError("instances.short_pp needs instances.short")
    if args.move_pools and args.short_pp != args.long_pp:
        raise ScenarioError(
            "policy.move_pools: instances of the pools must have as many stages (instances.short_pp, instances.long_pp)"
        )
    if args.policy == POOL:
        return _pool_builder(args, engine, is_recorded)
    if args.policy == ONE:
        return _one_pool_builder(args, engine, is_recorded)
    return _instances_builder(args, engine, is_recorded)


def engine_doubts(policy: str, engine: SimEngine) -> list[str]:
    """Return warnings about a profile of which the costs that this policy is simulated with fit badly."""
    used = {POOL: ("sp ",), ONE: ("sp ", "iteration")}.get(policy, ("iteration",))
    return [
        f"the profile's {bad.form} fits badly: relative error {bad.error_p90:.0%} at one point of ten"
        for bad in engine.bad_fits
        if bad.form.startswith(used)
    ]


def run_options(args: argparse.Namespace, requests: int) -> RunOptions:
    """Return what is simulated around the prefill stage. ScenarioError names the setting."""
    if not 0 <= args.warm_up < 1:
        raise ScenarioError(f"workload.warm_up must be at least 0 and below 1, got {args.warm_up:g}")
    if args.decode < 0:
        raise ScenarioError(f"decode.instances must be at least 0, got {args.decode}")
    failures = tuple(_failure(text, args.prefill) for text in args.fail)
    if failures and args.short_instances and args.policy == POOL:
        raise ScenarioError(f"instances.fail is not simulated with instances.short and policy.name {args.policy}")
    decode = decode_spec(args, args.decode) if args.decode else None
    pressure = PressureSettings(short_slo_s=args.slo) if args.move_pools or args.scaler else None
    return RunOptions(
        args.seed,
        int(args.warm_up * requests),
        decode,
        args.decode_policy,
        failures,
        pressure,
        is_moving=args.move_pools,
        scaler=_scaler(args) if args.scaler else None,
        clients=args.concurrency,
    )


def _scaler(args: argparse.Namespace) -> ScalerSettings:
    try:
        return ScalerSettings(
            args.scaler,
            args.scaler_queue_s,
            args.scaler_utilisation,
            args.scaler_startup_s,
            args.scaler_up_stabilisation_s,
            args.scaler_stabilisation_s,
            args.scaler_max,
        )
    except ValueError as error:
        raise ScenarioError(str(error)) from None


class SplitStage:
    """Sends a prompt of at most `boundary_tokens` new tokens to `short`, a longer one to `long`.

    Instances of the short pool come first in the timeline. Neither pool helps the other out.
    """

    def __init__(self, boundary_tokens: int, short: RecordedStage, long: RecordedStage, short_instances: int) -> None:
        self._boundary_tokens = boundary_tokens
        self._short = short
        self._long = long
        self._short_instances = short_instances

    @property
    def timeline(self) -> list[BusyInterval]:
        first = self._short_instances
        shifted = (
            busy._replace(
                instance=busy.instance + first,
                group=tuple(member + first for member in busy.group),
                owner=None if busy.owner is None else busy.owner + first,
            )
            for busy in self._long.timeline
        )
        return [*self._short.timeline, *shifted]

    @property
    def plans(self) -> list[PlannedChunks]:
        """Return the plans of the long instances, the only ones that share prompts."""
        first = self._short_instances
        return [
            plan._replace(
                chunks=tuple((tokens, tuple(member + first for member in group)) for tokens, group in plan.chunks)
            )
            for plan in (self._long.plans if isinstance(self._long, PlanningStage) else ())
        ]

    def arrive(self, request: SimRequest) -> None:
        self._stage_of(request).arrive(request)

    def _stage_of(self, request: SimRequest) -> RecordedStage:
        return self._short if request.new_tokens <= self._boundary_tokens else self._long

    def unfinished(self) -> Iterable[SimRequest]:
        return [*self._short.unfinished(), *self._long.unfinished()]

    def keep_until_transferred(self) -> None:
        for stage in (self._short, self._long):
            if isinstance(stage, KeepingStage):
                stage.keep_until_transferred()

    def transferred(self, request: SimRequest) -> None:
        stage = self._stage_of(request)
        if isinstance(stage, KeepingStage):
            stage.transferred(request)


def _pool_builder(args: argparse.Namespace, engine: SimEngine, is_recorded: bool) -> StageBuilder:
    options = LongPoolOptions(args.slo, chunk_s=args.chunk_s)
    spec = ClusterSpec(args.prefill - args.short_instances, args.instances_per_node, args.kv_tokens)

    def build(loop: EventLoop, listener: PrefillListener) -> RecordedStage:
        candidates = usable_candidates(engine.candidates, spec.instances)
        return LongPool(loop, spec, candidates, options, listener, is_recorded)

    return build


def _one_pool_builder(args: argparse.Namespace, engine: SimEngine, is_recorded: bool) -> StageBuilder:
    _require_positive("decode.kv_bytes_per_token", args.kv_bytes_per_token)
    options = OnePoolOptions(
        args.slo,
        short_slo_s=args.slo,
        chunk_s=args.chunk_s,
        per_node=args.instances_per_node,
        kv_bytes_per_token=args.kv_bytes_per_token,
        link_bytes_per_s=1e9 * args.kv_gb_per_s,
    )
    roles = (Role.BOTH,) * args.prefill
    spec = InstancesSpec(roles, engine.coefficients, args.kv_tokens, args.boundary_tokens, engine.iteration)

    def build(loop: EventLoop, listener: PrefillListener) -> RecordedStage:
        candidates = usable_candidates(engine.candidates, args.prefill)
        return OnePool(loop, spec, candidates, _laps_policy(args, engine), options, listener, is_recorded)

    return build


def _instances_builder(args: argparse.Namespace, engine: SimEngine, is_recorded: bool) -> StageBuilder:
    short = args.short_instances
    if args.move_pools and not short:
        raise ScenarioError("policy.move_pools needs instances.short")
    roles = (Role.SHORT,) * short + (Role.LONG,) * (args.prefill - short) if short else (Role.BOTH,) * args.prefill
    pipelines = {role: costs for role in set(roles) if (costs := _pipeline(args, engine, role)) is not None}
    policy = _iteration_policy(args, engine)
    spec = InstancesSpec(roles, engine.coefficients, args.kv_tokens, args.boundary_tokens, engine.iteration, pipelines)

    def build(loop: EventLoop, listener: PrefillListener) -> RecordedStage:
        return InstancePool(loop, spec, router_policy(args.router), policy, listener, args.seed, is_recorded)

    return build


def _split_builder(args: argparse.Namespace, engine: SimEngine, is_recorded: bool) -> StageBuilder:
    """LAPS on instances that serve only short prompts, and the others as a cluster for long ones."""
    build_long = _pool_builder(args, engine, is_recorded)
    short = args.short_instances
    policy = _iteration_policy(args, engine)
    # An instance that serves both serves everything the router sends: only short prompts get here.
    pipeline = _pipeline(args, engine, Role.SHORT)
    spec = InstancesSpec(
        (Role.BOTH,) * short,
        engine.coefficients,
        args.kv_tokens,
        args.boundary_tokens,
        engine.iteration,
        {} if pipeline is None else {Role.BOTH: pipeline},
    )

    def build(loop: EventLoop, listener: PrefillListener) -> RecordedStage:
        router = router_policy(args.router)
        pool = InstancePool(loop, spec, router, lambda _: policy(Role.SHORT), listener, args.seed, is_recorded)
        return SplitStage(args.boundary_tokens, pool, build_long(loop, listener), short)

    return build


def _pipeline(args: argparse.Namespace, engine: SimEngine, role: Role) -> PipelineCosts | None:
    """The stages of an instance of this role; None: it has one. A stage holds the KV of its layers."""
    count = args.short_pp if role is Role.SHORT else args.long_pp
    if count == 1:
        return None
    return engine.on_stages(count, stage_hop(args, engine, count))._replace(kv_tokens=count * args.kv_tokens)


def stage_hop(args: argparse.Namespace, engine: SimEngine, stages: int) -> Hop | None:
    """Return the cost from stage to stage as the options say; None: as measured. ScenarioError names the setting."""
    _require_positive("links.hop_gb_per_s", args.hop_gb_per_s)
    _require_positive("links.activation_bytes_per_token", args.activation_bytes_per_token)
    if args.hop_ms is not None and not (math.isfinite(args.hop_ms) and args.hop_ms >= 0):
        raise ScenarioError(f"links.hop_ms must be at least 0, got {args.hop_ms:g}")
    is_measured = any(pipeline.stages.count == stages for pipeline in engine.pipelines)
    if is_measured and args.hop_ms is None and args.hop_gb_per_s is None:
        return None
    bytes_per_token = args.activation_bytes_per_token or engine.activation_bytes_per_token or ACTIVATION_BYTES_PER_TOKEN
    hop_ms = HOP_MS if args.hop_ms is None else args.hop_ms
    return Hop.over_link(bytes_per_token, 1e9 * (args.hop_gb_per_s or HOP_GB_PER_S), hop_ms / 1e3)


def _iteration_policy(args: argparse.Namespace, engine: SimEngine) -> Callable[[Role], IterationPolicy]:
    if args.policy in {order.value for order in QueueOrder}:
        return lambda _: ChunkedPrefill(QueueOrder(args.policy), args.chunk_tokens)
    return _laps_policy(args, engine)


def _laps_policy(args: argparse.Namespace, engine: SimEngine) -> Callable[[Role], LapsPolicy]:
    def policy(role: Role) -> LapsPolicy:
        laps_options = LapsOptions(
            mode=LapsMode(role.value), boundary_tokens=args.boundary_tokens, short_ttft_slo_ms=1e3 * args.slo
        )
        pipeline = _pipeline(args, engine, role)
        limits = InstanceLimits(
            page_tokens=1,
            max_chunk_tokens=args.chunk_tokens,
            max_batch_tokens=args.chunk_tokens,
            max_requests=64,
            stages=1 if pipeline is None else pipeline.stages.count,
        )
        prior = engine.coefficients if pipeline is None else pipeline.coefficients
        return LapsPolicy(Laps(laps_options, GraphGrid(), prior, limits))

    return policy


def decode_spec(args: argparse.Namespace, instances: int) -> DecodeSpec:
    """Return the decode instances that the options describe. ScenarioError names the setting."""
    for name, value in (
        ("decode.kv_tokens", args.decode_kv_tokens),
        ("decode.step_ms", args.decode_step_ms),
        ("decode.kv_bytes_per_token", args.kv_bytes_per_token),
        ("decode.transfer_gb_per_s", args.transfer_gb_per_s),
        ("decode.transfer_backends", args.transfer_backends),
    ):
        _require_positive(name, value)
    if not (math.isfinite(args.decode_step_per_request_ms) and args.decode_step_per_request_ms >= 0):
        raise ScenarioError(f"decode.step_per_request_ms must be at least 0, got {args.decode_step_per_request_ms:g}")
    return DecodeSpec(
        instances,
        args.decode_kv_tokens,
        args.decode_step_ms / 1e3,
        args.decode_step_per_request_ms / 1e3,
        args.kv_bytes_per_token,
        args.transfer_gb_per_s * 1e9,
        args.transfer_backends,
    )


def _failure(text: str, instances: int) -> Failure:
    try:
        instance, at_s, down_s = text.split(":")
        failure = Failure(int(instance), float(at_s), float(down_s))
    except ValueError:
        raise ScenarioError(f"instances.fail {text!r} is not INSTANCE:AT:FOR, such as 3:60:120") from None
    if not 0 <= failure.instance < instances:
        raise ScenarioError(f"instances.fail {text!r}: there are instances 0 to {instances - 1}")
    return failure


def _require_positive(setting: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ScenarioError(f"{setting} must be above 0, got {value:g}")
