"""A prefill or a decode instance is killed, or its pools are full, where rows and states are not KV of heads alone.

Latent rows (DeepSeek V3), windows in a pool of their own (Granite), recurrent states (Qwen3-Next, Falcon-H1): an answer
is right, or its client learns of the failure within a stated time, and no slot of any memory pool is lost.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_ext.transfer.sglang.transfer_backend import RECURRENT, WINDOWS
from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.laps import NEW_TOKENS, Pair
from support.losses import Request, is_answer
from support.memory import check_whole, pools
from support.model_families import FAMILIES, family, family_greedy

pytestmark = [pytest.mark.integration, pytest.mark.chaos]
HANDSHAKE = ("--transfer-backend", "handshake")
TCP = ("--transfer-backend", "sglang_ext_tcp")
LAPS = ("--laps-boundary-tokens", "64", "--set", "laps.min_chunk_tokens=16")
CHUNKS = ("--chunked-prefill-size", "32")
CACHING = ("--disaggregation-decode-enable-radix-cache",)
# Decode keeps as much room for the reply of each request, 512 tokens by default: the longest prompt would never fit.
RESERVED = ("--num-reserved-decode-tokens", "32")
DECODED_TOKENS = 150  # enough that some are decoded while others are computed
# A silent peer is given up after a lease of 10 s, the health of a dead prefill instance says so after about 4 s; what
# the survivor still has to compute takes time of its own on a loaded machine.
OUTCOME_LIMIT_S = 45.0
STAGE_LIMIT_S = 30.0
FAMILIES_HIT = {
    "Qwen3NextForCausalLM": HANDSHAKE,
    "FalconH1ForCausalLM": TCP,
    "DeepseekV3ForCausalLM": HANDSHAKE,
    "GraniteSWAForCausalLM": HANDSHAKE,
}
IN_TEST = "Qwen3NextForCausalLM"
ARCHITECTURES = [
    pytest.param(architecture, marks=() if architecture == IN_TEST else pytest.mark.full)
    for architecture in FAMILIES_HIT
]
# By default pools take most of a machine's memory. The second makes each pool too small for what comes at once.
ROOM = ("--max-total-tokens", "16384", "--max-running-requests", "24")
FEW = ("--max-total-tokens", "1280", "--max-running-requests", "24")
STATES, FEW_STATES = ("--max-mamba-cache-size", "96"), ("--max-mamba-cache-size", "12")


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(60) as executor:
        yield executor


def started(architecture: str, threads: ThreadPoolExecutor, *, is_roomy: bool = True) -> Pair:
    """A pair of instances, alive; who was killed is started again."""
    room = ROOM if is_roomy else FEW
    if RECURRENT in FAMILIES[architecture].states:
        room = (*room, *(STATES if is_roomy else FEW_STATES))
    name = "roomy" if is_roomy else "few"
    # With a prefix cache SGLang's decode takes window rows that it has not counted, and ends when they run out.
    caching = () if WINDOWS in FAMILIES[architecture].states else CACHING
    options = ("--model-path", str(family(architecture)), *FAMILIES_HIT[architecture])
    prefill, decode = FLEET.get(
        EngineSpec(Role.BOTH, arguments=(*CHUNKS, *room), worker_options=(*options, *LAPS), name=name),
        EngineSpec(Role.DECODE, arguments=(*caching, *RESERVED, *room), worker_options=options, name=name),
    )
    return Pair(prefill, decode, threads)


def reference(architecture: str) -> Callable[[Sequence[int], int], list[int]]:
    return lambda prompt, new_tokens: family_greedy(architecture, prompt, new_tokens, has_cache=True)


@pytest.mark.full
@pytest.mark.parametrize("victim", [Role.DECODE, Role.BOTH], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_instance_is_killed(architecture: str, victim: Role, threads: ThreadPoolExecutor) -> None:
    pair = started(architecture, threads)
    killed, left = (pair.decode, pair.prefill) if victim is Role.DECODE else (pair.prefill, pair.decode)
    try:
        sent = [Request(pair, threads, 100 + number, tokens, DECODED_TOKENS) for number, tokens in enumerate(LENGTHS)]
        wait_for(lambda: is_at_work(pair))
        for process in killed.process_ids():
            os.kill(process, signal.SIGKILL)
        killed.process.wait()
        for request in sent:
            reply = request.reply(OUTCOME_LIMIT_S)
            if is_answer(reply):
                assert request.is_right(reply, reference(architecture))
        check_whole(left)
        pair = started(architecture, threads)
        # The tree of the survivor has what was computed before: the same prompts, and others.
        again = [
            Request(pair, threads, seed, tokens, NEW_TOKENS) for seed in (100, 200) for tokens in (LENGTHS[0], 60, 7)
        ]
        for request in again:
            reply = request.reply(OUTCOME_LIMIT_S)
            assert is_answer(reply), reply
            assert request.is_right(reply, reference(architecture))
        for engine in (pair.prefill, pair.decode):
            check_whole(engine)
    finally:
        pair.prefill.stop()
        pair.decode.stop()


LENGTHS = (900, 7, 500, 60, 700, 30, 20, 400)


def is_at_work(pair: Pair) -> bool:
    """Return whether a long prompt is being computed while others are decoded."""
    return pair.status()["long"]["requests"] > 0 and pair.decode.load()["num_running_reqs"] > 0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + STAGE_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pools_are_full(architecture: str, threads: ThreadPoolExecutor) -> None:
    """More comes at once than the pools of both instances hold: all of it is answered, and each slot is back."""
    pair = started(architecture, threads, is_roomy=False)
    try:
        empty = [slots_of(engine) for engine in (pair.prefill, pair.decode)]
        lengths = (900, 7, 500, 60, 700, 30, 20, 400, 900, 50, 800, 9, 300, 64, 600, 33)
        sent = [pair.send(tokens, 300 + number, rid=f"full-{number}") for number, tokens in enumerate(lengths)]
        pair.abort("full-4")
        pair.abort("full-8", pair.decode)
        for number, request in enumerate(sent):
            if number not in (4, 8):
                assert request.tokens() == reference(architecture)(request.prompt, NEW_TOKENS), number
        for engine in (pair.prefill, pair.decode):
            check_whole(engine)
        pair.flush()
        assert [slots_of(engine) for engine in (pair.prefill, pair.decode)] == empty
    finally:
        pair.prefill.stop()
        pair.decode.stop()


def slots_of(engine: Engine) -> dict[str, int]:
    """Free slots of each pool, without what is cached."""
    engine.wait_idle(30)
    assert engine.post("/flush_cache", {}).status == 200
    return {name: slots["free"] for name, slots in pools(engine).items()}
