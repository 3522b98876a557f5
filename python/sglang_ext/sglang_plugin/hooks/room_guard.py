"""A bootstrap room names one request; a second request with a room in use is refused, not run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode, prepare_abort

logger = logging.getLogger(__name__)


def add_request_to_queue(stock: Callable[..., None], scheduler: Any, request: Any, is_retracted: bool = False) -> None:
    """AROUND `Scheduler._add_request_to_queue(req, is_retracted)`.

    Refuses (400) a request whose room another live request uses. Each rank sees the same queues and decides
    alike.
    """
    if is_retracted or not room_in_use(scheduler, request.bootstrap_room):
        stock(scheduler, request, is_retracted)
        return
    message = f"bootstrap room {request.bootstrap_room} is already in use by another request"
    logger.warning("%s (request %s)", message, request.rid)
    prepare_abort(request, message, status_code=HTTPStatus.BAD_REQUEST)
    # Newer versions keep cache-side state from arrival on.
    release = getattr(scheduler, "_release_aborted_request", None)
    if release is not None:
        release(request)
    scheduler.output_streamer.stream_output([request], request.return_logprob)


def room_in_use(scheduler: Any, room: int | None) -> bool:
    """Whether a request that this scheduler holds has this room."""
    return room is not None and any(
        request.bootstrap_room == room and not request.finished() for request in live_requests(scheduler)
    )


def live_requests(scheduler: Any) -> Iterator[Any]:
    """Every request between arrival and release, in whichever queue it is; some come twice."""
    yield from scheduler.waiting_queue
    yield from scheduler.grammar_manager.grammar_queue
    for batch in (scheduler.running_batch, scheduler.last_batch):
        if batch is not None:
            yield from batch.reqs
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req
    # Those that a scheduler of this project keeps.
    yield from getattr(scheduler, "held_requests", tuple)()
    if scheduler.disaggregation_mode == DisaggregationMode.PREFILL:
        yield from scheduler.disagg_prefill_bootstrap_queue.queue
        yield from scheduler.disagg_prefill_inflight_queue
    elif scheduler.disaggregation_mode == DisaggregationMode.DECODE:
        for held in scheduler.disagg_decode_prealloc_queue.queue:
            yield held.req
        for held in scheduler.disagg_decode_transfer_queue.queue:
            yield held.req
        yield from scheduler.disagg_decode_prealloc_queue.retracted_queue
