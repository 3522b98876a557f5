"""AROUND `capture_prefill_graph`: what SGLang's model runner has for its prefills, with the grid before it.

From the options of an engine to its graphs: sizes, memory, and the capture at start with its progress.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_ext.engine.options import options_from_environment
from sglang_ext.graphs.decide.graph_grid import GraphShape
from sglang_ext.graphs.sglang.attention import has_latent_rows, paged_batches, pin_absorbed_form
from sglang_ext.graphs.sglang.graph_options import Capture, GraphOptions, conflict
from sglang_ext.graphs.sglang.runner import GridPrefillRunner
from sglang_ext_cuda_graphs.capture_plan import MemoryLedger, plan_captures
from sglang_ext_cuda_graphs.prefill_graphs import PrefillGraphs
from sglang_ext_cuda_graphs.recorders import CudaRecorder, Recorder

logger = logging.getLogger(__name__)

# Slots of the prefixes of a batch that are kept in one buffer of 8 bytes each: 16 MiB.
MOST_PREFIX_TOKENS = 1 << 21
# The absorbed form of latent attention computes more than three times the products of the form that SGLang chooses for
# new prompts, and from 512 tokens on a graph gains nothing: the device computes longer than the host takes to start it.
MAX_LATENT_TOKENS = 512


def capture_prefill_graph(stock: Callable[..., Any], *, model_runner: Any, eager_runner: Any, **more: Any) -> Any:
    """SGLang's own capture, and then ours. Where graphs are not to be had, one line says why and nothing changes."""
    capture = stock(model_runner=model_runner, eager_runner=eager_runner, **more)
    options = options_from_environment(os.environ)
    if options is None or options.graphs is None or model_runner.is_draft_worker:
        return capture
    problem = "they need a CUDA device" if model_runner.device != "cuda" else conflict(model_runner)
    if problem is not None:
        logger.warning("no prefill graphs by length and batch size: %s; this engine runs without them", problem)
        return capture
    return with_grid(capture, model_runner, eager_runner, options.graphs)


def with_grid(capture: Any, model_runner: Any, eager_runner: Any, options: GraphOptions) -> Any:
    """SGLang's record of its own capture, with the grid's runner before its own; as it is where nothing is captured."""
    import msgspec

    started_s = time.perf_counter()
    free_bytes = torch.cuda.mem_get_info()[0]
    runner = GridPrefillRunner(model_runner, capture.runner or eager_runner, eager_runner)
    graphs = build_graphs(runner, model_runner, options, cuda_recorder(), free_bytes)
    if graphs is None:
        return capture
    runner.use(graphs)
    taken_gb = (free_bytes - torch.cuda.mem_get_info()[0]) / (1 << 30)
    return msgspec.structs.replace(
        capture,
        runner=runner,
        memory_usage_gb=capture.memory_usage_gb + taken_gb,
        capture_time=capture.capture_time + time.perf_counter() - started_s,
    )


def cuda_recorder() -> CudaRecorder:
    """Captures as SGLang captures its own graphs: into their memory pool, with the collectives that they have.

    No two of an engine's graphs run at the same time, so the pool takes what the largest needs. Where SGLang lends its
    pool out between replays, ours have one of their own.
    """
    from sglang.srt.distributed.device_communicators.pynccl_allocator import set_graph_pool_id
    from sglang.srt.distributed.parallel_state import graph_capture
    from sglang.srt.environ import envs
    from sglang.srt.model_executor.runner_utils import pool as graph_pool

    lends = getattr(envs, "SGLANG_ENABLE_GRAPH_POOL_BORROW", None)
    is_lent = lends is not None and lends.get()
    pool = torch.cuda.graph_pool_handle() if is_lent else graph_pool.get_or_create_global_graph_memory_pool(torch.cuda)
    # The allocator reuses memory on the stream that it was taken on: SGLang since 0.5.18 has one for all captures.
    shared_stream = getattr(graph_pool, "get_or_create_global_graph_capture_stream", torch.cuda.Stream)

    @contextmanager
    def capturing(stream: Any) -> Iterator[None]:
        set_graph_pool_id(recorder.pool)
        with graph_capture(stream=stream):
            yield

    def use(new_pool: Any) -> None:
        set_graph_pool_id(new_pool)
        if not is_lent:
            graph_pool.set_global_graph_memory_pool(new_pool)

    recorder = CudaRecorder(pool, shared_stream(), capturing, use)
    return recorder


