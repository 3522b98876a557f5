"""The control plane: a FastAPI application for every path that does not generate."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any, Literal

import aiohttp
import orjson
from fastapi import Depends, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.routing import Match

from sglang_ext import __version__
from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, RouterConfigError, WorkerAddress, parse_worker_url
from sglang_ext_router.control.api_document import (
    ADMIN_ONLY,
    NO_KEY,
    WORKER_URL_PATTERN,
    answers,
    describe_api,
    request_body,
)
from sglang_ext_router.control.pools import add_pool_routes, worker_id, worker_state
from sglang_ext_router.decide.pd_actions import FailureReason
from sglang_ext_router.http import replies
from sglang_ext_router.http.access import ALIVE_PATHS, READY_PATHS
from sglang_ext_router.http.instance_paths import INSTANCE_PATHS, Handling
from sglang_ext_router.instances.kv_events import KvEvents
from sglang_ext_router.instances.registry import WorkerRegistry, kind_of
from sglang_ext_router.instances.workers import Worker
from sglang_ext_router.observe.live_page import read_page
from sglang_ext_router.request.prompt import BadRequestError, parse_body
from sglang_ext_router.request.relay import REASON_TEXT
from sglang_ext_router.request.request_fields import check_detokenise
from sglang_ext_router.tenants.usage import utc_day

if TYPE_CHECKING:
    from sglang_ext_router.router import Router

HIDDEN = "(hidden)"
CHECKED_BYTES = 4 << 20  # of a body with token ids: parsing a larger one takes too long, so only an instance checks it
_SECRET_NAME = re.compile(
    r"(?:^|[_-])(?:(?:api|admin|auth|access|private|secret)?[_-]?keys?|keyfile|secrets?|passw(?:or)?d|pass|tokens?|credentials?)"
    r"(?:$|[_-](?:password|hash|value)$)|password|secret",
    re.IGNORECASE,
)


_DETOKENISE_PATHS = ("/v1/detokenize", "/detokenize")
LOAD_SECTIONS = r"^(core|memory|spec|lora|disagg|queues|all)(,(core|memory|spec|lora|disagg|queues|all))*$"
MAX_LABEL_CHARACTERS = 63  # of the value of a Kubernetes label
MAX_ID_CHARACTERS = 4096  # of a request's id
MAX_IDS = 4096  # that one call aborts
MAX_LOST = 2  # instances that one request may be lost with


class NewWorker(BaseModel):
    """Body of POST /workers."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "anyOf": [
                {"properties": {"role": {"enum": [role.value for role in Role if role.is_prefill]}}},
                {"properties": {"bootstrap_port": {"type": "null"}}},
            ]
        },
    )

    url: Annotated[str, Field(json_schema_extra={"pattern": WORKER_URL_PATTERN})]
    role: Role
    bootstrap_port: Annotated[int, Field(strict=True, gt=0, lt=65536)] | None = None
    revision: Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)] | None = None
    topology: Annotated[str, Field(max_length=4 * MAX_LABEL_CHARACTERS)] = ""
    context_length_range: Annotated[str, Field(pattern=r"^[0-9]{1,9}-[0-9]{1,9}$")] | None = None


class Drain(BaseModel):
    """Body of POST /workers/{id}/drain."""

    model_config = ConfigDict(extra="forbid")

    drain: Annotated[bool, Field(strict=True)] = True


class Abort(BaseModel):
    """Body of POST /abort_request; further fields of SGLang's are ignored."""

    rid: (
        Annotated[str, Field(max_length=MAX_ID_CHARACTERS)] | Annotated[list[str], Field(max_length=MAX_IDS)] | None
    ) = ""
    abort_all: bool = False


def describe_worker(worker: Worker, now_s: float, events: KvEvents) -> dict[str, Any]:
    """Return an instance as JSON."""
    described: dict[str, Any] = {
        "id": worker_id(worker),
        "url": worker.url,
        "role": worker.role.value,
        "state": worker_state(worker),
        "circuit": worker.breaker.state(now_s).value,
        "model": worker.model or None,
        "revision": worker.revision or None,
        "topology": worker.topology or None,
        "kv_cache_dtype": None if worker.facts is None else worker.facts.kv_cache_dtype,
        "page_size": None if worker.facts is None else worker.facts.page_size_tokens,
        "transfer_backend": None if worker.facts is None else worker.facts.transfer_backend,
        "in_flight": worker.in_flight,
        "running": worker.reported_running,
        "load": "published" if worker.publishes_load(now_s) else "polled",
        "max_prompt_tokens": worker.max_prompt_tokens if worker.has_info else None,
        "last_error": worker.last_error or None,
    }
    if worker.role.is_prefill:
        described["bootstrap_port"] = worker.bootstrap_port
    if worker.role.computes_prompts:
        described["pending_tokens"] = worker.pending_tokens
        described["prefill_tokens_per_s"] = round(worker.rate.tokens_per_s, 1)
    if worker.keeps_prefixes:
        described["cached_prefixes"] = events.describe(worker)
    if not worker.role.is_prefill:
        described["free_kv_tokens"] = worker.reported_free_kv_tokens if worker.has_info else None
        described["reserved_kv_tokens"] = worker.virtual_tokens
    return described


