"""Requests of low priority that fill real instances make room for urgent ones, and come to the same end later."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.router_cli import RunningRouter, running_router

pytestmark = pytest.mark.integration

CACHE_REPORT = ("--enable-cache-report",)
SPECS = {
    "undivided": (EngineSpec(Role.PLAIN, arguments=CACHE_REPORT, name="evicting"),),
    "divided": (
        EngineSpec(Role.BOTH, arguments=CACHE_REPORT, name="evicting"),
        EngineSpec(Role.DECODE, arguments=CACHE_REPORT, name="evicting"),
    ),
}
PLACES = 2
LOW_TOKENS = 1500
URGENT = {"x-sgl-ttft-slo-ms": "2000"}  # half of which it waits for a place


@pytest.fixture(params=list(SPECS))
def engines(request: pytest.FixtureRequest) -> list[Engine]:
    return FLEET.get(*SPECS[request.param])


@pytest.fixture
def router(engines: list[Engine]) -> Iterator[RunningRouter]:
    with running_router(engines, "--max-concurrent-requests", str(PLACES), "--max-evictions", "1") as running:
        yield running


def generate(router: RunningRouter, first: int, new_tokens: int, **headers: str) -> Any:
    body = {
        "input_ids": [first, *range(10, 200)],
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
    }
    reply, _ = router.call("POST", "/generate", body, headers=headers)
    assert reply.status == 200, reply.body
    return reply.body


def test_urgent_requests_do_not_wait_for_low_ones(router: RunningRouter) -> None:
    alone = [generate(router, 5 + number, LOW_TOKENS)["output_ids"] for number in range(PLACES)]
    with ThreadPoolExecutor(2 * PLACES) as threads:
        began_s = time.monotonic()
        low = [
            threads.submit(generate, router, 5 + number, LOW_TOKENS, **{"x-sgl-priority": "low"})
            for number in range(PLACES)
        ]
        time.sleep(0.5)
        urgent = [threads.submit(generate, router, 100 + number, 2, **URGENT) for number in range(PLACES)]
        for request in urgent:
            request.result()
        urgent_s = time.monotonic() - began_s
        replies = [request.result() for request in low]
    assert [reply["output_ids"] for reply in replies] == alone
    assert all(reply["meta_info"]["cached_tokens"] > 100 for reply in replies)
    assert router.metric("sglang_ext_router_events_total", 'event="evicted"') >= 1
    assert urgent_s < time.monotonic() - began_s
    assert router.is_idle()
