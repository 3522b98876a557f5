"""`sglang-ext live timeline`: a Gantt chart of what each instance of a long pool did, from its coordinator's /status.

Of instances with pipeline stages it draws the latest batches on each stage, with the bubbles between them. Of a
recording of the live page it draws the latest requests on their prefill instances, or makes a page that plays it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from sglang_ext.live.recording import Recorded, RecordingError, read_recording, write_page

_STATUS_TIMEOUT_S = 10.0


class TimelineError(ValueError):
    """A status that no timeline can be made of; the text is one line for the user."""


class Activity(StrEnum):
    """Describes what an instance did."""

    REBALANCE = "rebalance"  # moved earlier KV, as far as computing did not hide it
    COMPUTE = "compute"
    RING = "ring"  # waited for keys and values of others
    IDLE = "idle"  # had not begun its part of the step, or had done it before the others
    BUBBLE = "bubble"  # a pipeline stage without a batch, while another one had one
    COLLECT = "collect"  # all KV to the prompt's own instance
    FAILED = "failed"  # a step that came to nothing


_LEGEND_REQUESTS = 8
_HATCHES = {Activity.REBALANCE: "////", Activity.COLLECT: "\\\\\\\\", Activity.FAILED: "xxxx", Activity.BUBBLE: "...."}
_SHADES = {Activity.RING: 0.45, Activity.IDLE: 0.15, Activity.COLLECT: 0.6, Activity.REBALANCE: 0.8}
_LABELS = {
    Activity.COMPUTE: "computes",
    Activity.REBALANCE: "moves earlier KV",
    Activity.RING: "waits in the ring",
    Activity.IDLE: "ordered, not at it",
    Activity.BUBBLE: "bubble",
    Activity.COLLECT: "all KV to its own instance",
    Activity.FAILED: "came to nothing",
}


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
    """All of it. `losses`: which instances were lost, and when; `began_s`: the coordinator's time of its beginning."""

    instances: tuple[str, ...]
    requests: tuple[ShownRequest, ...]
    bars: tuple[Bar, ...]
    losses: tuple[tuple[str, float], ...]
    began_s: float = 0.0


def timeline_of(status: object, max_requests: int = 20) -> Timeline:
    """Return the timeline of the latest prompts that had a step. TimelineError where the status is none."""
    try:
        return _timeline(status, max_requests)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, TimelineError) else str(error)
        raise TimelineError(f"not a coordinator's status ({reason})") from None


def timeline_of_recording(recorded: Recorded, max_requests: int = 20) -> Timeline:
    """The latest requests of a recording that a prefill instance was at.

    Where the recording says when a prefill began, the time before is drawn as ordered and not begun; else all of it
    counts as computing, KV transfer included.
    """
    names = {number: row.name for number, row in recorded.instances.items()}
    shown = [
        request for request in recorded.requests.values() if request.prefill in names and request.sent_s is not None
    ]
    shown = shown[-max_requests:]
    began_s = min((request.received_s for request in shown), default=0.0)
    requests, bars = [], []
    for position, request in enumerate(shown):
        assert request.prefill is not None
        assert request.sent_s is not None
        instance = names[request.prefill]
        end_s = request.prefilled_s if request.prefilled_s is not None else request.ended_s
        if request.started_s is not None and request.first_token_s is not None:
            end_s = request.first_token_s  # its KV leaves while the next one is computed
        until_s = (recorded.end_s if end_s is None else end_s) - began_s
        start_s = (request.sent_s if request.started_s is None else request.started_s) - began_s
        ended_s = None if request.ended_s is None else request.ended_s - began_s
        plan = request.length_class or ""
        requests.append(
            ShownRequest(
                instance,
                request.prompt_tokens,
                plan,
                request.received_s - began_s,
                ended_s,
                request.outcome,
            )
        )
        waiting = Bar(instance, position, Activity.IDLE, request.sent_s - began_s, start_s)
        bars += [
            bar
            for bar in (waiting, Bar(instance, position, Activity.COMPUTE, start_s, until_s))
            if bar.end_s > bar.start_s
        ]
    return Timeline(tuple(sorted({bar.instance for bar in bars})), tuple(requests), tuple(bars), (), began_s)