def build_app(router: Router) -> FastAPI:
    """Return the application for one router process."""
    app = FastAPI(
        title="sglang-ext router", version=__version__, docs_url="/docs", redoc_url=None, strict_content_type=False
    )
    now = router.loop.time

    # Starlette decodes header values as Latin-1.
    def check_client(
        authorization: Annotated[str | None, Header(include_in_schema=False)] = None,
        x_api_key: Annotated[str | None, Header(include_in_schema=False)] = None,
    ) -> None:
        given = authorization or f"Bearer {x_api_key or ''}"
        if not router.access.is_client(given.encode("latin-1")):
            raise HTTPException(401, "missing or wrong API key")

    def check_admin(authorization: Annotated[str | None, Header(include_in_schema=False)] = None) -> None:
        if not router.config.admin_api_key:
            raise HTTPException(403, "changes are off: start the router with --admin-api-key to allow them")
        if not router.access.is_admin((authorization or "").encode("latin-1")):
            raise HTTPException(401, "missing or wrong admin API key")

    config, registry = router.config, router.registry
    own_keys = tuple(key for key in (config.api_key, config.admin_api_key, config.key_for_workers) if key)
    client = [Depends(check_client)]
    admin = [Depends(check_admin)]
    # FastAPI makes the document on the first request for it, and keeps it.
    app.openapi = lambda: _documented(app, config)  # type: ignore[method-assign]

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        if error.status_code == 405:
            headers["allow"] = ", ".join(methods_of(app, request.url.path))
        answer = _json_error(error.status_code, str(error.detail), headers=headers)
        return _shaped(request.url.path, answer)

    @app.exception_handler(RequestValidationError)
    async def on_bad_input(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part not in {"body", "query"})
        return _json_error(400, f"{where}: {first['msg']}" if where else str(first["msg"]), where or None)

    async def health() -> dict[str, str]:
        """Answer 200 while the process runs."""
        return {"status": "ok"}

    async def ready() -> Response:
        """Answer 200 while a model has a ready instance of every role it needs and the router is not shutting down."""
        missing = registry.missing_roles()
        if router.is_draining:
            return _json_error(503, "shutting down")
        if missing is not None:
            return _json_error(503, f"no ready instance for: {missing}")
        return Response(b'{"status":"ready"}', media_type="application/json")

    for endpoint, paths in ((health, ALIVE_PATHS), (ready, READY_PATHS)):
        for path in paths:
            app.add_api_route(path, endpoint, methods=["GET"], openapi_extra=NO_KEY)
            app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(accept: Annotated[str, Header(include_in_schema=False)] = "") -> Response:
        """Return Prometheus metrics of all processes of this router, as OpenMetrics if Accept asks for it."""
        body, content_type = router.render_metrics(accept)
        return Response(body, headers={"content-type": content_type})

    if not config.disable_ui:
        page, page_headers = read_page()

        @app.get("/ui", openapi_extra=NO_KEY, response_class=HTMLResponse)
        async def live_page() -> Response:
            """Return the live page. Its data come from `/ui/stream`; the page asks for the key if one is needed."""
            return Response(page, headers=page_headers)

    @app.get("/v1/usage", dependencies=client, responses=answers(_404="the router has no tenants"))
    async def usage(
        authorization: Annotated[str | None, Header(include_in_schema=False)] = None,
        x_api_key: Annotated[str | None, Header(include_in_schema=False)] = None,
        start: date | None = None,
        end: date | None = None,
    ) -> Response:
        """Return what the key's tenant has used, by UTC day, model and length class; the administrator's key gets all.

        Days from `start` to `end`, both included: without them today's. All routers of a group are added up.
        """
        if router.tenants is None:
            return _json_error(404, "there is no usage: start the router with --tenants-file")
        given = (authorization or f"Bearer {x_api_key or ''}").encode("latin-1")
        tenant = None if router.access.is_admin(given) else router.access.tenant_of(given)
        last = (end or start or date.fromisoformat(utc_day())).isoformat()
        first = last if start is None else start.isoformat()
        totals = await router.tenants.read_usage(first, last, tenant, router.loop.time())
        return _json({"object": "list", "data": [key._asdict() | count._asdict() for key, count in totals]})

    @app.get("/load", dependencies=client)
    async def load(model: str | None = None) -> Response:
        """Return how long online requests wait for prefill, by length class, and the work queued before them.

        Without `model` the longest wait over all models is returned.
        """
        if model is None:
            return _json(router.describe_load(list(registry.models.values())))
        found = registry.find_model(model)
        return _unknown_model(registry, model) if found is None else _json(router.describe_load([found]))

    def model_names() -> dict[str, str]:
        aliases = {alias: found.name for alias, found in registry.aliases.items()}
        return {name: model for name, model in ({name: name for name in registry.models} | aliases).items() if model}

    @app.get("/v1/models", dependencies=client)
    async def models() -> dict[str, Any]:
        """List the models that the instances serve, and their aliases."""
        listed = [_describe_model(registry, name, model) for name, model in model_names().items()]
        return {"object": "list", "data": listed}

    @app.get("/v1/models/{name:path}", dependencies=client)
    async def one_model(name: str) -> Response:
        """Return one model, by its name or an alias."""
        found = registry.models.get(name) or registry.aliases.get(name)
        if found is None:
            return _unknown_model(registry, name)
        return _json(_describe_model(registry, name, found.name))

    async def ask_any(path: str, body: bytes | None, model: str | None) -> Response:
        """Ask one instance after the other until one answers; errors of theirs get the shape of the path.

        A request that two instances have taken and not answered is not sent to a third: it may be what ends them.
        """
        workers = (*registry.ready_prefill, *registry.ready_decode, *registry.ready_plain)
        if model:
            found = registry.find_model(model)
            if found is None:
                return _unknown_model(registry, model)
            workers = (*found.ready_prefill, *found.ready_decode, *found.ready_plain)
        lost = 0
        for worker in workers:
            try:
                status, answer = await router.prober.ask(worker, path, body)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                continue
            except (aiohttp.ClientError, TimeoutError):
                lost += 1
                if lost == MAX_LOST:
                    return _json_error(502, REASON_TEXT[FailureReason.LOST_AGAIN], headers={"x-should-retry": "false"})
                continue
            if status >= 400:
                return _instance_error(status, answer)
            return Response(answer, status_code=status, media_type="application/json")
        return _json_error(503, "no instance can answer")

    async def pass_on(request: Request) -> Response:
        """Answered by an instance of the model that the body names; without one by any."""
        path, body = request.url.path, await request.body()
        if path in _DETOKENISE_PATHS and len(body) <= CHECKED_BYTES:
            try:
                check_detokenise(parse_body(body))
            except BadRequestError as error:
                return _json_error(400, str(error), error.param)
        return _shaped(path, await ask_any(path, body, _model_named_in(body)))

    def add_not_served(methods: list[str], path: str, reason: str) -> None:
        async def not_served() -> Response:
            return _json_error(404, f"{path} of SGLang is not served here: {reason}")

        app.add_api_route(path, not_served, methods=methods, dependencies=client, include_in_schema=False)

    for methods, path, handling, reason in INSTANCE_PATHS:
        if handling is Handling.PASSED_ON:
            described = {"requestBody": request_body(path)}
            app.add_api_route(path, pass_on, methods=["POST"], dependencies=client, openapi_extra=described)
        elif handling is Handling.NOT_SERVED:
            add_not_served(methods.replace("WEBSOCKET", "GET").split(), path, reason)

    @app.get("/v1/loads", dependencies=client, responses=answers(_400="a parameter that instances do not know"))
    async def loads(
        request: Request,
        dp_rank: Annotated[int, Query(ge=0)] | None = None,
        include: Annotated[str, Query(pattern=LOAD_SECTIONS)] | None = None,
        format: Literal["json"] | None = None,
    ) -> Response:
        """Return what every ready instance reports of its load, as SGLang does, each with its `url` and `role`."""
        workers = (*registry.ready_prefill, *registry.ready_decode, *registry.ready_plain)
        path = f"/v1/loads?{request.url.query}"
        asked = await asyncio.gather(
            *(router.prober.ask(worker, path, None) for worker in workers), return_exceptions=True
        )
        whole: dict[str, Any] = {}
        for worker, answer in zip(workers, asked, strict=True):
            if isinstance(answer, BaseException):
                continue
            if 400 <= answer[0] < 500:
                return _instance_error(*answer)
            if answer[0] == 200:
                report = orjson.loads(answer[1])
                own = [{"url": worker.url, "role": worker.role.value, **load} for load in report["loads"]]
                accelerators = report.get("num_accelerators", 0) + whole.get("num_accelerators", 0)
                whole = {**report, "num_accelerators": accelerators, "loads": whole.get("loads", []) + own}
        return _json(whole) if whole else _json_error(503, "no instance can answer")

    @app.get("/api/tags", dependencies=client)
    async def tags() -> Response:
        """List the models that the instances serve, and their aliases, as Ollama does."""
        listed: list[dict[str, Any]] = []
        for name in model_names():
            answer = await ask_any("/api/tags", None, name)
            if answer.status_code != 200:
                return answer
            listed += [{**tag, "name": name, "model": name} for tag in orjson.loads(answer.body)["models"]]
        return _json({"models": listed})

    @app.get("/v1/responses/{name}", dependencies=client, status_code=404)
    @app.delete("/v1/responses/{name}", dependencies=client, status_code=404)
    @app.post("/v1/responses/{name}/cancel", dependencies=client, status_code=404)
    async def kept_response(name: str) -> Response:
        """Not served: replies are not kept."""
        return _json_error(404, f"no response {name}: replies are not kept")

    @app.get("/model_info", dependencies=client)
    @app.get("/get_model_info", dependencies=client)
    async def model_info(model: str | None = None) -> Response:
        """Return an instance's description of the model."""
        return await ask_any("/model_info", None, model)

    @app.get("/server_info", dependencies=client)
    @app.get("/get_server_info", dependencies=client)
    async def server_info() -> Response:
        """Return every ready instance's own description, by role."""
        described: dict[str, list[Any]] = {"prefill": [], "decode": []}
        for worker in (*registry.ready_prefill, *registry.ready_decode, *registry.ready_plain):
            try:
                info = await router.prober.get_json(worker, "/server_info")
            except (aiohttp.ClientError, TimeoutError, ValueError):
                continue
            described.setdefault(kind_of(worker.role), []).append(without_secrets(info, own_keys))
        return _json(described)

    @app.get("/flush_cache", dependencies=admin, include_in_schema=False)
    @app.post(
        "/flush_cache",
        dependencies=admin,
        openapi_extra=ADMIN_ONLY,
        responses={502: {"description": "some instances could not be asked", "content": {"application/json": {}}}},
    )
    async def flush_cache() -> Response:
        """Empty every instance's prefix cache, and the router's index of them."""
        failed: dict[str, str] = {}
        flushed: list[str] = []
        for worker in registry:
            try:
                status, answer = await router.prober.ask(worker, "/flush_cache", b"")
            except (aiohttp.ClientError, TimeoutError) as error:
                failed[worker.url] = str(error) or type(error).__name__
                continue
            if status == 200:
                flushed.append(worker.url)
            else:
                failed[worker.url] = answer.decode("utf-8", "replace")[:200]
        router.forget_prefixes()
        return _json({"flushed": flushed, "failed": failed}, 200 if not failed else 502)

    @app.post("/abort_request", dependencies=client, response_class=PlainTextResponse)
    async def abort_request(
        wanted: Abort, authorization: Annotated[str | None, Header(include_in_schema=False)] = None
    ) -> Response:
        """End requests by the ids that their clients gave them: both legs, and the reply is what was generated.

        `abort_all` ends every request, and needs the admin key.
        """
        if wanted.abort_all:
            check_admin(authorization)
            router.abort_requests(None)
        else:
            ids = [wanted.rid] if isinstance(wanted.rid, str) else wanted.rid or []
            router.abort_requests(frozenset(one for one in ids if one))  # an empty id would be the beginning of all
        return Response()  # without a body or its type, as SGLang answers

    @app.get("/workers", dependencies=client)
    async def workers() -> dict[str, Any]:
        """List all instances and their state."""
        return {"workers": [describe_worker(worker, now(), router.kv_events) for worker in registry]}

    @app.post(
        "/workers",
        dependencies=admin,
        openapi_extra=ADMIN_ONLY,
        status_code=202,
        responses=answers(_409="the instance is known already, or cannot be used"),
    )
    async def add_worker(new: NewWorker) -> dict[str, Any]:
        """Add an instance; it takes requests once it is healthy."""
        try:
            url = parse_worker_url(new.url, "url")
        except RouterConfigError as error:
            raise HTTPException(400, str(error)) from None
        if not new.role.is_prefill and new.bootstrap_port is not None:
            raise HTTPException(400, f"bootstrap_port: a {new.role} instance has none")
        if registry.find(url) is not None:
            raise HTTPException(409, f"{url} is a worker already")
        token_range: tuple[int, int] | None = None
        if new.context_length_range is not None:
            first, _, last = new.context_length_range.partition("-")
            token_range = min(int(first), int(last)), max(int(first), int(last))
        address = WorkerAddress(url, new.role, new.bootstrap_port, new.revision, new.topology, token_range)
        refusal = await router.prober.refusal(address)
        if refusal is not None:
            raise HTTPException(409, f"{url}: {refusal}")
        if registry.find(url) is not None:  # added while it was probed
            raise HTTPException(409, f"{url} is a worker already")
        return describe_worker(router.add_worker(address), now(), router.kv_events)

    def find(name: str) -> Worker:
        for worker in registry:
            if worker_id(worker) == name:
                return worker
        raise HTTPException(404, f"no worker {name}")

    unknown = answers(_404="no such instance")

    @app.get("/workers/{name}", dependencies=client, responses=unknown)
    async def one_worker(name: str) -> dict[str, Any]:
        """Return one instance, named `host:port`."""
        return describe_worker(find(name), now(), router.kv_events)

    @app.delete("/workers/{name}", dependencies=admin, openapi_extra=ADMIN_ONLY, responses=unknown)
    async def remove_worker(name: str) -> dict[str, str]:
        """Remove an instance; the requests that it serves run to their end."""
        worker = find(name)
        router.remove_worker(worker)
        return {"removed": worker.url}

    @app.post("/workers/{name}/drain", dependencies=admin, openapi_extra=ADMIN_ONLY, responses=unknown)
    async def drain_worker(name: str, drain: Drain) -> dict[str, Any]:
        """Stop (or resume) sending new requests to an instance."""
        worker = find(name)
        router.drain_worker(worker, drain.drain)
        return describe_worker(worker, now(), router.kv_events)

    add_pool_routes(app, router, client, admin)
    return app


