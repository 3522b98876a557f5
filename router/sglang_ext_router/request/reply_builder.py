"""Makes the client's reply from the instances' replies; large ones in another process, so that no request waits.

The log-probabilities of a long prompt with a hundred alternatives at every position are tens of megabytes of JSON.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from functools import partial

import orjson

from sglang_ext_router.request.scores import CompletionForm, build_reply

logger = logging.getLogger(__name__)

MAX_INLINE_BYTES = 128 << 10  # of replies that are made at once: a few milliseconds
MAX_PROCESSES = 2
MAX_PENDING_BYTES = 512 << 20  # of replies that wait for a process or are in one
_COMMAND = "from sglang_ext_router.request.reply_builder import build_from_stdin; build_from_stdin()"
_BAD_REPLY = (ValueError, KeyError, TypeError, IndexError, AttributeError)  # raised for replies of an unexpected shape


class BuildFailure(Enum):
    """The reason why there is no reply."""

    MISMATCH = "the instances' replies do not match"
    OVERLOAD = "too many large replies are being put together; try again later"


class ReplyBuilder:
    """Builds replies for one router process."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_inline_bytes: int = MAX_INLINE_BYTES) -> None:
        self._loop = loop
        self._max_inline_bytes = max_inline_bytes
        self._slots = asyncio.Semaphore(MAX_PROCESSES)
        self._tasks: set[asyncio.Task[None]] = set()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._is_stopped = False
        self._pending_bytes = 0

    def build(
        self,
        form: CompletionForm | None,
        prefill: bytes,
        decode: bytes | None,
        on_built: Callable[[bytes | BuildFailure], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Call `on_built` with the reply's body or the reason why there is none, at once or later.

        A reply that is no longer wanted when its turn comes is not built, and `on_built` is not called.
        """
        size_bytes = len(prefill) + (0 if decode is None else len(decode))
        if size_bytes <= self._max_inline_bytes:
            try:
                body: bytes | BuildFailure = build_reply(form, prefill, decode)
            except _BAD_REPLY:
                body = BuildFailure.MISMATCH
            on_built(body)
            return
        if self._pending_bytes and self._pending_bytes + size_bytes > MAX_PENDING_BYTES:
            on_built(BuildFailure.OVERLOAD)
            return
        self._pending_bytes += size_bytes
        task = self._loop.create_task(self._build_in_process(form, prefill, decode, on_built, is_wanted))
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, size_bytes))

    def _done(self, size_bytes: int, task: asyncio.Task[None]) -> None:
        self._pending_bytes -= size_bytes
        self._tasks.discard(task)

    async def stop(self) -> None:
        """End what is being built."""
        self._is_stopped = True
        for process in tuple(self._processes):
            process.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _build_in_process(
        self,
        form: CompletionForm | None,
        prefill: bytes,
        decode: bytes | None,
        on_built: Callable[[bytes | BuildFailure], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        body: bytes | None = None
        try:
            async with self._slots:
                if not is_wanted():
                    return
                body = await asyncio.to_thread(self._run_process, form, prefill, decode)
        except OSError as error:
            logger.error("no process for a large reply: %s", error)
        finally:
            if is_wanted():
                on_built(BuildFailure.MISMATCH if body is None else body)

    def _run_process(self, form: CompletionForm | None, prefill: bytes, decode: bytes | None) -> bytes | None:
        """Run in a thread, which waits for the other process."""
        if self._is_stopped:
            return None
        sizes = [len(prefill), None if decode is None else len(decode)]
        head = orjson.dumps({"form": None if form is None else list(form), "sizes": sizes})
        with subprocess.Popen(
            [sys.executable, "-c", _COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            self._processes.add(process)
            try:
                body, _ = process.communicate(b"".join((head, b"\n", prefill, decode or b"")))
            finally:
                self._processes.discard(process)
        return body if process.returncode == 0 else None


def build_from_stdin() -> None:
    """Run as the other process: make one reply from standard input; exit with 1 where it cannot be made."""
    head = orjson.loads(sys.stdin.buffer.readline())
    prefill_bytes, decode_bytes = head["sizes"]
    prefill = sys.stdin.buffer.read(prefill_bytes)
    decode = None if decode_bytes is None else sys.stdin.buffer.read(decode_bytes)
    form = None if head["form"] is None else CompletionForm(*head["form"])
    try:
        sys.stdout.buffer.write(build_reply(form, prefill, decode))
    except _BAD_REPLY:
        sys.exit(1)
