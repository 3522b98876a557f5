"""Kept prompts against a list of all that was kept: the longest prefix is found, no row is missing or counted twice."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.long_pool.decide.kept_prompts import (
    KeptPrefix,
    KeptPrompts,
    PromptBlocks,
    PromptText,
    hash_blocks,
    within,
)
from sglang_ext.long_pool.decide.sharding import (
    Interleaving,
    KvSegment,
    Positions,
    positions_of,
    split_positions,
)

BLOCK_TOKENS = 8
Text = tuple[int, ...]


def blocks_of(text: Sequence[int]) -> PromptBlocks:
    """Block i's hash stands for all numbers up to it."""
    return PromptBlocks(BLOCK_TOKENS, tuple(hash(tuple(text[: end + 1])) for end in range(len(text))))


def rows_of(text: Sequence[int], group: Sequence[int], start_tokens: int = 0) -> dict[int, Positions]:
    parts = split_positions((range(start_tokens, len(text) * BLOCK_TOKENS),), len(group), Interleaving.ZIGZAG)
    return dict(zip(group, parts, strict=True))


def keep(kept: KeptPrompts, key: int, text: Text, group: Sequence[int] = (0,)) -> None:
    there = kept.match(blocks_of(text), len(text) * BLOCK_TOKENS)
    kept.keep(key, blocks_of(text), rows_of(text, group, 0 if there is None else there.tokens))


def test_the_next_turn_finds_the_one_before() -> None:
    kept = KeptPrompts()
    keep(kept, 1, (1, 2, 3), (0, 1))
    keep(kept, 2, (1, 2, 3, 4, 5), (1, 2))
    assert kept.match(blocks_of((1, 2, 3, 4, 9)), 1000) == KeptPrefix(2, 32)
    assert kept.match(blocks_of((1, 2, 9)), 1000) == KeptPrefix(1, 16)
    assert kept.match(blocks_of((1, 2, 3, 4)), 31) == KeptPrefix(1, 24)  # full blocks, and not more than asked for
    assert kept.match(blocks_of((9,)), 1000) is None
    assert {
        instance: sum(part.tokens for part in parts) for instance, parts in kept.rows(KeptPrefix(2, 32)).items()
    } == {0: 12, 1: 12 + 4, 2: 4}


def test_what_was_used_least_recently_is_dropped_and_nothing_that_others_need() -> None:
    kept = KeptPrompts()
    keep(kept, 1, (1, 2))
    keep(kept, 2, (1, 2, 3))
    keep(kept, 3, (7, 8))
    keep(kept, 4, (1, 2, 4))
    read = kept.parts(KeptPrefix(2, 24))
    kept.lock(read)
    assert kept.locked_on(0) == 24
    assert kept.drop_for(0, 1) == [(3, (0,))]
    assert kept.drop_for(0, 1) == [(4, (0,))]
    assert kept.drop_for(0, 1) == []  # one is read, and the other is what it builds on
    kept.unlock(read)
    assert kept.locked_on(0) == 0
    assert kept.drop_for(0, 9) == [(2, (0,)), (1, (0,))]
    assert (len(kept), kept.tokens_on(0)) == (0, 0)


def test_a_copy_takes_the_place_of_what_nothing_else_needs() -> None:
    kept = KeptPrompts()
    keep(kept, 1, (1, 2), (0, 1))
    keep(kept, 2, (1, 2, 3), (1, 2))
    keep(kept, 3, (1, 2, 4), (2,))
    assert kept.add_copy(9, kept.parts(KeptPrefix(2, 24)), 3) == [(2, (1, 2))]  # the third builds on the first
    assert kept.rows(KeptPrefix(9, 24)) == {3: (KvSegment((range(24),), is_borrowed=True),)}
    assert kept.match(blocks_of((1, 2, 4)), 1000) == KeptPrefix(3, 24)
    keep(kept, 4, (1, 2, 3, 5), (3,))
    assert kept.rows(KeptPrefix(4, 32)).keys() == {3}
    kept.lose((3,))
    assert kept.match(blocks_of((1, 2, 3)), 1000) == KeptPrefix(1, 16)  # the original is found again


