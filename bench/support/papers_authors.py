"""The runs that LAPS's authors have published, on H200s: predicted from operator times and from what surrounds them.

One prefill instance behind a load balancer, N clients that send again at once, 500 prompts of which each level after
the first finds all in the prefix cache (docs/explanation/laps-authors.md):

    client ──▶ front, one at a time ──▶ way there ──▶ queue ──▶ iterations ──▶ way back, a batch's replies in turn ──┐
       ▲                                                                                                            │
       └────────────────────────────────────────────────────────────────────────────────────────────────────────────┘

An iteration takes all that waits, up to 8,192 tokens: what the operators take of its rows, without a graph at least
what the host takes to launch every layer, and in addition a fixed time and one for each request. Of a cached prompt a
share of the tokens counts as rows: SGLang computes one token of it, and what else grows with its length is in this
share.

The constants (`HOST`) are fitted to two settings at 1, 4, 16 and 64 clients, and everything else is a prediction.
`--fit` fits them again, in minutes. The span of a constant is where the error of the fitted rows grows by less than a
tenth, the others unchanged. A run pauses once where the fitted settings do: at 64 clients, and without graphs at 128.

With the same constants, this project's scheduler is compared with SGLang's order in the same loop
(`compare_schedulers`).

`..._error`: predicted over measured, of throughput and median TTFT together unless the name says otherwise.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
_ITERATION_TOKENS = 8192
MODELS = {
    "Qwen2.5-32B": OperatorModel("32b", SHAPES["qwen2.5-32b"]),
    "Qwen2.5-72B-Instruct": OperatorModel("72b", SHAPES["qwen2.5-72b-tp2"]),
}
_EAGER = {"no_cuda_graph", "vanilla_sglang", "prefill_disagg", "dualqueue"}  # settings in which no graph is replayed
FITTED_SETTINGS, FITTED_CLIENTS = ("no_cuda_graph", "batch_prefill"), (1, 4, 16, 64)
_ATTENTION_S = 12e-6  # of a layer, over prompts of some hundred tokens: one kernel
_TOLERANCE = 0.05  # errors below count little in the fit
_STEPS = (1.3, 1.1, 1.03)
_FREE_TOKENS = 1_000_000  # of KV
LEVELS = (1, 2, 4, 8, 16, 32, 64, 128)  # clients
_FEW_CLIENTS = 32
_SPAN_GROWTH = 1.1


class HostTimes(NamedTuple):
    """Holds the times of everything around the operators, in seconds, and a share of tokens."""

    front_s: float  # of a request, one after the other
    there_s: float  # until it is in the queue
    back_s: float  # from the iteration's end to the client
    reply_s: float  # of each further reply of an iteration
    launch_s: float  # of a layer, without a graph
    launch_tp_s: float  # the same on each of two GPUs
    eager_s: float  # of an iteration
    replayed_s: float
    request_s: float  # in an iteration
    request_tp_s: float  # the same without a graph on two GPUs
    pause_s: float  # of the first iteration, in runs that pause
    computed_share: float  # of the tokens of a cached prompt


HOST = HostTimes(
    front_s=0.949e-3,
    there_s=8.39e-3,
    back_s=17.0e-3,
    reply_s=0.0878e-3,
    launch_s=0.231e-3,
    launch_tp_s=0.524e-3,
    eager_s=3.97e-3,
    replayed_s=4.19e-3,
    request_s=0.237e-3,
    request_tp_s=1.30e-3,
    pause_s=0.548,
    computed_share=0.217,
)


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
    clients: int
    figures: Figures

    @property
    def is_fitted(self) -> bool:
        """Return whether the constants were fitted to it."""
        return self.setting in FITTED_SETTINGS and self.clients in FITTED_CLIENTS

    @property
    def is_eager(self) -> bool:
        """Return whether no graph is replayed."""
        return self.setting in _EAGER


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this experiment takes."""
    parser.add_argument("--fit", action="store_true", help="fit the constants again, from those in the source")
    parser.set_defaults(experiment=run)


