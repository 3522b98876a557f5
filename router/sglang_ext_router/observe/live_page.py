"""`/ui`: the live page, and `/ui/stream`, its stream of server-sent events.

While no page is open nothing is gathered. While one is, this looks at the requests under way four times a second and at
the instances once, and asks these for their queues and what they did once a second, less often where they are many.
All pages get the same frames.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import time
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING

from sglang_ext import __version__
from sglang_ext.live.decide.messages import MIN_INTERVAL_S, InstanceRow, LoadRow, hello
from sglang_ext.live.decide.view import Counts, Elsewhere, LiveView, SeenInstance
from sglang_ext_router.control.controller import pool_of
from sglang_ext_router.control.pools import worker_state
from sglang_ext_router.decide.instance_pressure import pressure
from sglang_ext_router.decide.pool_move import MoveOutcome
from sglang_ext_router.http import replies
from sglang_ext_router.http.http1 import ClientConnection
from sglang_ext_router.http.request_parser import Request
from sglang_ext_router.instances.long_pool import pool_prompts, pool_spans
from sglang_ext_router.instances.work_reader import WorkReader
from sglang_ext_router.instances.workers import Worker
from sglang_ext_router.observe.access_log import AccessEntry, peer_of
from sglang_ext_router.request.flow import RequestFlow

if TYPE_CHECKING:
    from sglang_ext_router.router import Router

logger = logging.getLogger(__name__)

MAX_VIEWERS = 8
MAX_SCANNED = 1_000  # requests under way that are looked at for one frame
INSTANCES_EVERY = 4  # frames between two looks at the instances
LOOKED_AT_PER_FRAME = 64  # instances; of more, all are looked at less often
MIN_ASK_S = 1.0  # between two rounds of asking instances for their queues
ASKED_PER_S = 50  # instances; of more, each is asked less often
_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)
_STREAM_HEAD = b"content-type: text/event-stream\r\ncache-control: no-store\r\nx-accel-buffering: no\r\n"


def read_page() -> tuple[bytes, dict[str, str]]:
    """The page, and the headers that let it load nothing but itself and connect to nothing but its own router."""
    page = files("sglang_ext.live").joinpath("page.html").read_bytes()
    match = _SCRIPT.search(page)
    assert match is not None
    digest = base64.b64encode(hashlib.sha256(match[1]).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, {
        "content-type": "text/html; charset=utf-8",
        "cache-control": "no-cache",
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }


class Viewer:
    """One open stream; what serves its client connection."""

    def __init__(self, page: LivePage, connection: ClientConnection, is_http_11: bool) -> None:
        """Begin the stream: in chunks, or for HTTP/1.0 without, until the connection ends."""
        self._page = page
        self._connection = connection
        self._peer = peer_of(connection.transport)
        self._began_s = asyncio.get_running_loop().time()
        self._is_paused = False
        self._has_missed = False
        self._is_chunked = is_http_11
        coding = b"transfer-encoding: chunked\r\n" if is_http_11 else b""
        connection.write(replies.head(200, _STREAM_HEAD + coding + connection.reply_headers))

    def send(self, message: bytes) -> None:
        """Write a message; a client that does not keep up misses it."""
        if self._is_paused:
            self._has_missed = True
        else:
            event = b"data: %b\n\n" % message
            self._connection.write(replies.chunk(event) if self._is_chunked else event)

    def end(self) -> None:
        """The router stops: the stream is whole."""
        if self._is_chunked:
            self._connection.write(replies.CHUNKED_END)
        self._connection.finish(False)

    def on_client_gone(self) -> None:
        self._page.remove(self)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        if self._has_missed:
            self._has_missed = False
            self._page.restart(self)

    def access_entry(self, now_s: float) -> AccessEntry:
        """Its line in the access log."""
        return AccessEntry("/ui/stream", 200, "ok", now_s - self._began_s, client=self._peer, method="GET")


class LivePage:
    """The viewers of one router process, and what they are shown."""

    def __init__(self, router: Router, process_index: int) -> None:
        self._router = router
        self._process_index = process_index
        self._viewers: dict[Viewer, None] = {}
        self._timer: asyncio.Handle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._hello = b""
        self._ticks = 0
        # Of the controller's latest moves, by time and instance: the outcome that was sent
        self._moves: dict[tuple[float, str], MoveOutcome | None] = {}
        self._is_stopped = False

    # -- viewers ----------------------------------------------------------------------------------------

    def open_stream(self, connection: ClientConnection, request: Request) -> None:
        """Answer a request for the stream."""
        if request.method != b"GET":
            connection.respond_error(405, "use GET", extra=b"allow: GET\r\n")
        elif not self._router.access.may_view(request.header(b"authorization") or b""):
            is_admin = bool(self._router.config.admin_api_key)
            message = "missing or wrong admin API key" if is_admin else "missing or wrong API key"
            connection.respond_error(401, message, extra=b"www-authenticate: Bearer\r\n")
        elif len(self._viewers) >= MAX_VIEWERS or self._is_stopped:
            connection.respond_error(
                503, f"{MAX_VIEWERS} pages are open already, or the router stops", extra=b"retry-after: 5\r\n"
            )
        else:
            viewer = Viewer(self, connection, request.is_http_11)
            connection.call = viewer
            self._viewers[viewer] = None
            if self._router.services.view is None:
                self._begin()
            self.restart(viewer)

    def remove(self, viewer: Viewer) -> None:
        """A viewer has left; with the last one, gathering ends."""
        self._viewers.pop(viewer, None)
        self._log(viewer)
        if not self._viewers:
            self._end()

    def restart(self, viewer: Viewer) -> None:
        """Send a viewer that has come, or has missed messages, the hello, and then everything.

        What has ended or gone in what it missed is not sent again, and so cannot stay on its page.
        """
        view = self._router.services.view
        if view is not None:
            viewer.send(self._hello)
            view.resend()
            work_reader = self._router.controller.monitor.work_reader
            if work_reader is not None:
                work_reader.restart()

    def stop(self) -> None:
        """End all streams, and open none any more."""
        self._is_stopped = True
        viewers, self._viewers = tuple(self._viewers), {}
        for viewer in viewers:
            viewer.end()
            self._log(viewer)
        self._end()

    def _log(self, viewer: Viewer) -> None:
        log = self._router.services.access_log
        if log is not None:
            log.add(viewer.access_entry(self._router.loop.time()))

    # -- gathering --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        router = self._router
        config = router.config
        objectives = {"short": config.controller_short_slo_secs, "long": config.controller_long_slo_secs}
        self._ticks = 0
        self._moves = {(move.started_at_s, move.url): move.outcome for move in router.controller.moves}
        view = router.services.view = LiveView(router.loop.time(), objectives)
        router.controller.monitor.work_reader = WorkReader(router.loop.time, view.add_spans)
        self._hello = hello(
            source="router",
            name=f"{config.host}:{config.port}",
            began_unix_s=time.time(),
            interval_s=MIN_INTERVAL_S,
            boundary_tokens=router.length_boundary_tokens(list(router.registry.models.values())),
            notes=self._notes(),
        )
        self._asking = router.loop.create_task(self._ask())
        self._timer = router.loop.call_soon(self._tick)  # behind the first viewer's hello

    def _end(self) -> None:
        self._router.services.view = None
        self._router.controller.monitor.work_reader = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def _notes(self) -> list[str]:
        config, peers = self._router.config, self._router.siblings.peer_counts()
        notes = [
            f"Reported by sglang-ext {__version__}. A router sees a prefill end when its KV has been taken: queueing, "
            "computing and transfer are one phase here.",
        ]
        if config.processes > 1:
            notes.append(
                f"This is process {self._process_index + 1} of {config.processes} of the router: requests on their "
                "way, phases and latency are of the requests that it serves. How many are in flight and have ended, "
                "and loads of instances, are of all processes; of the others as of a second ago."
            )
        if peers is not None:
            notes.append(
                f"This router is one of a group of {1 + peers.found}: requests on their way, phases, latency and what "
                "has ended are of the requests that it serves. How many are in flight, and loads of instances, are of "
                "all routers."
            )
        notes.append(
            "Lanes have what prefill instances report of their batches, parked prefills and KV on its way, up to a "
            f"second late; later where there are more than {ASKED_PER_S}."
        )
        if self._router.long_pool is None:
            notes.append("No coordinator is known (--coordinator-url): what a long pool shares is not shown.")
        return notes

    def _tick(self) -> None:
        """Send the viewers a frame of what is under way now."""
        loop = self._router.loop
        self._timer = loop.call_later(MIN_INTERVAL_S, self._tick)
        view = self._router.services.view
        if view is None:
            return
        now_s = loop.time()
        if self._ticks % max(INSTANCES_EVERY, -(-len(self._router.registry) // LOOKED_AT_PER_FRAME)) == 0:
            view.take_instances(self._instances(now_s), now_s)
        if self._ticks % INSTANCES_EVERY == 0:
            view.take_elsewhere(self._elsewhere())
            self._report_moves(view, now_s)
            self._report_long_pool(view)
            work_reader = self._router.controller.monitor.work_reader
            if work_reader is not None:
                view.take_lanes(work_reader.reporting, work_reader.silent, work_reader.missed)
        self._ticks += 1
        counts = Counts(self._router.requests_queued, len(self._router.running), self._ended())
        running = tuple(self._router.running)
        step = -(-len(running) // MAX_SCANNED) or 1
        if step > 1:  # the followed requests that the part below leaves out
            view.follow((flow, flow.seen()) for flow in view.followed if isinstance(flow, RequestFlow))
        view.take_in_flight(((flow, flow.seen()) for flow in running[::step]), counts, now_s)
        frame = view.frame(now_s)
        if frame is not None:
            for viewer in tuple(self._viewers):
                viewer.send(frame)

    def _ended(self) -> Mapping[str, tuple[int, int]]:
        """Generation requests answered whole, and the others, by class."""
        ended = {"short": [0, 0], "long": [0, 0], "none": [0, 0]}
        for (_, length_class, _, outcome), count in self._router.services.metrics.requests.items():
            ended[length_class][outcome != "ok"] += count
        return {"unknown" if name == "none" else name: (answered, failed) for name, (answered, failed) in ended.items()}

    def _elsewhere(self) -> Elsewhere:
        """Return what the other routers and processes have reported; processes of one router report counts, too."""
        siblings = self._router.siblings
        ended: dict[int, tuple[int, int]] = {}
        for number, snapshot in siblings.metric_snapshots():
            counts = [0, 0]
            for (_, _, _, outcome), count in snapshot.counters.get("requests", ()):
                counts[outcome != "ok"] += int(count)
            ended[number] = (counts[0], counts[1])
        in_flight = {number: demand.running + demand.waiting for number, demand in siblings.demands().items()}
        return Elsewhere(in_flight, ended if siblings.peer_counts() is None else None)

    def _instances(self, now_s: float) -> Iterator[SeenInstance]:
        return (self._instance(worker) for worker in self._router.registry)

    def _instance(self, worker: Worker) -> SeenInstance:
        controller = self._router.controller
        report = controller.monitor.reports.get(worker.id)
        pool = pool_of(worker)
        pending = worker.virtual_tokens
        if worker.role.computes_prompts:
            pending = worker.pending_tokens + worker.foreign_tokens + worker.sibling_tokens
        has_kv = worker.has_info and worker.kv_capacity_tokens > 0
        return SeenInstance(
            InstanceRow(
                0,
                worker.name,
                worker.role.value,
                worker.model,
                worker_state(worker),
                None if report is None else report.mode.value,
                "" if worker.is_ready else worker.last_error,
            ),
            LoadRow(
                0,
                worker.in_flight + worker.sibling_in_flight,
                pending,
                None if report is None else report.short.requests,
                None if report is None else report.long.requests,
                None if report is None else report.parked,
                None if report is None else report.short.utilisation,
                None if report is None else report.long.utilisation,
                None if report is None or pool is None else pressure(report.signals(pool), controller.settings),
                max(0.0, 1.0 - worker.reported_free_kv_tokens / worker.kv_capacity_tokens) if has_kv else None,
                worker.reported_running if worker.has_info else None,
            ),
        )

    def _report_moves(self, view: LiveView, now_s: float) -> None:
        controller = self._router.controller
        moves = [*controller.moves, *([] if controller.current is None else [controller.current])]
        for move in moves:
            key = move.started_at_s, move.url
            if key in self._moves and self._moves[key] == move.outcome:
                continue
            name = move.url.partition("://")[2]
            what = "is being moved" if move.outcome is None else f"{move.outcome}:"
            detail = f", {move.detail}" if move.detail else ""
            text = f"{name} {what} from {move.source} to {move.target} ({move.reason}{detail})"
            view.record_event(now_s, "move", view.number_of(name), text)
        self._moves = {(move.started_at_s, move.url): move.outcome for move in moves}

    def _report_long_pool(self, view: LiveView) -> None:
        long_pool = self._router.long_pool
        if long_pool is None or long_pool.clock_offset_s is None:
            return
        view.take_prompts(pool_prompts(long_pool.answer, long_pool.clock_offset_s))
        view.add_spans(pool_spans(long_pool.answer, long_pool.clock_offset_s))

    async def _ask(self) -> None:
        """Ask the instances for their queues, as long as there is a viewer."""
        router = self._router
        monitor = router.controller.monitor
        while True:
            prefills = sum(worker.role.is_prefill for worker in router.registry)
            interval_s = max(MIN_ASK_S, prefills / ASKED_PER_S)
            if monitor.work_reader is not None:
                monitor.work_reader.share_out(prefills, interval_s)
            if monitor.refreshed_s is None or router.loop.time() - monitor.refreshed_s >= interval_s:
                await monitor.refresh()
            await asyncio.sleep(interval_s)