def test_a_text_is_found_in_the_latest_copy() -> None:
    kept = KeptPrompts()
    text = PromptText((11, 12), (7, 15))
    kept.keep(1, blocks_of((1, 2)), rows_of((1, 2), (0, 1)), text)
    assert kept.add_copy(9, kept.parts(KeptPrefix(1, 8)), 1) == []  # it covers less than the original
    assert kept.match_text(text, 1000) == KeptPrefix(9, 8)
    kept.lose_rows(1, (9,))
    assert kept.match_text(text, 16) == KeptPrefix(1, 8)


def test_a_prompt_of_which_rows_are_missing_is_not_kept() -> None:
    kept = KeptPrompts()
    assert kept.keep(1, blocks_of((1, 2, 3)), {0: (range(8, 24),)}) == {}
    assert len(kept) == 0


def test_what_needs_a_lost_instance_is_forgotten() -> None:
    kept = KeptPrompts()
    keep(kept, 1, (1, 2), (0,))
    keep(kept, 2, (1, 2, 3, 4), (1, 2))
    keep(kept, 3, (1, 2, 3, 4, 5), (2,))
    assert kept.lose((1,)) == [(3, (2,)), (2, (2,))]
    assert kept.match(blocks_of((1, 2, 3)), 1000) == KeptPrefix(1, 16)


texts = st.lists(st.integers(1, 3), min_size=1, max_size=6).map(tuple)
groups = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True).map(tuple)
events = st.one_of(
    st.tuples(st.just("keep"), texts, groups),
    st.tuples(st.just("copy"), texts, st.integers(0, 3)),
    st.tuples(st.just("lock"), texts),
    st.tuples(st.just("unlock")),
    st.tuples(st.just("drop"), st.integers(0, 3), st.integers(1, 40)),
    st.tuples(st.just("lose"), st.integers(0, 3)),
    st.tuples(st.just("lose rows"), st.integers(0, 3), st.integers(0, 9)),
)


