"""The state that processes of a router, and several routers, send each other, and what each of them makes of it.

State is sent repeatedly: members whole, loads as they change, prefixes once. The newest change of an instance wins, and
a sender that falls silent is forgotten after a while. Processes of one router also send each other what they have
counted, so that each shows the sums; the next process of a number finds in a file what a killed one had counted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.decide.admission import Demand, fair_shares, limit_of
from sglang_ext_router.decide.circuit_breaker import CircuitState
from sglang_ext_router.instances.online_load import SiblingLoad
from sglang_ext_router.observe.metrics import MetricsSnapshot, read_snapshot

if TYPE_CHECKING:
    from sglang_ext_router.instances.workers import Worker
    from sglang_ext_router.router import Router

# As JSON: url, counter, origin, role or null when removed, bootstrap port or null, draining, revision or null, topology
# and, where there is one, the range of tokens.
WireEntry = (
    tuple[str, int, int, str | None, int | None, bool, str | None, str]
    | tuple[str, int, int, str | None, int | None, bool, str | None, str, tuple[int, int]]
)
logger = logging.getLogger(__name__)
REMEMBER_REMOVED_S = 3600.0
MAX_COUNTER = 1 << 53  # of changes of one instance: far more than there can be, and one more can be sent, too
MAX_SHARED_BLOCKS = 4096  # prefix blocks per message; further blocks are not sent
METRICS_INTERVAL_S = 1.0  # between two messages with the counters of a process


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
        self._removed_since_s: dict[str, tuple[Entry, float]] = {}
        self._untold: set[str] = set()  # removals that are remembered, but no longer sent

    def change(self, url: str, address: WorkerAddress | None, is_draining: bool = False) -> None:
        """Note a change made here."""
        known = self._entries.get(url)
        self._entries[url] = Entry(known.counter + 1 if known else 1, self._origin, address, is_draining)

    def merge(self, wire: Iterable[WireEntry]) -> list[tuple[str, Entry]]:
        """Take over newer entries of a sibling; the ones that changed here.

        ValueError or TypeError, and nothing is taken over, where one cannot be read, as of another version.
        """
        changed: list[tuple[str, Entry]] = []
        for url, entry in [_read_entry(*wire_entry) for wire_entry in wire]:
            known = self._entries.get(url)
            if known is not None and entry.version <= known.version:
                continue
            self._entries[url] = entry
            if known is None or (known.address, known.is_draining) != (entry.address, entry.is_draining):
                changed.append((url, entry))
        return changed

    def expire(self, now_s: float) -> None:
        """Forget removals that all have learned of; to be called now and then.

        They are sent for `REMEMBER_REMOVED_S`, and remembered for twice as long: else each would be learned again from
        a peer that forgets it a moment later. A sender that was cut off for longer brings back what was removed
        meanwhile.
        """
        since_s: dict[str, tuple[Entry, float]] = {}
        for url, entry in self._entries.items():
            if entry.address is None:
                known, first_s = self._removed_since_s.get(url, (entry, now_s))
                since_s[url] = (entry, first_s if known == entry else now_s)
        self._removed_since_s = since_s
        self._untold = {url for url, (_, first_s) in since_s.items() if now_s - first_s > REMEMBER_REMOVED_S}
        for url in self._untold:
            if now_s - since_s[url][1] > 2 * REMEMBER_REMOVED_S:
                del self._entries[url]

    def address(self, url: str) -> WorkerAddress | None:
        entry = self._entries.get(url)
        return None if entry is None else entry.address

    def wire(self) -> list[WireEntry]:
        """Everything, for siblings, but old removals and the command line's own entries that are unchanged."""
        return [
            _wire_entry(url, entry)
            for url, entry in self._entries.items()
            if entry.counter and not (entry.address is None and url in self._untold)
        ]


def _wire_entry(url: str, entry: Entry) -> WireEntry:
    address = entry.address
    if address is None:
        return url, entry.counter, entry.origin, None, None, entry.is_draining, None, ""
    role, port = address.role.value, address.bootstrap_port
    fields = url, entry.counter, entry.origin, role, port, entry.is_draining, address.revision, address.topology
    return fields if address.token_range is None else (*fields, address.token_range)


def _read_entry(
    url: str,
    counter: int,
    origin: int,
    role: str | None,
    port: int | None,
    is_draining: bool,
    revision: str | None = None,
    topology: str = "",
    token_range: Sequence[int] | None = None,
) -> tuple[str, Entry]:
    if type(url) is not str or not 0 <= _whole(counter) < MAX_COUNTER:
        raise ValueError(f"change {counter!r} of {url!r}")
    if not isinstance(revision, str | None) or type(topology) is not str:
        raise TypeError(f"{revision!r} is no revision, or {topology!r} no topology")
    bootstrap_port = None if port is None else _whole(port)
    ends = None if token_range is None else (_whole(token_range[0]), _whole(token_range[1]))
    address = None if role is None else WorkerAddress(url, Role(role), bootstrap_port, revision, topology, ends)
    return url, Entry(counter, _whole(origin), address, bool(is_draining))


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


