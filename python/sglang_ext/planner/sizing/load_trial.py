"""One layout of pools under a load: simulated, and judged by the objectives.

Every prompt has the same objective in every layout, with any boundary: its first token is due after
`short_ttft_s`, or after `long_stretch` times what it takes on an idle instance of `reference`, if that is more. The
prompts of the first kind are short, those of the second long. The first token counts when decode has the prompt's KV,
as a client sees it then.

A trial ends as soon as more requests are late than the objectives allow over the whole trace: what cannot hold any more
is not simulated to its end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from sglang_ext.costs.engine_profile import FrontEnd, PipelineCosts
from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits, LapsMode
from sglang_ext.long_pool.decide.sp_cost import SpCandidate
from sglang_ext.planner.simulation.cluster_spec import ClusterSpec
from sglang_ext.planner.simulation.decode import DecodePool, DecodeSpec, FinishedRequest
from sglang_ext.planner.simulation.engines import SimEngine
from sglang_ext.planner.simulation.events import EventLoop, ServedPrefill, SimRequest, feed
from sglang_ext.planner.simulation.instances import InstancePool, InstancesSpec, router_policy
from sglang_ext.planner.simulation.iteration_policies import LapsPolicy
from sglang_ext.planner.simulation.long_pool import LongPool, LongPoolOptions
from sglang_ext.planner.simulation.one_pool import OnePool
from sglang_ext.planner.simulation.pool_instances import OnePoolOptions
from sglang_ext.planner.simulation.run import RecordedStage
from sglang_ext.planner.simulation.scenario import SplitStage
from sglang_ext.types import Role
from sglang_ext_router.decide.decode_choice import decode_policy
from sglang_ext_router.decide.instance_pressure import quantile

ROUTER, DECODE_ROUTER = "predicted_wait", "freeness"  # the router's own defaults
MOST_BATCH_REQUESTS = 64
_NO_FRONT_END = FrontEnd(0.0, 0.0, 0.0, 0.0)


class ClusterLayout(NamedTuple):
    """Instances of each pool. GPUs are what it costs."""

    boundary_tokens: int  # most new tokens of a prompt that the router sends to the short pool
    tp: int  # of a prefill instance
    decode_tp: int
    short: int
    long: int
    both: int  # that serve all lengths; then there is no short and no long pool
    decode: int
    long_pp: int = 1  # stages of an instance that serves long prompts, or all
    is_ring: bool = False  # instances of the long pool, or of the only one, share long prompts

    @property
    def gpus(self) -> int:
        prefill = self.short + self.long_pp * (self.long + self.both)
        return self.tp * prefill + self.decode_tp * self.decode

    def pp(self, role: Role) -> int:
        """Stages of an instance."""
        return self.long_pp if role in (Role.LONG, Role.BOTH) else 1

    def pools(self) -> tuple[tuple[Role, int], ...]:
        """The pools that it has, prefill first, with their instances."""
        sizes = ((Role.SHORT, self.short), (Role.LONG, self.long), (Role.BOTH, self.both), (Role.DECODE, self.decode))
        return tuple((role, count) for role, count in sizes if count)

    def describe(self) -> str:
        pools = " + ".join(self._describe(role, count) for role, count in self.pools())
        return f"{pools}, boundary {self.boundary_tokens}, TP {self.tp}"

    def _describe(self, role: Role, count: int) -> str:
        shape = f" of PP {self.pp(role)}" if self.pp(role) > 1 else ""
        return f"{count} {role}{' (ring)' if self.shares(role) else shape}"

    def shares(self, role: Role) -> bool:
        """Return whether instances of this role share long prompts."""
        return self.is_ring and role in (Role.LONG, Role.BOTH)


class ServiceObjective(StrEnum):
    """Describes what can be missed."""

    SHORT_TTFT = "short"
    LONG_TTFT = "long"
    TIME_PER_TOKEN = "time per token"


@dataclass(frozen=True, slots=True)
class SloTargets:
    """The objectives. ValueError, in one line that names the option, for a value that makes no sense."""

    short_ttft_s: float
    long_stretch: float
    time_per_token_s: float
    attainment: float = 0.99  # share of the requests of each kind that must meet theirs

    def __post_init__(self) -> None:
        for setting, value in (
            ("objectives.short_ms", self.short_ttft_s),
            ("objectives.token_ms", self.time_per_token_s),
        ):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{setting} must be above 0, got {1e3 * value:g}")
        if not (math.isfinite(self.long_stretch) and self.long_stretch >= 1):
            raise ValueError(f"objectives.long_stretch must be at least 1, got {self.long_stretch:g}")
        if not 0 < self.attainment <= 1:
            raise ValueError(f"objectives.attainment must be above 0 and at most 1, got {self.attainment:g}")


class SizedEngine(NamedTuple):
    """A prefill instance of one TP."""

    costs: SimEngine
    kv_tokens: int
    chunk_tokens: int
    pipelines: tuple[PipelineCosts, ...] = ()  # instances of several stages
    ring: tuple[SpCandidate, ...] = ()  # how many of one stage may share a prompt; empty: none do

    def pipeline(self, stages: int) -> PipelineCosts | None:
        """An instance of this many stages. KeyError for a number that there is not; None for one."""
        if stages == 1:
            return None
        for pipeline in self.pipelines:
            if pipeline.stages.count == stages:
                return pipeline._replace(kv_tokens=pipeline.kv_tokens or stages * self.kv_tokens)
        raise KeyError(stages)

    def alone_s(self, prompt_tokens: int) -> float:
        """Time to first token of a prompt on an idle instance, nothing cached."""
        front_end = self.costs.front_end or _NO_FRONT_END
        total_s = front_end.entry_delay_s(prompt_tokens) + front_end.return_delay_s(prompt_tokens)
        return total_s + self.compute_s(prompt_tokens)

    def compute_s(self, prompt_tokens: int, stages: int = 1) -> float:
        """Time of its iterations, on the slowest stage."""
        total_s = 0.0
        pipeline = self.pipeline(stages)
        for done in range(0, prompt_tokens, self.chunk_tokens):
            chunk = min(self.chunk_tokens, prompt_tokens - done)
            if pipeline is not None:
                total_s += pipeline.stage_s(chunk, done)
            elif self.costs.iteration is not None:
                total_s += self.costs.iteration.iteration_s([(chunk, done)])
            else:
                total_s += self.costs.coefficients.chunk_s(chunk, done)
        return total_s


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """Describes what is the same in all trials. ValueError for a prompt that no instance can hold."""

    requests: tuple[SimRequest, ...]  # by arrival
    engines: Mapping[int, SizedEngine]  # by TP
    decode: DecodeSpec  # of one instance
    targets: SloTargets
    reference: SizedEngine | None = None  # whose idle instance the objectives go by; None: that of the smallest TP

    def __post_init__(self) -> None:
        longest = max(self.requests, key=lambda request: request.prompt_tokens)
        for tp, engine in self.engines.items():
            if longest.prompt_tokens > engine.kv_tokens:
                raise ValueError(
                    f"instances.kv_tokens: a prompt of {longest.prompt_tokens} tokens does not fit into the "
                    f"{engine.kv_tokens} of an instance (TP {tp})"
                )
        largest = max(self.requests, key=lambda request: request.prompt_tokens + request.output_tokens)
        tokens = largest.prompt_tokens + largest.output_tokens
        if tokens > self.decode.kv_tokens:
            raise ValueError(
                f"decode.kv_tokens: a request of {tokens} tokens does not fit into the {self.decode.kv_tokens} of an "
                "instance"
            )

    def deadlines_s(self) -> list[tuple[float, ServiceObjective]]:
        """Return for each request when its first token is due after its arrival, and which objective that is."""
        engine, targets = self.reference or self.engines[min(self.engines)], self.targets
        by_tokens: dict[int, tuple[float, ServiceObjective]] = {}
        for request in self.requests:
            if request.prompt_tokens not in by_tokens:
                stretched_s = targets.long_stretch * engine.alone_s(request.prompt_tokens)
                is_long = stretched_s > targets.short_ttft_s
                by_tokens[request.prompt_tokens] = (
                    (stretched_s, ServiceObjective.LONG_TTFT)
                    if is_long
                    else (targets.short_ttft_s, ServiceObjective.SHORT_TTFT)
                )
        return [by_tokens[request.prompt_tokens] for request in self.requests]


class LoadTrial(NamedTuple):
    """A layout under this many times the trace's load."""

    layout: ClusterLayout
    load: float
    is_complete: bool = False  # simulated to the end though it does not hold


