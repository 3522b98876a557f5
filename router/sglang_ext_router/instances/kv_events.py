"""Follows the KV events of every instance that publishes some, into the router's index of blocks.

For each rank there are two connections: one brings batches as they are published, the other brings replays. What
follows from a batch, a gap or a lost connection is decided in `decide/event_sequence.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any

import msgspec

from sglang_ext_router.decide.block_index import BlockIndex, Tier
from sglang_ext_router.decide.event_sequence import ApplyBatch, AskReplay, EventSequence, SequenceAction
from sglang_ext_router.decide.zmtp import SocketKind, message, subscription
from sglang_ext_router.instances.publisher_connection import PublisherConnection, connections
from sglang_ext_router.instances.workers import HeldBlocks, KvEventsAddress, Worker

logger = logging.getLogger(__name__)

TICK_S = 0.1
QUIET_S = 0.3  # without a batch, after which the last one is looked at once more
RECHECK_S = 30.0  # between two such looks while nothing comes
MAX_CHECKS = 5  # such looks at a tick
REPLAY_TIMEOUT_S = 5.0  # without a part of a replay
MAX_WHOLE_REPLAYS = 16  # at once, as each brings up to 10,000 batches
SWEPT_SHARDS = 64  # of the index, at a tick
_END = (-1).to_bytes(8, "big", signed=True)  # the number behind a replay's last batch
_NUMBER_BYTES = 8
_TIERS = {None: Tier.DEVICE, "GPU": Tier.DEVICE, "CPU_PINNED": Tier.HOST}  # any other medium is storage


class StoredBlocks(msgspec.Struct, tag="BlockStored", gc=False):
    """Blocks that an engine holds from now on; its other fields, the tokens among them, are not read."""

    block_hashes: list[int]
    medium: str | None = None


class RemovedBlocks(msgspec.Struct, tag="BlockRemoved", gc=False):
    """Blocks that an engine does not hold any more."""

    block_hashes: list[int]
    medium: str | None = None


class ClearedBlocks(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """An engine holds nothing any more."""


class EventsOfBatch(msgspec.Struct, array_like=True, gc=False):
    """One message of a publisher: when it was made, and what has changed."""

    made_at_s: float
    events: list[StoredBlocks | RemovedBlocks | ClearedBlocks]


_read_batch = msgspec.msgpack.Decoder(EventsOfBatch).decode


class KvEvents:
    """Keeps the index as the instances report it; it follows the instances that are given to `follow`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, index: BlockIndex) -> None:
        self.index = index
        self.loop = loop
        self._ranks: dict[int, list[_RankEvents]] = {}  # by worker
        self._timer: asyncio.TimerHandle | None = None
        self._whole_replays: set[_RankEvents] = set()
        self._waiting: deque[_RankEvents] = deque()  # for one of these
        self._next_check = 0

    def follow(self, worker: Worker) -> None:
        """Connect to what an instance says that it publishes; give up what it published before, if that is another."""
        known = self._ranks.get(worker.id)
        address = worker.kv_events
        if known is not None and known[0].address == address:
            for rank in known:
                rank.connect_now()
            return
        self.forget(worker)
        if address is None:
            return
        held = worker.held_blocks = HeldBlocks(address.block_tokens)
        ranks = [_RankEvents(self, worker, held, address, rank) for rank in range(address.ranks)]
        held.sources = tuple(rank.source for rank in ranks)
        self._ranks[worker.id] = ranks
        if self._timer is None:
            self._timer = self.loop.call_later(TICK_S, self._tick)

    def forget(self, worker: Worker) -> None:
        """Follow an instance no more, and forget what it holds."""
        for rank in self._ranks.pop(worker.id, ()):
            rank.stop()
            self.on_replay_over(rank)
        worker.held_blocks = None

    def on_lost(self, worker: Worker) -> None:
        """An instance is gone, or was started again: what it held is not there."""
        for rank in self._ranks.get(worker.id, ()):
            rank.on_instance_lost()

    def ranks(self, worker: Worker) -> list[_RankEvents]:
        """Return what comes from each rank of an instance; empty for an instance without events."""
        return self._ranks.get(worker.id, [])

    def describe(self, worker: Worker) -> dict[str, Any]:
        """Return where the cached prefixes of an instance are known from, as JSON."""
        ranks, held = self.ranks(worker), worker.held_blocks
        if held is None:
            return {"from": "estimate"}
        lags_s = [rank.lag_s for rank in ranks if rank.lag_s is not None]
        return {
            "from": "events" if held.is_whole else "estimate",
            "prompts": ["ids", *sorted(worker.alike)],
            "connected": all(rank.is_connected for rank in ranks),
            "blocks": sum(self.index.held_blocks(rank.source) for rank in ranks),
            "host_blocks": sum(self.index.held_blocks(rank.source, Tier.HOST) for rank in ranks),
            "lag_s": round(max(lags_s), 3) if lags_s else None,
            "gaps": sum(rank.sequence.gaps for rank in ranks),
            "losses": sum(rank.sequence.losses for rank in ranks),
            "restarts": sum(rank.sequence.restarts for rank in ranks),
        }

    async def stop(self) -> None:
        """Close all connections."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks = [task for ranks in self._ranks.values() for rank in ranks for task in rank.stop()]
        self._ranks.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- replays of all that a publisher keeps ----------------------------------------------------------------

    def may_replay(self, rank: _RankEvents) -> bool:
        """Return whether a rank may ask for all now; if not, its `ask` is called again later."""
        if len(self._whole_replays) < MAX_WHOLE_REPLAYS or rank in self._whole_replays:
            self._whole_replays.add(rank)
            return True
        if rank not in self._waiting:
            self._waiting.append(rank)
        return False

    def on_replay_over(self, rank: _RankEvents) -> None:
        if rank in self._waiting:
            self._waiting.remove(rank)
        if rank in self._whole_replays:
            self._whole_replays.remove(rank)
        while self._waiting and len(self._whole_replays) < MAX_WHOLE_REPLAYS:
            self._waiting.popleft().ask()

    def _tick(self) -> None:
        self._timer = self.loop.call_later(TICK_S, self._tick)
        self.index.sweep(SWEPT_SHARDS)
        now_s = self.loop.time()
        all_ranks = [rank for ranks in self._ranks.values() for rank in ranks]
        checks, count = 0, len(all_ranks)
        for place in range(self._next_check, self._next_check + count):
            if all_ranks[place % count].check(now_s, may_look=checks < MAX_CHECKS):
                checks += 1
                self._next_check = (place + 1) % count  # whose turn it is when there are more


class _RankEvents:
    """The events of one rank of an instance: its connections, its sequence, and its source in the index."""

    def __init__(self, events: KvEvents, worker: Worker, held: HeldBlocks, address: KvEventsAddress, rank: int) -> None:
        self.address = address
        self.source = events.index.add_source()
        self.sequence = EventSequence(can_replay=address.replay_port is not None)
        self.batches = 0
        self.unreadable = 0
        self.lag_s: float | None = None  # between a batch's making and its coming, by the clocks of two machines
        self._events = events
        self._index = events.index
        self._loop = events.loop
        self._worker = worker
        self._held = held
        self._rank = rank
        self._wanted: int | None = None  # a replay from this number on, which was not asked for yet
        self._heard_s = self._loop.time()  # when the last batch came
        self._checked_s = float("-inf")  # when a look at the last batch was taken
        self._replay_s = float("inf")  # when a replay was asked for, or a part of it came
        self._is_back = asyncio.Event()  # the instance, so that its publisher may be, too
        self._live: PublisherConnection | None = None
        self._replay: PublisherConnection | None = None
        self._tasks = [self._loop.create_task(self._keep_live(address.port + rank))]
        if address.replay_port is not None:
            self._tasks.append(self._loop.create_task(self._keep_replay(address.replay_port + rank)))

    @property
    def is_connected(self) -> bool:
        return self._live is not None

    def stop(self) -> list[asyncio.Task[None]]:
        for task in self._tasks:
            task.cancel()
        for connection in (self._live, self._replay):
            if connection is not None:
                connection.close()
        self._index.remove_source(self.source)
        return self._tasks

    def connect_now(self) -> None:
        """Try again at once what cannot be connected so far."""
        self._is_back.set()

    def on_instance_lost(self) -> None:
        self._act(self.sequence.on_instance_lost())
        self._checked_s = float("-inf")

    def check(self, now_s: float, *, may_look: bool) -> bool:
        """Give up a replay that does not come; look at the last batch where none has come for a while.

        Return whether it did the latter.
        """
        if self.sequence.is_replaying:
            if now_s - self._replay_s > REPLAY_TIMEOUT_S:
                logger.warning("no replay of KV events from %s (rank %d)", self._worker.url, self._rank)
                if self._replay is not None:
                    self._replay.close()
                self._on_replay_failed()
        elif may_look and self._replay is not None and self._live is not None and not self.unreadable:
            is_quiet = now_s - self._heard_s > QUIET_S and self._checked_s < self._heard_s + QUIET_S
            if is_quiet or now_s - self._checked_s > RECHECK_S:
                self._checked_s = now_s
                self._act(self.sequence.on_quiet())
                return True
        return False

    def ask(self) -> None:
        """Ask for the replay that is wanted, once there is a connection and not too many others ask for all."""
        if self._wanted is None or self._replay is None:
            return
        if self._wanted == 0 and not self._events.may_replay(self):
            self._replay_s = float("inf")  # it waits for others, not for the instance
            return
        self._replay.send(message(b"", self._wanted.to_bytes(_NUMBER_BYTES, "big")))
        self._wanted = None
        self._replay_s = self._loop.time()

    # -- connections ----------------------------------------------------------------------------------------

    async def _keep_live(self, port: int) -> None:
        topic = self.address.topic
        host, is_back = self.address.host, self._is_back
        async for connection in connections(self._loop, host, port, SocketKind.SUB, self._on_live, is_back):
            connection.send(subscription(topic))
            self._live = connection
            self._checked_s = self._loop.time()
            self._act(self.sequence.on_connected())
            await connection.closed
            self._live = None
            self._update_whole()

    async def _keep_replay(self, port: int) -> None:
        host, is_back = self.address.host, self._is_back
        async for connection in connections(self._loop, host, port, SocketKind.DEALER, self._on_replay, is_back):
            self._replay = connection
            self.ask()
            await connection.closed
            self._replay = None
            if self._wanted is None:
                self._on_replay_failed()

    # -- messages -------------------------------------------------------------------------------------------

    def _on_live(self, parts: list[bytes]) -> None:
        if len(parts) != 3 or len(parts[1]) != _NUMBER_BYTES:
            self._on_unreadable("a message of another shape")
            return
        self._heard_s = self._loop.time()
        self.batches += 1
        actions = self.sequence.on_batch(int.from_bytes(parts[1], "big"), parts[2])
        if len(actions) == 1 and type(actions[0]) is ApplyBatch and self._held.is_whole:  # as nearly always
            self._apply(actions[0].payload)
        else:
            self._act(actions)

    def _on_replay(self, parts: list[bytes]) -> None:
        if len(parts) != 4 or len(parts[2]) != _NUMBER_BYTES:
            self._on_unreadable("a replay of another shape")
            return
        self._replay_s = self._loop.time()
        if parts[2] == _END:
            actions = self.sequence.on_replay_end()
            if not self.sequence.is_replaying:
                self._events.on_replay_over(self)
            self._act(actions)
        else:
            self._act(self.sequence.on_replayed(int.from_bytes(parts[2], "big"), parts[3]))

    def _on_replay_failed(self) -> None:
        self._wanted = None
        self._events.on_replay_over(self)
        self._act(self.sequence.on_replay_failed())

    def _act(self, actions: list[SequenceAction]) -> None:
        for action in actions:
            if type(action) is ApplyBatch:
                self._apply(action.payload)
            elif type(action) is AskReplay:
                self._wanted = action.first
                self._replay_s = self._loop.time() if self._replay is None else float("inf")
                self.ask()
            else:
                self._index.clear(self.source)
        self._update_whole()

    def _update_whole(self) -> None:
        """Note whether all is known: every rank is connected, and none of its batches is missing."""
        ranks = self._events.ranks(self._worker)
        self._held.is_whole = all(rank.is_connected and rank.sequence.is_whole for rank in ranks)

    def _apply(self, payload: bytes) -> None:
        index, source = self._index, self.source
        try:
            batch = _read_batch(payload)
            for event in batch.events:
                if type(event) is StoredBlocks:
                    index.store(source, event.block_hashes, _TIERS.get(event.medium, Tier.STORAGE))
                elif type(event) is RemovedBlocks:
                    index.remove(source, event.block_hashes, _TIERS.get(event.medium, Tier.STORAGE))
                else:
                    index.clear(source)
                    self.sequence.on_cleared()
        except (msgspec.DecodeError, OverflowError) as error:
            self._on_unreadable(str(error))
            return
        if not self.sequence.is_replaying:
            self.lag_s = max(0.0, time.time() - batch.made_at_s)

    def _on_unreadable(self, reason: str) -> None:
        """A message says something that is not known here: what the rank holds is not known either."""
        if not self.unreadable:
            logger.warning("KV events of %s cannot be read: %s", self._worker.url, reason)
        self.unreadable += 1
        self._index.clear(self.source)
        self.sequence.is_whole = self._held.is_whole = False
