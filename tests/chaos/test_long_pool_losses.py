"""Every role of a long pool is killed, and stopped for longer than any lease, at every stage of a shared prompt.

Whatever happens, the prompt's answer is right, or its client learns of the failure, within a stated time; then
everything is served as before, and all KV memory is back. `make test` kills each role once, `make test-all` does all,
also with latent rows (DeepSeek V3) and with windows in a pool of their own (gpt-oss), of which a member may be short.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from typing import Any, NamedTuple

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.laps import NEW_TOKENS, Pair, Prefill
from support.long_pool import Coordinator
from support.losses import Request, is_answer
from support.model_families import FAMILIES, family, family_greedy
from support.reference import greedy_reference

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

HANDSHAKE = ("--transfer-backend", "handshake")
PROMPT_TOKENS = 1800
DECODED_PROMPT_TOKENS, DECODED_TOKENS = 600, 1200  # of one that is hit while it is decoded
LEASE_S = 10.0  # after which a silent sender or receiver is lost
STOPPED_S = LEASE_S + 3.0
# A lease, the step timeout of the others, a chunk computed again, and the rest of the way, on a loaded machine.
OUTCOME_LIMIT_S = 45.0
STAGE_LIMIT_S = 30.0


class Victim(StrEnum):
    """Who is hit."""

    HELPER = "helper"  # a member of the ring that does not own the prompt
    OWNER = "owner"
    DECODE = "decode"
    COORDINATOR = "coordinator"


class Stage(StrEnum):
    """How far the prompt is."""

    CHUNK = "chunk"  # two members compute a chunk
    COLLECT = "collect"  # KV is on its way to the owner
    SENDING = "sending"  # all is computed, KV is on its way to decode
    DECODING = "decoding"


class Loss(NamedTuple):
    """One case."""

    victim: Victim
    stage: Stage
    signal: signal.Signals

    def __str__(self) -> str:
        return f"{self.victim}-{self.stage}-{'kill' if self.signal is signal.SIGKILL else 'stop'}"


STAGES = {
    Victim.HELPER: (Stage.CHUNK, Stage.COLLECT, Stage.SENDING),
    Victim.OWNER: (Stage.CHUNK, Stage.COLLECT, Stage.SENDING),
    Victim.DECODE: (Stage.CHUNK, Stage.SENDING, Stage.DECODING),
    Victim.COORDINATOR: (Stage.CHUNK, Stage.COLLECT, Stage.SENDING),
}
ONCE_PER_ROLE = {
    Loss(Victim.HELPER, Stage.CHUNK, signal.SIGKILL),
    Loss(Victim.OWNER, Stage.SENDING, signal.SIGKILL),
    Loss(Victim.DECODE, Stage.SENDING, signal.SIGKILL),
    Loss(Victim.COORDINATOR, Stage.CHUNK, signal.SIGKILL),
}
ALL_LOSSES = [
    Loss(victim, stage, number)
    for victim, stages in STAGES.items()
    for stage in stages
    for number in (signal.SIGKILL, signal.SIGSTOP)
]
LOSSES = [
    pytest.param(loss, id=str(loss), marks=() if loss in ONCE_PER_ROLE else pytest.mark.full)
    for loss in ALL_LOSSES
    if loss.stage is not Stage.COLLECT
]


FAMILIES_HIT = ("DeepseekV3ForCausalLM", "GptOssForCausalLM")
FAMILY_LOSSES = (
    Loss(Victim.HELPER, Stage.CHUNK, signal.SIGKILL),
    Loss(Victim.OWNER, Stage.CHUNK, signal.SIGKILL),
    Loss(Victim.DECODE, Stage.SENDING, signal.SIGKILL),
)
FEW_TOKENS = 1280  # of a member's KV pool: less than a prompt, more than half of one


class LongPool(NamedTuple):
    """Two members, a decode instance and their coordinator."""

    coordinator: Coordinator
    threads: ThreadPoolExecutor
    architecture: str | None = None  # None: the tiny Llama

    @property
    def model_options(self) -> tuple[str, ...]:
        return () if self.architecture is None else ("--model-path", str(family(self.architecture)))

    def greedy(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """What Hugging Face answers."""
        if self.architecture is None:
            return greedy_reference(prompt, new_tokens)
        return family_greedy(self.architecture, prompt, new_tokens, has_cache=True)

    def is_exact(self, prefill: Prefill) -> bool:
        return prefill.tokens() == self.greedy(prefill.prompt, NEW_TOKENS)

    def pairs(self, few_tokens: int | None = None) -> list[Pair]:
        """Everybody, alive and connected; who was killed is started again. `few_tokens`: KV memory of the second."""
        options = (
            *self.model_options,
            *HANDSHAKE,
            *("--cdsp-coordinator", self.coordinator.address, "--cdsp-min-tokens", "200"),
            *("--laps-boundary-tokens", "256"),
            *("--set", "cdsp.step_timeout_s=5"),
        )
        few = () if few_tokens is None else ("--max-total-tokens", str(few_tokens))
        specs = [
            EngineSpec(Role.LONG, worker_options=options, arguments=few if number else (), name=f"loss{number}")
            for number in range(2)
        ]
        decode_options = (*self.model_options, *HANDSHAKE)
        *members, decode = FLEET.get(*specs, EngineSpec(Role.DECODE, worker_options=decode_options, name="loss"))
        self.coordinator.wait_for(lambda status: len(status["members"]) == 2, 60)
        return [Pair(member, decode, self.threads) for member in members]


@contextmanager
def running_pool(architecture: str | None, *options: str) -> Iterator[LongPool]:
    with (
        Coordinator.running("--sp-sizes", "1,2", "--min-chunk-tokens", "64", *options) as coordinator,
        ThreadPoolExecutor(40) as threads,
    ):
        pool = LongPool(coordinator, threads, architecture)
        yield pool
        pairs = pool.pairs()
        for pair in pairs:
            pair.prefill.stop()
        if architecture is not None:
            pairs[0].decode.stop()


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[LongPool]:
    with running_pool(getattr(request, "param", None)) as one:
        yield one


@pytest.fixture(scope="module")
def collecting_pool() -> Iterator[LongPool]:
    """KV comes to the prompt's own instance before it goes to decode."""
    with running_pool(None, "--set", "pool.ending=collected") as one:
        yield one


