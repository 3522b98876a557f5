"""Describes how fast KV reaches decode by the handshake when it is in pieces: scattered slots, other tensor-parallel
sizes.

    python bench/kv_transfer.py [--rounds 25] [--output FILE]

A prefill and a decode rank, each a process with pools of 8 layers, 16,384 slots and heads of 256 bytes (128 elements of
bfloat16) if nothing else is said. Each transfer moves 67 MB, one part of all layers, and is timed from the moment the
KV is there and granted until all of it is stored. In every round each transport does each case once, in a random order;
a ratio is that of two transfers of one round, and the median over the rounds counts.

- `contiguous`: slots in order, as many heads on both sides (8, or 1 as of tensor parallelism 8)
- `fragmented`: pages of one token, slots drawn at random on both sides
- `reshard`: one head of eight (prefill 1 rank, decode 8), and one head into a row of eight (the reverse)
- the two together, and fragmented rows of a single head, each 256 bytes anywhere on both sides
- `latent`: rows of MLA, one of 1,152 bytes for each token and layer (DeepSeek V3), in order and at random
- `two pools`: half of the layers have a window of 256 tokens and a pool of their own (gpt-oss), whose rows leave with
  the metadata

What arrives is compared byte by byte in a round before the timed ones. The last line is `RESULT {json}`, ratios by
transport: `fragmented_over_contiguous` (8 heads), `reshard_over_contiguous` (the lower direction),
`smallest_rows_over_contiguous` (the lowest of that group), `latent_over_contiguous` and `two_pools_over_contiguous` (at
random, over 8 heads in order).
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
AUX_BYTES = 64
TRANSFER_BYTES = 1 << 26
POLL_S = 0.0002
TIMEOUT_S = 60.0


class Kind(NamedTuple):
    """Describes the pools of a rank."""

    name: str
    heads: int
    head_bytes: int
    buffers: int = 2  # of a layer: keys and values, or latent rows
    window_tokens: int = 0  # 0: all layers have one pool, else half of them have a window
    first_head: int = 0

    @property
    def whole_layers(self) -> int:
        return LAYERS // 2 if self.window_tokens else LAYERS


EIGHT = Kind("8 heads", 8, 256)
SINGLE = Kind("1 head", 1, 256, first_head=5)
LATENT = Kind("latent rows", 1, 1152, buffers=1)
WINDOWS = Kind("two pools", 8, 256, window_tokens=256)
KINDS = (EIGHT, SINGLE, LATENT, WINDOWS)


class Case(NamedTuple):
    """The pools of both sides; what goes is the heads that both have."""

    name: str
    prefill: Kind
    decode: Kind
    is_fragmented: bool
    over: str  # the case that it is compared with
    group: str | None  # of the result line

    @property
    def fewer(self) -> Kind:
        """Return the kind with the heads that go."""
        return min(self.prefill, self.decode, key=lambda kind: kind.heads)

    @property
    def row_bytes(self) -> int:
        return self.fewer.heads * self.fewer.head_bytes

    @property
    def tokens(self) -> int:
        kind = self.fewer
        return TRANSFER_BYTES // (kind.whole_layers * kind.buffers * self.row_bytes) - kind.window_tokens

    def slots(self, seed: int) -> npt.NDArray[np.uint32]:
        return self._slots(self.tokens, seed)

    def state_slots(self, seed: int) -> tuple[npt.NDArray[np.uint32], ...]:
        """Return where the rows of windows lie."""
        window = self.fewer.window_tokens
        return (self._slots(window, seed + 10),) if window else ()

    def _slots(self, tokens: int, seed: int) -> npt.NDArray[np.uint32]:
        if self.is_fragmented:
            return np.random.default_rng(seed).permutation(SLOTS)[:tokens].astype(np.uint32)
        return np.arange(tokens, dtype=np.uint32)


ALL, ONE = "contiguous, 8 heads", "contiguous, 1 head"
CASES = (
    Case(ALL, EIGHT, EIGHT, False, ALL, None),
    Case(ONE, SINGLE, SINGLE, False, ONE, None),
    Case("fragmented, 8 heads", EIGHT, EIGHT, True, ALL, "fragmented"),
    Case("reshard 8 to 1", EIGHT, SINGLE, False, ALL, "reshard"),
    Case("reshard 1 to 8", SINGLE, EIGHT, False, ALL, "reshard"),
    Case("fragmented, 1 head", SINGLE, SINGLE, True, ONE, "smallest_rows"),
    Case("reshard 8 to 1, fragmented", EIGHT, SINGLE, True, ALL, "smallest_rows"),
    Case("reshard 1 to 8, fragmented", SINGLE, EIGHT, True, ALL, "smallest_rows"),
    Case("latent", LATENT, LATENT, False, ALL, None),
    Case("latent, fragmented", LATENT, LATENT, True, ALL, "latent"),
    Case("two pools", WINDOWS, WINDOWS, False, ALL, None),
    Case("two pools, fragmented", WINDOWS, WINDOWS, True, ALL, "two_pools"),
)


def aligned_pool(buffers: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """Buffers of layers, at a multiple of 64 bytes, as PyTorch's allocators give it."""
    shape = (buffers, SLOTS, row_bytes)
    memory = np.empty(int(np.prod(shape)) + 63, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + int(np.prod(shape))].reshape(shape)


