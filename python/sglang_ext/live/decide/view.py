"""`LiveView` makes frames of bounded size of what is seen of a cluster. It is given facts, and asked for frames.

Its driver reports facts as often as suits; only what has changed is written, the rows that wait longest first,
and what does not fit comes with the next frames. Of many requests a sample is shown, and every frame says of how many.
Times that are given are seconds on the driver's clock, those in the stream are since its beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from sglang_ext.live.decide.encoding import frame_json, row_json
from sglang_ext.live.decide.messages import (
    BUDGETS_BYTES,
    GONE,
    MAX_CHUNKS,
    MAX_MEMBERS,
    MIN_INTERVAL_S,
    ClassRow,
    EventRow,
    InstanceRow,
    LoadRow,
    PromptRow,
    RequestRow,
    SpanRow,
)

CLASSES = ("short", "long", "unknown")
MAX_TRACKED = 400  # requests that are followed while they are under way
MAX_NEW_TRACKED = 20  # of these, at one look: where requests end within a frame, following them is of little use
MAX_ENDED = 25  # requests of a frame that were not followed
MAX_PENDING = 2_000  # rows of each kind that wait for a frame
MAX_TTFTS = 1_000  # of each class: of more every second one is kept, and stands for two
TTFT_WINDOW_S = 60.0
QUANTILES_EVERY_S = 0.99
MAX_TIME_S = 1e12  # of a span: what is not a time is not shown
MAX_SPANS = 8_000  # that are remembered, so that none is sent twice
MAX_PROMPTS = 60  # of the long pool
K = TypeVar("K", bound=Hashable)


class SeenInstance(NamedTuple):
    """An instance now. `load.instance` and `row.instance` are ignored: the view numbers them."""

    row: InstanceRow
    load: LoadRow


class SeenRequest(NamedTuple):
    """A request now; times are on the driver's clock, and instances are named."""

    id: str
    length_class: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int | None
    prefill: str | None
    decode: str | None
    received_s: float
    sent_s: float | None
    started_s: float | None
    prefilled_s: float | None
    first_token_s: float | None
    ended_s: float | None
    outcome: str | None
    attempts: int


class SeenSpan(NamedTuple):
    """Work of an instance, which is named."""

    instance: str
    kind: str
    start_s: float
    end_s: float
    length_class: str | None = None
    label: str = ""
    tokens: int | None = None
    requests: int = 1


class Counts(NamedTuple):
    """All requests, exactly: `ended` has those answered whole and the others, by class, since any moment."""

    queued: int  # wait for admission
    in_flight: int  # admitted
    ended: Mapping[str, tuple[int, int]]


class Elsewhere(NamedTuple):
    """Requests of other processes of the router, or of other routers, by the last report of each."""

    in_flight: Mapping[int, int]  # sent or waiting, by the number of each
    ended: Mapping[int, tuple[int, int]] | None  # answered whole and otherwise, since any moment; None: unknown


class _Pending(Generic[K]):
    """Rows that wait for a frame, the oldest first; a newer one of the same key takes its place."""

    def __init__(self) -> None:
        self._rows: dict[K, Sequence[Any]] = {}
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, key: K, row: Sequence[Any]) -> None:
        if key not in self._rows and len(self._rows) >= MAX_PENDING:
            del self._rows[next(iter(self._rows))]
            self.dropped += 1
        self._rows[key] = row

    def discard(self, key: K) -> None:
        self._rows.pop(key, None)

    def take(self, budget_bytes: int) -> list[bytes]:
        """The first ones, as JSON, as far as they fit."""
        taken: list[bytes] = []
        used = 0
        keys: list[K] = []
        for key, row in self._rows.items():
            made = row_json(row)
            used += len(made) + 1
            if used > budget_bytes:
                break
            taken.append(made)
            keys.append(key)
        for key in keys:
            del self._rows[key]
        return taken


