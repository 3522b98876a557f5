"""Schedulers that served the same requests: their figures, the best chunk size of each, and how sure a ratio is.

A *round* is one workload, served by every policy, one after the other. Times are divided by how much slower the machine
was just then, so that rounds can be put together; a request that failed counts as `FAILED_S`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from support.idle_ttft import IdleTtft
from support.mixed_load import Outcome, percentile

FAILED_S = 300.0  # what a client waits at most
RESAMPLINGS = 500
INTERVAL = (0.05, 0.95)


class Run(NamedTuple):
    """One service of one workload by one policy."""

    outcomes: Sequence[Outcome]
    slowdown: float  # of the machine, against when idle latencies were measured


class Figures(NamedTuple):
    """One policy over several runs; latencies in seconds of the machine at its first speed."""

    requests: int
    failed: int
    short_p50_s: float
    short_p90_s: float
    short_p99_s: float
    long_p50_s: float
    long_p90_s: float
    long_p99_s: float
    requests_per_s: float
    violation_share: float  # of all requests: TTFT above its objective, or failed


class Round(NamedTuple):
    """One workload, by policy: its open-loop run, and the closed-loop capacity (requests/s of the machine at its first
    speed) measured with it.
    """

    runs: Mapping[str, Run]
    capacity_per_s: Mapping[str, float]


def figures(runs: Sequence[Run], idle: IdleTtft) -> Figures:
    """All of one policy's runs together."""
    everything = [(outcome, run.slowdown) for run in runs for outcome in run.outcomes]
    ttft_s: dict[bool, list[float]] = {False: [], True: []}
    for outcome, slowdown in everything:
        ttft_s[outcome.arrival.is_long].append(FAILED_S if outcome.ttft_s is None else outcome.ttft_s / slowdown)
    late = sum(
        outcome.ttft_s is None or outcome.ttft_s > idle.objective_s(outcome.arrival.prompt_tokens, slowdown)
        for outcome, slowdown in everything
    )
    return Figures(
        len(everything),
        sum(outcome.ttft_s is None for outcome, _ in everything),
        *(percentile(ttft_s[is_long], share) for is_long in (False, True) for share in (0.5, 0.9, 0.99)),
        len(everything) / sum(_span_s(run) for run in runs),
        late / len(everything),
    )


def _span_s(run: Run) -> float:
    """From the first arrival to the last end, at the machine's first speed."""
    ends = [
        outcome.arrival.at_s / run.slowdown + (FAILED_S if outcome.end_s is None else outcome.end_s / run.slowdown)
        for outcome in run.outcomes
    ]
    return max(ends) - run.outcomes[0].arrival.at_s / run.slowdown


def order_chunk_sizes(tried: Mapping[int, Figures]) -> list[int]:
    """Chunk sizes (tokens), best first: the lowest share of late requests in whole percent, ties by long P90."""
    return sorted(tried, key=lambda tokens: (round(tried[tokens].violation_share, 2), tried[tokens].long_p90_s))


class Headline(NamedTuple):
    """Ours against the stock policies; the best of these is looked for in each figure by itself."""

    short_p90_gain_over_fcfs: float
    short_p90_gain_over_best: float
    long_p90_over_fcfs: float
    long_p90_over_best: float
    capacity_over_best: float


def headline(rounds: Sequence[Round], ours: str, peers: Sequence[str], idle: IdleTtft) -> Headline:
    """Of these rounds; `peers` begin with the reference.

    Ours over a peer's capacity is the median over the rounds, in each of which the two were measured within seconds.
    """
    rows = {policy: figures([one.runs[policy] for one in rounds], idle) for policy in (ours, *peers)}
    own, reference = rows[ours], rows[peers[0]]
    return Headline(
        reference.short_p90_s / own.short_p90_s,
        min(rows[peer].short_p90_s for peer in peers) / own.short_p90_s,
        own.long_p90_s / reference.long_p90_s,
        own.long_p90_s / min(rows[peer].long_p90_s for peer in peers),
        min(median(one.capacity_per_s[ours] / one.capacity_per_s[peer] for one in rounds) for peer in peers),
    )


def intervals(
    rounds: Sequence[Round], measure: Callable[[Sequence[Round]], Headline], seed: int = 0
) -> dict[str, tuple[float, float]]:
    """For each figure of the headline what 90% of bootstrap samples are within.

    Resampled are whole rounds, all policies' runs of one together: what differs between rounds are the requests, their
    times of arrival and the machine.
    """
    draw = random.Random(seed)
    samples = [measure(draw.choices(rounds, k=len(rounds))) for _ in range(RESAMPLINGS)]
    low, high = INTERVAL
    return {
        name: (percentile(values, low), percentile(values, high))
        for name, values in zip(Headline._fields, zip(*samples, strict=True), strict=True)
    }


class MachineSpeed:
    """Describes how fast the machine is now, from a measurement that is repeated: requests/s of one and the same
    work."""

    def __init__(self, first_per_s: float) -> None:
        self._first_per_s = first_per_s
        self._last: list[float] = []

    def observe(self, per_s: float) -> float:
        """The slowdown against the first measurement: by the median of the last five, or of those since a jump of 20%.

        A single one is off by some percent, and so would be the load of a run that it stretches.
        """
        if self._last and not 1 / 1.2 < per_s / median(self._last) < 1.2:
            self._last.clear()
        self._last = [*self._last[-4:], per_s]
        return self._first_per_s / median(self._last)