@settings(max_examples=200)
@given(st.lists(events, max_size=25), texts)
def test_any_order_of_events(order: list[tuple[object, ...]], asked: Text) -> None:
    kept, rows, locks = KeptPrompts(), {}, []  # rows: by key, the text up to its end and what it keeps
    for key, event in enumerate(order):
        match event:
            case ("keep", tuple() as text, tuple() as group):
                there = kept.match(blocks_of(text), 1000)
                start = 0 if there is None else there.tokens
                own = kept.keep(key, blocks_of(text), rows_of(text, group, start))
                if own:
                    rows[key] = text, own
            case ("copy", tuple() as text, int() as instance):
                found = kept.match(blocks_of(text), 1000)
                if found is not None:
                    locked = {part.prompt for lock in locks for part in lock}
                    rows[key] = text[: found.tokens // BLOCK_TOKENS], {instance: (range(found.tokens),)}
                    for dropped, members in kept.add_copy(key, kept.parts(found), instance):
                        assert dropped not in locked
                        assert set(members) == set(rows.pop(dropped)[1])
                    assert kept.match(blocks_of(text), 1000) == KeptPrefix(key, found.tokens)
            case ("lock", tuple() as text):
                found = kept.match(blocks_of(text), 1000)
                if found is not None:
                    locks.append(kept.parts(found))
                    kept.lock(locks[-1])
            case ("unlock",) if locks:
                kept.unlock(locks.pop())
            case ("drop", int() as instance, int() as tokens):
                before = kept.tokens_on(instance)
                for dropped, _ in kept.drop_for(instance, tokens):
                    assert dropped not in {part.prompt for lock in locks for part in lock}
                    rows.pop(dropped)
                left = kept.tokens_on(instance)
                assert before - left >= tokens or all(
                    any(text[: len(other)] == other for other, _ in rows.values()) for text, _ in rows.values()
                )
            case ("lose", int() as instance):
                for lost, _ in kept.lose((instance,)):
                    rows.pop(lost)
                assert kept.tokens_on(instance) == 0
            case ("lose rows", int() as instance, int() as number) if rows:
                prompt = sorted(rows)[number % len(rows)]
                text = rows[prompt][0]
                lost = dict(kept.lose_rows(instance, (prompt,)))
                assert set(lost) <= {key for key, (other, _) in rows.items() if other[:1] == text[:1]}
                assert (prompt in lost) == (instance in rows[prompt][1])
                assert instance not in lost.get(prompt, ())
                for one in lost:
                    rows.pop(one)
    known = {text[:end] for text, _ in rows.values() for end in range(1, len(text) + 1)}
    longest = max((end for end in range(1, len(asked) + 1) if asked[:end] in known), default=0)
    found = kept.match(blocks_of(asked), 1000)
    assert (0 if found is None else found.tokens) == longest * BLOCK_TOKENS
    if found is not None:
        there = [position for parts in kept.rows(found).values() for part in positions_of(parts) for position in part]
        assert sorted(there) == list(range(found.tokens))
    for instance in range(4):
        assert kept.tokens_on(instance) == sum(len(part) for _, own in rows.values() for part in own.get(instance, ()))
        read = {part.prompt for lock in locks for part in lock if part.prompt in rows}
        locked = sum(len(part) for prompt in read for part in rows[prompt][1].get(instance, ()))
        assert kept.locked_on(instance) == locked


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 10), st.integers(0, 60), st.integers(0, 60))
def test_positions_within(first: int, step: int, count: int, start: int, end: int) -> None:
    run = range(first, first + step * count, step)
    wanted = [position for position in run if start <= position < end]
    assert [position for part in within((run,), start, end) for position in part] == wanted


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40), st.integers(1, 9), st.integers(0, 40))
def test_blocks_are_equal_where_all_before_them_is(ids: list[int], block_tokens: int, changed: int) -> None:
    first = hash_blocks(array("i", ids), block_tokens, "a")
    assert len(first.hashes) == len(set(first.hashes)) == len(ids) // block_tokens
    assert not set(first.hashes) & set(hash_blocks(array("i", ids), block_tokens, "b").hashes)
    if changed < len(ids):
        other = hash_blocks(array("i", [*ids[:changed], ids[changed] ^ 1, *ids[changed + 1 :]]), block_tokens, "a")
        same = changed // block_tokens
        assert other.hashes[:same] == first.hashes[:same]
        assert not set(other.hashes[same:]) & set(first.hashes[same:])


def test_a_text_is_found_as_long_as_a_prompt_that_has_it_is_kept() -> None:
    kept = KeptPrompts()
    kept.keep(1, blocks_of((1, 2)), rows_of((1, 2), (0,)), PromptText((11, 12), (7, 15)))
    kept.keep(2, blocks_of((1, 2, 3)), rows_of((1, 2, 3), (0,), 16), PromptText((11, 12, 13), (7, 15, 30)))
    asked = PromptText((11, 12, 13, 14), (7, 15, 30, 40))
    assert kept.match_text(asked, 1000) == KeptPrefix(2, 24)  # no more than is kept
    assert kept.match_text(asked, 23) == KeptPrefix(2, 16)
    assert kept.match_text(PromptText((11, 99), (9, 40)), 1000) == KeptPrefix(1, 8)
    assert kept.match_text(PromptText((11, 99), (7, 40)), 1000) is None  # less than a block
    version = kept.version
    kept.lose_rows(0, (2,))
    assert kept.match_text(asked, 1000) == KeptPrefix(1, 8)
    assert kept.version != version
    kept.lose((0,))
    assert kept.match_text(asked, 1000) is None
