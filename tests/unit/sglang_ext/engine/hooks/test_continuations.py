"""Output that a request brings: part of the prompt until its KV is there, output from then on; which is refused."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("sglang_imported")
PROMPT, OUTPUT = [1, 2, 3], [7, 8]


def request(ids: list[int] | None, min_new_tokens: int = 0) -> Any:
    prompt = array("q", PROMPT)
    return SimpleNamespace(
        sampling_params=SimpleNamespace(
            custom_params=None if ids is None else {"sglang_ext_output_ids": ids}, min_new_tokens=min_new_tokens
        ),
        origin_input_ids=prompt,
        origin_input_ids_unpadded=prompt,
        output_ids=array("q"),
        finished=lambda: False,
    )


def scheduler(mode: str, counted: list[int]) -> Any:
    from sglang.srt.disaggregation.utils import DisaggregationMode

    processor = SimpleNamespace(_maybe_update_reasoning_tokens=lambda request, token: counted.append(token))
    return SimpleNamespace(disaggregation_mode=DisaggregationMode(mode), batch_result_processor=processor)


def test_an_undivided_instance_has_it_as_output_at_once() -> None:
    from sglang_ext.engine.hooks.continuations import begin_with_output

    counted: list[int] = []
    one = request(OUTPUT, min_new_tokens=5)
    begin_with_output(scheduler("null", counted), one)
    assert (list(one.origin_input_ids), list(one.output_ids), counted) == (PROMPT, OUTPUT, OUTPUT)
    assert one.sampling_params.min_new_tokens == 3
    assert one.sampling_params.custom_params == {}


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_under_disaggregation_it_is_prompt_until_the_kv_is_there(mode: str) -> None:
    from sglang_ext.engine.hooks.continuations import begin_with_output, commit_transfer

    counted: list[int] = []
    engine = scheduler(mode, counted)
    one = request(OUTPUT)
    begin_with_output(engine, one)
    assert list(one.origin_input_ids) == list(one.origin_input_ids_unpadded) == PROMPT + OUTPUT
    assert (list(one.output_ids), counted) == ([], [])
    commit_transfer(
        lambda queue, held: held.req.output_ids.append(9), SimpleNamespace(scheduler=engine), SimpleNamespace(req=one)
    )
    assert list(one.origin_input_ids) == list(one.origin_input_ids_unpadded) == PROMPT
    assert (list(one.output_ids), counted) == ([*OUTPUT, 9], OUTPUT)
    # A second transfer, after a retraction, finds it done.
    commit_transfer(lambda queue, held: None, SimpleNamespace(scheduler=engine), SimpleNamespace(req=one))
    assert list(one.output_ids) == [*OUTPUT, 9]


@pytest.mark.parametrize("given", [None, []])
def test_a_request_without_output_is_left_as_it_is(given: list[int] | None) -> None:
    from sglang_ext.engine.hooks.continuations import begin_with_output

    one = request(given)
    begin_with_output(scheduler("decode", []), one)
    assert (list(one.origin_input_ids), list(one.output_ids)) == (PROMPT, [])


@pytest.mark.parametrize(
    ("ids", "parameters", "further"),
    [
        ([], {}, {}),
        ("5", {}, {}),
        ([True], {}, {}),
        ([5], {"max_new_tokens": 1}, {}),
        ([5] * 98, {}, {}),
        ([5], {"regex": "a"}, {}),
        ([5], {}, {"return_logprob": True}),
    ],
)
def test_what_cannot_go_on_is_refused(ids: Any, parameters: dict[str, Any], further: dict[str, Any]) -> None:
    from sglang_ext.engine.hooks.continuations import check_output_ids

    manager = SimpleNamespace(context_len=100)
    body = SimpleNamespace(sampling_params=parameters, **further)
    with pytest.raises(ValueError, match="sglang_ext_output_ids"):
        check_output_ids(manager, body, {"sglang_ext_output_ids": ids}, 3)
    assert check_output_ids(manager, body, {"other": 1}, 3) == []
    assert check_output_ids(manager, body, None, 3) == []


async def _collected(events: Any) -> list[str]:
    return [event async for event in events]


def test_every_event_has_the_tokens_of_its_text_or_more() -> None:
    import asyncio

    from sglang_ext.engine.hooks.continuations import mark_tokens
    from sglang_ext.token_marks import MARKS_HEADER, read_marks

    state = SimpleNamespace(output_ids=[])
    manager = SimpleNamespace(rid_to_state={"r": state})
    adapted = SimpleNamespace(rid=None)

    async def stock(*arguments: Any) -> Any:
        adapted.rid = "r"
        for number in range(3):
            state.output_ids += [number, number + 10]
            yield f'data: {{"n":{number}}}\n\n'
        yield "data: [DONE]\n\n"

    def events(headers: dict[str, str]) -> list[str]:
        state.output_ids = []
        serving, raw = SimpleNamespace(tokenizer_manager=manager), SimpleNamespace(headers=headers)
        return asyncio.run(_collected(mark_tokens(stock, serving, adapted, None, raw)))

    plain, marked = events({}), events({MARKS_HEADER: "1"})
    assert [event.rstrip() for event in marked] == [event.rstrip() for event in plain]
    assert all(event.endswith("\n\n") for event in marked)
    assert [read_marks(event.rstrip("\n").encode()) for event in marked] == [[0, 10], [1, 11], [2, 12], []]
    assert not any(read_marks(event.rstrip("\n").encode()) for event in plain)
