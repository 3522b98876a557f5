"""`sglang-ext mock-engine`: a server with an instance's HTTP interface that computes nothing.

With one for prefill and one for decode a router can be tried in seconds, without SGLang and without a model. It is no
engine: every token is the word `mock`, no KV moves, and times are those of `--token-ms`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from aiohttp import web

from sglang_ext.command_parser import USAGE_ERROR, any_of
from sglang_ext.types import Role

CONTEXT_TOKENS = 1 << 17
KV_TOKENS = 1 << 20
BOOTSTRAP_PORT = 8998  # of every prefill role; nothing listens on it
DEFAULT_OUTPUT_TOKENS = 16
TOKEN = " mock"
_BYTES_PER_TOKEN = 4
_CHAT, _TEXT, _GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


_MODES = {Role.DECODE: "decode", Role.PLAIN: "null"}  # of other roles prefill


class MockEngine:
    """The state of one mock instance, and its handlers."""

    def __init__(self, role: Role, *, model: str, token_s: float) -> None:
        self.role = role
        self.model = model
        self.token_s = token_s
        self._running = 0

    def app(self) -> web.Application:
        """Return the application to serve."""
        app = web.Application(client_max_size=1 << 28)
        for path in ("/health", "/ping"):
            app.router.add_get(path, self._healthy)
        app.router.add_post("/abort_request", self._healthy)
        app.router.add_post("/flush_cache", self._healthy)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/v1/models", self._models)
        for path in (_CHAT, _TEXT, _GENERATE):
            app.router.add_post(path, self._generate)
        return app

    async def _healthy(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "disaggregation_mode": _MODES.get(self.role, "prefill"),
                "served_model_name": self.model,
                "max_total_num_tokens": KV_TOKENS,
                "context_length": CONTEXT_TOKENS,
                "disaggregation_bootstrap_port": BOOTSTRAP_PORT,
            }
        )

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self.model, "is_generation": True})

    async def _loads(self, request: web.Request) -> web.Response:
        load = {"num_running_reqs": self._running, "num_used_tokens": 0, "max_total_num_tokens": KV_TOKENS}
        return web.json_response({"loads": [load]})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except ValueError:
            return _refused("the body is not JSON")
        problem = self._bootstrap_problem(body)
        if problem is not None:
            return _refused(problem)
        tokens = 1 if self.role.is_prefill else _output_tokens(body)
        self._running += 1
        try:
            if not body.get("stream"):
                await asyncio.sleep(tokens * self.token_s)
                return web.json_response(self._answer(request.path, body, TOKEN * tokens, tokens))
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for event in self._events(request.path, body, tokens):
                await asyncio.sleep(self.token_s)
                await response.write(b"data: %b\n\n" % json.dumps(event).encode())
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            self._running -= 1

    def _bootstrap_problem(self, body: Any) -> str | None:
        """Return what is wrong with the fields by which prefill and decode find each other, or None."""
        if not isinstance(body, dict):
            return "the body must be an object"
        if self.role is Role.PLAIN:
            return None
        room, port = body.get("bootstrap_room"), body.get("bootstrap_port")
        rooms = room if isinstance(room, list) else [room]
        if not rooms or not all(type(number) is int and 0 <= number < 1 << 63 for number in rooms):
            return f"bootstrap_room must be an integer below 2**63, or a list of them, got {room!r}"
        if self.role.is_prefill and port is not None and {port} != {BOOTSTRAP_PORT} and not isinstance(port, list):
            return f"bootstrap_port must be {BOOTSTRAP_PORT}, which this instance has, got {port!r}"
        if not self.role.is_prefill and not body.get("bootstrap_host"):
            return "bootstrap_host must name the prefill instance"
        return None

    def _events(self, path: str, body: Mapping[str, Any], tokens: int) -> Iterator[dict[str, Any]]:
        for number in range(1, tokens + 1):
            text = TOKEN * number if path == _GENERATE else TOKEN  # SGLang repeats the text so far
            yield self._answer(path, body, text, number, is_event=True, is_last=number == tokens)

    def _answer(
        self,
        path: str,
        body: Mapping[str, Any],
        text: str,
        tokens: int,
        *,
        is_event: bool = False,
        is_last: bool = True,
    ) -> dict[str, Any]:
        prompt_tokens = max(1, len(json.dumps(body.get("messages") or body.get("prompt") or body.get("text") or "")))
        prompt_tokens = -(-prompt_tokens // _BYTES_PER_TOKEN)
        finish = "length" if is_last else None
        if path == _GENERATE:
            meta = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "cached_tokens": 0}
            reason = None if finish is None else {"type": finish, "length": tokens}
            return {"text": text, "meta_info": {**meta, "finish_reason": reason, "id": body.get("rid")}}
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if path == _CHAT:
            choice["delta" if is_event else "message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        kind = "chat.completion" if path == _CHAT else "text_completion"
        return {
            "id": body.get("rid") or "mock",
            "object": f"{kind}.chunk" if is_event and path == _CHAT else kind,
            "created": int(time.time()),
            "model": self.model,
            "choices": [choice],
            **({} if is_event and not is_last else {"usage": usage}),
        }


def _output_tokens(body: Mapping[str, Any]) -> int:
    sampling = body.get("sampling_params")
    given = sampling.get("max_new_tokens") if isinstance(sampling, dict) else None
    given = given or body.get("max_completion_tokens") or body.get("max_tokens")
    return given if type(given) is int and given > 0 else DEFAULT_OUTPUT_TOKENS


def _refused(message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": 400}}, status=400)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sglang-ext mock-engine`."""
    parser.add_argument(
        "--role", type=any_of(Role), choices=list(Role), required=True, help="what this instance imitates"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=30001, help="HTTP port")
    parser.add_argument("--model", default="mock", metavar="NAME", help="name of the model in the API")
    parser.add_argument("--token-ms", type=float, default=20.0, metavar="MS", help="time for each token of a reply")


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    engine = MockEngine(
        arguments.role,
        model=arguments.model,
        token_s=max(0.0, arguments.token_ms) / 1e3,
    )
    try:
        web.run_app(engine.app(), host=arguments.host, port=arguments.port, access_log=None)
    except OSError as error:
        reason = f"--host {arguments.host} --port {arguments.port}: {error.strerror}"
        print(f"sglang-ext mock-engine: {reason}; choose another --port", file=sys.stderr)
        return USAGE_ERROR
    return 0
