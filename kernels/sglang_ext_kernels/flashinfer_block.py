"""flashinfer's attention of one request for blocks that are seen whole or along the diagonal, where it is installed.

Ring blocks of zigzag shards are of these two kinds. flashinfer's log-sum-exp is to base 2.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from functools import cache

import torch

logger = logging.getLogger(__name__)

_failed = False


@cache
def is_installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def can_run(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether flashinfer has a kernel for these: 16-bit elements and heads of 64, 128 or 256 on a CUDA device.

    Not after one has failed: it compiles them where they run, and a machine may lack what that needs.
    """
    return (
        not _failed
        and q.is_cuda
        and is_installed()
        and q.dtype in {torch.float16, torch.bfloat16}
        and q.shape[-1] in {64, 128, 256}
        and v.shape[-1] == q.shape[-1]
    )


def flashinfer_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attention_block` without a mask; with `is_causal` there are as many keys as queries.

    The output is in `q`'s dtype: widening it apart would write and read all of it once more.
    """
    import flashinfer  # type: ignore[import-not-found, unused-ignore]

    out, lse = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=is_causal, sm_scale=scale, return_lse=True)
    return out, lse.mul_(math.log(2.0))


def try_flashinfer_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The same, or None where flashinfer fails: a line in the log says why, and it is not asked again.

    Raises torch.OutOfMemoryError.
    """
    global _failed
    try:
        return flashinfer_block(q, k, v, scale, is_causal)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _failed = True
        reason = (str(error).strip().splitlines() or [""])[-1]
        logger.warning(
            "flashinfer's attention does not run here, Triton's takes its place: %s: %s", type(error).__name__, reason
        )
        return None
