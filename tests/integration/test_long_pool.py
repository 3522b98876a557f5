"""Long prefills over several real prefill instances: the tokens of one, whatever happens to the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.laps import Pair
from support.long_pool import Coordinator
from support.reference import logprobs_reference, random_prompt
from support.served_pool import free_tokens, long_member

pytestmark = pytest.mark.integration
LONG = 900


@pytest.fixture(scope="module")
def coordinator() -> Iterator[Coordinator]:
    with Coordinator.running("--sp-sizes", "1,2", "--min-chunk-tokens", "64") as one:
        yield one


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.full), 16], ids=["page1", "page16"])
def pool(request: pytest.FixtureRequest, coordinator: Coordinator, threads: ThreadPoolExecutor) -> Iterator[list[Pair]]:
    arguments = ("--page-size", str(request.param))
    specs = [long_member(coordinator, f"pool{number}-{request.param}", arguments) for number in range(2)]
    decode_spec = EngineSpec(Role.DECODE, arguments=arguments)
    engines: list[Engine] = FLEET.get(*specs, decode_spec)
    coordinator.wait_for(lambda status: len(status["members"]) == 2)
    yield [Pair(engine, engines[-1], threads) for engine in engines[:-1]]
    for engine in engines[:-1]:
        engine.stop()


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


def test_one_prompt_on_two_instances(pool: list[Pair], coordinator: Coordinator) -> None:
    shared_before = coordinator.status()["requests_collected"]
    free = [free_tokens(pair) for pair in pool]
    for seed, pair in enumerate(pool * 2):
        assert pair.send(LONG, seed=100 + seed).is_exact()
    assert coordinator.status()["requests_collected"] == shared_before + 4
    for pair, tokens in zip(pool, free, strict=True):
        pair.check_clean(tokens)


def test_a_cached_prefix_is_history(pool: list[Pair], coordinator: Coordinator) -> None:
    pair = pool[0]
    first = pair.send(400, seed=7)
    assert first.is_exact()
    before = coordinator.status()["requests_collected"]
    assert pair.send(LONG + 100, seed=8, prefix=first.prompt).is_exact()
    assert coordinator.status()["requests_collected"] == before + 1


def test_many_at_once_with_short_ones_between(pool: list[Pair]) -> None:
    free = [free_tokens(pair) for pair in pool]
    running = []
    for number in range(6):
        running.append(pool[number % 2].send(500 + 70 * number, seed=200 + number))
        running += [pool[(number + k) % 2].send(10 + k, seed=300 + 10 * number + k) for k in range(3)]
    for one in running:
        assert one.is_exact()
    for pair, tokens in zip(pool, free, strict=True):
        pair.check_clean(tokens)


def test_a_scored_prompt_is_computed_by_the_instance_that_was_asked(pool: list[Pair], coordinator: Coordinator) -> None:
    """The others would not know the log-probabilities of their rows; prompts shared beside it do no harm."""
    free = [free_tokens(pair) for pair in pool]
    before = coordinator.status()["requests_collected"]
    prompt = random_prompt(LONG, seed=440)
    shared = pool[1].send(LONG, seed=441)
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "bootstrap_host": "2.2.2.2",
        "bootstrap_room": 1 << 50,
    }
    reply = pool[0].prefill.post("/generate", body)
    assert reply.status == 200, reply.body
    truth = logprobs_reference(prompt)
    for position, (value, _, _) in enumerate(reply.body["meta_info"]["input_token_logprobs"][1:], start=1):
        assert value == pytest.approx(float(truth[position - 1][prompt[position]]), abs=1e-3)
    assert shared.is_exact()
    # Whether that one was shared is for the coordinator to say.
    assert coordinator.status()["requests_collected"] <= before + 1
    for pair, tokens in zip(pool, free, strict=True):
        pair.check_clean(tokens)


def test_aborted_while_others_compute_it(pool: list[Pair]) -> None:
    free = [free_tokens(pair) for pair in pool]
    for number in range(3):
        rid = f"long-{number}"
        one = pool[0].send(1500, seed=400 + number, rid=rid)
        time.sleep(0.05 + 0.1 * number)
        pool[0].abort(rid)
        one.replies.result(timeout=60)
    assert pool[0].send(LONG, seed=420).is_exact()
    for pair, tokens in zip(pool, free, strict=True):
        pair.check_clean(tokens)


def test_a_member_that_stops_costs_time_only(pool: list[Pair], coordinator: Coordinator) -> None:
    with pool[1].prefill.frozen_scheduler():
        running = [pool[0].send(LONG, seed=500 + number) for number in range(2)]
        assert all(one.is_exact() for one in running)
    coordinator.wait_for(lambda status: len(status["members"]) == 2)
    for number in range(3):
        assert pool[number % 2].send(LONG, seed=510 + number).is_exact()


@pytest.mark.full
def test_the_coordinator_is_killed(threads: ThreadPoolExecutor) -> None:
    with Coordinator.running("--sp-sizes", "1,2", "--min-chunk-tokens", "64") as mortal:
        *members, decode = FLEET.get(
            long_member(mortal, "mortal0"), long_member(mortal, "mortal1"), EngineSpec(Role.DECODE)
        )
        pair = Pair(members[0], decode, threads)
        mortal.wait_for(lambda status: len(status["members"]) == 2)
        running = [pair.send(1500, seed=600 + number) for number in range(2)]
        time.sleep(0.2)
        mortal.kill()
        assert all(one.is_exact() for one in running)
        assert pair.send(LONG, seed=610).is_exact()
        mortal.start_again()
        mortal.wait_for(lambda status: len(status["members"]) == 2)
        before = mortal.status()["requests_collected"]
        assert pair.send(LONG, seed=611).is_exact()
        assert mortal.status()["requests_collected"] == before + 1
        # One of the two is killed in the middle of a chunk.
        running = [pair.send(1500, seed=620 + number) for number in range(2)]
        time.sleep(0.2)
        members[1].kill()
        assert all(one.is_exact() for one in running)
        members[0].stop()
