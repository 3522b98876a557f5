"""The index of blocks against a naive model, sets of keys; its hashes against SGLang's; and its memory."""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_ext_router.decide.block_index import HOST_WORTH, BlockChain, BlockIndex, Tier, TokenBlocks, salt_seed
from support.examples import examples

MAX_BLOCKS = 40
# As SGLang 0.5.23 makes them of the ids 1 to 4 in pages of two, the second one first, and of 2 ** 33 and 1.
KNOWN_KEYS = [-4216701448867210342, 3817746824117602890]
KNOWN_WIDE_KEY = -6014593035314202906


class Keys:
    """The blocks of a prompt, by keys that are there already."""

    def __init__(self, keys: Sequence[int]) -> None:
        self._keys = keys
        self.count = len(keys)
        self.asked = 0

    def key(self, number: int) -> int:
        self.asked += 1
        return self._keys[number]


def chain(*branches: int) -> list[int]:
    """Return keys of a prompt whose blocks depend on all before them, spread over the shards, 52 bits of each."""
    return [random.Random(repr(branches[: end + 1])).randrange(-(2**51), 2**51) << 12 for end in range(len(branches))]


def ids(*tokens: int) -> bytes:
    return array("q", tokens).tobytes()


BRANCHES = st.lists(st.integers(0, 1), min_size=1, max_size=7)
TIERS = st.sampled_from(Tier)


