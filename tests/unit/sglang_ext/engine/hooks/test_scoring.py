"""A request without a decode instance: nothing is prepared for decode, and it ends as on an undivided server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("sglang_imported")
HOST = "2.2.2.2"  # the router's, too: sglang_ext_router.request.attempt


def request(host: str | None = HOST, wanted: int = 1, tops: int = 0) -> Any:
    """A request that has sampled token 9."""
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH

    made = SimpleNamespace(
        bootstrap_host=host,
        finished_reason=FINISH_LENGTH(length=0),
        finished_len=None,
        sampling_params=SimpleNamespace(max_new_tokens=wanted),
        return_logprob=True,
        logprob=SimpleNamespace(top_logprobs_num=tops, output_token_logprobs_val=[-0.5], output_token_logprobs_idx=[9]),
    )

    def update_finish_state() -> None:
        if made.sampling_params.max_new_tokens <= 1:
            made.finished_len = made.sampling_params.max_new_tokens
            made.finished_reason = FINISH_LENGTH(length=made.finished_len)

    made.update_finish_state = update_finish_state
    return made


def stream(one: Any) -> None:
    from sglang_ext.engine.hooks.scoring import stream_output

    told: list[Any] = []
    stream_output(lambda streamer, requests, flag: told.append(requests), "streamer", [one], True)
    assert told == [[one]]


def test_the_routers_address_is_sglangs() -> None:
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    from sglang_ext_router.request.attempt import WITHOUT_DECODE_JSON

    assert FAKE_BOOTSTRAP_HOST == HOST
    assert HOST.encode() in WITHOUT_DECODE_JSON


@pytest.mark.parametrize(("host", "is_set"), [(HOST, False), ("10.0.0.1", True), (None, True)])
def test_metadata_is_for_decode(host: str | None, is_set: bool) -> None:
    from sglang_ext.engine.hooks.scoring import set_metadata

    calls: list[Any] = []
    set_metadata(lambda buffers, one: calls.append(one), "buffers", request(host))
    assert bool(calls) == is_set


@pytest.mark.parametrize(
    ("host", "mode", "tops", "is_refused"),
    [
        ("h", "prefill", 129, True),
        ("h", "decode", 129, True),
        ("h", "prefill", 128, False),
        (HOST, "prefill", 256, False),
        (None, "null", 256, False),
    ],
)
def test_alternatives_that_do_not_fit_are_refused(host: str | None, mode: str, tops: int, is_refused: bool) -> None:
    from sglang.srt.disaggregation.utils import DisaggregationMode

    from sglang_ext.engine.hooks.scoring import excess_top_logprobs

    buffers = SimpleNamespace(output_top_logprobs_val=SimpleNamespace(shape=(4, 128)))
    scheduler = SimpleNamespace(disaggregation_mode=DisaggregationMode(mode), disagg_metadata_buffers=buffers)
    assert (excess_top_logprobs(scheduler, request(host, tops=tops)) is not None) == is_refused


@pytest.mark.parametrize("wanted", [0, 1])
def test_it_ends_with_as_many_tokens_as_it_asked_for(wanted: int) -> None:
    from sglang_ext.engine.hooks.scoring import record_wanted_tokens

    one = request(wanted=wanted)
    record_wanted_tokens(one)
    one.sampling_params.max_new_tokens = 1  # as the bootstrap queue does
    stream(one)
    assert one.finished_reason.length == wanted
    assert len(one.logprob.output_token_logprobs_val) == wanted


def test_others_end_as_prefill_says() -> None:
    for one in (request("10.0.0.1"), request(wanted=8)):
        from sglang_ext.engine.hooks.scoring import record_wanted_tokens

        record_wanted_tokens(one)
        stream(one)
        assert one.finished_reason.length == 0
