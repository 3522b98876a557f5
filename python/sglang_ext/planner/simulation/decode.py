"""Decode in a simulation: the KV goes to an instance, which adds the request to its running batch.

Decode is continuous batching in fluid form: a step takes `base_s + per_request_s * n` for a batch of n, and every
member gets one token per step; events happen only where a batch changes. Transfers to one instance share its backends:
with all of them taken, requests are served in order of their first handshake, the start of their prefill (Tetris,
section 5). Each transfer has the full bandwidth of its backend.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from sglang_ext.planner.simulation.events import EventLoop, ServedPrefill, SimRequest
from sglang_ext.types import DecodeLoad
from sglang_ext_router.decide.decode_choice import DecodePolicy, fits


@dataclass(frozen=True, slots=True)
class DecodeSpec:
    """Equal decode instances. ValueError for a number that makes no sense."""

    instances: int
    kv_tokens: int = 1_000_000  # that one instance holds
    base_s: float = 0.012  # of a step
    per_request_s: float = 0.0002  # of a step, for each member of the batch
    kv_bytes_per_token: int = 131_072  # LLaMA3-8B: 32 layers, 8 KV heads of 128, K and V, 2 bytes
    bandwidth_bytes_per_s: float = 25e9  # of one transfer
    backends: int = 4  # transfers at a time into one instance

    def __post_init__(self) -> None:
        for name in ("instances", "kv_tokens", "kv_bytes_per_token", "backends"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")
        for name in ("base_s", "bandwidth_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0")
        if self.per_request_s < 0:
            raise ValueError(f"per_request_s: {self.per_request_s} is negative")


class FinishedRequest(NamedTuple):
    """A request that has all its tokens."""

    request: SimRequest
    first_token_s: float
    transferred_s: float  # its KV is in the decode instance
    finished_s: float
    instance: int | None = None  # that decoded it; None: its only token came from prefill

    @property
    def time_per_token_s(self) -> float:
        """Mean time between tokens, from the first one on; 0 for a single token."""
        return (self.finished_s - self.first_token_s) / max(1, self.request.output_tokens - 1)


@dataclass(slots=True, eq=False)
class _Member:
    served: ServedPrefill
    transferred_s: float = 0.0

    @property
    def kv_tokens(self) -> int:
        return self.served.request.prompt_tokens + self.served.request.output_tokens


@dataclass(slots=True, eq=False)
class _Decoder:
    """One instance. `steps` is how many decode steps it has made, fractions included."""

    number: int
    free_kv_tokens: int
    reserved_tokens: int = 0  # of transfers queued or under way
    transfers: int = 0
    waiting: list[tuple[float, int, _Member]] = field(default_factory=list)  # for a backend, by first handshake
    batch: list[tuple[float, int, _Member]] = field(default_factory=list)  # by the step at which each ends
    steps: float = 0.0
    steps_at_s: float = 0.0
    generation: int = 0


class DecodePool:
    """Takes prefills that have ended, to the last token.

    `on_finished` is called with each request that has it, `on_transferred` once prefill need not hold its KV any more.
    """

    def __init__(
        self,
        loop: EventLoop,
        spec: DecodeSpec,
        policy: DecodePolicy,
        seed: int,
        on_finished: Callable[[FinishedRequest], None] | None = None,
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._policy = policy
        self._draws = Random(f"decode {seed}")
        self._decoders = [_Decoder(number, spec.kv_tokens) for number in range(spec.instances)]
        self._loads = [self._load(decoder) for decoder in self._decoders]
        self._on_finished = on_finished
        self.on_transferred: Callable[[SimRequest], None] = lambda _: None
        self._under_way: dict[int, _Member] = {}  # transfers
        self.finished: list[FinishedRequest] = []
        self.refused: list[SimRequest] = []  # larger than an instance

    def on_first_token(self, served: ServedPrefill) -> None:
        """Choose an instance and queue the transfer."""
        request = served.request
        member = _Member(served)
        if not fits(self._loads[0], member.kv_tokens):
            self.refused.append(request)
            self.on_transferred(request)
            return
        if request.output_tokens == 1:
            now_s = self._loop.now_s
            self._finish(FinishedRequest(request, served.first_token_s, now_s, now_s))
            self.on_transferred(request)
            return
        decoder = self._decoders[self._policy.choose(self._loads, self._draws.random())]
        decoder.reserved_tokens += member.kv_tokens
        heapq.heappush(decoder.waiting, (served.start_s, request.key, member))
        self._start_transfers(decoder)

    def unfinished(self) -> Iterable[SimRequest]:
        """Prefilled, without their last token."""
        queued = [entry[2] for decoder in self._decoders for entry in (*decoder.waiting, *decoder.batch)]
        return [member.served.request for member in (*queued, *self._under_way.values())]

    def _finish(self, finished: FinishedRequest) -> None:
        self.finished.append(finished)
        if self._on_finished is not None:
            self._on_finished(finished)

    def _load(self, decoder: _Decoder) -> DecodeLoad:
        under_way = len(decoder.batch) + decoder.transfers + len(decoder.waiting)
        return DecodeLoad(
            decoder.number, decoder.free_kv_tokens, decoder.reserved_tokens, under_way, self._spec.kv_tokens
        )

    def _start_transfers(self, decoder: _Decoder) -> None:
        """Start what a backend and KV are free for. Every change of an instance ends here."""
        spec = self._spec
        while decoder.waiting and decoder.transfers < spec.backends:
            member = decoder.waiting[0][2]
            if member.kv_tokens > decoder.free_kv_tokens:
                break  # KV is there when a member of the batch ends
            heapq.heappop(decoder.waiting)
            decoder.transfers += 1
            self._under_way[member.served.request.key] = member
            decoder.free_kv_tokens -= member.kv_tokens
            decoder.reserved_tokens -= member.kv_tokens
            duration_s = member.served.request.prompt_tokens * spec.kv_bytes_per_token / spec.bandwidth_bytes_per_s
            self._loop.schedule(self._loop.now_s + duration_s, self._join, (decoder, member))
        self._loads[decoder.number] = self._load(decoder)

    def _join(self, arrived: tuple[_Decoder, _Member]) -> None:
        decoder, member = arrived
        decoder.transfers -= 1
        del self._under_way[member.served.request.key]
        member.transferred_s = self._loop.now_s
        self._advance(decoder)
        request = member.served.request
        heapq.heappush(decoder.batch, (decoder.steps + request.output_tokens - 1, request.key, member))
        self._start_transfers(decoder)
        self._schedule_end(decoder)
        self.on_transferred(request)

    def _advance(self, decoder: _Decoder) -> None:
        """Bring `steps` to the present."""
        now_s = self._loop.now_s
        if decoder.batch:
            decoder.steps += (now_s - decoder.steps_at_s) / self._step_s(decoder)
        decoder.steps_at_s = now_s

    def _step_s(self, decoder: _Decoder) -> float:
        return self._spec.base_s + self._spec.per_request_s * len(decoder.batch)

    def _schedule_end(self, decoder: _Decoder) -> None:
        decoder.generation += 1
        if decoder.batch:
            left_s = (decoder.batch[0][0] - decoder.steps) * self._step_s(decoder)
            self._loop.schedule(self._loop.now_s + left_s, self._end, (decoder, decoder.generation))

    def _end(self, awaited: tuple[_Decoder, int]) -> None:
        decoder, generation = awaited
        if decoder.generation != generation:
            return
        self._advance(decoder)
        # This event is the end of the first one, even if rounding of `steps` says otherwise.
        decoder.steps = max(decoder.steps, decoder.batch[0][0])
        while decoder.batch and decoder.batch[0][0] <= decoder.steps:
            member = heapq.heappop(decoder.batch)[2]
            decoder.free_kv_tokens += member.kv_tokens
            served = member.served
            self._finish(
                FinishedRequest(
                    *(served.request, served.first_token_s, member.transferred_s, self._loop.now_s), decoder.number
                )
            )
        self._start_transfers(decoder)
        self._schedule_end(decoder)
