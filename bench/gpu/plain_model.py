"""A Qwen2-shaped decoder of random numbers in plain torch over a paged pool, as `PrefillGraphs` wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from gpu.measure import DEVICE
from gpu.model_shapes import Shape
from sglang_ext.graphs.decide.graph_grid import GraphShape
from sglang_ext_kernels import triton_support
from sglang_ext_kernels.padded_batch import PaddedBatch
from sglang_ext_kernels.prefix_attention import prefix_attention_reference, split_prefix_attention_, splits_of

CONTEXT_TOKENS = 32768


class Attention(Enum):
    """How the model attends: by the kernel, by plain mathematics, or, wrongly, each token to itself."""

    KERNEL = "kernel"
    REFERENCE = "reference"
    ONESELF = "oneself"


class PlainModel:
    """Weights and a pool of KV. `slots`: tokens of the pool."""

    def __init__(self, shape: Shape, slots: int, dtype: torch.dtype) -> None:
        self.shape = shape
        self.attention = Attention.KERNEL
        size = shape.head_size
        generator = torch.Generator(DEVICE).manual_seed(7)

        def draw(rows: int, columns: int, scale: float | None = None) -> Tensor:
            values = torch.empty(rows, columns, device=DEVICE, dtype=dtype)
            return values.normal_(0.0, columns**-0.5 if scale is None else scale, generator=generator)

        layers = range(shape.layers)
        self._embedding = draw(shape.vocabulary, shape.hidden, 1.0)
        self._qkv = [draw((shape.heads + 2 * shape.kv_heads) * size, shape.hidden) for _ in layers]
        self._bias = torch.zeros((shape.heads + 2 * shape.kv_heads) * size, device=DEVICE, dtype=dtype)
        self._out = [draw(shape.hidden, shape.hidden) for _ in layers]
        self._up = [draw(2 * shape.intermediate, shape.hidden) for _ in layers]
        self._down = [draw(shape.hidden, shape.intermediate) for _ in layers]
        self._norm = torch.ones(shape.hidden, device=DEVICE, dtype=dtype)
        self._head = draw(shape.vocabulary, shape.hidden)
        self.k_pools = [torch.zeros(slots, shape.kv_heads, size, device=DEVICE, dtype=dtype) for _ in layers]
        self.v_pools = [torch.zeros_like(pool) for pool in self.k_pools]
        frequencies = 1e6 ** -(torch.arange(0, size, 2, device=DEVICE).float() / size)
        angles = torch.arange(CONTEXT_TOKENS, device=DEVICE).float()[:, None] * frequencies
        self._angles = torch.cat([angles.cos(), angles.sin()], dim=1).contiguous()
        self._is_fused = triton_support.runs_on(self._norm)

    def forward(self, shape: GraphShape, batch: PaddedBatch) -> Tensor:
        """Hidden states [tokens of the shape, hidden]; keys and values go to the batch's slots of the pool."""
        model = self.shape
        x = self._embedding[batch.ids]
        residual = torch.empty_like(x)
        for layer in range(model.layers):
            qkv = functional.linear(self._add_norm(x, residual, layer > 0), self._qkv[layer], self._bias)
            self._rotate_and_store(qkv, batch, layer)
            attended = self._attend(qkv, shape, batch, layer).view(-1, model.hidden)
            x = self._add_norm(functional.linear(attended, self._out[layer]), residual, True)
            x = functional.linear(self._silu_multiply(functional.linear(x, self._up[layer])), self._down[layer])
        return self._add_norm(x, residual, True)

    def matrices(self, tokens: int) -> Callable[[], None]:
        """Return a pass of the layers' matrix products alone, on as many rows."""
        model = self.shape
        x = torch.randn(tokens, model.hidden, device=DEVICE, dtype=self._norm.dtype)
        wide = torch.randn(tokens, model.intermediate, device=DEVICE, dtype=self._norm.dtype)

        def products() -> None:
            for qkv, out, up, down in zip(self._qkv, self._out, self._up, self._down, strict=True):
                functional.linear(x, qkv, self._bias)
                functional.linear(x, out)
                functional.linear(x, up)
                functional.linear(wide, down)

        return products

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] in float32."""
        return hidden.float() @ self._head.float().T

    @contextmanager
    def unfused(self, attention: Attention) -> Iterator[None]:
        """Compute meanwhile by plain torch, and attend so."""
        before = self._is_fused, self.attention
        self._is_fused, self.attention = False, attention
        try:
            yield
        finally:
            self._is_fused, self.attention = before

    def _attend(self, qkv: Tensor, shape: GraphShape, batch: PaddedBatch, layer: int) -> Tensor:
        model = self.shape
        heads = qkv.view(qkv.shape[0], -1, model.head_size)
        q, k, v = heads.split([model.heads, model.kv_heads, model.kv_heads], dim=1)
        scale = model.head_size**-0.5
        out = torch.zeros(q.shape, device=q.device, dtype=q.dtype)
        pools = self.k_pools[layer], self.v_pools[layer]
        if self.attention is Attention.ONESELF:
            out.copy_(v.repeat_interleave(model.heads // model.kv_heads, dim=1))
        elif self.attention is Attention.REFERENCE:
            prefix_attention_reference(out, q, k, v, *pools, batch, scale)
        else:
            sizes = splits_of(*shape, model.heads, model.kv_heads, model.head_size, q.dtype)
            split_prefix_attention_(out, q, k, v, *pools, batch, scale, shape.length_tokens, sizes)
        return out

    def _add_norm(self, x: Tensor, residual: Tensor, adds: bool) -> Tensor:
        if self._is_fused:
            from gpu.plain_kernels import add_norm

            return add_norm(x, residual, self._norm, adds)
        residual.copy_(residual + x if adds else x)
        return functional.rms_norm(residual.float(), (residual.shape[-1],), self._norm.float(), 1e-6).to(x.dtype)

    def _silu_multiply(self, x: Tensor) -> Tensor:
        if self._is_fused:
            from gpu.plain_kernels import silu_multiply

            return silu_multiply(x)
        gate, value = x.chunk(2, dim=-1)
        return (functional.silu(gate.float()) * value.float()).to(x.dtype)

    def _rotate_and_store(self, qkv: Tensor, batch: PaddedBatch, layer: int) -> None:
        model = self.shape
        keys, values = self.k_pools[layer], self.v_pools[layer]
        if self._is_fused:
            from gpu.plain_kernels import rotate_and_store

            rotate_and_store(qkv, self._angles, batch.positions, batch.cache_slots, keys, values, model.heads)
            return
        heads = qkv.view(qkv.shape[0], -1, model.head_size)
        rotated = model.heads + model.kv_heads
        first, second = heads[:, :rotated].float().chunk(2, dim=-1)
        cosine, sine = (part[:, None] for part in self._angles[batch.positions].chunk(2, dim=-1))
        turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
        heads[:, :rotated] = turned.to(qkv.dtype)
        keys[batch.cache_slots] = heads[:, model.heads : rotated]
        values[batch.cache_slots] = heads[:, rotated:]
