"""`/pools`: what each pool is made of, what the controller thinks of it, and moving an instance by hand."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI
from fastapi.params import Depends
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema
from starlette.exceptions import HTTPException

from sglang_ext.types import LengthClass, Role
from sglang_ext_router.config import RouterConfig, RouterConfigError, parse_worker_url
from sglang_ext_router.control.api_document import ADMIN_ONLY, WORKER_URL_PATTERN, answers
from sglang_ext_router.control.controller import MoveRecord, MoveRefusedError, PoolController, pool_of
from sglang_ext_router.decide.instance_pressure import pressure
from sglang_ext_router.decide.role_choice import Side
from sglang_ext_router.instances.registry import WorkerRegistry, describe_roles
from sglang_ext_router.instances.workers import Worker

if TYPE_CHECKING:
    from sglang_ext_router.router import Router


class Move(BaseModel):
    """Body of POST /pools/move: an instance by its URL or as `host:port`, and the pool or role that it shall get."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"oneOf": [{"required": ["url"]}, {"required": ["worker_id"]}]}
    )

    url: Annotated[str, Field(json_schema_extra={"pattern": WORKER_URL_PATTERN})] | SkipJsonSchema[None] = None
    worker_id: str | SkipJsonSchema[None] = None
    to: LengthClass | Side


def worker_id(worker: Worker) -> str:
    """Return how an instance is named in paths: `host:port`."""
    return worker.name


def worker_state(worker: Worker) -> str:
    """Return whether an instance takes requests, in one word."""
    if worker.is_draining:
        return "draining"
    if not worker.is_healthy:
        return "refused" if worker.is_refused else "unhealthy"
    if worker.is_silent:
        return "silent"
    return "moving" if worker.is_moving else "ready"


def add_pool_routes(app: FastAPI, router: Router, client: Sequence[Depends], admin: Sequence[Depends]) -> None:
    """Add the paths; `client` and `admin` are the checks of who may read and who may change."""

    @app.get("/pools", dependencies=client)
    async def pools() -> dict[str, Any]:
        """The pools: instances, load and pressure of each, the latest moves between them, and shared long prefills."""
        await router.controller.refresh_if_stale()
        return {
            "length_boundary_tokens": router.length_boundary_tokens(list(router.registry.models.values())),
            "ready": describe_roles(router.registry),
            "requests_in_flight": router.requests_in_flight,
            "requests_queued": router.requests_queued,
            "pools": {role.value: describe_pool(router, role) for role in Role},
            "models": {name: describe_model(router, name) for name in router.registry.models},
            "controller": describe_controller(router.controller, router.config, router.registry),
            "long_pool": None if router.long_pool is None else router.long_pool.describe(),
        }

    @app.post(
        "/pools/move",
        dependencies=admin,
        openapi_extra=ADMIN_ONLY,
        status_code=202,
        responses=answers(_404="no such instance", _409="another move is under way, or the instance is not ready"),
    )
    async def move(wanted: Move) -> dict[str, Any]:
        """Begin to move an instance to the other pool, or between prefill and decode; GET /pools shows how it ends."""
        if (wanted.url is None) == (wanted.worker_id is None):
            raise HTTPException(400, "give either url or worker_id")
        try:
            record = await router.controller.request_move(_find(router.registry, wanted), wanted.to)
        except MoveRefusedError as error:
            raise HTTPException(error.status, str(error)) from None
        return describe_move(record)


def describe_model(router: Router, model: str) -> dict[str, Any]:
    """The pools of one model as JSON, and what is decided for them."""
    pools = {role.value: describe_pool(router, role, model) for role in Role}
    boundary_tokens = router.length_boundary_tokens([router.registry.models[model]])
    return {"length_boundary_tokens": boundary_tokens, "pools": pools, **_describe_control(router.controller, model)}


