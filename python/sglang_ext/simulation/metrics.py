"""What a simulation comes to: times to first token, waits and violations, by length class."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sglang_ext.policy.pools.instance_pressure import quantile
from sglang_ext.simulation.records import ServedPrefill, SimRequest

ALL = "all"


class TtftSummary(NamedTuple):
    """One class of requests. Quantiles interpolate linearly; None where nothing was served."""

    name: str
    requests: int  # served, unfinished and refused
    unfinished: int
    refused: int
    violations: int  # first token later than the objective, unfinished past it, or refused
    mean_s: float | None
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None
    max_s: float | None
    mean_wait_s: float | None


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


class CriticalLoad:
    """A PrefillListener for one question: is the load below the critical one (P99 within the limit, nobody above 3x)?

    `give_up` is called as soon as it is not: one request above 3 times the limit decides it, or more than 1% of all
    that count above the limit.
    """

    MAX_FACTOR = 3.0
    LATE_SHARE = 0.01

    def __init__(self, limit_s: float, requests: int, from_key: int, give_up: Callable[[], None]) -> None:
        self.limit_s = limit_s
        self.from_key = from_key
        self._most_late = self.LATE_SHARE * (requests - from_key)
        self._give_up = give_up
        self.late = 0
        self.is_hopeless = False

    def on_first_token(self, served: ServedPrefill) -> None:
        if served.request.key < self.from_key:
            return
        ttft_s = served.first_token_s - served.request.arrival_s
        if ttft_s > self.limit_s:
            self.late += 1
            if self.late > self._most_late or ttft_s > self.MAX_FACTOR * self.limit_s:
                self._fail()

    def on_refused(self, request: SimRequest) -> None:
        self._fail()

    def _fail(self) -> None:
        self.is_hopeless = True
        self._give_up()


def summarise(
    name: str,
    served: Sequence[ServedPrefill],
    unfinished: Sequence[SimRequest],
    refused: Sequence[SimRequest],
    now_s: float,
    slo_s: float,
) -> TtftSummary:
    """Count `unfinished` at their age for violations; the times are of those served."""
    ttfts_s = sorted(one.ttft_s for one in served)
    violations = sum(ttft_s > slo_s for ttft_s in ttfts_s)
    violations += sum(now_s - one.arrival_s > slo_s for one in unfinished) + len(refused)
    count = len(ttfts_s)
    return TtftSummary(
        name,
        count + len(unfinished) + len(refused),
        len(unfinished),
        len(refused),
        violations,
        math.fsum(ttfts_s) / count if count else None,
        quantile(ttfts_s, 0.5) if count else None,
        quantile(ttfts_s, 0.9) if count else None,
        quantile(ttfts_s, 0.99) if count else None,
        ttfts_s[-1] if count else None,
        math.fsum(one.wait_s for one in served) / count if count else None,
    )


def by_class(
    served: Sequence[ServedPrefill],
    unfinished: Sequence[SimRequest],
    refused: Sequence[SimRequest],
    now_s: float,
    slo_s: float,
    boundary_tokens: int,
) -> tuple[TtftSummary, ...]:
    """All requests, and those with up to and with more than `boundary_tokens` new tokens."""

    def is_short(request: SimRequest) -> bool:
        return request.new_tokens <= boundary_tokens

    return (
        summarise(ALL, served, unfinished, refused, now_s, slo_s),
        *(
            summarise(
                name,
                [one for one in served if is_short(one.request) is short],
                [one for one in unfinished if is_short(one) is short],
                [one for one in refused if is_short(one) is short],
                now_s,
                slo_s,
            )
            for name, short in (("short", True), ("long", False))
        ),
    )