class Breach(NamedTuple):
    """Describes what did not hold: an objective, and the pool in which most of its late requests were late."""

    objective: ServiceObjective
    pool: Role

    def describe(self) -> str:
        if self.objective is ServiceObjective.TIME_PER_TOKEN:
            return f"time per token, in the {self.pool} pool"
        return f"{self.objective} prompts, in the {self.pool} pool"


class ObjectiveFigures(NamedTuple):
    """One objective in a trial that was simulated to its end. Times of requests that have their first token."""

    requests: int
    late: int
    p50_s: float
    p90_s: float
    p99_s: float


class LoadVerdict(NamedTuple):
    """Describes whether the objectives hold; what did not, else or as the first thing; figures of a trial that ran to
    its end."""

    holds: bool
    breach: Breach | None
    figures: Mapping[ServiceObjective, ObjectiveFigures]


def run_load_trial(setup: TrialSetup, trial: LoadTrial) -> LoadVerdict:
    """Simulate a trial. Deterministic."""
    layout, targets = trial.layout, setup.targets
    engine = setup.engines[layout.tp]
    loop = EventLoop()
    meter = _Meter(loop, setup, trial)
    decode = DecodePool(
        loop,
        _with_instances(setup.decode, layout.decode),
        decode_policy(DECODE_ROUTER),
        0,
        meter.on_finished,
    )
    meter.decode = decode
    feed(loop, meter.queued_requests(), _prefill_stage(loop, layout, engine, targets, meter))
    loop.run()
    return meter.verdict()


