"""A prefill or decode rank in a process of its own: an endpoint, KV pools filled from a seed, and a pipe for orders."""

from __future__ import annotations

import os
import signal
import time
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_ext.transfer.decide.options import HandshakeOptions
from sglang_ext.transfer.decide.protocol import ReceiveRecord
from sglang_ext.transfer.decide.receive_request import needed
from sglang_ext.transfer.decide.shards import KVShard
from sglang_ext.transfer.endpoint.handshake_endpoint import HandshakeEndpoint
from sglang_ext.transfer.endpoint.outgoing_transfer import OutgoingTransfer, PartRows, SourceChunk
from sglang_ext.transfer.endpoint.transfer_status import EndpointTotals, SendResult, Stage, TransferStatus
from sglang_ext.transfer.pool_layout import ItemBuffer, PoolLayout
from support.packed_transports import make_transport
from support.preloaded import preloaded_context

ANSWER_TIMEOUT_S = 60.0


class PoolShape(NamedTuple):
    """A rank's pool; `head_dim` floats of 4 bytes per head for K, half as many for V."""

    slot_count: int = 96
    layers: int = 3
    first_layer: int = 0
    heads: int = 2
    first_head: int = 0
    head_dim: int = 8
    dtype: str = "float32"


class Pool:
    """K and V per layer as SGLang lays them out, and one metadata buffer of 5 items."""

    def __init__(self, shape: PoolShape, seed: int) -> None:
        random = np.random.default_rng(seed)
        k = (shape.slot_count, shape.heads, shape.head_dim)
        v = (shape.slot_count, shape.heads, shape.head_dim // 2)
        self.buffers = [
            random.integers(0, 256, (*size[:2], size[2] * 4), np.uint8) for _ in range(shape.layers) for size in (k, v)
        ]
        self.aux = random.integers(0, 256, (5, 24), np.uint8)
        layers = [
            (_buffer(self.buffers[2 * layer]), _buffer(self.buffers[2 * layer + 1])) for layer in range(shape.layers)
        ]
        self.layout = PoolLayout(
            shape.dtype, shape.first_layer, tuple(layers), shape.first_head, shape.heads, (_buffer(self.aux),)
        )


def _buffer(memory: npt.NDArray[np.uint8]) -> ItemBuffer:
    return ItemBuffer(memory.ctypes.data, memory[0].nbytes, len(memory))


class _Rank:
    """What runs in the process; the parent calls its methods by name."""

    def __init__(self, transport: str, shape: PoolShape, seed: int, options: HandshakeOptions) -> None:
        self.pool = Pool(shape, seed)
        self.endpoint = HandshakeEndpoint("127.0.0.1", make_transport(transport), self.pool.layout, options)
        self.handles: dict[tuple[int, str], OutgoingTransfer] = {}

    def address(self) -> str:
        return self.endpoint.address

    def expect(
        self,
        transfer_id: int,
        first_token: int,
        slots: list[int],
        shard: KVShard,
        aux_slot: int | None,
        invite: tuple[str, ...] = (),
    ) -> None:
        self.endpoint.expect(
            needed(
                transfer_id,
                first_token=first_token,
                slots=array("I", slots),
                first_head=shard.first_head,
                head_count=shard.head_count,
                first_layer=shard.first_layer,
                layer_count=shard.layer_count,
                aux_slot=aux_slot,
            ),
            invite,
        )

    def cancel(self, transfer_id: int) -> None:
        self.endpoint.cancel(transfer_id, "cancelled")

    def receive_status(self, transfer_id: int) -> TransferStatus | None:
        return self.endpoint.receive_status(transfer_id)

    def open(self, transfer_id: int, receiver: str, sender_count: int | None) -> None:
        self.handles[transfer_id, receiver] = self.endpoint.open_sender(transfer_id, receiver, sender_count)

    def offer(
        self, transfer_id: int, receiver: str, shard: KVShard, slots: list[int], aux_slot: int | None, is_last: bool
    ) -> int:
        chunk = SourceChunk(shard, np.array(slots, np.uint32), aux_slot, ())
        return self.handles[transfer_id, receiver].offer(chunk, is_last=is_last)

    def part(self, transfer_id: int, receiver: str, chunk: int, part: PartRows) -> None:
        self.handles[transfer_id, receiver].part(chunk, part)

    def abort(self, transfer_id: int, receiver: str) -> None:
        self.handles[transfer_id, receiver].abort("aborted")

    def send_status(self, transfer_id: int, receiver: str) -> TransferStatus:
        return self.handles[transfer_id, receiver].status

    def content(self) -> tuple[list[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]:
        return self.pool.buffers, self.pool.aux

    def records(self) -> list[ReceiveRecord | SendResult]:
        return self.endpoint.drain_records()

    def totals(self) -> EndpointTotals:
        return self.endpoint.totals()

    def close(self) -> None:
        self.endpoint.close()


def _main(pipe: Connection, *arguments: Any) -> None:
    rank = _Rank(*arguments)
    pipe.send(None)
    while True:
        try:
            name, values = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(rank, name)(*values))
        except Exception as error:
            pipe.send(error)


class RankProcess:
    """The parent's side. Kill it, stop it, or use it as a context manager."""

    def __init__(self, transport: str, shape: PoolShape, seed: int, options: HandshakeOptions) -> None:
        context = preloaded_context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, transport, shape, seed, options), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()
        self.shape = shape
        self.before = Pool(shape, seed)
        self.address: str = self.call("address")

    def call(self, name: str, *values: Any) -> Any:
        self._pipe.send((name, values))
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(ANSWER_TIMEOUT_S), "a rank does not answer"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def __enter__(self) -> RankProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            self.signal(signal.SIGCONT)
        self._process.kill()
        self._process.join()
        self._pipe.close()


def wait_until(is_true: Callable[[], bool], timeout_s: float = 30.0, what: str = "it") -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline_s, f"{what} does not happen"
        time.sleep(0.01)


def is_stage(status: TransferStatus | None, stage: Stage) -> bool:
    return status is not None and status.stage is stage
