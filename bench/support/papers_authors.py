"""The runs that LAPS's authors have published, on H200s: predicted from operator times and from what surrounds them.

One prefill and one decode instance behind a load balancer, and clients: N that send again at once (a closed loop), or
one that sends at a rate (docs/explanation/laps-authors.md):

    client ──▶ front, one thing at a time ──▶ half of the way ──▶ queue ──▶ iterations of prefill ──┐
       ▲                                                                                            │
       └────── front ◀── a step of decode, of all that have arrived ◀── transfer, half of the way ◀─┘

An iteration takes all that waits, up to 8,192 tokens: what the operators take of its rows, without a graph at least
what the host takes to launch every layer, and in addition a fixed time and one for each request. Without a graph its
result is looked at only after the next iteration has been launched, as SGLang's overlapped loop does. Of a cached
prompt a share of the tokens counts as rows: SGLang computes one token of it, and what else grows with its length is in
this share. All levels of a closed loop after the first find all 500 prompts in the prefix cache, and so does the run
that sends 2,000 at once, after the one that sends them at 100/s.

The constants (`TIMES`; those that are no matter of these runs are `H200_HOST`, the host times of simulated H200s) are
fitted to two settings at 1, 4, 16 and 64 clients, and everything else is a prediction, all of the 0.5B model included.
`--fit` fits them again, in minutes. The span of a constant is where the mean error of the fitted rows grows by less
than half a percent, the others unchanged. A run pauses once where the fitted settings do: at 64 clients, and without
graphs at 128.

With the same constants, this project's scheduler is compared with SGLang's order in the same loop
(`compare_schedulers`). A loop of few requests falls into one rhythm or another by a hair: each figure is the median of
seven runs, with hosts that are up to 6% faster or slower.

`..._error`: predicted over measured, of throughput and median TTFT together unless the name says otherwise.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients, IterationSample
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits
from sglang_ext.planner.simulation.events import EventLoop, SimRequest
from sglang_ext.planner.simulation.h200_operators import SHAPES
from sglang_ext.planner.simulation.host_times import H200_HOST, HostTimes
from sglang_ext.planner.simulation.iteration_policies import (
    ChunkedPrefill,
    Iteration,
    IterationPolicy,
    LapsPolicy,
    QueueOrder,
    WorkItem,
)
from sglang_ext.planner.simulation.iterations import advance
from sglang_ext.planner.simulation.operator_engine import OperatorModel
from support.mixed_load import percentile
from support.result import give_up, progress

_FOLDER = "laps_authors_h200"
PROMPTS, INPUT_TOKENS = 500, 51_162
OPEN_PROMPTS, OPEN_INPUT_TOKENS = 2_000, 226_698
_ITERATION_TOKENS = 8192
MODELS = {
    "Qwen2.5-0.5B": OperatorModel("0.5b", SHAPES["qwen2.5-0.5b"]),
    "Qwen2.5-32B": OperatorModel("32b", SHAPES["qwen2.5-32b"]),
    "Qwen2.5-72B-Instruct": OperatorModel("72b", SHAPES["qwen2.5-72b-tp2"]),
}
_COMPARED = ("Qwen2.5-32B", "Qwen2.5-72B-Instruct")
_EAGER = {"no_cuda_graph", "vanilla_sglang", "prefill_disagg", "dualqueue"}  # settings in which no graph is replayed
FITTED_SETTINGS, FITTED_CLIENTS = ("no_cuda_graph", "batch_prefill"), (1, 4, 16, 64)
_ATTENTION_S = 12e-6  # of a layer, over prompts of some hundred tokens: one kernel
_TOLERANCE = 0.05  # errors below count little in the fit
_STEPS = (1.3, 1.1, 1.03, 1.01)
_FREE_TOKENS = 1_000_000  # of KV
LEVELS = (1, 2, 4, 8, 16, 32, 64, 128)  # clients
_FEW_CLIENTS = 32
_SPAN_ERROR = 0.005
_PACES = (0.94, 0.96, 0.98, 1.0, 1.02, 1.04, 1.06)


class Times(NamedTuple):
    """Holds the host's times in seconds, and what is a matter of these runs."""

    host: HostTimes = H200_HOST
    pause_s: float = 0.592  # of the first iteration, in runs that pause
    computed_share: float = 0.191  # of the tokens of a cached prompt

    def constants(self) -> dict[str, float]:
        """Return all constants by name."""
        return self.host._asdict() | {"pause_s": self.pause_s, "computed_share": self.computed_share}

    def with_constant(self, name: str, value: float) -> Times:
        """Return the same with another value of one constant."""
        if name in HostTimes._fields:
            return self._replace(host=self.host._replace(**{name: value}))
        return self._replace(**{name: value})


