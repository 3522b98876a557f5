"""Decode's slots for a long prompt are taken when its turn in prefill is near, not when it arrives.

Decode (`announce`): its prompts of at least `TransferOptions.late_slots_tokens` tokens are known to prefill, without
slots. Prefill (`call_for_slots`): in each round, calls for those whose turn is near (`transfer/decide/slot_calls.py`).
The first rank of an instance decides for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from sglang_ext.transfer.decide.slot_calls import LatePrompt, QueuedWork
from sglang_ext.transfer.sglang.receiver import HandshakeKVReceiver
from sglang_ext.transfer.sglang.sender import HandshakeKVSender


def announce(stock: Callable[..., None], queue: Any, decode_request: Any, prefill_dp_rank: int) -> None:
    """AROUND `DecodePreallocQueue._init_receiver(decode_req, prefill_dp_rank)`: it knows prefill's ranks then."""
    stock(queue, decode_request, prefill_dp_rank)
    receiver = decode_request.kv_receiver
    if isinstance(receiver, HandshakeKVReceiver):
        receiver.forward_stream = queue.scheduler.forward_stream
        receiver.announce(len(decode_request.req.origin_input_ids))


def call_for_slots(stock: Callable[..., list[Any]], queue: Any) -> list[Any]:
    """AROUND `PrefillBootstrapQueue.pop_bootstrapped()`, once in each round of the scheduler."""
    manager = queue.kv_manager
    calls = getattr(manager, "slot_calls", None)
    if calls is not None and queue.queue:
        late = list(_late(queue))
        if late:
            for room in calls.due(_work(queue.scheduler), late, time.monotonic()):
                manager.endpoint.call_for_slots(room)
    return stock(queue)


def late_tokens(queue: Any) -> int:
    """Tokens of prompts that wait for their turn in this `PrefillBootstrapQueue`, since decode has no slots for them
    yet, and not in SGLang's waiting queue."""
    return sum(prompt.prompt_tokens for prompt in _late(queue))


def _late(queue: Any) -> Iterator[LatePrompt]:
    for request in queue.queue:
        sender = request.disagg_kv_sender
        if isinstance(sender, HandshakeKVSender) and sender.waits_for_slots:
            yield LatePrompt(sender.bootstrap_room, _arrival_s(request), len(request.origin_input_ids))


def _work(scheduler: Any) -> Iterator[QueuedWork]:
    requests = [*scheduler.waiting_queue, *getattr(scheduler, "held_requests", tuple)()]
    if scheduler.chunked_req is not None:
        requests.append(scheduler.chunked_req)
    for request in {id(request): request for request in requests}.values():
        yield QueuedWork(_arrival_s(request), max(0, len(request.origin_input_ids) - int(request.prefix_len or 0)))


def _arrival_s(request: Any) -> float:
    """Since when it waits for decode; the same clock for all requests of an instance."""
    return float(request.time_stats.prefill_bootstrap_queue_entry_time or 0.0)
