"""Soft state shared between the processes of one router: membership, load, prefixes, metrics.

Every process sends its state to the others as datagrams, again and again; none waits for another, and a process that
is gone is forgotten after `FORGET_AFTER_S`. The newest change of an instance wins.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import orjson

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.metrics import MetricsSnapshot
from sglang_ext_router.online_load import SiblingLoad

if TYPE_CHECKING:
    from sglang_ext_router.routing import RoutePlanner
    from sglang_ext_router.workers import Worker, WorkerRegistry

# As JSON: url, counter, origin, role or null when removed, bootstrap port or null, draining
WireEntry = tuple[str, int, int, str | None, int | None, bool]
logger = logging.getLogger(__name__)
LOAD_INTERVAL_S = 0.1
METRICS_EVERY = 10  # load messages
FORGET_AFTER_S = 2.0
MAX_DATAGRAM_BYTES = 128 << 10
MAX_SHARED_BLOCKS = 4096  # prefix blocks told per message; what exceeds it is not told


class Entry(NamedTuple):
    """The last known change of one instance. `address` is None once it was removed."""

    counter: int  # grows with every change of any process that has seen the one before
    origin: int  # process that made it: decides between changes made at the same time
    address: WorkerAddress | None
    is_draining: bool

    @property
    def version(self) -> tuple[int, int]:
        return self.counter, self.origin


class MembershipTable:
    """One process's picture; merging is commutative and idempotent, so messages may be lost or doubled."""

    def __init__(self, origin: int, initial: Iterable[WorkerAddress]) -> None:
        self._origin = origin
        # What the command line gave is known to all processes: the same version everywhere.
        self._entries = {address.url: Entry(0, 0, address, False) for address in initial}

    def change(self, url: str, address: WorkerAddress | None, is_draining: bool = False) -> None:
        """Note a change made here."""
        known = self._entries.get(url)
        self._entries[url] = Entry(known.counter + 1 if known else 1, self._origin, address, is_draining)

    def merge(self, wire: Iterable[WireEntry]) -> list[tuple[str, Entry]]:
        """Take over newer entries of a sibling; the ones that changed here."""
        changed: list[tuple[str, Entry]] = []
        for url, counter, origin, role, port, is_draining in wire:
            known = self._entries.get(url)
            if known is not None and (counter, origin) <= known.version:
                continue
            address = None if role is None else WorkerAddress(url, Role(role), port)
            entry = Entry(counter, origin, address, is_draining)
            self._entries[url] = entry
            changed.append((url, entry))
        return changed

    def address(self, url: str) -> WorkerAddress | None:
        entry = self._entries.get(url)
        return None if entry is None else entry.address

    def wire(self) -> list[WireEntry]:
        """Everything, for siblings; the command line's own entries are left out as long as they are unchanged."""
        return [
            (
                url,
                entry.counter,
                entry.origin,
                entry.address.role.value if entry.address else None,
                entry.address.bootstrap_port if entry.address else None,
                entry.is_draining,
            )
            for url, entry in self._entries.items()
            if entry.counter
        ]


class LinkedRouter(Protocol):
    """What a link reads and changes of its own process."""

    loop: asyncio.AbstractEventLoop
    registry: WorkerRegistry
    planner: RoutePlanner

    def adopt_worker(self, address: WorkerAddress) -> Worker: ...

    def drop_worker(self, worker: Worker) -> None: ...

    def set_draining(self, worker: Worker, is_draining: bool) -> None: ...

    def online_load(self) -> SiblingLoad: ...

    def metrics_snapshot(self) -> MetricsSnapshot: ...


class SiblingLink(Protocol):
    """How a process tells the others what they cannot see for themselves."""

    shares_prefixes: bool

    async def start(self, router: LinkedRouter) -> None: ...

    async def stop(self) -> None: ...

    def tell_added(self, address: WorkerAddress) -> None: ...

    def tell_removed(self, url: str) -> None: ...

    def tell_draining(self, url: str, is_draining: bool) -> None: ...

    def tell_prefix(self, url: str, hashes: Sequence[int]) -> None: ...

    def metric_snapshots(self) -> Sequence[tuple[int, MetricsSnapshot]]:
        """What the other processes have counted, by their number, and what this one's predecessors had."""
        ...

    def online_loads(self) -> Sequence[SiblingLoad]: ...


class NoSiblings:
    """A router of one process."""

    shares_prefixes = False

    async def start(self, router: LinkedRouter) -> None:
        """There is nothing to start."""

    async def stop(self) -> None:
        """There is nothing to stop."""

    def tell_added(self, address: WorkerAddress) -> None:
        """There is no other process."""

    def tell_removed(self, url: str) -> None:
        """There is no other process."""

    def tell_draining(self, url: str, is_draining: bool) -> None:
        """There is no other process."""

    def tell_prefix(self, url: str, hashes: Sequence[int]) -> None:
        """There is no other process."""

    def metric_snapshots(self) -> Sequence[tuple[int, MetricsSnapshot]]:
        return ()

    def online_loads(self) -> Sequence[SiblingLoad]:
        return ()