def run(args: argparse.Namespace) -> dict[str, object]:
    """Predict every row of a closed loop."""
    folder = args.data / _FOLDER
    if not folder.is_dir():
        give_up(f"--data: {folder} is not there")
    rows, prompts = read_rows(folder / "prefill_h200.csv"), read_prompts(folder / "prompt_lengths.csv")
    fitted = [row for row in rows if row.is_fitted]
    host = fit(HOST, fitted, prompts) if args.fit else HOST
    predicted = {row[:3]: predict(row, host, prompts) for row in rows}
    held_out = [row for row in rows if not row.is_fitted]
    for setting in dict.fromkeys(row.setting for row in rows):
        of_setting = [row for row in rows if row.setting == setting]
        progress(f"{setting:<26} {_line(of_setting, predicted)}")
    for row in sorted(held_out, key=lambda row: -max(errors(row.figures, predicted[row[:3]])))[:10]:
        progress(f"far off: {row.model} {row.setting} {row.clients}: {_pair(row, predicted[row[:3]])}")
    figures: dict[str, object] = {}
    for name, several in (("held_out", held_out), ("fitted", fitted)):
        both = [error for row in several for error in errors(row.figures, predicted[row[:3]])]
        figures[f"{name}_median_error"] = round(median(both), 3)
        figures[f"{name}_p90_error"] = round(percentile(both, 0.9), 3)
    for share in ("p90_s", "p99_s"):
        off = [abs(getattr(predicted[row[:3]], share) / getattr(row.figures, share) - 1) for row in held_out]
        figures[f"held_out_ttft_{share[:3]}_median_error"] = round(median(off), 3)
    return {
        "calibration_median_error": figures["held_out_median_error"],
        **figures,
        **{
            f"held_out_median_error_{model}": round(
                median(
                    error for row in held_out if row.model == model for error in errors(row.figures, predicted[row[:3]])
                ),
                3,
            )
            for model in MODELS
        },
        **compare_schedulers(host, prompts),
        "rows": len(rows),
        "held_out_rows": len(held_out),
        "constants": {
            name: [float(f"{value:.3g}"), *span]
            for name, value, span in zip(host._fields, host, spans(host, fitted, prompts), strict=True)
        },
        "table": [[*row[:3], row.is_fitted, *_rounded(row.figures), *_rounded(predicted[row[:3]])] for row in rows],
    }


def read_rows(path: Path) -> list[Row]:
    """Return the runs of a closed loop, each once."""
    rows: dict[tuple[str, str, int], Row] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for one in csv.DictReader(file):
            if one["concurrency"] and one["model"] in MODELS:
                times_s = (float(one[f"ttft_{name}_ms"]) / 1e3 for name in ("median", "mean", "p90", "p99"))
                row = Row(
                    one["model"],
                    one["setting"],
                    int(float(one["concurrency"])),
                    Figures(float(one["requests_per_s"]), *times_s),
                )
                rows.setdefault(row[:3], row)
    return list(rows.values())


def read_prompts(path: Path) -> list[int]:
    """Return the tokens of the prompts that every run sends, in order."""
    with path.open(encoding="utf-8", newline="") as file:
        tokens = [int(one["tokens_estimated"]) for one in csv.DictReader(file)][:PROMPTS]
    factor = INPUT_TOKENS / sum(tokens)
    return [max(1, round(factor * one)) for one in tokens]


def predict(row: Row, host: HostTimes, prompts: Sequence[int]) -> Figures:
    """Return what the run of a row would have been."""
    model, is_eager = MODELS[row.model], row.is_eager
    rows_of = _rows_of(host, prompts, row.clients)
    pauses = row.clients == 64 or (row.clients == 128 and is_eager)
    return closed_loop(model, host, rows_of, row.clients, is_eager=is_eager, pause_s=host.pause_s * pauses)


