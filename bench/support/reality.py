"""One workload on a real prefill instance and on the simulated one: the same policies, the profile between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from sglang_ext.cluster.process_tree import all_processes
from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits, LapsMode
from sglang_ext.planner.profiling.instance import HttpInstance
from sglang_ext.planner.profiling.points import Point
from sglang_ext.planner.simulation.engines import SimEngine, load_engine
from sglang_ext.planner.simulation.events import EventLoop, PrefillListener, SimRequest
from sglang_ext.planner.simulation.instances import LEAST_LOADED, InstancePool, InstancesSpec, router_policy
from sglang_ext.planner.simulation.iteration_policies import ChunkedPrefill, IterationPolicy, LapsPolicy, QueueOrder
from sglang_ext.planner.simulation.run import RunOptions, simulate_for_clients
from sglang_ext.types import Role
from support.engines import BenchEngine
from support.mixed_load import Arrival, Outcome, percentile

POLICIES: dict[str, tuple[str, ...]] = {  # worker options
    "fcfs": ("--laps-mode", "off"),
    "laps": ("--laps-mode", "both"),
}
_PROBE_POINTS = (Point(0, 32), Point(0, 256), Point(1024, 256))
_PROBE_RUNS = 9


class Measured(NamedTuple):
    """The measured instance: what the simulator knows of it."""

    engine: SimEngine
    chunk_tokens: int
    batch_tokens: int
    max_requests: int
    kv_tokens: int

    @classmethod
    def of(cls, profile: Path) -> Measured:
        provenance = json.loads(profile.read_text(encoding="utf-8"))["provenance"]
        arguments = provenance["server_arguments"]
        chunk_tokens = arguments["chunked_prefill_size"]
        return cls(
            load_engine(str(profile)),
            chunk_tokens,
            min(chunk_tokens, arguments["max_prefill_tokens"]),
            arguments["max_running_requests"],
            provenance["kv_tokens"],
        )


class Comparison(NamedTuple):
    """TTFT of one policy: real, simulated with the profile, simulated with the profile at the speed of the replay."""

    policy: str
    real_s: list[float]
    simulated_s: list[float]
    at_speed_s: list[float]
    slowdown: float
    waited_share: float  # of the time in which the scheduler could have computed, taken by other programs
    failed: int

    @classmethod
    def of_all(cls, rounds: Sequence[Comparison]) -> Comparison:
        """The requests of all rounds of a policy; means of what a round has once."""
        return cls(
            rounds[0].policy,
            [time_s for one in rounds for time_s in one.real_s],
            [time_s for one in rounds for time_s in one.simulated_s],
            [time_s for one in rounds for time_s in one.at_speed_s],
            mean(one.slowdown for one in rounds),
            mean(one.waited_share for one in rounds),
            sum(one.failed for one in rounds),
        )

    def ratios(self, times_s: Sequence[float]) -> dict[str, float]:
        return {
            f"p{percent}": percentile(times_s, percent / 100) / percentile(self.real_s, percent / 100)
            for percent in (50, 90)
        }

    @property
    def largest_deviation(self) -> float:
        return max(abs(ratio - 1) for ratio in self.ratios(self.simulated_s).values())

    @property
    def largest_deviation_at_speed(self) -> float:
        return max(abs(ratio - 1) for ratio in self.ratios(self.at_speed_s).values())

    def describe(self) -> str:
        def figures(times_s: Sequence[float]) -> str:
            return f"P50 {percentile(times_s, 0.5):.3f} s, P90 {percentile(times_s, 0.9):.3f} s"

        return (
            f"{self.policy:<5} real {figures(self.real_s)}; simulated {figures(self.simulated_s)}; "
            f"at the replay's speed (x{self.slowdown:.2f}) {figures(self.at_speed_s)}; others took "
            f"{self.waited_share:.0%} of the scheduler's time; {self.failed} failed"
        )

    def as_json(self) -> dict[str, object]:
        """Plain JSON values."""

        def figures(times_s: Sequence[float]) -> dict[str, float]:
            return {f"p{percent}_s": round(percentile(times_s, percent / 100), 4) for percent in (50, 90, 99)}

        return {
            "real": figures(self.real_s),
            "simulated": figures(self.simulated_s),
            "simulated_at_speed": figures(self.at_speed_s),
            "simulated_over_real": {name: round(ratio, 3) for name, ratio in self.ratios(self.simulated_s).items()},
            "at_speed_over_real": {name: round(ratio, 3) for name, ratio in self.ratios(self.at_speed_s).items()},
            "slowdown": round(self.slowdown, 3),
            "waited_share": round(self.waited_share, 3),
            "failed": self.failed,
        }


def compare(
    policy: str,
    outcomes: Sequence[Outcome],
    simulated_s: list[float],
    at_speed_s: list[float],
    slowdown: float,
    waited_share: float,
) -> Comparison:
    real_s = [outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None]
    return Comparison(policy, real_s, simulated_s, at_speed_s, slowdown, waited_share, len(outcomes) - len(real_s))


class SpeedProbe:
    """Describes how fast the machine is now, against when the probe was made: as soon as there is a profile."""

    def __init__(self, url: str, decode_url: str) -> None:
        self._url, self._decode_url = url, decode_url
        self._first_s = self._times_s()

    def slowdown(self) -> float:
        """Median of a few points' times over what they took at first."""
        return median(now_s / first_s for now_s, first_s in zip(self._times_s(), self._first_s, strict=True))

    def _times_s(self) -> list[float]:
        instance = HttpInstance.connect(self._url, decode_url=self._decode_url)
        times_s = []
        try:
            for point in _PROBE_POINTS:
                instance.prepare(point.cached_tokens)
                runs_s = [instance.run(point).duration_s for _ in range(1 + _PROBE_RUNS)][1:]
                times_s.append(median(runs_s))
        finally:
            instance.close()
        return times_s


