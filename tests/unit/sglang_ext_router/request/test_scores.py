"""Scores of prompts: which requests prefill serves alone, how they fail, and what the client is answered."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_ext_router.request.reply_builder as reply_builder_module
from sglang_ext_router.request.prompt import BadRequestError
from sglang_ext_router.request.reply_builder import BuildFailure, ReplyBuilder
from sglang_ext_router.request.scores import (
    MAX_CANDIDATES,
    MAX_TOP_LOGPROBS,
    MAX_TOP_LOGPROBS_WITH_DECODE,
    MINUS_INFINITY,
    CompletionForm,
    build_reply,
    completion_reply,
    plan_scores,
)
from support.router_process import cluster
from support.scripted_engine import Turn, chunk, cut, hang, in_pieces, raw, reply, response, status, stream_head

GENERATE, COMPLETIONS, CHAT = b"/generate", b"/v1/completions", b"/v1/chat/completions"
SCORED = {
    "input_ids": [5, 6, 7],
    "return_logprob": True,
    "logprob_start_len": 0,
    "sampling_params": {"max_new_tokens": 1},
}
COMPLETION = {"model": "m", "prompt": [[5, 6, 7]], "max_tokens": 1, "prompt_logprobs": 2}


def output(ids: list[int], tops: list[list[list[Any]] | None], **info: Any) -> dict[str, Any]:
    """What `/generate` answers for one prompt; the actual log-probability of a token is its id, negative."""
    return {
        "text": "z",
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "length", "length": 1},
            "prompt_tokens": len(ids),
            "completion_tokens": 1,
            "cached_tokens": 0,
            "input_token_logprobs": [[None if i == 0 else -float(token), token, None] for i, token in enumerate(ids)],
            "input_top_logprobs": tops,
            "output_token_logprobs": [[-0.5, 9, "z"]],
            "output_top_logprobs": [[[-0.5, 9, "z"], [-1.5, 8, "y"]]],
            **info,
        },
    }


ONE = output([5, 6, 7], [None, [[-0.1, 8, None], [-6.0, 6, None]], [[-0.2, 8, None], [-0.3, 9, None]]])


# -- what a request needs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "is_alone", "is_joined"),
    [
        (GENERATE, SCORED, True, False),
        (GENERATE, {**SCORED, "stream": True}, True, False),
        (GENERATE, {**SCORED, "sampling_params": {"max_new_tokens": 0}}, True, False),
        (GENERATE, {**SCORED, "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 0}]}, True, False),
        (GENERATE, {**SCORED, "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}]}, False, True),
        (GENERATE, {**SCORED, "sampling_params": {"max_new_tokens": 1, "n": 2}}, False, True),
        (GENERATE, {**SCORED, "sampling_params": None}, False, True),
        (GENERATE, {**SCORED, "sampling_params": {}}, False, True),
        (GENERATE, {**SCORED, "return_logprob": False}, False, False),
        (GENERATE, {"text": "x", "return_logprob": True, "stream": True}, False, False),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1}, False, False),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "logprobs": 3}, False, False),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "logprobs": 1, "echo": True}, True, False),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 2, "logprobs": 1, "echo": True}, False, True),
        (COMPLETIONS, COMPLETION, True, True),
        (COMPLETIONS, {**COMPLETION, "max_tokens": 0}, True, True),
        (COMPLETIONS, {**COMPLETION, "max_tokens": 2}, False, True),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 0}, False, True),
        (CHAT, {"messages": [], "logprobs": True, "top_logprobs": 5}, False, False),
    ],
)
def test_what_a_request_needs(path: bytes, body: dict[str, Any], is_alone: bool, is_joined: bool) -> None:
    plan = plan_scores(path, body)
    assert (plan.is_prefill_only, plan.is_joined) == (is_alone, is_joined)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (GENERATE, {**SCORED, "top_logprobs_num": MAX_TOP_LOGPROBS + 1}, "top_logprobs_num"),
        (GENERATE, {**SCORED, "top_logprobs_num": [1, MAX_TOP_LOGPROBS + 1]}, "top_logprobs_num"),
        (GENERATE, {**SCORED, "token_ids_logprob": [0] * (MAX_CANDIDATES + 1)}, "token_ids_logprob"),
        (
            GENERATE,
            {"text": "x", "return_logprob": True, "top_logprobs_num": MAX_TOP_LOGPROBS_WITH_DECODE + 1},
            "top_logprobs_num",
        ),
        (GENERATE, {**SCORED, "stream": True, "sampling_params": {"max_new_tokens": 2}}, "logprob_start_len"),
        (GENERATE, {**SCORED, "logprob_start_len": -2}, "logprob_start_len"),
        (GENERATE, {**SCORED, "logprob_start_len": [0, -(2**31)]}, "logprob_start_len"),
        (GENERATE, {"text": "x", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 1, "echo": True, "max_tokens": 2, "stream": True}, "echo"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 129, "echo": True, "max_tokens": 2}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 1, "echo": True, "max_tokens": 1, "n": 2}, "echo"),
        (COMPLETIONS, {"prompt": "x", "logprobs": MAX_TOP_LOGPROBS_WITH_DECODE + 1}, "logprobs"),
        (COMPLETIONS, {**COMPLETION, "prompt_logprobs": MAX_TOP_LOGPROBS + 1}, "prompt_logprobs"),
        (COMPLETIONS, {**COMPLETION, "max_tokens": 5, "prompt_logprobs": 129}, "prompt_logprobs"),
        (COMPLETIONS, {**COMPLETION, "prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETIONS, {**COMPLETION, "prompt_logprobs": True}, "prompt_logprobs"),
        (COMPLETIONS, {**COMPLETION, "prompt_logprobs": "2"}, "prompt_logprobs"),
        (COMPLETIONS, {**COMPLETION, "stream": True}, "stream"),
        (COMPLETIONS, {**COMPLETION, "echo": True}, "echo"),
        (COMPLETIONS, {**COMPLETION, "n": 2}, "n"),
        (COMPLETIONS, {**COMPLETION, "best_of": 3}, "n"),
        (COMPLETIONS, {**COMPLETION, "logprobs": "a"}, "logprobs"),
        (COMPLETIONS, {**COMPLETION, "max_tokens": "a"}, "max_tokens"),
        (COMPLETIONS, {**COMPLETION, "max_tokens": -1}, "max_tokens"),
        (COMPLETIONS, {**COMPLETION, "prompt_logprob_token_ids": []}, "prompt_logprob_token_ids"),
        (COMPLETIONS, {**COMPLETION, "prompt_logprob_token_ids": ["a"]}, "prompt_logprob_token_ids"),
        (COMPLETIONS, {**COMPLETION, "prompt_logprob_token_ids": [[1], 2]}, "prompt_logprob_token_ids"),
        (COMPLETIONS, {**COMPLETION, "prompt_logprob_token_ids": [[1], [2], [3]]}, "prompt_logprob_token_ids"),
        (COMPLETIONS, {**COMPLETION, "prompt": [5, 6], "prompt_logprob_token_ids": [[1]]}, "prompt_logprob_token_ids"),
        (COMPLETIONS, {**COMPLETION, "prompt_logprob_token_ids": list(range(5000))}, "prompt_logprob_token_ids"),
        (CHAT, {"messages": [], "prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"messages": [], "logprobs": True, "top_logprobs": 129}, "top_logprobs"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(path: bytes, body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        plan_scores(path, body)
    assert refused.value.param == param
    assert param.split("_")[0] in str(refused.value)


def test_a_completion_is_asked_in_sglangs_words() -> None:
    body = {
        **COMPLETION,
        "temperature": 0.5,
        "stop": ["."],
        "seed": 3,
        "prompt_logprob_token_ids": [7, 3, 7],
        "logprobs": 4,
        "lora_path": "a",
    }
    asked = plan_scores(COMPLETIONS, body).body
    assert asked == {
        "input_ids": [[5, 6, 7]],
        "sampling_params": {"temperature": 0.5, "stop": ["."], "sampling_seed": 3, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 4,
        "token_ids_logprob": [3, 7],
        "return_text_in_logprobs": True,
        "lora_path": "a",
    }
    assert (plan_scores(COMPLETIONS, {**COMPLETION, "prompt": "text"}).body or {})["text"] == "text"


# -- replies ------------------------------------------------------------------------------------------------


def form(top: int, outputs: int | None = None, candidates: list[list[int]] | None = None) -> CompletionForm:
    return CompletionForm("m", top, outputs, candidates)


def positions(top: int, one: dict[str, Any] = ONE, candidates: list[list[int]] | None = None) -> list[Any]:
    answered = json.loads(completion_reply(form(top, None, candidates), json.dumps(one).encode()))
    scored: list[Any] = answered["choices"][0]["prompt_logprobs"]
    return scored


def test_the_actual_token_comes_first_with_its_rank() -> None:
    first, second, third = positions(2)
    assert first is None
    assert list(second) == ["6", "8"]
    assert second["6"] == {"logprob": -6.0, "rank": 2, "decoded_token": None}
    assert second["8"]["rank"] == 1
    assert list(third) == ["7", "8", "9"]
    assert third["7"] == {"logprob": -7.0, "rank": 3, "decoded_token": None}, "beyond the two alternatives"


def test_the_actual_token_is_that_of_the_prompt() -> None:
    # SGLang calls a vocabulary's last token 0 among the prompt's tokens, and only there.
    one = output([5, 0, 0], [None, [[-0.1, 2047, None]], [[-0.1, 8, None]]])
    given = {"prompt": [5, 2047, 2047], "max_tokens": 1, "prompt_logprobs": 1}
    for prompt in (given["prompt"], [given["prompt"]]):
        told = plan_scores(COMPLETIONS, {**given, "prompt": prompt}).form
        assert told is not None
        _, second, third = json.loads(completion_reply(told, json.dumps(one).encode()))["choices"][0]["prompt_logprobs"]
        assert {token: entry["rank"] for token, entry in second.items()} == {"2047": 1}
        assert {token: entry["rank"] for token, entry in third.items()} == {"2047": 2, "8": 1}


def test_fewer_alternatives_than_the_instance_was_asked_for() -> None:
    _, second, third = positions(1)
    assert list(second) == ["6", "8"]
    assert second["6"]["rank"] == 2
    assert list(third) == ["7", "8"]
    assert [list(entry) for entry in positions(0)[1:]] == [["6"], ["7"]]


def test_candidates_at_their_positions() -> None:
    one = output(
        [5, 6, 7],
        ONE["meta_info"]["input_top_logprobs"],
        input_token_ids_logprobs=[None, [[-3.0, 3, None], [-4.0, 4, None]], [[-3.5, 3, None], [-4.5, 4, None]]],
    )
    same = positions(0, one, [[3, 4]])
    assert [list(entry) for entry in same[1:]] == [["6", "3", "4"], ["7", "3", "4"]]
    assert same[1]["3"] == {"logprob": -3.0, "rank": None, "decoded_token": None}
    each = positions(0, one, [[3], [4], [3]])
    assert [list(entry) for entry in each[1:]] == [["6", "4"], ["7", "3"]]


def test_what_json_cannot_say_is_a_number() -> None:
    one = output([5, 6], [None, [[None, 6, None]]])
    one["meta_info"]["input_token_logprobs"][1][0] = None
    assert positions(1, one)[1]["6"]["logprob"] == MINUS_INFINITY


def test_prompts_of_one_token_and_several_prompts() -> None:
    answered = json.loads(completion_reply(form(1, 1), json.dumps([output([5], [None]), ONE]).encode()))
    assert [choice["index"] for choice in answered["choices"]] == [0, 1]
    assert answered["choices"][0]["prompt_logprobs"] == [None]
    assert answered["choices"][1]["logprobs"] == {
        "tokens": ["z"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"z": -0.5}],
        "text_offset": [-1],
    }
    assert answered["usage"]["total_tokens"] == 6


@pytest.mark.slow
@given(
    ids=st.lists(st.integers(0, 50), min_size=1, max_size=20),
    top=st.integers(0, 5),
    data=st.data(),
)
def test_every_position_has_its_token_and_the_best_by_rank(ids: list[int], top: int, data: st.DataObject) -> None:
    asked = max(1, top)
    tops: list[list[list[Any]] | None] = [None]
    for _ in ids[1:]:
        best = data.draw(st.lists(st.integers(0, 50), min_size=asked, max_size=asked, unique=True))
        tops.append([[-float(rank), token, None] for rank, token in enumerate(best)])
    scored = positions(top, output(ids, tops))
    assert len(scored) == len(ids)
    for position in range(1, len(ids)):
        entries = scored[position]
        assert next(iter(entries)) == str(ids[position])
        by_rank = sorted((entry["rank"], int(token)) for token, entry in entries.items())
        best = [token for _, token, _ in tops[position] or []][:top]
        assert [token for rank, token in by_rank if rank <= top and token in best] == best
        assert len(entries) == len({*best, ids[position]})


@pytest.mark.slow
async def test_large_replies_are_made_beside_and_are_the_same() -> None:
    loop = asyncio.get_running_loop()
    beside = ReplyBuilder(loop, max_inline_bytes=0)
    raw_reply = json.dumps(ONE).encode()
    for one_form in (form(2), form(0, 1, [[3]]), None):
        built: asyncio.Future[bytes | BuildFailure] = loop.create_future()
        beside.build(one_form, raw_reply, None, built.set_result)
        body = await asyncio.wait_for(built, 30)
        assert isinstance(body, bytes)
        mine, theirs = json.loads(build_reply(one_form, raw_reply, None)), json.loads(body)
        assert {**mine, "created": 0} == {**theirs, "created": 0}
    built = loop.create_future()
    beside.build(form(1), b"[]", None, built.set_result)
    assert await asyncio.wait_for(built, 30) is BuildFailure.MISMATCH
    built = loop.create_future()
    beside.build(form(1), raw_reply, None, built.set_result)
    await asyncio.sleep(0)
    await beside.stop()
    assert built.done()


@pytest.mark.slow
async def test_what_waits_to_be_made_is_bounded_and_not_made_for_a_client_that_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw_reply = json.dumps(ONE).encode()
    monkeypatch.setattr(reply_builder_module, "MAX_PENDING_BYTES", 5 * len(raw_reply))
    loop = asyncio.get_running_loop()
    beside = ReplyBuilder(loop, max_inline_bytes=0)
    built: list[bytes | BuildFailure] = []
    unwanted: list[bytes | BuildFailure] = []
    for number in range(7):
        is_left = number in (2, 3)
        beside.build(form(1), raw_reply, None, (unwanted if is_left else built).append, lambda left=is_left: not left)  # type: ignore[misc]
    assert built == [BuildFailure.OVERLOAD] * 2
    async with asyncio.timeout(60):
        while len(built) < 5:  # noqa: ASYNC110 - as in the router, there is nothing to wait for
            await asyncio.sleep(0.01)
    assert all(isinstance(one, bytes) for one in built[2:])
    assert unwanted == []
    beside.build(form(1), raw_reply, None, built.append)
    await beside.stop()
    assert built[-1] is not BuildFailure.OVERLOAD, "their place is free again"


# -- through the router -------------------------------------------------------------------------------------


async def test_prefill_alone_serves_and_no_decode_instance_hears_of_it() -> None:
    async with cluster() as served, await served.connect() as client:
        served.short[0].script = reply(ONE)
        for _ in range(2):
            answer = await client.ask("POST", "/generate", SCORED)
            assert (answer.status, answer.json) == (200, ONE)
            assert answer.headers["x-sglang-ext-prefill"] == served.short[0].url
            assert "x-sglang-ext-decode" not in answer.headers
        sent = served.short[0].requests[0].json
        assert sent["bootstrap_host"] == "2.2.2.2"
        assert served.decode[0].requests == []


async def test_it_needs_no_decode_instance() -> None:
    async with cluster(queue_timeout_secs=0.1) as served:
        await served.decode[0].stop()
        await served.until(lambda: not served.router.registry.ready_decode)
        served.short[0].script = reply(ONE)
        assert (await served.ask("POST", "/generate", SCORED)).status == 200
        assert (await served.ask("POST", "/generate", {"text": "x"})).status == 503


async def test_streams_of_prefill() -> None:
    async with cluster() as served:
        served.short[0].script = raw(stream_head(), chunk(b'data: {"text":"z"}\n\n'), b"0\r\n\r\n")
        answer = await served.ask("POST", "/generate", {**SCORED, "stream": True})
        assert answer.chunks == (b'data: {"text":"z"}\n\n',)


async def test_a_completion_with_prompt_logprobs() -> None:
    async with cluster() as served:
        served.short[0].script = reply([ONE, ONE])
        answer = await served.ask("POST", "/v1/completions", {**COMPLETION, "prompt": [[5, 6, 7], [5, 6, 7]]})
        assert answer.status == 200
        assert answer.json["object"] == "text_completion"
        assert len(answer.json["choices"][1]["prompt_logprobs"]) == 3
        assert served.short[0].requests[0].path == "/generate"
        assert served.decode[0].requests == []


async def test_a_completion_that_goes_on_is_joined_of_both() -> None:
    async with cluster() as served:
        served.short[0].script = reply([ONE])
        after = {"text": "zab", "meta_info": {**ONE["meta_info"], "input_token_logprobs": [], "completion_tokens": 3}}
        served.decode[0].script = reply([{**after, "meta_info": {**after["meta_info"], "input_top_logprobs": []}}])
        answer = await served.ask("POST", "/v1/completions", {**COMPLETION, "max_tokens": 3})
        (choice,) = answer.json["choices"]
        assert choice["text"] == "zab"
        assert len(choice["prompt_logprobs"]) == 3
        assert answer.json["usage"]["completion_tokens"] == 3


@pytest.mark.slow
async def test_a_reply_too_large_to_be_made_at_once() -> None:
    ids = [5, *[6] * 8_000]
    large = output(ids, [None, *[[[-0.1, token, None] for token in range(8, 28)]] * 8_000])
    async with cluster() as served:
        served.long[0].script = reply(large)
        body = {**COMPLETION, "prompt": [ids], "prompt_logprobs": 20}
        answer = await served.ask("POST", "/v1/completions", body)
        assert len(answer.json["choices"][0]["prompt_logprobs"]) == 8_001


@pytest.mark.parametrize("odd", [[], {}, "text", None, {"meta_info": {}}])
async def test_odd_replies_give_502(odd: Any) -> None:
    async with cluster() as served:
        served.short[0].script = reply(odd)
        answer = await served.ask("POST", "/v1/completions", COMPLETION)
        assert answer.status == 502


async def test_an_answer_of_prefill_is_relayed() -> None:
    async with cluster() as served:
        served.short[0].script = status(400, "no")
        for path, body in (("/generate", SCORED), ("/v1/completions", COMPLETION)):
            answer = await served.ask("POST", path, body)
            assert (answer.status, answer.json["error"]["message"]) == (400, "no")


@pytest.mark.parametrize("first", [cut(), status(500), status(503)])
async def test_a_failed_attempt_is_repeated_on_another_instance(first: Any) -> None:
    failures = [first]

    async def play(turn: Turn) -> None:
        await (failures.pop() if failures else reply(ONE))(turn)

    async with cluster(short=2, long=0) as served:
        for engine in served.short:
            engine.script = play
        answer = await served.ask("POST", "/generate", SCORED)
        assert answer.status == 200
        assert [len(engine.requests) for engine in served.short] == [1, 1]


async def test_a_reply_that_breaks_off_is_cut_or_an_error() -> None:
    half = response(json.dumps(ONE).encode())[:-4]
    async with cluster(retry_max_retries=0, long=0) as served:
        served.short[0].script = cut(half)
        assert (await served.ask("POST", "/v1/completions", COMPLETION)).status == 502


async def test_a_client_that_leaves_frees_the_instance() -> None:
    async with cluster() as served:
        served.short[0].script = hang(response(b'{"text": "half"}')[:-4])
        client = await served.connect()
        body = json.dumps(SCORED).encode()
        await client.send(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        rid = (await served.short[0].received(1))[0].rid
        client.close()
        await served.short[0].abort_of(rid, 1.0)


async def test_a_prompt_that_decode_could_not_hold_is_scored() -> None:
    async with cluster() as served:
        decode = served.worker(served.decode[0].url)
        decode.max_prompt_tokens = 10
        served.router.registry.refresh()
        served.short[0].script = reply(ONE)
        assert (await served.ask("POST", "/generate", {**SCORED, "input_ids": [5] * 50})).status == 200
        served.worker(served.short[0].url).max_prompt_tokens = 20
        served.router.registry.refresh()
        served.long[0].script = reply(ONE)
        assert (await served.ask("POST", "/generate", {**SCORED, "input_ids": [5] * 50})).status == 200
        assert len(served.long[0].requests) == 1, "the pool that holds it"


@pytest.mark.parametrize(
    "body",
    [
        {**SCORED, "input_ids": [5] * 8000, "token_ids_logprob": list(range(4000))},
        {**SCORED, "input_ids": [[5] * 8000] * 10, "top_logprobs_num": 250},
    ],
)
async def test_a_reply_that_would_be_too_large_is_refused(body: dict[str, Any]) -> None:
    async with cluster() as served:
        answer = await served.ask("POST", "/generate", body)
        assert answer.status == 400
        assert "fewer sequences" in answer.error["message"]
        assert served.upstream_requests() == 0


def test_nested_candidates_are_counted() -> None:
    with pytest.raises(BadRequestError):
        plan_scores(GENERATE, {**SCORED, "token_ids_logprob": [list(range(MAX_CANDIDATES + 1))]})


@pytest.mark.slow
async def test_a_large_reply_that_comes_in_many_pieces() -> None:
    ids = [5, *[6] * 3000]
    large = output(ids, [None, *[[[-0.1, 8, None], [-0.2, 9, None]]] * 3000])
    async with cluster(long=0) as served:
        served.short[0].script = in_pieces(response(json.dumps(large).encode()), 1000)
        answer = await served.ask("POST", "/v1/completions", {**COMPLETION, "prompt": [ids]})
        assert len(answer.json["choices"][0]["prompt_logprobs"]) == 3001
