"""What a simulation has come to, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from sglang_ext.policy.pools.instance_pressure import quantile
from sglang_ext.simulation.metrics import TtftSummary, by_class
from sglang_ext.simulation.run import Outcome

_COLUMNS = ("mean_s", "p50_s", "p90_s", "p99_s", "max_s", "mean_wait_s")


class DecodeSummary(NamedTuple):
    """Requests with their last token."""

    finished: int
    refused: int
    time_per_token_p50_s: float
    time_per_token_p99_s: float
    mean_transfer_s: float  # from the first token to the KV in place, queue for a backend included


class Report(NamedTuple):
    """One load."""

    rate_per_s: float | None  # asked for; None: as in the trace
    classes: tuple[TtftSummary, ...]
    cached_share: float  # of the prompts' tokens, found in prefix caches
    decode: DecodeSummary | None
    end_s: float
    events: int


def make_report(outcome: Outcome, rate_per_s: float | None, slo_s: float, boundary_tokens: int) -> Report:
    """Summarise one run."""
    classes = by_class(outcome.served, outcome.unfinished, outcome.refused, outcome.end_s, slo_s, boundary_tokens)
    prompt_tokens = sum(one.request.prompt_tokens for one in outcome.served)
    cached_share = sum(one.request.cached_tokens for one in outcome.served) / max(1, prompt_tokens)
    return Report(rate_per_s, classes, cached_share, _decode(outcome), outcome.end_s, outcome.events)


def _decode(outcome: Outcome) -> DecodeSummary | None:
    finished = outcome.finished
    if not finished:
        return None
    per_token_s = sorted(one.time_per_token_s for one in finished)
    return DecodeSummary(
        len(finished),
        len(outcome.decode_refused),
        quantile(per_token_s, 0.5),
        quantile(per_token_s, 0.99),
        fmean(one.transferred_s - one.first_token_s for one in finished),
    )


def table(reports: Sequence[Report]) -> str:
    """Rows of classes under a line per load. Times to first token in seconds."""
    lines = []
    header = f"{'class':<6} {'requests':>9} {'unfin.':>7} {'refused':>7} {'late':>7}"
    header += "".join(f" {name.removesuffix('_s').replace('_', ' '):>9}" for name in _COLUMNS)
    for report in reports:
        load = "as in the trace" if report.rate_per_s is None else f"{report.rate_per_s:g} requests/s"
        lines += [f"load: {load}", header]
        for one in report.classes:
            cells = "".join(_cell(getattr(one, name)) for name in _COLUMNS)
            lines.append(
                f"{one.name:<6} {one.requests:>9} {one.unfinished:>7} {one.refused:>7} {one.violations:>7}{cells}"
            )
        if report.cached_share > 0:
            lines.append(f"prefix caches had {report.cached_share:.1%} of the prompts' tokens")
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


def as_json(report: Report) -> dict[str, object]:
    """Plain JSON values."""
    return {
        "rate_per_s": report.rate_per_s,
        "cached_share": report.cached_share,
        "end_s": report.end_s,
        "events": report.events,
        "ttft": {one.name: {**one._asdict()} for one in report.classes},
        "decode": None if report.decode is None else report.decode._asdict(),
    }