@contextmanager
def busy_core(core: int) -> Iterator[None]:
    """Fill what no other process wants of a core."""
    program = (
        f"import os; os.sched_setaffinity(0, {{{core}}}); os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    )
    filler = subprocess.Popen([sys.executable, "-c", f"{program}\nwhile True: pass"])
    try:
        yield
    finally:
        filler.kill()
        filler.wait()


def pin_scheduler(engine: BenchEngine, cores: Collection[int]) -> None:
    """Pin the thread that computes; threads that send KV, and the other processes, stay where they are."""
    for task in _computing_threads(engine):
        os.sched_setaffinity(int(task.name), cores)


class SchedulerTime(NamedTuple):
    """Describes what the kernel says of an instance's scheduler since its start."""

    computed_s: float
    waited_s: float  # ready to compute, while others had the core

    @classmethod
    def of(cls, engine: BenchEngine) -> SchedulerTime:
        pairs = [(task / "schedstat").read_text().split() for task in _computing_threads(engine)]
        return cls(*(sum(int(pair[column]) for pair in pairs) / 1e9 for column in (0, 1)))

    def waited_share(self, since: SchedulerTime) -> float:
        """Share of the time in which it could have computed that others took."""
        computed_s, waited_s = self.computed_s - since.computed_s, self.waited_s - since.waited_s
        return waited_s / (computed_s + waited_s)


def _computing_threads(engine: BenchEngine) -> list[Path]:
    """The first thread of every scheduler: its event loop, and with --threads 1 all that torch computes."""
    return [
        Path(f"/proc/{stat.pid}/task/{stat.pid}")
        for stat in all_processes()
        if os.getsid(stat.pid) == engine.process.pid and "scheduler" in _title(stat.pid)
    ]


def offered_work_s(measured: Measured, arrivals: Sequence[Arrival]) -> float:
    """Mean time of a prompt's own iterations on an idle instance."""
    cost, chunk_tokens = measured.engine.iteration, measured.chunk_tokens
    assert cost is not None
    total_s = 0.0
    for arrival in arrivals:
        for cached in range(0, arrival.prompt_tokens, chunk_tokens):
            total_s += cost.iteration_s([(min(chunk_tokens, arrival.prompt_tokens - cached), cached)])
    return total_s / len(arrivals)


def slowed(engine: SimEngine, slowdown: float) -> SimEngine:
    """The same engine, of which everything takes `slowdown` times as long."""
    iteration, front_end = engine.iteration, engine.front_end
    assert iteration is not None
    assert front_end is not None
    return engine._replace(
        coefficients=engine.coefficients.times(slowdown),
        iteration=type(iteration)(*(slowdown * value for value in iteration)),
        front_end=type(front_end)(*(slowdown * value for value in front_end)),
    )


def simulated_ttfts_s(policy: str, measured: Measured, arrivals: Sequence[Arrival], slowdown: float) -> list[float]:
    """TTFT of every request on one simulated instance of which everything takes `slowdown` times as long."""
    slow = slowed(measured.engine, slowdown)
    requests = [SimRequest(key, arrival.at_s, arrival.prompt_tokens, 1) for key, arrival in enumerate(arrivals)]
    spec = InstancesSpec((Role.BOTH,), slow.coefficients, measured.kv_tokens, iteration=slow.iteration)

    def build(loop: EventLoop, listener: PrefillListener) -> InstancePool:
        return InstancePool(
            loop, spec, router_policy(LEAST_LOADED), lambda role: _policy(policy, slow, measured), listener, 0, False
        )

    outcome = simulate_for_clients(slow.front_end, requests, build, RunOptions())
    return [prefill.ttft_s for prefill in outcome.served]


def _policy(name: str, engine: SimEngine, measured: Measured) -> IterationPolicy:
    """As the instance sets it up."""
    if name == "fcfs":
        return ChunkedPrefill(QueueOrder.FCFS, measured.chunk_tokens)
    limits = InstanceLimits(
        page_tokens=1,
        max_chunk_tokens=measured.chunk_tokens,
        max_batch_tokens=measured.batch_tokens,
        max_requests=measured.max_requests,
    )
    return LapsPolicy(Laps(LapsOptions(mode=LapsMode.BOTH), GraphGrid(), engine.coefficients, limits))


def draw_comparisons(comparisons: Sequence[Comparison], path: Path) -> None:
    """TTFT distributions, one panel per policy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(comparisons), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(1, len(comparisons), squeeze=False)
    for axes, comparison in zip(panels[0], comparisons, strict=True):
        for name, times_s in (
            ("real", comparison.real_s),
            ("simulated", comparison.simulated_s),
            ("simulated at the replay's speed", comparison.at_speed_s),
        ):
            ordered = sorted(times_s)
            shares = [(position + 1) / len(ordered) for position in range(len(ordered))]
            axes.step(ordered, shares, where="post", label=name)
        axes.set(title=comparison.policy, xlabel="time to first token (s)", ylabel="share of requests", xscale="log")
        axes.legend(fontsize=8)
    figure.savefig(path)


def _title(process_id: int) -> str:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
