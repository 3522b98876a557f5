"""Describes what a simulation comes to: times to first token, waits and violations by length class, as a table and as
JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from sglang_ext.planner.simulation.events import ServedPrefill, SimRequest
from sglang_ext.planner.simulation.run import Outcome
from sglang_ext_router.decide.instance_pressure import quantile

ALL = "all"
_COLUMNS = ("mean_s", "p50_s", "p90_s", "p99_s", "max_s", "mean_wait_s")


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


def summarise(
    name: str,
    served: Sequence[ServedPrefill],
    unfinished: Sequence[SimRequest],
    refused: Sequence[SimRequest],
    now_s: float,
    slo_s: float,
) -> TtftSummary:
    """Count `unfinished` at their age for violations; the times are of those served."""
    ttfts_s = sorted(prefill.ttft_s for prefill in served)
    violations = sum(ttft_s > slo_s for ttft_s in ttfts_s)
    violations += sum(now_s - request.arrival_s > slo_s for request in unfinished) + len(refused)
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
        math.fsum(prefill.wait_s for prefill in served) / count if count else None,
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
                [prefill for prefill in served if is_short(prefill.request) is short],
                [request for request in unfinished if is_short(request) is short],
                [request for request in refused if is_short(request) is short],
                now_s,
                slo_s,
            )
            for name, short in (("short", True), ("long", False))
        ),
    )


class DecodeSummary(NamedTuple):
    """Requests with their last token."""

    finished: int
    refused: int
    time_per_token_p50_s: float
    time_per_token_p99_s: float
    mean_transfer_s: float  # from the first token to the KV in place, queue for a backend included


class PoolsSummary(NamedTuple):
    """Describes what controller and scaler did."""

    moves: int
    scalings: int
    mean_instances: float


class LoadReport(NamedTuple):
    """One load."""

    rate_per_s: float | None  # asked for; None: as in the trace
    classes: tuple[TtftSummary, ...]
    cached_share: float  # of the prompts' tokens, found in prefix caches
    decode: DecodeSummary | None
    pools: PoolsSummary | None  # with a controller or a scaler
    gang_wait_share: float | None  # of the time of groups, by members that wait for the others
    end_s: float
    events: int
    clients: int | None = None  # that send again when they have a reply

    @property
    def load(self) -> str:
        """Return what was asked for, for a reader."""
        if self.clients is not None:
            served = self.classes[0].requests - self.classes[0].unfinished - self.classes[0].refused
            who = "a client that sends again" if self.clients == 1 else f"{self.clients} clients that send again"
            return f"{who}, {served / max(self.end_s, 1e-9):.3g} requests/s"
        return "as in the trace" if self.rate_per_s is None else f"{self.rate_per_s:g} requests/s"


def make_report(
    outcome: Outcome, rate_per_s: float | None, slo_s: float, boundary_tokens: int, clients: int | None = None
) -> LoadReport:
    """Summarise one run."""
    classes = by_class(outcome.served, outcome.unfinished, outcome.refused, outcome.end_s, slo_s, boundary_tokens)
    prompt_tokens = sum(prefill.request.prompt_tokens for prefill in outcome.served)
    cached_share = sum(prefill.request.cached_tokens for prefill in outcome.served) / max(1, prompt_tokens)
    return LoadReport(
        *(rate_per_s, classes, cached_share, _decode(outcome), _pools(outcome), outcome.gang_wait_share),
        *(outcome.end_s, outcome.events, clients),
    )


def _pools(outcome: Outcome) -> PoolsSummary | None:
    sizes = outcome.pool_sizes
    if not sizes:
        return None
    ends_s = [*(size.at_s for size in sizes[1:]), outcome.end_s]
    instance_s = sum((size.short + size.long) * (end_s - size.at_s) for size, end_s in zip(sizes, ends_s, strict=True))
    # The first two are what the pools begin with.
    return PoolsSummary(len(outcome.moves), max(0, len(outcome.scalings) - 2), instance_s / max(outcome.end_s, 1e-9))


def _decode(outcome: Outcome) -> DecodeSummary | None:
    finished = outcome.finished
    if not finished:
        return None
    per_token_s = sorted(finished_request.time_per_token_s for finished_request in finished)
    return DecodeSummary(
        len(finished),
        len(outcome.decode_refused),
        quantile(per_token_s, 0.5),
        quantile(per_token_s, 0.99),
        fmean(finished_request.transferred_s - finished_request.first_token_s for finished_request in finished),
    )


def table(reports: Sequence[LoadReport]) -> str:
    """Rows of classes under a line per load. Times to first token in seconds."""
    lines = []
    header = f"{'class':<6} {'requests':>9} {'unfin.':>7} {'refused':>7} {'late':>7}"
    header += "".join(f" {name.removesuffix('_s').replace('_', ' '):>9}" for name in _COLUMNS)
    for report in reports:
        lines += [f"load: {report.load}", header]
        for figures in report.classes:
            cells = "".join(_cell(getattr(figures, name)) for name in _COLUMNS)
            lines.append(
                f"{figures.name:<6} {figures.requests:>9} {figures.unfinished:>7} {figures.refused:>7} "
                f"{figures.violations:>7}{cells}"
            )
        if report.cached_share > 0:
            lines.append(f"prefix caches had {report.cached_share:.1%} of the prompts' tokens")
        if report.gang_wait_share is not None:
            lines.append(f"members waited for their groups for {report.gang_wait_share:.1%} of the time of chunks")
        if report.pools is not None:
            pools = report.pools
            instances = f"{pools.mean_instances:.2f} instances on average"
            lines.append(f"pools: {pools.moves} moves, {pools.scalings} scalings, {instances}")
        if report.decode is not None:
            decode = report.decode
            lines.append(
                f"decode: {decode.finished} finished, {decode.refused} refused, time per token P50 "
                f"{1e3 * decode.time_per_token_p50_s:.1f} ms, P99 {1e3 * decode.time_per_token_p99_s:.1f} ms, "
                f"transfer {1e3 * decode.mean_transfer_s:.1f} ms on average"
            )
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return f" {'-':>9}" if value is None else f" {value:>9.3f}"


def as_json(report: LoadReport) -> dict[str, object]:
    """Plain JSON values."""
    return {
        "rate_per_s": report.rate_per_s,
        "clients": report.clients,
        "cached_share": report.cached_share,
        "gang_wait_share": report.gang_wait_share,
        "end_s": report.end_s,
        "events": report.events,
        "ttft": {length_class.name: {**length_class._asdict()} for length_class in report.classes},
        "pools": None if report.pools is None else report.pools._asdict(),
        "decode": None if report.decode is None else report.decode._asdict(),
    }
