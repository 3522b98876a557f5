"""Goodput of one pool against every other system, on traces that nothing was tuned on: all simulated.

    python bench/goodput.py [--traces NAME ...] [--engines NAME ...] [--hosts none fitted] [--full] [--seeds N ...]
                            [--requests N] [--instances N] [--data FOLDER] [--out FILE.json] [--picture FILE.png]

A system is good at a load where 99% of the short prompts have their first token within 0.4 s and 95% of the long ones
within the larger of 1 s and five times what they take on an idle pool. Goodput is the highest load of a geometric
bisection to 4% at which it is good. A class with so few prompts that none may be late is not judged. A short prompt has
at most 8,192 tokens for LLaMA3-8B and 2,048 for Qwen2.5-32B.

| trace | prompts | prefixes |
|---|---|---|
| `mooncake` | Mooncake's conversations, stretched to the load; each seed takes another part | blocks of 512 |
| `azure` | Azure's conversations, likewise | none |
| `sharegpt` | turns of ShareGPT sessions, 2 s between an answer and the next turn | blocks of 64 |
| `tetris-short`, `-medium`, `-long` | lengths of these three, half of the prompts chats of LMSYS; Poisson | none |

8 H200 by operator times (32 with --full), without the host's time and with the one that was fitted to others' runs
(`planner/simulation/host_times.py`), a request's way to prefill and back included. The first tenth warms up.

| system | what it is |
|---|---|
| `one` | one pool: LAPS's batches and shared long prompts on every instance |
| `fcfs`, `hrrn`, `shortest-prefill-first` | SGLang's orders, each with its best chunk (2,048, 8,192) and router |
| `laps` | LAPS on every instance, with its best router |
| `two-pools` | LAPS in two pools that the controller moves instances between, best of two beginnings |
| `fixed-sp2`, `-sp4`, `-sp8`, `loongserve`, `tetris` | those of `baselines/systems.py`, Tetris with its better rate |
| `pool` | the long pool for all prompts, chunks without a bound or of 0.2 s |

A router or chunk is best that has the highest goodput. Then every system runs on all seeds at 0.5, 0.8 and 1.0 of the
highest goodput of a system other than `one`, or of that of `one` where no other system is good at any load (then
`goodput_over_best` is null). `..._over_best` is ours over the lowest of any other system's there.
Ablations run at the highest of these loads: `without_sharing` (each prompt on one instance), `without_prefixes`,
`without_kept_rows` (of shared prompts), `without_gathering` (of these before the next turn comes), `without_pulls` (to
one instance at all), `without_bounded_chunks`, `without_packing` (batches of one class), `moves_at_10_gb_per_s`.

The last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import NamedTuple

from baselines.laps_compositions import SEPARATE
from baselines.systems import ClusterSystem, SystemOptions, build_cluster
from sglang_ext.costs.engine_profile import IterationCost
from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Composition, Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits, LapsMode
from sglang_ext.long_pool.decide.pool_schedule import fastest_s, min_work_s
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from sglang_ext.planner.simulation.cluster_spec import ClusterSpec
from sglang_ext.planner.simulation.engines import SimEngine, load_engine
from sglang_ext.planner.simulation.events import EventLoop, PrefillListener, ServedPrefill, SimRequest, feed
from sglang_ext.planner.simulation.instances import InstancePool, InstancesSpec, router_policy
from sglang_ext.planner.simulation.iteration_policies import ChunkedPrefill, LapsPolicy, QueueOrder
from sglang_ext.planner.simulation.one_pool import OnePool
from sglang_ext.planner.simulation.operator_engine import BARE
from sglang_ext.planner.simulation.pool_controller import SimulatedController
from sglang_ext.planner.simulation.pool_instances import OnePoolOptions
from sglang_ext.planner.simulation.run import RecordedStage
from sglang_ext.planner.simulation.workload import WorkloadError, load_workload, poisson_s, scaled, session_requests
from sglang_ext.types import Role
from sglang_ext_router.decide.instance_pressure import PressureSettings
from support.mixed_load import percentile
from support.result import give_up, machine, print_result, versions

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TRACES = ("mooncake", "azure", "sharegpt", "tetris-short", "tetris-medium", "tetris-long")
SHARED_PREFIXES = ("mooncake", "sharegpt")
SHORT_TOKENS = {"h200-llama3-8b": 8192, "h200-qwen2.5-32b": 2048}
HOSTS = {"none": BARE, "fitted": ""}  # what the engine's name ends with
LOADS = (0.5, 0.8, 1.0)
SHORT_SLO_S = 0.4
LONG_SLO_S, LONG_STRETCH = 1.0, 5.0
SHARES = {True: 0.99, False: 0.95}  # on time, of the short prompts and of the long ones
CHUNK_TOKENS, KV_TOKENS = 8192, 1_000_000
THINK_S = 2.0  # between turns: with half a minute the sessions of a small run would not come back
CHAT_SHARE = 0.5
WARM_UP = 0.1
TOLERANCE = 1.04
ROUTERS = ("cache_aware", "predicted_wait", "least_loaded")
OURS = "one"
# Of a trace with many prompts a second more are needed for the same time.
REQUEST_FACTOR = {"sharegpt": 6.0, "azure": 5.0}


class Setting(NamedTuple):
    """Describes what a comparison is made on."""

    trace: str
    engine: str
    host: str  # of HOSTS
    instances: int

    def __str__(self) -> str:
        return f"{self.trace} {self.engine} host {self.host}"


class Variant(NamedTuple):
    """One way to run a system."""

    name: str
    build: Callable[[Scene, EventLoop, PrefillListener], RecordedStage]
    has_prefixes: bool = True
    has_controller: bool = False


@dataclass(frozen=True)
class Scene:
    """The engine of a setting."""

    setting: Setting
    engine: SimEngine

    @property
    def short_tokens(self) -> int:
        return SHORT_TOKENS[self.setting.engine]

    @property
    def candidates(self) -> tuple[SpCandidate, ...]:
        return self.engine.candidates

    def objective_s(self, prompt_tokens: int) -> float:
        """Return when the first token of a prompt is due."""
        if prompt_tokens <= self.short_tokens:
            return SHORT_SLO_S
        return max(LONG_SLO_S, LONG_STRETCH * fastest_s(self.candidates, 0, prompt_tokens))

    def outside_s(self, prompt_tokens: int) -> float:
        """Return how long a request is on its way to prefill and back."""
        front_end = self.engine.front_end
        if front_end is None:
            return 0.0
        return front_end.entry_delay_s(prompt_tokens) + front_end.return_delay_s(prompt_tokens)

    def laps(self, composition: Composition | None = None) -> Callable[[Role], LapsPolicy]:
        limits = InstanceLimits(
            page_tokens=1, max_chunk_tokens=CHUNK_TOKENS, max_batch_tokens=CHUNK_TOKENS, max_requests=64
        )

        def policy(role: Role) -> LapsPolicy:
            options = LapsOptions(
                mode=LapsMode(role.value), boundary_tokens=self.short_tokens, short_ttft_slo_ms=1e3 * SHORT_SLO_S
            )
            args = (options, GraphGrid(), self.engine.coefficients, limits)
            return LapsPolicy(Laps(*args) if composition is None else Laps(*args, composition))

        return policy

    def spec(self, roles: tuple[Role, ...] | None = None) -> InstancesSpec:
        roles = roles or (Role.BOTH,) * self.setting.instances
        engine = self.engine
        return InstancesSpec(roles, engine.coefficients, KV_TOKENS, self.short_tokens, engine.iteration)


def scene_of(setting: Setting) -> Scene:
    """Return the engine of a setting.

    A prompt takes as long in a batch of an instance as in a chunk on SP 1: systems are compared, and not two fits.
    """
    engine = load_engine(setting.engine + HOSTS[setting.host], min(8, setting.instances))
    alone = next(candidate.cost for candidate in engine.candidates if candidate.size == 1)
    assert isinstance(alone, SpCost)
    request_s = engine.coefficients.request_s
    iteration = IterationCost(
        fixed_s=alone.a_s - request_s,
        request_s=request_s,
        token_s=alone.b_s_per_token,
        read_s=0.0,
        cached2_s=0.0,
        cached_new_s=alone.c_s_per_token2,
        new2_s=alone.d_s_per_token2,
    )
    return Scene(setting, engine._replace(iteration=iteration))


# ---- systems ----


def _stock(order: QueueOrder, chunk_tokens: int, router: str) -> Variant:
    def build(scene: Scene, loop: EventLoop, listener: PrefillListener) -> RecordedStage:
        def policy(_: Role) -> ChunkedPrefill:
            return ChunkedPrefill(order, chunk_tokens)

        return InstancePool(loop, scene.spec(), router_policy(router), policy, listener, 0, False)

    return Variant(f"{chunk_tokens} {router}", build)


def _laps(router: str) -> Variant:
    def build(scene: Scene, loop: EventLoop, listener: PrefillListener) -> RecordedStage:
        return InstancePool(loop, scene.spec(), router_policy(router), scene.laps(), listener, 0, False)

    return Variant(router, build)


def _two_pools(short_share: float) -> Variant:
    def build(scene: Scene, loop: EventLoop, listener: PrefillListener) -> RecordedStage:
        short = round(short_share * scene.setting.instances)
        roles = (Role.SHORT,) * short + (Role.LONG,) * (scene.setting.instances - short)
        router = router_policy("predicted_wait")
        return InstancePool(loop, scene.spec(roles), router, scene.laps(), listener, 0, False)

    return Variant(f"{short_share:g} short", build, has_controller=True)


def _cluster(name: str, options: SystemOptions) -> Variant:
    def build(scene: Scene, loop: EventLoop, listener: PrefillListener) -> RecordedStage:
        spec = ClusterSpec(scene.setting.instances, kv_tokens=KV_TOKENS)
        return build_cluster(options, loop, spec, scene.candidates, listener)

    return Variant(name, build)


def _one_pool(
    name: str = "",
    options: OnePoolOptions = OnePoolOptions(LONG_SLO_S, LONG_STRETCH, SHORT_SLO_S),  # noqa: B008 - frozen
    *,
    largest_size: int = 8,
    composition: Composition | None = None,
    has_prefixes: bool = True,
) -> Variant:
    def build(scene: Scene, loop: EventLoop, listener: PrefillListener) -> RecordedStage:
        candidates = [candidate for candidate in scene.candidates if candidate.size <= largest_size]
        return OnePool(loop, scene.spec(), candidates, scene.laps(composition), options, listener, False)

    return Variant(name, build, has_prefixes)


def systems() -> dict[str, list[Variant]]:
    """Return the variants of every system, the likely best first."""
    stock = {
        order.value: [_stock(order, chunk, router) for chunk in (2048, CHUNK_TOKENS) for router in ROUTERS]
        for order in QueueOrder
    }
    fixed = {
        f"fixed-sp{size}": [_cluster("", SystemOptions(ClusterSystem.FIXED_SP, sp_size=size))] for size in (2, 4, 8)
    }
    return {
        OURS: [_one_pool()],
        **stock,
        "laps": [_laps(router) for router in ROUTERS],
        "two-pools": [_two_pools(0.25), _two_pools(0.5)],
        **fixed,
        "loongserve": [_cluster("", SystemOptions(ClusterSystem.LOONGSERVE_IDLE))],
        "tetris": [
            _cluster(f"rate {rate:g}", SystemOptions(ClusterSystem.TETRIS, improvement_rate=rate))
            for rate in (0.3, 0.6)
        ],
        "pool": [
            _cluster("0.2 s" if chunk_s else "", SystemOptions(ClusterSystem.POOL, chunk_s=chunk_s))
            for chunk_s in (0.2, None)
        ],
    }


def ablations() -> dict[str, Variant]:
    """Return one pool without one of its parts each."""
    plain = OnePoolOptions(LONG_SLO_S, LONG_STRETCH, SHORT_SLO_S)
    return {
        "without_sharing": _one_pool(largest_size=1),
        "without_prefixes": _one_pool(has_prefixes=False),
        "without_kept_rows": _one_pool(options=replace(plain, keeps_rows=False)),
        "without_gathering": _one_pool(options=replace(plain, gathers_rows=False)),
        "without_pulls": _one_pool(options=replace(plain, pulls_rows=False)),
        "without_bounded_chunks": _one_pool(options=replace(plain, short_slo_s=math.inf)),
        "without_packing": _one_pool(composition=SEPARATE),
        "moves_at_10_gb_per_s": _one_pool(options=replace(plain, link_bytes_per_s=10e9)),
    }


# ---- requests ----


@lru_cache(maxsize=2)
def _prompts(data: Path, trace: str) -> tuple[object, ...]:
    files = {
        "mooncake": "mooncake/conversation_trace.jsonl",
        "azure": "azure2023/AzureLLMInferenceTrace_conv.csv",
        "sharegpt": "sharegpt/sharegpt_turn_lengths_qwen2tok.csv",
    }
    try:
        if trace in ("mooncake", "azure"):
            return load_workload(data / files[trace]).requests
        if trace == "sharegpt":
            return load_workload(data / files[trace]).sessions
        chats = load_workload(data / "lmsys_arena" / "lmsys_arena_trace_1500.csv").drawn_lengths()
        lengths = load_workload(data / "tetris_like" / f"{trace.replace('tetris-', 'tetris_like_')}.csv").lengths
        return (chats, lengths)
    except WorkloadError as error:
        give_up(f"--data: {error}")


def requests_of(data: Path, trace: str, count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """Return the arrivals of a trace at a rate: those of a seed are the same at every rate, stretched."""
    prompts = _prompts(data, trace)
    if trace in ("mooncake", "azure"):
        first = seed * count % max(1, len(prompts) - count)
        part = [request._replace(key=key) for key, request in enumerate(prompts[first : first + count])]
        return scaled(part, rate_per_s)
    if trace == "sharegpt":
        return session_requests(prompts, count, rate_per_s, seed, THINK_S, 1.0)
    chats, lengths = prompts
    draws = Random(f"{trace} {seed}")
    times_s = poisson_s(rate_per_s, Random(f"arrivals {seed}"))
    requests = []
    for key in range(count):
        prompt, output = draws.choice(chats if draws.random() < CHAT_SHARE else lengths)
        requests.append(SimRequest(key, next(times_s), prompt, output))
    return requests


# ---- runs ----


@dataclass
class Run:
    """A listener that counts what is late, and the figures of a run. `stops_early`: once it cannot be good."""

    scene: Scene
    requests: Sequence[SimRequest]
    loop: EventLoop
    stops_early: bool
    times_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    late: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    is_good: bool = True

    def __post_init__(self) -> None:
        self.first = int(WARM_UP * len(self.requests))
        counts = {True: 0, False: 0}
        for request in self.requests[self.first :]:
            counts[request.prompt_tokens <= self.scene.short_tokens] += 1
        # Of a class with so few prompts that none might be late nothing can be said.
        self.judged = {is_short: count * (1 - SHARES[is_short]) >= 1 - 1e-9 for is_short, count in counts.items()}
        self.allowed = {
            is_short: (1 - SHARES[is_short]) * count if self.judged[is_short] else math.inf
            for is_short, count in counts.items()
        }

    def on_first_token(self, served: ServedPrefill) -> None:
        request = served.request
        if request.key >= self.first:
            is_short = request.prompt_tokens <= self.scene.short_tokens
            ttft_s = served.ttft_s + self.scene.outside_s(request.prompt_tokens)
            self.times_s[is_short].append(ttft_s)
            if ttft_s > self.scene.objective_s(request.prompt_tokens):
                self._count_late(is_short)

    def on_refused(self, request: SimRequest) -> None:
        self._count_late(request.prompt_tokens <= self.scene.short_tokens)

    def _count_late(self, is_short: bool) -> None:
        self.late[is_short] += 1
        if self.late[is_short] > self.allowed[is_short]:
            self.is_good = False
            if self.stops_early:
                self.loop.stop()


def run(scene: Scene, variant: Variant, requests: Sequence[SimRequest], *, stops_early: bool) -> Run:
    """Simulate one variant on some requests."""
    if not variant.has_prefixes:
        requests = [request._replace(prefix=None) for request in requests]
    loop = EventLoop()
    result = Run(scene, requests, loop, stops_early)
    stage = variant.build(scene, loop, result)
    if variant.has_controller:
        assert isinstance(stage, InstancePool)
        SimulatedController(loop, stage, PressureSettings(short_slo_s=SHORT_SLO_S), is_moving=True)
    feed(loop, requests, stage)
    loop.run()
    return result


class _Search:
    """Finds goodput on the requests of one seed."""

    def __init__(self, scene: Scene, data: Path, requests: int) -> None:
        self._scene = scene
        self._data = data
        self._requests = requests
        self.runs = 0
        sample = requests_of(data, scene.setting.trace, requests, 1.0, 0)
        work_s = sum(min_work_s(scene.candidates, 0, request.prompt_tokens) for request in sample) / len(sample)
        self.bound_per_s = scene.setting.instances / work_s

    def is_good(self, variant: Variant, rate_per_s: float) -> bool:
        self.runs += 1
        requests = requests_of(self._data, self._scene.setting.trace, self._requests, rate_per_s, 0)
        return run(self._scene, variant, requests, stops_early=True).is_good

    def goodput(self, variants: Sequence[Variant]) -> tuple[float, Variant]:
        """Return the highest goodput of any variant, and that variant."""
        best_per_s, best = self._bisect(variants[0], 0.0, None), variants[0]
        for variant in variants[1:]:
            if self.is_good(variant, best_per_s * TOLERANCE if best_per_s else 0.02 * self.bound_per_s):
                low = best_per_s * TOLERANCE if best_per_s else 0.02 * self.bound_per_s
                best_per_s, best = self._bisect(variant, low, None), variant
        return best_per_s, best

    def _bisect(self, variant: Variant, low: float, high: float | None) -> float:
        """Return the highest rate that is good; `low` is. 0 where a fiftieth of what is possible is not."""
        at = 1.3 * low if low else 0.5 * self.bound_per_s
        floor = 0.02 * self.bound_per_s
        while high is None or high > TOLERANCE * low:
            if self.is_good(variant, at):
                low = at
            else:
                high = at
            if low == 0.0:
                assert high is not None
                if high <= floor:
                    return 0.0
                at = max(floor, high / 2)
            else:
                at = 1.3 * low if high is None else math.sqrt(low * high)
        return low


class Figures(NamedTuple):
    """Times to first token, s."""

    short_p50_s: float
    short_p99_s: float
    long_p50_s: float
    long_p90_s: float
    long_p99_s: float


def figures(runs: Sequence[Run]) -> Figures:
    """Return the figures of the runs of all seeds together."""
    short = [ttft_s for one in runs if one.judged[True] for ttft_s in one.times_s[True]] or [0.0]
    long = [ttft_s for one in runs if one.judged[False] for ttft_s in one.times_s[False]] or [0.0]
    return Figures(
        percentile(short, 0.5),
        percentile(short, 0.99),
        percentile(long, 0.5),
        percentile(long, 0.9),
        percentile(long, 0.99),
    )


class Task(NamedTuple):
    """One setting, and how it is measured."""

    setting: Setting
    data: Path
    requests: int
    seeds: tuple[int, ...]


def compare(task: Task) -> dict[str, object]:
    """Return all figures of a setting."""
    began_s = time.monotonic()
    scene = scene_of(task.setting)
    count = round(task.requests * REQUEST_FACTOR.get(task.setting.trace, 1.0))
    search = _Search(scene, task.data, count)
    goodputs: dict[str, float] = {}
    chosen: dict[str, Variant] = {}
    for name, variants in systems().items():
        goodputs[name], chosen[name] = search.goodput(variants)
    others = [name for name in goodputs if name != OURS]
    best = max(others, key=lambda name: goodputs[name])
    loads: dict[str, dict[str, Figures]] = {}
    ablated: dict[str, dict[str, Figures]] = {}
    for load in LOADS:
        rate_per_s = load * (goodputs[best] or goodputs[OURS] or search.bound_per_s)
        arrivals = [requests_of(task.data, task.setting.trace, count, rate_per_s, seed) for seed in task.seeds]
        at_load = loads[f"{load:g}"] = {}
        for name, variant in chosen.items():
            at_load[name] = figures([run(scene, variant, requests, stops_early=False) for requests in arrivals])
        if load == LOADS[-1]:
            for name, variant in ablations().items():
                times = figures([run(scene, variant, requests, stops_early=False) for requests in arrivals])
                ablated.setdefault(f"{load:g}", {})[name] = times
    result = ratios(goodputs, loads) | {
        "best_other": best,
        "goodput_per_s": {name: round(rate, 4) for name, rate in goodputs.items()},
        "variants": {name: variant.name for name, variant in chosen.items() if variant.name},
        "loads": {
            load: {name: _rounded(times) for name, times in by_system.items()} for load, by_system in loads.items()
        },
        "ablations": {
            load: {name: _rounded(times) for name, times in by_name.items()} for load, by_name in ablated.items()
        },
        "runs": search.runs,
        "seconds": round(time.monotonic() - began_s, 1),
    }
    return {"setting": task.setting._asdict()} | result


def ratios(goodputs: Mapping[str, float], loads: Mapping[str, Mapping[str, Figures]]) -> dict[str, object]:
    """Return ours over the best other system's: goodput, and each figure at each load."""
    best_per_s = max(rate for name, rate in goodputs.items() if name != OURS)
    # None: no other system is good at any load.
    over: dict[str, object] = {"goodput_over_best": round(goodputs[OURS] / best_per_s, 3) if best_per_s else None}
    for name in ("short_p99", "long_p90", "long_p50"):
        over[f"{name}_over_best"] = {
            load: _over(
                getattr(by_system[OURS], f"{name}_s"),
                min(getattr(times, f"{name}_s") for system, times in by_system.items() if system != OURS),
            )
            for load, by_system in loads.items()
        }
    return over


