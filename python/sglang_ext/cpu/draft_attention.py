"""Attention of speculative decoding on a CPU without AMX: drafts, one step after the other, and their verification.

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