def describe_pool(router: Router, role: Role, model: str | None = None) -> dict[str, Any]:
    """One pool as JSON, of one model or of all together; only that of a single model has a pressure."""
    members = [worker for worker in router.registry if worker.role is role and (model is None or worker.model == model)]
    described: dict[str, Any] = {
        "instances": len(members),
        "ready": sum(worker.is_ready for worker in members),
        "in_flight": sum(worker.in_flight for worker in members),
        "pending_tokens": sum(worker.pending_tokens for worker in members),
        "workers": [worker.url for worker in members],
    }
    if role.is_prefill:
        described["members"] = [_describe_member(router.controller, worker) for worker in members]
    model = _only_model(router.registry) if model is None else model
    decision = None if model is None else router.controller.control(model).decision
    if role in (Role.SHORT, Role.LONG):
        view = None if decision is None else decision.short if role is Role.SHORT else decision.long
        described["pressure"] = None if view is None else _rounded(view.pressure)
        described["offered_instances"] = None if view is None else _rounded(view.offered_instances)
    return described


def _describe_member(controller: PoolController, worker: Worker) -> dict[str, Any]:
    report = controller.monitor.reports.get(worker.id)
    pool = pool_of(worker)
    return {
        "id": worker_id(worker),
        "url": worker.url,
        "role": worker.role.value,
        "model": worker.model or None,
        "state": worker_state(worker),
        "length_boundary_tokens": worker.length_boundary_tokens,
        "mode": None if report is None else report.mode.value,
        "generation": None if report is None else report.generation,
        "can_switch": None if report is None and worker.id not in controller.monitor.stock else report is not None,
        "pressure": (
            None if report is None or pool is None else _rounded(pressure(report.signals(pool), controller.settings))
        ),
        "signals": None
        if report is None
        else {
            "utilisation": report.utilisation,
            "parked": report.parked,
            "short": report.short._asdict(),
            "long": report.long._asdict(),
        },
    }


def describe_controller(controller: PoolController, config: RouterConfig, registry: WorkerRegistry) -> dict[str, Any]:
    """The controller as JSON; moves with the latest first. Cool-down and decision are those of a single model."""
    model = _only_model(registry)
    control = {"cooldown_left_s": None, "decision": None} if model is None else _describe_control(controller, model)
    return {
        "mode": config.controller,
        **control,
        "under_way": None if controller.current is None else describe_move(controller.current),
        "moves": [describe_move(record) for record in reversed(controller.moves)],
    }


def _describe_control(controller: PoolController, model: str) -> dict[str, Any]:
    decision = controller.control(model).decision
    return {
        "cooldown_left_s": round(controller.cooldown_left_s(model), 1),
        "decision": None
        if decision is None
        else {"reason": decision.reason.value, "wanted": decision.wanted, "moves": decision.proposal is not None},
    }


def _only_model(registry: WorkerRegistry) -> str | None:
    """The model, where there is one or none is known; None where there are several."""
    return next(iter(registry.models), "") if len(registry.models) < 2 else None


def describe_move(record: MoveRecord) -> dict[str, Any]:
    """One move as JSON; without an outcome it is under way."""
    return {
        "started_at": datetime.fromtimestamp(record.started_at_s, UTC).isoformat(timespec="milliseconds"),
        "url": record.url,
        "model": record.model or None,
        "from": record.source.value,
        "to": record.target.value,
        "reason": record.reason,
        "outcome": None if record.outcome is None else record.outcome.value,
        "detail": record.detail or None,
        "duration_s": None if record.outcome is None else round(record.duration_s, 3),
    }


def _find(registry: WorkerRegistry, wanted: Move) -> Worker:
    if wanted.url is not None:
        try:
            url = parse_worker_url(wanted.url, "url")
        except RouterConfigError as error:
            raise HTTPException(400, str(error)) from None
        worker = registry.find(url)
    else:
        worker = next((known_worker for known_worker in registry if worker_id(known_worker) == wanted.worker_id), None)
    if worker is None:
        raise HTTPException(404, f"no worker {wanted.url or wanted.worker_id}")
    return worker


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
