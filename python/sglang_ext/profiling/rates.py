"""Searches the best improvement rate for each arrival rate, by simulation (Tetris, section 5.1), and writes the table.

Every pair of an arrival rate and an improvement rate is simulated on the same arrivals, those of each seed: Poisson,
prompts drawn from a list of lengths, the first tenth served but not counted. The rate with the lowest time to first
token wins, the smaller one among equals. Trials already made by a search that was interrupted are kept in notes, one
JSON line each; a last line that was cut off by the interruption is made again.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import NamedTuple

from sglang_ext import __version__
from sglang_ext.policy.cdsp.improvement_rate import TABLE_VERSION
from sglang_ext.policy.cdsp.sp_cost import SpCandidate
from sglang_ext.policy.pools.instance_pressure import quantile
from sglang_ext.simulation.cluster import ClusterSpec
from sglang_ext.simulation.events import EventLoop, feed
from sglang_ext.simulation.run import Collector
from sglang_ext.simulation.systems import ClusterSystem, SystemOptions, build_cluster
from sglang_ext.simulation.workload import drawn_requests

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


class Provenance(NamedTuple):
    """What a search was made from."""

    command: str
    engine: str
    engine_sha256: str | None  # of a profile's file
    workload: str
    workload_sha256: str


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def describe_search(search: RatesSearch) -> dict[str, object]:
    """The search as plain JSON values."""
    return {
        "system": search.system.value,
        "instances": search.cluster.instances,
        "instances_per_node": search.cluster.instances_per_node,
        "kv_tokens": search.cluster.kv_tokens,
        "sp_sizes": [one.size for one in search.candidates],
        "prompts": len(search.lengths),
        "requests": search.requests,
        "warm_up_share": WARM_UP_SHARE,
        "seeds": list(search.seeds),
        "arrival_rates": list(search.arrival_rates),
        "candidates": list(search.improvement_rates),
    }


def write_rates(
    path: Path, search: RatesSearch, objective: Objective, choices: Sequence[RateChoice], provenance: Provenance
) -> None:
    """Write the file, whole or not at all."""
    content = {
        "version": TABLE_VERSION,
        "rates": [
            {
                "arrivals_per_s": choice.arrivals_per_s,
                "improvement_rate": choice.best.improvement_rate,
                "ttft_s": choice.best.ttft_s._asdict(),
                "tried": [
                    {"improvement_rate": one.improvement_rate, "ttft_s": one.ttft_s._asdict()} for one in choice.tried
                ],
            }
            for choice in choices
        ],
        "provenance": {
            **provenance._asdict(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"sglang-ext": __version__, "python": platform.python_version()},
            "objective": objective.value,
            **describe_search(search),
        },
    }
    partial = path.with_name(f"{path.name}.writing")
    partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


class TrialNotesError(ValueError):
    """The notes are not of this search; the text is one line for the user."""


class TrialNotes:
    """Notes in `path`, made when there are none. TrialNotesError if they are there and of another search."""

    def __init__(self, path: Path, search: RatesSearch, provenance: Provenance) -> None:
        self.path = path
        self.results: dict[Trial, TrialTtft] = {}  # that were there at the beginning
        self._header = _fingerprint(search, provenance)
        self._file: TextIOWrapper | None = None
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        if lines and lines[0] != self._header:
            raise TrialNotesError(f"{path} is of another search: remove it, or give the options that it was made with")
        for line in lines[1:]:
            try:
                arrivals_per_s, rate, seed, *ttft_s = json.loads(line)
                self.results[Trial(arrivals_per_s, rate, seed)] = TrialTtft(*ttft_s)
            except (ValueError, TypeError):
                continue

    def __enter__(self) -> TrialNotes:
        lines = [_line(trial, ttft_s) for trial, ttft_s in self.results.items()]
        partial = self.path.with_name(f"{self.path.name}.writing")
        partial.write_text("".join([self._header, "\n", *lines]), encoding="utf-8")
        partial.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()

    def add(self, trial: Trial, ttft_s: TrialTtft) -> None:
        """Note a simulation that has been made."""
        assert self._file is not None
        self._file.write(_line(trial, ttft_s))
        self._file.flush()

    def remove(self) -> None:
        """The table is written: nothing is left to go on with."""
        self.path.unlink(missing_ok=True)


def _line(trial: Trial, ttft_s: TrialTtft) -> str:
    return json.dumps([*trial, *ttft_s]) + "\n"


def _fingerprint(search: RatesSearch, provenance: Provenance) -> str:
    """What a result depends on. The rates searched are left out: with more of them, what is there still holds."""
    content = describe_search(search) | {
        "costs": [repr(one) for one in search.candidates],
        "lengths": hashlib.sha256(repr(search.lengths).encode()).hexdigest(),
        "engine": provenance.engine,
    }
    for name in ("seeds", "arrival_rates", "candidates"):
        content.pop(name)
    return json.dumps(content, sort_keys=True)
