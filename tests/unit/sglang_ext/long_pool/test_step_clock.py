"""Where a member's time in a step goes: waiting in the ring, moving earlier KV, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from sglang_ext.long_pool.decide.sharding import Interleaving, Positions, lay_out
from sglang_ext.long_pool.member.chunk_step import StepContext, run_chunk, run_collect
from sglang_ext.long_pool.member.shard import Shard
from sglang_ext.long_pool.mesh.mesh import Lane, Pending
from sglang_ext.long_pool.step_clock import StepClock, StepTimes
from support.toy_engine import LAYERS, ToyEngine, ToyPool

TOKENS = 24
COMPUTE_S = 100.0


class HandClock(StepClock):
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.now_s = lambda: self.seconds
        super().__init__()


class SlowMesh:
    """Sending takes no time, waiting for what a tag brings takes `seconds_of(tag)`."""

    members: tuple[int, ...] = (0, 1)

    def __init__(self, clock: HandClock, ring_tags: range, ring_s: float, move_s: float) -> None:
        self._clock, self._ring_tags, self._ring_s, self._move_s = clock, ring_tags, ring_s, move_s

    def batch(self, lane: Lane = Lane.RING) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, sequence: int) -> AbstractContextManager[None]:
        return nullcontext()

    def settle(self) -> None:
        pass

    def send(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        return _Waiting(self._clock, 0.0)

    def receive(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        tensor.zero_()
        return _Waiting(self._clock, self._ring_s if tag in self._ring_tags else self._move_s)


class _Waiting:
    def __init__(self, clock: HandClock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def wait(self) -> None:
        self._clock.seconds += self._seconds


class SlowEngine(ToyEngine):
    """A forward that takes COMPUTE_S beside its waits."""

    def __init__(self, pool: ToyPool, clock: HandClock) -> None:
        super().__init__(pool)
        self._clock = clock

    def forward(self, token_ids: Sequence[int], *arguments: object) -> torch.Tensor:
        self._clock.seconds += COMPUTE_S
        return super().forward(token_ids, *arguments)  # type: ignore[arg-type]


def test_a_chunk_on_two_instances_after_one_on_the_other() -> None:
    first: Positions = (range(TOKENS),)
    _, held = lay_out({}, first, (0,), Interleaving.ZIGZAG)
    layout, _ = lay_out(held, (range(TOKENS, 2 * TOKENS),), (0, 1), Interleaving.ZIGZAG)
    assert layout.moves, "some of it has to move to instance 1"
    pool = ToyPool(256, 1)
    clock = HandClock()
    ring_tags = range(LAYERS * len(layout.group))
    mesh = SlowMesh(clock, ring_tags, ring_s=2.0, move_s=3.0)
    positions = [p for part in layout.new[1] for p in part]
    step = StepContext(mesh, 1, 0, clock)
    run_chunk(step, SlowEngine(pool, clock), Shard(pool), layout, [p % 7 for p in positions])
    assert clock.times() == StepTimes(
        COMPUTE_S + LAYERS * (2.0 + len(layout.moves) * 3.0), LAYERS * 2.0, LAYERS * len(layout.moves) * 3.0
    )
    assert clock.times().compute_s == COMPUTE_S


def test_a_single_member_waits_for_no_other() -> None:
    layout, _ = lay_out({}, (range(TOKENS),), (0,), Interleaving.ZIGZAG)
    pool = ToyPool(256, 1)
    clock = HandClock()
    shard = Shard(pool)
    mesh = SlowMesh(clock, range(0), 1.0, 1.0)
    step = StepContext(mesh, 0, 0, clock)
    run_chunk(step, SlowEngine(pool, clock), shard, layout, [1] * TOKENS)
    run_collect(step, pool, shard, ())
    assert clock.times() == StepTimes(COMPUTE_S, 0.0, 0.0)


def test_every_layer_is_a_sign_of_life() -> None:
    layout, _ = lay_out({}, (range(TOKENS),), (0,), Interleaving.ZIGZAG)
    pool = ToyPool(256, 1)
    clock = HandClock()
    told: list[float] = []
    mesh = SlowMesh(clock, range(0), 1.0, 1.0)
    step = StepContext(mesh, 0, 0, record_activity=lambda: told.append(clock.seconds))
    run_chunk(step, SlowEngine(pool, clock), Shard(pool), layout, [1] * TOKENS)
    assert len(told) == LAYERS


def test_rounding_makes_no_negative_time() -> None:
    assert StepTimes(1.0, 0.75, 0.5).compute_s == 0.0
