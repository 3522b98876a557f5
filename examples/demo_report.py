"""The demonstration's end: a table of the requests and a picture of their life."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from demo_client import Reply

CLASS_COLOURS = {"short": "#2a7f9e", "long": "#c8553d"}
OTHER_COLOUR = "#6b6b6b"
COLUMNS = ("request", "class", "prefill", "decode", "chunks", "prompt", "queue wait", "TTFT", "answer", "tokens/s")
TEXT_COLUMNS = 5


def table_rows(
    replies: Sequence[Reply], name_of: Callable[[str], str], plan_of: Callable[[Reply], str]
) -> list[tuple[str, ...]]:
    """Return one row of COLUMNS per reply; a failed one has its class and instances only."""
    rows = []
    for reply in replies:
        row = [reply.question.label, reply.length_class, name_of(reply.prefill_url), name_of(reply.decode_url)]
        if reply.error:
            row += ["-"] * (len(COLUMNS) - len(row))
        else:
            rate = reply.tokens_per_s
            row += [
                plan_of(reply),
                f"{reply.prompt_tokens} tokens",
                f"{reply.queue_s * 1e3:.1f} ms",
                f"{reply.ttft_s:.2f} s",
                f"{reply.completion_tokens} tokens",
                "-" if rate is None else f"{rate:.1f}",
            ]
        rows.append(tuple(row))
    return rows


def print_table(
    replies: Sequence[Reply], name_of: Callable[[str], str], plan_of: Callable[[Reply], str], stream: TextIO
) -> None:
    """Print the table; numbers are right-aligned."""
    rows = [COLUMNS, *table_rows(replies, name_of, plan_of)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for position, row in enumerate(rows):
        cells = [
            cell.ljust(width) if column < TEXT_COLUMNS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip(), file=stream)
        if position == 0:
            print("  ".join("-" * width for width in widths), file=stream)


def draw_timeline(replies: Sequence[Reply], name_of: Callable[[str], str], picture: Path) -> None:
    """Write a PNG: one bar per request, from sending through prefill to its tokens."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(11, 1.6 + 0.62 * len(replies)), layout="constrained")
    end_s = max(reply.end_s for reply in replies)
    for row, reply in enumerate(replies):
        colour = CLASS_COLOURS.get(reply.length_class, OTHER_COLOUR)
        sent_s, first_s = reply.sent_s, reply.token_times_s[0]
        begun_s = sent_s + reply.queue_s
        axes.barh(row, reply.queue_s, left=sent_s, color="#cfcfcf", height=0.5)
        axes.barh(row, first_s - begun_s, left=begun_s, color=colour, alpha=0.35, height=0.5)
        axes.barh(row, reply.end_s - first_s, left=first_s, color=colour, height=0.5)
        axes.vlines(reply.token_times_s, row - 0.25, row + 0.25, color="white", linewidth=0.5, alpha=0.8)
        axes.text(
            reply.end_s + 0.008 * end_s,
            row,
            f"first token {reply.ttft_s:.2f} s, {reply.completion_tokens} tokens  "
            f"({name_of(reply.prefill_url)} → {name_of(reply.decode_url)})",
            va="center",
            fontsize=8.5,
            color="#444444",
        )
    axes.set_yticks(range(len(replies)), [f"{reply.question.label}\n{reply.prompt_tokens} tokens" for reply in replies])
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, end_s * 1.42)
    axes.set_xlabel("seconds since the first requests were sent")
    axes.set_title(
        "Short prompts do not wait behind long ones, which the same instances compute chunk by chunk",
        loc="left",
        fontsize=11,
        fontweight="bold",
    )
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    classes = [name for name in CLASS_COLOURS if any(reply.length_class == name for reply in replies)]
    handles = [Patch(color="#cfcfcf", label="waiting in the router")]
    handles += [Patch(color=CLASS_COLOURS[name], alpha=0.35, label=f"prefill, {name}") for name in classes]
    handles += [Patch(color=CLASS_COLOURS[name], label=f"decode, {name}") for name in classes]
    tick = Line2D([], [], color="#9a9a9a", marker="|", linestyle="none", markersize=9, label="a token arrives")
    figure.legend(
        handles=[*handles, tick], loc="outside lower center", ncols=len(handles) + 1, frameon=False, fontsize=8.5
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)