Loads = dict[str, tuple[int, int]]  # by address: requests under way, tokens promised
NO_LOAD = (0, 0)


class PeerCounts(NamedTuple):
    """Other routers of the group, as one of them sees it."""

    found: int  # by options or the headless Service
    connected: int  # that this one sends its state to
    received: int  # whose state came recently
    skipped_messages: int  # that a peer did not get, as it did not read; since the start


class SiblingState(NamedTuple):
    """The latest state of one sender."""

    received_s: float
    loads: Loads
    online: SiblingLoad
    demand: Demand
    open_circuits: frozenset[str]  # addresses of instances


class SharedState:
    """One process's part: what it sends and what it has received.

    `Peers` carries the messages; without it this is the state of a router of one process, which sends nothing.
    """

    def __init__(self, origin: int, config: RouterConfig, counts_file: Path | None = None) -> None:
        """`counts_file` is for processes of one router: it holds the counters of the processes of this number."""
        self.origin = self._origin = origin
        self._counts_file = counts_file
        self._metrics_due_s = 0.0
        self._limit = config.max_concurrent_requests
        # Of each other router: when its state was received, and its largest share since.
        self._granted: dict[int, tuple[float, int]] = {}
        self._table = MembershipTable(origin, config.workers)
        self._states: dict[int, SiblingState] = {}
        # Counters of the other processes, by number; under this one's own number, those of its predecessors.
        self._metrics: dict[int, MetricsSnapshot] = {}
        self._sums: Loads = {}  # over those states
        self._prefixes: list[tuple[str, list[int]]] = []
        self._prefix_blocks = 0
        self._router: Router

    async def start(self, router: Router) -> None:
        """Share the state of this router from now on."""
        self._router = router
        if self._counts_file is not None:
            self._inherit(self._counts_file)

    async def stop(self) -> None:
        """Share nothing any more."""

    # -- sending ----------------------------------------------------------------------------------------

    def send_added(self, address: WorkerAddress) -> None:
        self._table.change(address.url, address)
        self._send_state()

    def send_removed(self, url: str) -> None:
        self._table.change(url, None)
        self._send_state()

    def send_draining(self, worker: Worker, is_draining: bool) -> None:
        # By its own address: the table has none of the cluster's instances, and the old role of a moved one.
        self._table.change(worker.url, worker.address(), is_draining)
        self._send_state()

    def send_gone(self, url: str) -> None:
        """The cluster no longer has this instance: manual changes of it are void."""
        if self._table.address(url) is not None:
            self.send_removed(url)

    def send_prefix(self, url: str, hashes: Sequence[int]) -> None:
        if self._prefix_blocks + len(hashes) <= MAX_SHARED_BLOCKS:
            self._prefixes.append((url, list(hashes)))
            self._prefix_blocks += len(hashes)

    def _send_state(self) -> None:
        """Send the state now, where there is someone to send it to."""

    def _next_message(self) -> dict[str, Any]:
        """Return the message to send now; prefixes are sent once."""
        router = self._router
        prefixes, self._prefixes, self._prefix_blocks = self._prefixes, [], 0
        now_s = router.loop.time()
        message = {
            "index": self._origin,
            "members": self._table.wire(),
            "loads": {
                worker.url: (worker.in_flight, worker.pending_tokens + worker.reserved_tokens)
                for worker in router.registry
                if worker.in_flight
            },
            "prefixes": prefixes,
            "online": tuple(router.online_load()),
            "demand": tuple(router.demand()),
            "circuits": [
                worker.url
                for worker in router.registry
                if worker.id in router.registry.suspects and worker.breaker.state(now_s) is not CircuitState.CLOSED
            ],
        }
        if router.tenants is not None:
            message["tenants"] = router.tenants.message(router.admission, now_s)
        if self._counts_file is not None and now_s >= self._metrics_due_s:
            self._metrics_due_s = now_s + METRICS_INTERVAL_S
            message["metrics"] = self._own_metrics(self._counts_file)
        return message

    def _own_metrics(self, counts_file: Path) -> tuple[Any, ...]:
        """Return what the processes of this number have counted, and leave it to the next one in the file."""
        snapshot = self._router.metrics_snapshot()
        if self._origin in self._metrics:
            snapshot = snapshot.with_counts_of(self._metrics[self._origin])
        wire = tuple(snapshot)
        try:
            counts_file.write_bytes(orjson.dumps(wire))
        except OSError as error:
            logger.warning("counters will be lost should this process be killed: %s", error)
        return wire

    def _inherit(self, counts_file: Path) -> None:
        """Take over what earlier processes of this number had counted."""
        # There is no file at first, and none of use after a kill during a write, or from another version.
        with suppress(OSError, ValueError, TypeError):
            left = read_snapshot(orjson.loads(counts_file.read_bytes()))
            self._router.metrics_snapshot().with_counts_of(left)
            self._metrics[self._origin] = left._replace(gauges={}, process={})

    # -- receiving --------------------------------------------------------------------------------------

    def _take(self, message: Mapping[str, Any]) -> None:
        """Make another process's message one's own: all of it, or nothing where a part of it cannot be read."""
        router = self._router
        index = _whole(message["index"])
        known = self._states.get(index)
        in_flight, waits_s = message["online"]
        running, waiting = message["demand"]
        loads = {url: (_whole(load[0]), _whole(load[1])) for url, load in message["loads"].items()}
        state = SiblingState(
            router.loop.time(),
            _changed(known.loads, loads) if known is not None and message.get("only_changes") else loads,
            SiblingLoad(
                {
                    model: {name: _whole(count) for name, count in of_model.items()}
                    for model, of_model in in_flight.items()
                },
                {url: float(wait_s) for url, wait_s in waits_s.items()},
            ),
            Demand(_whole(running), _whole(waiting)),
            frozenset(_text(url) for url in message["circuits"]),
        )
        metrics = read_snapshot(message["metrics"]) if "metrics" in message else None
        prefixes = read_prefixes(message["prefixes"])
        if router.tenants is not None and "tenants" in message:
            router.tenants.take(index, message["tenants"])
        changed = self._table.merge(message["members"])
        self._replace_state(index, state)
        if metrics is not None:
            self._metrics[index] = metrics
        for url, entry in changed:
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
        self._learn_prefixes(prefixes)

    def _learn_prefixes(self, prefixes: Iterable[tuple[str, Sequence[int]]]) -> None:
        router = self._router
        for place, hashes in prefixes:
            url, _, rank = place.partition("#")  # of an instance with several
            worker = router.registry.find(url)
            if worker is not None and worker.keeps_prefixes:
                router.planner.prefixes.record_sent(worker, hashes, int(rank) if rank.isdecimal() else None)

    def _replace_state(self, index: int, state: SiblingState | None) -> None:
        known = self._states.get(index)
        old = {} if known is None else known.loads
        new = {} if state is None else state.loads
        for url in old.keys() | new.keys():
            before, after = old.get(url, NO_LOAD), new.get(url, NO_LOAD)
            if before != after:
                in_flight, tokens = self._sums.get(url, NO_LOAD)
                total = (in_flight + after[0] - before[0], tokens + after[1] - before[1])
                if total == NO_LOAD:
                    self._sums.pop(url, None)
                else:
                    self._sums[url] = total
        if state is None:
            self._states.pop(index, None)
        else:
            self._states[index] = state

    def _forget(self, index: int) -> None:
        """Forget a sender, but not what a process has counted: its successor has the same number and counts on."""
        self._replace_state(index, None)
        if index in self._metrics:
            self._metrics[index] = self._metrics[index]._replace(gauges={}, process={})

    def _apply_states(self, forget_after_s: float) -> None:
        """Make use of what the living ones have: loads and circuits of the instances, their share of the limit."""
        router = self._router
        now_s = router.loop.time()
        for index, state in tuple(self._states.items()):
            if now_s - state.received_s > forget_after_s:
                self._forget(index)
        router.planner.router_count = 1 + len(self._states)
        if router.tenants is not None:
            router.tenants.share(self._states.keys(), router.admission, now_s)
        suspected: set[str] = set()
        for state in self._states.values():
            suspected |= state.open_circuits
        for worker in router.registry:
            worker.sibling_in_flight, worker.sibling_tokens = self._sums.get(worker.url, NO_LOAD)
            worker.breaker.is_suspected = worker.url in suspected
        if self._limit:
            demands = {index: state.demand for index, state in self._states.items()}
            demands[self._origin] = router.demand()
            shares = fair_shares(self._limit, demands)
            granted: dict[int, tuple[float, int]] = {}
            for index, state in self._states.items():
                received_s, places = self._granted.get(index, (0.0, 0))
                granted[index] = (state.received_s, max(shares[index], places if received_s == state.received_s else 0))
            self._granted = granted
            most = {index: places for index, (_, places) in granted.items()}
            router.limit_requests(limit_of(self._origin, self._limit, demands, most))

    def peer_counts(self) -> PeerCounts | None:
        """Return the other routers of the group; None without a group."""
        return None

    def metric_snapshots(self) -> Sequence[tuple[int, MetricsSnapshot]]:
        """Return what the other processes have counted, by their number, and what this one's predecessors had."""
        return tuple(self._metrics.items())

    def demands(self) -> Mapping[int, Demand]:
        """Return what each of the other processes or routers has to serve, by its number, as it last sent."""
        return {index: state.demand for index, state in self._states.items()}

    def online_loads(self) -> Sequence[SiblingLoad]:
        return [state.online for state in self._states.values()]


def _changed(loads: Loads, changes: Loads) -> Loads:
    merged = {**loads, **changes}
    for url, load in changes.items():
        if load == NO_LOAD:
            del merged[url]
    return merged


def read_prefixes(wire: Iterable[tuple[str, Sequence[int]]]) -> list[tuple[str, list[int]]]:
    """Addresses, and hashes of what went there; TypeError or ValueError where they are something else."""
    return [(_text(url), [_whole(block_hash) for block_hash in hashes]) for url, hashes in wire]


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is no text")
    return value
