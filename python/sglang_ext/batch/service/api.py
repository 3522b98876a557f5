"""OpenAI's files and batches over HTTP: `/v1/files`, `/v1/batches`, with `/health` and `/metrics`."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import IO, Annotated, Any, Literal
from urllib.parse import quote

import orjson
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from sglang_ext import __version__
from sglang_ext.batch.database import StoreError, StoreFullError
from sglang_ext.batch.decide.batch_lifecycle import EventRefusedError, parse_completion_window
from sglang_ext.batch.object_storage import StorageError
from sglang_ext.batch.service.batch_service import BatchService
from sglang_ext.batch.service.client_keys import ClientKeys
from sglang_ext.batch.service.file_bytes import FolderBytes
from sglang_ext.batch.service.files import StoredFile
from sglang_ext.batch.service.metrics import render_metrics
from sglang_ext.batch.service.uploads import WRITE_BYTES, UploadError, receive_upload

logger = logging.getLogger(__name__)
INPUT_PURPOSE = "batch"
MIN_KEPT_S, MAX_KEPT_S = 3600, 30 * 24 * 3600
MAX_METADATA = 16
FORM_BYTES = 1 << 16  # of a multipart body without its file
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error"}


class RequestError(Exception):
    """A request that is answered with an error; `param` names the field."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class ExpiresAfter(BaseModel):
    """Describes when a file is deleted: seconds from the time at which it was made."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_KEPT_S, le=MAX_KEPT_S)]


class NewBatch(BaseModel):
    """Body of POST /v1/batches."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: Annotated[str, StringConstraints(pattern=r"^[!-~]{1,100}$")]
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses", "/v1/messages", "/v1/embeddings"
    ]
    completion_window: str
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(min_length=1, max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None

    @field_validator("completion_window")
    @classmethod
    def check_window(cls, text: str) -> str:
        parse_completion_window(text)
        return text


async def _check_client(request: Request) -> str:
    """Return the tenant whose key the client has sent."""
    keys: ClientKeys = request.app.state.keys
    tenant = keys.tenant_of(request.headers.get("authorization", ""))
    if tenant is None:
        raise HTTPException(401, "missing or wrong API key")
    return tenant


Tenant = Annotated[str, Depends(_check_client)]


def build_app(service: BatchService, keys: ClientKeys, max_file_bytes: int) -> FastAPI:
    """The application. A client sees the files and batches of the tenant whose key it sends."""
    app = FastAPI(
        title="sglang-ext batch", version=__version__, docs_url="/docs", redoc_url=None, strict_content_type=False
    )

    app.state.keys = keys
    _add_error_handlers(app)
    _add_file_routes(app, service, max_file_bytes)
    _add_batch_routes(app, service)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(render_metrics(service.reading()), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _add_file_routes(app: FastAPI, service: BatchService, max_file_bytes: int) -> None:
    def find(file_id: str, tenant: str) -> StoredFile:
        stored = service.files.find(file_id, tenant)
        if stored is None:
            raise RequestError(404, f"no file {file_id!r}", "file_id")
        return stored

    @app.post("/v1/files")
    async def upload_file(request: Request, tenant: Tenant) -> Response:
        """Upload a batch's input: a form with `file`, `purpose` (batch) and, where wanted, `expires_after[seconds]`."""
        try:
            announced = request.headers.get("content-length", "")
            if announced.isdecimal() and int(announced) > max_file_bytes + FORM_BYTES:
                raise UploadError(413, f"the file is larger than {max_file_bytes} bytes", "file")
            with service.files.bytes.writing() as file:
                content_type = request.headers.get("content-type", "")
                form = await receive_upload(content_type, request.stream(), file, max_file_bytes)
                purpose = form.fields.get("purpose")
                if purpose is None:
                    raise UploadError(400, "purpose: is missing", "purpose")
                if purpose != INPUT_PURPOSE:
                    raise UploadError(400, f"purpose: must be {INPUT_PURPOSE!r}, is {purpose!r}", "purpose")
                kept_s = _kept_s(form.fields)
                placed = await asyncio.to_thread(service.files.place, file)
                stored = service.files.add(placed, form.filename, INPUT_PURPOSE, kept_s, tenant)
        except UploadError as error:
            raise RequestError(error.status, str(error), error.param) from None
        except ClientDisconnect:
            raise RequestError(400, "the client left before the upload was complete") from None
        return _json(stored.as_json())

    @app.get("/v1/files")
    async def list_files(
        tenant: Tenant,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10000)] = 10000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Response:
        """Files, the newest first, behind the id `after`."""
        cursor = _cursor(after, service.files.may_have_given)
        page = service.files.page(tenant, cursor, limit + 1, purpose, order == "asc")
        return _json(_page([stored.as_json() for stored in page], limit))

    @app.get("/v1/files/{file_id}")
    async def retrieve_file(file_id: str, tenant: Tenant) -> Response:
        """One file's description."""
        return _json(find(file_id, tenant).as_json())

    @app.get("/v1/files/{file_id}/content")
    async def file_content(request: Request, file_id: str, tenant: Tenant) -> Response:
        """A file's bytes, streamed; ranges are understood."""
        stored = find(file_id, tenant)
        held = service.files.bytes
        if isinstance(held, FolderBytes):
            path = held.path(stored.file_id)
            return FileResponse(path, media_type="application/octet-stream", filename=stored.filename)
        try:
            opened = await asyncio.to_thread(held.open, stored.file_id)
        except FileNotFoundError:
            raise RequestError(404, f"no file {file_id!r}", "file_id") from None
        return _stream(opened, stored, request.headers.get("range"))

    @app.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str, tenant: Tenant) -> Response:
        """Remove a file. A file that a batch is still read from stays: 409."""
        find(file_id, tenant)
        if service.batches.is_validating(file_id):
            raise RequestError(409, f"file {file_id!r} is being read by a batch; try again when it is validated")
        await asyncio.to_thread(service.files.delete, file_id)
        return _json({"id": file_id, "object": "file", "deleted": True})