def _rows_of(host: HostTimes, prompts: Sequence[int], clients: int) -> Sequence[int]:
    """Return the rows of each prompt: the levels follow each other on one server, with the same prompts."""
    return [max(1, round(host.computed_share * tokens)) for tokens in prompts] if clients > 1 else prompts


def iteration_s(model: OperatorModel, host: HostTimes, rows: int, requests: int, *, is_eager: bool) -> float:
    """Return the seconds of an iteration that computes `rows` rows of `requests` requests."""
    shape = model.shape
    device_s = model.chunk_s(1, 0, rows) + shape.layers * (_ATTENTION_S - model.attention_s(0, rows))
    is_divided = shape.tp > 1
    if not is_eager:
        return device_s + host.replayed_s + host.request_s * requests
    launch_s = host.launch_tp_s if is_divided else host.launch_s
    request_s = host.request_tp_s if is_divided else host.request_s
    return max(device_s, shape.layers * launch_s) + host.eager_s + request_s * requests


def closed_loop(
    model: OperatorModel,
    host: HostTimes,
    rows_of: Sequence[int],
    clients: int,
    *,
    is_eager: bool,
    pause_s: float,
    policy: IterationPolicy | None = None,
) -> Figures:
    """Serve requests of these numbers of rows, in order: each client sends the next as soon as it has a reply.

    `policy`: what an iteration takes of those that wait; None: as SGLang, in order of arrival, up to 8,192 rows.
    """
    policy = ChunkedPrefill(QueueOrder.FCFS, _ITERATION_TOKENS) if policy is None else policy
    loop = EventLoop()
    instance = _Instance(loop, model, host, policy, is_eager, pause_s)
    unsent = iter(range(len(rows_of)))
    sent_s: dict[int, float] = {}
    times_s: list[float] = []
    front_s = 0.0

    def send(request: int) -> None:
        nonlocal front_s
        sent_s[request] = loop.now_s
        front_s = max(front_s, loop.now_s) + host.front_s
        arrival_s = front_s + host.there_s
        loop.schedule(arrival_s, instance.take, SimRequest(request, arrival_s, rows_of[request], 1))

    def receive(request: int) -> None:
        times_s.append(loop.now_s - sent_s[request])
        following = next(unsent, None)
        if following is not None:
            send(following)

    instance.reply = receive
    for request, _ in zip(unsent, range(clients), strict=False):
        send(request)
    loop.run()
    return Figures(
        len(times_s) / loop.now_s,
        *(percentile(times_s, 0.5), fmean(times_s), percentile(times_s, 0.9), percentile(times_s, 0.99)),
    )


@dataclass
class _Instance:
    """The prefill instance of a run: one iteration after the other."""

    loop: EventLoop
    model: OperatorModel
    host: HostTimes
    policy: IterationPolicy
    is_eager: bool
    pause_s: float
    reply: Callable[[int], None] = print
    items: list[WorkItem] = field(default_factory=list)
    is_busy: bool = False
    computed_rows: int = 0

    def take(self, request: SimRequest) -> None:
        """A request is in the queue."""
        item = WorkItem(request, request.prompt_tokens, 0, self.computed_rows)
        self.items.append(item)
        self.policy.record_arrival(item, self.loop.now_s)
        self._begin(None)

    def _begin(self, _: object) -> None:
        if self.is_busy or not self.items:
            return
        iteration = self.policy.choose(self.items, _FREE_TOKENS, self.computed_rows, self.loop.now_s)
        if not iteration.slices:
            if iteration.wake_s < math.inf:
                self.loop.schedule(iteration.wake_s, self._begin, None)
            return
        rows = sum(tokens for _, tokens in iteration.slices)
        requests = len(iteration.slices)
        duration_s = iteration_s(self.model, self.host, rows, requests, is_eager=self.is_eager) + self.pause_s
        self.is_busy, self.pause_s = True, 0.0
        work = float(sum(tokens * (tokens + 2 * item.cached_tokens) for item, tokens in iteration.slices))
        cached = sum(item.cached_tokens for item, _ in iteration.slices)
        sample = IterationSample(work, rows, cached, requests, duration_s)
        self.loop.schedule(self.loop.now_s + duration_s, self._end, (iteration, sample))

    def _end(self, running: tuple[Iteration, IterationSample]) -> None:
        iteration, sample = running
        self.is_busy = False
        self.computed_rows += sample.new_tokens
        ended = advance(self.items, iteration)
        self.policy.note_end(sample, ended, self.loop.now_s)
        for place, item in enumerate(ended, 1):
            reply_s = self.loop.now_s + self.host.back_s + self.host.reply_s * place
            self.loop.schedule(reply_s, self.reply, item.request.key)
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


