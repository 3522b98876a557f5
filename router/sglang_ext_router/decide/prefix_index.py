"""The blocks that each prefill instance is believed to have in its prefix cache, by the hashes of a prompt's blocks.

The router learns it from what it routed and from what the engines report. A block's hash covers the prompt from its
start to the block's end, so prompts make a tree: what they share is a path from its root. A node is a run of blocks
that were always used together; for each worker that has them, a holding says how many of the run's first blocks are
left. For a prompt of any length, matching and recording it take time in proportion to the few nodes on its path.

Each worker's holdings are kept in order of use. Those of a prompt are touched last one first, so what is dropped first
is the end of the prompt used least recently, never a block that others build on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

BLOCK_BYTES = 256  # of the first blocks
_LEVEL_BLOCKS = 64  # of one size; then it doubles
_LEVELS = 12


def _block_ends() -> tuple[int, ...]:
    ends: list[int] = []
    end = 0
    for level in range(_LEVELS):
        for _ in range(_LEVEL_BLOCKS):
            end += BLOCK_BYTES << level
            ends.append(end)
    return tuple(ends)


# Where the blocks of a prompt end, in bytes: no block is longer than 1/32 of what it ends, or 256 bytes.
BLOCK_ENDS = _block_ends()


def block_hashes(prompt: bytes, ends: Sequence[int] = BLOCK_ENDS) -> list[int]:
    """64-bit hashes of the prompt's full blocks; hash i covers `prompt[: ends[i]]`.

    Each block is hashed with the hash before it as seed. What lies behind the last of `ends` is not hashed.
    """
    count = bisect_right(ends, len(prompt))
    if count == 1:
        return [xxh3_64_intdigest(prompt[: ends[0]], 0)]
    hashes: list[int] = []
    start = chained = 0
    for number in range(count):
        end = ends[number]
        chained = xxh3_64_intdigest(prompt[start:end], chained)
        hashes.append(chained)
        start = end
    return hashes


class _Node:
    """A run of blocks: where it starts in its prompts, counted in blocks, and who has how much of it."""

    __slots__ = ("children", "holdings", "parent", "run", "start")

    def __init__(self, parent: _Node | None, start: int, run: list[int]) -> None:
        self.parent = parent
        self.start = start
        self.run = run
        self.children: dict[int, _Node] = {}  # by the first hash of their runs
        self.holdings: dict[int, _Holding] = {}  # by worker


class _Holding:
    """The first `count` blocks of a node's run, which one worker has; a link in its order of use."""

    __slots__ = ("count", "newer", "node", "older")

    def __init__(self, node: _Node, count: int) -> None:
        self.node = node
        self.count = count
        self.older = self
        self.newer = self

    def put_before(self, other: _Holding) -> None:
        """Become the entry that is used just before `other`."""
        self.older, self.newer = other.older, other
        self.older.newer = self
        other.older = self

    def take_out(self) -> None:
        self.older.newer = self.newer
        self.newer.older = self.older


class _Cache:
    """One worker's blocks. `ring.newer` is the holding used least recently, `ring.older` the one used last."""

    __slots__ = ("block_count", "capacity", "ring", "used")

    def __init__(self, root: _Node, capacity: int) -> None:
        self.ring = _Holding(root, 0)
        self.capacity = capacity
        self.used = 0
        self.block_count = 0