def _describe_model(registry: WorkerRegistry, name: str, model: str) -> dict[str, Any]:
    lengths = [worker.max_prompt_tokens for worker in registry if worker.model == model and worker.has_info]
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "sglang",
        "root": model,
        "parent": None,
        "max_model_len": min(lengths) if lengths else None,
    }


def _unknown_model(registry: WorkerRegistry, name: str) -> Response:
    names = registry.served_names()
    if not names or not registry.is_complete:
        return _json_error(503, "no instance that is ready serves this model yet; try again later")
    return _json_error(404, replies.unknown_model(name, names), "model", code=replies.MODEL_NOT_FOUND)


def _model_named_in(body: bytes) -> str | None:
    """Return the model that a JSON body names; None if there is none, or the body is malformed."""
    try:
        named = orjson.loads(body).get("model")
    except (ValueError, AttributeError):
        return None
    return named if isinstance(named, str) else None


def without_secrets(value: Any, keys: Sequence[str]) -> Any:
    """Return JSON with values hidden that are named like a secret or contain one of `keys`."""
    if isinstance(value, dict):
        return {
            name: HIDDEN if isinstance(item, (str, list)) and item and _SECRET_NAME.search(name) else clean
            for name, item in value.items()
            for clean in (without_secrets(item, keys),)
        }
    if isinstance(value, list):
        return [without_secrets(item, keys) for item in value]
    if isinstance(value, str) and any(key in value for key in keys):
        return HIDDEN
    return value


def _documented(app: FastAPI, config: RouterConfig) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = describe_api(app, config.needs_client_key, bool(config.tenants_file))
    return app.openapi_schema


def methods_of(app: FastAPI, path: str) -> list[str]:
    """Return the methods of a path, over all routes that share it; none for an unknown path."""
    methods: set[str] = set()
    for route in app.routes:
        if route.matches({"type": "http", "path": path, "method": "GET", "root_path": ""})[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods)


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


def _instance_error(status: int, body: bytes) -> Response:
    return Response(replies.instance_error_json(status, body), status_code=status, media_type="application/json")


def _shaped(path: str, answer: Response) -> Response:
    """Bring an error into the shape that clients of its path read."""
    if answer.status_code >= 400 and path.startswith("/v1/messages"):
        answer.body = replies.anthropic_error_json(answer.status_code, bytes(answer.body))
        answer.headers["content-length"] = str(len(answer.body))
    return answer


def _json_error(
    status: int,
    message: str,
    param: str | None = None,
    headers: dict[str, str] | None = None,
    code: str | None = None,
) -> Response:
    headers = headers or {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(
        replies.error_json(status, message, param, code),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )
