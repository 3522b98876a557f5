"""What a model's attention layers ask while a chunk is computed."""

from __future__ import annotations

from typing import Protocol

import torch


class Attention(Protocol):
    """Attention over all that a group holds of a request."""

    def attend(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of q [rows, H, D]; K and V of the same rows are in the pool already. Float32 [rows, H, D]."""
