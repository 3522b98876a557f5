"""Describes what a prefill instance reports of its queues and stages, and how its mode is switched: `GET /laps`,
`GET /laps/stages`, `POST /laps/mode`.

The router's controller reads this, so the names are a contract between the two. The routes are on the engine's own HTTP
server; the status and the switch come from its scheduler through SGLang's control messages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse

from sglang_ext.laps.decide.round_plan import ClassReport, LapsMode, RoundSnapshot
from sglang_ext.laps.sglang.stage_times import FOLDER_VARIABLE, read_stages
from sglang_ext.live.decide.instance_work import KEPT_RECORDS, WORK_KEY
from sglang_ext.types import LengthClass

if TYPE_CHECKING:
    from sglang_ext.laps.sglang.instance import LapsInstance

STATUS_KEY = "sglang_ext_laps"
RANK_KEY = "rank"  # of a data-parallel rank's status
MODE_PARAMETER = "sglang_ext_laps_mode"
# SGLang's control message carries only numbers.
MODES: dict[int | float, str] = {number: mode.value for number, mode in enumerate(LapsMode)}


# SGLang's control message for a status has room only for a name; a status without it says nothing of the work.
_WORK_PREFIX = "sglang_ext_work:"


def work_request(since: int, most: int) -> str:
    """The name of a control message that asks for the work, too: behind a cursor, at most this many records."""
    return f"{_WORK_PREFIX}{since}:{most}"


def work_wanted(name: str | None) -> tuple[int, int] | None:
    """Cursor and number of records in the name of a control message; None where it asks for no work."""
    if name is None or not name.startswith(_WORK_PREFIX):
        return None
    since, _, most = name.removeprefix(_WORK_PREFIX).partition(":")
    return int(since), int(most)


def mode_number(mode: LapsMode) -> int:
    """Return what stands for a mode in SGLang's control message."""
    return list(LapsMode).index(mode)


def status_of(laps: LapsInstance, snapshot: RoundSnapshot, *, locked_tokens: int) -> dict[str, Any]:
    """The status as JSON-safe values. `locked_tokens`: cached KV that running or parked requests hold."""
    report = laps.policy.report(snapshot)
    return {
        "mode": report.mode.value,
        "generation": laps.generation,
        "short": _class_status(report.short, laps.clock.utilisation(snapshot.now_s, LengthClass.SHORT)),
        "long": _class_status(report.long, laps.clock.utilisation(snapshot.now_s, LengthClass.LONG)),
        "parked": report.parked,
        "parks": laps.parks,
        "decisions": {"batches": laps.decisions.batches, "seconds": laps.decisions.seconds},
        "utilisation": laps.clock.utilisation(snapshot.now_s),
        "boundary_tokens": report.boundary_tokens,
        "boundary_is_fitted": report.boundary_is_fitted,
        "round_s": report.round_s,
        "short_share": report.short_share,
        "awd": {"window_s": report.window_s, "depth": report.depth, "short_rate_per_s": report.short_rate_per_s},
        "fit": report.fit._asdict(),
        "kv": {"free_tokens": snapshot.free_kv_tokens, "locked_tokens": locked_tokens},
    }


def _class_status(report: ClassReport, utilisation: float) -> dict[str, Any]:
    return {
        "requests": report.requests,
        "tokens": report.new_tokens,
        "backlog_s": report.backlog_s,
        "oldest_wait_s": report.oldest_wait_s,
        "slo_violation_rate": report.slo_violation_rate,
        "tardiness": report.tardiness,
        "utilisation": utilisation,
    }


