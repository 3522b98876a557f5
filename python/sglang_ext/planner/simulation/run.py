"""One simulation from a workload to its outcome: a prefill stage, and decode instances behind it if there are any.

What clients see is simulated, too: the way to the scheduler's queue and back takes time that a profile measured. These
delays depend only on a request's length and occupy no instance. So the requests are simulated as they reach the queue,
and the results are as the client sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol, runtime_checkable

from sglang_ext.costs.engine_profile import FrontEnd
from sglang_ext.planner.simulation.cluster_spec import Failure
from sglang_ext.planner.simulation.decode import DecodePool, DecodeSpec, FinishedRequest
from sglang_ext.planner.simulation.events import (
    BusyInterval,
    EventLoop,
    PlannedChunks,
    PrefillListener,
    ServedPrefill,
    SimRequest,
    feed,
)
from sglang_ext.planner.simulation.instances import InstancePool, InstanceWatch, WatchedInstance
from sglang_ext.planner.simulation.pool_controller import PoolSizes, SimulatedController, SimulatedMove
from sglang_ext.planner.simulation.scaler import ScalerSettings, Scaling, SimulatedScaler
from sglang_ext_router.decide.decode_choice import decode_policy
from sglang_ext_router.decide.instance_pressure import PressureSettings

PROGRESS_REQUESTS = 500  # arrivals between two reports of progress


class RecordedStage(Protocol):
    """A prefill stage that can say who was busy when."""

    @property
    def timeline(self) -> list[BusyInterval]: ...

    def arrive(self, request: SimRequest) -> None: ...

    def unfinished(self) -> Iterable[SimRequest]: ...


StageBuilder = Callable[[EventLoop, PrefillListener], RecordedStage]


class _FailingStage(Protocol):
    def schedule_failure(self, failure: Failure) -> None: ...


@runtime_checkable
class PlanningStage(Protocol):
    """A stage that can say what was planned for a prompt when."""

    @property
    def plans(self) -> list[PlannedChunks]: ...


@runtime_checkable
class GangStage(Protocol):
    """A stage whose instances wait for each other before they compute a chunk together."""

    @property
    def gang_wait_share(self) -> float:
        """Return how long they waited, as a share of the time of groups."""
        ...


@runtime_checkable
class KeepingStage(Protocol):
    """A stage whose instances can hold the KV of a prompt until decode has it."""

    def keep_until_transferred(self) -> None: ...

    def transferred(self, request: SimRequest) -> None: ...


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Describes what is simulated around the prefill stage."""

    seed: int = 0
    warm_up_requests: int = 0  # the first ones, which are served and not counted
    decode: DecodeSpec | None = None
    decode_policy: str = "freeness"
    failures: tuple[Failure, ...] = ()
    pressure: PressureSettings | None = None  # the controller of pools: what it goes by
    is_moving: bool = True  # it moves instances between pools; False: it looks, and moves none
    scaler: ScalerSettings | None = None  # next to the controller, which gives it the load
    until_s: float = float("inf")
    clients: int | None = None  # that send again as soon as they have a reply; None: requests arrive at their own times
    watch_every_s: float | None = None  # of instances that compute each prompt by themselves: what they have to do


@dataclass(slots=True)
class Outcome:
    """Describes what happened to all requests after the warm-up."""

    served: list[ServedPrefill]
    refused: list[SimRequest]
    unfinished: list[SimRequest]  # arrived, without a first token
    finished: list[FinishedRequest]  # with their last token; empty without decode instances
    decode_refused: list[SimRequest]
    end_s: float
    events: int
    timeline: list[BusyInterval] = field(default_factory=list)
    pool_sizes: list[PoolSizes] = field(default_factory=list)
    moves: list[SimulatedMove] = field(default_factory=list)
    scalings: list[Scaling] = field(default_factory=list)
    watched: list[tuple[float, list[WatchedInstance]]] = field(default_factory=list)
    plans: list[PlannedChunks] = field(default_factory=list)
    gang_wait_share: float | None = None  # of the time of groups; None: groups are not simulated as such


def simulate(
    requests: Sequence[SimRequest],
    build_stage: StageBuilder,
    options: RunOptions = RunOptions(),
    on_progress: Callable[[int], None] | None = None,
    front_end: FrontEnd | None = None,
) -> Outcome:
    """Serve the requests, sorted by arrival, to the end or until `until_s`.

    `on_progress` gets the number of arrivals so far. `front_end` is what clients that send again wait for in addition,
    before they do and until what they send arrives. ValueError for failures or pool moves that the stage has not.
    """
    loop = EventLoop()
    collector = Collector(options.warm_up_requests)
    clients: _Clients | None = None
    if options.clients is not None:
        clients = _Clients(loop, _reporting(requests, on_progress), front_end)
    decode = None
    if options.decode is not None:
        on_finished = None if clients is None else clients.on_finished
        decode = DecodePool(loop, options.decode, decode_policy(options.decode_policy), options.seed, on_finished)
    stage = build_stage(loop, _Both(collector, decode, clients))
    if decode is not None and isinstance(stage, KeepingStage):
        keeping = stage
        keeping.keep_until_transferred()
        # Not while the stage is in the midst of what it does.
        decode.on_transferred = lambda request: loop.schedule(loop.now_s, keeping.transferred, request)
    for failure in options.failures:
        _failing(stage).schedule_failure(failure)
    controller = scaler = None
    if options.pressure is not None:
        if not isinstance(stage, InstancePool):
            raise ValueError("pool moves need instances of short and long pools")
        controller = SimulatedController(loop, stage, options.pressure, is_moving=options.is_moving)
        if options.scaler is not None:
            scaler = SimulatedScaler(loop, stage, controller, options.scaler)
    watch = None
    if options.watch_every_s is not None and isinstance(stage, InstancePool):
        watch = InstanceWatch(loop, stage, options.watch_every_s)
    if clients is None:
        feed(loop, _reporting(requests, on_progress), stage)
    else:
        clients.begin(stage, options.clients or 0)
    loop.run(options.until_s)
    counted = options.warm_up_requests
    return Outcome(
        collector.served,
        collector.refused,
        [request for request in stage.unfinished() if request.key >= counted],
        [finished_request for finished_request in decode.finished if finished_request.request.key >= counted]
        if decode
        else [],
        [request for request in decode.refused if request.key >= counted] if decode else [],
        loop.now_s,
        loop.events,
        stage.timeline,
        controller.sizes if controller else [],
        controller.moves if controller else [],
        scaler.scalings if scaler else [],
        watch.seen if watch else [],
        stage.plans if isinstance(stage, PlanningStage) else [],
        stage.gang_wait_share if isinstance(stage, GangStage) else None,
    )


