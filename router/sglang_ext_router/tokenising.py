"""Exact token counts, off the event loop, for prompts whose length class is in doubt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

THREADS = 2


class PromptTokeniser:
    """Counts tokens with the model's own tokenizer; the library releases the GIL while it works."""

    def __init__(self, tokenizer_file: Path, loop: asyncio.AbstractEventLoop) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._loop = loop
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenise")

    def count(self, texts: Sequence[str], done: Callable[[list[int] | None], None]) -> None:
        """Call `done` on the event loop with the tokens of each text, None if they cannot be counted."""
        future = self._threads.submit(self._count, tuple(texts))
        future.add_done_callback(partial(self._deliver, done))

    def _count(self, texts: tuple[str, ...]) -> list[int]:
        return [len(encoding.ids) for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def _deliver(self, done: Callable[[list[int] | None], None], future: Future[list[int]]) -> None:
        result = None if future.cancelled() or future.exception() is not None else future.result()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(done, result)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def find_tokenizer_file(*folders: str) -> Path | None:
    """The first tokenizer.json among local model folders."""
    for folder in folders:
        if folder and (file := Path(folder) / "tokenizer.json").is_file():
            return file
    return None
