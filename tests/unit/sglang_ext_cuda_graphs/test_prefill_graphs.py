"""Choice, capture, padding and replay over a toy model, on tensors of a CPU; a recorder that counts."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.graphs.decide.graph_grid import Fallback, GraphShape
from sglang_ext_cuda_graphs import prefill_graphs
from sglang_ext_cuda_graphs.capture_plan import MemoryLedger, plan_captures
from sglang_ext_cuda_graphs.prefill_graphs import MAX_FAILURES_IN_A_ROW, PrefillGraphs
from sglang_ext_cuda_graphs.recorders import DeviceMemory, Recording
from sglang_ext_kernels.padded_batch import PaddedBatch, RaggedBatch, pad_batch_
from support.direct_recorder import DirectRecorder

HIDDEN = 4
GRAPH_BYTES = 10


class CountingRecorder(DirectRecorder):
    """Every graph takes memory when it is first launched; the pool grows once, with the first capture."""

    def __init__(self) -> None:
        self.recorded = 0
        self.launched: set[CountedRecording] = set()
        self.is_full = False
        self.is_full_at_launch = False

    def record(self, compute: Callable[[], None]) -> Recording:
        if self.is_full:
            raise torch.OutOfMemoryError("the device has no memory left")
        self.recorded += 1
        return CountedRecording(self, super().record(compute))

    def memory(self) -> DeviceMemory:
        pool = 100 if self.recorded else 0
        return DeviceMemory(pool + GRAPH_BYTES * len(self.launched), pool)


class CountedRecording:
    """A recording that is uploaded when it is launched for the first time."""

    def __init__(self, recorder: CountingRecorder, recording: Recording) -> None:
        self._recorder = recorder
        self._recording = recording

    def replay(self) -> None:
        if self._recorder.is_full_at_launch:
            raise torch.OutOfMemoryError("the device has no memory left")
        self._recorder.launched.add(self)
        self._recording.replay()


def toy(shape: GraphShape, batch: PaddedBatch) -> torch.Tensor:
    """Of each token: its id, its position, and the sums of its request's prefix slots and of all ids."""
    owner = torch.searchsorted(batch.qo_indptr, torch.arange(batch.ids.numel()), right=True) - 1
    prefix = [int(batch.kv_indices[batch.kv_indptr[i] : batch.kv_indptr[i + 1]].sum()) for i in range(shape.slots)]
    sums = torch.tensor([*prefix, 0])[owner.clamp(max=shape.slots)]
    return torch.stack([batch.ids, batch.positions, sums, batch.ids.sum().expand_as(sums)], dim=1).float()


def build(
    budget_bytes: int | None = None, max_prefix_tokens: int = 100, lengths: tuple[int, ...] = (4, 8)
) -> tuple[PrefillGraphs, CountingRecorder]:
    recorder = CountingRecorder()
    shapes = plan_captures(lengths, [1, 2, 4], 4 * max(lengths), 4)
    clock = iter(range(1000))
    ledger = MemoryLedger(budget_bytes, assumed_bytes_per_token=1.0)
    output = torch.full((4 * max(lengths), HIDDEN), float("nan"))
    return PrefillGraphs(shapes, toy, recorder, ledger, output, max_prefix_tokens, lambda: next(clock)), recorder


def ragged(new_lens: list[int], prefix_lens: list[int]) -> RaggedBatch:
    count = sum(new_lens)
    positions = [p + i for n, p in zip(new_lens, prefix_lens, strict=True) for i in range(n)]
    return RaggedBatch(
        ids=torch.arange(1, count + 1),
        positions=torch.tensor(positions),
        cache_slots=torch.arange(1000, 1000 + count),
        rows=torch.arange(len(new_lens)),
        new_lens=torch.tensor(new_lens),
        prefix_lens=torch.tensor(prefix_lens),
        table=torch.arange(20 * 50, dtype=torch.int32).view(20, 50),
        longest_prefix_tokens=max(prefix_lens),
    )


