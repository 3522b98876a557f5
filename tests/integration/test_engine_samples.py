"""Several sequences per request, and rooms that collide, on a prefill and a decode engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.pd import new_room, send_both, with_room
from support.reference import greedy_reference, random_prompt

pytestmark = pytest.mark.integration

PROMPTS = [random_prompt(40, seed=1), random_prompt(25, seed=2)]


@pytest.fixture(scope="module")
def pair() -> list[Engine]:
    return FLEET.get(EngineSpec(Role.SHORT), EngineSpec(Role.DECODE))


def sampling(**more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True, **more}


def test_samples_of_a_batch_come_prompt_by_prompt(pair: list[Engine]) -> None:
    body = {"input_ids": PROMPTS, "sampling_params": sampling(n=3), "rid": ["p", "q"]}
    _, reply = send_both(*pair, body)
    assert reply.status == 200, reply.body
    expected = [greedy_reference(prompt, 6) for prompt in PROMPTS for _ in range(3)]
    assert [output["output_ids"] for output in reply.body] == expected
    assert [output["meta_info"]["id"] for output in reply.body] == ["p_0", "p_1", "p_2", "q_0", "q_1", "q_2"]


def test_random_samples_differ(pair: list[Engine]) -> None:
    body = {"input_ids": PROMPTS[0], "sampling_params": sampling(n=8, temperature=1.5)}
    _, reply = send_both(*pair, body)
    assert len({tuple(output["output_ids"]) for output in reply.body}) > 1


def test_chat_choices(pair: list[Engine]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "class A:"}], "n": 3, "max_tokens": 4}
    _, reply = send_both(*pair, body, path="/v1/chat/completions")
    assert [choice["index"] for choice in reply.body["choices"]] == [0, 1, 2]
    assert reply.body["usage"]["completion_tokens"] <= 12


def test_streamed_choices_carry_every_index(pair: list[Engine]) -> None:
    body = {"model": "m", "prompt": "import os", "n": 2, "max_tokens": 3, "stream": True, "ignore_eos": True}
    _, reply = send_both(*pair, body, path="/v1/completions")
    assert reply.status == 200
    assert '"index":0' in reply.body
    assert '"index":1' in reply.body
    assert reply.body.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(
    ("room", "samples", "reason"),
    [([5, 6], 2, "one integer"), ([5, 5], 1, "same room twice")],
    ids=["list with n", "twice in a list"],
)
def test_rooms_that_cannot_be_told_apart_are_refused(
    pair: list[Engine], room: list[int], samples: int, reason: str
) -> None:
    body = {"input_ids": PROMPTS, "sampling_params": sampling(n=samples)}
    for reply in send_both(*pair, body, room=room):
        assert reply.status == 400
        assert reason in str(reply.body)


def test_decode_refuses_a_room_in_use_and_serves_on(pair: list[Engine]) -> None:
    prefill, decode = pair
    room = new_room()
    body = {"input_ids": PROMPTS[0], "sampling_params": sampling(max_new_tokens=400)}
    with ThreadPoolExecutor(1) as first:
        running = first.submit(send_both, prefill, decode, body, room=room)
        decode.wait_for_load(lambda load: load["num_running_reqs"] == 1, timeout_s=10)
        refused = decode.post("/generate", with_room(body, prefill, room))
        _, served = running.result()
    assert refused.status == 400
    assert f"bootstrap room {room} is already in use" in str(refused.body)
    assert served.status == 200
    assert len(served.body["output_ids"]) == 400
    # The room is free again.
    assert send_both(prefill, decode, body, room=room)[1].status == 200
    decode.wait_idle()


def test_prefill_refuses_a_room_in_use_and_serves_on(pair: list[Engine]) -> None:
    prefill, decode = pair
    body = {"rid": "first", "input_ids": PROMPTS[0], "sampling_params": sampling()}
    room = new_room()
    with ThreadPoolExecutor(1) as first:
        waiting = first.submit(prefill.post, "/generate", with_room(body, prefill, room))
        prefill.wait_for_load(lambda load: load["disaggregation"]["prefill_bootstrap_queue_reqs"] == 1, 10)
        refused = prefill.post("/generate", with_room({**body, "rid": "second"}, prefill, room))
        assert decode.post("/generate", with_room(body, prefill, room)).status == 200
        assert waiting.result().status == 200
    assert refused.status == 400
    prefill.wait_idle()
