"""Progress of a cluster for a person: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO

from sglang_ext.cluster.cluster import Display
from sglang_ext.cluster.process import log_tail
from sglang_ext.cluster.supervisor import ProgramPhase, SupervisedProgram

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HEARTBEAT_S = 10.0


def make_display(stream: TextIO) -> Display:
    """Return a display for `stream`: live where it is a terminal and `rich` is installed."""
    if stream.isatty():
        try:
            from rich.console import Console
        except ModuleNotFoundError:
            return PlainDisplay(stream)
        return LiveDisplay(Console(file=stream))
    return PlainDisplay(stream)


class PlainDisplay:
    """Print a line per change, and every HEARTBEAT_S a line about the programs that are still starting."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._began_s = time.monotonic()
        self._spoke_s = self._began_s

    def changed(self, member: SupervisedProgram, line: str) -> None:
        self._say(f"{member.program.name}: {line}")

    def refresh(self, members: list[SupervisedProgram]) -> None:
        now_s = time.monotonic()
        if now_s - self._spoke_s < HEARTBEAT_S:
            return
        pending = [
            f"{m.program.name} ({now_s - m.started_s:.0f} s)" for m in members if m.phase is ProgramPhase.STARTING
        ]
        if pending:
            self._say(f"still starting: {', '.join(pending)}")

    def started(self) -> None:
        pass

    def _say(self, line: str) -> None:
        self._spoke_s = time.monotonic()
        print(f"[{self._spoke_s - self._began_s:6.1f} s] {line}", file=self._stream, flush=True)


_STYLES = {
    ProgramPhase.WAITING: "dim",
    ProgramPhase.STARTING: "yellow",
    ProgramPhase.READY: "green",
    ProgramPhase.BACKING_OFF: "red",
    ProgramPhase.STOPPING: "yellow",
    ProgramPhase.STOPPED: "dim",
}


class LiveDisplay:
    """A table that is redrawn while the cluster starts, one row per program; lines afterwards."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, refresh_per_second=8)
        self._is_live = False
        self._is_over = False

    def changed(self, member: SupervisedProgram, line: str) -> None:
        if self._is_over:
            self._console.print(f"{time.strftime('%H:%M:%S')} {member.program.name}: {line}", highlight=False)

    def refresh(self, members: list[SupervisedProgram]) -> None:
        if not self._is_live:
            self._live.start()
            self._is_live = True
        self._live.update(_table(members))

    def started(self) -> None:
        if self._is_live:
            self._live.stop()
        self._is_over = True


def _table(members: list[SupervisedProgram]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("program", no_wrap=True)
    table.add_column("phase", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("address", no_wrap=True)
    table.add_column("last line of its log", no_wrap=True, overflow="ellipsis", ratio=1, style="dim")
    now_s = time.monotonic()
    for member in members:
        end_s = now_s if member.ready_s is None else member.ready_s
        elapsed = "" if member.phase is ProgramPhase.WAITING else f"{end_s - member.started_s:.1f} s"
        last = log_tail(member.log, 1) if member.phase is ProgramPhase.STARTING else []
        table.add_row(
            member.program.name,
            Text(str(member.phase), style=_STYLES[member.phase]),
            elapsed,
            member.program.url,
            Text(last[0] if last else ""),
        )
    return table
