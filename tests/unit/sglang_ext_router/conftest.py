"""Runs `async def` tests on a loop of their own; what nobody handled or somebody logged as an error fails them.

Tests run on uvloop, as the router does; a parameter `event_loop` of "asyncio" asks for the standard loop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop

TEST_TIMEOUT_S = 30.0

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


class _Complaints(logging.Handler):
    """Collects what must not be logged: errors of the router, warnings of the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        floor = logging.WARNING if record.name == "asyncio" else logging.ERROR
        if record.levelno >= floor:
            self.messages.append(logging.Formatter("%(name)s: %(message)s").format(record))


@pytest.fixture(autouse=True)
def _no_errors_logged() -> Iterator[None]:
    complaints = _Complaints()
    logging.getLogger().addHandler(complaints)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(complaints)
    assert complaints.messages == []


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    run_on_loop(test(**arguments), arguments.get("event_loop", "uvloop"))
    return True


def run_on_loop(test: Any, loop_name: str = "uvloop") -> None:
    """Run a coroutine; AssertionError for exceptions that reached the event loop."""
    unhandled: list[dict[str, Any]] = []

    async def guarded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await test

    with asyncio.Runner(loop_factory=LOOPS[loop_name]) as runner:
        try:
            runner.run(guarded())
        finally:
            for context in unhandled:
                error = context.get("exception")
                if error is not None:
                    raise AssertionError(f"unhandled on the loop: {context['message']}") from error
    assert unhandled == []
