"""Speculative decoding on a CPU without AMX: attention of drafts, one step after the other, and their verification.

SGLang's draft models know attention for CPUs only as AMX kernels. Here each step of a draft has a backend of SGLang's
own for CPUs that sees one token more than the step before, and the drafts that the target verifies are a chunk behind
the request's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

BACKEND = "torch_native"


def create_backend(
    stock: Callable[..., Any],
    factory: Any,
    backend_name: str,
    backend_map: Mapping[str, Callable[[], tuple[str, Any]]],
    error_template: str,
    stamps_children: bool = False,
) -> Any:
    """AROUND `DraftBackendFactory._create_backend`: it knows the attention for CPUs, too."""
    make = _DraftSteps if stamps_children else _one_backend

    def create() -> tuple[str, Any]:
        return BACKEND, make(factory.draft_model_runner, factory.speculative_num_steps)

    return stock(factory, backend_name, {**backend_map, BACKEND: create}, error_template, stamps_children)


class _DraftSteps:
    """One backend for each step of a draft but the last, which only chooses a token."""

    def __init__(self, runner: Any, steps: int) -> None:
        self.attn_backends = [_one_backend(runner, steps) for _ in range(steps - 1)]
        for step, backend in enumerate(self.attn_backends):
            backend.draft_tokens = step + 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def _one_backend(runner: Any, steps: int) -> Any:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend(runner)


def share_head(stock: Callable[..., Any], worker: Any) -> Any:
    """AROUND `EagleDraftWorker.init_lm_head`: some draft models wait for a GPU when they get the other model's head."""
    import torch

    synchronize = torch.cuda.synchronize
    torch.cuda.synchronize = _wait_for_nothing
    try:
        return stock(worker)
    finally:
        torch.cuda.synchronize = synchronize


def _wait_for_nothing(device: object = None) -> None:
    pass


def verify_drafts(
    stock: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, *arguments: Any, **options: Any
) -> Any:
    """AROUND `eagle_sample`: the target's choices are drawn where requests are not greedy.

    On a CPU SGLang keeps a draft that is the likeliest token, at any temperature. Here the target draws a token
    behind each draft, from the distribution that the request asks for, and a draft that is the token drawn stays: what
    is generated has that distribution.
    """
    info = batch.sampling_info
    if batch.forward_mode.is_idle() or info.is_all_greedy:
        return stock(verify_input, batch, logits_output, *arguments, **options)
    from sglang.srt.speculative import eagle_utils as module

    verify = module.verify_tree_greedy_func

    def verify_drawn(*, target_predict: Any, **more: Any) -> Any:
        tokens = draw_tokens(
            logits_output.next_token_logits, info, verify_input.draft_token_num, verify_input.positions
        )
        _agree(tokens)
        return verify(target_predict=tokens.view_as(target_predict).to(target_predict.dtype), **more)

    module.verify_tree_greedy_func = verify_drawn
    try:
        return stock(verify_input, batch, logits_output, *arguments, **options)
    finally:
        module.verify_tree_greedy_func = verify


def draw_tokens(logits: Any, info: Any, each: int, positions: Any) -> Any:
    """Return a token [rows] for each row of `logits` [rows, vocabulary], of which each request has `each` rows."""
    import torch
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    def of_rows(values: Any) -> Any:
        return None if values is None else torch.repeat_interleave(values, each, 0)

    probabilities = torch.softmax(logits.float() / of_rows(info.temperatures), -1)
    limits = (of_rows(values) for values in (info.top_ks, info.top_ps, info.min_ps))
    seeds = of_rows(info.sampling_seed)
    return top_k_top_p_min_p_sampling_from_probs_torch(
        probabilities, *limits, info.need_min_p_sampling, seeds, positions
    )


def _agree(tokens: Any) -> None:
    """All ranks take what the first has drawn, as elsewhere in SGLang's verification."""
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    group = parallel.attn_tp_group if is_dp_attention_enabled() else parallel.tp_group
    if group.world_size > 1:
        group.broadcast(tokens, src=0)


class _BatchWithDrafts:
    """A batch with other numbers of tokens."""

    def __init__(self, batch: Any, **numbers: Any) -> None:
        self._batch = batch
        vars(self).update(numbers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


def with_drafts(backend: Any, batch: Any) -> Any:
    """Return the batch as attention for CPUs sees it: with the drafts of the steps before, or that are verified."""
    drafts = getattr(backend, "draft_tokens", 0)
    if drafts:
        return _BatchWithDrafts(batch, seq_lens=batch.seq_lens + drafts)
    if not batch.forward_mode.is_target_verify():
        return batch
    new = batch.spec_info.draft_token_num
    return _BatchWithDrafts(
        batch,
        seq_lens=batch.seq_lens + new,
        extend_prefix_lens=batch.seq_lens,
        extend_seq_lens=batch.seq_lens.new_full(batch.seq_lens.shape, new),
    )
