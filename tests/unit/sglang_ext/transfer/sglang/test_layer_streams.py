"""Which chunks leave by layer, and what a pool's writes tell their streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.graphs.decide.graph_grid import GraphShape
from sglang_ext.transfer.decide.shards import TokenSpan
from sglang_ext.transfer.endpoint.owner_transfer import LayerStream

pytestmark = pytest.mark.usefixtures("sglang_imported")

LAYERS, FIRST_LAYER = 3, 4


class PoolThatCounts:
    """Counts what is written to it."""

    start_layer = FIRST_LAYER

    def __init__(self) -> None:
        self.written: list[int] = []

    def set_kv_buffer(self, layer: Any, loc_info: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.written.append(layer.layer_id)


def write(pool: PoolThatCounts, layer: int, tokens: int) -> None:
    rows = torch.zeros(tokens, 2, 8)
    pool.set_kv_buffer(SimpleNamespace(layer_id=FIRST_LAYER + layer), None, rows, rows)


def watched(writes: list[tuple[int, int]]) -> tuple[list[int], list[int], PoolThatCounts]:
    """Layers that a stream was notified of after each write of (layer, tokens); those written; the pool."""
    from sglang_ext.transfer.sglang.layer_streams import watch_layers

    pool, sent, seen = PoolThatCounts(), [], []
    stream = LayerStream(TokenSpan(0, 5), LAYERS, lambda layer, count, computed: sent.append(layer))
    with watch_layers(pool, [stream], 5):
        for layer, tokens in writes:
            write(pool, layer, tokens)
            assert pool.written[-1] == FIRST_LAYER + layer
            seen.append(len(sent))
    write(pool, 0, 5)
    return sent, seen, pool


def test_each_layer_leaves_once_it_is_written() -> None:
    sent, seen, pool = watched([(0, 5), (1, 5), (2, 5)])
    assert sent == [0, 1, 2]
    assert seen == [1, 2, 3]
    assert "set_kv_buffer" not in vars(pool)


def test_layers_with_attention_leave_one_by_one_among_recurrent_ones() -> None:
    """Layers 3, 7 and 11 of a hybrid, say, are the first, second and third that have rows."""
    from sglang_ext.transfer.sglang.layer_streams import watch_layers

    pool, sent = PoolThatCounts(), []
    pool.full_attention_layer_id_mapping = {3: 0, 7: 1, 11: 2}  # type: ignore[attr-defined]
    stream = LayerStream(TokenSpan(0, 5), LAYERS, lambda layer, count, computed: sent.append(layer))
    with watch_layers(pool, [stream], 5):
        for layer in (3, 7, 11):
            write(pool, layer - FIRST_LAYER, 5)
    assert sent == [0, 1, 2]


@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        ([], []),
        ([(0, 5), (1, 2), (1, 3), (2, 5)], [0]),  # in two pieces
        ([(1, 5), (2, 5)], []),  # the first one was written by a kernel of the model's
        ([(0, 5), (0, 5), (1, 5)], [0, 1]),
    ],
)
def test_what_is_not_written_as_a_whole_waits(writes: list[tuple[int, int]], expected: list[int]) -> None:
    assert watched(writes)[0] == expected


def test_a_pool_is_not_watched_after_a_failure() -> None:
    from sglang_ext.transfer.sglang.layer_streams import watch_layers

    pool = PoolThatCounts()
    with pytest.raises(RuntimeError), watch_layers(pool, [], 5):
        raise RuntimeError("out of memory")
    assert "set_kv_buffer" not in vars(pool)


def test_a_shape_captured_in_the_middle_of_a_batch_writes_none_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warming a shape up writes as many rows as the batch may have, of nothing: they do not leave."""
    from sglang.srt.layers.radix_attention import AttentionType

    from sglang_ext.graphs.sglang import attention
    from sglang_ext.transfer.sglang.layer_streams import watch_layers

    class PoolWithBuffers(PoolThatCounts):
        def get_key_buffer(self, layer_id: int) -> torch.Tensor:
            return torch.zeros(9, 2, 8)

        get_value_buffer = get_key_buffer

    monkeypatch.setattr(attention, "split_prefix_attention_", lambda *args, **more: None)
    pool, sent = PoolWithBuffers(), []
    runner = SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=None)
    batch: Any = SimpleNamespace(cache_slots=None, kv_indptr=None, kv_indices=None)
    captured = attention.CapturedAttention(runner, batch, GraphShape(5, 1))
    stream = LayerStream(TokenSpan(0, 5), LAYERS, lambda layer, count, computed: sent.append(layer))
    with watch_layers(pool, [stream], 5):
        for number in range(LAYERS):
            heads = {"tp_q_head_num": 2, "qk_head_dim": 8, "v_head_dim": 8}
            scores = {"scaling": 1.0, "logit_cap": 0.0, "sliding_window_size": -1}
            kind = {"is_cross_attention": False, "attn_type": AttentionType.DECODER}
            layer = SimpleNamespace(layer_id=FIRST_LAYER + number, **heads, **scores, **kind)
            rows = torch.zeros(5, 2 * 8)
            captured.forward(rows, rows, rows, layer, SimpleNamespace(out_cache_loc=None))
        assert pool.written == [FIRST_LAYER, FIRST_LAYER + 1, FIRST_LAYER + 2]
        assert not sent
        write(pool, 0, 5)
        assert sent == [0]


