"""Follows the load of every instance that publishes it (SGLang's `--load-publish-endpoint`, or `sglang-ext worker`).

SGLang's message has what is waiting, running and used on each data-parallel rank. An instance of `sglang-ext worker`
sends a second one on the same socket: the KV that decode waits for, and the queue of each length class.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from sglang_ext_router.decide.zmtp import SocketKind, subscription
from sglang_ext_router.instances.publisher_connection import PublisherConnection, connections
from sglang_ext_router.instances.workers import LoadAddress, RankReport, SchedulerLoad, Worker

logger = logging.getLogger(__name__)

LOAD_TOPIC = b"load"
SUPPLEMENT_TOPIC = b"sglang_ext"  # as in sglang_ext.engine.hooks.load_reports


class LoadStat(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The load of one rank, as SGLang's `LoadStat` has it; what it has behind these fields is not read."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    max_total_num_tokens: int
    attn_dp_rank: int | None = None
    num_waiting_uncached_tokens: int = 0
    num_total_tokens: int = 0
    max_running_requests: int = 0
    total_prefill_uncached_tokens: int = 0
    total_prefill_busy_us: int = 0


class LoadSupplement(msgspec.Struct, gc=False):
    """Describes what SGLang leaves out of the load of one rank."""

    awaiting_tokens: int  # decode: KV on its way, or that has no slots yet
    queues: dict[str, Any] | None = None  # prefill: as `GET /laps`; not in every message


_read_load = msgspec.msgpack.Decoder(LoadStat).decode
_read_supplement = msgspec.msgpack.Decoder(LoadSupplement).decode


class LoadEvents:
    """Takes in what instances publish of their load; it follows the instances that are given to `follow`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_load: Callable[[Worker, SchedulerLoad], None],
        on_closed: Callable[[Worker], None],
    ) -> None:
        """`on_load` is called with each report, `on_closed` when an instance has closed a connection."""
        self._loop = loop
        self._on_load = on_load
        self._on_closed = on_closed
        self._followed: dict[int, _InstanceLoad] = {}  # by worker

    def follow(self, worker: Worker) -> None:
        """Connect to where an instance says that it publishes its load; leave where it published it before."""
        known, address = self._followed.get(worker.id), worker.load_events
        if known is not None and known.address == address:
            known.is_back.set()
            return
        self.forget(worker)
        if address is not None:
            self._followed[worker.id] = _InstanceLoad(self._loop, worker, address, self._on_load, self._on_closed)

    def forget(self, worker: Worker) -> None:
        """Follow an instance no more."""
        followed = self._followed.pop(worker.id, None)
        if followed is not None:
            followed.stop()

    async def stop(self) -> None:
        """Close all connections."""
        tasks = [task for followed in self._followed.values() for task in followed.stop()]
        self._followed.clear()
        await asyncio.gather(*tasks, return_exceptions=True)


class _InstanceLoad:
    """Describes what each rank of an instance has published last."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        worker: Worker,
        address: LoadAddress,
        on_load: Callable[[Worker, SchedulerLoad], None],
        on_closed: Callable[[Worker], None],
    ) -> None:
        self.address = address
        self.is_back = asyncio.Event()
        self._loop = loop
        self._worker = worker
        self._on_load = on_load
        self._on_closed = on_closed
        self._loads: list[LoadStat | None] = [None] * address.ranks
        self._awaiting_tokens: list[int | None] = [None] * address.ranks
        self._open: dict[int, PublisherConnection] = {}  # by rank
        self._tasks = [loop.create_task(self._keep(rank)) for rank in range(address.ranks)]

    def stop(self) -> list[asyncio.Task[None]]:
        for task in self._tasks:
            task.cancel()
        for connection in self._open.values():
            connection.close()
        self._worker.on_load_unpublished()
        return self._tasks

    async def _keep(self, rank: int) -> None:
        host, port = self.address.host, self.address.port + rank

        def on_message(parts: list[bytes]) -> None:
            self._on_message(rank, parts)

        async for connection in connections(self._loop, host, port, SocketKind.SUB, on_message, self.is_back):
            connection.send(subscription(LOAD_TOPIC) + subscription(SUPPLEMENT_TOPIC))
            self._open[rank] = connection
            await connection.closed
            del self._open[rank]
            self._loads[rank] = self._awaiting_tokens[rank] = None
            self._worker.on_load_unpublished()  # it is asked from now on
            self._on_closed(self._worker)

    def _on_message(self, rank: int, parts: list[bytes]) -> None:
        try:
            if parts[0] == SUPPLEMENT_TOPIC:
                supplement = _read_supplement(parts[-1])
                if supplement.queues is not None and self.address.ranks == 1:
                    self._worker.published_queues = self._loop.time(), supplement.queues
                if supplement.awaiting_tokens == self._awaiting_tokens[rank]:
                    return
                self._awaiting_tokens[rank] = supplement.awaiting_tokens
            else:
                self._loads[rank] = _read_load(parts[-1])
        except msgspec.DecodeError as error:  # then it is asked for
            logger.debug("the load that %s publishes cannot be read: %s", self._worker.url, error)
            return
        self._report()

    def _report(self) -> None:
        """A rank has published its load: that of an instance is known once every rank has.

        Without the supplement it is not known what a decode instance waits for.
        """
        loads = [load for load in self._loads if load is not None]
        awaiting = [tokens for tokens in self._awaiting_tokens if tokens is not None]
        worker, ranks = self._worker, self.address.ranks
        if len(loads) < ranks or (len(awaiting) < ranks and not worker.role.computes_prompts):
            return
        if len(awaiting) < ranks:
            awaiting = [0] * ranks
        report = SchedulerLoad(
            sum(load.num_running_reqs for load in loads),
            sum(load.num_waiting_uncached_tokens for load in loads),
            sum(max(load.num_tokens, load.num_total_tokens) for load in loads),
            sum(awaiting),
            sum(load.max_total_num_tokens for load in loads),
            sum(load.total_prefill_uncached_tokens for load in loads),
            sum(load.total_prefill_busy_us for load in loads),
            tuple(map(_rank_report, loads, awaiting)) if worker.ranks else (),
        )
        self._on_load(worker, report)


def _rank_report(load: LoadStat, awaiting_tokens: int) -> RankReport:
    free_tokens = load.max_total_num_tokens - max(load.num_tokens, load.num_total_tokens) + awaiting_tokens
    return RankReport(load.num_waiting_uncached_tokens, max(0, free_tokens), awaiting_tokens)