class Rank:
    """Pools of each kind, and an endpoint for each and each transport."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self._aux = np.zeros(AUX_BYTES, np.uint8)
        # Of each kind the pool of whole layers and, where there are any, that of layers with a window.
        self._pools: dict[str, list[npt.NDArray[np.uint8]]] = {}
        for kind in KINDS:
            layers = [kind.whole_layers] + [LAYERS - kind.whole_layers] * bool(kind.window_tokens)
            pools = [aligned_pool(count * kind.buffers, kind.heads * kind.head_bytes) for count in layers]
            for pool in pools:
                pool[:] = draw.integers(0, 256, pool.shape, np.uint8)
            self._pools[kind.name] = pools
        self.endpoints = {
            (transport, kind.name): HandshakeEndpoint(
                "127.0.0.1", create_transport(transport, "127.0.0.1"), self._layout(kind)
            )
            for transport in TRANSPORTS
            for kind in KINDS
        }

    def rows(self, kind: Kind, case: Case, seed: int) -> list[npt.NDArray[np.uint8]]:
        """The bytes of a case's heads, of each pool."""
        return [pool[:, slots, columns] for pool, slots, columns in self._places(kind, case, seed)]

    def write(self, kind: Kind, case: Case, seed: int, rows: list[npt.NDArray[np.uint8]]) -> None:
        """Put such bytes there."""
        for (pool, slots, columns), part in zip(self._places(kind, case, seed), rows, strict=True):
            pool[:, slots, columns] = part

    def _places(self, kind: Kind, case: Case, seed: int) -> list[tuple[npt.NDArray[np.uint8], Any, slice]]:
        first = SINGLE.first_head * kind.head_bytes if kind.heads > case.fewer.heads else 0
        columns = slice(first, first + case.row_bytes)
        slots = (case.slots(seed), *case.state_slots(seed))
        return [(pool, here, columns) for pool, here in zip(self._pools[kind.name], slots, strict=True)]

    def _layout(self, kind: Kind) -> PoolLayout:
        whole, *windows = [
            tuple(ItemBuffer(buffer.ctypes.data, kind.heads * kind.head_bytes, SLOTS) for buffer in pool)
            for pool in self._pools[kind.name]
        ]
        layers = tuple(whole[layer :: kind.whole_layers] for layer in range(kind.whole_layers))
        aux = (ItemBuffer(self._aux.ctypes.data, AUX_BYTES, 1),) if windows else ()
        return PoolLayout("bfloat16", 0, layers, kind.first_head, kind.heads, aux, tuple(windows))


def shard_of(case: Case) -> KVShard:
    """Return what a case sends."""
    kind = case.fewer
    has_aux = bool(kind.window_tokens)
    return KVShard((TokenSpan(0, case.tokens),), kind.first_head, kind.heads, 0, kind.whole_layers, has_aux)


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
                layer_count=shard.layer_count,
                aux_slot=0 if shard.has_aux else None,
                state_slots=tuple(slots.tobytes() for slots in case.state_slots(2)),
            )
            rank.endpoints[transport, case.decode.name].expect(need)
            pipe.send(None)
        elif name == "rows":
            pipe.send(rank.rows(values.decode, values, 2))
        else:
            for endpoint in rank.endpoints.values():
                endpoint.close()
            return


class Transfers:
    """The prefill rank."""

    def __init__(self, pipe: Connection) -> None:
        self.rank = Rank(1)
        self._pipe = pipe
        self._decode: dict[tuple[str, str], str] = pipe.recv()
        self._count = 0

    def run(self, transport: str, case: Case) -> float:
        """Seconds of one transfer."""
        self._count += 1
        self._pipe.send(("expect", (transport, case, self._count)))
        self._pipe.recv()
        endpoint, shard = self.rank.endpoints[transport, case.prefill.name], shard_of(case)
        handle = endpoint.open_sender(self._count, self._decode[transport, case.decode.name], 1)
        aux_slot = 0 if shard.has_aux else None
        handle.offer(SourceChunk(shard, case.slots(1), aux_slot, case.state_slots(1)), is_last=True)
        self._wait(lambda: handle.status.stage is Stage.TRANSFERRING)
        start_s = time.perf_counter()
        handle.part(0, PartRows(0, shard.layer_count, 0, case.tokens, shard.has_aux))
        self._wait(lambda: handle.stored_chunks == 1)
        taken_s = time.perf_counter() - start_s
        self._wait(lambda: handle.status.stage is Stage.COMPLETE)
        return taken_s

    def check(self, transport: str, case: Case) -> None:
        """The same, compared byte by byte."""
        change = np.frombuffer(random.Random(f"{transport} {case.name}").randbytes(case.row_bytes), np.uint8)
        rows = [part ^ change for part in self.rank.rows(case.prefill, case, 1)]
        self.rank.write(case.prefill, case, 1, rows)
        self.run(transport, case)
        self._pipe.send(("rows", case))
        if not all(map(np.array_equal, self._pipe.recv(), rows)):
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
            speed = TRANSFER_BYTES / median(taken_s) / 1e6
            if case.group is not None:
                of_group = lowest.setdefault(f"{case.group}_over_contiguous", {})
                of_group[transport] = min(of_group.get(transport, ratio), ratio)
            table.append({"transport": transport, "case": case.name, "mb_per_s": round(speed), "over": ratio})
            progress(f"{transport:<16}{case.name:<28}{speed:>8.0f}{ratio:>18.2f}")
    return {**lowest, "table": table}


if __name__ == "__main__":
    main()
