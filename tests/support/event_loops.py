"""Event loops for tests on which nothing goes wrong unnoticed."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

TEST_TIMEOUT_S = 30.0

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.SelectorEventLoop}


class Complaints(logging.Handler):
    """Collects what must not be logged: errors of anybody, warnings of the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []  # without tracebacks

    def emit(self, record: logging.LogRecord) -> None:
        floor = logging.WARNING if record.name == "asyncio" else logging.ERROR
        if record.levelno >= floor:
            self.messages.append(f"{record.name}: {record.getMessage()}")


@contextmanager
def guarded_runner(loop_name: str = "uvloop") -> Iterator[asyncio.Runner]:
    """A loop; AssertionError at its end if an unhandled exception reached it."""
    unhandled: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=LOOPS[loop_name]) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        try:
            yield runner
        finally:
            for context in unhandled:
                if (error := context.get("exception")) is not None:
                    raise AssertionError(f"unhandled on the loop: {context['message']}") from error
    assert unhandled == []


async def within_limit(coroutine: Coroutine[Any, Any, T]) -> T:
    """A test hangs for `TEST_TIMEOUT_S` at most."""
    async with asyncio.timeout(TEST_TIMEOUT_S):
        return await coroutine


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorator: run a coroutine test on a guarded loop of its own, where no conftest does."""

    @functools.wraps(test)
    def wrapped(*args: Any, **options: Any) -> None:
        with guarded_runner() as runner:
            runner.run(within_limit(test(*args, **options)))

    return wrapped


class Stage:
    """A loop that lives as long as the test, for property tests whose examples share one cluster."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._open: list[AbstractAsyncContextManager[Any]] = []

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(within_limit(coroutine))

    def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enter a context that is left after the last example."""

        async def entered() -> T:
            return await context.__aenter__()

        value = self.run(entered())
        self._open.append(context)
        return value

    def leave(self) -> None:
        """Leave what was entered, the last first."""

        async def left(context: AbstractAsyncContextManager[Any]) -> None:
            await context.__aexit__(None, None, None)

        for context in reversed(self._open):
            self.run(left(context))