def merge_statuses(statuses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the status of an instance of that of each of its data-parallel ranks, which have queues of their own.

    Requests and tokens add up, of waits and backlogs the longest counts, and shares are those of the ranks' average.
    What has no sum, a boundary or a fit, is that of the first rank, as is its work; `ranks` has all of them, in order.
    """
    statuses = sorted(statuses, key=_rank)
    first = statuses[0]
    if len(statuses) == 1:
        return first
    merged = {**first, "generation": min(status["generation"] for status in statuses)}
    for name in ("parked", "parks"):
        merged[name] = sum(status[name] for status in statuses)
    merged["utilisation"] = _mean(statuses, "utilisation")
    for length_class in ("short", "long"):
        merged[length_class] = _merge_class([status[length_class] for status in statuses])
    for name in ("kv", "decisions"):
        merged[name] = {key: sum(status[name][key] for status in statuses) for key in first[name]}
    kept = [{name: value for name, value in status.items() if name != WORK_KEY} for status in statuses]
    return {**merged, "ranks": kept}


def _rank(status: dict[str, Any]) -> int:
    return int(status.get(RANK_KEY, 0))


def _merge_class(classes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {name: sum(one[name] for one in classes) for name in ("requests", "tokens")}
    merged |= {name: max(one[name] for one in classes) for name in ("backlog_s", "oldest_wait_s")}
    return merged | {name: _mean(classes, name) for name in ("slo_violation_rate", "tardiness", "utilisation")}


def _mean(given: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(one[name] for one in given) / len(given))


# ---------------------------------------------------------------- routes


def add_routes(app: FastAPI) -> None:
    """Serve the routes from SGLang's application, in place."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    app.add_api_route("/laps", get_status, methods=["GET"])
    app.add_api_route("/laps/stages", get_stages, methods=["GET"])
    app.add_api_route("/laps/mode", auth_level(AuthLevel.ADMIN_OPTIONAL)(set_mode), methods=["POST"])


async def get_status(
    since: Annotated[int | None, Query(ge=0)] = None, most: Annotated[int, Query(ge=1, le=KEPT_RECORDS)] = KEPT_RECORDS
) -> JSONResponse:
    """Queues, window and depth, cost fit, mode; with `since`, a cursor, also what the instance did since."""
    return JSONResponse(await _status(None if since is None else work_request(since, most)))


async def get_stages() -> JSONResponse:
    """Busy time, bubbles and latest rounds of each pipeline stage on this machine."""
    stages = read_stages(os.environ.get(FOLDER_VARIABLE))
    if not stages:
        message = "there are no pipeline stages, or none has computed yet"
        return _error(message, "not_found", None, HTTPStatus.NOT_FOUND)
    return JSONResponse({"stages": stages})


async def set_mode(request: Request) -> JSONResponse:
    """Switch the mode; answers when the scheduler has switched. Nothing that is queued is lost."""
    try:
        body = json.loads(await request.body())
    except ValueError:
        return _refusal("the body is not JSON", "body")
    name = body.get("mode") if isinstance(body, dict) else None
    if name not in list(LapsMode):
        return _refusal(f"mode must be one of {', '.join(LapsMode)}", "mode")
    from sglang.srt.managers.io_struct import SetInternalStateReq

    mode = LapsMode(name)
    previous = (await _status())["mode"]
    outcomes = await _tokenizer_manager().set_internal_state(
        SetInternalStateReq(server_args={MODE_PARAMETER: mode_number(mode)})
    )
    if not all(outcomes):
        return _error("the scheduler did not switch", "internal_error", None, HTTPStatus.INTERNAL_SERVER_ERROR)
    status = await _status()
    return JSONResponse({"mode": status["mode"], "previous": previous, "generation": status["generation"]})


async def _status(name: str | None = None) -> dict[str, Any]:
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager = _tokenizer_manager()
    manager.auto_create_handle_loop()
    outputs = await manager.get_internal_state_communicator(GetInternalStateReq(rid=name))
    return merge_statuses([output.internal_state[STATUS_KEY] for output in outputs])


def _tokenizer_manager() -> Any:
    # Of the main process: imported only there, not in a scheduler that reports its status.
    from sglang.srt.entrypoints import http_server

    return http_server.get_global_state().tokenizer_manager


def _refusal(message: str, parameter: str) -> JSONResponse:
    return _error(message, "invalid_request_error", parameter, HTTPStatus.BAD_REQUEST)


def _error(message: str, kind: str, parameter: str | None, status: HTTPStatus) -> JSONResponse:
    """OpenAI's error shape."""
    error = {"message": message, "type": kind, "param": parameter, "code": None}
    return JSONResponse({"error": error}, status_code=status)