def _prefill_stage(
    loop: EventLoop, layout: ClusterLayout, engine: SizedEngine, targets: SloTargets, meter: _Meter
) -> RecordedStage:
    roles = tuple(role for role, count in layout.pools() for _ in range(count) if role.is_prefill)
    pipelines = {role: costs for role in set(roles) if (costs := engine.pipeline(layout.pp(role))) is not None}

    def policy(role: Role) -> LapsPolicy:
        costs = pipelines.get(role)
        limits = InstanceLimits(
            1, engine.chunk_tokens, engine.chunk_tokens, MOST_BATCH_REQUESTS, stages=layout.pp(role)
        )
        options = LapsOptions(
            mode=LapsMode(role.value),
            boundary_tokens=layout.boundary_tokens,
            short_ttft_slo_ms=1e3 * targets.short_ttft_s,
            long_slo_stretch=targets.long_stretch,
        )
        prior = engine.costs.coefficients if costs is None else costs.coefficients
        return LapsPolicy(Laps(options, GraphGrid(), prior, limits))

    def instances(roles: tuple[Role, ...], policy: Callable[[Role], LapsPolicy]) -> InstancePool:
        spec = InstancesSpec(
            roles,
            engine.costs.coefficients,
            engine.kv_tokens,
            layout.boundary_tokens,
            engine.costs.iteration,
            pipelines,
        )
        return InstancePool(loop, spec, router_policy(ROUTER), policy, meter, 0, False)

    if not layout.is_ring:
        return instances(roles, policy)
    ring = [candidate for candidate in engine.ring if candidate.size <= max(layout.long, layout.both)]
    if layout.both:
        spec = InstancesSpec(
            roles, engine.costs.coefficients, engine.kv_tokens, layout.boundary_tokens, engine.costs.iteration
        )
        one_pool = OnePoolOptions(targets.short_ttft_s, targets.long_stretch, targets.short_ttft_s)
        return OnePool(loop, spec, ring, policy, one_pool, meter, False)
    # An instance that serves both serves everything the router sends: only short prompts get there.
    short = instances((Role.BOTH,) * layout.short, lambda _: policy(Role.SHORT))
    long = LongPool(
        loop,
        ClusterSpec(layout.long, kv_tokens=engine.kv_tokens),
        ring,
        LongPoolOptions(targets.short_ttft_s, targets.long_stretch),
        meter,
        False,
    )
    return SplitStage(layout.boundary_tokens, short, long, layout.short)


def _with_instances(spec: DecodeSpec, instances: int) -> DecodeSpec:
    return DecodeSpec(
        instances,
        spec.kv_tokens,
        spec.base_s,
        spec.per_request_s,
        spec.kv_bytes_per_token,
        spec.bandwidth_bytes_per_s,
        spec.backends,
    )


