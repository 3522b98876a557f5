"""Streams that go on on another instance: a request may bring the tokens that a lost instance has generated for it.

The router sends the client's body again, with these tokens in `custom_params` (`sglang_ext_output_ids`), which SGLang
passes to the scheduler unread. The tokens are output of the request, as after a retraction: stop strings, `max_tokens`,
`usage`, detokenisation and the parsers of reasoning see what they would have seen without the loss. The reply begins
again at its first token, and the router leaves out what the client has.

Under disaggregation the tokens are a part of the prompt until the KV is there, as prefill computes it and decode takes
slots for it; then decode makes them output.

The router learns the tokens from the stream. `/generate` has them in its events; those of the OpenAI endpoints carry
them, where the router asks for it by a header, as spaces and tabs behind their JSON, which every parser of JSON skips.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_ext.token_marks import MARKS_HEADER, mark

OUTPUT_IDS_PARAMETER = "sglang_ext_output_ids"
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_OUTPUT_TOKENS = "sglang_ext_output_tokens"  # attribute: how many of the last tokens of the prompt are output


def check_output_ids(manager: Any, request: Any, custom_params: object, prompt_tokens: int) -> list[int]:
    """Return the tokens that a request brings. Raise ValueError (400) where it cannot go on behind them."""
    ids = custom_params.get(OUTPUT_IDS_PARAMETER) if isinstance(custom_params, dict) else None
    if ids is None:
        return []
    field = f"custom_params.{OUTPUT_IDS_PARAMETER}"
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise ValueError(f"{field} must be a non-empty list of integers")
    if getattr(request, "return_logprob", False):
        raise ValueError(f"{field} cannot be used with log-probabilities")
    if any(request.sampling_params.get(name) for name in _GRAMMARS):
        raise ValueError(f"{field} cannot be used with a grammar, whose state the tokens do not restore")
    limit = request.sampling_params.get("max_new_tokens")
    if limit is not None and len(ids) >= limit:
        raise ValueError(f"{field} has {len(ids)} tokens, no fewer than the {limit} that the request asks for")
    if prompt_tokens + len(ids) >= manager.context_len:
        raise ValueError(f"{field} and the prompt are longer than the model's context length")
    return ids


def begin_with_output(scheduler: Any, request: Any) -> None:
    """Give a request that enters the scheduler the output that it brings."""
    parameters = request.sampling_params
    given = parameters.custom_params
    ids = given.pop(OUTPUT_IDS_PARAMETER, None) if isinstance(given, dict) else None
    if not ids or request.finished():
        return
    output = array("q", ids)
    # SGLang counts them from the first token that this instance samples.
    parameters.min_new_tokens = max(0, parameters.min_new_tokens - len(output))
    if scheduler.disaggregation_mode == DisaggregationMode.NULL:
        _take_output(scheduler, request, output)
        return
    request.origin_input_ids = request.origin_input_ids_unpadded = request.origin_input_ids + output
    setattr(request, _OUTPUT_TOKENS, len(output))


def commit_transfer(stock: Callable[..., None], queue: Any, decode_request: Any) -> None:
    """AROUND `DecodeTransferQueue._commit_transfer_to_req(decode_req)`: the KV is there, prefill's token follows."""
    request = decode_request.req
    tokens = getattr(request, _OUTPUT_TOKENS, 0)
    if tokens:
        setattr(request, _OUTPUT_TOKENS, 0)
        given = request.origin_input_ids
        request.origin_input_ids = request.origin_input_ids_unpadded = given[:-tokens]
        _take_output(queue.scheduler, request, given[-tokens:])
    stock(queue, decode_request)


def _take_output(scheduler: Any, request: Any, output: array[int]) -> None:
    for token in output:
        request.output_ids.append(token)
        scheduler.batch_result_processor._maybe_update_reasoning_tokens(request, token)


async def mark_tokens(
    stock: Callable[..., AsyncIterator[str]], serving: Any, adapted_request: Any, request: Any, raw_request: Any
) -> AsyncIterator[str]:
    """AROUND the generators of streamed chats and completions: add the ids of each event's tokens behind its JSON.

    An event may carry a token whose text follows in a later one, never the reverse.
    """
    events = stock(serving, adapted_request, request, raw_request)
    if raw_request is None or MARKS_HEADER not in raw_request.headers:
        async for event in events:
            yield event
        return
    state = None
    marked = 0
    async for event in events:
        if state is None:  # SGLang gives the request its id with the first event
            state = serving.tokenizer_manager.rid_to_state.get(adapted_request.rid)
        if state is not None and event.startswith("data: {") and len(state.output_ids) > marked:
            event = f"{event[:-2]}{mark(state.output_ids[marked:])}\n\n"
            marked = len(state.output_ids)
        yield event
