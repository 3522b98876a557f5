"""Pictures of simulations: TTFT distribution, latency against load, who was busy when, pool sizes, goodput by cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_ext.planner.simulation.events import BusyInterval, ServedPrefill
from sglang_ext.planner.simulation.pool_controller import PoolSizes
from sglang_ext.planner.simulation.report import LoadReport

_MOST_BARS = 20_000  # a timeline with more is drawn up to there


class PicturesError(RuntimeError):
    """Pictures cannot be drawn; the text is one line for the user."""


def check_pictures() -> None:
    """PicturesError where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PicturesError("matplotlib is not installed: pip install matplotlib") from None


def draw_ttft(runs: Sequence[tuple[LoadReport, Sequence[ServedPrefill]]], path: Path) -> None:
    """Cumulative distribution of the TTFT, one line per load."""
    figure, axes = _figure()
    for report, served in runs:
        ttfts_s = sorted(prefill.ttft_s for prefill in served)
        shares = [(position + 1) / len(ttfts_s) for position in range(len(ttfts_s))]
        axes.plot(ttfts_s, shares, label=report.load)
    axes.set(xlabel="time to first token (s)", ylabel="share of requests", xscale="log", ylim=(0, 1))
    axes.legend()
    figure.savefig(path)


def draw_load(reports: Sequence[LoadReport], path: Path) -> None:
    """P50, P90 and P99 against the arrival rate."""
    figure, axes = _figure()
    rates = [report.rate_per_s for report in reports]
    for name in ("p50_s", "p90_s", "p99_s"):
        axes.plot(rates, [getattr(report.classes[0], name) for report in reports], marker="o", label=name[:3].upper())
    axes.set(xlabel="arrival rate (requests/s)", ylabel="time to first token (s)", yscale="log")
    axes.legend()
    figure.savefig(path)


def draw_timeline(timeline: Sequence[BusyInterval], path: Path) -> None:
    """Gantt chart: one row per instance, one colour per request."""
    figure, axes = _figure()
    first = sorted(timeline, key=lambda busy: busy.start_s)[:_MOST_BARS]
    axes.barh(
        [busy.instance for busy in first],
        [busy.end_s - busy.start_s for busy in first],
        left=[busy.start_s for busy in first],
        color=[f"C{busy.key % 10}" for busy in first],
        height=0.9,
    )
    axes.set(xlabel="time (s)", ylabel="prefill instance")
    axes.invert_yaxis()
    figure.savefig(path)


def draw_pools(sizes: Sequence[PoolSizes], end_s: float, path: Path) -> None:
    """Instances of each pool over time."""
    figure, axes = _figure()
    times_s = [*(size.at_s for size in sizes), end_s]
    for name in ("short", "long"):
        counts = [getattr(size, name) for size in sizes]
        axes.step(times_s, [*counts, counts[-1]], where="post", label=name)
    axes.set(xlabel="time (s)", ylabel="instances")
    axes.legend()
    figure.savefig(path)


def draw_cost(
    series: Mapping[str, Sequence[tuple[int, float]]], demand_per_s: float, required_per_s: float, path: Path
) -> None:
    """Goodput against GPUs: (GPUs, requests/s) of each kind of layout, and what is asked for as lines."""
    figure, axes = _figure()
    for name, points in series.items():
        ordered = sorted(points)
        axes.plot([gpus for gpus, _ in ordered], [rate for _, rate in ordered], marker="o", label=name)
    axes.axhline(demand_per_s, color="gray", linestyle=":", label=f"the trace: {demand_per_s:.3g}/s")
    axes.axhline(required_per_s, color="gray", linestyle="--", label=f"with headroom: {required_per_s:.3g}/s")
    axes.set(xlabel="GPUs", ylabel="goodput (requests/s with all objectives held)", ylim=(0, None))
    axes.legend(fontsize=8)
    figure.savefig(path)


def _figure() -> tuple[Any, Any]:  # matplotlib is not typed
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()
