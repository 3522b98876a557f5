"""One simulation from a workload to its outcome: a prefill stage, and decode instances behind it if there are any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sglang_ext.policy.pools.instance_pressure import PressureSettings
from sglang_ext.policy.routing.decode_choice import decode_policy
from sglang_ext.simulation.cluster import Failure
from sglang_ext.simulation.decode import DecodePool, DecodeSpec, Finished
from sglang_ext.simulation.event_loop import EventLoop
from sglang_ext.simulation.instances import InstancePool
from sglang_ext.simulation.metrics import Collector
from sglang_ext.simulation.pool_controller import PoolController, PoolSizes
from sglang_ext.simulation.records import BusyInterval, PrefillListener, ServedPrefill, SimRequest, feed

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


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What is simulated around the prefill stage."""

    seed: int = 0
    warm_up_requests: int = 0  # the first ones, which are served and not counted
    decode: DecodeSpec | None = None
    decode_policy: str = "freeness"
    failures: tuple[Failure, ...] = ()
    pressure: PressureSettings | None = None  # the controller that moves instances between pools
    until_s: float = float("inf")


@dataclass(slots=True)
class Outcome:
    """What happened to all requests after the warm-up."""

    served: list[ServedPrefill]
    refused: list[SimRequest]
    unfinished: list[SimRequest]  # arrived, without a first token
    finished: list[Finished]  # with their last token; empty without decode instances
    decode_refused: list[SimRequest]
    end_s: float
    events: int
    timeline: list[BusyInterval] = field(default_factory=list)
    pool_sizes: list[PoolSizes] = field(default_factory=list)


def simulate(
    requests: Sequence[SimRequest],
    build_stage: StageBuilder,
    options: RunOptions = RunOptions(),
    on_progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Serve the requests, sorted by arrival, to the end or until `until_s`.

    `on_progress` gets the number of arrivals so far. ValueError for failures or pool moves that the stage has not.
    """
    loop = EventLoop()
    collector = Collector(options.warm_up_requests)
    decode = None
    if options.decode is not None:
        decode = DecodePool(loop, options.decode, decode_policy(options.decode_policy), options.seed)
    stage = build_stage(loop, _Both(collector, decode))
    for failure in options.failures:
        _failing(stage).schedule_failure(failure)
    controller = None
    if options.pressure is not None:
        if not isinstance(stage, InstancePool):
            raise ValueError("pool moves need instances of short and long pools")
        controller = PoolController(loop, stage, options.pressure)
    feed(loop, _reporting(requests, on_progress), stage)
    loop.run(options.until_s)
    counted = options.warm_up_requests
    return Outcome(
        collector.served,
        collector.refused,
        [request for request in stage.unfinished() if request.key >= counted],
        [one for one in decode.finished if one.request.key >= counted] if decode else [],
        [one for one in decode.refused if one.key >= counted] if decode else [],
        loop.now_s,
        loop.events,
        stage.timeline,
        controller.sizes if controller else [],
    )


class _Both:
    """Tells the collector and the decode instances."""

    def __init__(self, collector: Collector, decode: DecodePool | None) -> None:
        self._collector = collector
        self._decode = decode

    def on_first_token(self, served: ServedPrefill) -> None:
        self._collector.on_first_token(served)
        if self._decode is not None:
            self._decode.on_first_token(served)

    def on_refused(self, request: SimRequest) -> None:
        self._collector.on_refused(request)


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