def timeline_of_stages(statuses: Mapping[str, object], max_batches: int = 20) -> Timeline:
    """The latest batches on the pipeline stages of instances: a lane for each stage, a colour for each batch.

    `statuses` are those of `GET /laps/stages`, by the instance's name. TimelineError where one is none.
    """
    batches: dict[str, list[_StagedBatch]] = {}
    lanes: list[str] = []
    for name, status in statuses.items():
        try:
            found, count = _batches_of(name, status)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise TimelineError(f"not the status of stages ({type(error).__name__}: {error})") from None
        batches[name] = found[-max_batches:]
        lanes += [_lane(name, stage) for stage in range(count)]
    began_s = min((batch.start_s for some in batches.values() for batch in some), default=0.0)
    requests: list[ShownRequest] = []
    bars: list[Bar] = []
    for name, some in batches.items():
        bars += _bubbles(some, len(requests), began_s)
        for position, batch in enumerate(some, len(requests)):
            bars += [
                Bar(_lane(name, stage), position, Activity.COMPUTE, start_s - began_s, end_s - began_s)
                for stage, (start_s, end_s) in batch.stages.items()
            ]
            start_s, end_s = batch.start_s - began_s, batch.end_s - began_s
            requests.append(ShownRequest(name, batch.new_tokens, batch.text, start_s, end_s, None))
    return Timeline(tuple(lanes), tuple(requests), tuple(bars), (), began_s)


class _StagedBatch(NamedTuple):
    """One batch of an instance, and when each stage computed it."""

    instance: str
    new_tokens: int
    text: str
    stages: dict[int, tuple[float, float]]

    @property
    def start_s(self) -> float:
        return min(start_s for start_s, _ in self.stages.values())

    @property
    def end_s(self) -> float:
        return max(end_s for _, end_s in self.stages.values())


def _batches_of(name: str, status: Any) -> tuple[list[_StagedBatch], int]:
    """Return the batches in their order, and the number of stages."""
    batches: dict[int, _StagedBatch] = {}
    for stage in status["stages"]:
        for timed_round in stage["rounds"]:
            requests = int(timed_round["requests"])
            text = f"{requests} prompts" if requests > 1 else f"behind {int(timed_round['prefix_tokens']):,}"
            batch = batches.setdefault(
                int(timed_round["number"]), _StagedBatch(name, int(timed_round["new_tokens"]), text, {})
            )
            batch.stages[int(stage["pp_rank"])] = (float(timed_round["start_s"]), float(timed_round["end_s"]))
    return [batches[number] for number in sorted(batches)], len(status["stages"])


def _bubbles(batches: Sequence[_StagedBatch], first: int, began_s: float) -> list[Bar]:
    """Return where a stage of an instance computed nothing while a batch was on its way; `first`: position of the first
    batch.

    A bubble has the colour of the first batch that was on its way then.
    """
    bars = []
    under_way = _union([(batch.start_s, batch.end_s) for batch in batches])
    for stage in sorted({stage for batch in batches for stage in batch.stages}):
        busy = sorted(batch.stages[stage] for batch in batches if stage in batch.stages)
        for start_s, end_s in _without(under_way, busy):
            position = next(number for number, batch in enumerate(batches, first) if batch.end_s > start_s)
            lane = _lane(batches[0].instance, stage)
            bars.append(Bar(lane, position, Activity.BUBBLE, start_s - began_s, end_s - began_s))
    return bars


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times that any of these covers."""
    merged: list[tuple[float, float]] = []
    for start_s, end_s in sorted(spans):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged


def _without(spans: Sequence[tuple[float, float]], covered: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return what of `spans` is not `covered`; both in order."""
    left = []
    for start_s, end_s in spans:
        at_s = start_s
        for from_s, until_s in covered:
            if until_s <= at_s or from_s >= end_s:
                continue
            if from_s > at_s:
                left.append((at_s, from_s))
            at_s = until_s
        if at_s < end_s:
            left.append((at_s, end_s))
    return left


def _lane(instance: str, stage: int) -> str:
    return f"{instance} stage {stage}"


