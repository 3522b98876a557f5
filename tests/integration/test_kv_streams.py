"""Prompts that several instances compute go to decode from all of them, with the tokens of Hugging Face."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.client import HTTPException
from typing import Any, NamedTuple

import pytest

from sglang_ext.types import Role
from support import nixl_folder
from support.engines import FLEET, Engine, EngineSpec
from support.laps import Pair, Prefill
from support.long_pool import Coordinator
from support.transfer_metrics import metric, settled

pytestmark = pytest.mark.integration

HANDSHAKE = ("--transfer-backend", "handshake")
MIN_TOKENS = 200
LONG = 900
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # layers × keys and values × KV heads × head size × float32
METADATA_BYTES = 10_000  # of a request, at most
# A silent peer is given up after a lease of 10 s; the health of a dead prefill instance tells after about 4 s.
LOSS_LIMIT_S = 25.0
CACHING = ("--disaggregation-decode-enable-radix-cache",)


def member(coordinator: Coordinator, name: str, transport: str, *arguments: str) -> EngineSpec:
    options = (
        *(*HANDSHAKE, "--transfer-transport", transport),
        *("--cdsp-coordinator", coordinator.address, "--cdsp-min-tokens", str(MIN_TOKENS)),
        *("--laps-boundary-tokens", "256"),
        *("--set", "cdsp.step_timeout_s=20"),
    )
    return over(transport, EngineSpec(Role.LONG, worker_options=options, arguments=arguments, name=name))


def over(transport: str, spec: EngineSpec) -> EngineSpec:
    """An engine that finds the transport's package."""
    if transport != "nixl":
        return spec
    return replace(spec, environment=nixl_folder.ENVIRONMENT, has_own_imports=True)


class Setting(NamedTuple):
    """How a pool and its decode instance are."""

    interleaving: str
    page_tokens: int
    decode_ranks: int
    transport: str = "tcp"


class LongPool:
    """Three members, a coordinator and a decode instance."""

    def __init__(self, setting: Setting, coordinator: Coordinator, pairs: list[Pair]) -> None:
        self.setting = setting
        self.coordinator = coordinator
        self.pairs = pairs

    def free_tokens(self) -> list[int]:
        for pair in self.pairs:
            pair.prefill.wait_idle()
            assert pair.prefill.post("/flush_cache", {}).status == 200
        return [pair.status()["kv"]["free_tokens"] for pair in self.pairs]

    def written_bytes(self) -> list[float]:
        return [settled(pair.prefill, "written_bytes_total") for pair in self.pairs]

    def check_clean(self, free_tokens: list[int]) -> None:
        for pair, tokens in zip(self.pairs, free_tokens, strict=True):
            pair.check_clean(tokens)
        decode = self.pairs[0].decode
        for gauge in ("receiving", "receiving_early", "unsettled_permits"):
            assert settled(decode, gauge) == 0
        assert all(metric(pair.prefill, "sending") == 0 for pair in self.pairs)

    def wait_connected(self, members: int = 3) -> None:
        self.coordinator.wait_for(lambda status: len(status["members"]) == members, timeout_s=60)


def has_open_step(status: dict[str, Any]) -> bool:
    return any(step["ended_s"] is None for request in status["requests"] for step in request["steps"])


@contextmanager
def long_pool(setting: Setting, name: str, threads: ThreadPoolExecutor) -> Iterator[LongPool]:
    options = ("--sp-sizes", "1,2,3", "--min-chunk-tokens", "64", "--set", f"pool.interleaving={setting.interleaving}")
    options += ("--set", "pool.kept_rows=spread")  # what members send goes to decode
    pages = ("--page-size", str(setting.page_tokens))
    with Coordinator.running(*options) as coordinator:
        specs = [member(coordinator, f"{name}{number}", setting.transport, *pages) for number in range(3)]
        caching = CACHING if setting.decode_ranks == 1 else ("--tp", str(setting.decode_ranks))
        # A pool's prompts are called for as soon as decode knows of them.
        late = ("--set", "transfer.late_slots_tokens=1")
        options = (*HANDSHAKE, "--transfer-transport", setting.transport, *late)
        decode_spec = EngineSpec(Role.DECODE, arguments=(*pages, *caching), worker_options=options, name=name)
        engines: list[Engine] = FLEET.get(*specs, over(setting.transport, decode_spec))
        pool = LongPool(setting, coordinator, [Pair(engine, engines[-1], threads) for engine in engines[:-1]])
        pool.wait_connected()
        try:
            yield pool
        finally:
            for engine in engines:
                engine.stop()


