"""A bootstrap room names one request: each of n samples gets its own, and a second request with one is refused.

Stock SGLang expands n samples after it has sent one warm-up request, and every one of them carries the same
bootstrap room. Here a request with batch size B and n samples becomes a plain batch of B*n requests in
prompt-major order, with rooms `room`, `room + 1`, … `room + B*n - 1`. Prefill and decode expand alike, so the
sender of the request reserves a range of rooms and sends its first.

Refused, too, is what ends a stock engine for all, token ids that the model does not have, and what `request_hints` has
not seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode, prepare_abort

from sglang_ext.engine.hooks.continuations import begin_with_output, check_output_ids
from sglang_ext.engine.hooks.scoring import excess_top_logprobs, record_wanted_tokens
from sglang_ext.engine.request_traces import begin_trace
from sglang_ext.laps.sglang.request_hints import check_hints


def normalize_batch_and_arguments(stock: Callable[[Any], None], request: Any) -> None:
    """AROUND `GenerateReqInput.normalize_batch_and_arguments()`: normalises `request` in place.

    Raises ValueError (answered with 400) for rooms that cannot be distinguished.
    """
    rooms, rids = request.bootstrap_room, request.rid
    if isinstance(rooms, list):
        check_room_list(rooms)
    stock(request)
    samples = request.parallel_sample_num
    if rooms is None or samples == 1:
        return
    if isinstance(rooms, list):
        raise ValueError("bootstrap_room must be one integer, the first of a range, when n is larger than 1")
    spread_samples(request, rids)


def spread_samples(request: Any, rids: str | list[str] | None) -> None:
    """Turn a normalised request with n > 1 into a plain batch, in place.

    `rids` are the request ids as the client gave them: None, one for the whole request, or one per prompt.
    """
    prompts, samples = request.batch_size, request.parallel_sample_num
    if isinstance(rids, list):
        # A derived id keeps the client's as a prefix, so that aborting that one aborts every sample.
        request.rid = [f"{rid}_{sample}" for rid in rids for sample in range(samples)]
    # SGLang lays expanded inputs out sample by sample, but answers prompt by prompt.
    stock_order = [sample * prompts + prompt for prompt in range(prompts) for sample in range(samples)]
    items = [request[position] for position in stock_order]
    for position, item in enumerate(items):
        item.rid = request.rid[position]
        item.bootstrap_room = request.bootstrap_room[position]
    # `request[i]` returns what this cache holds, wherever SGLang asks for an item of the batch.
    request.__dict__["_sub_obj_cache"] = dict(enumerate(items))
    request.batch_size = prompts * samples
    request.parallel_sample_num = 1


def check_room_list(rooms: list[int | None]) -> None:
    """Raise ValueError when a room occurs twice."""
    given = [room for room in rooms if room is not None]
    if len(set(given)) != len(given):
        raise ValueError("bootstrap_room names the same room twice")


logger = logging.getLogger(__name__)


def add_request_to_queue(stock: Callable[..., None], scheduler: Any, request: Any, is_retracted: bool = False) -> None:
    """AROUND `Scheduler._add_request_to_queue(req, is_retracted)`.

    Refuses (400) a request whose room another live request uses, and a request with more alternatives than fit into
    what prefill sends to decode. Each rank sees the same queues and decides alike.
    """
    message = None if is_retracted else excess_top_logprobs(scheduler, request)
    if message is None and not is_retracted and room_in_use(scheduler, request.bootstrap_room):
        message = f"bootstrap room {request.bootstrap_room} is already in use by another request"
    if message is None:
        record_wanted_tokens(request)
        if not is_retracted:
            begin_with_output(scheduler, request)
        stock(scheduler, request, is_retracted)
        begin_trace(request)
        return
    logger.warning("%s (request %s)", message, request.rid)
    prepare_abort(request, message, status_code=HTTPStatus.BAD_REQUEST)
    # The cache keeps state of a request from its arrival on.
    scheduler._release_aborted_request(request)
    scheduler.output_streamer.stream_output([request], request.return_logprob)


def room_in_use(scheduler: Any, room: int | None) -> bool:
    """Return whether a request that this scheduler holds has this room."""
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
    # Requests that a scheduler of this project keeps.
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


def validate_one_request(stock: Callable[..., None], manager: Any, request: Any, input_ids: Any) -> None:
    """AROUND `TokenizerManager._validate_one_request(obj, input_ids)`: ValueError (400) for ids that are not, and for
    deadlines and priorities that are none.

    A prompt has tokens; token ids, those of stops too, are of the vocabulary. At others the stock engine ends: they are
    errors of the forward pass, or of the sampler together with `min_new_tokens`, on a GPU such that nothing recovers
    from.
    """
    size = manager.model_config.vocab_size
    if input_ids is not None and not len(input_ids) and getattr(request, "input_embeds", None) is None:
        raise ValueError("the prompt has no tokens")
    if getattr(request, "input_ids", None) is not None:
        check_token_ids(input_ids, size, "the prompt")
    given = getattr(request, "sampling_params", None)
    parameters = given if isinstance(given, dict) else {}
    custom_params = parameters.get("custom_params")
    check_hints(custom_params)
    output_ids = check_output_ids(manager, request, custom_params, 0 if input_ids is None else len(input_ids))
    if output_ids:
        check_token_ids(output_ids, size, "custom_params.sglang_ext_output_ids")
    stop_ids = parameters.get("stop_token_ids")
    if stop_ids:
        if not all(type(token) is int for token in stop_ids):
            raise ValueError("stop_token_ids must be a list of integers")
        check_token_ids(stop_ids, size, "stop_token_ids")
    stock(manager, request, input_ids)


def check_token_ids(ids: Any, vocabulary_size: int, where: str) -> None:
    """ValueError for an id outside of `[0, vocabulary_size)`; `ids` is not empty, `where` says what they belong to."""
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= vocabulary_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"the token id {wrong} in {where} is not one of the model's 0 to {vocabulary_size - 1}")