class PrefixIndex:
    """Believed cache contents of all workers, each of at most `capacity` (what was used least recently is dropped).

    The capacity and all sizes are in the unit of `ends`, where a prompt's blocks end; without it a block has size 1.
    It takes about 100 bytes per block and worker, and up to 500 where no two blocks are always used together.
    Raises ValueError, naming the argument, when a bound makes no sense.
    """

    def __init__(self, capacity: int, ends: Sequence[int] | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self._ends = ends
        self._root = _Node(None, 0, [])
        self._caches: dict[int, _Cache] = {}

    @property
    def block_count(self) -> int:
        """Different blocks known, of all workers together. It visits all of them."""
        count = 0
        nodes = list(self._root.children.values())
        while nodes:
            node = nodes.pop()
            count += max((holding.count for holding in node.holdings.values()), default=0)
            nodes += node.children.values()
        return count

    def worker_block_count(self, worker_id: int) -> int:
        """Blocks that this worker is believed to have. Raises KeyError for an unknown worker."""
        return self._caches[worker_id].block_count

    @property
    def used(self) -> int:
        """Size of what is known, of all workers together."""
        return sum(cache.used for cache in self._caches.values())

    def newest_paths(self, worker_id: int, max_blocks: int) -> list[list[int]]:
        """The prompts that this worker is believed to have, as hashes from their start, the one used last last.

        Those used most recently that have no more than `max_blocks` together; recorded elsewhere in this order they
        make the same contents. Empty for an unknown worker.
        """
        cache = self._caches.get(worker_id)
        paths: list[list[int]] = []
        if cache is None:
            return paths
        holding = cache.ring.older
        while holding is not cache.ring:
            if _ends_a_prompt(worker_id, holding):
                max_blocks -= holding.node.start + holding.count
                if max_blocks < 0:
                    break
                paths.append(_blocks_to(holding))
            holding = holding.older
        paths.reverse()
        return paths

    def add_worker(self, worker_id: int) -> None:
        """Start to index a worker; without effect if it is known."""
        if worker_id not in self._caches:
            self._caches[worker_id] = _Cache(self._root, self.capacity)

    def set_capacity(self, worker_id: int, capacity: int) -> None:
        """The worker's cache is so large: remember no more of it, and never more than the index's own capacity.

        Without effect if the worker is not known. Raises ValueError below 1.
        """
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        cache = self._caches.get(worker_id)
        if cache is not None:
            cache.capacity = min(capacity, self.capacity)
            self._evict(worker_id, cache)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker; without effect if it is not known. Takes time in proportion to what it has."""
        self.clear(worker_id)
        self._caches.pop(worker_id, None)

    def clear(self, worker_id: int) -> None:
        """The worker's cache is empty (restarted, flushed). Without effect if the worker is not known."""
        cache = self._caches.get(worker_id)
        if cache is not None:
            while cache.ring.newer is not cache.ring:
                self._drop(worker_id, cache, cache.ring.newer, 0)

    def matched(self, hashes: Sequence[int]) -> dict[int, int]:
        """Return how many bytes of a prompt's start each worker is believed to have; none: it is left out."""
        sizes: dict[int, int] = {}
        total = len(hashes)
        if not total:
            return sizes
        node = self._root.children.get(hashes[0])
        having: dict[int, _Holding] | None = None  # instances that have the whole path up to `node`
        start = 0
        while node is not None:
            common = _common(node.run, hashes, start)
            still: dict[int, _Holding] = {}
            size = self._size(0, start + common)
            for worker_id, holding in node.holdings.items():
                if having is not None and worker_id not in having:
                    continue
                if holding.count >= common:
                    still[worker_id] = holding
                    sizes[worker_id] = size
                else:
                    sizes[worker_id] = self._size(0, start + holding.count)
            start += common
            if common < len(node.run) or start == total or not still:
                break
            having = still
            node = node.children.get(hashes[start])
        return sizes

    def record(self, worker_id: int, hashes: Sequence[int]) -> None:
        """A prompt with these blocks goes to this worker, which will have them. Ignores unknown workers."""
        cache = self._caches.get(worker_id)
        if cache is None:
            return
        total = min(len(hashes), self._blocks_within(cache.capacity))
        path: list[_Node] = self._path(hashes, total)
        last = path[-1] if path else self._root
        start = last.start + len(last.run)
        if start < total:
            node = _Node(last, start, list(hashes[start:total]))
            last.children[node.run[0]] = node
            path.append(node)
        for node in reversed(path):
            holding = node.holdings.get(worker_id)
            size = len(node.run)
            if holding is None:
                holding = node.holdings[worker_id] = _Holding(node, 0)
            else:
                holding.take_out()
            holding.put_before(cache.ring)
            if holding.count < size:
                cache.used += self._size(node.start + holding.count, node.start + size)
                cache.block_count += size - holding.count
                holding.count = size
        if cache.used > cache.capacity:
            self._evict(worker_id, cache)

    def forget(self, worker_id: int, hashes: Sequence[int], held: int) -> None:
        """The worker turned out not to have more of this prompt than its first blocks, of size `held` in all."""
        cache = self._caches.get(worker_id)
        if cache is None:
            return
        kept = self._blocks_within(held)
        for node in reversed(self._path(hashes, len(hashes))):
            if node.start + len(node.run) <= kept:
                return
            holding = node.holdings.get(worker_id)
            if holding is not None:
                self._drop(worker_id, cache, holding, max(0, kept - node.start))

    # -- the tree ---------------------------------------------------------------------------------------------

    def _path(self, hashes: Sequence[int], total: int) -> list[_Node]:
        """The nodes that the first `total` blocks share with what is known; the last one is split where that ends."""
        path: list[_Node] = []
        start = 0
        node = self._root
        while start < total:
            child = node.children.get(hashes[start])
            if child is None:
                break
            common = min(_common(child.run, hashes, start), total - start)
            node = child if common == len(child.run) else self._split(child, common)
            path.append(node)
            start += common
            if node is not child:
                break
        return path

    def _split(self, node: _Node, count: int) -> _Node:
        """Make the first `count` blocks of a run a node of their own, which is returned."""
        parent = node.parent
        assert parent is not None
        upper = _Node(parent, node.start, node.run[:count])
        parent.children[upper.run[0]] = upper
        node.parent = upper
        node.start += count
        node.run = node.run[count:]
        upper.children[node.run[0]] = node
        for worker_id, holding in list(node.holdings.items()):
            if holding.count <= count:
                del node.holdings[worker_id]
                holding.node = upper
                upper.holdings[worker_id] = holding
            else:
                holding.count -= count
                first = upper.holdings[worker_id] = _Holding(upper, count)
                first.put_before(holding.newer)
        if not node.holdings:
            _prune(node)
        return upper

    def _evict(self, worker_id: int, cache: _Cache) -> None:
        while cache.used > cache.capacity:
            oldest = cache.ring.newer
            start = oldest.node.start
            surplus = cache.used - cache.capacity
            left = oldest.count - 1
            while left and self._size(start + left, start + oldest.count) < surplus:
                left -= 1
            self._drop(worker_id, cache, oldest, left)

    def _drop(self, worker_id: int, cache: _Cache, holding: _Holding, left: int) -> None:
        """Take all but the first `left` blocks of a holding from a worker."""
        if left >= holding.count:
            return
        node = holding.node
        cache.used -= self._size(node.start + left, node.start + holding.count)
        cache.block_count -= holding.count - left
        holding.count = left
        if not left:
            holding.take_out()
            del node.holdings[worker_id]
        if node.children:
            return
        most = max((holding.count for holding in node.holdings.values()), default=0)
        if not most:
            _prune(node)
        elif most < len(node.run):
            del node.run[most:]

    # -- sizes ------------------------------------------------------------------------------------------------

    def _size(self, start: int, end: int) -> int:
        """Return the size of the blocks from `start` to before `end`."""
        ends = self._ends
        if ends is None:
            return end - start
        return (ends[end - 1] if end else 0) - (ends[start - 1] if start else 0)

    def _blocks_within(self, size: int) -> int:
        """Return how many of a prompt's first blocks are no larger together."""
        return size if self._ends is None else bisect_right(self._ends, size)


class RecentPrompts:
    """The prompts that were sent to workers since the call of `age` before the last one."""

    def __init__(self, capacity: int, ends: Sequence[int] | None = None) -> None:
        self._capacity = capacity
        self._ends = ends
        self._newer = PrefixIndex(capacity, ends)
        self._older = PrefixIndex(capacity, ends)

    def age(self) -> None:
        """Forget what was recorded before the last call."""
        self._older = self._newer
        self._newer = PrefixIndex(self._capacity, self._ends)

    def record(self, worker_id: int, hashes: Sequence[int]) -> None:
        """A prompt with these blocks goes to this worker."""
        self._newer.add_worker(worker_id)
        self._newer.record(worker_id, hashes)

    def forget(self, worker_id: int, hashes: Sequence[int], held: int) -> None:
        """The worker turned out not to have more of this prompt than its first blocks, of size `held` in all."""
        for index in (self._newer, self._older):
            index.forget(worker_id, hashes, held)

    def clear(self, worker_id: int) -> None:
        """The worker has nothing of what it was sent."""
        for index in (self._newer, self._older):
            index.clear(worker_id)

    def matched(self, hashes: Sequence[int]) -> dict[int, int]:
        """Return the size of a prompt's start that each worker was sent; none: it is left out."""
        sizes = self._older.matched(hashes)
        for worker_id, size in self._newer.matched(hashes).items():
            if size > sizes.get(worker_id, 0):
                sizes[worker_id] = size
        return sizes


def _ends_a_prompt(worker_id: int, holding: _Holding) -> bool:
    """Return whether the worker has all that comes before, and nothing that builds on it."""
    node = holding.node
    if holding.count == len(node.run) and any(worker_id in child.holdings for child in node.children.values()):
        return False
    before = node.parent
    while before is not None and before.parent is not None:
        held = before.holdings.get(worker_id)
        if held is None or held.count < len(before.run):
            return False
        before = before.parent
    return True


def _blocks_to(holding: _Holding) -> list[int]:
    """Hashes from the start of its prompts to the end of what is held."""
    runs = [holding.node.run[: holding.count]]
    node = holding.node.parent
    while node is not None:
        runs.append(node.run)
        node = node.parent
    return [block for run in reversed(runs) for block in run]


def _common(run: Sequence[int], hashes: Sequence[int], start: int) -> int:
    """Return how many blocks `run` shares with `hashes[start:]`: hashes are chained, so none after a difference."""
    high = min(len(run), len(hashes) - start)
    if run[high - 1] == hashes[start + high - 1]:
        return high
    low = 0  # this many are equal, and `high` are not
    high -= 1
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == hashes[start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _prune(node: _Node) -> None:
    """Take a node that no worker has and nothing builds on out of the tree, and those above that it was the last of."""
    while not node.holdings and not node.children:
        parent = node.parent
        if parent is None:
            return
        del parent.children[node.run[0]]
        node = parent