@pytest.mark.parametrize("loss", LOSSES)
def test_loss(pool: LongPool, loss: Loss) -> None:
    check_loss(pool, loss)


@pytest.mark.full
@pytest.mark.parametrize("loss", [loss for loss in ALL_LOSSES if loss.stage is Stage.COLLECT], ids=str)
def test_loss_while_rows_are_collected(collecting_pool: LongPool, loss: Loss) -> None:
    check_loss(collecting_pool, loss)


@pytest.mark.full
@pytest.mark.parametrize("loss", FAMILY_LOSSES, ids=str)
@pytest.mark.parametrize("pool", FAMILIES_HIT, indirect=True)
def test_loss_with_other_rows(pool: LongPool, loss: Loss) -> None:
    check_loss(pool, loss)


@pytest.mark.parametrize(
    "pool", [pytest.param("DeepseekV3ForCausalLM", marks=pytest.mark.full), "GptOssForCausalLM"], indirect=True
)
def test_a_member_without_room_for_other_rows(pool: LongPool) -> None:
    """Its KV pool holds less than a prompt, and four come at once: all are answered, and nothing is left."""
    assert pool.architecture is not None
    pool.pairs()[1].prefill.stop()  # it would be a third member
    pairs = pool.pairs(FEW_TOKENS)
    try:
        free = [_free_tokens(pair.prefill) for pair in pairs]
        shared = pool.coordinator.shared
        # What is collected has to fit the prompt's own instance.
        owners = pairs[:1] if FAMILIES[pool.architecture].states else pairs
        sent = [owners[number % len(owners)].send(PROMPT_TOKENS, seed=20 + number) for number in range(4)]
        assert all(pool.is_exact(prefill) for prefill in sent)
        assert pool.coordinator.shared > shared
        for pair, tokens in zip(pairs, free, strict=True):
            pair.check_clean(tokens)
    finally:
        pairs[1].prefill.stop()


def check_loss(pool: LongPool, loss: Loss) -> None:
    pairs = pool.pairs()
    assert all(pool.is_exact(pair.send(64, seed=number)) for number, pair in enumerate(pairs))
    free = [_free_tokens(pair.prefill) for pair in pairs]
    owner, helper = pairs
    with ExitStack() as resumed:
        request = _at_stage(pool, owner, loss, resumed)
        if loss.victim is Victim.DECODE:
            resumed.close()  # what continues a stopped process would undo the loss
        hit_at = time.monotonic()
        with _hit(pool, loss, owner, helper):
            resumed.close()
    reply = request.reply(OUTCOME_LIMIT_S)
    assert time.monotonic() - hit_at < OUTCOME_LIMIT_S + STOPPED_S
    if is_answer(reply):
        assert request.is_right(reply, pool.greedy)
    else:
        # Those without which the prompt can be answered have cost time alone.
        assert loss.victim in (Victim.OWNER, Victim.DECODE), reply
    _check_that_all_is_as_before(pool, free)


