"""A prefill that ends on an instance which has none of its KV: the pool has computed it, and sends it to decode.

The first token is sampled as SGLang samples it, from the logits of the prompt's last row, with a batch made by hand;
then the request is one of those whose KV is in transfer. What is left out is what SGLang does with the request's KV:
there is none to keep in the prefix cache, none to send (metadata are), and none to release.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.observability.metrics_collector import QueueCount
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


def sample(scheduler: Any, request: Any, logits: torch.Tensor) -> tuple[Any, Any]:
    """Return a batch of only this request, and its result: the first token, from `logits`, float32 [vocabulary]."""
    runner = scheduler.tp_worker.model_runner
    batch = ScheduleBatch.init_new(
        [request],
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
    )
    batch.forward_mode = ForwardMode.EXTEND
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, scheduler.model_config.vocab_size)
    batch.sampling_info.grammars = [request.grammar] if batch.has_grammar else None
    tokens = len(request.origin_input_ids)
    batch.prefill_stats = PrefillStats(tokens - request.cached_tokens, request.cached_tokens, 0.0, QueueCount(), 1)
    request.extend_end = tokens
    forward_batch = ForwardBatch(
        forward_mode=batch.forward_mode,
        batch_size=1,
        input_ids=torch.tensor(request.origin_input_ids[-1:], device=runner.device),
        req_pool_indices=torch.zeros(1, dtype=torch.int64, device=runner.device),
        seq_lens=torch.tensor([tokens], device=runner.device),
        out_cache_loc=torch.zeros(1, dtype=torch.int64, device=runner.device),
        seq_lens_sum=tokens,
        sampling_info=batch.sampling_info,
    )
    output = LogitsProcessorOutput(next_token_logits=logits.to(runner.device)[None].clone())
    tokens_sampled = runner.sample(output, forward_batch)
    return batch, GenerationBatchResult(logits_output=output, next_token_ids=tokens_sampled)


def take_back(request: Any) -> None:
    """The request is as before its first token, which has not left this instance."""
    if request.grammar is not None:
        request.grammar.rollback(1)
        request.grammar.finished = False
    request.output_ids = array("q")


def release_kv_cache(stock: Callable[..., None], req: Any, tree_cache: Any, *, checkpoint: bool) -> None:
    """AROUND `release_kv_cache` of a prefill instance: a request whose KV was never here has none to release."""
    if req.kv.holds_kv:
        stock(req, tree_cache, checkpoint=checkpoint)
