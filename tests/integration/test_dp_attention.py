"""Data-parallel ranks: replicas, and ranks that compute only attention apart (`--enable-dp-attention`).

The forward passes of the latter are in step: a rank without a batch takes part with an idle one. LAPS decides on each
rank. KV goes from each rank of prefill to each of decode, over both transfers that run on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any, NamedTuple

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec, Reply
from support.handshake_process import wait_until
from support.memory import check_whole
from support.model_families import family, family_greedy
from support.pd import with_room
from support.reference import random_prompt
from support.router_cli import running_router

pytestmark = [pytest.mark.integration, pytest.mark.full]

PAGES = ("--page-size", "16", "--max-total-tokens", "8192")
TOGETHER = ("--tp", "2", "--dp-size", "2", "--enable-dp-attention")
APART = ("--dp-size", "2")
DIVIDED = ("--tp", "2")
TCP, HANDSHAKE = "sglang_ext_tcp", "handshake"
CHUNK_TOKENS = 64
LAPS = ("--laps-boundary-tokens", "64", "--set", "laps.min_chunk_tokens=16")
NEW_TOKENS = 8
LONG_TOKENS = 700
REPLY_LIMIT_S = 120.0


class Setting(NamedTuple):
    """A model, the ranks of prefill and of decode, and what moves KV."""

    architecture: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    transfer: str

    def __str__(self) -> str:
        kinds = {TOGETHER: "together", APART: "apart", DIVIDED: "divided", (): "one"}
        return f"{self.architecture}, {kinds[self.prefill]} to {kinds[self.decode]}, {self.transfer}"


SETTINGS = (
    Setting("Qwen3MoeForCausalLM", TOGETHER, (), TCP),
    Setting("DeepseekV3ForCausalLM", TOGETHER, TOGETHER, TCP),
    Setting("Qwen3MoeForCausalLM", TOGETHER, TOGETHER, HANDSHAKE),
    Setting("DeepseekV3ForCausalLM", TOGETHER, TOGETHER, HANDSHAKE),
    Setting("Qwen3MoeForCausalLM", TOGETHER, DIVIDED, HANDSHAKE),
    Setting("LlamaForCausalLM", APART, APART, HANDSHAKE),
)


class Deployment(NamedTuple):
    """A prefill instance of two ranks, a decode instance, and what the model's tokens are."""

    setting: Setting
    prefill: Engine
    decode: Engine
    threads: ThreadPoolExecutor

    @property
    def decode_ranks(self) -> int:
        return 2 if "--dp-size" in self.setting.decode else 1

    def expected(self, prompt: Sequence[int]) -> list[int]:
        return family_greedy(self.setting.architecture, prompt, NEW_TOKENS, has_cache=True)

    def send(
        self,
        prompt: Sequence[int],
        rank: int,
        rid: str | None = None,
        *,
        decode_rank: int | None = None,
        new_tokens: int = NEW_TOKENS,
    ) -> Future[Reply]:
        """Start a request whose prefill runs on this rank, and its decode on the same one or on another, where decode
        has several; the reply is that of decode."""
        parameters = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": list(prompt), "sampling_params": parameters}
        if rid is not None:
            body["rid"] = rid
        paired = with_room({**body, "disagg_prefill_dp_rank": rank}, self.prefill)
        self.threads.submit(self.prefill.post, "/generate", {**paired, "routed_dp_rank": rank}, REPLY_LIMIT_S)
        if self.decode_ranks > 1:
            paired["routed_dp_rank"] = rank if decode_rank is None else decode_rank
        return self.threads.submit(self.decode.post, "/generate", paired, REPLY_LIMIT_S)

    def ranks(self) -> list[dict[str, Any]]:
        """Return the state of both ranks' queues."""
        ranks: list[dict[str, Any]] = self.prefill.get("/laps").body["ranks"]
        return ranks

    def check_right(self, prompts: Sequence[Sequence[int]], replies: Sequence[Future[Reply]]) -> None:
        for prompt, future in zip(prompts, replies, strict=True):
            reply = future.result()
            assert reply.status == 200, reply
            assert reply.body["output_ids"] == self.expected(prompt), len(prompt)


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    setting: Setting = request.param
    options = ("--model-path", str(family(setting.architecture)), "--transfer-backend", setting.transfer)
    # Of ranks that compute together SGLang divides the chunk by their number.
    chunk_tokens = CHUNK_TOKENS * (2 if setting.prefill is TOGETHER else 1)
    arguments = (*setting.prefill, *PAGES, "--chunked-prefill-size", str(chunk_tokens))
    engines = FLEET.get(
        EngineSpec(Role.BOTH, arguments=arguments, worker_options=(*options, *LAPS)),
        EngineSpec(Role.DECODE, arguments=(*setting.decode, *PAGES), worker_options=options),
    )
    with ThreadPoolExecutor(48) as threads:
        yield Deployment(setting, *engines, threads)
    for engine in engines:
        engine.stop()


seeds = count(1000)


