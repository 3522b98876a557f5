"""Soft state shared between the processes of one router: membership, load, prefixes, metrics.

Every process sends its state to the others as datagrams, again and again; none waits for another, and a process that
is gone is forgotten after `FORGET_AFTER_S`. The newest change of an instance wins.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.decide.admission import Demand
from sglang_ext_router.group.shared_state import PeerCounts, SharedState
from sglang_ext_router.instances.online_load import SiblingLoad
from sglang_ext_router.observe.metrics import MetricsSnapshot, read_snapshot

if TYPE_CHECKING:
    from sglang_ext_router.instances.workers import Worker
    from sglang_ext_router.router import Router

logger = logging.getLogger(__name__)
LOAD_INTERVAL_S = 0.1
METRICS_EVERY = 10  # load messages
FORGET_AFTER_S = 2.0
MAX_DATAGRAM_BYTES = 128 << 10


class SiblingLink(Protocol):
    """Sends the other processes what they cannot see for themselves."""

    shares_prefixes: bool

    async def start(self, router: Router) -> None: ...

    async def stop(self) -> None: ...

    def tell_added(self, address: WorkerAddress) -> None: ...

    def tell_removed(self, url: str) -> None: ...

    def tell_draining(self, worker: Worker, is_draining: bool) -> None: ...

    def tell_gone(self, url: str) -> None:
        """The cluster no longer has this instance: what was changed by hand of it holds no longer."""
        ...

    def tell_prefix(self, url: str, hashes: Sequence[int]) -> None: ...

    def metric_snapshots(self) -> Sequence[tuple[int, MetricsSnapshot]]:
        """Return what the other processes have counted, by their number, and what this one's predecessors had."""
        ...

    def online_loads(self) -> Sequence[SiblingLoad]: ...

    def demands(self) -> Mapping[int, Demand]:
        """Return what each of the other processes or routers has to serve, by its number, as it last sent."""
        ...

    def peer_counts(self) -> PeerCounts | None:
        """The other routers of the group; None without one."""
        ...


class NoSiblings:
    """A router of one process."""

    shares_prefixes = False

    async def start(self, router: Router) -> None:
        """There is nothing to start."""

    async def stop(self) -> None:
        """There is nothing to stop."""

    def tell_added(self, address: WorkerAddress) -> None:
        """There is no other process."""

    def tell_removed(self, url: str) -> None:
        """There is no other process."""

    def tell_draining(self, worker: Worker, is_draining: bool) -> None:
        """There is no other process."""

    def tell_gone(self, url: str) -> None:
        """There is no other process."""

    def tell_prefix(self, url: str, hashes: Sequence[int]) -> None:
        """There is no other process."""

    def metric_snapshots(self) -> Sequence[tuple[int, MetricsSnapshot]]:
        return ()

    def online_loads(self) -> Sequence[SiblingLoad]:
        return ()

    def demands(self) -> Mapping[int, Demand]:
        return {}

    def peer_counts(self) -> PeerCounts | None:
        return None


class DatagramSiblings(SharedState, asyncio.DatagramProtocol):
    """The link between processes `0 .. config.processes - 1`, through Unix sockets in one folder."""

    shares_prefixes = True

    def __init__(self, folder: Path, index: int, config: RouterConfig) -> None:
        super().__init__(index, config)
        self._folder = folder
        self._index = index
        self._others = [folder / f"{i}.sock" for i in range(config.processes) if i != index]
        self._ticks = 0
        self._counts_file = folder / f"{index}.counts"
        self._inherited = self._inherit()
        self._transport: asyncio.BaseTransport
        self._socket: socket.socket
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, router: Router) -> None:
        self._router = router
        path = self._folder / f"{self._index}.sock"
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        await router.loop.create_datagram_endpoint(lambda: self, sock=self._socket)
        if self._inherited is not None:
            try:
                router.metrics_snapshot().with_counts_of(self._inherited)
            except (ValueError, TypeError):  # of another version of this program
                self._inherited = None
        self._tick()

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def _tick(self) -> None:
        # First, so that no error in what follows ends it.
        self._timer = self._router.loop.call_later(LOAD_INTERVAL_S, self._tick)
        self._ticks += 1
        self._send_state()
        self._apply_states(FORGET_AFTER_S)

    def _on_changed(self) -> None:
        self._send_state()

    def _send_state(self) -> None:
        state = self._next_message()
        if self._ticks % METRICS_EVERY == 1:
            state["metrics"] = self._own_metrics()
        message = orjson.dumps(state)
        if len(message) > MAX_DATAGRAM_BYTES:
            state["prefixes"] = []
            message = orjson.dumps(state)
        for other in self._others:
            try:
                self._socket.sendto(message, str(other))
            except OSError:
                continue  # not there yet, gone, or its buffer is full: the next message says the same

    def datagram_received(self, data: bytes, addr: object) -> None:
        self._take(orjson.loads(data))

    def metric_snapshots(self) -> Sequence[tuple[int, MetricsSnapshot]]:
        others = [(index, state.metrics) for index, state in self._states.items() if state.metrics is not None]
        return others if self._inherited is None else [*others, (self._index, self._inherited)]

    def _own_metrics(self) -> tuple[Any, ...]:
        """Return what the processes of this number have counted; should this one be killed, the next finds it in a
        file."""
        snapshot = self._router.metrics_snapshot()
        if self._inherited is not None:
            snapshot = snapshot.with_counts_of(self._inherited)
        wire = tuple(snapshot)
        try:
            self._counts_file.write_bytes(orjson.dumps(wire))
        except OSError as error:
            logger.warning("counters will be lost should this process be killed: %s", error)
        return wire

    def _inherit(self) -> MetricsSnapshot | None:
        """Return what earlier processes of this number had counted."""
        try:
            left = read_snapshot(orjson.loads(self._counts_file.read_bytes()))
        except (OSError, ValueError, TypeError):  # the first process, or a process that was killed while it wrote
            return None
        return left._replace(gauges={}, process={})
