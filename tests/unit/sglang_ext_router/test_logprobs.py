"""The prompt's log-probabilities come from prefill, the output's from decode; the client gets one reply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_ext_router.request.scores import join_logprobs
from support.router_process import cluster
from support.scripted_engine import chunk, cut, drop_when_reused, hang, raw, reply, response, status, stream_head

PROMPT = {"text": "x", "return_logprob": True, "logprob_start_len": 0}
OF_PREFILL = {"text": "a", "meta_info": {"input_token_logprobs": [[None, 1, None], [-0.25, 2, None]]}}
OF_DECODE = {"text": "abc", "meta_info": {"input_token_logprobs": [], "output_token_logprobs": [[-0.5, 3, None]]}}
JOINED = {
    "text": "abc",
    "meta_info": {
        "input_token_logprobs": [[None, 1, None], [-0.25, 2, None]],
        "output_token_logprobs": [[-0.5, 3, None]],
    },
}


@pytest.mark.full
@pytest.mark.parametrize(("prefill_s", "decode_s"), [(0.0, 0.1), (0.1, 0.0), (0.0, 0.0)])
async def test_both_halves_arrive_in_whatever_order(prefill_s: float, decode_s: float) -> None:
    async with cluster() as served, await served.connect() as client:
        served.short[0].script = reply(OF_PREFILL, delay_s=prefill_s)
        served.decode[0].script = reply(OF_DECODE, delay_s=decode_s)
        for _ in range(2):
            answer = await client.ask("POST", "/generate", PROMPT)
            assert (answer.status, answer.json) == (200, JOINED)
            assert answer.headers["x-sglang-ext-decode"] == served.decode[0].url


async def test_batches_are_joined_item_by_item() -> None:
    async with cluster() as served:
        served.short[0].script = reply([OF_PREFILL, OF_DECODE])
        served.decode[0].script = reply([OF_DECODE, OF_DECODE])
        answer = await served.ask("POST", "/generate", {**PROMPT, "text": ["x", "y"]})
        assert answer.json == [JOINED, OF_DECODE]


@pytest.mark.slow
@pytest.mark.parametrize(
    "odd",
    [
        [],
        [OF_PREFILL, OF_PREFILL],
        {},
        {"meta_info": None},
        {"meta_info": []},
        "text",
        None,
        [None],
        {"meta_info": {"input_token_logprobs": 5}},
    ],
)
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_halves_that_do_not_match_give_502(leg: str, odd: Any) -> None:
    async with cluster() as served:
        served.short[0].script = reply(odd if leg == "prefill" else OF_PREFILL)
        served.decode[0].script = reply(odd if leg == "decode" else OF_DECODE)
        answer = await served.ask("POST", "/generate", PROMPT)
        if answer.status != 200:  # an odd half that can be joined is passed on as it is
            assert answer.status == 502
            assert answer.error["type"] == "server_error"


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_answer_of_either_leg_is_relayed(leg: str) -> None:
    async with cluster() as served:
        served.short[0].script = status(400, "no") if leg == "prefill" else hang()
        served.decode[0].script = status(400, "no") if leg == "decode" else hang()
        answer = await served.ask("POST", "/generate", PROMPT)
        assert (answer.status, answer.json["error"]["message"]) == (400, "no")


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_failed_attempt_is_repeated(leg: str) -> None:
    async with cluster(short=1, long=0, decode=1) as served:
        served.short[0].script = reply(OF_PREFILL)
        served.decode[0].script = reply(OF_DECODE, delay_s=0.1)
        (served.short if leg == "prefill" else served.decode)[0].plan(cut())
        answer = await served.ask("POST", "/generate", PROMPT)
        assert (answer.status, answer.json) == (200, JOINED)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_half_that_breaks_off_gives_an_error_and_no_cut_connection(leg: str) -> None:
    """Nothing has been sent to the client yet: it is told."""
    half = response(b'{"text": "half"}')[:-4]
    async with cluster(retry_max_retries=0, long=0) as served:
        served.short[0].script = cut(half) if leg == "prefill" else reply(OF_PREFILL)
        served.decode[0].script = cut(half) if leg == "decode" else reply(OF_DECODE)
        answer = await served.ask("POST", "/generate", PROMPT)
        assert answer.status == 502
        assert answer.error["type"] == "server_error"


async def test_a_client_that_leaves_frees_both() -> None:
    async with cluster() as served:
        served.short[0].script = reply(OF_PREFILL)
        served.decode[0].script = hang(response(b'{"text": "half"}')[:-4])
        client = await served.connect()
        body = b'{"text": "x", "return_logprob": true}'
        await client.send(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        rid = (await served.decode[0].received(1))[0].rid
        client.close()
        await served.decode[0].abort_of(rid, 1.0)


async def test_an_error_that_breaks_off_on_its_way_is_cut_and_not_followed_by_another_reply() -> None:
    async with cluster() as served:
        served.short[0].script = cut(response(b'{"error": "a long explanation"}', 400)[:-6])
        served.decode[0].script = hang()
        client = await served.connect()
        body = json.dumps(PROMPT).encode()
        await client.send(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        try:
            received = await client.rest()
        except ConnectionError:
            received = b""
        assert received.count(b"HTTP/1.1 ") <= 1
        client.close()


@pytest.mark.slow
async def test_replies_of_any_size_are_joined() -> None:
    many = [[-0.5, token, None] for token in range(70_000)]
    async with cluster() as served:
        served.short[0].script = reply({"text": "", "meta_info": {"input_token_logprobs": many}})
        served.decode[0].script = reply(OF_DECODE)
        answer = await served.ask("POST", "/generate", PROMPT)
        assert answer.json["meta_info"]["input_token_logprobs"] == many


@pytest.mark.full
async def test_a_large_half_over_a_connection_that_had_to_be_replaced() -> None:
    many = [[-0.5, token, None] for token in range(70_000)]
    async with cluster(long=0) as served:
        served.short[0].script = drop_when_reused(reply({"text": "", "meta_info": {"input_token_logprobs": many}}))
        served.decode[0].script = reply(OF_DECODE, delay_s=0.05)  # not before prefill has its request
        for _ in range(3):
            answer = await served.ask("POST", "/generate", PROMPT)
            assert answer.json["meta_info"]["input_token_logprobs"] == many


async def test_streams_of_new_tokens_only_are_relayed_as_they_are() -> None:
    async with cluster() as served:
        served.decode[0].script = raw(stream_head(), chunk(b"data: 1\n\n"), b"0\r\n\r\n")
        answer = await served.ask("POST", "/generate", {"text": "x", "return_logprob": True, "stream": True})
        assert answer.chunks == (b"data: 1\n\n",)


def test_numbers_survive() -> None:
    numbers = [[-1.2345678901234567e-05, 1, None], [-0.1, 2**53 + 1, "é"], [0.0, 0, None]]
    prefill = json.dumps({"meta_info": {"input_token_logprobs": numbers}}).encode()
    assert json.loads(join_logprobs(prefill, b'{"meta_info":{}}'))["meta_info"]["input_token_logprobs"] == numbers


def test_the_first_tokens_candidates_come_from_prefill() -> None:
    """A decode instance has that token from prefill, without them."""
    prefill = [{"meta_info": {"output_token_ids_logprobs": [[[-1.0, 5, None]]]}}, {"meta_info": {}}]
    decode = [
        {"meta_info": {"output_token_ids_logprobs": [None, [[-2.0, 5, None]]]}},
        {"meta_info": {"output_token_ids_logprobs": [None]}},
    ]
    joined = json.loads(join_logprobs(json.dumps(prefill).encode(), json.dumps(decode).encode()))
    candidates = [output["meta_info"]["output_token_ids_logprobs"] for output in joined]
    assert candidates == [[[[-1.0, 5, None]], [[-2.0, 5, None]]], [None]]


def completion_of(*choices: tuple[list[str], list[float | None]]) -> bytes:
    """A completion with log-probabilities of these tokens."""
    made = [{"logprobs": {"tokens": tokens, "token_logprobs": values}} for tokens, values in choices]
    return json.dumps({"id": "d", "choices": made}).encode()


def test_echos_log_probabilities_are_prefills_and_then_decodes() -> None:
    prefill = completion_of((["a", "b", "n"], [None, -1.0, -2.0]), (["c", "m"], [None, -3.0]))
    decode = completion_of((["n", "o"], [-2.0, -4.0]), (["m"], [-3.0]))
    joined = json.loads(join_logprobs(prefill, decode))
    assert joined["id"] == "d"
    assert [choice["logprobs"] for choice in joined["choices"]] == [
        {"tokens": ["a", "b", "n", "o"], "token_logprobs": [None, -1.0, -2.0, -4.0]},
        {"tokens": ["c", "m"], "token_logprobs": [None, -3.0]},
    ]
    with pytest.raises(ValueError, match="different tokens"):
        join_logprobs(prefill, completion_of((["x"], [-2.0]), (["m"], [-3.0])))
    with pytest.raises(ValueError, match="argument"):
        join_logprobs(prefill, completion_of((["n"], [-2.0])))
