"""Prefill graphs by length and batch size on a GPU, over a plain Qwen2-7B of random numbers: without an engine.

    python bench/gpu/graphs.py [--model NAME] [--out FILE] [--dry-run]

The grid of 42 shapes is captured by the classes that serve (`PrefillGraphs`, `CudaRecorder`, `MemoryLedger`); then, for
each shape and for batches behind cached prefixes: the replay with its padding, the replay alone, and the eager pass,
against the least time that the device's ceilings allow; logits against a pass without fused kernels. A ragged batch
must be right, too, and attention that is wrong on purpose must be seen.

A bad number: an error is a wrong replay. A replay far above the floor where the eager pass is not: kernels that the
graph starts in another way. Seconds or memory of a capture above their bounds: captures would delay a start, or leave
less room for KV.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

import gpu.checkout  # noqa: F401
from gpu.measure import (
    DEVICE,
    HAS_GPU,
    Ceilings,
    Report,
    measure_ceilings,
    median_s,
    parser,
    progress,
    relative_error,
    synchronize,
)
from gpu.model_shapes import SHAPES, floor_s
from gpu.plain_model import Attention, PlainModel
from sglang_ext.graphs.decide.graph_grid import GraphShape
from sglang_ext_cuda_graphs.capture_plan import (
    DEFAULT_BATCH_SIZES,
    DEFAULT_LENGTHS_TOKENS,
    MemoryLedger,
    plan_captures,
)
from sglang_ext_cuda_graphs.prefill_graphs import PrefillGraphs
from sglang_ext_cuda_graphs.recorders import CudaRecorder, Recorder
from sglang_ext_kernels.padded_batch import PaddedBatch, RaggedBatch
from support.direct_recorder import DirectRecorder

POOL_TOKENS = 60000 if HAS_GPU else 1000
MAX_BATCH_TOKENS = 16384
MAX_PREFIX_TOKENS = 1 << 20
# New tokens x requests, cached tokens of each.
REPREFILLS = ((16, 1, 1024), (16, 1, 4096), (16, 4, 4096), (64, 4, 4096), (256, 4, 4096))
SMALL_REPREFILLS = ((8, 2, 40), (16, 1, 33))
# The pass without fused kernels holds all scores: only of batches for which that is little.
CHECKED_TOKENS = 2048
EAGER_RUNS = 3
FEW_TOKENS = 128


def draw_batch(model: PlainModel, new_lens: Sequence[int], prefix_lens: Sequence[int], seed: int) -> RaggedBatch:
    """Random ids; slots drawn at random from the pool."""
    generator = torch.Generator().manual_seed(seed)
    totals = [new + prefix for new, prefix in zip(new_lens, prefix_lens, strict=True)]
    slots = torch.randperm(model.k_pools[0].shape[0] - 1, generator=generator)[: sum(totals)] + 1
    table = torch.zeros(len(totals), max(totals), dtype=torch.int32)
    for row, part in enumerate(slots.split(totals)):
        table[row, : len(part)] = part.int()
    new = [part[prefix:] for part, prefix in zip(slots.split(totals), prefix_lens, strict=True)]
    positions = [torch.arange(prefix, total) for prefix, total in zip(prefix_lens, totals, strict=True)]
    return RaggedBatch(
        ids=torch.randint(0, model.shape.vocabulary, (sum(new_lens),), generator=generator).to(DEVICE),
        positions=torch.cat(positions).to(DEVICE),
        cache_slots=torch.cat(new).to(DEVICE),
        rows=torch.arange(len(totals)).to(DEVICE),
        new_lens=torch.tensor(new_lens, dtype=torch.int32).to(DEVICE),
        prefix_lens=torch.tensor(prefix_lens, dtype=torch.int32).to(DEVICE),
        table=table.to(DEVICE),
        longest_prefix_tokens=max(prefix_lens),
    )


class Grid:
    """The captured grid, and what is measured on it."""

    def __init__(self, model: PlainModel, shapes: Sequence[GraphShape], report: Report) -> None:
        self._model = model
        self._report = report
        self._matrices_s: dict[int, float] = {}
        dtype = model.k_pools[0].dtype
        output = torch.zeros(shapes[0].tokens, model.shape.hidden, device=DEVICE, dtype=dtype)
        per_token = 2.0 * (3 * model.shape.intermediate + 6 * model.shape.hidden)
        recorder: Recorder = CudaRecorder() if HAS_GPU else DirectRecorder()
        ledger = MemoryLedger(int(20e9), per_token)
        self.graphs = PrefillGraphs(
            shapes, model.forward, recorder, ledger, output, MAX_PREFIX_TOKENS, time.perf_counter
        )

    def capture(self) -> None:
        """Capture all shapes: seconds and memory."""
        free_bytes = torch.cuda.mem_get_info()[0] if HAS_GPU else 0
        started_s = time.perf_counter()
        planned = sum(1 for _ in self.graphs.capture_all())
        seconds = time.perf_counter() - started_s
        count = len(self.graphs.captured)
        found = {
            "planned": planned,
            "graphs": count,
            "seconds": seconds,
            "worst_s": max(cost.seconds for cost in self.graphs.costs),
            "pool_bytes": self.graphs.pool_bytes,
            "own_bytes_per_graph": (self.graphs.used_bytes - self.graphs.pool_bytes) / max(1, count),
            "taken_bytes": free_bytes - torch.cuda.mem_get_info()[0] if HAS_GPU else 0,
            "costs": [
                [*cost.shape, cost.pool_growth_bytes, cost.own_bytes, cost.seconds] for cost in self.graphs.costs
            ],
        }
        self._report.record(capture=found)
        self._report.check("shapes captured", count, at_least=planned)
        self._report.check("seconds of all captures", seconds, at_most=30, is_speed=True)
        own_mb = found["own_bytes_per_graph"] / 1e6
        self._report.check("MB of a graph's own", own_mb, at_most=20, is_speed=True)

    def measure(self, length: int, requests: int, prefix: int, ceilings: Ceilings) -> dict[str, Any] | None:
        """One batch of equal requests; None where no shape of the grid holds it."""
        model, lens, prefixes = self._model, [length] * requests, [prefix] * requests
        shape = self.graphs.choose(lens, prefixes)
        if not isinstance(shape, GraphShape):
            progress(f"not on the grid: {length} x {requests} behind {prefix}: {shape}")
            return None
        batch = draw_batch(model, lens, prefixes, 1)
        if prefix:
            for pool in (*model.k_pools, *model.v_pools):
                pool.normal_()
        static = self.graphs.load(shape, batch)
        row: dict[str, Any] = {"new": length, "requests": requests, "cached": prefix, "shape": [*shape]}
        if length * requests <= CHECKED_TOKENS:
            row["error"] = self.error(shape, static, lens)
            got = self.graphs.replay(shape)[: sum(lens)].clone()
            row["eager_difference"] = relative_error(got, model.forward(shape, static)[: sum(lens)])

        def padded() -> None:
            self.graphs.load(shape, batch)
            self.graphs.replay(shape)

        row["grid_s"] = median_s(padded, 12)
        row["replay_s"] = median_s(lambda: self.graphs.replay(shape), 12)
        row["eager_s"] = host_median_s(lambda: model.forward(shape, static))
        row["matrices_s"] = self.matrices_s(shape.tokens)
        row["floor_s"] = floor_s(model.shape, ceilings, length, requests, prefix)
        return row

    def matrices_s(self, tokens: int) -> float:
        """Seconds of the layers' matrix products alone, in a graph: what is left to the rest of a pass."""
        if tokens not in self._matrices_s:
            recorder: Recorder = CudaRecorder() if HAS_GPU else DirectRecorder()
            products = self._model.matrices(tokens)
            with recorder.session():
                recorder.warm_up(products)
                recording = recorder.record(products)
            self._matrices_s[tokens] = median_s(recording.replay, 12)
        return self._matrices_s[tokens]

    def error(self, shape: GraphShape, static: PaddedBatch, lens: Sequence[int]) -> float:
        """Return the error of the replay's logits of last tokens, against a pass without fused kernels."""
        ends = torch.tensor(lens, device=DEVICE).cumsum(0) - 1
        got = self.graphs.replay(shape)[ends].clone()
        with self._model.unfused(Attention.REFERENCE):
            wanted = self._model.forward(shape, static)[ends]
        return relative_error(self._model.logits(got), self._model.logits(wanted))

    def control_error(self) -> float:
        """Return the error of attention of each token to itself: a comparison of logits must see it."""
        shape = min(self.graphs.captured, key=lambda shape: abs(shape.tokens - 64))
        lens = [shape.length_tokens] * shape.requests
        static = self.graphs.load(shape, draw_batch(self._model, lens, [0] * len(lens), 1))
        passes = []
        for attention in (Attention.ONESELF, Attention.REFERENCE):
            with self._model.unfused(attention):
                passes.append(self._model.logits(self._model.forward(shape, static)[: sum(lens)]))
        return relative_error(*passes)

    def ragged_error(self) -> float:
        """Return the error of a batch of unequal requests, some behind prefixes, with slots to spare."""
        lens, prefixes = [7, 3, 8, 1, 5], [0, 5, 0, 9, 2]
        shape = self.graphs.choose(lens, prefixes)
        if not isinstance(shape, GraphShape):
            raise RuntimeError(f"a ragged batch is not on the grid: {shape}")
        return self.error(shape, self.graphs.load(shape, draw_batch(self._model, lens, prefixes, 3)), lens)


