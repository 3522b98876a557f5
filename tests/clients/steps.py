"""The steps of a client's script: each calls the library and asserts on what the library returns.

    python tests/clients/openai_client.py http://127.0.0.1:30000 MODEL

Run with the Python of the clients' own environment. The last line of output is JSON: the steps by name, null where a
step passed and the end of its traceback where it failed.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import re
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

QUESTION = "What is a parser?"
MAX_TOKENS = 12
# More than the context length of the tests' model.
TOO_LONG = "What is a parser? " * 2000
# Long enough that a stream which is closed early has most of its tokens before it.
ABORTED_TOKENS = 1500
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}


def run(*steps: Callable[[], Any]) -> None:
    """Run all steps and print how each ended."""
    loop = asyncio.new_event_loop()  # one for all steps, as clients keep connections
    results = {}
    for step in steps:
        try:
            if inspect.iscoroutinefunction(step):
                loop.run_until_complete(step())
            else:
                step()
            results[step.__name__] = None
        except BaseException:  # the next step runs all the same
            results[step.__name__] = traceback.format_exc(limit=-3)[-3000:]
    print(json.dumps(results))


def url() -> str:
    """Return the router's address, without a path."""
    return sys.argv[1]


def model() -> str:
    """Return the name under which the model is served."""
    return sys.argv[2]


def aborted_count() -> int:
    """Return how many requests the router has aborted because their clients had left."""
    with urllib.request.urlopen(f"{url()}/metrics") as reply:
        found = re.search(r'aborts_total{reason="client_gone"} (\d+)', reply.read().decode())
    return 0 if found is None else int(found[1])


def wait_aborted(before: int) -> None:
    """Return when the router has aborted a request, more than the `before` that it had aborted when asked first."""
    deadline_s = time.monotonic() + 20.0
    while aborted_count() <= before:
        assert time.monotonic() < deadline_s, "the router did not notice that the client had left"
        time.sleep(0.05)


def error_of(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any]) -> Any:
    """Return the error of a kind with which a call ends; AssertionError where it ends without."""
    try:
        answer = call()
    except kind as error:
        return error
    raise AssertionError(f"not refused: {answer}")


def read_some(items: Iterable[object], count: int = 3) -> None:
    """Read the first few items of a stream."""
    read = list(itertools.islice(items, count))
    assert len(read) == count