class _Ttfts:
    """Times to the first token of the last minute, each with how many requests it stands for."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, int]] = deque()
        self._found: tuple[float | None, float | None, int] = (None, None, 0)
        self._found_s = float("-inf")

    def note(self, at_s: float, ttft_s: float, weight: int) -> None:
        samples = self._samples
        samples.append((at_s, ttft_s, weight))
        if len(samples) >= MAX_TTFTS:
            self._samples = deque([(at, ttft, 2 * count) for at, ttft, count in list(samples)[1::2]])

    def quantiles(self, now_s: float) -> tuple[float | None, float | None, int]:
        """Median and 90th percentile, and the number of samples; computed once a second."""
        if 0 <= now_s - self._found_s < QUANTILES_EVERY_S:
            return self._found
        samples = self._samples
        while samples and samples[0][0] < now_s - TTFT_WINDOW_S:
            samples.popleft()
        ordered = sorted([(ttft_s, weight) for _, ttft_s, weight in samples])
        total = sum([weight for _, weight in ordered])
        found: list[float | None] = [None, None]
        reached = 0
        for ttft_s, weight in ordered:
            reached += weight
            for place, share in enumerate((0.5, 0.9)):
                if found[place] is None and reached >= share * total:
                    found[place] = ttft_s
        self._found, self._found_s = (found[0], found[1], len(ordered)), now_s
        return self._found


class LiveView:
    """One stream."""

    def __init__(
        self, began_s: float, objectives_s: Mapping[str, float] | None = None, interval_s: float = MIN_INTERVAL_S
    ) -> None:
        """ValueError for an interval below `MIN_INTERVAL_S`."""
        if not interval_s >= MIN_INTERVAL_S:
            raise ValueError(f"interval_s: {interval_s} is less than {MIN_INTERVAL_S}")
        self._began_s = began_s
        self._objectives_s = objectives_s or {}
        self._interval_s = interval_s
        self._frames = 0
        self._framed_s: float | None = None
        self._instances: dict[str, tuple[InstanceRow, LoadRow]] = {}
        self._last_instance = 0
        self._pending_instances: _Pending[int] = _Pending()
        self._pending_loads: _Pending[int] = _Pending()
        self._tracked: dict[Hashable, RequestRow] = {}
        self._last_request = 0
        self._pending_requests: _Pending[int] = _Pending()
        self._stride = 1
        self._untracked_ends = 0  # since the last frame
        self._skipped_ends = 0
        self._untracked: list[RequestRow] = []  # of these, what is kept
        self._pending_spans: _Pending[tuple[int, str, float, str]] = _Pending()
        self._span_ends: dict[tuple[int, str, float, str], float] = {}  # of the latest, as they were sent
        self._pending_events: _Pending[int] = _Pending()
        self._last_event = 0
        self._prompts: dict[int, PromptRow] = {}
        self._pending_prompts: _Pending[int] = _Pending()
        self._stages: dict[str, list[int]] = {name: [0, 0, 0, 0] for name in CLASSES}
        self._is_estimate = False
        self._ended_before: Mapping[str, tuple[int, int]] | None = None
        self._ended: dict[str, tuple[int, int]] = dict.fromkeys(CLASSES, (0, 0))
        self._in_flight = 0
        self._elsewhere: dict[str, int | None] | None = None
        self._lanes: dict[str, int] | None = None
        self._seen_elsewhere: dict[int, tuple[int, int]] = {}  # the counts of each one's last report
        self._ended_elsewhere = [0, 0]  # since the stream began
        self._ttfts = {name: _Ttfts() for name in CLASSES}

    # -- instances --------------------------------------------------------------------------------------

    def take_instances(self, seen: Iterable[SeenInstance], now_s: float) -> None:
        """Take all instances that there are: an instance that is missing has left. Changes become events."""
        is_first = not self._instances
        present: set[str] = set()
        for row, load in seen:
            present.add(row.name)
            known = self._instances.get(row.name)
            if known is None:
                self._last_instance += 1
                number = self._last_instance
            else:
                number = known[0].instance
            new_row, new_load = InstanceRow(number, *row[1:]), LoadRow(number, *load[1:])
            if known is not None and known[0] == new_row and known[1] == new_load:
                continue
            self._instances[row.name] = new_row, new_load
            if known is None or known[0] != new_row:
                self._pending_instances.put(number, new_row)
                self._note_change(None if known is None else known[0], new_row, now_s, is_first)
            if known is None or known[1] != new_load:
                self._pending_loads.put(number, new_load)
        for name in [name for name in self._instances if name not in present]:
            row, _ = self._instances.pop(name)
            self._pending_loads.discard(row.instance)
            self._pending_instances.put(row.instance, row._replace(state=GONE))
            self.record_event(now_s, "left", row.instance, f"{row.name} has left the {row.pool} pool")

    def _note_change(self, old: InstanceRow | None, new: InstanceRow, now_s: float, is_first: bool) -> None:
        if old is None:
            if not is_first:
                self.record_event(now_s, "joined", new.instance, f"{new.name} has joined the {new.pool} pool")
            return
        if old.pool != new.pool:
            text = f"{new.name} has moved from the {old.pool} to the {new.pool} pool"
            self.record_event(now_s, "moved", new.instance, text)
        if old.state != new.state:
            why = f": {new.reason}" if new.reason else ""
            self.record_event(now_s, "state", new.instance, f"{new.name} is {new.state}{why}")
        if old.mode != new.mode and old.mode is not None and new.mode is not None:
            self.record_event(
                now_s, "mode", new.instance, f"{new.name} schedules in mode {new.mode}, before {old.mode}"
            )

    def record_event(self, at_s: float, kind: str, instance: int | None, text: str) -> None:
        """Something has happened; `instance` is a number in the stream, None for no particular one."""
        self._last_event += 1
        self._pending_events.put(self._last_event, EventRow(at_s - self._began_s, kind, instance or 0, text))

    def number_of(self, name: str | None) -> int | None:
        """Return an instance's number in the stream; None for an unknown instance."""
        known = None if name is None else self._instances.get(name)
        return None if known is None else known[0].instance

    # -- requests ---------------------------------------------------------------------------------------

    def take_in_flight(self, seen: Iterable[tuple[Hashable, SeenRequest]], counts: Counts, now_s: float) -> None:
        """The admitted requests, or an even part of them, each by a key that stays its own until its end."""
        stages: dict[str, list[int]] = {name: [0, 0, 0, 0] for name in CLASSES}
        scanned = 0
        tracked = self._tracked
        max_tracked = min(MAX_TRACKED, len(tracked) + MAX_NEW_TRACKED)
        for key, request in seen:
            scanned += 1
            stages[request.length_class or "unknown"][_stage(request)] += 1
            if key in tracked or len(tracked) < max_tracked:
                self._follow(key, request)
        self._is_estimate = 0 < scanned < counts.in_flight
        if self._is_estimate:
            _scale(stages, scanned, counts.in_flight)
        stages["unknown"][0] += counts.queued
        self._stages = stages
        self._in_flight = counts.in_flight + counts.queued
        if self._ended_before is None:
            self._ended_before = dict(counts.ended)
        for name in CLASSES:
            answered, failed = counts.ended.get(name, (0, 0))
            answered_before, failed_before = self._ended_before.get(name, (0, 0))
            self._ended[name] = (answered - answered_before, failed - failed_before)

    def take_elsewhere(self, seen: Elsewhere) -> None:
        """Take the report of other processes on requests that this stream does not follow.

        What one had counted before it was seen first is not of this stream. Counts never fall, also when one has gone,
        or has begun again from nothing.
        """
        if not seen.in_flight:
            self._elsewhere = None
            return
        answered = failed = None
        if seen.ended is not None:
            for number, counts in seen.ended.items():
                last = self._seen_elsewhere.get(number, counts)
                for at in (0, 1):
                    self._ended_elsewhere[at] += counts[at] - last[at] if counts[at] >= last[at] else counts[at]
                self._seen_elsewhere[number] = counts
            answered, failed = self._ended_elsewhere
        self._elsewhere = {
            "routers": len(seen.in_flight),
            "in_flight": sum(seen.in_flight.values()),
            "ended": answered,
            "failed": failed,
        }

    def take_lanes(self, telling: int, silent: int, missed: int) -> None:
        """Take how many instances report their work, how many answer without it, and how much was left out."""
        self._lanes = {"telling": telling, "silent": silent, "missed": missed}

    @property
    def followed(self) -> tuple[Hashable, ...]:
        """Keys of the requests that are followed on their way."""
        return tuple(self._tracked)

    def follow(self, seen: Iterable[tuple[Hashable, SeenRequest]]) -> None:
        """Update the followed requests by their progress; all others are left out."""
        for key, request in seen:
            if key in self._tracked:
                self._follow(key, request)

    def wants_end(self, key: Hashable) -> bool:
        """Return whether `note_end` is to be called of a request that ends now; to be asked once for each."""
        if key in self._tracked:
            return True
        self._untracked_ends += 1
        if self._untracked_ends % self._stride:
            return False
        if len(self._untracked) >= MAX_ENDED:
            self._skipped_ends += 1
            return False
        return True

    def note_end(self, key: Hashable, request: SeenRequest) -> None:
        """A request has ended that `wants_end` wanted."""
        known = self._tracked.pop(key, None)
        if known is None:
            self._last_request += 1
        number = self._last_request if known is None else known.request
        row = self._row(number, request)
        self._pending_requests.put(number, row)
        if known is None:
            self._untracked.append(row)
        elif known.first_token_s is None:
            self._record_ttft(row, 1)

    def _follow(self, key: Hashable, request: SeenRequest) -> None:
        known = self._tracked.get(key)
        if known is None:
            self._last_request += 1
            row = self._row(self._last_request, request)
        else:
            row = self._row(known.request, request)
            if row == known:
                return
        self._tracked[key] = row
        self._pending_requests.put(row.request, row)
        if known is None or known.first_token_s is None:
            self._record_ttft(row, 1)

    def _record_ttft(self, row: RequestRow, weight: int) -> None:
        if row.first_token_s is not None:
            ttfts = self._ttfts[row.length_class or "unknown"]
            ttfts.note(row.first_token_s, max(0.0, row.first_token_s - row.received_s), weight)

    def _row(self, number: int, request: SeenRequest) -> RequestRow:
        began_s = self._began_s

        def since(at_s: float | None) -> float | None:
            return None if at_s is None else at_s - began_s

        return RequestRow(
            number,
            request.id,
            request.length_class,
            request.prompt_tokens,
            request.cached_tokens,
            request.output_tokens,
            self.number_of(request.prefill),
            self.number_of(request.decode),
            request.received_s - began_s,
            since(request.sent_s),
            since(request.started_s),
            since(request.prefilled_s),
            since(request.first_token_s),
            since(request.ended_s),
            request.outcome,
            request.attempts,
        )

    # -- what instances did -----------------------------------------------------------------------------

    def add_spans(self, spans: Iterable[SeenSpan]) -> None:
        """Take work of known instances; what has been sent already, and has not gone on, is left out."""
        for span in spans:
            number = self.number_of(span.instance)
            if number is None:
                continue
            start_s = span.start_s - self._began_s
            if not (abs(start_s) < MAX_TIME_S and abs(span.end_s) < MAX_TIME_S):
                continue
            row = SpanRow(
                number,
                span.kind,
                start_s,
                span.end_s - self._began_s,
                span.length_class,
                span.label,
                span.tokens,
                span.requests,
            )
            key = number, span.kind, round(start_s, 3), span.label
            if self._span_ends.get(key) == row.end_s:
                continue
            if key not in self._span_ends and len(self._span_ends) >= MAX_SPANS:
                for old in list(self._span_ends)[: MAX_SPANS // 2]:  # at once: a first one is slow to find each time
                    del self._span_ends[old]
            self._span_ends[key] = row.end_s
            self._pending_spans.put(key, row)

    def take_prompts(self, prompts: Iterable[PromptRow]) -> None:
        """Take prompts of the long pool, under way and ended recently; their times are on the driver's clock."""
        began_s = self._began_s
        seen: dict[int, PromptRow] = {}
        for prompt in list(prompts)[-MAX_PROMPTS:]:
            chunks = [
                (tokens, list(members)[:MAX_MEMBERS], start_s - began_s, None if end_s is None else end_s - began_s)
                for tokens, members, start_s, end_s in prompt.chunks[-MAX_CHUNKS:]
            ]
            planned = [(tokens, list(members)[:MAX_MEMBERS]) for tokens, members in prompt.planned[:MAX_CHUNKS]]
            row = prompt._replace(
                offered_s=prompt.offered_s - began_s,
                ended_s=None if prompt.ended_s is None else prompt.ended_s - began_s,
                chunks=chunks,
                planned=planned,
            )
            if len(row_json(row)) >= BUDGETS_BYTES["prompts"]:
                row = row._replace(chunks=[(tokens, [], *times) for tokens, _, *times in chunks], planned=[])
            seen[row.prompt] = row
            if self._prompts.get(row.prompt) != row:
                self._pending_prompts.put(row.prompt, row)
        self._prompts = seen

    # -- frames -----------------------------------------------------------------------------------------

    def resend(self) -> None:
        """Write all that is known once more, over the next frames: a reader has come, or has missed some."""
        for row, load in self._instances.values():
            self._pending_instances.put(row.instance, row)
            self._pending_loads.put(load.instance, load)
        for request in self._tracked.values():
            self._pending_requests.put(request.request, request)
        for prompt in self._prompts.values():
            self._pending_prompts.put(prompt.prompt, prompt)
        self._span_ends.clear()

    def frame(self, now_s: float) -> bytes | None:
        """The next frame, of at most `MAX_MESSAGE_BYTES`; None before its time."""
        if self._framed_s is not None and now_s - self._framed_s < self._interval_s - 1e-6:
            return None
        self._framed_s = now_s
        self._frames += 1
        for row in self._untracked:  # each stands for as many of the requests that ended since the last frame
            self._record_ttft(row, max(1, self._untracked_ends // len(self._untracked)))
        at_s = now_s - self._began_s
        sections: dict[str, list[bytes]] = {"classes": [row_json(row) for row in self._class_rows(at_s)]}
        pending: dict[str, _Pending[Any]] = {
            "instances": self._pending_instances,
            "loads": self._pending_loads,
            "requests": self._pending_requests,
            "spans": self._pending_spans,
            "events": self._pending_events,
            "prompts": self._pending_prompts,
        }
        for name, rows in pending.items():
            sections[name] = rows.take(BUDGETS_BYTES[name])
        head = {
            "kind": "frame",
            "number": self._frames,
            "at_s": round(at_s, 4),
            "in_flight": self._in_flight,
            "is_estimate": self._is_estimate,
            "sampled_of": self._stride,
            "instances_known": len(self._instances),
            "deferred": sum([len(rows) for rows in pending.values()]),
            "dropped": self._skipped_ends + sum([rows.dropped for rows in pending.values()]),
            "elsewhere": self._elsewhere,
            "lanes": self._lanes,
        }
        self._stride = max(1, -(-self._untracked_ends // MAX_ENDED))
        self._untracked_ends = 0
        self._untracked = []
        return frame_json(head, sections)

    def _class_rows(self, at_s: float) -> list[ClassRow]:
        rows = []
        for name in CLASSES:
            waiting, prefilling, starting, decoding = self._stages[name]
            answered, failed = self._ended[name]
            p50_s, p90_s, samples = self._ttfts[name].quantiles(at_s)
            objective_s = self._objectives_s.get(name)
            rows.append(
                ClassRow(
                    *(name, waiting, prefilling, starting, decoding, answered, failed),
                    *(p50_s, p90_s, samples, objective_s),
                )
            )
        return rows


def _stage(request: SeenRequest) -> int:
    """0 waiting, 1 prefilling, 2 starting, 3 decoding."""
    if request.first_token_s is not None:
        return 3
    if request.prefilled_s is not None:
        return 2
    return 0 if request.sent_s is None else 1


def _scale(stages: Mapping[str, list[int]], scanned: int, total: int) -> None:
    """Scale counts of `scanned` requests up so that they add up to `total`; the largest takes what rounding leaves."""
    for counts in stages.values():
        counts[:] = [count * total // scanned for count in counts]
    largest = max(stages.values(), key=max)
    largest[largest.index(max(largest))] += total - sum(map(sum, stages.values()))
