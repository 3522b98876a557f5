"""A long prefill that yields between chunks goes on exactly where it was, and nothing of it is left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.laps import DECODE, LONG_TOKENS, SHAPE, Pair
from support.reference import random_prompt

pytestmark = pytest.mark.integration

CHUNK_TOKENS = 32
SHORT_TOKENS = 24
ABORT_LIMIT_S = 3.0
SMALL_KV_TOKENS = 4096
SMALL_CHUNKS = ("--chunked-prefill-size", str(CHUNK_TOKENS))
LAPS_OPTIONS = ("--laps-boundary-tokens", "64", "--set", "laps.min_chunk_tokens=16")


def prefill_spec(*arguments: str) -> EngineSpec:
    return EngineSpec(Role.BOTH, shape=SHAPE, arguments=(*SMALL_CHUNKS, *arguments), worker_options=LAPS_OPTIONS)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as executor:
        yield executor


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.full), 16], ids=["page1", "page16"])
def paged(request: pytest.FixtureRequest, threads: ThreadPoolExecutor) -> Iterator[Pair]:
    page = () if request.param == 1 else ("--page-size", str(request.param))
    yield from checked_pair(
        threads, *FLEET.get(prefill_spec(*page), EngineSpec(Role.DECODE, shape=SHAPE, arguments=page))
    )


@pytest.fixture
def pair(threads: ThreadPoolExecutor) -> Iterator[Pair]:
    yield from checked_pair(threads, *FLEET.get(prefill_spec(), DECODE))


def checked_pair(threads: ThreadPoolExecutor, prefill: Engine, decode: Engine) -> Iterator[Pair]:
    """A pair that must be left as it was found."""
    pair = Pair(prefill, decode, threads)
    prefill.wait_idle()
    assert prefill.post("/flush_cache", {}).status == 200
    assert decode.post("/flush_cache", {}).status == 200
    before = pair.status()["kv"]["free_tokens"]
    yield pair
    for engine in (prefill, decode):
        engine.post("/abort_request", {"rid": "", "abort_all": True})
    pair.check_clean(before)


@pytest.mark.parametrize(
    "shorts", [pytest.param(0, marks=pytest.mark.full), 1, pytest.param(2, marks=pytest.mark.full), 5]
)
def test_greedy_tokens_with_shorts_between_chunks(paged: Pair, shorts: int) -> None:
    """They are computed with chunks of the long one or between two of them, where it is parked."""
    parks_before = paged.status()["parks"]
    long = paged.send(LONG_TOKENS + shorts, seed=shorts)
    sent, before_the_long_one = [], 0
    for number in range(shorts):
        paged.wait_for(lambda status: status["long"]["requests"] == 1 or long.replies.done())
        sent.append(paged.send(SHORT_TOKENS + number, seed=100 + number))
        sent[-1].replies.result()
        before_the_long_one += not long.replies.done()
    assert all(short.is_exact() for short in sent)
    assert long.is_exact()
    assert before_the_long_one >= min(1, shorts)
    assert paged.status()["parks"] - parks_before <= shorts


def test_what_ran_and_who_was_parked_meanwhile_is_told(pair: Pair) -> None:
    cursor = pair.prefill.get("/laps?since=0").body["work"]["last"]
    parked_one = pair.send(LONG_TOKENS, seed=1, rid="parked-one", priority="low")
    pair.wait_for_running(parked=0)
    urgent_one = pair.send(LONG_TOKENS + 1, seed=2, rid="urgent-one", priority="real-time")
    pair.wait_for_running(parked=1)
    going_on = pair.prefill.get(f"/laps?since={cursor}").body["work"]
    assert ("parked-one", None) in [(one[4], one[2]) for one in going_on["records"] if one[0] == "parked"]
    told: list[list[Any]] = []
    missed = 0
    until_s = time.monotonic() + 60
    while sum(record[6] for record in told if record[0] == "transfer") < 2:
        work = pair.prefill.get(f"/laps?since={cursor}").body["work"]
        told += [record for record in work["records"] if record[2] is not None]
        cursor = work["last"]
        missed += work["missed"]  # where this test was stalled for longer than 64 batches take
        assert time.monotonic() < until_s, told
    assert urgent_one.is_exact()
    assert parked_one.is_exact()
    tokens = 2 * LONG_TOKENS + 1
    batches = [record for record in told if record[0] == "prefill" and record[3] is not None]
    assert {record[3] for record in batches} == {"long"}
    computed_tokens = sum(record[5] for record in batches)
    assert computed_tokens == tokens or (missed and computed_tokens < tokens)
    assert sum(record[5] for record in told if record[0] == "transfer") == tokens
    ends = [record[2] for record in batches]
    assert ends == sorted(ends)
    parked = [record for record in told if record[0] == "parked" and record[4] == "parked-one"]
    assert parked
    for _, start_s, end_s, length_class, _, left_tokens, _ in parked:
        meanwhile = [one for one in told if one[0] == "prefill" and start_s <= one[1] and one[2] <= end_s + 0.1]
        assert meanwhile
        assert length_class == "long"
        assert 0 < left_tokens < LONG_TOKENS
    assert "work" not in pair.status(), "only where it is asked for"
    assert pair.prefill.get("/laps?since=-1").status in (400, 422)


@pytest.mark.full
def test_several_are_parked_at_once(pair: Pair) -> None:
    """Each later one is more urgent than all before it."""
    longs = []
    for number, priority in enumerate(("low", "normal", "high", "real-time")):
        longs.append(pair.send(LONG_TOKENS + number, seed=10 + number, priority=priority))
        pair.wait_for_running(parked=number)
    shorts = [pair.send(SHORT_TOKENS, seed=20 + number) for number in range(3)]
    assert all(request.is_exact() for request in (*shorts, *longs))


def test_shared_prefix_is_used_from_the_cache(pair: Pair) -> None:
    prefix = random_prompt(800, seed=30)
    first = pair.send(LONG_TOKENS, seed=31, prefix=prefix)
    pair.wait_for(lambda status: status["long"]["requests"] == 1)
    others = [pair.send(810 + number, seed=32 + number, prefix=prefix) for number in range(3)]
    assert all(request.is_exact() for request in (first, *others))
    again = pair.send(820, seed=40, prefix=prefix)
    assert again.is_exact()
    _, reply = again.replies.result()
    assert reply.body["meta_info"]["prompt_tokens"] == 820


@pytest.mark.parametrize("stage", ["chunking", "parked"])
def test_abort(pair: Pair, stage: str) -> None:
    victim = pair.send(LONG_TOKENS, seed=50, rid=f"victim-{stage}", priority="low")
    pair.wait_for(lambda status: status["long"]["requests"] == 1)
    others = []
    if stage == "parked":
        others.append(pair.send(LONG_TOKENS, seed=51, priority="real-time"))
        pair.wait_for(lambda status: status["parked"] == 1)
    pair.abort(f"victim-{stage}")
    aborted_at = time.monotonic()
    _, decode_reply = victim.replies.result(timeout=30)
    assert time.monotonic() - aborted_at < ABORT_LIMIT_S
    assert decode_reply.status != 200 or decode_reply.body["meta_info"]["finish_reason"]["type"] == "abort"
    assert pair.status()["long"]["requests"] == len(others)
    assert all(other.is_exact() for other in others)


def test_abort_of_everything_with_several_parked(pair: Pair) -> None:
    longs = []
    for number, priority in enumerate(("low", "high", "real-time")):
        longs.append(pair.send(LONG_TOKENS, seed=60 + number, priority=priority))
        pair.wait_for_running(parked=number)
    for engine in (pair.prefill, pair.decode):
        engine.post("/abort_request", {"rid": "", "abort_all": True})
    for long in longs:
        _, reply = long.replies.result(timeout=30)
        assert reply.status != 200 or reply.body["meta_info"]["finish_reason"]["type"] == "abort"
    assert pair.send(LONG_TOKENS, seed=70).is_exact()


@pytest.mark.full
def test_prefills_for_a_decode_instance_that_has_died_end(threads: ThreadPoolExecutor) -> None:
    """Each learns it from the first chunk that it cannot send; what it has left is not computed."""
    prefill, decode = FLEET.get(prefill_spec(), EngineSpec(Role.DECODE, shape=SHAPE, name="dies"))
    prefill.wait_idle()
    pair = Pair(prefill, decode, threads)
    before_tokens = prefill.load()["total_prefill_uncached_tokens"]
    longs = []
    for number, priority in enumerate(("low", "normal", "high", "real-time")):
        longs.append(pair.send(LONG_TOKENS, seed=500 + number, priority=priority))
        pair.wait_for_running(parked=number)
    with prefill.frozen_scheduler():
        decode.kill()
        decode.stop()
        # SGLang's front end knows it without its scheduler.
        computed_tokens = prefill.load()["total_prefill_uncached_tokens"] - before_tokens
    left_tokens = len(longs) * LONG_TOKENS - computed_tokens
    assert left_tokens > LONG_TOKENS
    pair.wait_for(lambda status: status["long"]["requests"] == 0)
    prefill.wait_idle()
    assert prefill.load()["total_prefill_uncached_tokens"] - before_tokens - computed_tokens < left_tokens / 2
    for long in longs:
        with pytest.raises(OSError):
            long.replies.result(timeout=20)  # decode's leg
    pair.wait_for(lambda status: status["kv"]["locked_tokens"] == 0)


def test_flush_waits_for_parked_requests(pair: Pair) -> None:
    long = pair.send(LONG_TOKENS, seed=80, priority="low")
    pair.wait_for(lambda status: status["long"]["requests"] == 1)
    other = pair.send(LONG_TOKENS, seed=81, priority="real-time")
    pair.wait_for(lambda status: status["parked"] == 1)
    load = pair.prefill.load()
    assert load["num_waiting_reqs"] >= 1
    assert load["num_waiting_uncached_tokens"] > 0
    assert pair.prefill.post("/flush_cache", {}).status != 200
    assert long.is_exact()
    assert other.is_exact()


def test_modes_switch_under_load(pair: Pair) -> None:
    requests = []
    generation = pair.status()["generation"]
    for number, mode in enumerate(("short", "long", "both", "long", "short", "both")):
        requests.append(pair.send(700 + number, seed=90 + number))
        requests += [pair.send(SHORT_TOKENS + n, seed=200 + 10 * number + n) for n in range(3)]
        reply = pair.prefill.post("/laps/mode", {"mode": mode})
        assert (reply.status, reply.body["mode"]) == (200, mode)
        generation += 1
        assert reply.body["generation"] == generation
    assert all(request.is_exact() for request in requests)


@pytest.mark.parametrize("body", [{"mode": "fast"}, {"mode": None}, {"mode": 1}, {"mode": ["short"]}, {}, [], "short"])
def test_unknown_mode_is_refused(pair: Pair, body: object) -> None:
    before = pair.status()
    reply = pair.prefill.post("/laps/mode", body)
    assert reply.status == 400
    assert reply.body["error"]["message"] == "mode must be one of short, long, both"
    assert (pair.status()["mode"], pair.status()["generation"]) == (before["mode"], before["generation"])
    assert pair.send(SHORT_TOKENS, seed=95).is_exact()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_a_deadline_or_priority_that_is_none_is_refused(pair: Pair, path: str, stream: bool) -> None:
    for name, value in (
        *(("ttft_slo_ms", value) for value in (0, -1, "soon", True, 1e-323, [250])),
        *(("priority", value) for value in ("nonsense", 1)),
    ):
        custom = {"custom_params": {f"sglang_ext_{name}": value}}
        body: dict[str, object] = {"stream": stream}
        if path == "/generate":
            body |= {"input_ids": random_prompt(SHORT_TOKENS, seed=96), "sampling_params": custom}
        elif path == "/v1/completions":
            body |= {"model": "m", "prompt": random_prompt(SHORT_TOKENS, seed=96), **custom}
        else:
            body |= {"model": "m", "messages": [{"role": "user", "content": "hello"}], **custom}
        for engine in (pair.prefill, pair.decode):
            reply = engine.post(path, body)
            assert reply.status == 400, (name, value, reply.body)
            error = reply.body["error"]
            assert error["param"] == f"custom_params.sglang_ext_{name}"
            assert error["type"] == "invalid_request_error"
            assert f"sglang_ext_{name} must be" in error["message"]


@pytest.mark.parametrize("slo_ms", [1e-9, 1e300, None])
def test_extreme_deadlines_do_no_harm(pair: Pair, slo_ms: float | None) -> None:
    shorts = [pair.send(SHORT_TOKENS, seed=96, slo_ms=slo_ms) for _ in range(2)]
    assert all(short.is_exact() for short in shorts)


@pytest.mark.full
def test_memory_for_two_longs_and_many_shorts(threads: ThreadPoolExecutor) -> None:
    """More work than KV memory: prefixes are evicted, no request waits for ever, tokens stay right."""
    spec = prefill_spec("--max-total-tokens", str(SMALL_KV_TOKENS))
    for pair in checked_pair(threads, *FLEET.get(spec, DECODE)):
        longs = [
            pair.send(SMALL_KV_TOKENS // 5 * 2 + 200 * (number % 2), seed=300 + number, priority=priority)
            for number, priority in enumerate(("low", "normal", "high", "real-time", "low", "high"))
        ]
        shorts = [pair.send(SHORT_TOKENS + number, seed=310 + number) for number in range(12)]
        assert all(request.is_exact() for request in (*shorts, *longs))
