"""The captured prefills of an instance: which shape a batch runs on, its capture when that is due, its replay.

Every shape's computation reads the leading part of the same static tensors and leaves hidden states of its tokens in
the leading rows of one output, so a graph has nothing of its own but its nodes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from sglang_ext.graphs.decide.graph_grid import Fallback, GraphGrid, GraphShape
from sglang_ext_cuda_graphs.capture_plan import CaptureCost, MemoryLedger
from sglang_ext_cuda_graphs.recorders import DeviceMemory, Recorder, Recording, collection_frozen
from sglang_ext_kernels.padded_batch import PaddedBatch, RaggedBatch, allocate, pad_batch_

T = TypeVar("T")

Forward = Callable[[GraphShape, PaddedBatch], torch.Tensor]

# What fails for this many shapes in a row, memory apart, would fail for the others as well.
MAX_FAILURES_IN_A_ROW = 3

logger = logging.getLogger(__name__)


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
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """`output` [tokens of the largest shape, hidden]; `max_prefix_tokens`: of all prefixes of a batch.

        `agree`: whether a thing is so on all ranks that compute the model together. A batch must run on the same shape
        on all of them, as it is their graphs that meet in its collectives. It is called in the same order on each.
        """
        if not shapes:
            raise ValueError("a grid of graphs needs at least one shape")
        max_tokens = max(shape.tokens for shape in shapes)
        if output.shape[0] < max_tokens:
            raise ValueError(f"an output of {output.shape[0]} rows does not hold {max_tokens} tokens")
        self._order = tuple(shapes)
        self._forward = forward
        self._recorder = recorder
        self._ledger = ledger
        self._clock = clock
        self._agree = agree
        self._failures_in_a_row = 0
        self._output = output
        self._static = allocate(max_tokens, max(shape.slots for shape in shapes), max_prefix_tokens, output.device)
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
        """Capture every shape that the budget allows, one at each step.

        Shapes that it does not allow, and shapes whose capture fails, leave the grid.
        """
        with collection_frozen(), self._recorder.session():
            for shape in self._order:
                self._capture(shape)
                yield shape

    def choose(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> GraphShape | Fallback:
        """The shape for a batch with these lengths, in tokens, or why none. Changes nothing."""
        return self.grid.choose(max(new_lens), len(new_lens), sum(new_lens), sum(prefix_lens))

    def make_ready(self, shape: GraphShape) -> bool:
        """Capture a shape that has not been captured yet; False where the budget does not allow it, or it fails."""
        if shape in self._recordings:
            return True
        with self._recorder.session():
            return self._capture(shape)

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
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            return self._leave_out(shape, Fallback.CAPTURE)
        if not self._agree(self._ledger.can_capture(shape)):
            return self._leave_out(shape, Fallback.MEMORY)
        batch = self._static.of(shape.tokens, shape.slots)
        output = self._output[: shape.tokens]

        def compute() -> None:
            output.copy_(self._forward(shape, batch))

        def record() -> tuple[DeviceMemory, Recording]:
            if not self._recordings:
                self._pad_once(shape)
            self._load_dummy(batch, shape)
            self._recorder.warm_up(compute)
            before = self._recorder.memory()
            return before, self._recorder.record(compute)

        started_s = self._clock()
        recorded = self._try(shape, record)
        if recorded is None:
            return False
        before, recording = recorded

        def launch() -> DeviceMemory:
            recording.replay()
            return self._recorder.memory()

        # A device takes a graph's memory when the graph is first launched. The dummy batch is still in place.
        after = self._try(shape, launch)
        if after is None:
            return False
        self._failures_in_a_row = 0
        self._recordings[shape] = recording
        growth = after.allocator_bytes - before.allocator_bytes
        own = after.used_bytes - before.used_bytes - growth
        self._ledger.record(CaptureCost(shape, max(0, growth), max(0, own), self._clock() - started_s))
        return True

    def _try(self, shape: GraphShape, action: Callable[[], T]) -> T | None:
        """Return the result of a part of a capture; None where a rank has failed, and the shape has left the grid."""
        result, has_memory = None, True
        try:
            result = action()
        except Exception as error:
            # What has been captured goes on to serve, and the rest runs on the ordinary path.
            has_memory = not _has_run_out_of_memory(error)
            logger.warning(
                "no prefill graph of %d tokens x %d, its batches run without: %s", *shape, _first_line(error)
            )
        # Ranks launch a graph together: it has the model's collectives.
        if self._agree(result is not None) and result is not None:
            return result
        if not self._agree(has_memory):
            self._leave_out(shape, Fallback.MEMORY)
            return None
        self._failures_in_a_row += 1
        if self._failures_in_a_row == MAX_FAILURES_IN_A_ROW:
            logger.warning("%d captures failed one after the other, no more are tried", MAX_FAILURES_IN_A_ROW)
        self._leave_out(shape, Fallback.CAPTURE)
        return None

    def _pad_once(self, shape: GraphShape) -> None:
        """Pad as before a replay, on tensors of an engine's types, so that the kernels are compiled by then."""
        device = self._output.device
        single = torch.zeros(1, dtype=torch.int64, device=device)
        lens = torch.ones(1, dtype=torch.int32, device=device)
        self.load(
            shape, RaggedBatch(single, single, single, single, lens, lens, lens.view(1, 1), longest_prefix_tokens=1)
        )

    def _leave_out(self, shape: GraphShape, reason: Fallback) -> bool:
        self.grid.leave_out(shape, reason)
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


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and the errors whose handling raised it, the first error last."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _has_run_out_of_memory(error: BaseException) -> bool:
    return any(isinstance(cause, torch.OutOfMemoryError) for cause in _chain(error))


def _first_line(error: BaseException) -> str:
    """Return one line of the first error: a capture that cannot be ended raises another error over it."""
    *_, first = _chain(error)
    text = str(first).strip()
    return f"{type(first).__name__}: {text.splitlines()[0]}" if text else type(first).__name__
