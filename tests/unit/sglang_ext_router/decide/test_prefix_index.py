"""The index against a naive model: every worker's blocks as a plain list in order of use."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_ext_router.decide.prefix_index import BLOCK_BYTES, BLOCK_ENDS, PrefixIndex, block_hashes
from support.examples import examples

CAPACITY_BLOCKS = 7


class TestBlockHashes:
    def test_only_full_blocks_count(self) -> None:
        assert block_hashes(b"x" * 255) == []
        assert len(block_hashes(b"x" * 256)) == 1
        assert len(block_hashes(b"x" * 511)) == 1
        assert len(block_hashes(b"x" * 512)) == 2
        assert block_hashes(b"") == []

    @given(st.binary(max_size=64), st.binary(max_size=64), st.sets(st.integers(1, 60), min_size=1))
    def test_equal_hashes_mean_equal_prefixes(self, one: bytes, other: bytes, given_ends: set[int]) -> None:
        ends = sorted(given_ends)
        pairs = zip(block_hashes(one, ends), block_hashes(other, ends), ends, strict=False)
        for left, right, end in pairs:
            assert (left == right) == (one[:end] == other[:end])

    def test_a_block_is_known_by_what_comes_before_it(self) -> None:
        same_block_later = block_hashes(b"ab" * 4, [2, 4, 6, 8])
        assert len(set(same_block_later)) == 4

    @given(st.binary(max_size=200), st.binary(max_size=50))
    def test_a_longer_prompt_starts_with_the_hashes_of_a_shorter_one(self, prompt: bytes, more: bytes) -> None:
        ends = range(16, 400, 16)
        hashes = block_hashes(prompt, ends)
        assert block_hashes(prompt + more, ends)[: len(hashes)] == hashes

    def test_long_prompts_have_few_blocks(self) -> None:
        assert len(block_hashes(bytes(400_000))) < 320
        assert len(block_hashes(bytes(BLOCK_ENDS[-1] + 5))) == len(BLOCK_ENDS)

    def test_no_block_is_long_against_what_it_ends(self) -> None:
        starts = (0, *BLOCK_ENDS)
        for start, end in zip(starts, BLOCK_ENDS, strict=False):
            assert end - start <= max(BLOCK_BYTES, end / 32)


def test_depths_of_all_workers_in_one_walk() -> None:
    index = PrefixIndex(100)
    for worker in (10, 20, 30, 40):
        index.add_worker(worker)
    prompt = [1, 2, 3, 4]
    index.record(10, [1, 2, 3, 4, 5])
    index.record(20, [1, 2, 9])
    index.record(30, [8])
    assert index.matched(prompt) == {10: 4, 20: 2}
    assert index.matched([7]) == {}
    assert index.matched([]) == {}


def test_what_others_build_on_is_dropped_last() -> None:
    index = PrefixIndex(4)
    index.add_worker(0)
    index.record(0, [1, 2, 3, 4])
    index.record(0, [1, 2, 5])
    assert index.matched([1, 2, 3, 4]) == {0: 3}
    assert index.matched([1, 2, 5]) == {0: 3}


def test_what_was_used_least_recently_is_dropped_first() -> None:
    index = PrefixIndex(4)
    index.add_worker(0)
    index.record(0, [1, 2])
    index.record(0, [3, 4])
    index.record(0, [1, 2])
    index.record(0, [5])
    assert index.matched([1, 2]) == {0: 2}
    assert index.matched([3, 4]) == {0: 1}
    assert index.block_count == 4


def test_forgetting_corrects_one_worker_downwards() -> None:
    index = PrefixIndex(10)
    for worker in (0, 1):
        index.add_worker(worker)
        index.record(worker, [1, 2, 3])
    index.forget(0, [1, 2, 3, 4], held=1)
    assert index.matched([1, 2, 3]) == {0: 1, 1: 3}
    index.forget(1, [1, 2, 3], held=0)
    assert index.matched([1, 2, 3]) == {0: 1}
    assert index.block_count == 1


def test_a_workers_own_capacity_bounds_it_at_once() -> None:
    index = PrefixIndex(5)
    index.add_worker(0)
    index.record(0, [1, 2, 3, 4, 5])
    index.set_capacity(0, 2)
    assert index.matched([1, 2, 3]) == {0: 2}
    index.set_capacity(0, 100)
    index.record(0, list(range(1, 9)))
    assert index.worker_block_count(0) == 5
    index.set_capacity(7, 1)  # no worker's
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        index.set_capacity(0, 0)


def test_a_prompt_longer_than_the_capacity_keeps_its_start() -> None:
    index = PrefixIndex(3)
    index.add_worker(0)
    index.record(0, [1, 2, 3, 4, 5])
    assert index.matched([1, 2, 3, 4, 5]) == {0: 3}


def test_a_removed_worker_leaves_nothing_to_its_successor() -> None:
    index = PrefixIndex(10)
    index.add_worker(0)
    index.add_worker(1)
    index.record(0, [1, 2])
    index.record(1, [1])
    index.remove_worker(0)
    index.add_worker(2)
    assert index.matched([1, 2]) == {1: 1}
    index.remove_worker(1)
    assert index.block_count == 0


def test_unknown_workers_are_ignored() -> None:
    index = PrefixIndex(10)
    index.record(5, [1])
    index.forget(5, [1], 0)
    index.clear(5)
    index.remove_worker(5)
    assert index.block_count == 0


def test_capacity_must_be_positive() -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        PrefixIndex(0)


@pytest.mark.slow
@pytest.mark.skipif(sys.implementation.name != "cpython", reason="measures CPython objects")
def test_memory_per_block() -> None:
    tracemalloc.start()
    try:
        index = PrefixIndex(20_000)
        index.add_worker(0)
        gc.collect()
        before_bytes = tracemalloc.get_traced_memory()[0]
        for start in range(0, 80_000, 100):  # four times the capacity
            index.record(0, list(range((1 << 62) + start, (1 << 62) + start + 100)))
        gc.collect()
        used_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
    finally:
        tracemalloc.stop()
    assert index.worker_block_count(0) == index.block_count == 20_000
    assert used_bytes / 20_000 < 100


# Prompts over a tiny alphabet, so that they share prefixes; a block is known by the path to it.
PROMPTS = st.lists(st.sampled_from("ab"), max_size=CAPACITY_BLOCKS + 2).map(
    lambda letters: [hash_of("".join(letters[: end + 1])) for end in range(len(letters))]
)
WORKERS = st.integers(0, 2)


def hash_of(path: str) -> int:
    return int("1" + path.replace("a", "0").replace("b", "1"), 2)


class AgainstNaiveModel(RuleBasedStateMachine):
    """Any sequence of operations; the model recomputes everything from lists."""

    ends: Sequence[int] | None = None
    capacity_size = CAPACITY_BLOCKS

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(self.capacity_size, self.ends)
        self.model: dict[int, list[int]] = {}  # worker → blocks, oldest use first
        self.capacity: dict[int, int] = {}
        for worker in (0, 1):
            self.add(worker)

    def size_of(self, block: int) -> int:
        position = block.bit_length() - 2  # in its prompt
        return self.prefix_size(position + 1) - self.prefix_size(position)

    def prefix_size(self, blocks: int) -> int:
        if self.ends is None:
            return blocks
        return self.ends[blocks - 1] if blocks else 0

    def cut(self, worker: int) -> None:
        blocks = self.model[worker]
        while sum(map(self.size_of, blocks)) > self.capacity[worker]:
            blocks.pop(0)

    @rule(worker=WORKERS)
    def add(self, worker: int) -> None:
        self.index.add_worker(worker)
        self.model.setdefault(worker, [])
        self.capacity.setdefault(worker, self.capacity_size)

    @rule(worker=WORKERS)
    def remove(self, worker: int) -> None:
        self.index.remove_worker(worker)
        self.model.pop(worker, None)
        self.capacity.pop(worker, None)

    @rule(worker=WORKERS, share=st.floats(0.4, 1.2))
    def set_capacity(self, worker: int, share: float) -> None:
        capacity = int(self.capacity_size * share)
        self.index.set_capacity(worker, capacity)
        if worker in self.model:
            self.capacity[worker] = min(capacity, self.capacity_size)
            self.cut(worker)

    @rule(worker=WORKERS)
    def clear(self, worker: int) -> None:
        self.index.clear(worker)
        if worker in self.model:
            self.model[worker] = []

    @rule(worker=WORKERS, prompt=PROMPTS)
    def record(self, worker: int, prompt: list[int]) -> None:
        self.index.record(worker, prompt)
        if worker in self.model:
            kept = [block for end, block in enumerate(prompt, 1) if self.prefix_size(end) <= self.capacity[worker]]
            untouched = [block for block in self.model[worker] if block not in kept]
            self.model[worker] = untouched + kept[::-1]
            self.cut(worker)

    @rule(worker=WORKERS, prompt=PROMPTS, share=st.floats(0, 1))
    def forget(self, worker: int, prompt: list[int], share: float) -> None:
        held = int(self.capacity_size * share)
        self.index.forget(worker, prompt, held)
        if worker in self.model:
            gone = [block for end, block in enumerate(prompt, 1) if self.prefix_size(end) > held]
            self.model[worker] = [block for block in self.model[worker] if block not in gone]

    @rule(prompt=PROMPTS)
    def match(self, prompt: list[int]) -> None:
        expected = {}
        for worker, blocks in self.model.items():
            depth = 0
            while depth < len(prompt) and prompt[depth] in blocks:
                depth += 1
            if depth:
                expected[worker] = self.prefix_size(depth)
        assert self.index.matched(prompt) == expected

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        for worker, blocks in self.model.items():
            assert self.index.worker_block_count(worker) == len(blocks)
            assert sum(map(self.size_of, blocks)) <= self.capacity[worker]
        assert self.index.used == sum(self.size_of(block) for blocks in self.model.values() for block in blocks)
        assert self.index.block_count == len({block for blocks in self.model.values() for block in blocks})

    @rule(worker=WORKERS, prompts=st.lists(PROMPTS, max_size=6))
    def copy(self, worker: int, prompts: list[list[int]]) -> None:
        other = PrefixIndex(self.capacity_size, self.ends)
        other.add_worker(worker)
        for path in self.index.newest_paths(worker, 10_000):
            other.record(worker, path)
        for prompt in prompts:
            assert other.matched(prompt).get(worker, 0) == self.index.matched(prompt).get(worker, 0)

    @rule(worker=WORKERS, most=st.integers(0, 20))
    def copy_some(self, worker: int, most: int) -> None:
        paths = self.index.newest_paths(worker, most)
        assert sum(map(len, paths)) <= most
        everything = self.index.newest_paths(worker, 10_000)
        assert paths == everything[len(everything) - len(paths) :]


class GrowingBlocksAgainstNaiveModel(AgainstNaiveModel):
    ends = (2, 4, 6, 10, 14, 18, 26, 34, 42)
    capacity_size = 30


AgainstNaiveModel.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
TestAgainstNaiveModel = pytest.mark.slow(AgainstNaiveModel.TestCase)
GrowingBlocksAgainstNaiveModel.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=40, deadline=None
)
TestGrowingBlocksAgainstNaiveModel = pytest.mark.slow(GrowingBlocksAgainstNaiveModel.TestCase)
