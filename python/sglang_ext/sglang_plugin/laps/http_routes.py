"""`GET /laps` and `POST /laps/mode` on an engine's own HTTP server."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_ext.policy.laps.round_plan import LapsMode
from sglang_ext.sglang_plugin.laps.status import MODE_PARAMETER, STATUS_KEY, mode_number

_MODES = ", ".join(LapsMode)


def add_routes(app: FastAPI) -> None:
    """Serve the routes from SGLang's application, in place."""
    app.add_api_route("/laps", get_status, methods=["GET"])
    app.add_api_route("/laps/mode", set_mode, methods=["POST"])


async def get_status() -> JSONResponse:
    """Queues, window and depth, cost fit, mode."""
    return JSONResponse(await _status())


@auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
async def set_mode(request: Request) -> JSONResponse:
    """Switch the mode; answers when the scheduler has switched. Nothing that is queued is lost."""
    try:
        body = json.loads(await request.body())
    except ValueError:
        return _refusal("the body is not JSON", "body")
    name = body.get("mode") if isinstance(body, dict) else None
    if name not in list(LapsMode):
        return _refusal(f"mode must be one of {_MODES}", "mode")
    mode = LapsMode(name)
    previous = (await _status())["mode"]
    manager = http_server.get_global_state().tokenizer_manager
    outcomes = await manager.set_internal_state(SetInternalStateReq(server_args={MODE_PARAMETER: mode_number(mode)}))
    if not all(outcomes):
        return _error("the scheduler did not switch", "internal_error", None, HTTPStatus.INTERNAL_SERVER_ERROR)
    status = await _status()
    return JSONResponse({"mode": status["mode"], "previous": previous, "generation": status["generation"]})


async def _status() -> dict[str, Any]:
    states = await http_server.get_global_state().tokenizer_manager.get_internal_state()
    status: dict[str, Any] = states[0][STATUS_KEY]
    return status


def _refusal(message: str, parameter: str) -> JSONResponse:
    return _error(message, "invalid_request_error", parameter, HTTPStatus.BAD_REQUEST)


def _error(message: str, kind: str, parameter: str | None, status: HTTPStatus) -> JSONResponse:
    """OpenAI's error shape."""
    error = {"message": message, "type": kind, "param": parameter, "code": None}
    return JSONResponse({"error": error}, status_code=status)