def prompts_of(*lengths_tokens: int) -> list[tuple[int, ...]]:
    return [tuple(random_prompt(tokens, seed=next(seeds))) for tokens in lengths_tokens]


def test_both_ranks_serve_short_and_long_prompts(deployment: Deployment) -> None:
    prompts = prompts_of(20, LONG_TOKENS, 7, 50, 300, 64, 33, LONG_TOKENS, 5, 90)
    replies = [
        deployment.send(prompt, number % 2, decode_rank=number // 2 % 2) for number, prompt in enumerate(prompts)
    ]
    deployment.check_right(prompts, replies)
    assert all(rank["decisions"]["batches"] for rank in deployment.ranks())


@pytest.mark.parametrize("busy", [0, 1])
def test_one_rank_is_busy_and_the_other_idle(deployment: Deployment, busy: int) -> None:
    before = deployment.ranks()
    prompts = prompts_of(LONG_TOKENS, 20, 40, LONG_TOKENS, 9)
    deployment.check_right(prompts, [deployment.send(prompt, busy) for prompt in prompts])
    decided = [
        now["decisions"]["batches"] - then["decisions"]["batches"]
        for now, then in zip(deployment.ranks(), before, strict=True)
    ]
    assert decided[busy] > 0
    assert decided[1 - busy] == 0


def test_a_long_prompt_is_parked_while_short_ones_run(deployment: Deployment) -> None:
    longs = prompts_of(LONG_TOKENS, LONG_TOKENS)
    replies = [deployment.send(prompt, rank) for rank, prompt in enumerate(longs)]
    shorts = prompts_of(*range(10, 34))
    replies += [deployment.send(prompt, number % 2) for number, prompt in enumerate(shorts)]
    deployment.check_right([*longs, *shorts], replies)


def test_aborts_on_one_rank_leave_the_other_alone(deployment: Deployment) -> None:
    prompts = prompts_of(LONG_TOKENS, LONG_TOKENS, 30, 30, LONG_TOKENS, 40)
    replies = [
        deployment.send(prompt, number % 2, f"dp-{next(seeds)}-{number}") for number, prompt in enumerate(prompts)
    ]
    aborted = prompts_of(LONG_TOKENS, LONG_TOKENS, LONG_TOKENS)
    for number, prompt in enumerate(aborted):
        deployment.send(prompt, 1, f"aborted-{number}")
    wait_until(lambda: deployment.ranks()[1]["long"]["requests"] > 0, 30)
    for number in range(len(aborted)):
        for engine in (deployment.prefill, deployment.decode):
            engine.post("/abort_request", {"rid": f"aborted-{number}"})
    deployment.check_right(prompts, replies)
    wait_until(
        lambda: all(rank["long"]["requests"] + rank["short"]["requests"] == 0 for rank in deployment.ranks()), 30
    )
    again = prompts_of(20, 21)
    deployment.check_right(again, [deployment.send(prompt, rank) for rank, prompt in enumerate(again)])


def running(engine: Engine) -> list[int]:
    """Return how many requests each rank of an instance runs."""
    loads = sorted(engine.get("/v1/loads").body["loads"], key=lambda load: int(load["dp_rank"]))
    return [load["num_running_reqs"] for load in loads]


def test_aborts_at_decode_leave_the_other_rank_alone(deployment: Deployment) -> None:
    last = deployment.decode_ranks - 1
    prompts = prompts_of(20, 50, 300)
    expected = [deployment.expected(prompt) for prompt in prompts]
    aborted = deployment.send(prompts_of(30)[0], 1, "aborted-at-decode", decode_rank=last, new_tokens=1900)
    wait_until(lambda: running(deployment.decode)[last] == 1, 60)
    replies = [deployment.send(prompt, 0, decode_rank=0) for prompt in prompts]
    assert [reply.result().body["output_ids"] for reply in replies] == expected  # in step with the rank that goes on
    deployment.decode.post("/abort_request", {"rid": "aborted-at-decode"})
    assert aborted.result().body["meta_info"]["finish_reason"]["type"] == "abort"
    wait_until(lambda: not any(running(deployment.decode)), 30)
    again = prompts_of(20, 21)
    deployment.check_right(again, [deployment.send(prompt, rank) for rank, prompt in enumerate(again)])
    check_whole(deployment.decode, ranks=deployment.decode_ranks)


def test_the_router_chooses_the_rank(deployment: Deployment) -> None:
    prompts = prompts_of(150, 190, 230, 270, 310, 350)
    with running_router((deployment.prefill, deployment.decode)) as router:
        parameters = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        bodies = [{"input_ids": list(prompt), "sampling_params": parameters} for prompt in prompts]
        before = deployment.ranks()
        replies = [deployment.threads.submit(router.post, "/generate", body) for body in bodies]
        deployment.check_right(prompts, replies)
        for now, then in zip(deployment.ranks(), before, strict=True):
            assert now["decisions"]["batches"] > then["decisions"]["batches"]
