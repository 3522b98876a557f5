"""Decode instances with a prefix cache: the router finds the one that holds the prompt, and what it holds is not sent.

Conversations over real engines, with both transfers that run on a CPU; their tokens are those of one instance.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.handshake_process import wait_until
from support.reference import greedy_reference, random_prompt
from support.router_cli import RunningRouter, running_router
from support.transfer_metrics import settled

pytestmark = pytest.mark.integration

PAGE_TOKENS = 16
NEW_TOKENS = 12
SETTLED_S = 1.0  # in which the events of a reply have come
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # layers × keys and values × KV heads × head size × float32
PAGES = ("--page-size", str(PAGE_TOKENS))
CACHING = ("--disaggregation-decode-enable-radix-cache",)
HANDSHAKE = ("--transfer-backend", "handshake")
TCP = ("--transfer-backend", "sglang_ext_tcp")
SILENT = ("--kv-events", "off")


@pytest.fixture(
    params=[
        pytest.param((HANDSHAKE, True), id="handshake, events"),
        pytest.param((TCP, True), id="tcp, events", marks=pytest.mark.full),
        pytest.param((HANDSHAKE, False), id="handshake, estimate", marks=pytest.mark.full),
        pytest.param((TCP, False), id="tcp, estimate", marks=pytest.mark.full),
    ]
)
def setting(request: pytest.FixtureRequest) -> tuple[list[Engine], bool, bool]:
    """A prefill and two decode instances, whether these publish events, and whether prefill counts what it sends."""
    transfer, has_events = request.param
    options = (*transfer, *(() if has_events else SILENT))
    decodes = [
        EngineSpec(Role.DECODE, arguments=(*PAGES, *CACHING), worker_options=options, name=name) for name in "ab"
    ]
    engines = FLEET.get(EngineSpec(Role.BOTH, arguments=PAGES, worker_options=options), *decodes)
    return engines, has_events, transfer is HANDSHAKE


def held_tokens(router: RunningRouter) -> float:
    """Return how many prompt tokens the router believed to be held where it sent them for decode."""
    name = "sglang_ext_router_decode_prompt_tokens_total"
    lines = str(router.call("GET", "/metrics")[0].body).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f'{name}{{cached="true"}}'))


class Conversation:
    """Turns that each go on behind the answer of the one before."""

    def __init__(self, seed: int) -> None:
        self.prompt = random_prompt(200, seed=seed)
        self._seed = seed

    def ask(self, router: RunningRouter) -> str:
        """Send a turn and check its tokens; return its decode instance. The next turn follows."""
        body = {
            "input_ids": self.prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        }
        reply, headers = router.call("POST", "/generate", body)
        assert reply.status == 200, reply
        assert reply.body["output_ids"] == greedy_reference(self.prompt, NEW_TOKENS)
        self._seed += 1000
        self.prompt = [*self.prompt, *reply.body["output_ids"], *random_prompt(50, seed=self._seed)]
        return headers["x-sglang-ext-decode"]


def sent_tokens(prefill: Engine, send: Callable[[], str]) -> tuple[str, int]:
    """Return what `send` returns, and how many tokens' KV prefill wrote meanwhile."""
    before_bytes = settled(prefill, "written_bytes_total")
    answer = send()
    return answer, round((settled(prefill, "written_bytes_total") - before_bytes) / TOKEN_BYTES)


def test_a_conversation_stays_at_the_decode_instance_that_holds_it(setting: tuple[list[Engine], bool, bool]) -> None:
    engines, has_events, counts_sent = setting
    prefill, *decodes = engines
    first, second = Conversation(seed=1), Conversation(seed=2)
    with running_router(engines) as router:

        def known(engine: Engine) -> dict[str, Any]:
            described: dict[str, Any] = router.workers()[engine.url]["cached_prefixes"]
            return described

        source = "events" if has_events else "estimate"
        wait_until(lambda: all(known(decode)["from"] == source for decode in decodes), 20)
        homes = [conversation.ask(router) for conversation in (first, second)]
        for _ in range(3):
            for conversation, home in zip((first, second), homes, strict=True):
                prompt = conversation.prompt
                before = held_tokens(router)
                time.sleep(SETTLED_S)
                if counts_sent:
                    used, sent = sent_tokens(prefill, lambda conversation=conversation: conversation.ask(router))  # type: ignore[misc]
                else:
                    used, sent = conversation.ask(router), -1
                assert used == home
                held = held_tokens(router) - before
                assert held > len(prompt) // 2
                if counts_sent and has_events:
                    # Whole pages are written, and with the last one the first token and what belongs to it.
                    assert 0 <= sent - (len(prompt) - held) < 2 * PAGE_TOKENS
        # What is flushed there has to be sent again, and is not looked for.
        for engine in engines:
            engine.wait_idle()
        wait_until(lambda: router.admin("POST", "/flush_cache").status == 200, 20)  # refused until all is freed
        if has_events:
            wait_until(lambda: all(known(decode)["blocks"] == 0 for decode in decodes), 5)
        before = held_tokens(router)
        first.ask(router)
        assert held_tokens(router) == before


def test_a_decode_instance_without_a_prefix_cache_holds_nothing() -> None:
    engines = FLEET.get(EngineSpec(Role.BOTH, arguments=PAGES), EngineSpec(Role.DECODE, arguments=PAGES))
    with running_router(engines) as router:
        assert "cached_prefixes" not in router.workers()[engines[1].url]
        conversation = Conversation(seed=3)
        for _ in range(2):
            conversation.ask(router)
        assert held_tokens(router) == 0