def plan_text(chunks: Sequence[tuple[int, int]]) -> str:
    """A plan in one line, from (tokens, instances) of each chunk; what follows on as many instances is one entry."""
    entries = []
    for size, alike in groupby(chunks, key=lambda chunk: chunk[1]):
        tokens = [chunk[0] for chunk in alike]
        count = f" in {len(tokens)}" if len(tokens) > 1 else ""
        entries.append(f"{sum(tokens):,} @ {size}{count}")
    return " -> ".join(entries)


def chunks_of(request: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(tokens, instances) of the chunks of a request that were computed, from its record in a status."""
    return [
        (int(step["new_tokens"]), len(step["members"]))
        for step in request["steps"]
        if step["kind"] == "chunk" and not step["has_failed"] and step["ended_s"] is not None
    ]


def begun_records(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the records of a status of all requests that have begun, the ended ones first."""
    return [entry for entry in (*status["recent"], *status["requests"]) if entry["steps"]]


def _timeline(status: Any, max_requests: int) -> Timeline:
    present = {int(entry["instance"]): str(entry["name"]) for entry in status["members"]}
    former = {int(entry["instance"]): str(entry["name"]) for entry in status["former_members"]}
    names = {**former, **present}
    records = begun_records(status)[-max_requests:]
    began_s = min((float(record["offered_s"]) for record in records), default=0.0)
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
        (str(entry["name"]), float(entry["lost_s"]) - began_s)
        for entry in status["former_members"]
        if records and float(entry["lost_s"]) >= began_s and entry["name"] in shown
    )
    return Timeline(tuple(sorted(shown)), tuple(requests), tuple(bars), losses, began_s)


def _bars_of(
    step: Mapping[str, Any], request: int, names: Mapping[int, str], began_s: float, now_s: float
) -> list[Bar]:
    start_s = float(step["ordered_s"]) - began_s
    end_s = (now_s if step["ended_s"] is None else float(step["ended_s"])) - began_s
    times = {int(part["instance"]): part for part in step["member_times"]}
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


class TimelinePictureError(RuntimeError):
    """No picture can be drawn; the text is one line for the user."""


def draw_timeline(
    timeline: Timeline,
    path: Path,
    name_of: Callable[[str], str] = str,
    title: str = "Long prompts on the instances of the pool",
) -> None:
    """Write a picture in the format of the file's ending; `name_of` gives an instance's name. TimelinePictureError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise TimelinePictureError("matplotlib is not installed: pip install matplotlib") from None
    rows = {instance: row for row, instance in enumerate(timeline.instances)}
    figure = Figure(figsize=(11, 2.2 + 0.7 * max(1, len(rows))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for bar in timeline.bars:
        axes.barh(
            rows[bar.instance],
            bar.end_s - bar.start_s,
            left=bar.start_s,
            height=0.62,
            alpha=_SHADES.get(bar.activity, 1.0),
            **_style(bar.activity, _colour(bar.request)),
        )
    for instance, lost_s in timeline.losses:
        axes.plot(lost_s, rows[instance], marker="x", color="black", markersize=9, zorder=3)
    axes.set_yticks(range(len(rows)), [name_of(instance) for instance in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds since the first of these prompts was offered")
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    used = {bar.activity for bar in timeline.bars}
    handles: list[Any] = [
        Patch(
            color=_colour(position),
            label=f"{request.tokens:,} tokens: {request.plan or request.outcome or 'under way'}",
        )
        for position, request in enumerate(timeline.requests[:_LEGEND_REQUESTS])
    ]
    handles += [
        Patch(alpha=_SHADES.get(activity, 1.0), label=_LABELS[activity], **_style(activity, "#6b6b6b"))
        for activity in Activity
        if activity in used
    ]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TimelinePictureError(f"{path} cannot be written: {reason}") from None


def _colour(request: int) -> str:
    return f"C{request % 10}"


def _style(activity: Activity, colour: str) -> dict[str, Any]:
    hatch = _HATCHES.get(activity)
    if activity is Activity.FAILED:
        return {"facecolor": "white", "edgecolor": colour, "hatch": hatch, "linewidth": 0.5}
    return {"facecolor": colour, "edgecolor": "white", "hatch": hatch, "linewidth": 0.0 if hatch is None else 0.3}


class StatusUnavailableError(RuntimeError):
    """The coordinator, or an instance, does not answer; the text is one line for the user."""


def read_status(url: str) -> Any:
    """The coordinator's /status, parsed. StatusUnavailableError."""
    return _read(url, "/status")


