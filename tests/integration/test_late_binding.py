"""Short prompts that wait where a chunk is about to run are taken back from real instances, and computed elsewhere."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.handshake_process import wait_until
from support.reference import greedy_reference, random_prompt
from support.router_cli import RunningRouter, running_router

pytestmark = pytest.mark.integration
NEW_TOKENS = 6
SHORT, LONG = 60, 1000
AT_FIRST, AT_SECOND = 6, 7  # long prompts; the first instance is believed to need three seconds for its own
CHUNK_S = 60.0


class NamingCoordinator:
    """Names the instance that a test wants for each prompt, in the place of a long pool's coordinator."""

    def __init__(self) -> None:
        self.name, self.chunk_s = "", 0.0
        coordinator = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply({"members": [], "former_members": [], "requests": [], "recent": []})

            def do_POST(self) -> None:
                ticket = json.loads(self.rfile.read(int(self.headers["content-length"])))["ticket"]
                name = coordinator.name
                self._reply({"ticket": ticket, "instance": name, "members": [name], "chunk_s": coordinator.chunk_s})

            def _reply(self, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[NamingCoordinator]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


def in_flight(router: RunningRouter, engine: Engine) -> int:
    count: int = router.workers()[engine.url]["in_flight"]
    return count


def taken_back(router: RunningRouter) -> float:
    return router.metric("sglang_ext_router_events_total", 'event="taken_back"')


def test_a_short_prompt_leaves_an_instance_that_gets_a_chunk() -> None:
    """Nothing is computed while decode stands still, so all prompts wait at their instances."""
    first, second, decode = FLEET.get(
        EngineSpec(Role.BOTH, name="bound0"), EngineSpec(Role.BOTH, name="bound1"), EngineSpec(Role.DECODE)
    )
    with NamingCoordinator().running() as coordinator, ThreadPoolExecutor(20) as threads:
        arguments = ("--coordinator-url", coordinator.url, "--length-boundary-tokens", "256")
        with running_router([first, second, decode], *arguments, "--health-check-timeout-secs", "60") as router:
            wait_until(lambda: router.call("GET", "/pools")[0].body["long_pool"]["problem"] is None)
            sent: dict[int, Future[list[int]]] = {}

            def send_long(engine: Engine, count: int) -> None:
                coordinator.name = engine.url.removeprefix("http://")
                there = in_flight(router, engine)
                for seed in range(len(sent), len(sent) + count):
                    sent[seed] = threads.submit(router.greedy, random_prompt(LONG, seed=800 + seed), NEW_TOKENS)
                wait_until(lambda: in_flight(router, engine) == there + count)

            decode.freeze()
            try:
                send_long(second, AT_SECOND)
                send_long(first, AT_FIRST)
                short_prompt = random_prompt(SHORT, seed=799)
                short = threads.submit(router.greedy, short_prompt, NEW_TOKENS)
                wait_until(lambda: in_flight(router, first) == AT_FIRST + 1)
                assert taken_back(router) == 0
                coordinator.chunk_s = CHUNK_S
                coordinator.name = first.url.removeprefix("http://")
                seed = len(sent)
                sent[seed] = threads.submit(router.greedy, random_prompt(LONG, seed=800 + seed), NEW_TOKENS)
                wait_until(lambda: taken_back(router) == 1)
                assert (in_flight(router, first), in_flight(router, second)) == (AT_FIRST + 1, AT_SECOND + 1)
            finally:
                decode.thaw()
            assert short.result() == greedy_reference(short_prompt, NEW_TOKENS)
            for seed, tokens in sent.items():
                assert tokens.result() == greedy_reference(random_prompt(LONG, seed=800 + seed), NEW_TOKENS)
            wait_until(router.is_idle)
            assert taken_back(router) == 1