def build_graphs(
    runner: GridPrefillRunner, model_runner: Any, options: GraphOptions, recorder: Recorder, free_bytes: int
) -> PrefillGraphs | None:
    """The graphs of this engine, captured where that is due at start; None where no shape fits its limits."""
    max_batch_tokens, is_latent = _max_batch_tokens(model_runner.server_args), has_latent_rows(model_runner)
    shapes = plan_captures(
        options.lengths_tokens,
        options.batch_sizes,
        max_batch_tokens=min(max_batch_tokens, MAX_LATENT_TOKENS) if is_latent else max_batch_tokens,
        max_requests=model_runner.req_to_token_pool.size,
    )
    if not shapes:
        return None
    budget_bytes = free_bytes // 2 if options.memory_gb is None else int(options.memory_gb * 1e9)
    agree = _agree_among_ranks()
    graphs = None
    try:
        graphs = _without_captures(runner, model_runner, shapes, recorder, budget_bytes, agree)
    except torch.OutOfMemoryError as error:
        logger.warning("no prefill graphs by length and batch size: %s; this engine runs without them", error)
    if not agree(graphs is not None) or graphs is None:
        return None
    if options.capture is Capture.LAZY:
        logger.info("prefill graphs: %d shapes, each captured when first wanted", len(shapes))
        return graphs
    _capture(graphs, len(shapes))
    return graphs if graphs.captured else None


def _max_batch_tokens(server_args: Any) -> int:
    """New tokens of a batch at most, as SGLang or LAPS forms it."""
    options = options_from_environment(os.environ)
    given = None if options is None or options.laps is None else options.laps.max_chunk_tokens
    chunk = given or server_args.chunked_prefill_size
    return int(min(chunk, server_args.max_prefill_tokens) if chunk and chunk > 0 else server_args.max_prefill_tokens)


def _without_captures(
    runner: GridPrefillRunner,
    model_runner: Any,
    shapes: list[GraphShape],
    recorder: Recorder,
    budget_bytes: int,
    agree: Callable[[bool], bool],
) -> PrefillGraphs:
    config = model_runner.model_config
    if has_latent_rows(model_runner):
        pin_absorbed_form()
    runner.paged = paged_batches(model_runner, max(shape.slots for shape in shapes))
    return PrefillGraphs(
        shapes,
        runner.compute,
        recorder,
        MemoryLedger(budget_bytes, _assumed_bytes_per_token(model_runner)),
        torch.zeros(shapes[0].tokens, config.hidden_size, dtype=model_runner.dtype, device=model_runner.device),
        min(shapes[0].requests * config.context_len, MOST_PREFIX_TOKENS),
        time.perf_counter,
        agree,
    )


def _agree_among_ranks() -> Callable[[bool], bool]:
    """Return a function that ands a flag over the tensor-parallel ranks, by a collective call on the CPU."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return bool

    def agree(is_well: bool) -> bool:
        lowest = torch.tensor([int(is_well)])
        torch.distributed.all_reduce(lowest, torch.distributed.ReduceOp.MIN, group.cpu_group)
        return bool(lowest.item())

    return agree


def _capture(graphs: PrefillGraphs, count: int) -> None:
    from tqdm import tqdm  # type: ignore[import-untyped]

    started_s = time.perf_counter()
    with tqdm(total=count, desc="prefill graphs", unit="graph") as progress:
        for shape in graphs.capture_all():
            progress.set_postfix_str(f"{shape.length_tokens} tokens x {shape.requests}")
            progress.update()
    captured = len(graphs.captured)
    own_bytes = (graphs.used_bytes - graphs.pool_bytes) / max(1, captured)
    logger.info(
        "prefill graphs: %d of %d captured in %.1f s; shared pool %.0f MB, each graph %.1f MB",
        captured,
        count,
        time.perf_counter() - started_s,
        graphs.pool_bytes / 1e6,
        own_bytes / 1e6,
    )


def _assumed_bytes_per_token(model_runner: Any) -> float:
    """Activations of a layer at their largest: the two halves of the gated network and their product, the residual
    stream, queries, keys and values."""
    config = model_runner.model_config
    text = config.hf_text_config
    widths = 3 * text.intermediate_size + 6 * config.hidden_size
    return float(widths * torch.empty((), dtype=model_runner.dtype).element_size())


logger = logging.getLogger(__name__)
