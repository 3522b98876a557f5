"""The clock of a simulation, and what happens by it: requests, how each is served, which instance is busy when."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeVar

from sglang_ext.types import Role

T = TypeVar("T")


class EventLoop:
    """Deterministic and without I/O. `now_s` starts at 0 and never goes back."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0  # handled so far
        self._heap: list[tuple[float, int, Callable[[object], None], object]] = []
        self._sequence = 0
        self._background = 0  # of what is scheduled
        self._is_stopped = False

    def schedule(self, at_s: float, handler: Callable[[T], None], subject: T) -> None:
        """Call `handler(subject)` at `at_s`, at once after all that is due now if that has passed."""
        self._sequence += 1
        # The sequence number is unique, so that handlers are never compared.
        entry = (max(at_s, self.now_s), self._sequence, handler, subject)
        heapq.heappush(self._heap, entry)  # type: ignore[misc]

    def schedule_background(self, at_s: float, handler: Callable[[T], None], subject: T) -> None:
        """The same for what watches the others: by itself it is no reason to go on."""
        self._background += 1
        self.schedule(at_s, self._run_background, (handler, subject))  # type: ignore[arg-type]

    def _run_background(self, scheduled: tuple[Callable[[object], None], object]) -> None:
        self._background -= 1
        handler, subject = scheduled
        handler(subject)

    @property
    def has_events(self) -> bool:
        """Return whether anything is to happen but what watches."""
        return len(self._heap) > self._background

    def stop(self) -> None:
        """Let `run` return after the event that is being handled."""
        self._is_stopped = True

    def run(self, until_s: float = float("inf")) -> None:
        """Handle events up to and including `until_s`, or until none is left or `stop` is called."""
        heap = self._heap
        while heap and not self._is_stopped and heap[0][0] <= until_s:
            self.now_s, _, handler, subject = heapq.heappop(heap)
            self.events += 1
            handler(subject)


class Prefix(NamedTuple):
    """Describes what a prompt begins with, in full blocks; equal ids mean equal prompts from the start to the block's
    end."""

    block_tokens: int
    blocks: tuple[int, ...]


class SimRequest(NamedTuple):
    """One request of a workload."""

    key: int  # unique; its place in the workload
    arrival_s: float
    prompt_tokens: int  # at least 1
    output_tokens: int  # at least 1
    cached_tokens: int = 0  # of the prompt, in a prefix cache; below prompt_tokens
    prefix: Prefix | None = None  # None: shared with no other prompt

    @property
    def new_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class ServedPrefill(NamedTuple):
    """A prefill that has ended: its last chunk gives the first token."""

    request: SimRequest
    start_s: float  # of its first chunk
    first_token_s: float
    role: Role | None = None  # of the instance that computed it; None: a group of instances

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.request.arrival_s

    @property
    def wait_s(self) -> float:
        return self.start_s - self.request.arrival_s


class BusyInterval(NamedTuple):
    """A chunk or batch on one instance, for the timeline."""

    instance: int
    start_s: float
    end_s: float
    key: int  # of the request, or of the first one of a batch
    others: tuple[int, ...] = ()  # keys of the others of a batch
    tokens: int | None = None  # new ones that are computed; None where it is not noted
    group: tuple[int, ...] = ()  # all instances of a chunk of a shared prompt; empty where it is none
    owner: int | None = None  # of a shared prompt: the instance that it was sent to, where there is one


class PlannedChunks(NamedTuple):
    """Chunks of a shared prompt that are planned and not begun, from a time on until the prompt's next record."""

    at_s: float
    key: int  # of the request
    chunks: tuple[tuple[int, tuple[int, ...]], ...]  # new tokens, and instances


class PrefillListener(Protocol):
    """Receives what a prefill stage does, at the time of the event."""

    def on_first_token(self, served: ServedPrefill) -> None: ...

    def on_refused(self, request: SimRequest) -> None:
        """The request can never be served by these instances."""
        ...


class PrefillStage(Protocol):
    """Prefill instances, and the policy that decides over them."""

    def arrive(self, request: SimRequest) -> None: ...

    def unfinished(self) -> Iterable[SimRequest]:
        """Requests that have arrived and have neither a first token nor a refusal."""
        ...


def feed(loop: EventLoop, requests: Iterable[SimRequest], stage: PrefillStage) -> None:
    """Let the requests arrive, in the order given, one event ahead of the clock."""
    arrivals = iter(requests)

    def arrive(request: SimRequest) -> None:
        following = next(arrivals, None)
        if following is not None:
            loop.schedule(following.arrival_s, arrive, following)
        stage.arrive(request)

    first = next(arrivals, None)
    if first is not None:
        loop.schedule(first.arrival_s, arrive, first)