@pytest.mark.slow
def test_all_are_captured_at_start() -> None:
    graphs, recorder = build()
    assert list(graphs.capture_all()) == plan_captures([4, 8], [1, 2, 4], 32, 4)
    assert recorder.recorded == 6
    assert graphs.captured == frozenset(graphs.grid.shapes)
    assert (graphs.pool_bytes, graphs.used_bytes) == (100, 100 + 6 * GRAPH_BYTES)
    assert [cost.seconds for cost in graphs.costs] == [1] * 6


def test_lazily_each_is_captured_once_when_wanted() -> None:
    graphs, recorder = build()
    assert not graphs.captured
    for _ in range(3):
        assert graphs.make_ready(GraphShape(4, 2))
    assert recorder.recorded == 1
    with pytest.raises(KeyError):
        graphs.replay(GraphShape(8, 1))


@pytest.mark.slow
def test_shapes_beyond_the_budget_leave_the_grid() -> None:
    graphs, recorder = build(budget_bytes=100 + 3 * GRAPH_BYTES)
    list(graphs.capture_all())
    assert recorder.recorded == 3
    assert set(graphs.grid.shapes) == graphs.captured == {(8, 4), (4, 4), (8, 2)}
    assert graphs.choose([3], [0]) == GraphShape(4, 4)
    assert not graphs.make_ready(GraphShape(8, 1))


def test_a_shape_for_which_memory_runs_out_leaves_the_grid() -> None:
    graphs, recorder = build()
    assert graphs.make_ready(GraphShape(4, 2))
    recorder.is_full = True
    assert not graphs.make_ready(GraphShape(8, 1))
    assert GraphShape(8, 1) not in graphs.grid.shapes
    assert graphs.choose([8], [0]) == GraphShape(8, 2)
    assert graphs.make_ready(GraphShape(4, 2))
    assert graphs.captured == {(4, 2)}


@pytest.mark.slow
def test_no_first_request_pays_for_the_upload_of_its_graph() -> None:
    graphs, recorder = build()
    list(graphs.capture_all())
    assert len(recorder.launched) == recorder.recorded == 6
    assert not graphs.replays


def test_a_shape_whose_graph_does_not_fit_when_it_is_launched_leaves_the_grid() -> None:
    graphs, recorder = build()
    recorder.is_full_at_launch = True
    assert not graphs.make_ready(GraphShape(8, 1))
    assert graphs.grid.left_out_reason(GraphShape(8, 1)) is Fallback.MEMORY
    assert not graphs.captured


class FailingRecorder(DirectRecorder):
    """Cannot record the shapes with these numbers of tokens; the error is one over another, as torch's is."""

    def __init__(self, broken_tokens: set[int], is_in_warm_up: bool = False) -> None:
        self.broken_tokens = broken_tokens
        self.is_in_warm_up = is_in_warm_up
        self.tried = 0
        self.tokens = 0

    def toy(self, shape: GraphShape, batch: PaddedBatch) -> torch.Tensor:
        self.tokens = shape.tokens
        return toy(shape, batch)

    def warm_up(self, compute: Callable[[], None]) -> None:
        compute()
        self.tried += 1
        if self.is_in_warm_up and self.tokens in self.broken_tokens:
            raise TypeError("a kernel that does not compile")

    def record(self, compute: Callable[[], None]) -> Recording:
        if self.tokens in self.broken_tokens:
            try:
                raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")
            except RuntimeError:
                raise RuntimeError("capture_end failed")  # noqa: B904 (as it is raised on leaving the capture)
        return super().record(compute)


def build_failing(recorder: FailingRecorder, agree: Callable[[bool], bool] = bool) -> PrefillGraphs:
    shapes = plan_captures([4, 8], [1, 2, 4], 32, 4)
    ledger = MemoryLedger(None, assumed_bytes_per_token=1.0)
    return PrefillGraphs(shapes, recorder.toy, recorder, ledger, torch.zeros(32, HIDDEN), 100, lambda: 0.0, agree)


