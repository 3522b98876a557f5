"""Real CUDA graphs: a replay computes from what the static tensors hold now, and all share one pool."""

from __future__ import annotations

import time

import pytest
import torch

from sglang_ext.graphs.decide.graph_grid import GraphShape
from sglang_ext_cuda_graphs.capture_plan import MemoryLedger, plan_captures
from sglang_ext_cuda_graphs.prefill_graphs import PrefillGraphs
from sglang_ext_cuda_graphs.recorders import CudaRecorder
from sglang_ext_kernels.padded_batch import PaddedBatch, RaggedBatch

pytestmark = pytest.mark.gpu

HIDDEN, WIDE = 256, 65536


@pytest.fixture
def graphs() -> PrefillGraphs:
    generator = torch.Generator("cuda").manual_seed(1)
    embedding = torch.randn(1000, HIDDEN, device="cuda", generator=generator)
    up = torch.randn(HIDDEN, WIDE, device="cuda", generator=generator) / HIDDEN**0.5

    def forward(shape: GraphShape, batch: PaddedBatch) -> torch.Tensor:
        x = embedding[batch.ids] + batch.positions[:, None]
        return (x @ up)[:, :HIDDEN].tanh()

    shapes = plan_captures([8, 64], [1, 16], 1024, 16)
    output = torch.zeros(1024, HIDDEN, device="cuda")
    graphs = PrefillGraphs(shapes, forward, CudaRecorder(), MemoryLedger(None, 1.0), output, 10, time.perf_counter)
    graphs.reference = lambda ids, positions: ((embedding[ids] + positions[:, None]) @ up)[:, :HIDDEN].tanh()  # type: ignore[attr-defined]
    return graphs


def ragged(seed: int, lengths: list[int]) -> RaggedBatch:
    generator = torch.Generator("cuda").manual_seed(seed)
    count = sum(lengths)
    return RaggedBatch(
        ids=torch.randint(0, 1000, (count,), device="cuda", generator=generator),
        positions=torch.cat([torch.arange(length, device="cuda") for length in lengths]),
        cache_slots=torch.arange(count, device="cuda"),
        rows=torch.arange(len(lengths), device="cuda"),
        new_lens=torch.tensor(lengths, device="cuda"),
        prefix_lens=torch.zeros(len(lengths), dtype=torch.int64, device="cuda"),
        table=torch.zeros(16, 8, dtype=torch.int32, device="cuda"),
        longest_prefix_tokens=0,
    )


def test_replays_follow_the_static_tensors(graphs: PrefillGraphs) -> None:
    list(graphs.capture_all())
    for seed, lengths in enumerate([[8], [3], [64] * 16, [60] * 9, [7] * 9]):
        shape = graphs.choose(lengths, [0] * len(lengths))
        assert isinstance(shape, GraphShape)
        batch = ragged(seed, lengths)
        graphs.load(shape, batch)
        got = graphs.replay(shape)[: sum(lengths)]
        torch.testing.assert_close(got, graphs.reference(batch.ids, batch.positions), atol=1e-4, rtol=1e-4)  # type: ignore[attr-defined]


def test_smaller_shapes_do_not_make_the_pool_grow(graphs: PrefillGraphs) -> None:
    list(graphs.capture_all())
    first, *others = graphs.costs
    assert first.shape.tokens == 1024
    assert first.pool_growth_bytes >= 1024 * WIDE * 4
    assert sum(cost.pool_growth_bytes for cost in others) <= first.pool_growth_bytes // 10


def test_first_replays_take_no_memory_that_the_captures_have_not_counted(graphs: PrefillGraphs) -> None:
    list(graphs.capture_all())
    torch.cuda.synchronize()
    free_bytes = torch.cuda.mem_get_info()[0]
    for shape in graphs.captured:
        graphs.replay(shape)
    torch.cuda.synchronize()
    assert free_bytes - torch.cuda.mem_get_info()[0] <= 2 << 20  # what a device allocates at least


def test_after_a_capture_that_failed_others_capture_and_draw() -> None:
    recorder = CudaRecorder()
    x, total = torch.ones(4, device="cuda"), torch.zeros(1, device="cuda")

    def synchronises() -> None:
        if float(x.sum().item()) > 0:
            total.add_(1.0)

    before = torch.cuda.current_stream()
    with recorder.session():
        with pytest.raises(RuntimeError):
            recorder.record(synchronises)
        torch.rand(4, device="cuda")
        recording = recorder.record(lambda: total.add_(x.sum()))
    assert torch.cuda.current_stream() == before
    recording.replay()
    torch.cuda.synchronize()
    assert float(total.item()) == 4.0
    torch.multinomial(torch.rand(4, device="cuda"), 1)
    with CudaRecorder(recorder.pool).session():  # as SGLang's own graphs do, later
        CudaRecorder(recorder.pool).record(lambda: total.mul_(2.0))
