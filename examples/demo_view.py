"""Streamed replies on the terminal: a region per request, or plain interleaved lines elsewhere."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TextIO

from demo_client import Reply, View

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PLAIN_LINE_CHARACTERS = 72
REGION_LINES = 2


class EnteredView(View, AbstractContextManager["EnteredView"], Protocol):
    """A view that is shown while it is entered."""


def make_view(stream: TextIO, labels: Sequence[str]) -> EnteredView:
    """Return a view for `stream` and the requests' labels, in their order."""
    if stream.isatty():
        from rich.console import Console

        return LiveView(Console(file=stream), labels)
    return PlainView(stream)


class PlainView(AbstractContextManager["PlainView"]):
    """Prints a reply's text line by line as it comes; lines of different replies take turns."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._pending: dict[str, str] = {}

    def __exit__(self, *_: object) -> None:
        self._stream.flush()

    def routed(self, reply: Reply) -> None:
        self._print(reply, f"({reply.length_class} prompt)" if reply.length_class else "(accepted)")

    def grew(self, reply: Reply, piece: str) -> None:
        label = reply.question.label
        text = self._pending.get(label, "") + piece
        *whole, rest = text.split("\n")
        for line in whole:
            self._print(reply, line)
        if len(rest) > PLAIN_LINE_CHARACTERS and " " in rest:
            line, _, rest = rest.rpartition(" ")
            self._print(reply, line)
        self._pending[label] = rest

    def ended(self, reply: Reply) -> None:
        self._print(reply, self._pending.pop(reply.question.label, ""))
        self._print(reply, f"[{reply.error or f'done after {reply.end_s:.1f} s'}]")

    def _print(self, reply: Reply, line: str) -> None:
        if line.strip():
            print(f"  {reply.question.label:>10} | {line}", file=self._stream, flush=True)


class LiveView(AbstractContextManager["LiveView"]):
    """A table that is redrawn in place: one region per request with the end of its text."""

    def __init__(self, console: Console, labels: Sequence[str]) -> None:
        from rich.live import Live

        self._console = console
        self._replies: dict[str, Reply | None] = dict.fromkeys(labels)
        self._over: set[str] = set()
        self._live = Live(console=console, refresh_per_second=12, get_renderable=self._render)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def routed(self, reply: Reply) -> None:
        self._replies[reply.question.label] = reply

    def grew(self, reply: Reply, piece: str) -> None:
        pass  # the reply holds the text; the next redraw shows it

    def ended(self, reply: Reply) -> None:
        self._replies[reply.question.label] = reply
        self._over.add(reply.question.label)

    def _render(self) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, expand=True, padding=(0, 2, 0, 0))
        table.add_column("request", no_wrap=True, style="bold")
        table.add_column("class", no_wrap=True)
        table.add_column("state", no_wrap=True, width=9)
        table.add_column("answer", ratio=1)
        width = max(20, self._console.width - 34)
        for label, reply in self._replies.items():
            state, style = self._state(label, reply)
            lines = textwrap.wrap(reply.text, width) if reply is not None else []
            # Every region keeps its height, so that the table does not jump.
            region = "\n".join((lines[-REGION_LINES:] + [""] * REGION_LINES)[:REGION_LINES])
            table.add_row(
                label, reply.length_class if reply is not None else "", Text(state, style=style), Text(region)
            )
        return table

    def _state(self, label: str, reply: Reply | None) -> tuple[str, str]:
        if reply is None:
            return "waiting", "dim"
        if reply.error:
            return "failed", "red"
        if label in self._over:
            return f"{reply.end_s:.1f} s", "green"
        return ("streaming", "yellow") if reply.token_times_s else ("prefill", "cyan")