async def _read_batch(request: Request) -> NewBatch:
    """The body, read once the key is known and no further than it can be long."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > FORM_BYTES:
            raise RequestError(413, f"the body is larger than {FORM_BYTES} bytes")
    try:
        return NewBatch.model_validate(json.loads(body))
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
    except (ValueError, RecursionError):
        raise RequestError(400, "the body is not valid JSON") from None


def _add_batch_routes(app: FastAPI, service: BatchService) -> None:
    def no_batch(batch_id: str) -> RequestError:
        return RequestError(404, f"no batch {batch_id!r}", "batch_id")

    @app.post("/v1/batches")
    async def create_batch(request: Request, tenant: Tenant) -> Response:
        """Accept a batch: once this is answered it is not lost."""
        new = await _read_batch(request)
        stored = service.files.find(new.input_file_id, tenant)
        if stored is None:
            raise RequestError(404, f"no file {new.input_file_id!r}", "input_file_id")
        if stored.purpose != INPUT_PURPOSE:
            raise RequestError(
                400, f"input_file_id: its purpose must be {INPUT_PURPOSE!r}, is {stored.purpose!r}", "input_file_id"
            )
        kept = new.output_expires_after
        entry = service.create(
            stored,
            new.endpoint,
            new.completion_window,
            metadata=new.metadata,
            output_expires_after_s=None if kept is None else kept.seconds,
        )
        return _json(entry.as_json())

    @app.get("/v1/batches")
    async def list_batches(
        tenant: Tenant, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> Response:
        """Batches, the newest first, behind the id `after`."""
        cursor = _cursor(after, lambda batch_id: service.find(batch_id, tenant) is not None)
        page = service.page(cursor, limit + 1, tenant)
        return _json(_page([entry.as_json() for entry in page], limit))

    @app.get("/v1/batches/{batch_id}")
    async def retrieve_batch(batch_id: str, tenant: Tenant) -> Response:
        """Return where a batch stands."""
        entry = service.find(batch_id, tenant)
        if entry is None:
            raise no_batch(batch_id)
        return _json(entry.as_json())

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(batch_id: str, tenant: Tenant) -> Response:
        """Send nothing more, abort what is in flight; what is finished goes to the output file."""
        try:
            entry = service.cancel(batch_id, tenant)
        except EventRefusedError as error:
            raise RequestError(409, str(error)) from None
        if entry is None:
            raise no_batch(batch_id)
        return _json(entry.as_json())


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def on_request_error(_: Request, error: RequestError) -> Response:
        return _json_error(error.status, str(error), error.param)

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: HTTPException) -> Response:
        return _json_error(error.status_code, str(error.detail), headers=dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def on_bad_input(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part not in {"body", "query"})
        message = str(first["msg"]).removeprefix("Value error, ")
        return _json_error(400, f"{where}: {message}" if where else message, where or None)

    @app.exception_handler(OSError)
    async def on_full_disk(_: Request, error: OSError) -> Response:
        logger.error("a request failed: %s", error)
        return _json_error(507, f"the service's disk: {error.strerror or error}")

    @app.exception_handler(StorageError)
    async def on_storage(_: Request, error: Exception) -> Response:
        logger.error("a request failed: %s", error)
        return _json_error(503, "the service's files cannot be reached; try again")

    @app.exception_handler(StoreError)
    async def on_store(_: Request, error: Exception) -> Response:
        logger.error("a request failed: %s", error)
        if isinstance(error, StoreFullError):
            return _json_error(507, f"the service's store: {error}")
        return _json_error(503, "the service's store cannot be reached; try again")

    @app.exception_handler(Exception)
    async def on_bug(_: Request, error: Exception) -> Response:
        return _json_error(500, f"internal error: {type(error).__name__}")


def _stream(file: IO[bytes], stored: StoredFile, wanted: str | None) -> Response:
    """A file's bytes as they are read, or the one range of them that is wanted; several are answered with all."""
    first, end, status = 0, stored.size_bytes, 200
    given = re.fullmatch(r"bytes=(\d{0,15})-(\d{0,15})", wanted or "")
    headers = {
        "accept-ranges": "bytes",
        "content-disposition": f"attachment; filename*=utf-8''{quote(stored.filename, safe='')}",
    }
    if given and any(given.groups()):
        low, high = given.groups()
        first = int(low) if low else max(0, stored.size_bytes - int(high))
        end = min(stored.size_bytes, int(high) + 1) if low and high else stored.size_bytes
        if first >= end:
            file.close()
            return Response(status_code=416, headers={"content-range": f"bytes */{stored.size_bytes}"})
        status = 206
        headers["content-range"] = f"bytes {first}-{end - 1}/{stored.size_bytes}"

    def pieces() -> Iterator[bytes]:
        with file:
            file.seek(first)
            left = end - first
            while left and (data := file.read(min(left, WRITE_BYTES))):
                left -= len(data)
                yield data

    headers["content-length"] = str(end - first)
    return StreamingResponse(pieces(), status, headers, media_type="application/octet-stream")


def _kept_s(fields: dict[str, str]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise UploadError(400, "expires_after[anchor]: must be 'created_at'", "expires_after[anchor]")
    if not seconds or not (seconds.isascii() and seconds.isdecimal()) or not MIN_KEPT_S <= int(seconds) <= MAX_KEPT_S:
        raise UploadError(
            400, f"expires_after[seconds]: must be from {MIN_KEPT_S} to {MAX_KEPT_S}", "expires_after[seconds]"
        )
    return int(seconds)


def _cursor(after: str | None, is_known: Callable[[str], bool]) -> str | None:
    if after is not None and not is_known(after):
        raise RequestError(400, f"after: {after!r} is not an id of this list", "after")
    return after


def _page(listed: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of OpenAI's lists, of `limit` + 1 entries where there are more."""
    data = listed[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(listed) > limit,
    }


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def _json_error(status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None) -> Response:
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    body = {
        "error": {"message": _encodable(message), "type": kind, "param": param and _encodable(param), "code": status}
    }
    headers = headers or {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(orjson.dumps(body), status_code=status, headers=headers, media_type="application/json")


def _encodable(text: str) -> str:
    """Return the text without what UTF-8 cannot encode: JSON may name half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode()
