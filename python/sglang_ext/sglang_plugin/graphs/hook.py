"""AROUND `capture_prefill_graph`: what SGLang's model runner has for its prefills, with the grid before it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from sglang_ext.sglang_plugin.graphs.compatibility import conflict
from sglang_ext.sglang_plugin.graphs.runner import GridPrefillRunner
from sglang_ext.sglang_plugin.options import options_from_environment

logger = logging.getLogger(__name__)


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
    import msgspec
    import torch

    from sglang_ext.sglang_plugin.graphs.build import build_graphs
    from sglang_ext_cuda_graphs.recorders import CudaRecorder

    started_s = time.perf_counter()
    free_bytes = torch.cuda.mem_get_info()[0]
    runner = GridPrefillRunner(model_runner, capture.runner or eager_runner, eager_runner)
    graphs = build_graphs(runner, model_runner, options.graphs, CudaRecorder(), free_bytes)
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
