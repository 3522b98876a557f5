"""What the coordinator of the long pool says of it, asked every now and then and kept for GET /pools.

Requests never wait for it: a coordinator that is away, slow or says nonsense is shown as such and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import orjson

logger = logging.getLogger(__name__)

STATUS_PATH = "/status"
MAX_STATUS_BYTES = 4 << 20
SHOWN_REQUESTS = 20  # that have ended
_TIMES = ("wait_s", "compute_s", "ring_s", "rebalance_s", "collect_s", "failed_s", "transfer_s", "exposed_transfer_s")


class StatusError(ValueError):
    """An answer that cannot be used; the text says why."""


class LongPoolMonitor:
    """The latest answer of one coordinator."""

    def __init__(self, url: str, interval_s: float, timeout_s: float, clock: Callable[[], float]) -> None:
        self.url = url
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._status: dict[str, Any] | None = None
        self._read_s: float | None = None
        self._problem: str | None = "not asked yet"

    def start(self) -> None:
        """Begin to ask."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def describe(self) -> dict[str, Any]:
        """The long pool as JSON; `problem` is null while it answers, else the rest is its last word."""
        age_s = None if self._read_s is None else round(self._clock() - self._read_s, 1)
        head = {"coordinator": self.url, "problem": self._problem, "age_s": age_s}
        return head | (self._status or dict.fromkeys(_NOTHING))

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            while True:
                await self._ask(session)
                await asyncio.sleep(self._interval_s)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        try:
            async with session.get(self.url + STATUS_PATH) as reply:
                reply.raise_for_status()
                body = await reply.content.read(MAX_STATUS_BYTES + 1)
                while not reply.content.at_eof() and len(body) <= MAX_STATUS_BYTES:
                    body += await reply.content.read(MAX_STATUS_BYTES + 1 - len(body))
            if len(body) > MAX_STATUS_BYTES:
                raise StatusError(f"more than {MAX_STATUS_BYTES} bytes")
            self._status = read_status(orjson.loads(body))
            problem = None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            problem = (str(error) or type(error).__name__).partition("\n")[0]
        if problem is None:
            self._read_s = self._clock()
        if (problem is None) != (self._problem is None):
            logger.info("coordinator %s %s", self.url, "answers" if problem is None else f"is away: {problem}")
        self._problem = problem


_NOTHING = ("model", "epoch", "is_connected", "arrivals_per_s", "members", "requests", "recent")


def read_status(answer: object) -> dict[str, Any]:
    """What people want to see of a coordinator's /status. StatusError names what is not as it should be."""
    status = _object(answer, "the answer")
    members = [_object(one, "a member") for one in _list(status, "members")]
    former = [_object(one, "a former member") for one in _list(status, "former_members")]
    names = {str(one.get("instance")): str(one.get("name")) for one in (*former, *members)}
    recent = _list(status, "recent")[-SHOWN_REQUESTS:]
    return {
        "model": status.get("model"),
        "epoch": status.get("epoch"),
        "is_connected": status.get("is_connected"),
        "arrivals_per_s": _rounded(status.get("arrivals_per_s")),
        "members": [
            {
                "name": str(one.get("name")),
                "node": one.get("node"),
                "backlog_s": _rounded(one.get("backlog_s")),
                "free_kv_tokens": one.get("free_kv_tokens"),
                "held_tokens": one.get("held_tokens"),
            }
            for one in members
        ],
        "requests": [_describe_request(one, names) for one in _list(status, "requests")],
        "recent": [_describe_request(one, names) for one in reversed(recent)],
    }


def _describe_request(one: object, names: Mapping[str, str]) -> dict[str, Any]:
    request = _object(one, "a request")
    times = _object(request.get("times"), "times of a request")
    offered_s, ended_s = request.get("offered_s"), request.get("ended_s")
    chunks = [
        {
            "tokens": step.get("new_tokens"),
            "instances": [names.get(str(member), str(member)) for member in _list(step, "members")],
            "seconds": _between(step.get("ordered_s"), step.get("ended_s")),
        }
        for step in (_object(step, "a step") for step in _list(request, "steps"))
        if step.get("kind") == "chunk" and not step.get("has_failed")
    ]
    return {
        "owner": names.get(str(request.get("owner")), str(request.get("owner"))),
        "tokens": request.get("tokens"),
        "cached_tokens": request.get("cached_tokens"),
        "chunks": chunks,
        "outcome": request.get("outcome"),
        "seconds": _between(offered_s, ended_s),
        **{name: _rounded(times.get(name)) for name in _TIMES},
    }


def _object(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise StatusError(f"{name} is not an object")
    return value


def _list(fields: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise StatusError(f"{name} is not a list")
    return value


def _between(start: object, end: object) -> float | None:
    return _rounded(end - start) if isinstance(start, int | float) and isinstance(end, int | float) else None


def _rounded(value: object) -> float | None:
    return round(float(value), 4) if isinstance(value, int | float) and math.isfinite(value) else None
