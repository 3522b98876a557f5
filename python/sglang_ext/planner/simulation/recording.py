"""A simulated run as a recording of the live page's stream, so that it is watched as a served cluster is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

from sglang_ext.live.decide.instance_work import PARKED, TRANSFER
from sglang_ext.live.decide.messages import MIN_INTERVAL_S, InstanceRow, LoadRow, PromptRow, hello
from sglang_ext.live.decide.view import MAX_PROMPTS, Counts, LiveView, SeenInstance, SeenRequest, SeenSpan
from sglang_ext.planner.simulation.events import BusyInterval, PlannedChunks, SimRequest
from sglang_ext.planner.simulation.instances import WatchedInstance
from sglang_ext.planner.simulation.run import Outcome
from sglang_ext.types import Role

WATCH_S = 1.0  # between two looks at the instances
MAX_FRAMES = 4_000  # of a recording: those of a longer run are further apart
UTILISATION_S = 5.0  # busy shares are of this long, as an engine's own report has them


class RecordedRun(NamedTuple):
    """Describes what the recording says of the run."""

    engine: str
    policy: str
    instances: int  # that prefill
    short_instances: int  # of these, at the beginning; 0: no pools
    boundary_tokens: int
    slo_s: float
    decode_instances: int = 0  # 0: only prefill was simulated
    decode_kv_tokens: int = 0  # that one of them holds


class _Life(NamedTuple):
    """One request; None is not yet, or never."""

    key: int
    length_class: str
    request: SimRequest
    start_s: float | None
    first_token_s: float | None
    transferred_s: float | None
    end_s: float
    instance: str | None
    decode: str | None  # known where the request has ended


def write_recording(outcome: Outcome, run: RecordedRun, path: Path) -> int:
    """Write it, one message a line; the number of messages. OSError where the file cannot be written.

    Requests of the warm-up are left out, as in the figures; what instances did for them is not.
    """
    written = 0
    with path.open("wb") as file:
        for message in messages(outcome, run):
            file.write(message + b"\n")
            written += 1
    return written


def messages(outcome: Outcome, run: RecordedRun) -> Iterator[bytes]:
    """The messages of the stream."""
    interval_s = max(MIN_INTERVAL_S, round(outcome.end_s / MAX_FRAMES, 2))
    view = LiveView(0.0, {"short": run.slo_s, "long": run.slo_s}, interval_s)
    yield hello(
        source="simulation",
        name=f"{run.engine}, {run.policy}",
        began_unix_s=None,
        interval_s=interval_s,
        boundary_tokens=run.boundary_tokens,
        notes=[
            "A simulated run. Decode was simulated, too; a request that has not ended at the end of the run has no "
            "decode instance here."
            if run.decode_instances
            else "A simulated run of prefill only (decode.instances): a request ends with its first token."
        ],
    )
    lives = _lives(outcome, run)
    spans = sorted(outcome.timeline, key=lambda busy: busy.end_s)
    classes = {life.key: life.length_class for life in lives}
    watched, decoding = _Watched(outcome, run, classes), _Decoding(lives, run)
    shared = _SharedPrompts(lives, spans, outcome.plans)
    ended_spans = sorted(
        chain((_span(busy, classes) for busy in spans), _parked(spans, lives), _transfers(lives)),
        key=lambda span: span.end_s,
    )
    moves = iter([*outcome.moves, None])
    move = next(moves)
    running: dict[int, _Life] = {}
    arrived = ended = reported = 0
    by_end = sorted(lives, key=lambda life: life.end_s)
    counts = {name: [0, 0] for name in ("short", "long", "unknown")}
    frames = int(outcome.end_s / interval_s) + 2
    for number in range(frames):
        now_s = number * interval_s
        view.take_instances(chain(watched.at(now_s), decoding.at(now_s)), now_s)
        while move is not None and move.at_s <= now_s:
            name = _name(move.instance)
            text = f"{name} moved: from {move.source} to {move.target} ({move.reason})"
            view.record_event(move.at_s, "move", view.number_of(name), text)
            move = next(moves)
        view.take_prompts(shared.at(now_s))
        while arrived < len(lives) and lives[arrived].request.arrival_s <= now_s:
            running[lives[arrived].key] = lives[arrived]
            arrived += 1
        while ended < len(by_end) and by_end[ended].end_s <= now_s:
            life = by_end[ended]
            ended += 1
            if running.pop(life.key, None) is None:
                continue
            has_token = life.first_token_s is not None
            counts[life.length_class][not has_token] += 1
            if view.wants_end(life.key):
                outcome_name = "ok" if has_token else "error_before"
                view.note_end(life.key, _seen(life, now_s)._replace(ended_s=life.end_s, outcome=outcome_name))
        in_flight = [(key, _seen(life, now_s)) for key, life in running.items()]
        totals = {name: (answered, failed) for name, (answered, failed) in counts.items()}
        if number == 0:
            view.take_in_flight([], Counts(0, 0, {}), now_s)  # from nothing on
        view.take_in_flight(in_flight, Counts(0, len(running), totals), now_s)
        first = reported
        while reported < len(ended_spans) and ended_spans[reported].end_s <= now_s:
            reported += 1
        view.add_spans(ended_spans[first:reported])
        frame = view.frame(now_s)
        if frame is not None:
            yield frame


def _name(instance: int) -> str:
    return f"prefill {instance}"


def _decode_name(instance: int) -> str:
    return f"decode {instance}"


def _span(busy: BusyInterval, classes: dict[int, str]) -> SeenSpan:
    label = f"request {busy.key}" + (f" and {len(busy.others)} more" if busy.others else "")
    return SeenSpan(
        _name(busy.instance),
        "prefill",
        busy.start_s,
        busy.end_s,
        classes.get(busy.key),
        label,
        busy.tokens,
        1 + len(busy.others),
    )


def _parked(spans: Sequence[BusyInterval], lives: Sequence[_Life]) -> Iterator[SeenSpan]:
    """Yield when a long prompt waited between two chunks on an instance that computed others meanwhile."""
    long = {life.key: life for life in lives if life.length_class == "long"}
    work: dict[int, list[BusyInterval]] = {}
    for busy in sorted(spans, key=lambda busy: busy.start_s):
        if not busy.group:
            work.setdefault(busy.instance, []).append(busy)
    for instance, intervals in work.items():
        chunks: dict[int, tuple[int, float, int]] = {}  # by request: the place and end of its latest one, tokens so far
        for place, busy in enumerate(intervals):
            for key in (busy.key, *busy.others):
                life = long.get(key)
                if life is None:
                    continue
                last = chunks.get(key)
                done = 0 if last is None else last[2]
                # Of a batch of several it is not noted how many tokens were whose.
                is_known = done >= 0 and not busy.others and busy.tokens is not None
                chunks[key] = place, busy.end_s, done + (busy.tokens or 0) if is_known else -1
                if last is not None and place > last[0] + 1 and busy.start_s > last[1]:
                    left = None if done < 0 else max(0, life.request.new_tokens - done)
                    label = f"request {key}"
                    yield SeenSpan(_name(instance), PARKED, last[1], busy.start_s, "long", label, left)


def _transfers(lives: Sequence[_Life]) -> Iterator[SeenSpan]:
    """Yield when KV was on its way to decode instances that were simulated, from the instance that computed it last."""
    for life in lives:
        start_s, end_s = life.first_token_s, life.transferred_s
        if life.decode is not None and life.instance is not None and start_s is not None and end_s is not None:
            tokens = life.request.prompt_tokens
            yield SeenSpan(life.instance, TRANSFER, start_s, end_s, None, f"request {life.key}", tokens)


def _lives(outcome: Outcome, run: RecordedRun) -> list[_Life]:
    """All requests, in the order of their arrival."""
    finished = {finished_request.request.key: finished_request for finished_request in outcome.finished}
    instances = {
        key: busy.instance for busy in outcome.timeline for key in chain((busy.key,), busy.others)
    }  # the last instance that worked for it

    def life(
        request: SimRequest,
        start_s: float | None,
        first_token_s: float | None,
        end_s: float,
        transferred_s: float | None,
        decode: int | None = None,
    ) -> _Life:
        is_short = request.new_tokens <= run.boundary_tokens
        instance = instances.get(request.key)
        return _Life(
            request.key,
            "short" if is_short else "long",
            request,
            start_s,
            first_token_s,
            transferred_s,
            end_s,
            None if instance is None else _name(instance),
            None if decode is None else _decode_name(decode),
        )

    lives = []
    for served in outcome.served:
        end = finished.get(served.request.key)
        end_s = served.first_token_s if end is None else end.finished_s
        transferred_s = served.first_token_s if end is None else end.transferred_s
        decode = None if end is None else end.instance
        lives.append(life(served.request, served.start_s, served.first_token_s, end_s, transferred_s, decode))
    lives += [life(request, None, None, request.arrival_s, None) for request in outcome.refused]
    lives += [life(request, None, None, float("inf"), None) for request in outcome.unfinished]
    return sorted(lives, key=lambda live: (live.request.arrival_s, live.key))


def _seen(life: _Life, now_s: float) -> SeenRequest:
    """Return the request as it is at a time: later events are not known yet."""

    def known(at_s: float | None) -> float | None:
        return at_s if at_s is not None and at_s <= now_s else None

    request = life.request
    return SeenRequest(
        f"request {life.key}",
        life.length_class,
        request.prompt_tokens,
        request.cached_tokens,
        request.output_tokens if life.end_s <= now_s else None,
        life.instance,
        life.decode if known(life.first_token_s) is not None else None,
        request.arrival_s,
        request.arrival_s,
        known(life.start_s),
        known(life.transferred_s),
        known(life.first_token_s),
        None,
        None,
        1,
    )


class _SharedPrompts:
    """Prompts whose chunks are shared by instances, at a time that only grows."""

    def __init__(self, lives: Sequence[_Life], spans: Sequence[BusyInterval], plans: Sequence[PlannedChunks]) -> None:
        self._chunks: dict[int, list[BusyInterval]] = {}  # by request: one interval of each
        by_chunk = sorted((busy for busy in spans if busy.group), key=lambda busy: (busy.key, busy.start_s))
        for _, intervals in groupby(by_chunk, lambda busy: (busy.key, busy.start_s)):
            busy = next(intervals)
            self._chunks.setdefault(busy.key, []).append(busy)
        self._collected_s: dict[int, float] = {}  # by request: its owner has begun to compute the rest by itself
        for busy in sorted((busy for busy in spans if not busy.group), key=lambda busy: busy.start_s):
            for key in (busy.key, *busy.others):
                if key in self._chunks and busy.start_s >= self._chunks[key][-1].end_s:
                    self._collected_s.setdefault(key, busy.start_s)
        self._lives = [life for life in lives if life.key in self._chunks]
        self._offered = 0
        self._plans = sorted(plans, key=lambda plan: plan.at_s)
        self._decided = 0
        self._planned: dict[int, tuple[tuple[int, tuple[int, ...]], ...]] = {}  # by request, as decided last

    def at(self, now_s: float) -> list[PromptRow]:
        while self._decided < len(self._plans) and self._plans[self._decided].at_s <= now_s:
            plan = self._plans[self._decided]
            self._planned[plan.key] = plan.chunks
            self._decided += 1
        while self._offered < len(self._lives) and self._lives[self._offered].request.arrival_s <= now_s:
            self._offered += 1
        return [self._row(life, now_s) for life in self._lives[max(0, self._offered - MAX_PROMPTS) : self._offered]]

    def _row(self, life: _Life, now_s: float) -> PromptRow:
        request, chunks = life.request, self._chunks[life.key]
        collected_s = self._collected_s.get(life.key)
        ended_s = life.first_token_s if collected_s is None else collected_s
        has_ended = ended_s is not None and ended_s <= now_s
        outcome = "streamed" if collected_s is None else "collected"
        owner = chunks[0].group[0] if chunks[0].owner is None else chunks[0].owner
        return PromptRow(
            *(life.key, _name(owner), request.prompt_tokens, request.cached_tokens, request.arrival_s),
            ended_s if has_ended else None,
            outcome if has_ended else None,
            [
                (
                    busy.tokens or 0,
                    list(map(_name, busy.group)),
                    busy.start_s,
                    busy.end_s if busy.end_s <= now_s else None,
                )
                for busy in chunks
                if busy.start_s <= now_s
            ],
            [(tokens, list(map(_name, group))) for tokens, group in self._planned.get(life.key, ())],
        )


class _Decoding:
    """Decode instances at a time that only grows."""

    def __init__(self, lives: Sequence[_Life], run: RecordedRun) -> None:
        self._run = run
        decoded = [life for life in lives if life.decode is not None and life.first_token_s is not None]
        self._lives = sorted(decoded, key=lambda life: life.first_token_s or 0.0)
        self._first = 0
        self._open: list[_Life] = []

    def at(self, now_s: float) -> Iterable[SeenInstance]:
        while self._first < len(self._lives) and (self._lives[self._first].first_token_s or 0.0) <= now_s:
            self._open.append(self._lives[self._first])
            self._first += 1
        self._open = [life for life in self._open if life.end_s > now_s]
        held: dict[str | None, list[_Life]] = {}
        for life in self._open:
            held.setdefault(life.decode, []).append(life)
        names = map(_decode_name, range(self._run.decode_instances))
        return [self._instance(name, held.get(name, []), now_s) for name in names]

    def _instance(self, name: str, lives: Sequence[_Life], now_s: float) -> SeenInstance:
        here = [life.request for life in lives if life.transferred_s is not None and life.transferred_s <= now_s]
        used_tokens = sum(request.prompt_tokens + request.output_tokens for request in here)
        coming_tokens = sum(life.request.prompt_tokens for life in lives) - sum(
            request.prompt_tokens for request in here
        )
        kv_used = round(min(1.0, used_tokens / self._run.decode_kv_tokens), 4) if self._run.decode_kv_tokens else None
        return SeenInstance(
            InstanceRow(0, name, Role.DECODE.value, self._run.engine, "ready", None, ""),
            LoadRow(0, len(lives), coming_tokens, None, None, None, None, None, None, kv_used, len(here)),
        )


class _Watched:
    """Instances at a time that only grows."""

    def __init__(self, outcome: Outcome, run: RecordedRun, classes: dict[int, str]) -> None:
        self._run = run
        self._classes = classes
        self._looks = outcome.watched
        self._place = 0
        self._busy = sorted(outcome.timeline, key=lambda busy: busy.start_s)
        self._first = 0
        self._open: list[BusyInterval] = []

    def at(self, now_s: float) -> Iterable[SeenInstance]:
        while self._place + 1 < len(self._looks) and self._looks[self._place + 1][0] <= now_s:
            self._place += 1
        while self._first < len(self._busy) and self._busy[self._first].start_s <= now_s:
            self._open.append(self._busy[self._first])
            self._first += 1
        since_s = max(0.0, now_s - UTILISATION_S)
        self._open = [busy for busy in self._open if busy.end_s > since_s]
        shares: dict[int, list[float]] = {}
        working: dict[int, int] = {}
        for busy in self._open:
            seconds = min(busy.end_s, now_s) - max(busy.start_s, since_s)
            share = seconds / max(1e-9, now_s - since_s)
            shares.setdefault(busy.instance, [0.0, 0.0])[self._classes.get(busy.key) == "long"] += max(0.0, share)
            working[busy.instance] = working.get(busy.instance, 0) + (busy.end_s > now_s)
        watched = {look.number: look for look in self._looks[self._place][1]} if self._looks else {}
        return [
            self._instance(number, watched.get(number), shares.get(number, [0.0, 0.0]), working.get(number, 0))
            for number in (sorted(watched) if watched else range(self._run.instances))
            if number not in watched or watched[number].is_alive or not watched[number].is_draining
        ]

    def _instance(
        self, number: int, watched: WatchedInstance | None, shares: Sequence[float], working: int
    ) -> SeenInstance:
        run = self._run
        if watched is not None:
            role, is_alive, is_draining = watched.role, watched.is_alive, watched.is_draining
        else:
            pool = Role.BOTH if not run.short_instances else Role.SHORT if number < run.short_instances else Role.LONG
            role, is_alive, is_draining = pool, True, False
        state = "draining" if is_draining else "ready" if is_alive else "unhealthy"
        short_busy, long_busy = (round(min(1.0, share), 2) for share in shares)
        return SeenInstance(
            InstanceRow(0, _name(number), role.value, run.engine, state, None, "" if is_alive else "it has failed"),
            LoadRow(
                0,
                working if watched is None else sum(watched.queued),
                0 if watched is None else watched.pending_tokens,
                None if watched is None else watched.queued[0],
                None if watched is None else watched.queued[1],
                None,
                short_busy,
                long_busy,
                None,
                None if watched is None else watched.kv_used,
                working,
            ),
        )