class _SiblingState(NamedTuple):
    received_s: float
    loads: dict[str, tuple[int, int]]  # url → requests under way, tokens promised
    metrics: MetricsSnapshot | None
    online: SiblingLoad


class DatagramSiblings(asyncio.DatagramProtocol):
    """The link between processes `0 .. config.processes - 1`, through Unix sockets in one folder."""

    shares_prefixes = True

    def __init__(self, folder: Path, index: int, config: RouterConfig) -> None:
        self._folder = folder
        self._index = index
        self._others = [folder / f"{i}.sock" for i in range(config.processes) if i != index]
        self._table = MembershipTable(index, config.workers)
        self._states: dict[int, _SiblingState] = {}
        self._prefixes: list[tuple[str, list[int]]] = []
        self._prefix_blocks = 0
        self._ticks = 0
        self._counts_file = folder / f"{index}.counts"
        self._inherited = self._inherit()
        self._router: LinkedRouter
        self._transport: asyncio.BaseTransport
        self._socket: socket.socket
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, router: LinkedRouter) -> None:
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

    # -- telling ----------------------------------------------------------------------------------------

    def tell_added(self, address: WorkerAddress) -> None:
        self._table.change(address.url, address)
        self._send_state()

    def tell_removed(self, url: str) -> None:
        self._table.change(url, None)
        self._send_state()

    def tell_draining(self, url: str, is_draining: bool) -> None:
        self._table.change(url, self._table.address(url), is_draining)
        self._send_state()

    def tell_prefix(self, url: str, hashes: Sequence[int]) -> None:
        if self._prefix_blocks + len(hashes) <= MAX_SHARED_BLOCKS:
            self._prefixes.append((url, list(hashes)))
            self._prefix_blocks += len(hashes)

    def _tick(self) -> None:
        self._ticks += 1
        self._send_state()
        self._apply_loads()
        self._timer = self._router.loop.call_later(LOAD_INTERVAL_S, self._tick)

    def _send_state(self) -> None:
        router = self._router
        state: dict[str, Any] = {
            "index": self._index,
            "members": self._table.wire(),
            "loads": {
                worker.url: (worker.in_flight, worker.pending_tokens + worker.reserved_tokens)
                for worker in router.registry
                if worker.in_flight
            },
            "prefixes": self._prefixes,
            "online": tuple(router.online_load()),
        }
        self._prefixes, self._prefix_blocks = [], 0
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

    # -- hearing ----------------------------------------------------------------------------------------

    def datagram_received(self, data: bytes, addr: object) -> None:
        state = orjson.loads(data)
        router = self._router
        known = self._states.get(state["index"])
        self._states[state["index"]] = _SiblingState(
            router.loop.time(),
            {url: (load[0], load[1]) for url, load in state["loads"].items()},
            MetricsSnapshot(*state["metrics"]) if "metrics" in state else known.metrics if known else None,
            SiblingLoad(*state["online"]),
        )
        for url, entry in self._table.merge(tuple(item) for item in state["members"]):
            worker = router.registry.find(url)
            if worker is not None and (entry.address is None or worker.role is not entry.address.role):
                router.drop_worker(worker)
                worker = None
            if entry.address is None:
                continue
            if worker is None:
                worker = router.adopt_worker(entry.address)
            if worker.is_draining != entry.is_draining:
                router.set_draining(worker, entry.is_draining)
        for url, hashes in state["prefixes"]:
            worker = router.registry.find(url)
            if worker is not None and worker.role.is_prefill:
                router.planner.index.record(worker.id, hashes)

    def _apply_loads(self) -> None:
        """Add up what the living siblings have under way on each instance."""
        now_s = self._router.loop.time()
        for index, state in tuple(self._states.items()):
            if now_s - state.received_s > FORGET_AFTER_S:
                # Its counters stay in the metrics; its requests are gone.
                counted = None if state.metrics is None else state.metrics._replace(gauges={}, process={})
                self._states[index] = state._replace(loads={}, metrics=counted, online=SiblingLoad({}, {}))
        for worker in self._router.registry:
            loads = [state.loads.get(worker.url, (0, 0)) for state in self._states.values()]
            worker.sibling_in_flight = sum(load[0] for load in loads)
            worker.sibling_tokens = sum(load[1] for load in loads)

    def metric_snapshots(self) -> Sequence[tuple[int, MetricsSnapshot]]:
        others = [(index, state.metrics) for index, state in self._states.items() if state.metrics is not None]
        return others if self._inherited is None else [*others, (self._index, self._inherited)]

    def _own_metrics(self) -> tuple[Any, ...]:
        """What the processes of this number have counted; should this one be killed, the next finds it in a file."""
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
        """What earlier processes of this number had counted."""
        try:
            left = MetricsSnapshot(*orjson.loads(self._counts_file.read_bytes()))
        except (OSError, ValueError, TypeError):  # the first one, or one that was killed while it wrote
            return None
        return left._replace(gauges={}, process={})

    def online_loads(self) -> Sequence[SiblingLoad]:
        return [state.online for state in self._states.values()]
