"""Stands in SGLang's model runner where its prefill runner stands, and takes the batches that fit a captured shape.

Captured is the body of the model, attention included. The tail (last rows, vocabulary, logprobs) runs on the batch
itself, while the graph is still computing, so it costs nothing and does all that the request asks for.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

import torch

from sglang_ext.graphs.decide.graph_grid import Fallback, GraphGrid, GraphShape, TokenBuckets
from sglang_ext.graphs.sglang.attention import CapturedAttention, PagedBatches
from sglang_ext_cuda_graphs.prefill_graphs import PrefillGraphs
from sglang_ext_kernels.padded_batch import PaddedBatch, RaggedBatch


class GridPrefillRunner:
    """Batches that fit run on their graph, others as SGLang runs them: on its own graphs, or eagerly."""

    def __init__(self, model_runner: Any, stock: Any, eager: Any) -> None:
        """`stock`: the runner whose place this takes; `eager`: what runs a batch without any graph."""
        self._model_runner = model_runner
        self._stock = stock
        self._eager = eager
        self._graphs: PrefillGraphs | None = None
        self.replayed: GraphShape | None = None  # the shape that the last prefill ran on; None: on none of the grid
        self._static: dict[GraphShape, tuple[CapturedAttention, Any]] = {}
        self.paged: PagedBatches | None = None  # what captured passes attend by; set before the first capture

    def __getattr__(self, name: str) -> Any:
        # other attributes that SGLang reads from its runner
        return getattr(self.__dict__["_stock"], name)

    def use(self, graphs: PrefillGraphs | None) -> None:
        """Use these graphs from now on; with None no batch runs on the grid."""
        self._graphs = graphs

    @property
    def graphs(self) -> PrefillGraphs | None:
        return self._graphs

    @property
    def grid(self) -> GraphGrid:
        """The shapes that a batch may be padded to. It stays the same object when a shape is left out of it."""
        return GraphGrid() if self._graphs is None else self._graphs.grid

    def can_run_graph(self, forward_batch: Any) -> bool:
        """Return whether a graph runs this prefill, which SGLang asks once each; others are counted here."""
        choice = self._choose(forward_batch)
        self.replayed = None
        if isinstance(choice, GraphShape):
            return True
        if self._graphs is not None:
            self._graphs.fallbacks[choice] += 1
        return bool(self._stock.can_run_graph(forward_batch))

    def execute(self, forward_batch: Any, **kwargs: Any) -> Any:
        """Return the output of `model.forward` for this batch."""
        shape = self._choose(forward_batch)
        self.replayed = None
        if not isinstance(shape, GraphShape) or self._graphs is None:
            return self._stock.execute(forward_batch, **kwargs)
        if not self._graphs.make_ready(shape):
            self._graphs.fallbacks[self._graphs.grid.left_out_reason(shape) or Fallback.MEMORY] += 1
            return self._eager.execute(forward_batch)
        self._wait_for_cached_kv()
        self.replayed = shape
        self._graphs.load(shape, self._ragged(forward_batch))
        hidden = self._graphs.replay(shape)[: forward_batch.input_ids.shape[0]]
        if forward_batch.capture_hidden_mode.is_full():
            # They are handed out as they are, and copied to the host while the next replay may be writing.
            hidden = hidden.clone()
        return self._tail(forward_batch, hidden, kwargs)

    def compute(self, shape: GraphShape, batch: PaddedBatch) -> torch.Tensor:
        """The body of the model on static tensors: hidden states of all tokens of the shape. This is recorded."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        if shape not in self._static:  # in the run before the recording, which then has only the computation
            attention = CapturedAttention(self._model_runner, batch, shape, self.paged)
            self._static[shape] = attention, _static_forward_batch(self._model_runner, shape, batch)
        attention, forward_batch = self._static[shape]
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=attention)):
            attention.begin()
            hidden: torch.Tensor = self._model_runner.model.model.forward(batch.ids, batch.positions, forward_batch)
        return hidden

    def _choose(self, forward_batch: Any) -> GraphShape | Fallback:
        if self._graphs is None or not _is_plain(forward_batch):
            return Fallback.UNSUPPORTED
        return self._graphs.choose(forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu)

    def _wait_for_cached_kv(self) -> None:
        """A cache outside of the pool loads layer by layer, and layers wait for it; those of a captured pass do not."""
        pool = self._model_runner.token_to_kv_pool
        counter = getattr(pool, "layer_transfer_counter", None)
        if counter is not None:
            counter.wait_until(pool.layer_num - 1)

    def _ragged(self, forward_batch: Any) -> RaggedBatch:
        return RaggedBatch(
            ids=forward_batch.input_ids,
            positions=forward_batch.positions,
            cache_slots=forward_batch.out_cache_loc,
            rows=forward_batch.req_pool_indices,
            new_lens=forward_batch.extend_seq_lens,
            prefix_lens=forward_batch.extend_prefix_lens,
            table=self._model_runner.req_to_token_pool.req_to_token,
            longest_prefix_tokens=max(forward_batch.extend_prefix_lens_cpu),
        )

    def _tail(self, forward_batch: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        model = self._model_runner.model
        body = model.model
        original = body.forward
        body.forward = lambda *args, **kwargs: hidden
        try:
            return model.forward(forward_batch.input_ids, forward_batch.positions, forward_batch, **kwargs)
        finally:
            body.forward = original


def _is_plain(forward_batch: Any) -> bool:
    """A prefill of token ids and nothing else."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return (
        forward_batch.forward_mode == ForwardMode.EXTEND
        and forward_batch.input_embeds is None
        and getattr(forward_batch, "replace_embeds", None) is None
        and forward_batch.spec_info is None
        and forward_batch.extend_seq_lens_cpu is not None
        and len(forward_batch.extend_seq_lens_cpu) > 0
        and not forward_batch.contains_mm_inputs()
    )


def _static_forward_batch(model_runner: Any, shape: GraphShape, batch: PaddedBatch) -> Any:
    from sglang.srt.layers.dp_attention import DpPaddingMode
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    lengths = [shape.length_tokens] * shape.requests + [0] * (shape.slots - shape.requests)
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=shape.slots,
        input_ids=batch.ids,
        req_pool_indices=batch.rows,
        seq_lens=batch.total_lens,
        orig_seq_lens=batch.total_lens,
        seq_lens_cpu=torch.tensor(lengths),
        seq_lens_sum=sum(lengths),
        out_cache_loc=batch.cache_slots,
        positions=batch.positions,
        extend_num_tokens=sum(lengths),
        extend_seq_lens=batch.new_lens,
        extend_prefix_lens=batch.prefix_lens,
        extend_start_loc=batch.starts,
        extend_seq_lens_cpu=lengths,
        extend_prefix_lens_cpu=[0] * shape.slots,
        extend_logprob_start_lens_cpu=lengths,
        global_forward_mode=ForwardMode.EXTEND,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        dp_padding_mode=DpPaddingMode.get_default_mode_in_cuda_graph(),
    )
    model_runner.kv_index_translator.bind_runner_slots(forward_batch)
    return forward_batch


def planned_grid(model_runner: Any) -> GraphGrid:
    """Return the shapes that prefills are planned on: those of the grid, or SGLang's buckets where it has none; empty
    where prefills run eagerly, or where SGLang's rule asks for the length of the longest sequence, too."""
    runner: Any = getattr(model_runner, "prefill_cuda_graph_runner", None)
    if isinstance(runner, GridPrefillRunner):
        return runner.grid
    buckets = _buckets(runner)
    if not buckets or runner.max_context_size is not None or runner.max_seq_len is not None:
        return GraphGrid()
    if runner.prefill_backend_name == "full":
        return TokenBuckets(buckets, getattr(runner, "_capture_req_slots", 1))
    return TokenBuckets(buckets)


def _buckets(runner: Any) -> list[int]:
    """Return the numbers of tokens that SGLang's own prefill graphs are captured for, in ascending order."""
    return list(getattr(runner, "capture_num_tokens", None) or ())


class Replay(NamedTuple):
    """A prefill on a captured graph: the tokens that it computes, padding included, and the name of the graph."""

    tokens: int
    graph: str


def replay_of(model_runner: Any, new_tokens: int, result: Any) -> Replay | None:
    """Return what the prefill of `new_tokens` which was launched last runs on, by SGLang's `result` of the launch;
    None: it runs on the ordinary kernels."""
    runner = getattr(model_runner, "prefill_cuda_graph_runner", None)
    if isinstance(runner, GridPrefillRunner):
        shape = runner.replayed
        return None if shape is None else Replay(shape.tokens, f"{shape.length_tokens}x{shape.requests}")
    buckets = _buckets(runner)
    if not getattr(result, "can_run_cuda_graph", False) or not buckets or new_tokens > buckets[-1]:
        return None
    tokens = buckets[bisect_left(buckets, new_tokens)]
    return Replay(tokens, str(tokens))


def graph_status(model_runner: Any) -> dict[str, Any] | None:
    """Shapes, memory, replays and what ran without, by reason, as JSON-safe values; None without graphs."""
    runner = getattr(model_runner, "prefill_cuda_graph_runner", None)
    graphs = runner.graphs if isinstance(runner, GridPrefillRunner) else None
    if graphs is None:
        return None
    return {
        "shapes": len(graphs.grid.shapes),
        "captured": len(graphs.captured),
        "pool_bytes": graphs.pool_bytes,
        "used_bytes": graphs.used_bytes,
        "replays": {f"{shape.length_tokens}x{shape.requests}": count for shape, count in graphs.replays.items()},
        "fallbacks": {reason.value: count for reason, count in graphs.fallbacks.items()},
    }
