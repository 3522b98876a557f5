"""The picture of a profile: measured times against the fit, and the relative error of every form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sglang_ext.profiling.fit import Fit
from sglang_ext.profiling.records import MeasuredPoint


class PictureError(RuntimeError):
    """The picture cannot be drawn; the text is one line for the user."""


def check_picture() -> None:
    """PictureError where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PictureError("matplotlib is not installed: pip install matplotlib") from None


def draw_profile(points: Sequence[MeasuredPoint], fit: Fit, title: str, path: Path) -> None:
    """Left: lone chunks by cached tokens; middle: batches by length; right: errors. Dots measured, lines fitted."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    FigureCanvasAgg(figure)
    chunks, batches, errors = figure.subplots(1, 3)
    figure.suptitle(title)
    lone = [one for one in points if one.point.requests == 1]
    for number, cached_tokens in enumerate(sorted({one.point.cached_tokens for one in lone})):
        row = sorted((one.point.new_tokens, one) for one in lone if one.point.cached_tokens == cached_tokens)
        label = f"after {cached_tokens} cached tokens"
        _dots_and_line(chunks, row, fit, f"C{number % 10}", label)
    for number, new_tokens in enumerate(sorted({one.point.new_tokens for one in points if one.point.requests > 1})):
        row = sorted(
            (one.point.requests, one)
            for one in points
            if one.point.new_tokens == new_tokens and one.point.cached_tokens == 0
        )
        _dots_and_line(batches, row, fit, f"C{number % 10}", f"prompts of {new_tokens} tokens")
    for number, form in enumerate(fit.forms):
        ordered = sorted(abs(error) for error in form.errors.values())
        shares = [(position + 1) / len(ordered) for position in range(len(ordered))]
        errors.step(ordered, shares, where="post", color=f"C{number}", label=form.name)
    for axes, across in ((chunks, "new tokens of a chunk"), (batches, "requests of a batch")):
        axes.set(xlabel=across, ylabel="time of the iteration (s)", xscale="log", yscale="log")
    errors.set(xlabel="relative error", ylabel="share of points", ylim=(0, 1))
    for axes in (chunks, batches, errors):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.savefig(path)


def _dots_and_line(axes, row, fit: Fit, color: str, label: str) -> None:  # type: ignore[no-untyped-def]  # matplotlib
    across = [value for value, _ in row]
    axes.plot(across, [one.duration_s for _, one in row], "o", color=color, markersize=4)
    axes.plot(across, [fit.iteration.iteration_s(one.point.lengths) for _, one in row], "-", color=color, label=label)