SETTINGS = {
    "zigzag, page 1, decode TP 1": Setting("zigzag", 1, 1),
    "striped, page 16, decode TP 2": Setting("striped", 16, 2),
}
OVER_NIXL = Setting("zigzag", 16, 2, "nixl")  # the transport of pools on GPUs
TESTED = "striped, page 16, decode TP 2"  # the others with all tests


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


@pytest.fixture(
    scope="module",
    params=[
        *(
            pytest.param(setting, id=name, marks=() if name == TESTED else pytest.mark.full)
            for name, setting in SETTINGS.items()
        ),
        pytest.param(OVER_NIXL, id="nixl", marks=(pytest.mark.full, nixl_folder.needs_nixl)),
    ],
)
def pool(request: pytest.FixtureRequest, threads: ThreadPoolExecutor) -> Iterator[LongPool]:
    with long_pool(request.param, f"streams{request.param_index}-", threads) as one:
        yield one


def test_every_instance_sends_what_it_computes(pool: LongPool) -> None:
    free, before, shared = pool.free_tokens(), pool.written_bytes(), pool.coordinator.shared
    lengths = (300, 401, 511, 900, 1504, 1990)
    for number, tokens in enumerate(lengths):
        assert pool.pairs[number % 3].send(tokens, seed=100 + number).is_exact(), tokens
    # Whether it pays is the planner's to say; nearly always it does.
    assert pool.coordinator.shared > shared + len(lengths) // 2
    sent = [now - then for now, then in zip(pool.written_bytes(), before, strict=True)]
    times = [one["times"] for one in pool.coordinator.settled()["recent"] if one["outcome"] == "streamed"]
    assert all(0 <= one["exposed_transfer_s"] < one["transfer_s"] < 60 for one in times), times
    page = pool.setting.page_tokens
    # Each row once, from whichever member it came.
    whole = sum(-(-tokens // page) * page for tokens in lengths) * TOKEN_BYTES
    assert whole <= sum(sent) <= whole + len(lengths) * pool.setting.decode_ranks * METADATA_BYTES
    assert all(one > METADATA_BYTES for one in sent), sent
    assert metric(pool.pairs[0].decode, "requests_total", "restarted") == 0
    pool.check_clean(free)


@pytest.mark.full
def test_layers_are_sent_while_later_ones_are_computed(pool: LongPool) -> None:
    """How soon a grant comes is up to the machine; that it comes before the end of some chunk is not."""

    def overlapped() -> float:
        return sum(settled(pair.prefill, "overlapped_parts_total") for pair in pool.pairs)

    before = overlapped()
    for seed in range(200, 212):
        assert pool.pairs[seed % 3].send(1990, seed).is_exact()
        if overlapped() > before:
            return
    raise AssertionError("no layer was stored before its chunk had been computed")


def test_what_is_cached_here_or_there_is_not_computed_again(pool: LongPool) -> None:
    prompt: tuple[int, ...] = ()
    for turn in range(3):
        one = pool.pairs[1].send(len(prompt) + 450, seed=300 + turn, prefix=prompt)
        assert one.is_exact(), turn
        prompt = (*one.prompt, *one.tokens())
    # Another instance has nothing cached, decode has.
    assert pool.pairs[2].send(len(prompt) + 300, seed=310, prefix=prompt).is_exact()


@pytest.mark.full
def test_many_at_once_with_short_ones_between(pool: LongPool) -> None:
    free = pool.free_tokens()
    running = []
    for number in range(6):
        running.append(pool.pairs[number % 3].send(500 + 70 * number, seed=400 + number))
        running += [pool.pairs[(number + k) % 3].send(10 + k, seed=500 + 10 * number + k) for k in range(2)]
    for one in running:
        assert one.is_exact(), len(one.prompt)
    pool.check_clean(free)


def test_aborted_while_its_kv_is_sent(pool: LongPool) -> None:
    free = pool.free_tokens()
    decode = pool.pairs[0].decode
    for number in range(3):
        one = pool.pairs[number].send(LONG, seed=600 + number, rid=f"long-{number}")
        time.sleep(0.1 * number)
        pool.pairs[number].abort(f"long-{number}")
        one.replies.result(timeout=60)
    decode.wait_idle()
    assert pool.pairs[0].send(LONG, seed=620).is_exact()
    pool.check_clean(free)


@contextmanager
def stopped(engine: Engine) -> Iterator[None]:
    """All of its processes."""
    processes = engine.process_ids()
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            try:
                os.kill(process, signal.SIGCONT)
            except ProcessLookupError:
                pass


@pytest.fixture
def mortal(threads: ThreadPoolExecutor) -> Iterator[LongPool]:
    with long_pool(Setting("zigzag", 1, 1), f"mortal{time.monotonic_ns()}-", threads) as one:
        yield one


def held_back(pool: LongPool, owner: Pair, holder: Pair, seed: int) -> tuple[Prefill, ExitStack]:
    """A long prompt in the middle of a chunk that waits for `holder`, until the stack is closed."""
    for attempt in range(10):
        stack = ExitStack()
        stack.enter_context(stopped(holder.prefill))
        before = pool.coordinator.status()["requests_declined"]
        one = owner.send(LONG, seed=seed + attempt)
        pool.coordinator.wait_for(lambda now, then=before: has_open_step(now) or now["requests_declined"] > then)
        if has_open_step(pool.coordinator.status()):
            return one, stack
        stack.close()
        assert one.is_exact()  # it was computed alone: the planner found that better
    raise AssertionError("no prompt is shared")


def check_decode(decode: Engine) -> int:
    """Nothing is left there; how many requests it has asked for again since its start."""
    decode.wait_idle()
    for gauge in ("receiving", "receiving_early", "unsettled_permits"):
        assert settled(decode, gauge) == 0
    return int(metric(decode, "requests_total", "restarted"))


@pytest.mark.chaos
@pytest.mark.full
def test_a_killed_member_costs_time_only(mortal: LongPool, threads: ThreadPoolExecutor) -> None:
    owner, helper, other = mortal.pairs
    decode = owner.decode
    assert owner.send(LONG, seed=700).is_exact()
    # A helper in the middle of its transfer: all is computed, and decode takes nothing.
    one, held = held_back(mortal, owner, other, 710)
    with stopped(decode):
        held.close()
        mortal.coordinator.wait_for(lambda status: any(one["computed_s"] is not None for one in status["requests"]))
        helper.prefill.kill()
    assert one.is_exact()
    # What had left the helper before it died needs no second transfer.
    restarted = check_decode(decode)
    assert restarted in {0, 1}
    mortal.wait_connected(2)
    # The coordinator in the middle of a chunk.
    one, held = held_back(mortal, owner, other, 720)
    mortal.coordinator.kill()
    held.close()
    assert one.is_exact()
    assert check_decode(decode) == restarted + 1
    mortal.coordinator.start_again()
    mortal.wait_connected(2)
    # A helper in the middle of a chunk.
    one, held = held_back(mortal, owner, other, 730)
    other.prefill.kill()
    held.close()
    assert one.is_exact()
    assert check_decode(decode) == restarted + 2
    assert owner.send(LONG, seed=740).is_exact()
    # The prompt's own instance in the middle of a chunk: that is the end of the request, and of nothing else.
    again, *_ = FLEET.get(helper.prefill.spec, owner.prefill.spec, decode.spec)
    mortal.wait_connected(2)
    survivor = Pair(again, decode, threads)
    one, held = held_back(mortal, owner, survivor, 750)
    killed_at_s = time.monotonic()
    owner.prefill.kill()
    held.close()
    with pytest.raises((OSError, HTTPException)):
        one.replies.result(timeout=60)
    assert time.monotonic() - killed_at_s < LOSS_LIMIT_S
    decode.wait_idle()
    mortal.wait_connected(1)
    assert survivor.send(LONG, seed=760).is_exact()
    again.wait_idle()
    assert again.post("/flush_cache", {}).status == 200
    again.stop()
