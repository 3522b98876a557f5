"""The prompts whose KV rows remain on the members that computed them, as a prefix cache of the whole pool.

Prompts make a tree: each keeps the rows behind the rows that it shares with an earlier prompt. What is used least
recently is dropped first, a prompt that others build on never before them. A prompt that a request reads is locked,
and so are all that it builds on.

Rows of a prefix that have been pulled to one instance are a prompt of their own there, which is found in place of those
that it is a copy of. These are dropped at once where nothing else needs them.

A prompt is known by the hashes of its full blocks; each covers the prompt from its start to the block's end.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from sglang_ext.long_pool.decide.sharding import KvSegment, Positions, count_tokens


class PromptBlocks(NamedTuple):
    """The full blocks of a prompt, by their hashes from its start."""

    block_tokens: int
    hashes: tuple[int, ...]


class PromptText(NamedTuple):
    """A prompt as a router knows it, which has no token ids: hashes of its beginnings, and their tokens by estimate."""

    hashes: tuple[int, ...]  # from the shortest on
    end_tokens: tuple[int, ...]


def hash_blocks(token_ids: array[int], block_tokens: int, namespace: str) -> PromptBlocks:
    """Return the full blocks of a prompt, each by 128 bits of BLAKE2b over all before it and its int32 token ids.

    Prompts share a prefix only within a `namespace`.
    """
    chain = blake2b(namespace.encode(), digest_size=16)
    block_bytes = block_tokens * token_ids.itemsize
    data = memoryview(token_ids).cast("B")
    hashes = []
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        chain.update(data[start : start + block_bytes])
        hashes.append(int.from_bytes(chain.digest(), "little"))
    return PromptBlocks(block_tokens, tuple(hashes))


class KeptPrefix(NamedTuple):
    """Rows that are there of a prompt's start: a kept prompt, and how many tokens of it are shared."""

    prompt: int
    tokens: int


@dataclass(slots=True)
class _KeptPrompt:
    key: int
    parent: _KeptPrompt | None
    start_tokens: int  # its own rows are behind these
    hashes: tuple[int, ...]  # of its own blocks
    block_tokens: int
    text: tuple[int, ...]  # hashes of its text's beginnings, as far as they are known
    held: dict[int, Positions]  # its own rows, ascending, by instance
    children: int = 0
    readers: int = 0
    used: int = 0  # number of its last use

    @property
    def end_tokens(self) -> int:
        return self.start_tokens + len(self.hashes) * self.block_tokens

    @property
    def is_free(self) -> bool:
        return not self.children and not self.readers