class _Meter:
    """A PrefillListener that counts what is late, and stops the loop when that is too much."""

    def __init__(self, loop: EventLoop, setup: TrialSetup, trial: LoadTrial) -> None:
        self.decode: DecodePool | None = None
        self._loop = loop
        self._setup = setup
        self._trial = trial
        self._front_end = setup.engines[trial.layout.tp].costs.front_end or _NO_FRONT_END
        self._deadlines_s = setup.deadlines_s()
        self._sent_s = [request.arrival_s / trial.load for request in setup.requests]
        self._requests = Counter(objective for _, objective in self._deadlines_s)
        self._requests[ServiceObjective.TIME_PER_TOKEN] = len(setup.requests)
        # The tolerance is for shares such as 0.9, of which 1 - 0.9 is a little less than a tenth.
        self._allowed = {
            objective: math.floor((1.0 - setup.targets.attainment) * count + 1e-9)
            for objective, count in self._requests.items()
        }
        self._late: Counter[Breach] = Counter()
        self._roles: dict[int, Role] = {}  # of the instance that prefilled a request
        self._is_late = bytearray(len(setup.requests))
        self._late_of: Counter[ServiceObjective] = Counter()
        self._times_s: dict[ServiceObjective, list[float]] = {objective: [] for objective in ServiceObjective}
        self._breach: Breach | None = None
        self._finished = 0

    def queued_requests(self) -> Sequence[SimRequest]:
        """Return the requests as they reach the scheduler's queue, at this load."""
        queued = [
            request._replace(key=key, arrival_s=sent_s + self._front_end.entry_delay_s(request.prompt_tokens))
            for key, (request, sent_s) in enumerate(zip(self._setup.requests, self._sent_s, strict=True))
        ]
        return sorted(queued, key=lambda request: request.arrival_s)

    def on_first_token(self, served: ServedPrefill) -> None:
        request = served.request
        deadline_s, objective = self._deadlines_s[request.key]
        ended_s = served.first_token_s + self._front_end.return_delay_s(request.prompt_tokens)
        layout = self._trial.layout
        role = served.role or (Role.BOTH if layout.both else Role.LONG)
        if layout.is_ring and layout.short and role is Role.BOTH:
            role = Role.SHORT
        self._roles[request.key] = role
        if ended_s - self._sent_s[request.key] > deadline_s:
            self._is_late[request.key] = 1
            self._count(objective, role)
        assert self.decode is not None
        self.decode.on_first_token(served)

    def on_refused(self, request: SimRequest) -> None:
        raise AssertionError(f"request {request.key} fits into no instance")  # TrialSetup has looked at it

    def on_finished(self, finished: FinishedRequest) -> None:
        request = finished.request
        self._finished += 1
        deadline_s, objective = self._deadlines_s[request.key]
        delay_s = self._front_end.return_delay_s(request.prompt_tokens)
        ttft_s = finished.transferred_s + delay_s - self._sent_s[request.key]
        self._times_s[objective].append(ttft_s)
        if ttft_s > deadline_s and not self._is_late[request.key]:
            self._count(objective, self._late_in(finished))
        per_token_s = (finished.finished_s - finished.transferred_s) / max(1, request.output_tokens - 1)
        self._times_s[ServiceObjective.TIME_PER_TOKEN].append(per_token_s)
        if per_token_s > self._setup.targets.time_per_token_s:
            self._count(ServiceObjective.TIME_PER_TOKEN, Role.DECODE)

    def _late_in(self, finished: FinishedRequest) -> Role:
        """Return where a request lost more time that was only late with its KV in decode: waiting there, or in
        prefill."""
        request = finished.request
        computed_s = self._setup.engines[self._trial.layout.tp].compute_s(request.new_tokens)
        in_prefill_s = finished.first_token_s - request.arrival_s - computed_s
        in_decode_s = finished.transferred_s - finished.first_token_s
        return Role.DECODE if in_decode_s > in_prefill_s else self._roles[request.key]

    def _count(self, objective: ServiceObjective, pool: Role) -> None:
        self._late[Breach(objective, pool)] += 1
        self._late_of[objective] += 1
        if self._breach is None and self._late_of[objective] > self._allowed[objective]:
            counts = [(count, breach) for breach, count in self._late.items() if breach.objective is objective]
            self._breach = max(counts, key=lambda request: request[0])[1]
            if not self._trial.is_complete:
                self._loop.stop()

    def verdict(self) -> LoadVerdict:
        if self._breach is not None and not self._trial.is_complete:
            return LoadVerdict(False, self._breach, {})
        if self._finished < len(self._setup.requests):
            missing = len(self._setup.requests) - self._finished
            raise AssertionError(f"{missing} requests of {self._trial.layout} never ended")
        figures = {
            objective: ObjectiveFigures(
                len(times_s), self._late_of[objective], *(quantile(times_s, share) for share in (0.5, 0.9, 0.99))
            )
            for objective, times_s in self._times_s.items()
            if times_s
        }
        return LoadVerdict(self._breach is None, self._breach, figures)
