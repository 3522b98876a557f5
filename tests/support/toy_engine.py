"""A transformer small enough to compute anywhere, and KV memory that notices every slot freed twice or never."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from sglang_ext.long_pool.member.kept_rows import KeptRows
from sglang_ext.long_pool.member.ring_attention import Attention, AttentionRule
from sglang_ext.long_pool.member.shard import KvPool, KvPoolFullError
from sglang_ext_kernels.block_attention import gather_kv, scatter_kv_

LAYERS = 3
HEADS, KV_HEADS, HEAD_SIZE = 2, 1, 4
VOCABULARY = 50
WIDTH = HEADS * HEAD_SIZE


class ToyPool:
    """See `long_pool.member.shard.KvPool`."""

    def __init__(self, tokens: int = 4096, page_tokens: int = 1, device: str = "cpu") -> None:
        self.layers = LAYERS
        self.page_tokens = page_tokens
        self._free = list(range(tokens // page_tokens))
        self._k = torch.zeros(LAYERS, tokens, KV_HEADS, HEAD_SIZE, device=device)
        self._v = torch.zeros(LAYERS, tokens, KV_HEADS, HEAD_SIZE, device=device)
        self.kept: KeptRows | None = None  # makes way, as an engine's prefix cache does

    @property
    def device(self) -> torch.device:
        return self._k.device

    @property
    def free_tokens(self) -> int:
        return len(self._free) * self.page_tokens + (0 if self.kept is None else self.kept.evictable_tokens)

    def allocate(self, tokens: int) -> torch.Tensor:
        pages = -(-tokens // self.page_tokens)
        if self.kept is not None:
            self.kept.evict((pages - len(self._free)) * self.page_tokens)
        if pages > len(self._free):
            raise KvPoolFullError(f"{pages} pages are wanted, {len(self._free)} are free")
        taken, self._free = self._free[:pages], self._free[pages:]
        slots = torch.tensor(taken, dtype=torch.int64)[:, None] * self.page_tokens + torch.arange(self.page_tokens)
        return slots.flatten()[:tokens].to(self._k.device)

    def free(self, slots: torch.Tensor) -> None:
        pages = set((slots // self.page_tokens).tolist())
        assert not pages & set(self._free), "a page is freed twice"
        self._free += sorted(pages)

    def count_freed(self, pages: torch.Tensor) -> int:
        return pages.numel()

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        return gather_kv(self._k[layer], self._v[layer], slots)

    def write(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        scatter_kv_(self._k[layer], self._v[layer], slots, kv)

    def empty_block(self, tokens: int) -> torch.Tensor:
        return torch.empty(2, tokens, KV_HEADS, HEAD_SIZE, device=self.device)

    def kv(self, slots: torch.Tensor) -> torch.Tensor:
        """[layers, 2, tokens, heads, size]."""
        return torch.stack([self._k[:, slots], self._v[:, slots]], dim=1)


class ToyEngine:
    """See `long_pool.member.chunk_step.Engine`. The same weights everywhere."""

    def __init__(
        self, pool: ToyPool, layer_s: float = 0.0, on_layer: Callable[[int], None] = lambda layer: None
    ) -> None:
        """`layer_s`: how long a layer takes at least; `on_layer` is told when one begins."""
        self.pool: KvPool = pool
        self._layer_s = layer_s
        self._on_layer = on_layer
        seed = torch.Generator().manual_seed(5)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=seed) / shape[-1] ** 0.5

        self._embedding = weights(VOCABULARY, WIDTH)
        self._q = weights(LAYERS, WIDTH, WIDTH)
        self._kv = weights(LAYERS, 2, KV_HEADS * HEAD_SIZE, WIDTH)
        self._head = weights(VOCABULARY, WIDTH)

    def try_workspace(self, rows: int, held_tokens: int) -> None:
        pass

    def forward(
        self, token_ids: Sequence[int], positions: torch.Tensor, slots: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        hidden = self._embedding[list(token_ids)] + torch.sin(positions[:, None] / 7.0)
        for layer in range(LAYERS):
            self._on_layer(layer)
            time.sleep(self._layer_s)
            k, v = (torch.tanh(hidden @ part.T).view(-1, KV_HEADS, HEAD_SIZE) for part in self._kv[layer])
            self.pool.write(layer, slots, torch.stack([k, v]))
            q = (hidden @ self._q[layer].T).view(-1, HEADS, HEAD_SIZE)
            hidden = hidden + attention.attend(layer, q, AttentionRule(HEAD_SIZE**-0.5)).reshape(-1, WIDTH)
        return hidden[-1] @ self._head.T if len(token_ids) else torch.zeros(VOCABULARY)


def kv_of(token_ids: Sequence[int]) -> torch.Tensor:
    """KV of a whole prompt as one instance computes it alone: [layers, 2, tokens, heads, size]."""
    return _computed(token_ids)[0]


def logits_of(token_ids: Sequence[int]) -> torch.Tensor:
    """Logits of the last row of a whole prompt, likewise."""
    return _computed(token_ids)[1]


def _computed(token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    pool = ToyPool(len(token_ids))
    slots = pool.allocate(len(token_ids))
    logits = ToyEngine(pool).forward(token_ids, torch.arange(len(token_ids)), slots, _WholePrompt(pool, slots))
    return pool.kv(slots), logits


class _WholePrompt:
    def __init__(self, pool: ToyPool, slots: torch.Tensor) -> None:
        self._pool = pool
        self._slots = slots

    def attend(self, layer: int, q: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for part in self._kv(layer))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * rule.scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)

    def _kv(self, layer: int) -> torch.Tensor:
        return self._pool.read(layer, self._slots)