class _Index:
    """Prompts by hash; of several with one hash the first is found."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[_KeptPrompt, ...]] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._prompts

    def first(self, key: int) -> _KeptPrompt | None:
        """Return the prompt that is found; None where there is none."""
        prompts = self._prompts.get(key)
        return None if prompts is None else prompts[0]

    def add(self, key: int, prompt: _KeptPrompt, *, is_first: bool) -> None:
        """Add a prompt before all others of this hash, or behind them."""
        there = self._prompts.get(key, ())
        self._prompts[key] = (prompt, *there) if is_first else (*there, prompt)

    def remove(self, key: int, prompt: _KeptPrompt) -> None:
        """Take a prompt out."""
        left = tuple(other for other in self._prompts[key] if other is not prompt)
        if left:
            self._prompts[key] = left
        else:
            del self._prompts[key]


class KeptPrompts:
    """All of a pool. Instances are numbers; nothing here moves or frees a row."""

    def __init__(self) -> None:
        self._prompts: dict[int, _KeptPrompt] = {}
        self._by_block = _Index()  # by hash: the prompts that keep the block's rows, the latest copy first
        self._by_text = _Index()  # by hash of a text's beginning: prompts that have it, the latest copy first
        self.version = 0  # another number whenever another prompt is kept, or not any more
        self._tokens: dict[int, int] = {}  # by instance
        self._locked: dict[int, int] = {}  # of these, the rows that a request reads
        self._uses = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def tokens_on(self, instance: int) -> int:
        """Rows that are kept there."""
        return self._tokens.get(instance, 0)

    def locked_on(self, instance: int) -> int:
        """Return the number of rows that are kept there and that requests read: their memory cannot be had now."""
        return self._locked.get(instance, 0)

    def match(self, blocks: PromptBlocks, max_tokens: int) -> KeptPrefix | None:
        """Return the longest kept prefix, in full blocks and of at most `max_tokens`; None where there is none.

        Takes time in proportion to the logarithm of the number of blocks: with a block all before it are known.
        """
        low, high = 0, min(len(blocks.hashes), max_tokens // blocks.block_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if blocks.hashes[middle - 1] in self._by_block:
                low = middle
            else:
                high = middle - 1
        if not low:
            return None
        prompt = self._by_block.first(blocks.hashes[low - 1])
        assert prompt is not None
        return KeptPrefix(prompt.key, low * blocks.block_tokens)

    def match_text(self, text: PromptText, max_tokens: int) -> KeptPrefix | None:
        """Return about what `match` would, for a prompt whose token ids are not known."""
        for text_hash, end_tokens in zip(reversed(text.hashes), reversed(text.end_tokens), strict=True):
            prompt = self._by_text.first(text_hash)
            if prompt is not None:
                tokens = min(end_tokens, max_tokens, prompt.end_tokens) // prompt.block_tokens * prompt.block_tokens
                return KeptPrefix(prompt.key, tokens) if tokens else None
        return None

    def whole(self, key: int) -> KeptPrefix | None:
        """Return all of a kept prompt; None where it is not kept any more."""
        prompt = self._prompts.get(key)
        return None if prompt is None else KeptPrefix(key, prompt.end_tokens)

    def parts(self, prefix: KeptPrefix) -> tuple[KeptPrefix, ...]:
        """Return whose rows make up a prefix, and up to where, from its start to its end."""
        parts = []
        prompt: _KeptPrompt | None = self._prompts[prefix.prompt]
        end_tokens = prefix.tokens
        while prompt is not None:
            parts.append(KeptPrefix(prompt.key, end_tokens))
            end_tokens = min(end_tokens, prompt.start_tokens)  # an earlier prompt may go on with other tokens
            prompt = prompt.parent
        return tuple(reversed(parts))

    def rows(self, prefix: KeptPrefix) -> dict[int, tuple[KvSegment, ...]]:
        """Return what each instance holds of a prefix: of each of its parts one segment."""
        rows: dict[int, tuple[KvSegment, ...]] = {}
        for key, end_tokens in self.parts(prefix):
            for instance, positions in self._prompts[key].held.items():
                part = within(positions, 0, end_tokens)
                if part:
                    rows[instance] = (*rows.get(instance, ()), KvSegment(part, is_borrowed=True))
        return rows

    def lock(self, parts: Sequence[KeptPrefix]) -> None:
        """A request reads these, the parts of one prefix, until `unlock`."""
        for part in parts:
            prompt = self._prompts[part.prompt]
            prompt.readers += 1
            if prompt.readers == 1:
                self._count(self._locked, prompt, 1)
        self._use(self._prompts[parts[-1].prompt])

    def unlock(self, parts: Sequence[KeptPrefix]) -> None:
        """A request reads them no more. Parts that were lost meanwhile are left out."""
        for part in parts:
            prompt = self._prompts.get(part.prompt)
            if prompt is not None:
                prompt.readers -= 1
                if not prompt.readers:
                    self._count(self._locked, prompt, -1)

    def keep(
        self, key: int, blocks: PromptBlocks, held: Mapping[int, Positions], text: PromptText | None = None
    ) -> dict[int, Positions]:
        """Keep what a request has computed, under a key of its own; `held` are its rows by instance, ascending.

        With its `text`, prompts that begin alike are found before their token ids are known.
        Returns the rows that are kept of it: those of full blocks that no other prompt keeps. None are where some are
        missing, as of a prefix that came from an instance's own cache.
        """
        length = len(blocks.hashes) * blocks.block_tokens
        there = self.match(blocks, length)
        start = 0 if there is None else there.tokens
        kept = {instance: part for instance, rows in held.items() if (part := within(rows, start, length))}
        if not kept or sum(map(count_tokens, kept.values())) < length - start:
            return {}
        parent = None if there is None else self._prompts[there.prompt]
        own = blocks.hashes[start // blocks.block_tokens :]
        text_hashes = () if text is None else text.hashes
        prompt = _KeptPrompt(key, parent, start, own, blocks.block_tokens, text_hashes, kept)
        if parent is not None:
            parent.children += 1
        self._add(prompt, is_copy=False)
        return kept

    def add_copy(self, key: int, parts: Sequence[KeptPrefix], instance: int) -> list[tuple[int, tuple[int, ...]]]:
        """All rows of a prefix, given by its `parts`, are on one instance now, too, as a prompt of its own.

        Returns the prompts that are dropped: those of which nothing else is kept and which nothing needs. As
        `drop_for`.
        """
        originals = [self._prompts[part.prompt] for part in parts]
        last, end_tokens = originals[-1], parts[-1].tokens
        hashes: list[int] = []
        for original, part in zip(originals, parts, strict=True):
            hashes += original.hashes[: (part.tokens - original.start_tokens) // original.block_tokens]
        held: dict[int, Positions] = {instance: (range(end_tokens),)}
        self._add(_KeptPrompt(key, None, 0, tuple(hashes), last.block_tokens, last.text, held), is_copy=True)
        dropped = []
        for original, part in zip(reversed(originals), reversed(parts), strict=True):
            if not original.is_free or original.end_tokens > part.tokens:
                break
            dropped.append((original.key, tuple(original.held)))
            self._drop(original)
        return dropped

    def _add(self, prompt: _KeptPrompt, *, is_copy: bool) -> None:
        self._prompts[prompt.key] = prompt
        for block in prompt.hashes:
            self._by_block.add(block, prompt, is_first=is_copy)
        for text_hash in prompt.text:
            self._by_text.add(text_hash, prompt, is_first=is_copy)
        self.version += 1
        self._count(self._tokens, prompt, 1)
        self._use(prompt)

    def drop_for(self, instance: int, tokens: int) -> list[tuple[int, tuple[int, ...]]]:
        """Drop what was used least recently until `tokens` more rows are free on an instance, or none can be.

        Returns the dropped prompts, each with the instances that hold rows of it.
        """
        dropped = []
        while tokens > 0:
            free = [prompt for prompt in self._prompts.values() if prompt.is_free and instance in prompt.held]
            # Rows that others build on come free with them.
            leaves = free or [
                prompt
                for prompt in self._prompts.values()
                if prompt.is_free and any(instance in ancestor.held for ancestor in _ancestors(prompt))
            ]
            if not leaves:
                break
            oldest = min(leaves, key=lambda prompt: prompt.used)
            tokens -= count_tokens(oldest.held.get(instance, ()))
            dropped.append((oldest.key, tuple(oldest.held)))
            self._drop(oldest)
        return dropped

    def lose(self, instances: Collection[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Instances have gone, or have dropped all: forget every prompt that needs their rows. As `drop_for`."""
        needing = [
            prompt
            for prompt in self._prompts.values()
            if any(instance in one.held for one in (prompt, *_ancestors(prompt)) for instance in instances)
        ]
        return self._lose(needing, instances)

    def lose_rows(self, instance: int, prompts: Collection[int]) -> list[tuple[int, tuple[int, ...]]]:
        """An instance has freed its rows of these: forget them and all that builds on them. As `drop_for`."""
        lost = [
            prompt
            for prompt in self._prompts.values()
            if any(one.key in prompts and instance in one.held for one in (prompt, *_ancestors(prompt)))
        ]
        gone = {prompt.key for prompt in lost if prompt.key in prompts}
        return [
            (key, tuple(one for one in members if one != instance or key not in gone))
            for key, members in self._lose(lost, ())
        ]

    def _lose(self, prompts: Iterable[_KeptPrompt], instances: Collection[int]) -> list[tuple[int, tuple[int, ...]]]:
        lost: list[tuple[int, tuple[int, ...]]] = []
        for prompt in sorted(prompts, key=lambda prompt: -prompt.start_tokens):
            lost.append((prompt.key, tuple(one for one in prompt.held if one not in instances)))
            self._drop(prompt)
        return lost

    def _use(self, prompt: _KeptPrompt | None) -> None:
        self._uses += 1
        while prompt is not None:
            prompt.used = self._uses
            prompt = prompt.parent

    def _drop(self, prompt: _KeptPrompt) -> None:
        del self._prompts[prompt.key]
        if prompt.parent is not None:
            prompt.parent.children -= 1
        for block in prompt.hashes:
            self._by_block.remove(block, prompt)
        for text_hash in prompt.text:
            self._by_text.remove(text_hash, prompt)
        self.version += 1
        self._count(self._tokens, prompt, -1)
        if prompt.readers:
            self._count(self._locked, prompt, -1)

    def _count(self, tokens: dict[int, int], prompt: _KeptPrompt, sign: int) -> None:
        for instance, rows in prompt.held.items():
            tokens[instance] = tokens.get(instance, 0) + sign * count_tokens(rows)


def _ancestors(prompt: _KeptPrompt) -> list[_KeptPrompt]:
    found = []
    while prompt.parent is not None:
        prompt = prompt.parent
        found.append(prompt)
    return found


def within(positions: Positions, start: int, end: int) -> Positions:
    """Return the positions from `start` to before `end`, of ascending runs."""
    kept = []
    for part in positions:
        first = max(0, -(-(start - part.start) // part.step))
        last = max(0, -(-(end - part.start) // part.step))
        run = part[first:last]
        if run:
            kept.append(run)
    return tuple(kept)
