"""Describes how fast KV reaches decode by the handshake when it is in pieces: scattered slots, other tensor-parallel
sizes.

    python bench/kv_transfer.py [--rounds 25] [--output FILE]

A prefill and a decode rank, each a process with pools of 8 layers, 16,384 slots and heads of 256 bytes (128 elements of
bfloat16). Each transfer moves 67 MB, one part of all layers, and is timed from the moment the KV is there and granted
until all of it is stored. In every round each transport does each case once, in a random order; a ratio is that of
two transfers of one round, and the median over the rounds counts.

- `contiguous`: slots in order, as many heads on both sides (8, or 1 as of tensor parallelism 8)
- `fragmented`: pages of one token, slots drawn at random on both sides
- `reshard`: one head of eight (prefill 1 rank, decode 8), and one head into a row of eight (the reverse)
- the two together, and fragmented rows of a single head, each 256 bytes anywhere on both sides

What arrives is compared byte by byte in a round before the timed ones. The last line is `RESULT {json}`, ratios by
transport: `fragmented_over_contiguous` (8 heads), `reshard_over_contiguous` (the lower direction) and
`smallest_rows_over_contiguous` (the lowest of the last group).
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from array import array
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_ext.transfer.decide.receive_request import needed
from sglang_ext.transfer.decide.shards import KVShard, TokenSpan
from sglang_ext.transfer.endpoint.handshake_endpoint import HandshakeEndpoint
from sglang_ext.transfer.endpoint.outgoing_transfer import PartRows, SourceChunk
from sglang_ext.transfer.endpoint.transfer_status import Stage
from sglang_ext.transfer.pool_layout import ItemBuffer, PoolLayout
from sglang_ext.transfer.transports.registry import create_transport
from support.compiled import use_compiled_modules
from support.result import BenchmarkRun, give_up, progress

TRANSPORTS = ("tcp", "shared_memory")
LAYERS = 8
SLOTS = 16_384
HEAD_BYTES = 256
ALL_HEADS = 8
CELLS = 2048 * ALL_HEADS  # tokens × heads of every transfer
POLL_S = 0.0002
TIMEOUT_S = 60.0


class Case(NamedTuple):
    """Heads that each side's ranks have; what goes is what both have."""

    name: str
    prefill_heads: int
    decode_heads: int
    is_fragmented: bool
    over: str  # the case that it is compared with
    group: str | None  # of the result line

    @property
    def heads(self) -> int:
        return min(self.prefill_heads, self.decode_heads)

    @property
    def tokens(self) -> int:
        return CELLS // self.heads

    def slots(self, seed: int) -> npt.NDArray[np.uint32]:
        if self.is_fragmented:
            return np.random.default_rng(seed).permutation(SLOTS)[: self.tokens].astype(np.uint32)
        return np.arange(self.tokens, dtype=np.uint32)


ALL, ONE = "contiguous, 8 heads", "contiguous, 1 head"
CASES = (
    Case(ALL, 8, 8, False, ALL, None),
    Case(ONE, 1, 1, False, ONE, None),
    Case("fragmented, 8 heads", 8, 8, True, ALL, "fragmented"),
    Case("reshard 8 to 1", 8, 1, False, ALL, "reshard"),
    Case("reshard 1 to 8", 1, 8, False, ALL, "reshard"),
    Case("fragmented, 1 head", 1, 1, True, ONE, "smallest_rows"),
    Case("reshard 8 to 1, fragmented", 8, 1, True, ALL, "smallest_rows"),
    Case("reshard 1 to 8, fragmented", 1, 8, True, ALL, "smallest_rows"),
)
HEAD = 5  # which of eight a rank with one has


def aligned_pool(heads: int) -> npt.NDArray[np.uint8]:
    """K and V of each layer, at a multiple of 64 bytes, as PyTorch's allocators give it."""
    shape = (2 * LAYERS, SLOTS, heads * HEAD_BYTES)
    memory = np.empty(int(np.prod(shape)) + 63, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + int(np.prod(shape))].reshape(shape)


class Rank:
    """Pools with one and with eight heads, and an endpoint for each and each transport."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.pools = {heads: aligned_pool(heads) for heads in (1, ALL_HEADS)}
        for pool in self.pools.values():
            pool[:] = draw.integers(0, 256, pool.shape, np.uint8)
        self.endpoints = {
            (transport, heads): HandshakeEndpoint(
                "127.0.0.1", create_transport(transport, "127.0.0.1"), self._layout(heads)
            )
            for transport in TRANSPORTS
            for heads in self.pools
        }

    def rows(self, heads: int, case: Case, slots: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
        """The bytes of a case's heads in these slots, of all layers."""
        first = HEAD * HEAD_BYTES if heads > case.heads else 0
        return self.pools[heads][:, slots, first : first + case.heads * HEAD_BYTES]

    def _layout(self, heads: int) -> PoolLayout:
        buffers = [ItemBuffer(pool.ctypes.data, heads * HEAD_BYTES, SLOTS) for pool in self.pools[heads]]
        layers = tuple(zip(buffers[::2], buffers[1::2], strict=True))
        return PoolLayout("bfloat16", 0, layers, HEAD if heads == 1 else 0, heads)


