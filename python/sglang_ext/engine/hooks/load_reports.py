"""AFTER `Scheduler.init_load_publisher`: an instance publishes its load wherever routers may connect to it.

SGLang publishes its load only together with KV events and on all addresses, and leaves out what a decode instance waits
for. Here it is published without events, too, at the instance's own address, and a second message goes before each of
SGLang's: the KV that decode waits for and, once a second, the queue of each length class as `GET /laps` has it. Where
SGLang's own argument asks for a socket, that one is left as other readers expect it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from sglang_ext.engine.options import options_from_environment

SUPPLEMENT_TOPIC = b"sglang_ext"  # as in sglang_ext_router.instances.load_events
STEP_INTERVAL_S = 0.2  # between reports while nothing but decode steps happens
QUEUES_INTERVAL_S = 1.0
_encode = msgspec.msgpack.Encoder().encode
logger = logging.getLogger(__name__)


def publish(output: None, scheduler: Any, *arguments: Any, **options: Any) -> None:
    """Open the socket that was asked for, where SGLang has none."""
    publisher = scheduler.load_publisher
    own = options_from_environment(os.environ)
    events = None if own is None else own.kv_events
    if events is None or not events.load_port or publisher.enable:
        return
    _open(publisher, events.host, events.load_port)
    if publisher.enable:
        publisher.publish_load_stat = _LoadReports(scheduler, publisher).publish


def _open(publisher: Any, host: str, port: int) -> None:
    from sglang.srt.disaggregation.kv_events import is_kv_publisher_rank, select_kv_publisher_dp_rank
    from sglang.srt.managers.scheduler_components import load_publisher
    from sglang.srt.runtime_context import get_parallel

    if not is_kv_publisher_rank("{}"):  # one for each data-parallel rank
        return
    parallel = get_parallel()
    rank = select_kv_publisher_dp_rank(parallel.attn_dp_size, parallel.attn_dp_rank, parallel.dp_rank)
    endpoint = f"tcp://{host}:{port + rank}"
    try:
        publisher._socket = load_publisher._open_pub_socket(endpoint)
        publisher._rank = rank
    except OSError as error:
        logger.warning("load is not published at %s: %s", endpoint, error)


class _LoadReports:
    """Stands before SGLang's publisher of one scheduler."""

    def __init__(self, scheduler: Any, publisher: Any) -> None:
        self._scheduler = scheduler
        self._publisher = publisher
        self._publish = publisher.publish_load_stat
        self._published_s = float("-inf")
        self._sent: tuple[int, int | None] | None = None  # awaited tokens, and the mode's generation
        self._queues_s = float("-inf")
        self._number = 0

    def publish(self, load_provider: Callable[[], Any], force: bool = False, snapshot: Any = None) -> None:
        """Publish as `SchedulerLoadPublisher.publish_load_stat` does, which counts calls where this counts time."""
        now_s = time.monotonic()
        if not force and now_s - self._published_s < STEP_INTERVAL_S:
            return
        self._published_s = now_s

        def provide() -> Any:
            load = load_provider() if snapshot is None else snapshot
            self._send(load, now_s)
            return load

        self._publish(provide, True)

    def _send(self, load: Any, now_s: float) -> None:
        """Send the supplement, if it is another one than before, or the last one is old."""
        laps = getattr(self._scheduler, "_laps", None)
        laps = laps if laps is not None and laps.agreement.is_deciding else None
        awaiting_tokens = max(0, load.num_total_tokens - load.num_active_tokens)
        state = awaiting_tokens, None if laps is None else laps.generation
        is_due = now_s - self._queues_s >= QUEUES_INTERVAL_S or self._sent is None or state[1] != self._sent[1]
        if state == self._sent and not is_due:
            return
        self._sent = state
        supplement: dict[str, object] = {"awaiting_tokens": awaiting_tokens}
        if is_due:
            self._queues_s = now_s
            if laps is not None:
                supplement["queues"] = self._scheduler.queue_status()
        parts = SUPPLEMENT_TOPIC, self._number.to_bytes(8, "big"), _encode(supplement)
        self._number += 1
        self._publisher._socket.send_multipart(parts)
