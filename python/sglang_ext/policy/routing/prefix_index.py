"""What each prefill instance is believed to have in its prefix cache, by hashes of the prompt's blocks.

The router learns it from what it routed and from what the engines report. A block's hash covers the prompt
from its start to the block's end, so one table from hash to the set of workers, a bit mask, gives every
worker's depth in one walk. Each worker's blocks are kept in order of use. The blocks of a prompt are touched
last block first, so what is dropped first is the end of the prompt used least recently, never a block that
others build on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

BLOCK_BYTES = 256
MAX_BLOCKS = 4096


def block_hashes(prompt: bytes, block_bytes: int = BLOCK_BYTES, max_blocks: int = MAX_BLOCKS) -> list[int]:
    """64-bit hashes of the prompt's full blocks; hash i covers `prompt[: (i + 1) * block_bytes]`.

    Each block is hashed with the hash before it as seed. At most `max_blocks` are hashed.
    """
    end = min(len(prompt) // block_bytes, max_blocks) * block_bytes
    if end == block_bytes:
        return [xxh3_64_intdigest(prompt[:block_bytes], 0)]
    hashes: list[int] = []
    chained = 0
    for start in range(0, end, block_bytes):
        chained = xxh3_64_intdigest(prompt[start : start + block_bytes], chained)
        hashes.append(chained)
    return hashes


class PrefixIndex:
    """Believed cache contents of all workers, at most `capacity_blocks` blocks each (least recently used).

    Costs about 0.2 KB per worker and block. Raises ValueError, naming the argument, when a bound makes no
    sense.
    """

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"capacity_blocks must be at least 1, got {capacity_blocks}")
        self.capacity_blocks = capacity_blocks
        self._workers_of: dict[int, int] = {}  # block hash → bit mask of the workers that have it
        self._blocks_of: dict[int, OrderedDict[int, None]] = {}  # worker → its blocks, oldest use first
        self._capacity_of: dict[int, int] = {}
        self._bit_of: dict[int, int] = {}
        self._worker_at: dict[int, int] = {}  # bit → worker

    @property
    def block_count(self) -> int:
        """Different blocks known, of all workers together."""
        return len(self._workers_of)

    def worker_block_count(self, worker_id: int) -> int:
        """Blocks that this worker is believed to have. Raises KeyError for an unknown worker."""
        return len(self._blocks_of[worker_id])

    def add_worker(self, worker_id: int) -> None:
        """Start to index a worker; without effect if it is known."""
        if worker_id in self._bit_of:
            return
        bit = 1
        while bit in self._worker_at:
            bit <<= 1
        self._bit_of[worker_id] = bit
        self._worker_at[bit] = worker_id
        self._blocks_of[worker_id] = OrderedDict()
        self._capacity_of[worker_id] = self.capacity_blocks

    def set_capacity(self, worker_id: int, capacity_blocks: int) -> None:
        """The worker's cache holds so many blocks: remember no more of it, and never more than `capacity_blocks`.

        Without effect if the worker is not known. Raises ValueError below 1.
        """
        if capacity_blocks < 1:
            raise ValueError(f"capacity_blocks must be at least 1, got {capacity_blocks}")
        if worker_id in self._capacity_of:
            self._capacity_of[worker_id] = min(capacity_blocks, self.capacity_blocks)
            self._evict(worker_id)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker; without effect if it is not known. Takes time in proportion to its blocks."""
        if worker_id in self._bit_of:
            self.clear(worker_id)
            del self._worker_at[self._bit_of.pop(worker_id)]
            del self._blocks_of[worker_id]
            del self._capacity_of[worker_id]

    def clear(self, worker_id: int) -> None:
        """The worker's cache is empty (restarted, flushed). Without effect if the worker is not known."""
        blocks = self._blocks_of.get(worker_id)
        if blocks:
            bit = self._bit_of[worker_id]
            for block in blocks:
                self._drop(block, bit)
            blocks.clear()

    def matched_blocks(self, hashes: Sequence[int]) -> dict[int, int]:
        """Leading blocks of a prompt that each worker is believed to have; none: the worker is left out."""
        if not hashes:
            return {}
        workers_of = self._workers_of.get
        having = workers_of(hashes[0], 0)
        if not having:
            return {}
        depths: dict[int, int] = {}
        depth = 1
        for depth in range(1, len(hashes)):
            still = workers_of(hashes[depth], 0) & having
            if still != having:
                self._set_depth(depths, having ^ still, depth)
                having = still
                if not still:
                    return depths
        self._set_depth(depths, having, len(hashes))
        return depths

    def record(self, worker_id: int, hashes: Sequence[int]) -> None:
        """A prompt with these blocks goes to this worker, which will have them. Ignores unknown workers."""
        blocks = self._blocks_of.get(worker_id)
        if blocks is None:
            return
        bit = self._bit_of[worker_id]
        workers_of = self._workers_of
        for block in reversed(hashes[: self._capacity_of[worker_id]]):
            if block in blocks:
                blocks.move_to_end(block)
            else:
                blocks[block] = None
                workers_of[block] = workers_of.get(block, 0) | bit
        if len(blocks) > self._capacity_of[worker_id]:
            self._evict(worker_id)

    def forget(self, worker_id: int, hashes: Sequence[int], from_block: int) -> None:
        """The worker turned out not to have these blocks from position `from_block` on."""
        blocks = self._blocks_of.get(worker_id)
        if blocks is None:
            return
        bit = self._bit_of[worker_id]
        for block in hashes[from_block:]:
            if block in blocks:
                del blocks[block]
                self._drop(block, bit)

    def _evict(self, worker_id: int) -> None:
        blocks = self._blocks_of[worker_id]
        bit = self._bit_of[worker_id]
        while len(blocks) > self._capacity_of[worker_id]:
            self._drop(blocks.popitem(last=False)[0], bit)

    def _set_depth(self, depths: dict[int, int], workers: int, depth: int) -> None:
        while workers:
            bit = workers & -workers
            depths[self._worker_at[bit]] = depth
            workers ^= bit

    def _drop(self, block: int, bit: int) -> None:
        left = self._workers_of[block] & ~bit
        if left:
            self._workers_of[block] = left
        else:
            del self._workers_of[block]