class LatentPool(PoolThatCounts):
    """Gets latent rows as SGLang's attention for GPUs writes them."""

    def set_mla_kv_buffer(self, layer: Any, loc_info: Any, latent: torch.Tensor, rotary: torch.Tensor) -> None:
        self.written.append(layer.layer_id)


def test_latent_rows_leave_by_layer_however_they_are_written() -> None:
    from sglang_ext.transfer.sglang.layer_streams import watch_layers

    pool, sent = LatentPool(), []
    stream = LayerStream(TokenSpan(0, 5), LAYERS, lambda layer, count, computed: sent.append(layer))
    with watch_layers(pool, [stream], 5):
        for number in range(LAYERS):
            layer, rows = SimpleNamespace(layer_id=FIRST_LAYER + number), torch.zeros(5, 1, 8)
            if number == 1:
                pool.set_kv_buffer(layer, None, rows, rows)
            else:
                pool.set_mla_kv_buffer(layer, None, rows, rows)
    assert sent == [0, 1, 2]
    assert not vars(pool).keys() & {"set_kv_buffer", "set_mla_kv_buffer"}


def test_only_layers_without_a_window_leave_by_layer() -> None:
    """Layers with a window have a pool of their own, whose rows leave with the metadata."""
    from sglang_ext.transfer.sglang.layer_streams import watch_layers

    pool, sent = PoolThatCounts(), []
    layers_mapping = {FIRST_LAYER: (0, True), FIRST_LAYER + 1: (0, False), FIRST_LAYER + 2: (1, True)}
    pool.layers_mapping = {**layers_mapping, FIRST_LAYER + 3: (1, False)}  # type: ignore[attr-defined]
    stream = LayerStream(TokenSpan(0, 5), 2, lambda layer, count, computed: sent.append(layer))
    with watch_layers(pool, [stream], 5):
        for number in range(4):
            write(pool, number, 5)
            assert len(sent) == (number + 1) // 2
    assert sent == [0, 1]


class SenderOfLongChunks:
    """Streams chunks of at least four tokens."""

    def __init__(self, *, leaves_with_batch: bool = False) -> None:
        self.leaves_with_batch = leaves_with_batch
        self.asked: list[tuple[int, list[int]]] = []
        self.streams: list[LayerStream] = []
        self.sent: list[tuple[int, int]] = []

    def may_stream(self, tokens: int) -> bool:
        return tokens >= 4

    def stream(self, first_token: int, slots: Any) -> list[LayerStream]:
        self.asked.append((first_token, slots.tolist()))
        span = TokenSpan(first_token, first_token + len(slots))
        self.streams.append(LayerStream(span, LAYERS, lambda layer, count, computed: self.sent.append((layer, count))))
        return self.streams[-1:]


def test_the_long_chunks_of_a_batch_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ext.transfer.sglang import layer_streams

    monkeypatch.setattr(layer_streams, "HandshakeKVSender", SenderOfLongChunks)
    senders = [SenderOfLongChunks() for _ in range(3)]
    requests = [SimpleNamespace(disagg_kv_sender=sender) for sender in senders]
    requests.append(SimpleNamespace())  # a health check
    pool = PoolThatCounts()
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool))

    def batch(is_extend: bool) -> SimpleNamespace:
        return SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend=lambda: is_extend),
            reqs=requests,
            prefix_lens=[0, 7, 3, 0],
            extend_lens=[4, 3, 5, 9],
            out_cache_loc=torch.arange(100, 121),
        )

    def compute(scheduler: Any, batch: Any, extra: int) -> tuple[int, bool]:
        return extra, "set_kv_buffer" in vars(pool)

    assert layer_streams.run_batch(compute, scheduler, batch(True), 8) == (8, True)
    assert senders[0].asked == [(0, [100, 101, 102, 103])]
    assert not senders[1].asked
    assert senders[2].asked == [(3, [107, 108, 109, 110, 111])]
    assert layer_streams.run_batch(compute, scheduler, batch(False), 8) == (8, False)
    for stream in (*senders[0].streams, *senders[2].streams):  # they have ended
        stream.layer_ready(0)
    assert senders[0].sent == senders[2].sent == []

    # A pipeline stage: whatever has not left by layer leaves with the batch, unless that has failed.
    def compute_layers(scheduler: Any, batch: Any, layers: int) -> int:
        for layer in range(layers):
            write(pool, layer, 21)
        return layers

    for layers in (0, 2, LAYERS):
        senders[:] = [SenderOfLongChunks(leaves_with_batch=True) for _ in range(3)]
        for request, sender in zip(requests, senders, strict=False):
            request.disagg_kv_sender = sender
        assert layer_streams.run_batch(compute_layers, scheduler, batch(True), layers) == layers
        rest = [(layers, LAYERS - layers)] if layers < LAYERS else []
        assert senders[0].sent == senders[2].sent == [*((layer, 1) for layer in range(layers)), *rest]
        assert senders[1].sent == [(0, LAYERS)]
        senders[1].streams[0].layer_ready(LAYERS)
        assert senders[1].sent == [(0, LAYERS)]

    def fail(scheduler: Any, batch: Any, extra: int) -> None:
        raise RuntimeError("out of memory")

    senders[1].sent.clear()
    with pytest.raises(RuntimeError):
        layer_streams.run_batch(fail, scheduler, batch(True), 8)
    senders[1].streams[-1].rest_ready()
    assert not senders[1].sent