class _Clients:
    """Simulates clients that each send the next request as soon as they have the reply to their last one."""

    def __init__(self, loop: EventLoop, requests: Iterator[SimRequest], front_end: FrontEnd | None) -> None:
        self._loop = loop
        self._unsent = requests
        self._front_end = front_end
        self._stage: RecordedStage | None = None

    def begin(self, stage: RecordedStage, number: int) -> None:
        """Let this many send their first request now."""
        self._stage = stage
        for request in islice(self._unsent, number):
            self._send(request, self._loop.now_s)

    def on_finished(self, finished: FinishedRequest) -> None:
        """The last token has left a decode instance."""
        self.on_reply(finished.request)

    def on_reply(self, request: SimRequest) -> None:
        """The reply to a request has left the instances."""
        following = next(self._unsent, None)
        if following is not None:
            delay_s = 0.0 if self._front_end is None else self._front_end.return_delay_s(request.prompt_tokens)
            self._send(following, self._loop.now_s + delay_s)

    def _send(self, request: SimRequest, at_s: float) -> None:
        assert self._stage is not None
        delay_s = 0.0 if self._front_end is None else self._front_end.entry_delay_s(request.prompt_tokens)
        self._loop.schedule(at_s + delay_s, self._stage.arrive, request._replace(arrival_s=at_s + delay_s))


class _Both:
    """Informs the collector, the decode instances, and clients that wait for a reply."""

    def __init__(self, collector: Collector, decode: DecodePool | None, clients: _Clients | None) -> None:
        self._collector = collector
        self._decode = decode
        self._clients = clients

    def on_first_token(self, served: ServedPrefill) -> None:
        self._collector.on_first_token(served)
        if self._decode is not None:
            self._decode.on_first_token(served)
        elif self._clients is not None:
            self._clients.on_reply(served.request)

    def on_refused(self, request: SimRequest) -> None:
        self._collector.on_refused(request)
        if self._clients is not None:
            self._clients.on_reply(request)


def _failing(stage: RecordedStage) -> _FailingStage:
    schedule = getattr(stage, "schedule_failure", None)
    if schedule is None:
        raise ValueError("failures of instances are not simulated with this policy")
    return stage  # type: ignore[return-value]


def _reporting(requests: Sequence[SimRequest], on_progress: Callable[[int], None] | None) -> Iterator[SimRequest]:
    for number, request in enumerate(requests):
        if on_progress is not None and number % PROGRESS_REQUESTS == 0:
            on_progress(number)
        yield request
    if on_progress is not None:
        on_progress(len(requests))


def simulate_for_clients(
    front_end: FrontEnd | None,
    requests: Sequence[SimRequest],
    build_stage: StageBuilder,
    options: RunOptions,
    on_progress: Callable[[int], None] | None = None,
) -> Outcome:
    """`simulate` with the arrivals of requests as sent and first tokens as received; None delays nothing.

    Keys must be unique. Busy times, decode and pools stay as they are at the instances.
    """
    if front_end is None:
        return simulate(requests, build_stage, options, on_progress)
    if options.clients is None:
        requests = sorted(
            (
                request._replace(arrival_s=request.arrival_s + front_end.entry_delay_s(request.prompt_tokens))
                for request in requests
            ),
            key=lambda request: request.arrival_s,
        )
    outcome = simulate(requests, build_stage, options, on_progress, front_end)

    def as_sent(request: SimRequest) -> SimRequest:
        return request._replace(arrival_s=request.arrival_s - front_end.entry_delay_s(request.prompt_tokens))

    return replace(
        outcome,
        served=[
            prefill._replace(
                request=as_sent(prefill.request),
                first_token_s=prefill.first_token_s + front_end.return_delay_s(prefill.request.prompt_tokens),
            )
            for prefill in outcome.served
        ],
        refused=[as_sent(request) for request in outcome.refused],
        unfinished=[as_sent(request) for request in outcome.unfinished],
        finished=[
            finished_request._replace(request=as_sent(finished_request.request))
            for finished_request in outcome.finished
        ],
        decode_refused=[as_sent(request) for request in outcome.decode_refused],
    )


class Collector:
    """A PrefillListener that keeps all. The requests that arrived before `from_key` warm the system up."""

    def __init__(self, from_key: int = 0) -> None:
        self.from_key = from_key
        self.served: list[ServedPrefill] = []
        self.refused: list[SimRequest] = []

    def on_first_token(self, served: ServedPrefill) -> None:
        if served.request.key >= self.from_key:
            self.served.append(served)

    def on_refused(self, request: SimRequest) -> None:
        if request.key >= self.from_key:
            self.refused.append(request)
