"""A completion endpoint for tests of batches: does what a prompt asks for, and keeps what it was asked.

Words in a prompt: `status=400` answers so, `status=503*2` twice and then well, `lost*3` drops the connection thrice,
`slow=0.2` takes so long. `/generate` with `return_logprob` answers with made-up scores.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import Counter
from typing import Any, Self

from aiohttp import web

TOP = 1 << 16


class FaultyEndpoint:
    """Serves in a thread of its own on 127.0.0.1. A context manager; `stop` and `start` make it come and go."""

    def __init__(self, port: int = 0, load: dict[str, Any] | None = None, api_key: str | None = None) -> None:
        self.port = port
        self.load = load
        self.api_key = api_key
        self.asked: Counter[str] = Counter()  # requests by prompt
        self.headers: list[dict[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.times_s: list[float] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self._loop = asyncio.SelectorEventLoop()  # whose transports can be listed, whatever SGLang's import set
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self) -> None:
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(20)

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/load", self._tell_load)
        app.router.add_get("/v1/models", self._tell_models)
        for path in ("/v1/completions", "/v1/chat/completions", "/generate"):
            app.router.add_post(path, self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def _stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            server = runner.server
            assert server is not None
            # Python 3.11 loses a connection that was accepted but is not yet attached when its server closes
            # (gh-109564): nothing more is accepted, and what was is attached, before it does.
            for site in runner.sites:
                assert isinstance(site, web.TCPSite)
                assert site._server is not None
                for listening in site._server.sockets:  # type: ignore[attr-defined]
                    self._loop.remove_reader(listening.fileno())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await runner.cleanup()
            await asyncio.sleep(0.05)  # a connection that was just accepted gets its transport, by which it is closed
            for _ in range(50):  # whatever the server knows of it: a thread that stood still sees things in any order
                tasks = asyncio.all_tasks() - {asyncio.current_task()}
                transports = [one for one in self._loop._transports.values() if not one.is_closing()]  # type: ignore[attr-defined]
                if not tasks and not transports:
                    break
                for task in tasks:
                    task.cancel()
                for transport in transports:
                    transport.abort()
                await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.sleep(0.01)
            await server.shutdown(0.0)
            await asyncio.sleep(0.01)

    async def _tell_load(self, request: web.Request) -> web.Response:
        return web.json_response(self.load) if self.load is not None else web.Response(status=404)

    async def _tell_models(self, request: web.Request) -> web.Response:
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        return web.json_response({"data": []})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        prompt = _prompt(body)
        self.asked[prompt] += 1
        self.headers.append(dict(request.headers))
        self.bodies.append(body)
        self.times_s.append(time.monotonic())
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._do(request, body, prompt)
        finally:
            self.in_flight -= 1

    async def _do(self, request: web.Request, body: dict[str, Any], prompt: str) -> web.StreamResponse:
        if found := re.search(r"slow=([0-9.]+)", prompt):
            await asyncio.sleep(float(found[1]))
        if (found := re.search(r"lost(?:\*(\d+))?", prompt)) and _again(self.asked[prompt], found[1]):
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if (found := re.search(r"status=(\d+)(?:\*(\d+))?", prompt)) and _again(self.asked[prompt], found[2]):
            headers = {"Retry-After": "1"} if "after" in prompt else {}
            return web.json_response({"error": {"message": "as asked"}}, status=int(found[1]), headers=headers)
        if body.get("return_logprob"):
            return web.json_response(scores_of(body))
        text = f"reply to {prompt}"
        if request.path == "/generate":
            return web.json_response(
                {
                    "text": text,
                    "output_ids": [7, 8],
                    "meta_info": {"prompt_tokens": 4, "completion_tokens": 2, "finish_reason": {"type": "length"}},
                }
            )
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if request.path == "/v1/completions":
            choice["text"] = text
        else:
            choice["message"] = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
        return web.json_response({"id": "x-1", "choices": [choice], "usage": usage})


def scores_of(body: dict[str, Any]) -> dict[str, Any]:
    """Scores as SGLang sends them: token t at position p has log-probability -(p + t / 1000)."""
    ids = body.get("input_ids") or [ord(one) for one in body["text"]]
    count = body.get("top_logprobs_num", 0)
    candidates = body.get("token_ids_logprob")

    def score(position: int, token: int) -> float:
        return -(position + token / 1000)

    meta: dict[str, Any] = {
        "prompt_tokens": len(ids),
        "completion_tokens": 1,
        "input_token_logprobs": [
            [None if not position else score(position, token), token, None] for position, token in enumerate(ids)
        ],
    }
    if candidates is not None:
        meta["input_token_ids_logprobs"] = [
            [[score(position, token), token, None] for token in candidates] if position else None
            for position in range(len(ids))
        ]
    elif count:
        meta["input_top_logprobs"] = [
            [[score(position, token), token, None] for token in range(count)] if position else None
            for position in range(len(ids))
        ]
    if ids[0] == 99:  # what some servers do
        meta = {"prompt_tokens": len(ids), "completion_tokens": 1}
    return {"text": "", "output_ids": [1], "meta_info": meta}


def _again(times: int, most: str | None) -> bool:
    return most is None or times <= int(most)


def _prompt(body: dict[str, Any]) -> str:
    if "messages" in body:
        return str(body["messages"][-1]["content"])
    return str(body.get("prompt", body.get("text", body.get("input_ids"))))
