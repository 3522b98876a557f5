"""Runs `async def` tests on a loop of their own; what is unhandled or logged as an error fails them.

Tests run on uvloop, as the router does; a parameter `event_loop` of "asyncio" asks for the standard loop.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator

import pytest

from support.event_loops import Complaints, Stage, guarded_runner, within_limit


@pytest.fixture(autouse=True)
def complaints() -> Iterator[Complaints]:
    """A test that expects an error takes it out of `messages`."""
    handler = Complaints()
    logging.getLogger().addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger().removeHandler(handler)
    assert handler.messages == []


@pytest.fixture
def stage() -> Iterator[Stage]:
    with guarded_runner() as runner:
        stage = Stage(runner)
        yield stage
        stage.leave()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    with guarded_runner(str(arguments.get("event_loop", "uvloop"))) as runner:
        runner.run(within_limit(test(**arguments)))
    return True
