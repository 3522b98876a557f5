"""Knows how much of a prompt each instance holds: by what it was sent, and by the events that it publishes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_ext_router.decide.block_index import BlockIndex, TokenBlocks
from sglang_ext_router.decide.prefix_index import BLOCK_BYTES, BLOCK_ENDS, PrefixIndex, RecentPrompts
from sglang_ext_router.decide.session_hints import NO_SESSION, SessionHints
from sglang_ext_router.instances.registry import WorkerRegistry
from sglang_ext_router.instances.workers import Worker
from sglang_ext_router.request.prompt import Prompt

MAX_SESSIONS = 65_536  # whose last turn is remembered: 20 MB
TOKEN_ID_BYTES = 8  # in the text over which prompts of token ids are hashed


class KnownPrefixes:
    """Holds what one router knows of the prefix caches of its instances.

    It remembers `sent_blocks` of the text that was sent, in the blocks of `PrefixIndex`, and `reported_blocks` of what
    instances report.
    """

    def __init__(self, registry: WorkerRegistry, sent_blocks: int, reported_blocks: int) -> None:
        self._registry = registry
        self.sessions = SessionHints(MAX_SESSIONS)
        self.index = PrefixIndex(sent_blocks * BLOCK_BYTES, BLOCK_ENDS)
        self.blocks = BlockIndex(reported_blocks)  # of the instances that report them
        self._recent = RecentPrompts(sent_blocks * BLOCK_BYTES, BLOCK_ENDS)  # sent, and perhaps not reported yet
        for worker in registry:
            if worker.role.computes_prompts:
                self.add_worker(worker)

    # -- instances --------------------------------------------------------------------------------------

    def add_worker(self, worker: Worker) -> None:
        """Learn from now on what is in the prefix cache of each of its ranks."""
        for prefix_id in worker.prefix_ids:
            self.index.add_worker(prefix_id)

    def remove_worker(self, worker: Worker) -> None:
        """The instance is not one of the router's any more."""
        for prefix_id in (worker.id, *worker.prefix_ids):
            self.index.remove_worker(prefix_id)
            self._recent.clear(prefix_id)

    def empty_worker(self, worker: Worker) -> None:
        """Its prefix cache is empty, or will be when it comes back."""
        for prefix_id in worker.prefix_ids:
            self.index.clear(prefix_id)
            self._recent.clear(prefix_id)
        self.sessions.forget_worker(worker.id)

    def set_capacity(self, worker: Worker, size_bytes: int) -> None:
        """Each of its ranks holds no more than this much text."""
        for prefix_id in worker.prefix_ids:
            self.index.set_capacity(prefix_id, max(BLOCK_BYTES, size_bytes))

    # -- prompts ----------------------------------------------------------------------------------------

    def record_sent(self, worker: Worker, hashes: Sequence[int], rank: int | None = None) -> None:
        """A prompt with these hashes was sent there, by this router or another.

        Where the instance has ranks, it is not known what a rank holds of a prompt that names none.
        """
        prefix_id = _prefix_id(worker, rank)
        if prefix_id is None:
            return
        self.index.record(prefix_id, hashes)
        if worker.held_blocks is not None:
            self._recent.record(prefix_id, hashes)

    def forget_sent(
        self,
        prompt: Prompt,
        worker: Worker,
        held_tokens: int,
        prompt_tokens: int,
        session: int = NO_SESSION,
        rank: int | None = None,
    ) -> None:
        """Forget the part of the prompt that the instance did not hold before: its prefill did not end."""
        if session:
            self.sessions.forget(session, worker.id)
        prefix_id = _prefix_id(worker, rank)
        if prompt.hashes and prefix_id is not None and self._registry.contains(worker):
            held_bytes = (held_tokens + 1) / _tokens_per_byte(prompt, max(1, prompt_tokens))  # tokens were rounded down
            self.index.forget(prefix_id, prompt.hashes, int(held_bytes) if held_tokens else 0)
            self._recent.forget(prefix_id, prompt.hashes, int(held_bytes) if held_tokens else 0)

    def age_recent(self) -> None:
        """Take prompts sent before the last call as reported, where the instance has them."""
        self._recent.age()

    # -- what is held -----------------------------------------------------------------------------------

    def most_sent_tokens(self, prompt: Prompt, prompt_tokens: int, workers: Sequence[Worker]) -> int:
        """Return how many of the prompt's tokens the instance was sent that was sent most of them."""
        matched = self.index.matched(prompt.hashes)
        if not matched:
            return 0
        size_bytes = max([_matched_bytes(matched, worker) for worker in workers], default=0)
        return int(size_bytes * _tokens_per_byte(prompt, prompt_tokens))

    def cached_tokens(
        self, prompt: Prompt, prompt_tokens: int, workers: Sequence[Worker], ranks: Sequence[int] = ()
    ) -> list[int]:
        """Return how many of the prompt's tokens each instance holds, by its events, or is believed to hold.

        With `ranks`: each instance's rank of this number; else its rank that holds most.
        """
        matched = self.index.matched(prompt.hashes)
        if prompt.blocks is not None:
            return self._reported_tokens(prompt, prompt.blocks, prompt_tokens, workers, ranks, matched)
        if not matched:
            return [0] * len(workers)
        per_byte = _tokens_per_byte(prompt, prompt_tokens)
        max_tokens = prompt_tokens - 1  # the last token is always computed again
        cached = []
        for position, worker in enumerate(workers):
            if worker.ranks:
                size_bytes = _matched_bytes(matched, worker, ranks[position] if ranks else None)
            else:
                size_bytes = matched.get(worker.id, 0)
            if not size_bytes:
                cached.append(0)
            else:
                tokens = int(size_bytes * per_byte)
                cached.append(tokens if tokens < max_tokens else max_tokens)
        return cached

    def cached_tokens_by_rank(self, prompt: Prompt, prompt_tokens: int, worker: Worker) -> list[int]:
        """Return how many of the prompt's tokens each rank of an instance holds."""
        ranks = range(len(worker.ranks))
        return self.cached_tokens(prompt, prompt_tokens, [worker] * len(ranks), ranks)

    def _reported_tokens(
        self,
        prompt: Prompt,
        blocks: TokenBlocks,
        prompt_tokens: int,
        workers: Sequence[Worker],
        ranks: Sequence[int],
        matched: Mapping[int, int],
    ) -> list[int]:
        """Return the same of a prompt whose token ids are known: what an instance reports, and was sent just now.

        What it was sent at any time (`matched`) counts where its events leave out what it held before.
        """
        per_byte = _tokens_per_byte(prompt, prompt_tokens)
        max_tokens = prompt_tokens - 1
        recent: Mapping[int, int] | None = None
        reported: dict[int, dict[int, float]] = {}  # blocks of each source, by their size
        cached = []
        for position, worker in enumerate(workers):
            held = worker.held_blocks if prompt.needs <= worker.alike else None
            rank = ranks[position] if ranks else None
            size_bytes = _matched_bytes(matched, worker, rank)
            tokens = 0
            if held is not None:
                sizes = reported.get(held.block_tokens)
                if sizes is None:
                    sizes = reported[held.block_tokens] = self.blocks.worth(blocks.of(held.block_tokens))
                if sizes:
                    sources = held.sources if rank is None else held.sources[rank : rank + 1]
                    tokens = int(held.block_tokens * max([sizes.get(source, 0.0) for source in sources], default=0.0))
                if held.is_whole and size_bytes:
                    if recent is None:
                        recent = self._recent.matched(prompt.hashes)
                    size_bytes = _matched_bytes(recent, worker, rank)
            sent_tokens = int(size_bytes * per_byte)
            if held is not None:  # which keeps whole blocks
                sent_tokens -= sent_tokens % held.block_tokens
            tokens = max(tokens, sent_tokens)
            cached.append(tokens if tokens < max_tokens else max_tokens)
        return cached


def _prefix_id(worker: Worker, rank: int | None) -> int | None:
    """Return the name of a prefix cache in the prefix index; None where an instance has ranks and none is named."""
    if not worker.ranks:
        return worker.id
    return None if rank is None or rank >= len(worker.ranks) else worker.ranks[rank].prefix_id


def _matched_bytes(matched: Mapping[int, int], worker: Worker, rank: int | None = None) -> int:
    """Return how much of a prompt's start an instance was sent, or one of its ranks."""
    if not worker.ranks:
        return matched.get(worker.id, 0)
    if rank is not None:
        return matched.get(worker.ranks[rank].prefix_id, 0)
    return max([matched.get(load.prefix_id, 0) for load in worker.ranks])


def _tokens_per_byte(prompt: Prompt, prompt_tokens: int) -> float:
    size_bytes = prompt.longest_bytes or (prompt.longest_known_tokens or 1) * TOKEN_ID_BYTES
    return prompt_tokens / size_bytes
