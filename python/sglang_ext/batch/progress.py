"""Progress of a run for the operator: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from sglang_ext.batch.runner import Progress
from sglang_ext.batch.store import Job

_BAR_INTERVAL_S = 0.25
_LOG_INTERVAL_S = 15.0


def counted(count: int, noun: str) -> str:
    """Return the count with its noun: 1 line, 2 lines."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class ProgressReport:
    """Shows on standard error how far something is, from a thread of its own. A context manager.

    `read` gives the lines done since the start and a text that is shown with it; it must be safe to call from a thread.
    """

    def __init__(self, what: str, total: int | None, done_before: int, read: Callable[[], tuple[int, str]]) -> None:
        self._what = what
        self._total = total
        self._done_before = done_before
        self._read = read
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)
        self._began_s = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    @classmethod
    def of_reading(cls, count: Callable[[], int]) -> Self:
        """While input is read: `count` gives the lines so far."""
        return cls("reading", None, 0, lambda: (count(), ""))

    @classmethod
    def of_sending(cls, job: Job, read: Callable[[], Progress | None]) -> Self:
        """While lines are sent: `read` gives what the runner has done."""
        began_s = time.monotonic()

        def details() -> tuple[int, str]:
            now = read()
            if now is None:
                return 0, ""
            tokens_per_s = (now.prompt_tokens + now.completion_tokens) / max(time.monotonic() - began_s, 1e-3)
            failed = job.failed + now.failed
            text = f"{tokens_per_s:.0f} tokens/s, {failed} failed, {now.in_flight} of {now.cap} in flight"
            return now.succeeded + now.failed, text

        return cls("sending", job.lines, job.succeeded + job.failed, details)

    def __enter__(self) -> Self:
        self._began_s = time.monotonic()
        if sys.stderr.isatty():
            self._open_bar()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._bar is not None:
            self._update_bar()
            self._bar.stop()

    def note(self, text: str) -> None:
        """Show the operator an event."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def _open_bar(self) -> None:
        try:
            from rich import progress as rich_progress
            from rich.console import Console
        except ImportError:
            return
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("ETA"),
            rich_progress.TimeRemainingColumn(),
            rich_progress.TextColumn("{task.fields[details]}"),
            console=Console(stderr=True),
            auto_refresh=False,
        )
        self._task = self._bar.add_task(self._what, total=self._total, completed=self._done_before, details="")
        self._bar.start()

    def _show(self) -> None:
        interval_s = _LOG_INTERVAL_S if self._bar is None else _BAR_INTERVAL_S
        while not self._ended.wait(interval_s):
            if self._bar is not None:
                self._update_bar()
            else:
                print(self._log_line(), file=sys.stderr, flush=True)

    def _update_bar(self) -> None:
        done, details = self._read()
        self._bar.update(self._task, completed=self._done_before + done, details=details)
        self._bar.refresh()

    def _log_line(self) -> str:
        done, details = self._read()
        elapsed_s = time.monotonic() - self._began_s
        rate = done / max(elapsed_s, 1e-3)
        parts = [f"{self._what}: {self._done_before + done}" + ("" if self._total is None else f" of {self._total}")]
        parts.append(f"{rate:.0f} lines/s")
        if self._total is not None and rate > 0:
            parts.append(f"ETA {_duration((self._total - self._done_before - done) / rate)}")
        return ", ".join([*parts, details] if details else parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
