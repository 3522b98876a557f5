"""Searches the best improvement rate for each arrival rate, by simulation (Tetris, section 5.1).

Every pair of an arrival rate and an improvement rate is simulated on the same arrivals, those of each seed: Poisson,
prompts drawn from a list of lengths, the first tenth served but not counted. The rate with the lowest time to first
token wins, the smaller one among equals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import NamedTuple

from sglang_ext.policy.cdsp.sp_cost import SpCandidate
from sglang_ext.policy.pools.instance_pressure import quantile
from sglang_ext.simulation.arrivals import drawn_requests
from sglang_ext.simulation.cluster import ClusterSpec
from sglang_ext.simulation.event_loop import EventLoop
from sglang_ext.simulation.metrics import Collector
from sglang_ext.simulation.records import feed
from sglang_ext.simulation.systems import ClusterSystem, SystemOptions, build_cluster

WARM_UP_SHARE = 0.1


class Objective(StrEnum):
    """Which time to first token decides."""

    MEAN = "mean"
    P50 = "p50"
    P99 = "p99"


@dataclass(frozen=True, slots=True)
class RatesSearch:
    """What is searched, and on what."""

    system: ClusterSystem
    cluster: ClusterSpec
    candidates: tuple[SpCandidate, ...]
    lengths: tuple[tuple[int, int], ...]  # (prompt, output) tokens
    requests: int  # of one simulation
    seeds: tuple[int, ...]
    arrival_rates: tuple[float, ...]  # per s
    improvement_rates: tuple[float, ...]

    def trials(self) -> list[Trial]:
        """Every simulation that is needed, by arrival rate."""
        return [
            Trial(arrivals_per_s, rate, seed)
            for arrivals_per_s in self.arrival_rates
            for rate in self.improvement_rates
            for seed in self.seeds
        ]


class Trial(NamedTuple):
    """One simulation."""

    arrivals_per_s: float
    improvement_rate: float
    seed: int


class TrialTtft(NamedTuple):
    """Time to first token of a simulation (s)."""

    mean: float
    p50: float
    p99: float


class CandidateTtft(NamedTuple):
    """One improvement rate at one arrival rate, mean over the seeds."""

    improvement_rate: float
    ttft_s: TrialTtft


class RateChoice(NamedTuple):
    """The best improvement rate at an arrival rate, and how all of them did."""

    arrivals_per_s: float
    best: CandidateTtft
    tried: tuple[CandidateTtft, ...]


class TrialError(ValueError):
    """A simulation says nothing; the text is one line for the user."""


def carrying_rate_per_s(candidates: Sequence[SpCandidate], instances: int, lengths: Sequence[tuple[int, int]]) -> float:
    """Return the arrival rate at which all instances compute all the time, each prompt on the size that takes least.

    No schedule serves more: 16 / mean of min_s s T_s(0, L) for 16 instances.
    """
    least_s = fmean(min(one.size * one.cost.predict_s(0, prompt) for one in candidates) for prompt, _ in lengths)
    return instances / least_s


def run_trial(search: RatesSearch, trial: Trial) -> TrialTtft:
    """Simulate one trial. TrialError if the cluster cannot serve every prompt."""
    options = SystemOptions(search.system, improvement_rate=trial.improvement_rate)
    loop = EventLoop()
    collector = Collector(int(WARM_UP_SHARE * search.requests))
    stage = build_cluster(options, loop, search.cluster, search.candidates, collector)
    feed(loop, drawn_requests(search.lengths, search.requests, trial.arrivals_per_s, trial.seed), stage)
    loop.run()
    if collector.refused:
        raise TrialError(f"a prompt of {collector.refused[0].prompt_tokens} tokens cannot be served by these instances")
    ttfts_s = sorted(one.ttft_s for one in collector.served)
    return TrialTtft(fmean(ttfts_s), quantile(ttfts_s, 0.5), quantile(ttfts_s, 0.99))


def choose_rate(
    search: RatesSearch, arrivals_per_s: float, results: Mapping[Trial, TrialTtft], objective: Objective
) -> RateChoice:
    """Return the best improvement rate at one arrival rate. KeyError for a trial that has no result."""
    tried = tuple(
        CandidateTtft(rate, _mean([results[Trial(arrivals_per_s, rate, seed)] for seed in search.seeds]))
        for rate in search.improvement_rates
    )
    best = min(tried, key=lambda one: (getattr(one.ttft_s, objective), one.improvement_rate))
    return RateChoice(arrivals_per_s, best, tried)


def _mean(results: Sequence[TrialTtft]) -> TrialTtft:
    return TrialTtft(*(fmean(values) for values in zip(*results, strict=True)))
