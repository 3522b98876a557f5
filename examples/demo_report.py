"""The demonstration's end: a table of the requests and a picture of their life."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TextIO

from demo_client import Reply

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLASS_COLOURS = {"short": "#2a7f9e", "long": "#c8553d"}
OTHER_COLOUR = "#6b6b6b"
COLUMNS = ("request", "class", "prefill", "chunks", "prompt", "sent at", "TTFT", "stock TTFT", "answer", "stock answer")
TEXT_COLUMNS = 4


def table_rows(
    replies: Sequence[Reply],
    stock_replies: Sequence[Reply] | None,
    name_of: Callable[[str], str],
    plan_of: Callable[[Reply], str],
) -> list[tuple[str, ...]]:
    """Return one row of COLUMNS per request; of a failed one only its class and instance."""
    rows = []
    for reply, stock in zip(replies, stock_replies or [None] * len(replies), strict=True):
        row = [reply.question.label, reply.length_class, name_of(reply.prefill_url)]
        if reply.error or (stock is not None and stock.error):
            row += ["-"] * (len(COLUMNS) - len(row))
        else:
            row += [
                plan_of(reply),
                f"{reply.prompt_tokens} tokens",
                f"{reply.sent_s:.1f} s",
                f"{reply.ttft_s:.2f} s",
                "-" if stock is None else f"{stock.ttft_s:.2f} s",
                f"{reply.completion_tokens} tokens",
                "-" if stock is None else "the same" if stock.text == reply.text else "another",
            ]
        rows.append(tuple(row))
    return rows


def print_table(
    replies: Sequence[Reply],
    stock_replies: Sequence[Reply] | None,
    name_of: Callable[[str], str],
    plan_of: Callable[[Reply], str],
    stream: TextIO,
) -> None:
    """Print the table, its numbers right-aligned, and what it says in one line."""
    rows = [COLUMNS, *table_rows(replies, stock_replies, name_of, plan_of)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for position, row in enumerate(rows):
        cells = [
            cell.ljust(width) if column < TEXT_COLUMNS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip(), file=stream)
        if position == 0:
            print("  ".join("-" * width for width in widths), file=stream)
    if stock_replies is not None and not any(reply.error for reply in (*replies, *stock_replies)):
        print(f"\n{summary(replies, stock_replies)}", file=stream)


def summary(replies: Sequence[Reply], stock_replies: Sequence[Reply]) -> str:
    """Return the median TTFT of each class on either way."""
    parts = []
    for length_class in ("short", "long"):
        pairs = [
            (reply.ttft_s, stock.ttft_s)
            for reply, stock in zip(replies, stock_replies, strict=True)
            if reply.length_class == length_class
        ]
        if pairs:
            ours, stocks = (median(times) for times in zip(*pairs, strict=True))
            parts.append(f"{length_class} prompts {stocks:.2f} s on one stock instance, {ours:.2f} s through the pools")
    return f"median TTFT: {'; '.join(parts)}"


def draw_timeline(
    replies: Sequence[Reply], stock_replies: Sequence[Reply] | None, name_of: Callable[[str], str], picture: Path
) -> None:
    """Write a PNG: one bar per request, from sending through prefill to its tokens; both ways, one below the other."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    class_of = {reply.question.label: reply.length_class for reply in replies}
    ways = [("through the pools", replies)]
    if stock_replies is not None:
        ways.insert(0, ("the same requests on one stock instance", stock_replies))
    end_s = max(reply.end_s for _, ones in ways for reply in ones)
    size = (11, len(ways) * (0.9 + 0.5 * len(replies)) + 0.6)
    figure, panels = pyplot.subplots(len(ways), sharex=True, figsize=size, layout="constrained", squeeze=False)
    for axes, (title, ones) in zip(panels[:, 0], ways, strict=True):
        _draw_way(axes, ones, class_of, name_of)
        axes.set_xlim(0, end_s * 1.4)
        axes.set_title(title, loc="left", fontsize=10)
    panels[-1, 0].set_xlabel("seconds since the first request was sent")
    if stock_replies is not None:
        title = summary(replies, stock_replies).replace("; ", ";\n")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    classes = [name for name in CLASS_COLOURS if name in class_of.values()]
    handles = [Patch(color=CLASS_COLOURS[name], alpha=0.35, label=f"until the first token, {name}") for name in classes]
    handles += [Patch(color=CLASS_COLOURS[name], label=f"decode, {name}") for name in classes]
    tick = Line2D([], [], color="#9a9a9a", marker="|", linestyle="none", markersize=9, label="a token arrives")
    figure.legend(
        handles=[*handles, tick], loc="outside lower center", ncols=len(handles) + 1, frameon=False, fontsize=8.5
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)


def _draw_way(axes: Axes, replies: Sequence[Reply], class_of: dict[str, str], name_of: Callable[[str], str]) -> None:
    for row, reply in enumerate(replies):
        colour = CLASS_COLOURS.get(class_of[reply.question.label], OTHER_COLOUR)
        first_s = reply.token_times_s[0]
        axes.barh(row, reply.ttft_s, left=reply.sent_s, color=colour, alpha=0.35, height=0.5)
        axes.barh(row, reply.end_s - first_s, left=first_s, color=colour, height=0.5)
        axes.vlines(reply.token_times_s, row - 0.25, row + 0.25, color="white", linewidth=0.5, alpha=0.8)
        way = f"  ({name_of(reply.prefill_url)} → {name_of(reply.decode_url)})" if reply.prefill_url else ""
        axes.text(
            reply.end_s + 0.1,
            row,
            f"first token {reply.ttft_s:.2f} s, {reply.completion_tokens} tokens{way}",
            va="center",
            fontsize=8.5,
            color="#444444",
        )
    axes.set_yticks(range(len(replies)), [f"{reply.question.label}\n{reply.prompt_tokens} tokens" for reply in replies])
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.invert_yaxis()
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
