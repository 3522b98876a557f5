"""Keys and values of a long chunk leave for decode layer by layer, while the model computes the layers after.

    run_batch ──who sends?──▶ streams; what the pool gets is watched ──layer 0, layer 1, …──▶ parts
              ──end of the forward pass──▶ not watched any more; `send` brings what is left

On a pipeline stage what is left of any chunk, short ones among them, leaves at the end of the forward pass: their
results come back after the next batch.

An attention backend that writes a layer otherwise (a kernel that writes as it rotates, a graph that is replayed), or in
several pieces, ends the streams of its batch at that layer: the rest leaves when the chunk is done, as without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from sglang_ext.transfer.endpoint.outgoing_transfer import DeviceEvent
from sglang_ext.transfer.endpoint.owner_transfer import LayerStream
from sglang_ext.transfer.sglang.device_events import record_event
from sglang_ext.transfer.sglang.sender import HandshakeKVSender


def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's: computes the batch, and lets long chunks leave by layer."""
    by_layer, whole = _begin(batch) if batch.forward_mode.is_extend() else ([], [])
    if not by_layer and not whole:
        return original(scheduler, batch, *args, **kwargs)
    try:
        pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        with watch_layers(pool, by_layer, len(batch.out_cache_loc)) if by_layer else nullcontext():
            result = original(scheduler, batch, *args, **kwargs)
        for stream in whole:
            stream.rest_ready(_computed(batch.out_cache_loc))
        return result
    finally:
        for stream in (*by_layer, *whole):
            stream.close()


def _begin(batch: Any) -> tuple[list[LayerStream], list[LayerStream]]:
    """Return the streams of the chunks of a batch that are long enough, and of the chunks that leave with it."""
    by_layer: list[LayerStream] = []
    whole: list[LayerStream] = []
    slots = None
    first = 0
    for request, start, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        sender = getattr(request, "disagg_kv_sender", None)
        if isinstance(sender, HandshakeKVSender) and (sender.leaves_with_batch or sender.may_stream(count)):
            if slots is None:
                slots = batch.out_cache_loc.cpu().numpy().astype(np.uint32)
            streams = sender.stream(start, slots[first : first + count])
            if sender.may_stream(count):
                by_layer += streams
            if sender.leaves_with_batch:
                whole += streams
        first += count
    return by_layer, whole


@contextmanager
def watch_layers(pool: Any, streams: Sequence[LayerStream], batch_tokens: int) -> Iterator[None]:
    """Inside the `with` block streams are notified of every layer of which `pool` gets keys and values, or latent rows.

    Only of whole batches of `batch_tokens`: what comes in pieces says nothing about the other ones. The KV of layers
    with a window leaves when all is computed.
    """
    next_place = 0

    def watched(write: Callable[..., None]) -> Callable[..., None]:
        def write_and_tell(layer: Any, loc_info: Any, keys: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal next_place
            write(layer, loc_info, keys, *args, **kwargs)
            if layer is not None and _place(pool, layer.layer_id) == next_place and len(keys) == batch_tokens:
                computed = _computed(keys)
                for stream in streams:
                    stream.layer_ready(next_place, computed)
                next_place += 1

        return write_and_tell

    names = [name for name in ("set_kv_buffer", "set_mla_kv_buffer") if hasattr(pool, name)]
    for name in names:
        setattr(pool, name, watched(getattr(pool, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(pool, name)


def _place(pool: Any, layer: int) -> int | None:
    """Return the place of a layer of the model among the layers that leave one by one; None for one with a window."""
    attending: dict[int, int] | None = getattr(pool, "full_attention_layer_id_mapping", None)
    if attending is not None:  # the others have recurrent states
        return attending[layer]
    mapping = getattr(pool, "layers_mapping", None)
    if mapping is None:
        return layer - int(pool.start_layer)
    place, has_window = mapping[layer]
    return None if has_window else int(place)


def _computed(on_device: torch.Tensor) -> DeviceEvent | None:
    """Return an event for the device having come this far; None where a call that has returned has computed."""
    return record_event() if on_device.device.type == "cuda" else None
