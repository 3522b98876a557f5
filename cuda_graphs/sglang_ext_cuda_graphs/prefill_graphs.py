"""The captured prefills of an instance: which shape a batch runs on, its capture when that is due, its replay.

Every shape's computation reads the leading part of the same static tensors and leaves hidden states of its tokens in
the leading rows of one output, so a graph has nothing of its own but its nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from sglang_ext.policy.laps.graph_grid import Fallback, GraphGrid, GraphShape
from sglang_ext_cuda_graphs.capture_plan import CaptureCost, MemoryLedger
from sglang_ext_cuda_graphs.recorders import Recorder, Recording
from sglang_ext_kernels.padded_batch import PaddedBatch, RaggedBatch, allocate, pad_batch_

Forward = Callable[[GraphShape, PaddedBatch], torch.Tensor]


class PrefillGraphs:
    """Graphs of one model on one device.

    `forward(shape, batch)` computes hidden states [tokens of the shape, hidden] from static tensors; it is called
    while a shape is recorded. `shapes` are in the order of capture. Raises ValueError without shapes.
    """

    def __init__(
        self,
        shapes: Sequence[GraphShape],
        forward: Forward,
        recorder: Recorder,
        ledger: MemoryLedger,
        output: torch.Tensor,
        max_prefix_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        """`output` [tokens of the largest shape, hidden]; `max_prefix_tokens`: of all prefixes of a batch."""
        if not shapes:
            raise ValueError("a grid of graphs needs at least one shape")
        most_tokens = max(shape.tokens for shape in shapes)
        if output.shape[0] < most_tokens:
            raise ValueError(f"an output of {output.shape[0]} rows does not hold {most_tokens} tokens")
        self._order = tuple(shapes)
        self._forward = forward
        self._recorder = recorder
        self._ledger = ledger
        self._clock = clock
        self._output = output
        self._static = allocate(most_tokens, max(shape.slots for shape in shapes), max_prefix_tokens, output.device)
        self._recordings: dict[GraphShape, Recording] = {}
        self.grid = GraphGrid(shapes, max_prefix_tokens)
        self.replays: Counter[GraphShape] = Counter()
        self.fallbacks: Counter[Fallback] = Counter()

    @property
    def captured(self) -> frozenset[GraphShape]:
        return frozenset(self._recordings)

    @property
    def costs(self) -> Sequence[CaptureCost]:
        return self._ledger.costs

    @property
    def pool_bytes(self) -> int:
        return self._ledger.pool_bytes

    @property
    def used_bytes(self) -> int:
        return self._ledger.used_bytes

    def capture_all(self) -> Iterator[GraphShape]:
        """Capture every shape that the budget allows, one at each step; those that it does not leave the grid."""
        for shape in self._order:
            self._capture(shape)
            yield shape

    def choose(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> GraphShape | Fallback:
        """The shape for a batch with these lengths, in tokens, or why none. Changes nothing."""
        return self.grid.choose(max(new_lens), len(new_lens), sum(new_lens), sum(prefix_lens))

    def make_ready(self, shape: GraphShape) -> bool:
        """Capture a shape that has not been captured yet; False where the budget does not allow it."""
        return shape in self._recordings or self._capture(shape)

    def load(self, shape: GraphShape, batch: RaggedBatch) -> PaddedBatch:
        """Put a batch into the static tensors of a shape that it fits."""
        padded = self._static.of(shape.tokens, shape.slots)
        pad_batch_(padded, batch)
        return padded

    def replay(self, shape: GraphShape) -> torch.Tensor:
        """Hidden states [tokens of the shape, hidden] of the batch that was loaded; valid until the next replay.

        Raises KeyError for a shape that was not captured.
        """
        self._recordings[shape].replay()
        self.replays[shape] += 1
        return self._output[: shape.tokens]

    def _capture(self, shape: GraphShape) -> bool:
        if not self._ledger.can_capture(shape):
            return self._leave_out(shape)
        batch = self._static.of(shape.tokens, shape.slots)
        self._load_dummy(batch, shape)
        output = self._output[: shape.tokens]

        def compute() -> None:
            output.copy_(self._forward(shape, batch))

        started_s = self._clock()
        try:
            self._recorder.warm_up(compute)
            before = self._recorder.memory()
            recording = self._recorder.record(compute)
        except torch.OutOfMemoryError:
            # Others have taken what the budget counts on; what has been captured goes on to serve.
            return self._leave_out(shape)
        self._recordings[shape] = recording
        after, ended_s = self._recorder.memory(), self._clock()
        growth = after.allocator_bytes - before.allocator_bytes
        own = after.used_bytes - before.used_bytes - growth
        self._ledger.note(CaptureCost(shape, max(0, growth), max(0, own), ended_s - started_s))
        return True

    def _leave_out(self, shape: GraphShape) -> bool:
        self.grid.leave_out(shape)
        return False

    @staticmethod
    def _load_dummy(batch: PaddedBatch, shape: GraphShape) -> None:
        """A full batch of new prompts whose KV goes to slot 0, which no request has."""
        for tensor in batch:
            tensor.zero_()
        batch.new_lens[: shape.requests] = shape.length_tokens
        batch.total_lens[: shape.requests] = shape.length_tokens
        steps = (torch.arange(shape.slots + 1, device=batch.ids.device) * shape.length_tokens).clamp(max=shape.tokens)
        batch.starts.copy_(steps[:-1])
        batch.qo_indptr.copy_(steps)
        batch.positions.copy_(torch.arange(shape.tokens, device=batch.ids.device) % shape.length_tokens)