TIMES = Times()


class Figures(NamedTuple):
    """Describes one run: requests/s, and times to first token in seconds."""

    per_s: float
    median_s: float
    mean_s: float
    p90_s: float
    p99_s: float


class Row(NamedTuple):
    """Describes one published run."""

    model: str
    setting: str
    clients: int  # of a closed loop; 0: the requests come at a rate
    rate_per_s: float  # infinite: all at once; 0 in a closed loop
    figures: Figures

    @property
    def key(self) -> tuple[str, str, int, float]:
        """Return what distinguishes it from the other rows."""
        return self.model, self.setting, self.clients, self.rate_per_s

    @property
    def load(self) -> int | str:
        """Return the number of clients, or the rate."""
        return self.clients or ("at once" if math.isinf(self.rate_per_s) else f"{self.rate_per_s:g} per s")

    @property
    def is_fitted(self) -> bool:
        """Return whether the constants were fitted to it."""
        return self.setting in FITTED_SETTINGS and self.clients in FITTED_CLIENTS

    @property
    def is_eager(self) -> bool:
        """Return whether no graph is replayed."""
        return self.setting in _EAGER


class Prompts(NamedTuple):
    """Holds the tokens of the prompts that every run sends, in order."""

    closed: Sequence[int]
    open: Sequence[int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this experiment takes."""
    parser.add_argument("--fit", action="store_true", help="fit the constants again, from those in the source")
    parser.set_defaults(experiment=run)


def run(args: argparse.Namespace) -> dict[str, object]:
    """Predict every row."""
    folder = args.data / _FOLDER
    if not folder.is_dir():
        give_up(f"--data: {folder} is not there")
    rows, prompts = read_rows(folder / "prefill_h200.csv"), read_prompts(folder / "prompt_lengths.csv")
    fitted = [row for row in rows if row.is_fitted]
    times = fit(TIMES, fitted, prompts) if args.fit else TIMES
    predicted = {row.key: predict(row, times, prompts) for row in rows}
    held_out = [row for row in rows if not row.is_fitted]
    for setting in dict.fromkeys(row.setting for row in rows):
        of_setting = [row for row in rows if row.setting == setting]
        progress(f"{setting:<26} {_line(of_setting, predicted)}")
    for row in sorted(held_out, key=lambda row: -max(errors(row.figures, predicted[row.key])))[:10]:
        progress(f"far off: {row.model} {row.setting} {row.load}: {_pair(row, predicted[row.key])}")
    figures: dict[str, object] = {}
    for name, several in (("held_out", held_out), ("fitted", fitted)):
        both = [error for row in several for error in errors(row.figures, predicted[row.key])]
        figures[f"{name}_median_error"] = round(median(both), 3)
        figures[f"{name}_p90_error"] = round(percentile(both, 0.9), 3)
    for share in ("p90_s", "p99_s"):
        off = [abs(getattr(predicted[row.key], share) / getattr(row.figures, share) - 1) for row in held_out]
        figures[f"held_out_ttft_{share[:3]}_median_error"] = round(median(off), 3)
    open_loop = [
        {
            "setting": row.setting,
            "load": row.load,
            **_pair_of("median_ms", 1e3 * row.figures.median_s, 1e3 * predicted[row.key].median_s),
            **_pair_of("per_s", row.figures.per_s, predicted[row.key].per_s),
        }
        for row in rows
        if not row.clients
    ]
    return {
        "calibration_median_error": figures["held_out_median_error"],
        **figures,
        **{
            f"held_out_median_error_{model}": round(
                median(
                    error for row in held_out if row.model == model for error in errors(row.figures, predicted[row.key])
                ),
                3,
            )
            for model in MODELS
        },
        "open_loop": open_loop,
        "pauses": pauses(rows, times, prompts),
        **compare_schedulers(times, prompts.closed),
        "rows": len(rows),
        "held_out_rows": len(held_out),
        "constants": {
            name: [float(f"{value:.3g}"), *span]
            for (name, value), span in zip(times.constants().items(), spans(times, fitted, prompts), strict=True)
        },
        "table": [
            [row.model, row.setting, row.load, row.is_fitted, *_rounded(row.figures), *_rounded(predicted[row.key])]
            for row in rows
        ],
    }


def read_rows(path: Path) -> list[Row]:
    """Return the runs, each once."""
    rows: dict[tuple[str, str, int, float], Row] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for run_line in csv.DictReader(file):
            times_s = (float(run_line[f"ttft_{name}_ms"]) / 1e3 for name in ("median", "mean", "p90", "p99"))
            row = Row(
                run_line["model"],
                run_line["setting"],
                int(float(run_line["concurrency"] or 0)),
                float(run_line["request_rate"] or 0),
                Figures(float(run_line["requests_per_s"]), *times_s),
            )
            rows.setdefault(row.key, row)
    return list(rows.values())


def read_prompts(path: Path) -> Prompts:
    """Return the tokens of the prompts, so that they sum up to what the runs report."""
    with path.open(encoding="utf-8", newline="") as file:
        estimated = [int(line["tokens_estimated"]) for line in csv.DictReader(file)]

    def first(count: int, total_tokens: int) -> list[int]:
        factor = total_tokens / sum(estimated[:count])
        return [max(1, round(factor * tokens)) for tokens in estimated[:count]]

    return Prompts(first(PROMPTS, INPUT_TOKENS), first(OPEN_PROMPTS, OPEN_INPUT_TOKENS))


def predict(row: Row, times: Times, prompts: Prompts) -> Figures:
    """Return what the run of a row would have been."""
    model, is_eager = MODELS[row.model], row.is_eager
    if row.rate_per_s:
        arrivals_s = [place / row.rate_per_s for place in range(len(prompts.open))]
        is_cached = math.isinf(row.rate_per_s)
        return serve(model, times, prompts.open, arrivals_s, is_cached=is_cached, is_eager=is_eager)
    pauses = row.clients == 64 or (row.clients == 128 and is_eager)
    return serve(model, times, prompts.closed, row.clients, is_cached=row.clients > 1, is_eager=is_eager, pauses=pauses)


@lru_cache(maxsize=100_000)
def device_s(model: OperatorModel, rows: int) -> float:
    """Return the seconds of the operators of an iteration, attention being one short kernel a layer."""
    return model.chunk_s(1, 0, rows) + model.shape.layers * (_ATTENTION_S - model.attention_s(0, rows))


def iteration_s(model: OperatorModel, host: HostTimes, rows: int, requests: int, *, is_eager: bool) -> float:
    """Return the seconds of an iteration that computes `rows` rows of `requests` requests."""
    shape = model.shape
    return host.iteration_s(device_s(model, rows), shape.layers, shape.tp, requests, is_eager=is_eager)


def serve(
    model: OperatorModel,
    times: Times,
    prompts: Sequence[int],
    load: int | Sequence[float],
    *,
    is_cached: bool,
    is_eager: bool,
    pauses: bool = False,
    policy: IterationPolicy | None = None,
) -> Figures:
    """Serve prompts of these numbers of tokens, in order.

    `load`: how many clients send the next as soon as they have a reply, or the times of arrival. `policy`: what an
    iteration takes of those that wait; None: as SGLang, in order of arrival, up to 8,192 rows.
    """
    policy = ChunkedPrefill(QueueOrder.FCFS, _ITERATION_TOKENS) if policy is None else policy
    loop, host = EventLoop(), times.host
    prefill = _Prefill(loop, model, host, policy, is_eager, times.pause_s if pauses else 0.0)
    decode = _Decode(loop, model)
    unsent = iter(range(len(prompts)))
    sent_s: dict[int, float] = {}
    times_s: list[float] = []
    front_s = 0.0

    def pass_front(duration_s: float) -> float:
        nonlocal front_s
        front_s = max(front_s, loop.now_s) + duration_s
        return front_s

    def send(request: int) -> None:
        sent_s[request] = loop.now_s
        arrival_s = pass_front(host.front_s) + host.way_s / 2
        rows = max(1, round(times.computed_share * prompts[request])) if is_cached else prompts[request]
        loop.schedule(arrival_s, prefill.take, SimRequest(request, arrival_s, rows, 1))

    def transfer(request: int, after_s: float) -> None:
        transfer_s = host.transfer_s_per_byte * model.kv_bytes_per_token * prompts[request]
        loop.schedule(loop.now_s + after_s + host.way_s / 2 + transfer_s, decode.take, request)

    def reply(request: int) -> None:
        loop.schedule(pass_front(host.reply_s), receive, request)

    def receive(request: int) -> None:
        times_s.append(loop.now_s - sent_s[request])
        following = next(unsent, None)
        if following is not None:
            send(following)

    prefill.on_computed, decode.on_token = transfer, reply
    if isinstance(load, int):
        for request, _ in zip(unsent, range(load), strict=False):
            send(request)
    else:
        for request, at_s in zip(unsent, load, strict=False):
            loop.schedule(at_s, send, request)
    loop.run()
    return Figures(
        len(times_s) / loop.now_s,
        *(percentile(times_s, 0.5), fmean(times_s), percentile(times_s, 0.9), percentile(times_s, 0.99)),
    )


@dataclass
class _Prefill:
    """The prefill instance of a run: one iteration after the other."""

    loop: EventLoop
    model: OperatorModel
    host: HostTimes
    policy: IterationPolicy
    is_eager: bool
    pause_s: float
    on_computed: Callable[[int, float], None] = print  # a request, and after how many seconds its result is looked at
    items: list[WorkItem] = field(default_factory=list)
    running_requests: int = 0  # of the iteration under way
    computed_rows: int = 0

    def take(self, request: SimRequest) -> None:
        """A request is in the queue."""
        item = WorkItem(request, request.prompt_tokens, 0, self.computed_rows)
        self.items.append(item)
        self.policy.record_arrival(item, self.loop.now_s)
        self._begin(None)

    def _begin(self, _: object) -> None:
        if self.running_requests or not self.items:
            return
        iteration = self.policy.choose(self.items, _FREE_TOKENS, self.computed_rows, self.loop.now_s)
        if not iteration.slices:
            if iteration.wake_s < math.inf:
                self.loop.schedule(iteration.wake_s, self._begin, None)
            return
        rows = sum(tokens for _, tokens in iteration.slices)
        requests = len(iteration.slices)
        duration_s = iteration_s(self.model, self.host, rows, requests, is_eager=self.is_eager) + self.pause_s
        self.running_requests, self.pause_s = requests, 0.0
        work = float(sum(tokens * (tokens + 2 * item.cached_tokens) for item, tokens in iteration.slices))
        cached = sum(item.cached_tokens for item, _ in iteration.slices)
        sample = IterationSample(work, rows, cached, requests, duration_s)
        self.loop.schedule(self.loop.now_s + duration_s, self._end, (iteration, sample))

    def _end(self, running: tuple[Iteration, IterationSample]) -> None:
        iteration, sample = running
        self.running_requests = 0
        self.computed_rows += sample.new_tokens
        ended = advance(self.items, iteration)
        self.policy.note_end(sample, ended, self.loop.now_s)
        self._begin(None)
        after_s = 0.0
        if self.is_eager and self.running_requests:
            after_s = self.host.launching_s(self.model.shape.layers, self.model.shape.tp, self.running_requests)
        for item in ended:
            self.on_computed(item.request.key, after_s)


@dataclass
class _Decode:
    """The decode instance of a run: one step after the other, of all that have arrived."""

    loop: EventLoop
    model: OperatorModel
    on_token: Callable[[int], None] = print
    waiting: list[int] = field(default_factory=list)
    is_busy: bool = False

    def take(self, request: int) -> None:
        """The KV of a request is there."""
        self.waiting.append(request)
        # Others may arrive at the same time.
        self.loop.schedule(self.loop.now_s, self._begin, None)

    def _begin(self, _: None) -> None:
        if self.waiting and not self.is_busy:
            self.is_busy = True
            step_s = device_s(self.model, len(self.waiting))
            self.loop.schedule(self.loop.now_s + step_s, self._end, self.waiting)
            self.waiting = []

    def _end(self, requests: list[int]) -> None:
        self.is_busy = False
        for request in requests:
            self.on_token(request)
        self._begin(None)


def laps_policy(model: OperatorModel, host: HostTimes) -> LapsPolicy:
    """Return this project's scheduler on replayed graphs, with what an iteration takes as its prior."""
    fixed_s = iteration_s(model, host, 1, 0, is_eager=False)
    token_s = (iteration_s(model, host, _ITERATION_TOKENS, 0, is_eager=False) - fixed_s) / _ITERATION_TOKENS
    prior = CostCoefficients(0.0, token_s, 0.0, fixed_s, host.request_s)
    limits = InstanceLimits(
        page_tokens=1, max_chunk_tokens=_ITERATION_TOKENS, max_batch_tokens=_ITERATION_TOKENS, max_requests=256
    )
    return LapsPolicy(Laps(LapsOptions(), GraphGrid(), prior, limits))


def compare_schedulers(times: Times, prompts: Sequence[int]) -> dict[str, object]:
    """Return what SGLang and this project would do in their loop, with the constants and without a pause.

    SGLang eager as it was; with every iteration replayed, as their graphs and its own of today are; and LAPS here.
    """
    table: list[list[object]] = []
    figures: dict[str, object] = {}
    median_over_best: list[float] = []
    for name in _COMPARED:
        model = MODELS[name]
        for clients in LEVELS:
            runs_at = [_at_pace(model, times, prompts, clients, pace) for pace in _PACES]
            eager, replayed, ours = (
                Figures(*(median(values) for values in zip(*runs, strict=True))) for runs in zip(*runs_at, strict=True)
            )
            runs = {"eager": eager, "replayed": replayed, "laps": ours}
            table += [[name, setting, clients, *_rounded(one)] for setting, one in runs.items()]
            if clients <= _FEW_CLIENTS:
                median_over_best.append(ours.median_s / min(eager.median_s, replayed.median_s))
            if clients == LEVELS[-1]:
                ratios = {
                    "ttft_median_over_stock": ours.median_s / eager.median_s,
                    "ttft_median_over_best": ours.median_s / min(eager.median_s, replayed.median_s),
                    "ttft_p99_over_best": ours.p99_s / min(eager.p99_s, replayed.p99_s),
                    "throughput_over_best": ours.per_s / max(eager.per_s, replayed.per_s),
                }
                figures |= {f"{ratio}_{clients}_{name}": round(value, 3) for ratio, value in ratios.items()}
    figures[f"ttft_median_over_best_up_to_{_FEW_CLIENTS}"] = round(max(median_over_best), 3)
    return {**figures, "schedulers": table}


def _at_pace(
    model: OperatorModel, times: Times, prompts: Sequence[int], clients: int, pace: float
) -> tuple[Figures, Figures, Figures]:
    """Return the figures of SGLang eager and replayed, and ours, with host times of `pace` times as long."""
    times = times._replace(host=HostTimes(*(pace * value for value in times.host)))
    loop, is_cached = (model, times, prompts, clients), clients > 1
    return (
        serve(*loop, is_cached=is_cached, is_eager=True),
        serve(*loop, is_cached=is_cached, is_eager=False),
        serve(*loop, is_cached=is_cached, is_eager=False, policy=laps_policy(model, times.host)),
    )


def errors(measured: Figures, predicted: Figures) -> tuple[float, float]:
    """Return the relative errors of throughput and median."""
    return abs(predicted.per_s / measured.per_s - 1), abs(predicted.median_s / measured.median_s - 1)


def fit(start: Times, rows: Sequence[Row], prompts: Prompts) -> Times:
    """Return constants of which no single one can be changed for the better by a hundredth."""
    best, best_error = start, _error(start, rows, prompts)
    for step in _STEPS:
        has_improved = True
        while has_improved:
            has_improved = False
            for name in best.constants():
                for factor in (step, 1 / step):
                    tried = best.with_constant(name, factor * best.constants()[name])
                    error = _error(tried, rows, prompts)
                    if error < best_error - 1e-6:
                        best, best_error, has_improved = tried, error, True
        progress(f"steps of {step}: error {best_error:.4f}, {best}")
    return best


def spans(times: Times, rows: Sequence[Row], prompts: Prompts) -> list[tuple[float, float]]:
    """Return for each constant the least and the largest value, in steps of a tenth, at which the error is nearly as
    low."""
    least = _error(times, rows, prompts) + _SPAN_ERROR
    found = []
    for name, value in times.constants().items():
        ends = []
        for factor in (1 / 1.1, 1.1):
            end = value
            while 0.1 < end / value < 10:
                following = end * factor
                if _error(times.with_constant(name, following), rows, prompts) > least:
                    break
                end = following
            ends.append(float(f"{end:.2g}"))
        found.append((ends[0], ends[1]))
    return found


def _error(times: Times, rows: Sequence[Row], prompts: Prompts) -> float:
    """Return the mean of relative errors, those below the tolerance damped."""
    total = 0.0
    for row in rows:
        predicted = predict(row, times, prompts)
        for off in (predicted.per_s / row.figures.per_s, predicted.median_s / row.figures.median_s):
            total += math.hypot(math.log(off), _TOLERANCE) - _TOLERANCE
    return total / (2 * len(rows))


def pauses(rows: Sequence[Row], times: Times, prompts: Prompts) -> list[list[object]]:
    """Return of the rows of many clients how many seconds longer than without a pause the run took, and how far its
    P90 is above the median without one."""
    found: list[list[object]] = []
    for row in rows:
        if row.clients >= 64:
            calm = predict(row, times._replace(pause_s=0.0), prompts)
            longer_s = PROMPTS / row.figures.per_s - PROMPTS / calm.per_s
            found.append([*row.key[:3], round(longer_s, 2), round(row.figures.p90_s - calm.median_s, 2)])
    return found


def _pair_of(name: str, measured: float, predicted: float) -> dict[str, float]:
    return {f"measured_{name}": round(measured, 1), f"predicted_{name}": round(predicted, 1)}


def _line(rows: Sequence[Row], predicted: Mapping[tuple[str, str, int, float], Figures]) -> str:
    off = [errors(row.figures, predicted[row.key]) for row in rows]
    return "median error: throughput {:.0%}, median TTFT {:.0%}".format(
        *(median(one) for one in zip(*off, strict=True))
    )


def _pair(row: Row, predicted: Figures) -> str:
    return (
        f"{predicted.per_s:.0f} requests/s (measured {row.figures.per_s:.0f}), "
        f"median {predicted.median_s:.3f} s ({row.figures.median_s:.3f})"
    )


def _rounded(figures: Figures) -> list[float]:
    return [round(figures.per_s, 1), *(round(value, 4) for value in figures[1:])]
