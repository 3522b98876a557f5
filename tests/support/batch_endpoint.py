"""An endpoint that answers a batch's requests as their content tells, in a thread of its own.

    with batch_endpoint() as endpoint:
        endpoint.hold_prefix = "held"  # requests whose content begins so wait until it is None
        ... endpoint.url, endpoint.seen, endpoint.in_flight, endpoint.aborted

A chat request whose last message is `status 400` is answered with 400; every other one with its content reversed.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


class BatchEndpoint:
    """What it has seen; changed by its own thread, read by the test."""

    def __init__(self) -> None:
        self.url = ""
        self.seen: Counter[str] = Counter()  # content → how often it arrived
        self.order: list[str] = []
        self.answered: Counter[str] = Counter()
        self.headers: list[dict[str, str]] = []
        self.in_flight = 0
        self.aborted = 0  # clients that closed their connection before the answer
        self.hold_prefix: str | None = None
        self.delay_s = 0.0
        self.refusals: dict[str, tuple[int, str]] = {}  # tenant → status and code of the error that it gets
        self.in_flight_of: Counter[str] = Counter()  # by tenant
        self.most_in_flight_of: Counter[str] = Counter()

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        content = str(body["messages"][-1]["content"])
        self.seen[content] += 1
        self.order.append(content)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        tenant = request.headers.get("x-sglang-ext-tenant", "")
        if tenant in self.refusals:
            status, code = self.refusals[tenant]
            error = {"message": "refused", "type": "rate_limit_error", "code": code}
            return web.json_response({"error": error}, status=status, headers={"Retry-After": "0.05"})
        self.in_flight += 1
        self.in_flight_of[tenant] += 1
        self.most_in_flight_of[tenant] = max(self.most_in_flight_of[tenant], self.in_flight_of[tenant])
        try:
            while self.hold_prefix is not None and content.startswith(self.hold_prefix):  # noqa: ASYNC110 - another thread's
                await asyncio.sleep(0.005)
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.in_flight -= 1
            self.in_flight_of[tenant] -= 1
        if content.startswith("status "):
            status = int(content.split()[1])
            error = {"message": f"told to fail with {status}", "type": "invalid_request_error", "code": status}
            return web.json_response({"error": error}, status=status)
        self.answered[content] += 1
        return web.json_response(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1,
                "model": body.get("model"),
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": content[::-1]},
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            }
        )


@contextmanager
def batch_endpoint(port: int = 0) -> Iterator[BatchEndpoint]:
    """Serve until the block ends."""
    endpoint = BatchEndpoint()
    loop = asyncio.new_event_loop()
    is_up = threading.Event()

    async def serve() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", endpoint.chat)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def run() -> None:
        runner = loop.run_until_complete(serve())
        is_up.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert is_up.wait(10)
    try:
        yield endpoint
    finally:
        endpoint.hold_prefix = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
