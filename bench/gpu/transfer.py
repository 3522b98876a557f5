"""KV from a prefill to a decode process by the handshake, both pools in one GPU's memory.

    python bench/gpu/transfer.py [--transport nixl] [--tokens N] [--out FILE] [--dry-run]

28 layers of a 7B model, 4,096 tokens (235 MB), offered as one part behind an event of what is being computed; in slots
that follow each other, and in pages of one token drawn at random on both sides. What arrives is compared byte by byte.
A dry run has both pools in host memory, and takes `shared_memory`.

A bad number: bytes that are not equal are a write that overtook its computation. Far below 20 GB/s in slots that follow
each other: the transport does not reach the device (UCX_TLS, CUDA IPC). Scattered far below that: its pieces are small.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import numpy.typing as npt
import torch

import gpu.checkout  # noqa: F401
from gpu.measure import DEVICE, HAS_GPU, Report, parser, progress
from sglang_ext.transfer.decide.receive_request import needed
from sglang_ext.transfer.decide.shards import KVShard, TokenSpan
from sglang_ext.transfer.endpoint.handshake_endpoint import HandshakeEndpoint
from sglang_ext.transfer.endpoint.outgoing_transfer import PartRows, SourceChunk
from sglang_ext.transfer.endpoint.transfer_status import Stage
from sglang_ext.transfer.pool_layout import ItemBuffer, PoolLayout
from sglang_ext.transfer.transports.registry import create_transport
from sglang_ext.transfer.transports.transport import GpuBuffers

HEADS, ROW_BYTES = 4, 4 * 128 * 2
LAYERS = 28 if HAS_GPU else 4
SLOTS = 65536 if HAS_GPU else 1024
ROUNDS = 4
KINDS = ("contiguous", "scattered")
POLL_S = 1e-4
TIMEOUT_S = 60.0


class Rank:
    """Pools of random bytes and an endpoint over them."""

    def __init__(self, transport: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = SLOTS, ROW_BYTES
        self.pools = [
            torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(DEVICE) for _ in range(2 * LAYERS)
        ]
        buffers = [ItemBuffer(pool.data_ptr(), ROW_BYTES, SLOTS) for pool in self.pools]
        layers = tuple(zip(buffers[::2], buffers[1::2], strict=True))
        layout = PoolLayout("bfloat16 on a GPU" if HAS_GPU else "bfloat16", 0, layers, 0, HEADS)
        of_gpu = GpuBuffers(0, tuple(buffers)) if HAS_GPU else None
        self.endpoint = HandshakeEndpoint("127.0.0.1", create_transport(transport, "127.0.0.1", of_gpu), layout)

    def rows(self, slots: npt.NDArray[np.uint32]) -> list[npt.NDArray[np.uint8]]:
        """The bytes in these slots, of all layers."""
        at = torch.from_numpy(slots.astype(np.int64)).to(DEVICE)
        return [pool[at].cpu().numpy() for pool in self.pools]


def slots_of(kind: str, tokens: int, seed: int) -> npt.NDArray[np.uint32]:
    """Where the tokens lie in a pool."""
    if kind == "contiguous":
        return np.arange(tokens, dtype=np.uint32)
    return np.random.default_rng(seed).permutation(SLOTS)[:tokens].astype(np.uint32)


def decode(pipe: Connection, transport: str) -> None:
    """The decode process: expects what the other one is about to send, and shows what has arrived."""
    try:
        rank = Rank(transport, 2)
        pipe.send(rank.endpoint.address)
        while (order := pipe.recv()) is not None:
            what, transfer_id, kind, tokens = order
            slots = slots_of(kind, tokens, 2)
            if what == "rows":
                pipe.send(rank.rows(slots))
                continue
            need = needed(
                transfer_id,
                first_token=0,
                slots=array("I", slots.tobytes()),
                first_head=0,
                head_count=HEADS,
                first_layer=0,
                layer_count=LAYERS,
            )
            rank.endpoint.expect(need)
            pipe.send("expected")
        rank.endpoint.close()
    except Exception:
        pipe.send(RuntimeError(traceback.format_exc()[-800:]))


def receive(pipe: Connection) -> Any:
    """Raises what the other process raised."""
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError(f"the decode process does not answer in {TIMEOUT_S:g} s")
    found = pipe.recv()
    if isinstance(found, Exception):
        raise found
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the transfer does not end in {TIMEOUT_S:g} s")
        time.sleep(POLL_S)


def transfer(rank: Rank, to: str, transfer_id: int, source: npt.NDArray[np.uint32]) -> float:
    """Send the tokens in these slots; seconds from the start of their computation until all are stored."""
    tokens = len(source)
    sender = rank.endpoint.open_sender(transfer_id, to, 1)
    shard = KVShard((TokenSpan(0, tokens),), 0, HEADS, 0, LAYERS)
    sender.offer(SourceChunk(shard, source, None), is_last=True)
    wait_until(lambda: sender.status.stage is Stage.TRANSFERRING)
    computed = None
    started_s = time.perf_counter()
    for pool in rank.pools:
        pool.add_(1)
    if HAS_GPU:
        computed = torch.cuda.Event(blocking=True)
        computed.record()
    sender.part(0, PartRows(0, LAYERS, 0, tokens, False), computed=computed)
    wait_until(lambda: sender.stored_chunks == 1)
    seconds = time.perf_counter() - started_s
    wait_until(lambda: sender.status.stage is Stage.COMPLETE)
    return seconds


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--transport", default=None, help="default: nixl; shared_memory in a dry run")
    options.add_argument("--tokens", type=int, default=None, help="default: 4096; 200 in a dry run")
    arguments = options.parse_args()
    transport = arguments.transport or ("shared_memory" if arguments.dry_run else "nixl")
    tokens = arguments.tokens or (200 if arguments.dry_run else 4096)
    report = Report("transfer", arguments.out, arguments.dry_run)
    report.expect("slots that follow each other", "equal, at least 20 GB/s")
    report.expect("scattered slots", "equal; below 5 GB/s the pieces of 1 KiB are the cost")
    report.record(transport=transport, tokens=tokens, layers=LAYERS)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=decode, args=(there, transport), daemon=True)
    process.start()
    try:
        rank = Rank(transport, 1)
        to = receive(here)
        size_bytes = tokens * ROW_BYTES * 2 * LAYERS
        for number, kind in enumerate(KINDS):
            source = slots_of(kind, tokens, 1)
            seconds = []
            for turn in range(ROUNDS):
                transfer_id = number * ROUNDS + turn + 1
                here.send(("expect", transfer_id, kind, tokens))
                receive(here)
                seconds.append(transfer(rank, to, transfer_id, source))
            here.send(("rows", 0, kind, tokens))
            is_equal = all(np.array_equal(*pair) for pair in zip(receive(here), rank.rows(source), strict=True))
            rate = size_bytes / min(seconds)
            report.record(**{kind: {"seconds": seconds, "bytes": size_bytes, "bytes_per_s": rate}})
            progress(f"{kind}: {size_bytes / 1e6:.0f} MB, ms {[round(each * 1e3, 1) for each in seconds]}")
            report.check(f"bytes that are equal, {kind}", float(is_equal), at_least=1)
            report.check(f"GB/s, {kind}", rate / 1e9, at_least=20 if kind == "contiguous" else 5, is_speed=True)
        here.send(None)
        rank.endpoint.close()
    except Exception as error:
        report.fail("transfer", error)
    process.join(5)
    process.kill()
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
