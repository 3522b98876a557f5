"""flashinfer where it is installed and cannot compile its kernels: another kernel takes its place, the log says why."""

from __future__ import annotations

import logging
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext_kernels import block_attention, flashinfer_block


class OnCuda(torch.Tensor):
    """A tensor that says that it is on a CUDA device."""

    is_cuda = True  # type: ignore[assignment]


def install(monkeypatch: pytest.MonkeyPatch, attend: Any) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(single_prefill_with_kv_cache=attend))
    monkeypatch.setattr(flashinfer_block, "_failed", False)
    monkeypatch.setattr(flashinfer_block, "is_installed", lambda: True)


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(9, heads, 64, generator=generator).to(dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_that_cannot_compile_is_asked_once(
    is_causal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def attend(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs)
        raise RuntimeError("Ninja build failed.\nfatal error: cublasLt.h: No such file or directory")

    install(monkeypatch, attend)
    q, k, v = tensors(torch.bfloat16)
    visible = torch.ones(9, 9, dtype=torch.bool).tril() if is_causal else None
    wanted, wanted_lse = block_attention.attention_block_reference(q, k, v, 0.1, visible)
    q = q.as_subclass(OnCuda)  # type: ignore[assignment]
    assert flashinfer_block.can_run(q, v)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            out, lse = block_attention.attention_block(q, k, v, 0.1, is_causal)
            torch.testing.assert_close(out.as_subclass(torch.Tensor), wanted)
            torch.testing.assert_close(lse.as_subclass(torch.Tensor), wanted_lse)
    assert len(asked) == 1
    assert not flashinfer_block.can_run(q, v)
    (record,) = caplog.records
    assert record.getMessage().endswith("RuntimeError: fatal error: cublasLt.h: No such file or directory")


def test_lack_of_memory_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left")

    install(monkeypatch, attend)
    q, k, v = tensors(torch.bfloat16)
    with pytest.raises(torch.OutOfMemoryError):
        flashinfer_block.try_flashinfer_block(q, k, v, 0.1, False)
    assert flashinfer_block.can_run(q.as_subclass(OnCuda), v)


def test_its_output_is_not_widened_and_its_sum_is_natural(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(torch.bfloat16)
    out, lse = torch.zeros(9, 4, 64, dtype=torch.bfloat16), torch.full((9, 4), 2.0)
    install(monkeypatch, lambda *args, **kwargs: (out, lse))
    got, got_lse = flashinfer_block.flashinfer_block(q, k, v, 0.1, False)
    assert got is out
    assert float(got_lse[0, 0]) == pytest.approx(2 * math.log(2))
