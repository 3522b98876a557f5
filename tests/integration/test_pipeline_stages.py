"""A prefill of two pipeline stages, SGLang's own scheduler on both, gives the tokens that Hugging Face gives."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.engines import FLEET, EngineSpec
from support.laps import Pair
from support.pipeline import DECODE, DECODE_TP3, LENGTHS_TOKENS, SHAPE, STOCK_STAGES

pytestmark = pytest.mark.integration


@pytest.fixture(params=[DECODE, pytest.param(DECODE_TP3, marks=pytest.mark.full)], ids=["tp1", "tp3"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    decode_spec: EngineSpec = request.param
    prefill, decode = FLEET.get(STOCK_STAGES, decode_spec)
    with ThreadPoolExecutor(8) as threads:
        yield Pair(prefill, decode, threads, SHAPE)


def test_prompts_of_every_length(pair: Pair) -> None:
    assert pair.prefill.get("/server_info").body["pp_size"] == 2
    assert len(pair.prefill.process_ids("sglang::scheduler")) == 2
    for length in LENGTHS_TOKENS:
        assert pair.send(length, seed=length).is_exact(), length


def test_four_at_once_with_short_ones_between(pair: Pair) -> None:
    longs = [pair.send(1900 + number, seed=9000 + number) for number in range(4)]
    shorts = [pair.send(20 + number, seed=9010 + number) for number in range(4)]
    assert all(request.is_exact() for request in (*shorts, *longs))
    pair.prefill.wait_idle()
    pair.decode.wait_idle()


def test_a_cached_prefix(pair: Pair) -> None:
    first = pair.send(600, seed=9020)
    assert first.is_exact()
    again = pair.send(900, seed=9021, prefix=first.prompt)
    assert again.is_exact()
    prefill_reply, _ = again.replies.result()
    assert prefill_reply.body["meta_info"]["cached_tokens"] >= 600