class TreesOfEngines(RuleBasedStateMachine):
    """Engines that keep what their blocks build on, on the device; other tiers hold anything."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(MAX_BLOCKS)
        self.held: dict[int, tuple[set[int], set[int], set[int]]] = {}
        self.refused = 0

    @rule()
    def add(self) -> None:
        if len(self.held) < 4:
            source = self.index.add_source()
            assert source not in self.held
            self.held[source] = (set(), set(), set())

    @precondition(lambda self: self.held)
    @rule(data=st.data(), branches=BRANCHES, tier=TIERS)
    def store(self, data: st.DataObject, branches: list[int], tier: Tier) -> None:
        source = data.draw(st.sampled_from(sorted(self.held)))
        keys = chain(*branches)
        self.index.store(source, keys, tier)
        for key in keys:
            if key in self.held[source][tier]:
                continue
            if sum(map(len, self.held[source])) < MAX_BLOCKS:
                self.held[source][tier].add(key)
            else:
                self.refused += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), branches=BRANCHES, tier=TIERS)
    def remove(self, data: st.DataObject, branches: list[int], tier: Tier) -> None:
        source = data.draw(st.sampled_from(sorted(self.held)))
        keys = chain(*branches)
        self.index.remove(source, keys, tier)
        self.held[source][tier].difference_update(keys)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(sorted(self.held)))
        self.index.clear(source)
        for keys in self.held[source]:
            keys.clear()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(sorted(self.held)))
        self.index.remove_source(source)
        del self.held[source]

    @rule(shards=st.sampled_from([1, 2000, 4096]))
    def sweep(self, shards: int) -> None:
        is_left = self.index.sweep(shards)
        assert is_left == (self.index.dead_blocks > 0)
        assert not (is_left and shards == 4096)

    @rule(branches=BRANCHES)
    def match(self, branches: list[int]) -> None:
        """Where engines hold all that their blocks build on, which the draws do not always make."""
        keys = chain(*branches)
        expected = {}
        for source, (device, host, _) in self.held.items():
            depths = [key in device or key in host for key in keys]
            if sorted(depths, reverse=True) != depths:
                return
            if any(depths):
                expected[source] = sum(depths)
        assert self.index.matched(Keys(keys)) == expected
        priced = {}
        for source, count in expected.items():
            on_device = len(list(takewhile(self.held[source][Tier.DEVICE].__contains__, keys)))
            priced[source] = pytest.approx(on_device + HOST_WORTH * (count - on_device))
        assert self.index.worth(Keys(keys)) == priced

    @invariant()
    def knows_what_is_held(self) -> None:
        assert self.index.refused_blocks == self.refused
        blocks: set[int] = set()
        for source, tiers in self.held.items():
            for tier in Tier:
                assert self.index.keys_of(source, tier) == tiers[tier]
                assert self.index.held_blocks(source, tier) == len(tiers[tier])
                blocks |= tiers[tier]
        assert self.index.block_count == len(blocks)
        holders = {
            tuple((source, tier) for source, tiers in self.held.items() for tier in Tier if key in tiers[tier])
            for key in blocks
        }
        # Groups whose last block has no holder stay until they are swept, and two may have become equal.
        assert len(holders) <= self.index.group_count <= len(blocks) + self.index.dead_blocks


TestTreesOfEngines = pytest.mark.slow(TreesOfEngines.TestCase)
TestTreesOfEngines.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 400)), min_size=1, max_size=8))
def test_matches_of_long_prompts_that_part_anywhere(lengths: list[tuple[int, int]]) -> None:
    """Each source holds so many blocks of one prompt of 400."""
    keys = chain(*range(400))
    index = BlockIndex(1000)
    expected = {}
    for _, length in lengths:
        source = index.add_source()
        index.store(source, keys[:length])
        if length:
            expected[source] = length
    assert index.matched(Keys(keys)) == expected


@pytest.mark.slow
def test_a_match_looks_at_few_blocks() -> None:
    index = BlockIndex(100_000)
    keys = chain(*range(2000))
    for length in (2000, 700, 700, 3):
        index.store(index.add_source(), keys[:length])
    cold, warm = Keys(chain(9, *range(2000))), Keys(keys)
    assert index.matched(cold) == {}
    assert cold.asked == 1
    assert sorted(index.matched(warm).values()) == [3, 700, 700, 2000]
    assert warm.asked < 40


def test_what_is_held_without_its_beginning_does_not_count() -> None:
    """An end of a prompt that a source reports without what it builds on, after a loss say."""
    index = BlockIndex(100)
    first, second = index.add_source(), index.add_source()
    keys = chain(*range(12))
    index.store(first, keys[:9])
    for start in range(1, 12):
        index.store(second, keys[start:])
        assert index.matched(Keys(keys)) == {first: 9}
        index.clear(second)


def test_a_source_that_is_cleared_is_forgotten_at_once_and_its_memory_bit_by_bit() -> None:
    index = BlockIndex(100_000)
    one, other = index.add_source(), index.add_source()
    keys = chain(*range(500))
    index.store(one, keys)
    index.store(other, keys[:100])
    index.clear(one)
    assert index.matched(Keys(keys)) == {other: 100}
    assert index.dead_blocks == 400
    assert index.block_count == 100
    while index.sweep(64):
        pass
    assert index.dead_blocks == 0
    assert index.block_count == 100
    index.store(one, keys[:1])
    assert index.tiers(one, keys[0]) == (Tier.DEVICE,)


def test_a_host_copy_counts_and_storage_does_not() -> None:
    index = BlockIndex(100)
    source = index.add_source()
    keys = chain(1, 2, 3, 4)
    index.store(source, keys, Tier.STORAGE)
    assert index.matched(Keys(keys)) == {}
    index.store(source, keys[:2])
    index.store(source, keys[2:3], Tier.HOST)
    assert index.matched(Keys(keys)) == {source: 3}
    assert index.worth(Keys(keys)) == {source: pytest.approx(2 + HOST_WORTH)}
    index.store(source, keys[2:3])
    assert index.worth(Keys(keys)) == {source: 3}
    index.remove(source, keys[2:3])
    index.remove(source, keys[:2])
    assert index.matched(Keys(keys)) == {}


def test_the_host_costs_a_look_only_while_it_holds_blocks() -> None:
    index = BlockIndex(1000)
    source, other = index.add_source(), index.add_source()
    keys = chain(*range(100))
    index.store(source, keys)

    def looks(count: Callable[[Keys], object]) -> int:
        asked = Keys(keys)
        count(asked)
        return asked.asked

    once = looks(index.matched)
    for forget in (lambda: index.remove(other, keys, Tier.HOST), lambda: index.clear(other)):
        index.store(other, keys, Tier.HOST)
        assert looks(index.worth) > once
        forget()
        assert looks(index.worth) == once


def test_no_more_than_its_bound_of_a_source() -> None:
    index = BlockIndex(10)
    source = index.add_source()
    index.store(source, chain(*range(50)))
    assert index.held_blocks(source) == 10
    assert index.refused_blocks == 40
    with pytest.raises(ValueError, match="max_blocks"):
        BlockIndex(0)


@pytest.mark.slow
def test_a_block_takes_few_bytes() -> None:
    """Each held by one of 50 instances, a tenth by a second one, with evictions."""
    draws = random.Random(1)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = BlockIndex(1_000_000)
    sources = [index.add_source() for _ in range(50)]
    for _ in range(1500):
        keys = [draws.getrandbits(64) - 2**63 for _ in range(100)]
        index.store(draws.choice(sources), keys)
        index.store(draws.choice(sources), keys[:10])
        index.remove(draws.choice(sources), keys[50:])
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used / index.block_count < 20


class TestHashes:
    @settings(deadline=None)
    @given(st.lists(st.integers(0, 200_000), max_size=70), st.sampled_from([1, 4, 16]))
    def test_a_longer_prompt_begins_with_the_keys_of_a_shorter_one(self, tokens: list[int], size: int) -> None:
        blocks = BlockChain(ids(*tokens), size)
        assert blocks.count == len(tokens) // size
        longer = BlockChain(ids(*tokens, 1, 2, 3), size)
        keys = [blocks.key(number) for number in range(blocks.count)]
        assert [longer.key(number) for number in range(blocks.count)] == keys
        assert len(set(keys)) == len(keys)
        with pytest.raises(IndexError):
            blocks.key(blocks.count)

    def test_known_keys(self) -> None:
        """As SGLang 0.5.23 makes them, of 32-bit ids and of wider ones."""
        assert [BlockChain(ids(1, 2, 3, 4), 2).key(number) for number in (1, 0)] == KNOWN_KEYS
        assert BlockChain(ids(2**33, 1), 2).key(0) == KNOWN_WIDE_KEY

    def test_sizes_and_salts_have_keys_of_their_own(self) -> None:
        prompt = TokenBlocks(ids(*range(64)))
        assert prompt.tokens == 64
        assert prompt.of(16) is prompt.of(16)
        assert prompt.of(16).key(0) != prompt.of(32).key(0)
        assert TokenBlocks(prompt.ids, salt_seed("a")).of(16).key(0) != prompt.of(16).key(0)
