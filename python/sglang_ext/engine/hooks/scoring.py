"""Scores from the prefill leg only: a request with SGLang's own warm-up address as its decode instance.

A prefill instance finishes such a request without a peer: its sender is a fake one, nothing is transferred, no slot is
taken elsewhere. The log-probabilities of its prompt, also in chunks, are the same as SGLang computes for any
request; positions that are cached are computed again from `logprob_start_len` on. What is left to do here:

* not to prepare for decode what has no place there: the metadata buffer holds 128 alternatives of the first token, and
  stock SGLang ends the whole engine when a request asks for more;
* to refuse that of requests that do go to decode;
* to end the request as an undivided server would. A prefill instance makes every request one of a single token and
  says of all of them that their length was reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_LENGTH


def is_without_decode(request: Any) -> bool:
    """Return whether this request ends with its prefill.

    SGLang's own health checks and warm-ups on a prefill instance are such requests, too.
    """
    return bool(request.bootstrap_host == FAKE_BOOTSTRAP_HOST)


_WANTED = "sglang_ext_wanted_tokens"  # attribute of a request without decode


def record_wanted_tokens(request: Any) -> None:
    """Keep how many tokens a request without decode asked for: the bootstrap queue makes it 1."""
    if is_without_decode(request):
        setattr(request, _WANTED, request.sampling_params.max_new_tokens)


def set_metadata(stock: Callable[..., None], buffers: Any, request: Any) -> None:
    """AROUND `MetadataBuffers.set_buf(req)`.

    What decode would get of the first token is left out where there is none. Stock SGLang ends the whole engine
    when a request asks for more alternatives than fit (128).
    """
    if not is_without_decode(request):
        stock(buffers, request)


def excess_top_logprobs(scheduler: Any, request: Any) -> str | None:
    """Return why this request must be refused: its alternatives would not fit into what prefill sends to decode.

    None where they fit, or where nothing is sent.
    """
    wanted = request.logprob.top_logprobs_num if request.return_logprob else 0
    if not wanted or scheduler.disaggregation_mode == DisaggregationMode.NULL or is_without_decode(request):
        return None
    capacity = scheduler.disagg_metadata_buffers.output_top_logprobs_val.shape[1]
    if wanted <= capacity:
        return None
    return f"top_logprobs_num is {wanted}; with a decode instance at most {capacity} are served"


def stream_output(stock: Callable[..., None], streamer: Any, requests: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND `stream_output(reqs, …)` of the scheduler's output streamer.

    A prefill instance calls every request finished by length; a request that ends here ends as on an undivided server:
    by a stop token, or with as many tokens as it asked for, which may be none.
    """
    for request in requests:
        reason = request.finished_reason
        if is_without_decode(request) and type(reason) is FINISH_LENGTH and reason.length == 0:
            request.finished_reason = None
            request.sampling_params.max_new_tokens = getattr(request, _WANTED, 1)
            request.update_finish_state()
            if request.return_logprob and request.finished_len == 0:
                # Prefill reports every token that it has sampled, also those after the end.
                request.logprob.output_token_logprobs_val.clear()
                request.logprob.output_token_logprobs_idx.clear()
            if request.finished_reason is None:  # a warm-up that asked for more
                request.finished_reason = reason
    return stock(streamer, requests, *args, **kwargs)