def _at_stage(pool: LongPool, owner: Pair, loss: Loss, resumed: ExitStack) -> Request:
    """A request at the stage; what is held for that goes on when `resumed` ends."""
    deadline_s = time.monotonic() + STAGE_LIMIT_S
    lengths = (DECODED_PROMPT_TOKENS, DECODED_TOKENS) if loss.stage is Stage.DECODING else (PROMPT_TOKENS, NEW_TOKENS)
    seed = 0
    while time.monotonic() < deadline_s:
        seed += 1
        request = Request(owner, pool.threads, zlib.crc32(str(loss).encode()) % 10_000 + seed, *lengths)
        if loss.stage is Stage.SENDING:
            _wait(lambda: bool(_steps(pool, "chunk")), request)
            resumed.enter_context(owner.decode.frozen_scheduler())
            # The pool has the request until decode has all of it: by then decode's lease would have run out.
            _wait(lambda: not _steps(pool, "chunk"), request)
            return request
        if loss.stage is Stage.DECODING:
            owner.decode.wait_for_load(lambda load: load["num_running_reqs"] == 1, STAGE_LIMIT_S)
            return request
        if _wait(lambda: bool(_steps(pool, str(loss.stage))), request):
            return request
    raise AssertionError(f"no request was seen at this stage within {STAGE_LIMIT_S:.0f} s")


def _wait(condition: Callable[[], bool], request: Request) -> bool:
    """Whether it came true before the request ended."""
    while not condition():
        if request.is_over:
            return False
        time.sleep(0.002)
    return True


def _steps(pool: LongPool, kind: str) -> list[dict[str, Any]]:
    """Steps of this kind that several members are at."""
    return [
        step
        for request in pool.coordinator.status()["requests"]
        for step in request["steps"]
        if step["kind"] == kind and step["ended_s"] is None and len(step["members"]) > 1
    ]


class _hit:  # noqa: N801  # reads as a verb
    """Kill or stop the victim; it goes on at the end, or is started again."""

    def __init__(self, pool: LongPool, loss: Loss, owner: Pair, helper: Pair) -> None:
        self._pool, self._loss = pool, loss
        self._engine = {Victim.HELPER: helper.prefill, Victim.OWNER: owner.prefill}.get(loss.victim, owner.decode)

    def __enter__(self) -> None:
        coordinator, number = self._pool.coordinator, self._loss.signal
        if self._loss.victim is Victim.COORDINATOR:
            coordinator.signal(number)
        elif number is signal.SIGKILL:
            for process_id in self._engine.process_ids():
                os.kill(process_id, number)
            self._engine.process.wait()
        else:
            self._stopped = self._engine.process_ids()
            for process_id in self._stopped:
                os.kill(process_id, number)

    def __exit__(self, *error: object) -> None:
        is_killed = self._loss.signal is signal.SIGKILL
        if not is_killed:
            time.sleep(STOPPED_S)
        if self._loss.victim is Victim.COORDINATOR:
            if is_killed:
                self._pool.coordinator.kill()
                self._pool.coordinator.start_again()
            else:
                self._pool.coordinator.signal(signal.SIGCONT)
        elif not is_killed:
            for process_id in self._stopped:
                os.kill(process_id, signal.SIGCONT)


def _check_that_all_is_as_before(pool: LongPool, free: list[int]) -> None:
    pairs = pool.pairs()
    for pair in pairs:
        pair.prefill.wait_idle(30)
    pairs[0].decode.wait_idle(30)
    shared = pool.coordinator.shared
    sent = [pairs[number % 2].send(20 + number, seed=5000 + number) for number in range(20)]
    sent += [pairs[number % 2].send(900 + 50 * number, seed=6000 + number) for number in range(5)]
    assert all(pool.is_exact(prefill) for prefill in sent)
    assert pool.coordinator.shared > shared
    for pair, tokens in zip(pairs, free, strict=True):
        pair.check_clean(tokens)


def _free_tokens(engine: Engine) -> int:
    engine.wait_idle(30)
    assert engine.post("/flush_cache", {}).status == 200
    tokens: int = engine.get("/laps").body["kv"]["free_tokens"]
    return tokens
