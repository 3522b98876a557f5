"""Prefill instances that compute each prompt by themselves: a router in front, a policy in each, iteration by
iteration.

An iteration costs what the coefficients say of the tokens in it, padding included. KV is held from a prompt's first
chunk to its end; after that its blocks stay in the instance's prefix cache, until others that were used later fill it.
An instance may be a pipeline of stages: iterations follow each other through them, one under way for each stage at
most, as in SGLang, and what comes next is decided when the first stage is free.
The router knows all of that, and chooses the pool by the router's own rule. A prompt finds there what ended before it
arrived. A failed instance loses its cache and what it has begun; its requests are routed again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from sglang_ext.costs.engine_profile import IterationCost, PipelineCosts
from sglang_ext.costs.flow_shop import Stages
from sglang_ext.laps.decide.cost_model import CostCoefficients, IterationSample
from sglang_ext.long_pool.decide.pool_load import ROUTED_WINDOW_S, PoolLoad
from sglang_ext.planner.simulation.cluster_spec import Failure
from sglang_ext.planner.simulation.events import (
    BusyInterval,
    EventLoop,
    PrefillListener,
    ServedPrefill,
    SimRequest,
)
from sglang_ext.planner.simulation.iteration_policies import Iteration, IterationPolicy, WorkItem
from sglang_ext.planner.simulation.iterations import advance, iteration_sample
from sglang_ext.planner.simulation.prefix_caches import PrefixCaches
from sglang_ext.types import LengthClass, PrefillLoad, Role
from sglang_ext_router.decide.pool_choice import FixedBoundary, ServedClasses, choose_pool, classes_of_role
from sglang_ext_router.decide.prefill_choice import PREFILL_POLICIES, PrefillPolicy, predicted_wait_s, prefill_policy
from sglang_ext_router.decide.prefill_progress import PrefillProgress

_LONG = LengthClass.LONG
LEAST_LOADED = "least_loaded"
ROUTERS = (*PREFILL_POLICIES, LEAST_LOADED)
_RATE_PROBE_TOKENS = 8192  # the rate that a router reckons with is that of chunks of this size


class LeastLoaded:
    """Fewest pending tokens, then fewest in flight, then the first: a load balancer that knows all."""

    def choose(self, loads: Sequence[PrefillLoad], new_prompt_tokens: int, draw: float, price: float = 0.0) -> int:
        return min(range(len(loads)), key=lambda at: (loads[at].pending_tokens, loads[at].in_flight))


def router_policy(name: str) -> PrefillPolicy:
    """One of ROUTERS. ValueError that lists them."""
    if name == LEAST_LOADED:
        return LeastLoaded()
    if name not in PREFILL_POLICIES:
        raise ValueError(f"unknown router {name!r}; choose one of {', '.join(ROUTERS)}")
    return prefill_policy(name)


class _Running(NamedTuple):
    """An iteration on the first stage."""

    iteration: Iteration
    sample: IterationSample  # its duration is that on the slowest stage
    start_s: float
    end_s: float  # on the last stage
    generation: int


class _Passing(NamedTuple):
    """An iteration that has left the first of several stages, and the items that end with it."""

    running: _Running
    ended: list[WorkItem]


@dataclass(slots=True, eq=False)
class SimulatedInstance:
    """One instance's queue and what it is doing."""

    number: int
    policy: IterationPolicy
    role: Role
    costs: PipelineCosts
    max_kv_tokens: int  # that it holds
    kv_tokens: int  # free
    tokens_per_s: float  # that a router reckons with
    items: list[WorkItem] = field(default_factory=list)
    running: _Running | None = None
    passing: deque[_Passing] = field(default_factory=deque)
    stage_free_s: list[float] = field(default_factory=list)  # when each stage has done all that is under way
    computed_tokens: int = 0
    pending_tokens: int = 0
    progress: PrefillProgress = field(default_factory=PrefillProgress)  # as a router sees it
    busy_s: float = 0.0  # of iterations that have ended, on the first stage
    generation: int = 0  # a wake-up or an end of an earlier one means nothing
    is_alive: bool = True
    is_draining: bool = False  # it gets nothing new, and is gone when it has nothing left

    def unfinished(self) -> list[SimRequest]:
        """The requests that it has."""
        return [item.request for item in (*self.items, *(ended for passing in self.passing for ended in passing.ended))]


