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


class Tokenisers:
    """Keeps one tokenizer for each file; models may share it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._by_file: dict[Path, PromptTokeniser | None] = {}

    def of(self, folder: str) -> PromptTokeniser | None:
        """Return the tokenizer of a local model folder; None where there is none that can be used."""
        file = Path(folder) / "tokenizer.json"
        if not folder or not file.is_file():
            return None
        if file not in self._by_file:
            self._by_file[file] = None  # tried once
            try:
                self._by_file[file] = PromptTokeniser(file, self._loop)
            except Exception as error:  # the library raises bare Exception
                logger.warning("%s cannot be used, token counts stay estimates: %s", file, error)
        return self._by_file[file]

    def close(self) -> None:
        for tokeniser in self._by_file.values():
            if tokeniser is not None:
                tokeniser.close()