def shard_of(case: Case) -> KVShard:
    """Return what a case sends."""
    return KVShard((TokenSpan(0, case.tokens),), HEAD if case.heads == 1 else 0, case.heads, 0, LAYERS)


def decode(pipe: Connection) -> None:
    """The decode rank: expects what the other process is about to send."""
    rank = Rank(2)
    pipe.send({key: endpoint.address for key, endpoint in rank.endpoints.items()})
    while True:
        order: tuple[str, Any] = pipe.recv()
        name, values = order
        if name == "expect":
            transport, case, transfer_id = values
            shard = shard_of(case)
            need = needed(
                transfer_id,
                first_token=0,
                slots=array("I", case.slots(2).tobytes()),
                first_head=shard.first_head,
                head_count=shard.head_count,
                first_layer=0,
                layer_count=LAYERS,
            )
            rank.endpoints[transport, case.decode_heads].expect(need)
            pipe.send(None)
        elif name == "rows":
            pipe.send(rank.rows(values.decode_heads, values, values.slots(2)))
        else:
            for endpoint in rank.endpoints.values():
                endpoint.close()
            return


class Transfers:
    """The prefill rank."""

    def __init__(self, pipe: Connection) -> None:
        self.rank = Rank(1)
        self._pipe = pipe
        self._decode: dict[tuple[str, int], str] = pipe.recv()
        self._count = 0

    def run(self, transport: str, case: Case) -> float:
        """Seconds of one transfer."""
        self._count += 1
        self._pipe.send(("expect", (transport, case, self._count)))
        self._pipe.recv()
        endpoint = self.rank.endpoints[transport, case.prefill_heads]
        handle = endpoint.open_sender(self._count, self._decode[transport, case.decode_heads], 1)
        handle.offer(SourceChunk(shard_of(case), case.slots(1), None), is_last=True)
        self._wait(lambda: handle.status.stage is Stage.TRANSFERRING)
        start_s = time.perf_counter()
        handle.part(0, PartRows(0, LAYERS, 0, case.tokens, False))
        self._wait(lambda: handle.stored_chunks == 1)
        taken_s = time.perf_counter() - start_s
        self._wait(lambda: handle.status.stage is Stage.COMPLETE)
        return taken_s

    def check(self, transport: str, case: Case) -> None:
        """The same, compared byte by byte."""
        rows = self.rank.rows(case.prefill_heads, case, case.slots(1))
        rows ^= np.frombuffer(random.Random(f"{transport} {case.name}").randbytes(rows.shape[2]), np.uint8)
        first = HEAD * HEAD_BYTES if case.prefill_heads > case.heads else 0
        pool = self.rank.pools[case.prefill_heads]
        pool[:, case.slots(1), first : first + rows.shape[2]] = rows
        self.run(transport, case)
        self._pipe.send(("rows", case))
        if not np.array_equal(self._pipe.recv(), rows):
            give_up(f"{transport}, {case.name}: other bytes have arrived")

    @staticmethod
    def _wait(is_true: Any) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not is_true():
            if time.monotonic() > deadline_s:
                give_up("a transfer does not end")
            time.sleep(POLL_S)


def main() -> None:
    """Run the benchmark and print the result line."""
    use_compiled_modules()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="timed rounds (default %(default)s)")
    parser.add_argument("--output", type=Path, help="also write the result to this file")
    options = parser.parse_args()
    benchmark = BenchmarkRun("sglang-ext")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    receiver = context.Process(target=decode, args=(there,), daemon=True)
    receiver.start()
    transfers = Transfers(here)
    runs = [(transport, case) for transport in TRANSPORTS for case in CASES]
    for run in runs:
        transfers.check(*run)
    progress(f"{len(runs)} cases arrive as they left; {options.rounds} rounds")
    times: dict[tuple[str, str], list[float]] = {(transport, case.name): [] for transport, case in runs}
    draw = random.Random(0)
    for _ in range(options.rounds):
        for transport, case in draw.sample(runs, len(runs)):
            times[transport, case.name].append(transfers.run(transport, case))
    here.send(("end", None))
    receiver.join()
    for endpoint in transfers.rank.endpoints.values():
        endpoint.close()
    benchmark.end({**ratios(times), "rounds": options.rounds}, options.output)


def ratios(times: dict[tuple[str, str], list[float]]) -> dict[str, object]:
    """Return what the result line says of the seconds of each case in each round."""
    table = []
    lowest: dict[str, dict[str, float]] = {}
    progress(f"{'transport':<16}{'case':<28}{'MB/s':>8}{'over contiguous':>18}")
    for transport in TRANSPORTS:
        for case in CASES:
            taken_s, base_s = times[transport, case.name], times[transport, case.over]
            ratio = round(median(base / taken for base, taken in zip(base_s, taken_s, strict=True)), 3)
            speed = CELLS * HEAD_BYTES * 2 * LAYERS / median(taken_s) / 1e6
            if case.group is not None:
                of_group = lowest.setdefault(f"{case.group}_over_contiguous", {})
                of_group[transport] = min(of_group.get(transport, ratio), ratio)
            table.append({"transport": transport, "case": case.name, "mb_per_s": round(speed), "over": ratio})
            progress(f"{transport:<16}{case.name:<28}{speed:>8.0f}{ratio:>18.2f}")
    return {**lowest, "table": table}


if __name__ == "__main__":
    main()
