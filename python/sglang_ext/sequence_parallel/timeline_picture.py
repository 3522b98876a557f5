"""A timeline as a picture: one row per instance, one colour per prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_ext.sequence_parallel.timeline import Activity, Timeline

_LEGEND_REQUESTS = 8
_HATCHES = {Activity.REBALANCE: "////", Activity.COLLECT: "\\\\\\\\", Activity.FAILED: "xxxx"}
_SHADES = {Activity.RING: 0.45, Activity.IDLE: 0.15, Activity.COLLECT: 0.6, Activity.REBALANCE: 0.8}
_LABELS = {
    Activity.COMPUTE: "computes",
    Activity.REBALANCE: "moves earlier KV",
    Activity.RING: "waits in the ring",
    Activity.IDLE: "ordered, not at it",
    Activity.COLLECT: "all KV to its own instance",
    Activity.FAILED: "came to nothing",
}


class PictureError(RuntimeError):
    """No picture can be drawn; the text is one line for the user."""


def draw_timeline(timeline: Timeline, path: Path, name_of: Callable[[str], str] = str) -> None:
    """Write a picture in the format of the file's ending; `name_of` says what people call an instance. PictureError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise PictureError("matplotlib is not installed: pip install matplotlib") from None
    rows = {instance: row for row, instance in enumerate(timeline.instances)}
    figure = Figure(figsize=(11, 2.2 + 0.7 * max(1, len(rows))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for bar in timeline.bars:
        axes.barh(
            rows[bar.instance],
            bar.end_s - bar.start_s,
            left=bar.start_s,
            height=0.62,
            alpha=_SHADES.get(bar.activity, 1.0),
            **_style(bar.activity, _colour(bar.request)),
        )
    for instance, lost_s in timeline.losses:
        axes.plot(lost_s, rows[instance], marker="x", color="black", markersize=9, zorder=3)
    axes.set_yticks(range(len(rows)), [name_of(instance) for instance in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds since the first of these prompts was offered")
    axes.set_title("Long prompts on the instances of the pool", loc="left", fontsize=11, fontweight="bold")
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    used = {bar.activity for bar in timeline.bars}
    handles: list[Any] = [
        Patch(color=_colour(position), label=f"{one.tokens:,} tokens: {one.plan or one.outcome or 'under way'}")
        for position, one in enumerate(timeline.requests[:_LEGEND_REQUESTS])
    ]
    handles += [
        Patch(alpha=_SHADES.get(activity, 1.0), label=_LABELS[activity], **_style(activity, "#6b6b6b"))
        for activity in Activity
        if activity in used
    ]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise PictureError(f"{path} cannot be written: {reason}") from None


def _colour(request: int) -> str:
    return f"C{request % 10}"


def _style(activity: Activity, colour: str) -> dict[str, Any]:
    hatch = _HATCHES.get(activity)
    if activity is Activity.FAILED:
        return {"facecolor": "white", "edgecolor": colour, "hatch": hatch, "linewidth": 0.5}
    return {"facecolor": colour, "edgecolor": "white", "hatch": hatch, "linewidth": 0.0 if hatch is None else 0.3}