@dataclass(frozen=True, slots=True)
class InstancesSpec:
    """Roles of the instances, one each. ValueError for none, or a role that does not prefill."""

    roles: tuple[Role, ...]
    coefficients: CostCoefficients
    kv_tokens: int = 1_000_000
    boundary_tokens: int = 256  # the router's: most new tokens of a short prompt
    iteration: IterationCost | None = None  # what an iteration takes; None: what the coefficients say
    # Of the roles whose instances have several stages: their costs in place of the above. `kv_tokens` None: the same.
    pipelines: Mapping[Role, PipelineCosts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.roles or not all(role.is_prefill for role in self.roles):
            raise ValueError("roles: one prefill role for each instance is needed, and at least one instance")
        for length_class in LengthClass:
            if not any(role.serves(length_class) for role in self.roles):
                raise ValueError(f"roles: no instance serves {length_class} prompts")

    def costs(self, role: Role) -> PipelineCosts:
        """Return what an instance of this role takes for an iteration."""
        return self.pipelines.get(role) or PipelineCosts(Stages(), self.coefficients, self.iteration)

    def max_kv_tokens(self, role: Role) -> int:
        """Return the KV tokens that an instance of this role holds."""
        return self.costs(role).kv_tokens or self.kv_tokens


class InstancePool:
    """See the module."""

    def __init__(
        self,
        loop: EventLoop,
        spec: InstancesSpec,
        router: PrefillPolicy,
        policy: Callable[[Role], IterationPolicy],
        listener: PrefillListener,
        seed: int,
        is_recorded: bool,
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._router = router
        self._policy = policy
        self._listener = listener
        self._draws = Random(f"router {seed}")
        self._boundary = FixedBoundary(spec.boundary_tokens)
        # Of pools with different room the caches have the smaller one's.
        self._caches = PrefixCaches(min(spec.max_kv_tokens(role) for role in spec.roles))
        # As the router counts what it sends to instances that serve the same classes.
        self._loads: defaultdict[ServedClasses, PoolLoad] = defaultdict(lambda: PoolLoad(ROUTED_WINDOW_S))
        self.instances: list[SimulatedInstance] = []
        for role in spec.roles:
            self._append(role)
        self._max_prompt_tokens = min(
            instance.max_kv_tokens for instance in self.instances if instance.role.serves(_LONG)
        )
        self._stranded: dict[int, SimRequest] = {}  # no instance is there for them
        self._is_recorded = is_recorded
        self.timeline: list[BusyInterval] = []

    def arrive(self, request: SimRequest) -> None:
        if request.prompt_tokens > self._max_prompt_tokens:
            self._listener.on_refused(request)
            return
        routed = self._route(request)
        if routed is None:
            self._stranded[request.key] = request
            return
        instance, cached_tokens = routed
        request = request._replace(cached_tokens=cached_tokens)
        item = WorkItem(request, request.new_tokens, request.cached_tokens, instance.computed_tokens)
        instance.items.append(item)
        if instance.pending_tokens == 0:
            instance.progress.begin(self._loop.now_s, item.new_tokens)
        instance.pending_tokens += item.new_tokens
        instance.policy.record_arrival(item, self._loop.now_s)
        if instance.running is None:
            self._next_iteration(instance)

    def schedule_failure(self, failure: Failure) -> None:
        """ValueError for an instance that does not exist."""
        if not 0 <= failure.instance < len(self.instances):
            raise ValueError(f"instance {failure.instance} does not exist, there are {len(self.instances)}")
        self._loop.schedule(failure.at_s, self._fail, failure)

    def add_instance(self, role: Role) -> SimulatedInstance:
        """One more, with an empty cache."""
        instance = self._append(role)
        self._route_stranded()
        return instance

    def _append(self, role: Role) -> SimulatedInstance:
        costs, kv_tokens = self._spec.costs(role), self._spec.max_kv_tokens(role)
        tokens_per_s = _RATE_PROBE_TOKENS / costs.coefficients.chunk_s(_RATE_PROBE_TOKENS, 0)
        instance = SimulatedInstance(
            len(self.instances), self._policy(role), role, costs, kv_tokens, kv_tokens, tokens_per_s
        )
        instance.stage_free_s = [0.0] * costs.stages.count
        self.instances.append(instance)
        self._caches.add(instance.number)
        return instance

    def drain_instance(self, instance: SimulatedInstance) -> None:
        """It finishes what it has, and is gone."""
        instance.is_draining = True
        self._end_drain(instance)

    @property
    def serving(self) -> list[SimulatedInstance]:
        """Return the instances that take requests."""
        return [instance for instance in self.instances if instance.is_alive and not instance.is_draining]

    @property
    def tokens_per_s(self) -> float:
        """The rate of an instance that the router reckons with: of the first."""
        return self.instances[0].tokens_per_s

    def unfinished(self) -> Iterable[SimRequest]:
        return [
            *(request for instance in self.instances for request in instance.unfinished()),
            *self._stranded.values(),
        ]

    def _route(self, request: SimRequest) -> tuple[SimulatedInstance, int] | None:
        """The instance and how much of the prompt it has cached; None if all are down."""
        alive = self.serving
        if not alive:
            return None
        cached_tokens = self._caches.cached_tokens(request, [instance.number for instance in alive])
        served = [classes_of_role(instance.role) for instance in alive]
        pool = choose_pool(request.prompt_tokens, served, cached_tokens, self._boundary, True)
        able = [(alive[at], cached_tokens[at]) for at in pool.candidates]
        loads = [
            PrefillLoad(
                instance.number,
                instance.pending_tokens,
                len(instance.items) + sum(len(passing.ended) for passing in instance.passing),
                cached,
                instance.tokens_per_s,
                instance.progress.computed_tokens(self._loop.now_s, instance.tokens_per_s),
            )
            for instance, cached in able
        ]
        arrived = self._loads[served[pool.candidates[0]]]
        price = 0.0
        if any(load.cached_tokens for load in loads):
            price = arrived.price(self._loop.now_s, sum(predicted_wait_s(load) for load in loads), len(loads))
        chosen = self._router.choose(loads, request.prompt_tokens, self._draws.random(), price)
        load = loads[chosen]
        new_tokens = max(1, request.prompt_tokens - load.cached_tokens)
        arrived.record_arrival(self._loop.now_s, new_tokens / load.tokens_per_s)
        return able[chosen]

    # ---- iterations ----

    def _next_iteration(self, instance: SimulatedInstance) -> None:
        """Ask the policy, unless the instance has nothing to do or as much under way as it has stages."""
        now_s = self._loop.now_s
        instance.generation += 1
        if not instance.items or len(instance.passing) >= instance.costs.stages.count:
            return
        iteration = instance.policy.choose(instance.items, instance.kv_tokens, instance.computed_tokens, now_s)
        if not iteration.slices:
            if iteration.wake_s < float("inf"):
                self._loop.schedule(iteration.wake_s, self._wake, (instance, instance.generation))
            return
        sample = iteration_sample(iteration, instance.costs)
        for item, tokens in iteration.slices:
            instance.kv_tokens -= tokens
            if item.start_s is None:
                item.start_s = now_s
        first_s, last_s = self._pass_stages(instance, sample)
        instance.running = _Running(iteration, sample, now_s, last_s, instance.generation)
        self._loop.schedule(first_s, self._end_iteration, (instance, instance.generation))

    def _pass_stages(self, instance: SimulatedInstance, sample: IterationSample) -> tuple[float, float]:
        """Return when the first stage has done an iteration that starts now, and when the last one has
        (`costs.flow_shop`)."""
        stages, free_s = instance.costs.stages, instance.stage_free_s
        handed_s, hop_s = self._loop.now_s, stages.hop.time_s(sample.new_tokens)
        for stage, share in enumerate(stages.shares):
            done_s = max(handed_s, free_s[stage]) + sample.duration_s * share
            free_s[stage], handed_s = done_s, done_s + hop_s
        return free_s[0], free_s[-1]

    def _wake(self, awaited: tuple[SimulatedInstance, int]) -> None:
        instance, generation = awaited
        if instance.generation == generation and instance.is_alive:
            self._next_iteration(instance)

    def _end_iteration(self, awaited: tuple[SimulatedInstance, int]) -> None:
        """End the iteration on the first stage, which is the last stage of most instances."""
        instance, generation = awaited
        running = instance.running
        if running is None or running.generation != generation:
            return
        now_s = self._loop.now_s
        instance.running = None
        instance.busy_s += now_s - running.start_s
        self._record(instance, running)
        # The next iteration may go on with its prompts.
        ended = advance(instance.items, running.iteration)
        if instance.costs.stages.count > 1:
            passing = _Passing(running, ended)
            instance.passing.append(passing)
            self._loop.schedule(running.end_s, self._end_passage, (instance, passing))
        else:
            self._complete(instance, running, ended)
        if instance.running is None:
            self._next_iteration(instance)
        self._end_drain(instance)

    def _end_passage(self, awaited: tuple[SimulatedInstance, _Passing]) -> None:
        """End the iteration on the last of several stages."""
        instance, passing = awaited
        if not instance.passing or instance.passing[0] is not passing:
            return  # the instance has failed meanwhile
        instance.passing.popleft()
        self._complete(instance, passing.running, passing.ended)
        if instance.running is None:
            self._next_iteration(instance)
        self._end_drain(instance)

    def _complete(self, instance: SimulatedInstance, running: _Running, ended: Sequence[WorkItem]) -> None:
        """The iteration's result is there."""
        now_s = self._loop.now_s
        for _, tokens in running.iteration.slices:
            instance.computed_tokens += tokens
            instance.pending_tokens -= tokens
        for item in ended:
            instance.kv_tokens += item.request.new_tokens
        instance.progress.begin(now_s, instance.pending_tokens)
        instance.policy.note_end(running.sample, ended, now_s)
        for item in ended:
            assert item.start_s is not None
            self._caches.record(instance.number, item.request)
            self._listener.on_first_token(ServedPrefill(item.request, item.start_s, now_s, instance.role))

    def _end_drain(self, instance: SimulatedInstance) -> None:
        if instance.is_draining and instance.is_alive and not instance.items and not instance.passing:
            instance.is_alive = False
            self._caches.remove(instance.number)

    def _record(self, instance: SimulatedInstance, running: _Running) -> None:
        if self._is_recorded:
            first, *others = (item.request.key for item, _ in running.iteration.slices)
            tokens = sum(tokens for _, tokens in running.iteration.slices)
            busy = BusyInterval(instance.number, running.start_s, self._loop.now_s, first, tuple(others), tokens)
            self.timeline.append(busy)

    # ---- failures ----

    def _fail(self, failure: Failure) -> None:
        instance = self.instances[failure.instance]
        if not instance.is_alive:
            return
        if instance.running is not None:
            self._record(instance, instance.running)
            instance.busy_s += self._loop.now_s - instance.running.start_s
        requests = instance.unfinished()
        instance.is_alive = False
        instance.running = None
        instance.items = []
        instance.passing.clear()
        instance.stage_free_s = [0.0] * instance.costs.stages.count
        instance.pending_tokens = 0
        instance.kv_tokens = instance.max_kv_tokens
        instance.generation += 1
        self._caches.remove(instance.number)
        self._caches.add(instance.number)
        self._loop.schedule(self._loop.now_s + failure.down_s, self._recover, instance)
        for request in requests:
            self.arrive(request)

    def _recover(self, instance: SimulatedInstance) -> None:
        instance.is_alive = True
        self._route_stranded()

    def _route_stranded(self) -> None:
        stranded = list(self._stranded.values())
        self._stranded.clear()
        for request in stranded:
            self.arrive(request)


class WatchedInstance(NamedTuple):
    """One instance at one time."""

    number: int
    role: Role
    is_alive: bool
    is_draining: bool
    pending_tokens: int
    queued: tuple[int, int]  # short and long prefills that it has, by the class that its own policy gives them
    kv_used: float  # share


class InstanceWatch:
    """Looks at all instances of a pool every now and then, while anything else is to happen."""

    def __init__(self, loop: EventLoop, pool: InstancePool, every_s: float) -> None:
        self._loop = loop
        self._pool = pool
        self._every_s = every_s
        self.seen: list[tuple[float, list[WatchedInstance]]] = []
        self._look(None)

    def _look(self, _: None) -> None:
        self.seen.append((self._loop.now_s, [self._watched(instance) for instance in self._pool.instances]))
        if self._loop.has_events or len(self.seen) == 1:
            self._loop.schedule_background(self._loop.now_s + self._every_s, self._look, None)

    def _watched(self, instance: SimulatedInstance) -> WatchedInstance:
        long = sum(item.length_class is _LONG for item in instance.items)
        return WatchedInstance(
            instance.number,
            instance.role,
            instance.is_alive,
            instance.is_draining,
            instance.pending_tokens,
            (len(instance.items) - long, long),
            1.0 - instance.kv_tokens / instance.max_kv_tokens,
        )