def host_median_s(run: Callable[[], Any]) -> float:
    """Seconds by the host's clock from an idle device: launches included, which an eager pass waits for."""
    run()
    found = []
    for _ in range(EAGER_RUNS):
        synchronize()
        started_s = time.perf_counter()
        run()
        synchronize()
        found.append(time.perf_counter() - started_s)
    return statistics.median(found)


def judge(report: Report, row: dict[str, Any]) -> None:
    """Say what a row should be."""
    label = f"{row['new']} x {row['requests']} behind {row['cached']}"
    tokens = row["new"] * row["requests"]
    bound = 1.25 if tokens <= FEW_TOKENS else 1.5
    report.check(f"grid over floor, {label}", row["grid_s"] / row["floor_s"], at_most=bound, is_speed=True)
    progress(f"    its matrices alone over the floor: {row['matrices_s'] / row['floor_s']:.3f}")
    if tokens <= FEW_TOKENS:
        report.check(f"eager over grid, {label}", row["eager_s"] / row["grid_s"], at_least=1.5, is_speed=True)
    if "error" in row:
        report.check(f"error, {label}", row["error"], at_most=0.03)
        report.check(f"difference from the eager pass, {label}", row["eager_difference"], at_most=1e-3)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--model", choices=list(SHAPES), default=None, help="default: qwen2.5-7b; tiny in a dry run")
    options.add_argument("--within", type=float, default=240.0, help="no batch is begun later (s; default: 240)")
    arguments = options.parse_args()
    end_s = time.perf_counter() + arguments.within
    name = arguments.model or ("tiny" if arguments.dry_run else "qwen2.5-7b")
    torch.set_grad_enabled(False)
    report = Report("graphs", arguments.out, arguments.dry_run)
    report.expect("capture", "42 shapes in 30 s, each below 0.5 s and 20 MB, a pool of 2 to 3 GB that grows once")
    report.expect("a replay over the floor", "at most 1.25 up to 128 new tokens, 1.5 above; eager 1.5 times as long")
    report.expect("on an H100", "at least 8x1 4.7 ms, 64x8 8.5, 256x64 272; behind 4,096 cached 16x1 4.8, 256x4 19.1")
    ceilings = measure_ceilings()
    report.record(model=name, ceilings=ceilings._asdict())
    started_s = time.perf_counter()
    model = PlainModel(SHAPES[name], POOL_TOKENS, torch.bfloat16 if HAS_GPU else torch.float32)
    synchronize()
    report.record(weights_s=time.perf_counter() - started_s)
    lengths, sizes = ((8, 16), (1, 2, 8)) if arguments.dry_run else (DEFAULT_LENGTHS_TOKENS, DEFAULT_BATCH_SIZES)
    grid = Grid(model, plan_captures(lengths, sizes, MAX_BATCH_TOKENS, max(sizes)), report)
    grid.capture()
    free_bytes = torch.cuda.mem_get_info()[0] if HAS_GPU else 0
    report.check("error of a ragged batch", grid.ragged_error(), at_most=0.03)
    report.check("error of wrong attention", grid.control_error(), at_least=0.3)
    rows: list[dict[str, Any]] = []
    shapes = sorted(grid.graphs.captured, key=lambda shape: shape.tokens)
    reprefills = SMALL_REPREFILLS if arguments.dry_run else REPREFILLS
    # Those with prefixes last: they leave random numbers in the pool.
    for case in [(*shape, 0) for shape in shapes] + list(reprefills):
        if time.perf_counter() > end_s:
            progress("the time is used up")
            break
        row = grid.measure(*case, ceilings)
        if row is not None:
            rows.append(row)
            report.record(rows=rows)
            judge(report, row)
    if HAS_GPU:
        # A graph is uploaded at its first launch: this should be nothing, as a capture has done it.
        report.record(taken_by_replays_bytes=free_bytes - torch.cuda.mem_get_info()[0])
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
