"""Who did what when in a long pool, from its coordinator's /status: the bars of a Gantt chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple


class TimelineError(ValueError):
    """A status that no timeline can be made of; the text is one line for the user."""


class Activity(StrEnum):
    """What an instance did."""

    REBALANCE = "rebalance"  # moved earlier KV, as far as computing did not hide it
    COMPUTE = "compute"
    RING = "ring"  # waited for keys and values of others
    IDLE = "idle"  # had not begun its part of the step, or had done it before the others
    COLLECT = "collect"  # all KV to the prompt's own instance
    FAILED = "failed"  # a step that came to nothing


class Bar(NamedTuple):
    """One activity of one instance; times in seconds since the timeline begins."""

    instance: str
    request: int  # position in `Timeline.requests`
    activity: Activity
    start_s: float
    end_s: float


class ShownRequest(NamedTuple):
    """One prompt."""

    owner: str
    tokens: int
    plan: str  # such as "1,024 @ 1 -> 1,900 @ 2": tokens of each chunk, and on how many instances
    offered_s: float
    ended_s: float | None  # None: it is under way
    outcome: str | None


class Timeline(NamedTuple):
    """All of it. `losses` says who went when."""

    instances: tuple[str, ...]
    requests: tuple[ShownRequest, ...]
    bars: tuple[Bar, ...]
    losses: tuple[tuple[str, float], ...]


def timeline_of(status: object, most_requests: int = 20) -> Timeline:
    """Return the timeline of the latest prompts that had a step. TimelineError where the status is none."""
    try:
        return _timeline(status, most_requests)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, TimelineError) else str(error)
        raise TimelineError(f"not a coordinator's status ({reason})") from None


def plan_text(chunks: Sequence[tuple[int, int]]) -> str:
    """A plan in one line, from (tokens, instances) of each chunk."""
    return " -> ".join(f"{tokens:,} @ {size}" for tokens, size in chunks)


def chunks_of(request: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(tokens, instances) of the chunks of a request that were computed, from its record in a status."""
    return [
        (int(step["new_tokens"]), len(step["members"]))
        for step in request["steps"]
        if step["kind"] == "chunk" and not step["has_failed"] and step["ended_s"] is not None
    ]


def _timeline(status: Any, most_requests: int) -> Timeline:
    present = {int(one["instance"]): str(one["name"]) for one in status["members"]}
    former = {int(one["instance"]): str(one["name"]) for one in status["former_members"]}
    names = {**former, **present}
    records = [one for one in (*status["recent"], *status["requests"]) if one["steps"]][-most_requests:]
    began_s = min((float(one["offered_s"]) for one in records), default=0.0)
    now_s = float(status["now_s"])
    requests, bars = [], []
    for position, record in enumerate(records):
        ended_s = record["ended_s"]
        requests.append(
            ShownRequest(
                _name(names, record["owner"]),
                int(record["tokens"]),
                plan_text(chunks_of(record)),
                float(record["offered_s"]) - began_s,
                None if ended_s is None else float(ended_s) - began_s,
                record["outcome"],
            )
        )
        for step in record["steps"]:
            bars += _bars_of(step, position, names, began_s, now_s)
    shown = {*present.values(), *(bar.instance for bar in bars)}
    losses = tuple(
        (str(one["name"]), float(one["lost_s"]) - began_s)
        for one in status["former_members"]
        if records and float(one["lost_s"]) >= began_s and one["name"] in shown
    )
    return Timeline(tuple(sorted(shown)), tuple(requests), tuple(bars), losses)


def _bars_of(
    step: Mapping[str, Any], request: int, names: Mapping[int, str], began_s: float, now_s: float
) -> list[Bar]:
    start_s = float(step["ordered_s"]) - began_s
    end_s = (now_s if step["ended_s"] is None else float(step["ended_s"])) - began_s
    times = {int(one["instance"]): one for one in step["member_times"]}
    bars = []
    for member in step["members"]:
        instance = _name(names, member)
        if step["has_failed"]:
            bars.append(Bar(instance, request, Activity.FAILED, start_s, end_s))
        elif step["kind"] == "collect":
            bars.append(Bar(instance, request, Activity.COLLECT, start_s, end_s))
        else:
            bars += _split(instance, request, start_s, end_s, began_s, times.get(int(member)))
    return [bar for bar in bars if bar.end_s > bar.start_s]


def _split(
    instance: str, request: int, start_s: float, end_s: float, began_s: float, times: Mapping[str, Any] | None
) -> list[Bar]:
    """A chunk's bar in parts. When each layer waited is not known: the parts are sums, one after the other."""
    if times is None:
        return [Bar(instance, request, Activity.IDLE, start_s, end_s)]  # it has not answered yet
    parts = (
        (Activity.REBALANCE, float(times["rebalance_s"])),
        (Activity.COMPUTE, float(times["compute_s"])),
        (Activity.RING, float(times["ring_s"])),
    )
    at_s = float(times["began_s"]) - began_s
    bars = [Bar(instance, request, Activity.IDLE, start_s, at_s)]
    for activity, seconds in parts:
        until_s = min(end_s, at_s + seconds)
        bars.append(Bar(instance, request, activity, at_s, until_s))
        at_s = until_s
    return [*bars, Bar(instance, request, Activity.IDLE, at_s, end_s)]


def _name(names: Mapping[int, str], instance: object) -> str:
    return names.get(int(instance), f"instance {instance}")  # type: ignore[call-overload]
