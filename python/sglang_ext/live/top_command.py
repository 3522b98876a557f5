"""`sglang-ext live top`: pools and requests of a running router in a terminal; plain lines where the output is none."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_ext.live.decide.messages import GONE, ClassRow, InstanceRow, LoadRow
from sglang_ext.live.recording import RecordingError, check_lines
from sglang_ext.live.stream_client import (
    KEY_HELP,
    AddressError,
    LiveStreamError,
    StoppedError,
    given_key,
    router_address,
    stopped_by_signals,
    stream_messages,
)

POOLS = ("short", "long", "both", "decode", "plain")
RETRY_S = 2.0
RATE_WINDOW_S = 10.0
LINE_INTERVAL_S = 5.0  # between two lines where the output is not a terminal
BAR = 10  # characters of a busy bar
_CLEAR = "\x1b[H\x1b[J"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_COLOURS = {"short": "34", "long": "33", "bad": "31", "muted": "2", "bold": "1", "ok": "32"}
_STAGES = ("waiting", "prefilling", "starting", "decoding", "ended", "failed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-ext live top`."""
    add = parser.add_argument
    add("url", metavar="URL", nargs="?", default="http://127.0.0.1:30000", help="address of the router")
    add("--lines", type=int, metavar="N", help="end after this number of lines, or of pictures of a terminal")
    add("--api-key", default="", metavar="TEXT", help=KEY_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Show until Ctrl-C; the exit status."""
    if arguments.lines is not None and arguments.lines < 1:
        return _fail("--lines must be above 0", 2)
    try:
        address = router_address(arguments.url)
    except AddressError as error:
        return _fail(str(error), 2)
    is_terminal = sys.stdout.isatty()
    if is_terminal:
        print(_ENTER, end="", flush=True)
    try:
        with stopped_by_signals():
            return _follow(address, given_key(arguments.api_key), arguments, is_terminal)
    except (StoppedError, BrokenPipeError):
        return 0
    finally:
        if is_terminal:
            print(_LEAVE, end="", flush=True)


def _follow(address: str, key: str, arguments: argparse.Namespace, is_terminal: bool) -> int:
    """Show what comes, and connect again where nothing does; ends by itself only where that is of no use."""
    left = arguments.lines
    shown_s = float("-inf")
    while True:
        view = TerminalView()
        try:
            for line in stream_messages(address, key):
                if not view.has_begun:
                    next(check_lines([line]))
                now_s = time.monotonic()
                try:
                    view.take(json.loads(line))
                    if not view.is_whole or (not is_terminal and now_s - shown_s < LINE_INTERVAL_S):
                        continue
                    size = shutil.get_terminal_size()
                    lines = view.screen(*size, "NO_COLOR" not in os.environ) if is_terminal else [view.line()]
                except (ValueError, LookupError, TypeError, AttributeError) as error:
                    raise LiveStreamError(f"a message cannot be read ({error!r})") from None
                shown_s = now_s
                if is_terminal:
                    _show(lines)
                else:
                    print(*lines, sep="\n", flush=True)
                left = None if left is None else left - 1
                if left == 0:
                    return 0
        except RecordingError as error:
            return _fail(f"{address}: {error}", 1)
        except LiveStreamError as error:
            if error.is_final or (not view.has_begun and shown_s == float("-inf")):
                return _fail(str(error), 1)
            if is_terminal:
                _show([*view.screen(*shutil.get_terminal_size(), has_colours=False)[:-1], f"{error}; trying again"])
            else:
                print(f"sglang-ext live top: {error}; trying again", file=sys.stderr, flush=True)
            time.sleep(RETRY_S)


def _show(lines: Sequence[str]) -> None:
    sys.stdout.write(_CLEAR + "\r\n".join(lines))
    sys.stdout.flush()


class TerminalView:
    """The state of one stream, as text."""

    def __init__(self) -> None:
        self.has_begun = False
        self._hello: Mapping[str, Any] = {}
        self._head: Mapping[str, Any] = {}
        self._classes: dict[str, ClassRow] = {}
        self._instances: dict[int, InstanceRow] = {}
        self._loads: dict[int, LoadRow] = {}
        self._events: deque[str] = deque(maxlen=20)
        self._received: deque[tuple[float, int]] = deque()

    @property
    def is_whole(self) -> bool:
        """Return whether every instance has arrived."""
        return bool(self._head) and len(self._instances) >= self._head["instances_known"]

    def take(self, message: Mapping[str, Any]) -> None:
        """Take the next message; a hello begins from scratch."""
        if message["kind"] == "hello":
            self.__init__()  # type: ignore[misc]
            self.has_begun, self._hello = True, message
            return
        self._head = message
        for values in message.get("classes", ()):
            self._classes[values[0]] = ClassRow(*values)
        for values in message.get("instances", ()):
            row = InstanceRow(*values)
            self._instances[row.instance] = row
            if row.state == GONE:
                del self._instances[row.instance]
                self._loads.pop(row.instance, None)
        for values in message.get("loads", ()):
            self._loads[values[0]] = LoadRow(*values)
        self._events.extend(f"{event[0]:8.1f} s  {event[3]}" for event in message.get("events", ()))
        self._received.append((message["at_s"], sum(sum(row[1:7]) for row in self._classes.values())))
        while self._received[0][0] < message["at_s"] - RATE_WINDOW_S:
            self._received.popleft()

    # -- text -------------------------------------------------------------------------------------------

    def line(self) -> str:
        """All of it in one line."""
        parts = [
            f"{self._head['at_s']:.0f} s",
            f"in flight {self._head['in_flight']}{self._elsewhere()}",
            f"{self._rate():.1f} requests/s",
        ]
        for name in ("short", "long"):
            row = self._classes[name]
            parts.append(
                f"{name} TTFT P50 {_seconds(row.ttft_p50_s)} P90 {_seconds(row.ttft_p90_s)} "
                f"answered {row.ended} failed {row.failed}"
            )
        parts.append(f"ready {self._ready()} of {len(self._instances)}")
        return "; ".join(parts)

    def _elsewhere(self) -> str:
        """Return what other processes report to be in flight."""
        elsewhere = self._head.get("elsewhere")
        return f" here, {elsewhere['in_flight']:,} elsewhere" if elsewhere else ""

    def screen(self, columns: int, rows: int, has_colours: bool) -> list[str]:
        """Return at most `rows` lines of at most `columns` characters; instances that do not fit are counted."""
        paint = _Paint(columns, has_colours)
        if not self.has_begun:
            return [paint.line(("waiting for the router", ""))]
        lines = [
            paint.line(("sglang-ext live top", "bold"), (f"  {self._hello['name']}", ""), ("   Ctrl-C ends", "muted")),
            paint.line(
                (f"in flight {self._head.get('in_flight', 0):,}{self._elsewhere()}   ", ""),
                (f"{self._rate():.1f} requests/s   ", ""),
                (f"{self._ready()} of {len(self._instances)} instances ready", ""),
            ),
            "",
            paint.line(
                (f"{'':<8}" + "".join(f"{name:>11}" for name in _STAGES) + f"{'TTFT P50':>11}{'P90':>10}", "muted")
            ),
        ]
        lines += [self._class_line(paint, name) for name in ("short", "long", "unknown") if name in self._classes]
        heading = f"{'INSTANCE':<22} {'POOL':<7}{'STATE':<11}{'BUSY':<{BAR + 6}}"
        heading += f"{'QUEUE S/L':>10}{'IN FLIGHT':>11}{'TOKENS':>10}{'KV':>6}"
        lines += ["", paint.line((heading, "muted"))]
        events = list(self._events)[-3:]
        place = max(1, rows - len(lines) - (len(events) + 1 if events else 0) - 1)
        numbers = sorted(self._instances, key=self._place)
        out_first = sorted(numbers, key=lambda number: self._instances[number].state == "ready")
        shown = numbers if len(numbers) <= place else out_first[:place]
        lines += [self._instance_line(paint, number) for number in shown]
        if len(shown) < len(numbers):
            lines.append(paint.line((f"and {len(numbers) - len(shown)} more", "muted")))
        if events:
            lines += ["", *(paint.line((event, "")) for event in events)]
        return lines[:rows]

    def _place(self, number: int) -> tuple[int, int]:
        """Pools in their order, one of another version behind them."""
        pool = self._instances[number].pool
        return (POOLS.index(pool) if pool in POOLS else len(POOLS)), number

    def _class_line(self, paint: _Paint, name: str) -> str:
        row = self._classes[name]
        counts = "".join(f"{getattr(row, stage):>11,}" for stage in _STAGES)
        is_late = row.ttft_p90_s is not None and row.objective_s is not None and row.ttft_p90_s > row.objective_s
        late = f"  over {_seconds(row.objective_s)}" if is_late else ""
        return paint.line(
            (f"{name:<8}", name),
            (counts, ""),
            (f"{_seconds(row.ttft_p50_s):>11}{_seconds(row.ttft_p90_s):>10}", "bad" if is_late else ""),
            (late, "bad"),
        )

    def _instance_line(self, paint: _Paint, number: int) -> str:
        row, load = self._instances[number], self._loads.get(number)
        pieces = [
            (f"{row.name[:22]:<22} {row.pool:<7}", ""),
            (f"{row.state[:10]:<11}", "ok" if row.state == "ready" else "bad"),
        ]
        reason = (f"  {row.reason}" if row.reason else "", "bad")
        if load is None:
            return paint.line(*pieces, reason)
        short, long = load.short_busy, load.long_busy
        if short is None or long is None:
            pieces.append((f"{'':<{BAR + 6}}", ""))
        else:
            filled = [min(BAR, round(BAR * short)), 0]
            filled[1] = min(BAR - filled[0], round(BAR * long))
            left = BAR - sum(filled)
            pieces += [("=" * filled[0], "short"), ("#" * filled[1], "long"), ("." * left, "muted")]
            pieces.append((f"{min(1.0, short + long):>5.0%} ", ""))
        queue = "" if load.short_queued is None else f"{load.short_queued}/{load.long_queued}"
        kv = "" if load.kv_used is None else f"{load.kv_used:.0%}"
        pieces.append((f"{queue:>10}{load.in_flight:>11,}{_brief(load.pending_tokens):>10}{kv:>6}", ""))
        return paint.line(*pieces, reason)

    def _ready(self) -> int:
        return sum(row.state == "ready" for row in self._instances.values())

    def _rate(self) -> float:
        if len(self._received) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._received[0], self._received[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


class _Paint:
    """Pieces of text with styles into lines of a width; what a stream brings cannot move the cursor."""

    def __init__(self, columns: int, has_colours: bool) -> None:
        self._columns = columns
        self._has_colours = has_colours

    def line(self, *pieces: tuple[str, str]) -> str:
        left, parts = self._columns, []
        for text, style in pieces:
            shown = "".join(letter if letter.isprintable() else "?" for letter in text)[:left]
            left -= len(shown)
            code = _COLOURS.get(style, "") if self._has_colours else ""
            parts.append(f"\x1b[{code}m{shown}\x1b[0m" if code and shown else shown)
        return "".join(parts).rstrip()


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.0f} ms" if value < 0.9995 else f"{value:.2f} s"


def _brief(tokens: int) -> str:
    return f"{tokens / 1000:.0f} k" if tokens >= 10_000 else f"{tokens:,}"


def _fail(message: str, status: int) -> int:
    print(f"sglang-ext live top: {message}", file=sys.stderr)
    return status
