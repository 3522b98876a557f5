"""From the options of an engine to its graphs: sizes, memory, and the capture at start with its progress."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from sglang_ext.sglang_plugin.graphs.arguments import Capture, GraphOptions
from sglang_ext.sglang_plugin.graphs.runner import GridPrefillRunner
from sglang_ext_cuda_graphs.capture_plan import plan_captures
from sglang_ext_cuda_graphs.memory_ledger import MemoryLedger
from sglang_ext_cuda_graphs.prefill_graphs import PrefillGraphs
from sglang_ext_cuda_graphs.recorders import Recorder

logger = logging.getLogger(__name__)

# Slots of the prefixes of a batch that are kept in one buffer of 8 bytes each: 16 MiB.
MOST_PREFIX_TOKENS = 1 << 21


def build_graphs(
    runner: GridPrefillRunner, model_runner: Any, options: GraphOptions, recorder: Recorder, free_bytes: int
) -> PrefillGraphs | None:
    """The graphs of this engine, captured where that is due at start; None where no shape fits its limits."""
    config = model_runner.model_config
    shapes = plan_captures(
        options.lengths_tokens,
        options.batch_sizes,
        max_tokens=max(2 * model_runner.server_args.max_prefill_tokens, 256),
        max_requests=model_runner.req_to_token_pool.size,
    )
    if not shapes:
        return None
    budget_bytes = free_bytes // 2 if options.memory_gb is None else int(options.memory_gb * 1e9)
    most_tokens = shapes[0].tokens
    graphs = PrefillGraphs(
        shapes,
        runner.compute,
        recorder,
        MemoryLedger(budget_bytes, _assumed_bytes_per_token(model_runner)),
        torch.zeros(most_tokens, config.hidden_size, dtype=model_runner.dtype, device=model_runner.device),
        min(shapes[0].requests * config.context_len, MOST_PREFIX_TOKENS),
        time.perf_counter,
    )
    if options.capture is Capture.START:
        _capture(graphs, len(shapes))
    else:
        logger.info("prefill graphs: %d shapes, each captured when first wanted", len(shapes))
    return graphs


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