def compare_schedulers(host: HostTimes, prompts: Sequence[int]) -> dict[str, object]:
    """Return what SGLang and this project would do in their loop, with the constants and without a pause.

    SGLang eager as it was; with every iteration replayed, as their graphs and its own of today are; and LAPS here.
    """
    table: list[list[object]] = []
    figures: dict[str, object] = {}
    median_over_best: list[float] = []
    for name, model in MODELS.items():
        for clients in LEVELS:
            loop = (model, host, _rows_of(host, prompts, clients), clients)
            eager = closed_loop(*loop, is_eager=True, pause_s=0.0)
            replayed = closed_loop(*loop, is_eager=False, pause_s=0.0)
            ours = closed_loop(*loop, is_eager=False, pause_s=0.0, policy=laps_policy(model, host))
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


def errors(measured: Figures, predicted: Figures) -> tuple[float, float]:
    """Return the relative errors of throughput and median."""
    return abs(predicted.per_s / measured.per_s - 1), abs(predicted.median_s / measured.median_s - 1)


def fit(start: HostTimes, rows: Sequence[Row], prompts: Sequence[int]) -> HostTimes:
    """Return constants of which no single one can be changed for the better by 3%."""
    best, best_error = start, _error(start, rows, prompts)
    for step in _STEPS:
        has_improved = True
        while has_improved:
            has_improved = False
            for name in HostTimes._fields:
                for factor in (step, 1 / step):
                    tried = best._replace(**{name: factor * getattr(best, name)})
                    error = _error(tried, rows, prompts)
                    if error < best_error:
                        best, best_error, has_improved = tried, error, True
        progress(f"steps of {step}: error {best_error:.4f}, {best}")
    return best


def spans(host: HostTimes, rows: Sequence[Row], prompts: Sequence[int]) -> list[tuple[float, float]]:
    """Return for each constant the least and the largest value, in steps of a tenth, at which the error is nearly as
    low."""
    least = _SPAN_GROWTH * _error(host, rows, prompts)
    found = []
    for name, value in zip(host._fields, host, strict=True):
        ends = []
        for factor in (1 / 1.1, 1.1):
            end = value
            while 0.1 < end / value < 10:
                following = end * factor
                if _error(host._replace(**{name: following}), rows, prompts) > least:
                    break
                end = following
            ends.append(float(f"{end:.2g}"))
        found.append((ends[0], ends[1]))
    return found


def _error(host: HostTimes, rows: Sequence[Row], prompts: Sequence[int]) -> float:
    """Return the mean of relative errors, those below the tolerance damped."""
    total = 0.0
    for row in rows:
        predicted = predict(row, host, prompts)
        for off in (predicted.per_s / row.figures.per_s, predicted.median_s / row.figures.median_s):
            total += math.hypot(math.log(off), _TOLERANCE) - _TOLERANCE
    return total / (2 * len(rows))


def _line(rows: Sequence[Row], predicted: Mapping[tuple[str, str, int], Figures]) -> str:
    off = [errors(row.figures, predicted[row[:3]]) for row in rows]
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
