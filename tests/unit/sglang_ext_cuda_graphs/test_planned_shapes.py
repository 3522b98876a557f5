"""The scheduler's policy and the runner of the graphs agree: a batch runs on the shape that it was planned for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.graphs.decide.graph_grid import Fallback, GraphShape
from sglang_ext.laps.decide.cost_model import CostCoefficients, IterationSample
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import (
    PriorityClass,
    QueuedPrefill,
    RoundSnapshot,
)
from sglang_ext_cuda_graphs.capture_plan import MemoryLedger
from sglang_ext_cuda_graphs.prefill_graphs import PrefillGraphs
from sglang_ext_cuda_graphs.recorders import Recording
from sglang_ext_kernels.padded_batch import PaddedBatch
from support.direct_recorder import DirectRecorder
from support.prefill_loop import CPU, GPU, LIMITS, SHORT

MAX_PREFIX_TOKENS = 600
ONE_TOKEN = IterationSample(1.0, 1, 0, 1, 0.01)


class FullDevice(DirectRecorder):
    """Has memory for so many recordings."""

    def __init__(self, room: int) -> None:
        self._room = room

    def record(self, compute: Callable[[], None]) -> Recording:
        if self._room == 0:
            raise torch.OutOfMemoryError("the device has no memory left")
        self._room -= 1
        return super().record(compute)


def nothing(shape: GraphShape, batch: PaddedBatch) -> torch.Tensor:
    return torch.zeros(batch.ids.numel(), 1)


def build(shapes: set[tuple[int, int]], room: int) -> PrefillGraphs:
    output = torch.zeros(max(length * requests for length, requests in shapes), 1)
    order = [GraphShape(*shape) for shape in sorted(shapes)]
    ledger = MemoryLedger(None, 1.0)
    return PrefillGraphs(order, nothing, FullDevice(room), ledger, output, MAX_PREFIX_TOKENS, lambda: 0.0)


def snapshot(now_s: float, lengths: list[tuple[int, int]], free_tokens: int) -> RoundSnapshot:
    queue = tuple(
        QueuedPrefill(key, SHORT, new, cached, new, now_s - 1, now_s + 9, PriorityClass.NORMAL, False, False)
        for key, (new, cached) in enumerate(lengths)
    )
    return RoundSnapshot(now_s, queue, free_tokens)


@pytest.mark.slow
@settings(deadline=None)
@given(
    shapes=st.sets(st.tuples(st.integers(1, 200), st.integers(1, 16)), min_size=1, max_size=12),
    room=st.integers(0, 13),
    cost=st.sampled_from([CPU, GPU]),
    rounds=st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(1, 256), st.sampled_from([0, 3, 150])), min_size=1, max_size=20),
            st.sampled_from([40, 100_000]),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_what_is_planned_is_what_the_runner_chooses(
    shapes: set[tuple[int, int]],
    room: int,
    cost: CostCoefficients,
    rounds: list[tuple[list[tuple[int, int]], int]],
) -> None:
    graphs = build(shapes, room)
    laps = Laps(LapsOptions(), graphs.grid, cost, LIMITS)
    refused: set[GraphShape] = set()
    for number, (lengths, free_tokens) in enumerate(rounds):
        for action in laps.choose_of(snapshot(10.0 * number, lengths, free_tokens)).batches:
            assert action.is_short
            members = [lengths[key] for key in action.keys]
            choice = graphs.choose([new for new, _ in members], [cached for _, cached in members])
            if action.shape is None:
                assert isinstance(choice, Fallback)
                continue
            assert choice == action.shape
            if not graphs.make_ready(action.shape):
                assert action.shape not in refused  # it is refused once, and then never planned again
                refused.add(action.shape)
    assert not refused & set(graphs.grid.shapes)


def test_depths_follow_the_shapes_that_are_left() -> None:
    graphs = build({(8, 1), (8, 4), (8, 16)}, room=0)
    laps = Laps(LapsOptions(), graphs.grid, GPU, LIMITS)
    before = snapshot(10.0, [(8, 0)] * 16, 10_000)
    assert laps.report(before).depth == 16
    (action,) = laps.choose_of(before).batches
    assert action.is_short
    assert action.shape == (8, 16)
    assert not graphs.make_ready(action.shape)
    laps.record_iteration(ONE_TOKEN)
    assert laps.report(before).depth == 4
    (action,) = laps.choose_of(before).batches
    assert action.is_short
    assert (len(action.keys), action.shape) == (4, (8, 4))