def read_stages_of(url: str) -> Any:
    """An instance's /laps/stages, parsed. StatusUnavailableError."""
    return _read(url, "/laps/stages")


def _read(url: str, path: str) -> Any:
    address = url if "://" in url else f"http://{url}"
    if not address.startswith("http://"):
        raise StatusUnavailableError("is not an http:// address")
    try:
        with urllib.request.urlopen(address.rstrip("/") + path, timeout=_STATUS_TIMEOUT_S) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        error.close()
        raise StatusUnavailableError(f"{path} answered {error.code}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise StatusUnavailableError(f"does not answer ({reason})") from None
    except ValueError:
        raise StatusUnavailableError(f"{path} is not JSON") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sglang-ext live timeline`."""
    add = parser.add_argument
    add("--coordinator", metavar="URL", default="http://127.0.0.1:8991", help="HTTP address of the coordinator")
    add(
        "--instance",
        action="append",
        metavar="URL",
        help="a prefill instance of several pipeline stages, instead of a coordinator; may be given again",
    )
    add(
        "--recording",
        type=Path,
        metavar="FILE",
        help="of `sglang-ext live record` or `simulate --record`, instead of a coordinator",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        default=Path("timeline.png"),
        help="picture to write: .png, .svg or .pdf; of a recording .html, too: the page that plays it",
    )


def run(arguments: argparse.Namespace) -> int:
    """Draw it; the exit status."""
    if arguments.recording is not None:
        return _show_recording(arguments)
    if arguments.instance:
        return _show_stages(arguments)
    try:
        timeline = timeline_of(read_status(arguments.coordinator))
        if not timeline.requests:
            return _fail(f"--coordinator {arguments.coordinator}: no prompt has been shared yet", 1)
        draw_timeline(timeline, arguments.out)
    except (StatusUnavailableError, TimelineError) as error:
        return _fail(f"--coordinator {arguments.coordinator}: {error}", 1)
    except TimelinePictureError as error:
        return _fail(f"--out: {error}", 1)
    print(f"{len(timeline.requests)} prompts on {len(timeline.instances)} instances: {arguments.out}")
    return 0


def _show_stages(arguments: argparse.Namespace) -> int:
    """Draw the stages of instances; the exit status."""
    statuses: dict[str, Any] = {}
    for url in arguments.instance:
        try:
            statuses[url.partition("://")[2] or url] = read_stages_of(url)
        except StatusUnavailableError as error:
            return _fail(f"--instance {url}: {error}", 1)
    try:
        timeline = timeline_of_stages(statuses)
        draw_timeline(timeline, arguments.out, title="Batches on the pipeline stages")
    except TimelineError as error:
        return _fail(f"--instance: {error}", 1)
    except TimelinePictureError as error:
        return _fail(f"--out: {error}", 1)
    print(f"{len(timeline.requests)} batches on {len(timeline.instances)} stages: {arguments.out}")
    return 0


def _show_recording(arguments: argparse.Namespace) -> int:
    """Draw a recording, or write the page that plays it; the exit status."""
    try:
        if arguments.out.suffix == ".html":
            messages = write_page(arguments.recording, arguments.out)
            print(f"{messages} messages: {arguments.out}")
            return 0
        timeline = timeline_of_recording(read_recording(arguments.recording))
        if not timeline.requests:
            return _fail(f"--recording {arguments.recording}: no request was at a prefill instance", 1)
        draw_timeline(timeline, arguments.out, title="Requests on their prefill instances")
    except RecordingError as error:
        return _fail(f"--recording {arguments.recording}: {error}", 1)
    except TimelinePictureError as error:
        return _fail(f"--out: {error}", 1)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}", 1)
    print(f"{len(timeline.requests)} requests on {len(timeline.instances)} instances: {arguments.out}")
    return 0


def _fail(message: str, status: int) -> int:
    print(f"sglang-ext live timeline: {message}", file=sys.stderr)
    return status
