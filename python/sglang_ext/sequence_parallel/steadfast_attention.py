"""Attention that does not leave the model in the middle of a layer.

A rank whose ring is broken has sisters that wait for it in the model's own collectives. It goes on with them to the
end, computing nothing of worth, and then says that the step has failed.
"""

from __future__ import annotations

import torch

from sglang_ext.sequence_parallel.attention import Attention
from sglang_ext.sequence_parallel.mesh import MeshError


class SteadfastAttention:
    """See `attention.Attention`."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self._failure: str | None = None  # the error itself would hold all that the step has used

    def attend(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        if self._failure is None:
            try:
                return self._attention.attend(layer, q, scale)
            except MeshError as error:
                self._failure = str(error)
        return torch.zeros_like(q, dtype=torch.float32)

    def check(self) -> None:
        """Raises MeshError where the ring is broken."""
        if self._failure is not None:
            raise MeshError(self._failure)