def _over(ours_s: float, best_s: float) -> float:
    return round(ours_s / best_s, 3) if best_s else 1.0


def _rounded(times: Figures) -> dict[str, float]:
    return {name: round(value, 4) for name, value in times._asdict().items()}


def worst(results: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the least favourable ratio of all settings, of those whose prompts share prefixes, and of each trace."""
    shared = [result for result in results if result["setting"]["trace"] in SHARED_PREFIXES]
    others = [result for result in results if result not in shared]
    by_trace: dict[str, list[Mapping[str, object]]] = {}
    for result in results:
        by_trace.setdefault(result["setting"]["trace"], []).append(result)
    return {
        **_worst_of(results),
        "no_other_is_good": [str(Setting(**one["setting"])) for one in results if one["goodput_over_best"] is None],
        "goodput_over_best_with_prefixes": _worst_of(shared)["goodput_over_best"],
        "goodput_over_best_without_prefixes": _worst_of(others)["goodput_over_best"],
        "traces": {trace: _worst_of(part) for trace, part in by_trace.items()},
    }


def _worst_of(results: Sequence[Mapping[str, object]]) -> dict[str, float | None]:
    goodputs = [over for result in results if (over := result["goodput_over_best"]) is not None]
    worst_ratios = {
        f"{name}_over_best": max(
            (ratio for result in results for ratio in result[f"{name}_over_best"].values()), default=None
        )
        for name in ("short_p99", "long_p90", "long_p50")
    }
    return {"goodput_over_best": min(goodputs, default=None), **worst_ratios}


def _show(result: Mapping[str, object]) -> str:
    setting = Setting(**result["setting"])
    goodputs = result["goodput_per_s"]
    listed = ", ".join(f"{name} {rate:.2f}" for name, rate in sorted(goodputs.items(), key=lambda item: -item[1]))
    over = ", ".join(
        f"{name} {'/'.join(f'{ratio:.2f}' for ratio in result[f'{name}_over_best'].values())}"
        for name in ("short_p99", "long_p90", "long_p50")
    )
    goodput_over = result["goodput_over_best"]
    gain = "no other is good" if goodput_over is None else f"{goodput_over:.2f} of {result['best_other']}"
    return f"{setting}: {gain}; {over}; {listed} ({result['seconds']:.0f} s)"


def _draw(results: Sequence[Mapping[str, object]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.4 * len(results) + 1.5))
    results = [result for result in results if result["goodput_over_best"] is not None]
    names = [str(Setting(**result["setting"])) for result in results]
    axes.barh(names, [result["goodput_over_best"] for result in results], color="#4878a8")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("goodput of one pool over that of the best other system")
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description="Goodput of one pool against every other system.")
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--engines", nargs="+", choices=list(SHORT_TOKENS), default=list(SHORT_TOKENS))
    parser.add_argument("--hosts", nargs="+", choices=list(HOSTS), default=list(HOSTS))
    parser.add_argument("--instances", nargs="+", type=int, help="default: 8; with --full 8 and 32")
    parser.add_argument("--requests", type=int, help="of a run (default: 600; with --full 4000), more of short traces")
    parser.add_argument("--seeds", nargs="+", type=int, help="of the loads (default: 0 1 2)")
    parser.add_argument("--full", action="store_true", help="8 and 32 instances, longer runs")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the workload data")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the result into this file too")
    parser.add_argument("--picture", type=Path, help="draw goodput over the best other system's")
    args = parser.parse_args()
    if not args.data.is_dir():
        give_up(f"--data: {args.data} is not there")
    requests = args.requests or (4000 if args.full else 600)
    seeds = tuple(args.seeds or (0, 1, 2))
    started, began_s = datetime.now(UTC), time.monotonic()
    tasks = [
        Task(Setting(trace, engine, host, instances), args.data, requests, seeds)
        for instances in (args.instances or ([8, 32] if args.full else [8]))
        for engine in args.engines
        for trace in args.traces
        for host in args.hosts
    ]
    results = []
    with get_context("spawn").Pool(args.processes) as pool:
        for result in pool.imap_unordered(compare, tasks):
            results.append(result)
            print(f"{len(results)}/{len(tasks)} {_show(result)}", file=sys.stderr, flush=True)
    order = [task.setting._asdict() for task in tasks]
    results.sort(key=lambda result: order.index(result["setting"]))
    if args.picture:
        _draw(results, args.picture)
    summary = {
        "bench": "goodput",
        "command": f"python bench/goodput.py {shlex.join(sys.argv[1:])}".strip(),
        "started": started.isoformat(timespec="seconds"),
        "requests": requests,
        "seeds": list(seeds),
        **worst(results),
        "settings": results,
        "seconds": round(time.monotonic() - began_s, 1),
        "versions": versions("sglang-ext"),
        "machine": machine(),
    }
    if args.out:
        args.out.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print_result(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
