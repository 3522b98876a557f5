"""Decode grants no slots to a sender while its own work on the GPU may still write to them."""

from __future__ import annotations

import time
from array import array

import numpy as np
import pytest
import torch

pytest.importorskip("zmq", reason="needs ZeroMQ, over which endpoints talk")
pytest.importorskip("msgspec", reason="needs msgspec, in which endpoints write")

from sglang_ext.transfer.decide.receive_request import needed
from sglang_ext.transfer.decide.shards import KVShard, TokenSpan
from sglang_ext.transfer.endpoint.handshake_endpoint import HandshakeEndpoint
from sglang_ext.transfer.endpoint.outgoing_transfer import PartRows, SourceChunk
from sglang_ext.transfer.endpoint.transfer_status import Stage
from sglang_ext.transfer.transports.tcp import TcpTransport
from support.handshake_process import Pool, PoolShape, is_stage, wait_until

pytestmark = pytest.mark.gpu

SPIN_CYCLES = 2_000_000_000  # about a second
SLOTS = [7, 8, 9, 20]


def test_kv_is_not_written_before_the_forward_stream_is_past() -> None:
    source, target = Pool(PoolShape(), 1), Pool(PoolShape(), 2)
    prefill, decode = (
        HandshakeEndpoint("127.0.0.1", TcpTransport("127.0.0.1"), pool.layout) for pool in (source, target)
    )
    try:
        handle = prefill.open_sender(1, decode.address, 1)
        shard = KVShard((TokenSpan(0, 4),), 0, 2, 0, 3)
        handle.offer(SourceChunk(shard, np.array([3, 2, 1, 0], np.uint32), None, ()), is_last=True)
        handle.part(0, PartRows(0, 3, 0, 4, False))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SPIN_CYCLES)
            unused = torch.cuda.Event(blocking=True)
            unused.record()
        need = needed(
            1, first_token=0, slots=array("I", SLOTS), first_head=0, head_count=2, first_layer=0, layer_count=3
        )
        before = target.buffers[4].copy()
        decode.expect(need, unused=unused)
        wait_until(lambda: handle.status.stage is Stage.WAITING)
        while not unused.query():
            is_untouched = np.array_equal(target.buffers[4], before)
            assert is_untouched or unused.query()
            time.sleep(0.01)
        wait_until(lambda: is_stage(decode.receive_status(1), Stage.COMPLETE))
        np.testing.assert_array_equal(target.buffers[4][SLOTS], source.buffers[4][[3, 2, 1, 0]])
    finally:
        prefill.close()
        decode.close()
