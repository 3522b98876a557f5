"""n > 1 in prefill-decode disaggregation: each sample becomes an ordinary request with a room of its own.

Stock SGLang expands n samples after it has sent one warm-up request, and every one of them carries the same
bootstrap room. Here a request with batch size B and n samples becomes a plain batch of B*n requests in
prompt-major order, with rooms `room`, `room + 1`, … `room + B*n - 1`. Prefill and decode expand alike, so the
sender of the request reserves a range of rooms and sends its first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def normalize_batch_and_arguments(stock: Callable[[Any], None], request: Any) -> None:
    """AROUND `GenerateReqInput.normalize_batch_and_arguments()`: normalises `request` in place.

    Raises ValueError (answered with 400) for rooms that cannot be told apart.
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
