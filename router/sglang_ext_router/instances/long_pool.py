"""The status of the long pool's coordinator, polled and kept for GET /pools.

No request waits for this: a coordinator that is away, slow or says nonsense is shown as such and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from sglang_ext.live.decide.messages import PromptRow
from sglang_ext.live.decide.view import SeenSpan
from sglang_ext.live.timeline import TimelineError, timeline_of
from sglang_ext.types import LengthClass

logger = logging.getLogger(__name__)

STATUS_PATH = "/status"
MAX_STATUS_BYTES = 4 << 20
CLOCK_JITTER_S = 0.25  # less is how long an answer was under way
SHOWN_REQUESTS = 20  # that have ended
ASKED_REQUESTS = 50  # the same, for spans of traced requests, too
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
        self.answer: object = None  # the latest, as the coordinator gave it
        self.on_answer: Callable[[Mapping[str, Any]], None] = lambda answer: None  # is given each
        self.clock_offset_s: float | None = None  # added to its times to get those of `clock`
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

    @property
    def read_s(self) -> float | None:
        """Return when the latest answer came, on the monitor's clock."""
        return self._read_s

    @property
    def is_answering(self) -> bool:
        """Return whether the latest answer was a usable status."""
        return self._problem is None

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
            async with session.get(self.url + STATUS_PATH, params={"recent": ASKED_REQUESTS}) as reply:
                reply.raise_for_status()
                body = await reply.content.read(MAX_STATUS_BYTES + 1)
                while not reply.content.at_eof() and len(body) <= MAX_STATUS_BYTES:
                    body += await reply.content.read(MAX_STATUS_BYTES + 1 - len(body))
            if len(body) > MAX_STATUS_BYTES:
                raise StatusError(f"more than {MAX_STATUS_BYTES} bytes")
            answer = orjson.loads(body)
            self._status = read_status(answer)
            self.answer = answer
            self._follow_clock(answer.get("now_s"))
            self.on_answer(answer)
            problem = None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            problem = (str(error) or type(error).__name__).partition("\n")[0]
        if problem is None:
            self._read_s = self._clock()
        if (problem is None) != (self._problem is None):
            logger.info("coordinator %s %s", self.url, "answers" if problem is None else f"is away: {problem}")
        self._problem = problem

    def _follow_clock(self, now_s: object) -> None:
        """Keep the offset, so that what is reported twice has the same times, until the clocks show another one."""
        if not isinstance(now_s, int | float):
            return  # nothing can be placed in time
        offset_s = self._clock() - now_s
        known_s = self.clock_offset_s
        if known_s is None or not known_s - CLOCK_JITTER_S < offset_s < known_s + CLOCK_JITTER_S:
            self.clock_offset_s = offset_s


_NOT_CACHED = ("streamed", "cancelled", "owner_lost")
_NOTHING = ("model", "arrivals_per_s", "members", "requests", "recent")


def read_status(answer: object) -> dict[str, Any]:
    """Return the part of a coordinator's /status that is shown. Raises StatusError, naming what is wrong in it."""
    status = _object(answer, "the answer")
    members = [_object(entry, "a member") for entry in _list(status, "members")]
    former = [_object(entry, "a former member") for entry in _list(status, "former_members")]
    names = {str(member.get("instance")): str(member.get("name")) for member in (*former, *members)}
    recent = _list(status, "recent")[-SHOWN_REQUESTS:]
    return {
        "model": status.get("model"),
        "arrivals_per_s": _rounded(status.get("arrivals_per_s")),
        "members": [
            {
                "name": str(member.get("name")),
                "node": member.get("node"),
                "backlog_s": _rounded(member.get("backlog_s")),
                "free_kv_tokens": member.get("free_kv_tokens"),
                "held_tokens": member.get("held_tokens"),
                "is_ready": member.get("is_ready"),
            }
            for member in members
        ],
        "requests": [_describe_request(entry, names) for entry in _list(status, "requests")],
        "recent": [_describe_request(entry, names) for entry in reversed(recent)],
    }


def cached_rooms(answer: Mapping[str, Any]) -> Iterator[tuple[int, bool]]:
    """Rooms of prompts that have left the long pool, and whether their own instance has them in its prefix cache.

    Of a prompt that could not be shared nothing is known but that its own instance computes it, as any other.
    """
    for entry in _list(answer, "ended_rooms" if "ended_rooms" in answer else "recent"):
        prompt = _object(entry, "a request")
        room, outcome = prompt.get("room"), prompt.get("outcome")
        if isinstance(room, int):
            yield room, outcome not in _NOT_CACHED


def pool_prompts(answer: object, offset_s: float) -> list[PromptRow]:
    """Return the prompts in a coordinator's /status, the ones under way last; `offset_s` is added to its times.

    Empty where the status is none.
    """
    try:
        status = _object(answer, "the answer")
        members = (*_list(status, "former_members"), *_list(status, "members"))
        names = {str(_object(member, "a member").get("instance")): str(member.get("name")) for member in members}
        under_way = _list(status, "requests")
        recent = _list(status, "recent")[-SHOWN_REQUESTS:]
        return [_prompt(_object(entry, "a request"), names, offset_s) for entry in (*recent, *under_way)]
    except (StatusError, KeyError, AttributeError, TypeError, ValueError):
        return []


def _prompt(entry: Mapping[str, Any], names: Mapping[str, str], offset_s: float) -> PromptRow:
    chunks = [
        (
            int(step["new_tokens"]),
            [names.get(str(member), str(member)) for member in step["members"]],
            float(step["ordered_s"]) + offset_s,
            None if step["ended_s"] is None else float(step["ended_s"]) + offset_s,
        )
        for step in _list(entry, "steps")
        if step.get("kind") == "chunk" and not step.get("has_failed")
    ]
    planned = [
        (int(chunk["new_tokens"]), [names.get(str(member), str(member)) for member in chunk["members"]])
        for chunk in entry.get("planned", ())
    ]
    ended_s = entry.get("ended_s")
    return PromptRow(
        int(entry.get("request", 0)),
        names.get(str(entry.get("owner")), str(entry.get("owner"))),
        int(entry.get("tokens", 0)),
        int(entry.get("cached_tokens", 0)),
        float(entry.get("offered_s", 0.0)) + offset_s,
        None if ended_s is None else float(ended_s) + offset_s,
        entry.get("outcome"),
        chunks,
        planned,
    )


def pool_spans(answer: object, offset_s: float) -> list[SeenSpan]:
    """Return what the members of a long pool did for the latest prompts; `offset_s` as for `pool_prompts`."""
    try:
        timeline = timeline_of(answer, SHOWN_REQUESTS)
    except TimelineError:
        return []
    start_s = timeline.began_s + offset_s
    return [
        SeenSpan(
            bar.instance,
            bar.activity.value,
            start_s + bar.start_s,
            start_s + bar.end_s,
            LengthClass.LONG.value,
            f"{timeline.requests[bar.request].tokens:,} tokens of {timeline.requests[bar.request].owner}",
        )
        for bar in timeline.bars
    ]


def _describe_request(entry: object, names: Mapping[str, str]) -> dict[str, Any]:
    request = _object(entry, "a request")
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
