"""The KV blocks that each instance holds, by SGLang's own block hashes, as the instances report them.

A block's key is the first 8 bytes of its hash, as events carry it: a signed 64-bit number that stands for the prompt
from its start to the block's end (`BlockChain` makes it as `mem_cache/utils.py: get_hash_str`). Every (instance, rank)
is a source, which may hold a block on its device, on its host or in storage. Who holds a block is its group: a bit per
source and tier, in one integer that all blocks with the same holders share. A block is one entry of 8 bytes: of its key
the upper 52 bits, 12 of them as the number of its shard, and its group. To forget all that a source holds touches the
groups, not the blocks; the blocks without holders that this leaves are swept later, a few at a time. Among 10 million
blocks, one lookup in 400 million takes a block for another.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from enum import IntEnum, StrEnum
from hashlib import sha256
from typing import Protocol

# Of a block on the host, in blocks that need not be computed. A token of LLaMA3-8B is 128 KiB, which takes 2.6 us over
# 50 GB/s, and computing it takes about 30 us on one GPU.
HOST_WORTH = 0.9
_ID_BYTES = 8  # of a token id in a prompt's text of ids
_SHARDS = 4096
_SHARD_SHIFT = 52  # of a key: its upper 12 bits
_REST_SHIFT = 12  # of a key: the 40 bits below these, which are kept in an entry
_SIGN = 1 << 63
_GROUP_SHIFT = 24  # of an entry: below its part of a key is its group
_GROUP = (1 << _GROUP_SHIFT) - 1
_KEPT_SHIFT = _GROUP_SHIFT - _REST_SHIFT  # to the left: what is kept of a key lies above the group
_KEPT = (1 << 64) - 1 ^ _GROUP


class Tier(IntEnum):
    """Tier of memory in which an instance holds a block."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


class PromptKind(StrEnum):
    """Kinds of prompts whose token ids depend on how an instance reads a request."""

    TEXTS = "texts"  # of /generate and /v1/completions
    CHATS = "chats"
    TOOLS = "tools"  # and their calls and answers
    REASONING = "reasoning"  # of former turns, and variables of the chat template
    MESSAGES = "messages"  # of /v1/messages
    THOUGHT = "messages_thought"  # its `thinking` and `output_config`, and thought of former turns
    RESPONSES = "responses"  # of /v1/responses


_TIERS = len(Tier)
_ALL_TIERS = (1 << _TIERS) - 1


class Blocks(Protocol):
    """The blocks of a prompt, whose keys may be made as they are asked for."""

    @property
    def count(self) -> int: ...

    def key(self, number: int) -> int: ...


