"""Reads large request bodies in another process, so that other requests do not wait meanwhile.

A body of tens of megabytes takes a second and more to parse, under the interpreter's lock all the time, so that
a thread would not help. The processes stay for the next body; a body that is large but simple, one long text say,
is not worth the way there and back.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import IO, cast

from sglang_ext_router.request.prepared_request import ReadBody, read_body
from sglang_ext_router.request.prompt import BadRequestError

logger = logging.getLogger(__name__)

SMALL_BYTES = 512 << 10  # read at once: 10 ms at worst
SIMPLE_BYTES = 8 << 20  # read at once if it holds few values
SIMPLE_VALUES = 100_000
SAMPLES, SAMPLE_BYTES = 128, 512
MAX_VALUES = 8_000_000  # more are refused: each takes up to 100 bytes of memory
MAX_PROCESSES = 2
DEADLINE_S = 30
MAX_KEPT_KIB = 512 << 10  # a process that has used more memory ends with its answer
_COMMAND = "from sglang_ext_router.request.body_reader import serve_stdin; serve_stdin()"
_ANSWER_HEAD = struct.Struct("<Q?")  # length of what follows; whether the process ends behind it

Outcome = ReadBody | BadRequestError | None


def is_read_at_once(raw: bytes | bytearray, draw: Callable[[], float]) -> bool:
    """Return whether this body can be read on the event loop, as that takes at most 10 ms.

    Its values are counted in samples, evenly spread from where `draw` says, in [0, 1): counting them all would take as
    long as parsing one long text. A part that is dense in values and long enough to matter cannot hide between them.
    """
    size = len(raw)
    if size <= SMALL_BYTES:
        return True
    if size > SIMPLE_BYTES:
        return False
    step = size // SAMPLES
    values = 0
    for start in range(int(draw() * (step - SAMPLE_BYTES)), size, step):
        end = start + SAMPLE_BYTES
        values += raw.count(b",", start, end) + raw.count(b"[", start, end) + raw.count(b"{", start, end)
    return values * step <= SIMPLE_VALUES * SAMPLE_BYTES


def count_values(raw: bytes | bytearray) -> int:
    """Return an upper bound of the number of values in JSON text; commas and brackets in strings count too."""
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


class BodyReader:
    """Reads bodies for one router process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._threads = ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="read-body")  # which only wait
        self._idle: list[subprocess.Popen[bytes]] = []
        self._all: set[subprocess.Popen[bytes]] = set()
        self._is_stopped = False

    def read(
        self, path: bytes, raw: bytes | bytearray, has_hints: bool, on_read: Callable[[Outcome], None]
    ) -> Future[Outcome]:
        """Call `on_read` later, on the loop, with the result of `read_body`; None: the body cannot be read.

        The future that is returned may be cancelled when its request is given up.
        """
        future = self._threads.submit(self._ask, path, raw, has_hints)
        future.add_done_callback(partial(self._deliver, on_read))
        return future

    async def stop(self) -> None:
        """End the processes; `on_read` is not called for bodies that are being read."""
        self._is_stopped = True
        while self._idle:
            self._end(self._idle.pop())
        for process in tuple(self._all):
            process.kill()
        await self._loop.run_in_executor(None, partial(self._threads.shutdown, cancel_futures=True))

    def _deliver(self, on_read: Callable[[Outcome], None], future: Future[Outcome]) -> None:
        if future.cancelled() or self._is_stopped or self._loop.is_closed():
            return
        error = future.exception()
        if error is not None:
            logger.error("a large body could not be read: %s", error)
        self._loop.call_soon_threadsafe(on_read, None if error is not None else future.result())

    def _ask(self, path: bytes, raw: bytes | bytearray, has_hints: bool) -> Outcome:
        """Run in a thread, which waits for the other process."""
        try:
            process = self._idle.pop()
        except IndexError:  # asking first would leave time for the other thread to take it
            process = self._start()
        is_kept = False
        try:
            to_process, answer = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
            pickle.dump((path, has_hints, len(raw)), to_process)
            to_process.write(raw)
            to_process.flush()
            size, is_last = _ANSWER_HEAD.unpack(answer.read(_ANSWER_HEAD.size))
            outcome: ReadBody | tuple[str, str | None] = pickle.loads(answer.read(size))
            is_kept = not is_last and not self._is_stopped
        except (OSError, EOFError, struct.error, pickle.UnpicklingError) as error:
            if not self._is_stopped:
                logger.error("the process that reads large bodies has ended: %s", error)
            return None
        finally:
            if is_kept:
                self._idle.append(process)
            else:
                self._end(process)
        if not isinstance(outcome, ReadBody):
            return BadRequestError(*outcome)
        if not outcome.clean.raw:  # the body as it came
            outcome = outcome._replace(clean=outcome.clean._replace(raw=raw))
        return outcome

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._all.add(process)
        if self._is_stopped:  # meanwhile
            process.kill()
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._all.discard(process)
        process.kill()
        for pipe in (process.stdin, process.stdout):
            try:
                cast(IO[bytes], pipe).close()
            except OSError:
                pass  # what could not be written to it any more
        process.wait()


def serve_stdin() -> None:
    """Run as the other process: read bodies from standard input until it ends, answer each on standard output."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            path, has_hints, size = pickle.load(requests)
        except EOFError:
            return
        raw = requests.read(size)
        signal.alarm(DEADLINE_S)
        answer = pickle.dumps(_outcome(path, raw, has_hints), pickle.HIGHEST_PROTOCOL)
        signal.alarm(0)
        del raw
        is_last = _resident_kib() > MAX_KEPT_KIB
        answers.write(_ANSWER_HEAD.pack(len(answer), is_last))
        answers.write(answer)
        answers.flush()
        if is_last:
            return


def _resident_kib() -> int:
    """Return the memory of this process now. `getrusage` reports the maximum, including that before the fork."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * (resource.getpagesize() >> 10)


def _outcome(path: bytes, raw: bytes | bytearray, has_hints: bool) -> ReadBody | tuple[str, str | None]:
    """Read the body; leave out what the router has already or does not need. Return the parts of an error."""
    try:
        values = count_values(raw)
        if values > MAX_VALUES:
            raise BadRequestError(f"the body has up to {values} values, more than {MAX_VALUES}")
        body = read_body(path, raw, has_hints)
    except BadRequestError as error:
        return str(error), error.param
    clean = body.clean._replace(raw=b"") if body.clean.raw == raw else body.clean
    # Its texts are for a tokenizer, should the length class be in doubt; for this long a prompt the estimate is taken.
    return body._replace(clean=clean, prompt=body.prompt._replace(texts=()))
