"""Stock SGLang that is not divided, beside a prefill and a decode instance: the same tokens by either way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.reference import greedy_reference, random_prompt
from support.router_cli import RunningRouter, running_router
from support.up_process import up

pytestmark = pytest.mark.integration

PLAIN = "x-sglang-ext-plain"
DECODE = "x-sglang-ext-decode"
BOUNDARY = ("--length-boundary-tokens", "256")


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return FLEET.get(EngineSpec(Role.SHORT), EngineSpec(Role.DECODE), EngineSpec(Role.PLAIN))


def body_of(length: int, seed: int, new_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    return {
        "input_ids": random_prompt(length, seed=seed),
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        **fields,
    }


def way_of(router: RunningRouter, length: int, seed: int) -> str:
    """Send a prompt, compare its tokens; return the header that names the way."""
    reply, headers = router.call("POST", "/generate", body_of(length, seed))
    assert reply.status == 200, reply.body
    assert reply.body["output_ids"] == greedy_reference(random_prompt(length, seed=seed), 8)
    return PLAIN if PLAIN in headers else DECODE


def test_short_prompts_stay_in_one_piece_and_long_ones_are_divided(engines: list[Engine]) -> None:
    with running_router(engines, *BOUNDARY) as router:
        assert way_of(router, 40, 1) == PLAIN
        assert way_of(router, 900, 2) == DECODE
        for seed in range(10, 30):  # its rate is that of short prompts now
            assert way_of(router, 40, seed) == PLAIN
            assert way_of(router, 900, seed) == DECODE
        for path, body in (
            ("/v1/completions", {"prompt": "one two", "max_tokens": 4, "n": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}),
            ("/v1/messages", {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}),
        ):
            reply, headers = router.call("POST", path, body)
            assert reply.status == 200, reply.body
            assert PLAIN in headers
        stream, headers = router.call("POST", "/generate", body_of(40, 3, stream=True))
        assert PLAIN in headers
        events = [line for line in str(stream.body).splitlines() if line.startswith("data: {")]
        assert json.loads(events[-1][6:])["output_ids"] == greedy_reference(random_prompt(40, seed=3), 8)
        assert router.metric("sglang_ext_router_retries_total") == 0
        assert router.is_idle()
    for engine in engines:
        engine.wait_idle(10.0)


def test_without_prefill_everything_goes_to_the_undivided_instance(engines: list[Engine]) -> None:
    """kill -9 of the only prefill instance: no request fails; its successor gets the long ones again."""
    _, decode, plain = engines
    prefill = Engine.start(EngineSpec(Role.SHORT, name="victim"))
    try:
        prefill.wait_ready()
        with running_router([prefill, decode, plain], *BOUNDARY) as router:
            assert way_of(router, 900, 1) == DECODE
            prefill.kill()
            for seed in range(2, 6):
                assert way_of(router, 900 if seed % 2 else 40, seed) == PLAIN
            assert router.call("GET", "/readyz")[0].status == 200
            prefill.stop()
            prefill = Engine.start(prefill.spec, (prefill.port, prefill.bootstrap_port))
            prefill.wait_ready()
            router.wait_workers([prefill])
            assert way_of(router, 900, 7) == DECODE
    finally:
        prefill.stop()


SCORED = random_prompt(30, seed=40)
GENERATED = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": SCORED, "max_tokens": 0, "prompt_logprobs": 2}),
        ("/v1/completions", {"prompt": SCORED, "max_tokens": 4, "prompt_logprobs": 2, "logprobs": 1, "temperature": 0}),
        ("/v1/completions", {"prompt": SCORED, "max_tokens": 4, "echo": True, "logprobs": 2, "temperature": 0}),
        (
            "/generate",
            {"input_ids": SCORED, "return_logprob": True, "logprob_start_len": 0, "sampling_params": GENERATED},
        ),
    ],
    ids=["prompt", "prompt and reply", "echo", "generate"],
)
def test_scores_come_from_an_undivided_instance_where_there_is_no_other(
    engines: list[Engine], path: str, body: dict[str, Any]
) -> None:
    replies = []
    for serving in (engines[:2], engines[2:]):
        with running_router(serving) as router:
            reply, headers = router.call("POST", path, body)
            assert reply.status == 200, reply.body
            assert (PLAIN in headers) is (serving == engines[2:])
            replies.append(scores_of(reply.body))
    assert len(replies[0]) >= len(SCORED) - 1
    assert replies[1] == pytest.approx(replies[0], abs=1e-3)


def scores_of(reply: Any) -> list[float]:
    """Return the log-probabilities of the prompt's tokens and of the reply's, in order."""
    if "choices" in reply:
        (choice,) = reply["choices"]
        prompt = [
            entry["logprob"] for position in choice.get("prompt_logprobs") or () for entry in (position or {}).values()
        ]
        values = [*prompt, *((choice["logprobs"] or {}).get("token_logprobs") or ())]
    else:
        info = reply["meta_info"]
        values = [value for value, *_ in (*info["input_token_logprobs"], *info["output_token_logprobs"])]
    return [value for value in values if value is not None]


@pytest.mark.full
def test_a_conversation_stays_where_its_prefix_is(engines: list[Engine]) -> None:
    """A long prompt is divided, and its next turn with it, though the turn's new tokens are few."""
    with running_router(engines, *BOUNDARY) as router:
        history = random_prompt(900, seed=11)
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        for turn in range(3):
            body = {"input_ids": history, "sampling_params": sampling}
            reply, headers = router.call("POST", "/generate", body)
            assert DECODE in headers
            assert turn == 0 or reply.body["meta_info"]["cached_tokens"] > 0
            history = [*history, *reply.body["output_ids"], *random_prompt(20, seed=20 + turn)]


@pytest.mark.full
@pytest.mark.parametrize(
    "pools",
    [{"plain": {"count": 1}}, {"short": {"count": 1}, "decode": {"count": 1}, "plain": {"count": 1}}],
    ids=["alone", "beside"],
)
def test_a_cluster_with_undivided_instances(tmp_path: Path, pools: dict[str, Any]) -> None:
    with up(tmp_path, pools=pools) as cluster:
        cluster.wait_until_ready()
        assert cluster.chat("def f(self):")
        assert cluster.chat("return self.value + other.value\n" * 40)
        assert "Traceback" not in cluster.output.read_text()