class BlockIndex:
    """Blocks of all sources, at most `max_blocks` of each; what a source stores beyond that is counted and left out.

    There may be 16 million groups. Raises ValueError where the bound makes no sense.
    """

    def __init__(self, max_blocks: int) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, got {max_blocks}")
        self.max_blocks = max_blocks
        self.refused_blocks = 0  # for which a source had no room
        self.dead_blocks = 0  # which a source held that was cleared, and no other holds
        self._shards = [array("Q") for _ in range(_SHARDS)]  # of entries, sorted
        self._masks = [0]  # holders, by group; group 0 is not used
        self._uses = [0]  # blocks of each group
        self._free: list[int] = []
        self._group_of: dict[int, int] = {}  # by mask; never an empty mask
        self._held: dict[int, list[int]] = {}  # numbers of blocks by tier, by source
        self._unused_sources: list[int] = []
        self._device_bits = 0  # those of all sources
        self._host_blocks = 0  # of all sources
        self._swept = 0  # the shard that is swept next

    # -- sources --------------------------------------------------------------------------------------------

    def add_source(self) -> int:
        """Return the number of a new source, which holds nothing; numbers of removed sources are used again."""
        source = self._unused_sources.pop() if self._unused_sources else len(self._held)
        self._held[source] = [0] * _TIERS
        self._device_bits |= 1 << _TIERS * source
        return source

    def remove_source(self, source: int) -> None:
        """Forget a source; without effect if it is not known."""
        if source in self._held:
            self.clear(source)
            del self._held[source]
            self._unused_sources.append(source)
            self._device_bits &= ~(1 << _TIERS * source)

    def held_blocks(self, source: int, tier: Tier = Tier.DEVICE) -> int:
        """Return how many blocks a source holds in a tier. Raises KeyError for an unknown source."""
        return self._held[source][tier]

    @property
    def block_count(self) -> int:
        """Different blocks that are held by any source."""
        return sum(map(len, self._shards)) - self.dead_blocks

    @property
    def group_count(self) -> int:
        """Different sets of holders."""
        return len(self._masks) - 1 - len(self._free)

    # -- what sources report --------------------------------------------------------------------------------

    def store(self, source: int, keys: Iterable[int], tier: Tier = Tier.DEVICE) -> None:
        """The source holds these blocks in this tier now. Ignores unknown sources."""
        held = self._held.get(source)
        if held is None:
            return
        bit = 1 << _TIERS * source + tier
        shards, masks, uses, group_of = self._shards, self._masks, self._uses, self._group_of
        own = group_of.get(bit, 0)  # of the blocks that no other holds: most, and masks are long
        room = self.max_blocks - sum(held)
        stored = added = 0
        for key in keys:
            shard = shards[key >> _SHARD_SHIFT & _SHARDS - 1]
            kept = key << _KEPT_SHIFT & _KEPT
            at = bisect_left(shard, kept)
            former = shard[at] ^ kept if at < len(shard) else 0
            if former > _GROUP:
                former = 0
            if former and (former == own or masks[former] & bit):
                continue
            if stored == room:
                self.refused_blocks += 1
                continue
            stored += 1
            if former:
                mask = masks[former] | bit
                group = group_of.get(mask) or self._new_group(mask)
                uses[group] += 1
                shard[at] = kept | group
                self._leave(former)
            else:
                own = own or self._new_group(bit)
                added += 1
                shard.insert(at, kept | own)
        uses[own] += added
        held[tier] += stored
        if tier is Tier.HOST:
            self._host_blocks += stored

    def remove(self, source: int, keys: Iterable[int], tier: Tier = Tier.DEVICE) -> None:
        """The source holds these blocks in this tier no more. Ignores blocks that it did not hold."""
        held = self._held.get(source)
        if held is None:
            return
        bit = 1 << _TIERS * source + tier
        shards, masks, uses, group_of = self._shards, self._masks, self._uses, self._group_of
        own = group_of.get(bit, 0)
        removed = deleted = 0
        for key in keys:
            shard = shards[key >> _SHARD_SHIFT & _SHARDS - 1]
            kept = key << _KEPT_SHIFT & _KEPT
            at = bisect_left(shard, kept)
            former = shard[at] ^ kept if at < len(shard) else _GROUP + 1
            if former > _GROUP:
                continue
            if former == own:
                deleted += 1
                del shard[at]
                continue
            mask = masks[former]
            if not mask & bit:
                continue
            removed += 1
            mask ^= bit
            if mask:
                group = group_of.get(mask) or self._new_group(mask)
                uses[group] += 1
                shard[at] = kept | group
            else:
                del shard[at]
            self._leave(former)
        if deleted:
            self._leave(own, deleted)
        held[tier] -= removed + deleted
        if tier is Tier.HOST:
            self._host_blocks -= removed + deleted

    def clear(self, source: int) -> None:
        """The source holds nothing any more. Ignores unknown sources. Takes time in proportion to the groups."""
        held = self._held.get(source)
        if held is None or not any(held):
            return
        self._host_blocks -= held[Tier.HOST]
        held[:] = [0] * _TIERS
        bits = _ALL_TIERS << _TIERS * source
        for group, mask in enumerate(self._masks):
            if not mask & bits:
                continue
            if self._group_of.get(mask) == group:
                del self._group_of[mask]
            self._masks[group] = mask = mask & ~bits
            if mask:
                self._group_of.setdefault(mask, group)
            else:
                self.dead_blocks += self._uses[group]

    def sweep(self, shards: int) -> bool:
        """Free the memory of blocks without holders, in the next few of 4,096 shards; return whether any are left."""
        for _ in range(min(shards, _SHARDS) if self.dead_blocks else 0):
            entries, masks = self._shards[self._swept], self._masks
            dead = [entry & _GROUP for entry in entries if not masks[entry & _GROUP]]
            if dead:
                self._shards[self._swept] = array("Q", [entry for entry in entries if masks[entry & _GROUP]])
                for group in dead:
                    self._leave(group)
            self._swept = (self._swept + 1) % _SHARDS
        return self.dead_blocks > 0

    # -- what is asked of it --------------------------------------------------------------------------------

    def tiers(self, source: int, key: int) -> tuple[Tier, ...]:
        """Return the tiers in which a source holds a block."""
        bits = self._mask(key) >> _TIERS * source
        return tuple(tier for tier in Tier if bits >> tier & 1)

    def keys_of(self, source: int, tier: Tier = Tier.DEVICE) -> set[int]:
        """Return the keys of all blocks that a source holds in a tier, the lowest 12 bits 0. It visits every block."""
        bit = 1 << _TIERS * source + tier
        having = {group for group, mask in enumerate(self._masks) if mask & bit}
        return {
            ((number << _SHARD_SHIFT | entry >> _GROUP_SHIFT << _REST_SHIFT) ^ _SIGN) - _SIGN
            for number, entries in enumerate(self._shards)
            for entry in entries
            if entry & _GROUP in having
        }

    def worth(self, blocks: Blocks) -> dict[int, float]:
        """Return how many blocks of a prompt's start each source need not compute; none: it is left out.

        A block on its host saves less than one on its device: it has to be loaded (`HOST_WORTH`).
        """
        matches = self.matched(blocks)
        if not matches or not self._host_blocks:
            return dict(matches)
        on_device = self.matched(blocks, is_on_device=True)
        return {
            source: count - (1.0 - HOST_WORTH) * (count - on_device.get(source, 0)) for source, count in matches.items()
        }

    def matched(self, blocks: Blocks, *, is_on_device: bool = False) -> dict[int, int]:
        """Return how many blocks of a prompt's start each source holds on its device or host; none: it is left out.
        `is_on_device`: on its device only.

        It relies on engines keeping what their blocks build on: who holds a block holds all before it. It looks at
        about two blocks for each doubling of the longest match, and at as many again for each different length.
        """
        matches: dict[int, int] = {}
        total = blocks.count
        host_shift = 0 if is_on_device else Tier.HOST
        held = self._held_by(blocks.key(0), host_shift) if total else 0
        at = 0
        while held:
            after = min(2 * at + 1, total)
            still = self._held_by(blocks.key(after), host_shift) & held if after < total else 0
            self._narrow(blocks, host_shift, at, held, after, still, matches)
            at, held = after, still
        return matches

    def _narrow(
        self, blocks: Blocks, host_shift: int, low: int, held: int, high: int, still: int, matches: dict[int, int]
    ) -> None:
        """Enter the matches of the sources that hold block `low` and not block `high`, which may be behind the last."""
        if held == still:
            return
        if high - low == 1:
            lost = held & ~still
            while lost:
                bit = lost & -lost
                matches[(bit.bit_length() - 1) // _TIERS] = high
                lost ^= bit
            return
        middle = (low + high) // 2
        there = self._held_by(blocks.key(middle), host_shift) & held | still
        self._narrow(blocks, host_shift, low, held, middle, there, matches)
        self._narrow(blocks, host_shift, middle, there, high, still, matches)

    def _held_by(self, key: int, host_shift: int) -> int:
        """Return the sources that hold a block on device or host, as their device bits; on the device only where
        `host_shift`, from the host's bit to the device's, is 0."""
        mask = self._mask(key)
        return (mask | mask >> host_shift) & self._device_bits if mask else 0

    def _mask(self, key: int) -> int:
        shard = self._shards[key >> _SHARD_SHIFT & _SHARDS - 1]
        kept = key << _KEPT_SHIFT & _KEPT
        at = bisect_left(shard, kept)
        group = shard[at] ^ kept if at < len(shard) else 0
        return self._masks[group] if group <= _GROUP else 0

    # -- groups ---------------------------------------------------------------------------------------------

    def _new_group(self, mask: int) -> int:
        if self._free:
            group = self._free.pop()
            self._masks[group] = mask
        else:
            group = len(self._masks)
            self._masks.append(mask)
            self._uses.append(0)
        self._group_of[mask] = group
        return group

    def _leave(self, group: int, blocks: int = 1) -> None:
        """These many blocks are not of this group any more."""
        mask = self._masks[group]
        self._uses[group] -= blocks
        if not mask:
            self.dead_blocks -= blocks
        if not self._uses[group]:
            if self._group_of.get(mask) == group:
                del self._group_of[mask]
            self._masks[group] = 0
            self._free.append(group)


def salt_seed(cache_salt: str) -> bytes:
    """Return the hash on which the blocks of a request with this `cache_salt` build."""
    return sha256(b"sglang-cache-salt-v1\0" + cache_salt.encode("utf-8", "replace")).digest()


class BlockChain:
    """The keys of a prompt's full blocks of one size, made as far as they are asked for."""

    __slots__ = ("_digest", "_ids", "_keys", "block_tokens", "count")

    def __init__(self, ids: bytes, block_tokens: int, seed: bytes = b"") -> None:
        """`ids`: token ids as signed 64-bit numbers of this machine; `seed`: what the first block builds on."""
        self._ids = ids
        self.block_tokens = block_tokens
        self.count = len(ids) // _ID_BYTES // block_tokens
        self._keys: list[int] = []
        self._digest = seed

    def key(self, number: int) -> int:
        """Return the key of a block, a signed 64-bit number. Raises IndexError for a block that is not full."""
        while len(self._keys) <= number < self.count:
            self._extend()
        return self._keys[number]

    def _extend(self) -> None:
        start = len(self._keys) * self.block_tokens * _ID_BYTES
        page = array("q", self._ids[start : start + self.block_tokens * _ID_BYTES])
        try:
            text = array("I", page).tobytes()
        except OverflowError:  # wider ids are hashed as SGLang does, and marked
            text = b"\xff" + page.tobytes()
        self._digest = sha256(self._digest + text).digest()
        self._keys.append(int.from_bytes(self._digest[:8], "big", signed=True))


class TokenBlocks:
    """The token ids of a prompt, and the keys of its blocks in the sizes that are asked for."""

    __slots__ = ("_chains", "ids", "seed")

    def __init__(self, ids: bytes, seed: bytes = b"") -> None:
        """`ids`: as signed 64-bit numbers of this machine."""
        self.ids = ids
        self.seed = seed
        self._chains: dict[int, BlockChain] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenBlocks) and (self.ids, self.seed) == (other.ids, other.seed)

    def __hash__(self) -> int:
        return hash((self.ids, self.seed))

    @property
    def tokens(self) -> int:
        return len(self.ids) // _ID_BYTES

    def of(self, block_tokens: int) -> BlockChain:
        """Return the blocks of this size."""
        chain = self._chains.get(block_tokens)
        if chain is None:
            chain = self._chains[block_tokens] = BlockChain(self.ids, block_tokens, self.seed)
        return chain