@pytest.mark.slow
@pytest.mark.parametrize("is_in_warm_up", [False, True])
def test_a_shape_whose_capture_fails_leaves_the_grid_and_the_others_serve(
    is_in_warm_up: bool, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = FailingRecorder({16}, is_in_warm_up)  # 8 x 2 and 4 x 4, the second and third in the order
    graphs = build_failing(recorder)
    with caplog.at_level(logging.WARNING):
        assert len(list(graphs.capture_all())) == 6
    assert graphs.captured == frozenset(graphs.grid.shapes) == {(8, 4), (4, 2), (8, 1), (4, 1)}
    first = "TypeError: a kernel that does not compile" if is_in_warm_up else "RuntimeError: operation not permitted"
    assert len(caplog.records) == 2
    for record, shape in zip(caplog.records, ("4 tokens x 4", "8 tokens x 2"), strict=True):
        assert record.getMessage().startswith(f"no prefill graph of {shape}, its batches run without: {first}")
        assert "\n" not in record.getMessage()
    assert graphs.choose([8, 8], [0, 0]) == GraphShape(8, 4)  # the next that holds it
    batch = ragged([3], [0])
    graphs.load(GraphShape(4, 1), batch)
    assert torch.equal(graphs.replay(GraphShape(4, 1))[:3, 0], batch.ids.float())


def test_a_failure_at_serving_is_counted_by_its_reason() -> None:
    recorder = FailingRecorder({4})
    graphs = build_failing(recorder)
    assert not graphs.make_ready(GraphShape(4, 1))
    assert graphs.grid.left_out_reason(GraphShape(4, 1)) is Fallback.CAPTURE
    assert graphs.grid.left_out_reason(GraphShape(8, 1)) is None
    assert not graphs.make_ready(GraphShape(4, 1))
    assert graphs.make_ready(GraphShape(8, 1))


@pytest.mark.slow
def test_when_all_fail_it_stops_trying(caplog: pytest.LogCaptureFixture) -> None:
    recorder = FailingRecorder({4, 8, 16, 32})
    graphs = build_failing(recorder)
    with caplog.at_level(logging.WARNING):
        list(graphs.capture_all())
    assert recorder.tried == MAX_FAILURES_IN_A_ROW
    assert not graphs.grid.shapes
    assert not graphs.captured
    assert len(caplog.records) == MAX_FAILURES_IN_A_ROW + 1
    assert caplog.records[-1].getMessage() == "3 captures failed one after the other, no more are tried"
    assert graphs.choose([4], [0]) is Fallback.CAPTURE


@pytest.mark.slow
def test_ranks_drop_what_one_of_them_has_not_captured() -> None:
    """What a peer rank says decides, in the same order of questions."""
    peer_fails_at = {2: False, 5: False}  # of the questions: is there room, is it recorded, by turns
    asked = []

    def agree(is_well: bool) -> bool:
        asked.append(is_well)
        return is_well and peer_fails_at.get(len(asked), True)

    graphs = build_failing(FailingRecorder(set()), agree)
    first, second, *_ = list(graphs.capture_all())
    assert all(asked)
    assert first not in graphs.captured  # question 2: the peer has not recorded it; 3: it had the memory
    assert graphs.grid.left_out_reason(first) is Fallback.CAPTURE
    assert second not in graphs.captured  # question 5: neither this one; 4: there was room
    assert graphs.captured == frozenset(graphs.grid.shapes)
    assert len(graphs.captured) == 4


@pytest.mark.slow
def test_nothing_is_collected_while_all_are_captured() -> None:
    frozen = []

    class Looking(DirectRecorder):
        def record(self, compute: Callable[[], None]) -> Recording:
            frozen.append(gc.get_freeze_count())
            return super().record(compute)

    shapes = plan_captures([4], [1, 2], 8, 2)
    arguments: tuple[Any, ...] = (shapes, toy, Looking(), MemoryLedger(None, 1.0), torch.zeros(8, HIDDEN), 1, lambda: 0)
    before = gc.get_freeze_count()
    list(PrefillGraphs(*arguments).capture_all())
    assert all(count > 0 for count in frozen)
    assert gc.get_freeze_count() == before


@pytest.mark.slow
def test_padding_is_compiled_before_the_first_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = []

    def note(static: PaddedBatch, batch: RaggedBatch) -> None:
        padded.append((batch.longest_prefix_tokens, [tensor.dtype for tensor in batch[:-1]]))
        pad_batch_(static, batch)

    monkeypatch.setattr(prefill_graphs, "pad_batch_", note)
    graphs, _ = build()
    list(graphs.capture_all())
    types = [torch.int64] * 4 + [torch.int32] * 3  # those of SGLang
    assert padded == [(1, types)]


@pytest.mark.slow
def test_why_a_batch_has_no_shape() -> None:
    graphs, _ = build(budget_bytes=GRAPH_BYTES, max_prefix_tokens=10)
    assert graphs.choose([9], [0]) is Fallback.TOO_LARGE
    assert graphs.choose([1] * 5, [0] * 5) is Fallback.TOO_LARGE
    assert graphs.choose([1, 1], [6, 5]) is Fallback.PREFIXES
    assert graphs.choose([1, 1], [6, 4]) == GraphShape(4, 2)
    list(graphs.capture_all())
    assert graphs.choose([8, 8], [0, 0]) is Fallback.MEMORY


def test_padding_that_costs_more_than_it_saves_is_refused() -> None:
    shapes = plan_captures([128], [1, 2, 4], 512, 4)
    ledger = MemoryLedger(None, 1.0)
    graphs = PrefillGraphs(shapes, toy, DirectRecorder(), ledger, torch.zeros(512, HIDDEN), 1, lambda: 0.0)
    assert graphs.choose([1, 1], [0, 0]) == GraphShape(128, 1)  # reading the weights takes longer
    assert graphs.choose([128, 100, 28], [0, 0, 0]) == GraphShape(128, 2)
    assert graphs.choose([128, *[15] * 8], [0] * 9) is Fallback.PADDING
    assert graphs.choose([128, *[16] * 8], [0] * 9) == GraphShape(128, 4)


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.lists(st.tuples(st.integers(1, 8), st.integers(0, 12)), min_size=1, max_size=16),
            st.lists(st.tuples(st.integers(1, 64), st.integers(0, 12)), min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_a_batch_is_what_it_is_alone_whatever_ran_before(history: list[list[tuple[int, int]]]) -> None:
    graphs, _ = build(max_prefix_tokens=1000, lengths=(4, 8, 64))
    for lengths in history:
        new_lens, prefix_lens = [new for new, _ in lengths], [prefix for _, prefix in lengths]
        shape = graphs.choose(new_lens, prefix_lens)
        assert isinstance(shape, GraphShape)
        assert graphs.make_ready(shape)
        batch = ragged(new_lens, prefix_lens)
        graphs.load(shape, batch)
        hidden = graphs.replay(shape)
        assert hidden.shape == (shape.tokens, HIDDEN)
        real = hidden[: sum(new_lens)]
        count = sum(new_lens)
        sums = [int(batch.table[i, :prefix].sum()) for i, (new, prefix) in enumerate(lengths) for _ in range(new)]
        wanted = [batch.ids, batch.positions, torch.tensor(sums), torch.full((count,), count * (count + 1) // 2)]
        assert torch.equal(real, torch.stack(wanted, dim=1).float())
        assert not hidden[count:, :2].any()  # padded tokens: id 0 at position 0
    assert sum(graphs.replays.values()) == len(history)


def test_an_output_that_is_too_small_and_an_empty_grid_are_refused() -> None:
    ledger = MemoryLedger(None, 1.0)
    with pytest.raises(ValueError, match="at least one shape"):
        PrefillGraphs([], toy, DirectRecorder(), ledger, torch.zeros(1, 1), 1, lambda: 0.0)
    with pytest.raises(ValueError, match="3 rows does not hold 4 tokens"):
        PrefillGraphs([GraphShape(4, 1)], toy, DirectRecorder(), ledger, torch.zeros(3, 1), 1, lambda: 0.0)
