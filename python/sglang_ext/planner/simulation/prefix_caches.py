"""The prefix caches of simulated instances: the blocks of the prompts that each has computed, least recently used out
first."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_ext.planner.simulation.events import SimRequest
from sglang_ext_router.decide.prefix_index import PrefixIndex


class PrefixCaches:
    """The caches of all instances of a stage; instances are numbers. Blocks of different sizes have caches of their
    own."""

    def __init__(self, kv_tokens: int) -> None:
        """Give every instance a cache of `kv_tokens`."""
        self._kv_tokens = kv_tokens
        self._indexes: dict[int, PrefixIndex] = {}  # by the size of the blocks
        self._instances: set[int] = set()

    def add(self, instance: int) -> None:
        """Add an instance with an empty cache; without effect for one that is there."""
        if instance not in self._instances:
            self._instances.add(instance)
            for index in self._indexes.values():
                index.add_worker(instance)

    def remove(self, instance: int) -> None:
        """Forget an instance; without effect for one that is not there."""
        if instance in self._instances:
            self._instances.discard(instance)
            for index in self._indexes.values():
                index.remove_worker(instance)

    def set_room(self, instance: int, kv_tokens: int) -> None:
        """Give an instance's cache this many tokens: what does not fit is dropped."""
        for block_tokens, index in self._indexes.items():
            index.set_capacity(instance, max(1, kv_tokens // block_tokens))

    def cached_tokens(self, request: SimRequest, instances: Sequence[int]) -> list[int]:
        """Return how many tokens of a prompt each of `instances` has; the last token is always computed."""
        prefix = request.prefix
        if prefix is None:
            return [request.cached_tokens] * len(instances)
        matched = self._index(prefix.block_tokens).matched(prefix.blocks)
        return [
            min(matched.get(instance, 0) * prefix.block_tokens, request.prompt_tokens - 1) for instance in instances
        ]

    def record(self, instance: int, request: SimRequest) -> None:
        """Record that an instance has computed a prompt."""
        if request.prefix is not None:
            self._index(request.prefix.block_tokens).record(instance, request.prefix.blocks)

    def _index(self, block_tokens: int) -> PrefixIndex:
        index = self._indexes.get(block_tokens)
        if index is None:
            index = self._indexes[block_tokens] = PrefixIndex(max(1, self._kv_tokens // block_tokens))
            for instance in sorted(self._instances):
                index.add_worker(instance)
        return index
