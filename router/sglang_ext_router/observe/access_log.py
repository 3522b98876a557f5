"""One line of JSON per request, in a file or on standard output (`--access-log`).

A thread makes and writes the lines: neither a slow disk nor a stalled reader delays a request. What cannot
be written is dropped and counted. The file is opened again when it has been renamed or removed, and on SIGHUP.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from datetime import UTC, datetime
from typing import NamedTuple

import orjson

logger = logging.getLogger(__name__)

STANDARD_OUTPUT = "-"
MAX_PENDING = 20_000  # lines that wait for the thread; further ones are dropped
MAX_TEXT_CHARACTERS = 1000  # of a path or an error: a client may have written them
MAX_WRITE_BYTES = 64 << 10
# Several processes write into one pipe: pieces up to this size do not mix (POSIX, PIPE_BUF).
MAX_PIPE_BYTES = select.PIPE_BUF
FLUSH_S = 0.2
RETRY_S = 1.0
COMPLAIN_S = 60.0
CLOSE_TIMEOUT_S = 2.0


class AccessEntry(NamedTuple):
    """One line; None and empty texts are left out. Times are in seconds from the request's arrival."""

    path: str
    status: int  # as in `requests_total`: 499 where the client left
    outcome: str
    total_s: float
    request_id: str = ""
    client: str = ""  # address and port
    method: str = "POST"
    tenant: str = ""
    model: str = ""
    length_class: str | None = None
    stream: bool | None = None
    sequences: int | None = None
    prompt_tokens_estimated: int | None = None  # of the longest prompt
    cached_tokens_estimated: int | None = None
    decode_cached_tokens_estimated: int | None = None  # of a decode instance that keeps prefixes
    prompt_tokens: int | None = None  # as the instance reports
    output_tokens: int | None = None
    used_prompt_tokens: int | None = None  # as the tenant is charged
    used_output_tokens: int | None = None
    prefill: str | None = None  # URLs of the last attempt's instances
    decode: str | None = None
    attempts: int | None = None
    queued_s: float | None = None
    prefilled_s: float | None = None
    first_byte_s: float | None = None
    error: str = ""


class AccessLog:
    """Lines of JSON for one target; `add` may be called from the event loop, and returns at once.

    `counts` holds the number of lines that were `written`, that the target did not take (`failed`), or not in time
    (`overflow`). OSError where the file cannot be opened.
    """

    def __init__(self, target: str) -> None:
        self._path = None if target == STANDARD_OUTPUT else target
        self.counts = {"written": 0, "failed": 0, "overflow": 0}
        self._pending: deque[tuple[float, AccessEntry]] = deque()
        self._file = sys.stdout.fileno() if self._path is None else _open(self._path)
        self._max_bytes = MAX_WRITE_BYTES if stat.S_ISREG(os.fstat(self._file).st_mode) else MAX_PIPE_BYTES
        self._is_open = True
        self._is_within_line = False
        self._wants_reopening = False
        self._is_stopping = False
        self._complained_s = float("-inf")
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def add(self, entry: AccessEntry) -> None:
        """Have a line written; dropped where too many wait already."""
        if len(self._pending) >= MAX_PENDING:
            self.counts["overflow"] += 1
            return
        if len(entry.path) > MAX_TEXT_CHARACTERS or len(entry.error) > MAX_TEXT_CHARACTERS:
            entry = entry._replace(path=entry.path[:MAX_TEXT_CHARACTERS], error=entry.error[:MAX_TEXT_CHARACTERS])
        self._pending.append((time.time(), entry))

    def add_refusal(self, transport: asyncio.BaseTransport, target: bytes, status: int, message: str) -> None:
        """Have a line written for a request that its connection refused."""
        path = target.partition(b"?")[0].decode("latin-1")
        self.add(AccessEntry(path, status, "error_before", 0.0, client=peer_of(transport), method="", error=message))

    def reopen(self) -> None:
        """Open the file again: it has been renamed."""
        self._wants_reopening = True
        self._wake.set()

    def close(self) -> None:
        """Write what waits, for at most `CLOSE_TIMEOUT_S`."""
        self._is_stopping = True
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    # -- the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            self._flush()
        self._flush()
        if self._path is not None and self._is_open:
            os.close(self._file)

    def _flush(self) -> None:
        """Write all that waits."""
        self._follow_file()
        lines: list[bytes] = []
        size = 0
        while self._pending:
            try:
                line = _line(*self._pending.popleft())
            except (TypeError, ValueError):  # a text that cannot be encoded
                self.counts["failed"] += 1
                continue
            if size + len(line) > self._max_bytes and lines:
                self._write(lines)
                lines, size = [], 0
            lines.append(line)
            size += len(line)
        if lines:
            self._write(lines)

    def _follow_file(self) -> None:
        """Open the file again if its name is another file's by now, or it could not be opened before."""
        if self._path is None:
            return
        wants, self._wants_reopening = self._wants_reopening, False
        if self._is_open and not wants:
            try:
                named, held = os.stat(self._path), os.fstat(self._file)
                if (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino):
                    return
            except FileNotFoundError:
                pass
            except OSError as error:
                self._complain(error)
                return
        try:
            opened = _open(self._path)
        except OSError as error:
            self._complain(error)  # what is open stays in use
            return
        if self._is_open:
            os.close(self._file)
        self._file, self._is_open, self._is_within_line = opened, True, False

    def _write(self, lines: list[bytes]) -> None:
        end_of_last = b"\n" if self._is_within_line else b""
        data = b"".join((end_of_last, *lines))
        view = memoryview(data)
        try:
            while view:
                try:
                    view = view[os.write(self._file, view) :]
                except BlockingIOError:
                    waiting = select.poll()  # select() takes no file number beyond 1023
                    waiting.register(self._file, select.POLLOUT)
                    waiting.poll(RETRY_S * 1000)
                    if self._is_stopping:
                        raise
        except OSError as error:
            # A line that was begun is ended before the next one, so that only one is lost to a reader.
            written = len(data) - len(view)
            self._is_within_line = data[written - 1 : written] != b"\n" if written else self._is_within_line
            whole = max(0, data[:written].count(b"\n") - len(end_of_last))
            self.counts["written"] += whole
            self.counts["failed"] += len(lines) - whole
            self._complain(error)
            return
        self._is_within_line = False
        self.counts["written"] += len(lines)

    def _complain(self, error: OSError) -> None:
        now_s = time.monotonic()
        if now_s - self._complained_s >= COMPLAIN_S:
            self._complained_s = now_s
            logger.warning("access log: %s; lines are dropped until it can be written", error.strerror or error)


def peer_of(transport: asyncio.BaseTransport) -> str:
    """Return address and port of a connection's other end; empty where they are not known."""
    peer = transport.get_extra_info("peername")
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) and len(peer) >= 2 else ""


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o640)


def _line(ended_s: float, entry: AccessEntry) -> bytes:
    fields: dict[str, object] = {
        "time": datetime.fromtimestamp(ended_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    }
    for name, value in zip(AccessEntry._fields, entry, strict=True):
        if value is not None and value != "":
            fields[name] = round(value, 6) if isinstance(value, float) else value
    return orjson.dumps(fields) + b"\n"
