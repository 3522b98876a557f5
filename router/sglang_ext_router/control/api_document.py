"""The router's OpenAPI document: the paths of the control plane from FastAPI, and the generation paths.

Every path also lists the errors that the HTTP server may answer before the path is reached, for keys, sizes and time
limits (`http/access.py`, `http/http1.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from sglang_ext.tenants_file import TENANT_HEADER
from sglang_ext_router.http.instance_paths import PUT_PATHS
from sglang_ext_router.request.request_fields import BODIES, Schema


def _object(required: str, **properties: Schema) -> Schema:
    """Return the schema of an object; `required` names the required properties, separated by spaces."""
    schema: Schema = {"type": "object"}
    if required:
        schema["required"] = required.split()
    return {**schema, "properties": properties} if properties else schema


_TEXT: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_ERROR_FIELDS = _object(
    "message type param code",
    message=_TEXT,
    type=_TEXT,
    param=_TEXT_OR_NULL,
    code={"type": ["integer", "string", "null"]},
)
ERROR = _object("error", error=_ERROR_FIELDS)
# An instance's own error: in OpenAI's shape, flat, or a line about a field.
INSTANCE_ERROR: Schema = {
    "anyOf": [
        {"$ref": "#/components/schemas/Error"},
        _object("message", message=_TEXT),
        _object("error", error={"type": ["object", "string"]}),  # Anthropic's errors have a `type`, too
    ]
}
WORKER_URL_PATTERN = r"^https?://[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?:[1-9][0-9]{0,3}$"
_EVERYWHERE = {
    400: "the request cannot be read, or asks for what cannot be served",
    401: "a key is missing or wrong",
    404: "no such model, instance or path",
    408: "the request did not arrive in time",
    413: "the body is too large",
    431: "the head is too large",
    503: "too much is going on, or nothing can serve it now; try again later",
}
_GENERATION_ERRORS = {
    408: "the request did not arrive, or was not served, in time",
    429: "too many requests are waiting",
    500: "an instance failed",
    502: "an instance was lost",
    504: "the request took longer than the router allows",
}
_ADMIN_ERRORS = {403: "changes are off, or this key may not change anything"}
# Marks of a path that only the administrator may use, and of a path that needs no key; others are for clients.
ADMIN_ONLY: dict[str, Any] = {"x-admin": True}
NO_KEY: dict[str, Any] = {"x-open": True}
_NEEDS_KEY: dict[str, list[str]] = {"ApiKey": []}
_NEEDS_ADMIN_KEY: dict[str, list[str]] = {"AdminKey": []}
_FOR_TENANT = {
    "name": TENANT_HEADER,
    "in": "header",
    "description": "whose request it is, from a tenant that may send for others",
    "schema": _TEXT,
}
_NOT_FOR_TENANT = "this key's tenant may not send for the tenant that the header names"

_USAGE = _object(
    "prompt_tokens completion_tokens total_tokens",
    prompt_tokens=_INTEGER,
    completion_tokens={"type": ["integer", "null"]},
    total_tokens=_INTEGER,
)


def _completion(kind: str, field: str, content: Schema) -> Schema:
    """Return the schema of a completion whose choices have their `content` in `field`."""
    choice = {"index": _INTEGER, "finish_reason": _TEXT_OR_NULL, field: content}
    return _object(
        "id object created model choices usage",
        id=_TEXT,
        object={"const": kind},
        created=_INTEGER,
        model=_TEXT,
        choices={"type": "array", "items": _object(f"index finish_reason {field}", **choice)},
        usage=_USAGE,
    )


_OUTPUT = _object(
    "text meta_info",
    text=_TEXT,
    output_ids={"type": "array", "items": _INTEGER},
    meta_info=_object("id finish_reason"),
)
_RESPONSE = _object(
    "id object created_at model output status",
    id=_TEXT,
    object={"const": "response"},
    created_at=_INTEGER,
    model=_TEXT_OR_NULL,
    output={"type": "array", "items": _object("")},
    status={"enum": ["completed", "incomplete", "failed"]},
    usage={"type": ["object", "null"]},
)
_MESSAGE = _object(
    "id type role content model stop_reason usage",
    id=_TEXT,
    type={"const": "message"},
    content={"type": "array", "items": _object("type")},
    stop_reason=_TEXT_OR_NULL,
    usage=_object("input_tokens output_tokens", input_tokens=_INTEGER, output_tokens=_INTEGER),
)
_LIST_OF_OBJECTS: Schema = {"type": "array", "items": _object("")}
_DATA = _object("object data model usage", object={"const": "list"}, data=_LIST_OF_OBJECTS, model=_TEXT, usage=_USAGE)
# Path, summary and reply of what an undivided instance answers without generating anything.
_UNDIVIDED: tuple[tuple[str, str, Schema], ...] = (
    ("/v1/embeddings", "The embeddings of texts.", _DATA),
    ("/v1/classify", "The classes of texts.", _DATA),
    ("/v1/rerank", "Documents in the order in which they fit a query.", _LIST_OF_OBJECTS),
    (
        "/v1/score",
        "How likely each label follows a query and an item.",
        _object("object scores model", object={"const": "scoring"}, scores={"type": "array"}),
    ),
)
# Path, summary and reply (without streaming) of each generation path; the body's schema is in `BODIES`.
_GENERATION: tuple[tuple[str, str, Schema], ...] = (
    (
        "/v1/chat/completions",
        "The next message of a chat.",
        _completion("chat.completion", "message", _object("role")),
    ),
    ("/v1/completions", "The continuation of a text.", _completion("text_completion", "text", _TEXT)),
    (
        "/generate",
        "SGLang's own generation request.",
        {"anyOf": [_OUTPUT, {"type": "array", "items": _OUTPUT}]},
    ),
    (
        "/v1/responses",
        "A reply in OpenAI's newer form. It is not kept: no previous_response_id, conversation or background.",
        _RESPONSE,
    ),
    ("/v1/messages", "The next message of a chat, in Anthropic's form; errors too.", _MESSAGE),
)


def request_body(path: str) -> dict[str, Any]:
    """Return the document's `requestBody` of a path in `BODIES`."""
    return {"required": True, "content": {"application/json": {"schema": BODIES[path]}}}


def answers(**errors: str) -> dict[int | str, dict[str, Any]]:
    """Return the errors of one path of the control plane in FastAPI's form: `answers(_404="no such thing")`."""
    return {int(status.removeprefix("_")): _error_answer(text) for status, text in errors.items()}


def describe_api(app: FastAPI, needs_client_key: bool, has_tenants: bool) -> dict[str, Any]:
    """Return the document of the whole API; `needs_client_key`: clients have to send a key, perhaps a tenant's."""
    document = get_openapi(
        title=app.title, version=app.version, openapi_version="3.1.0", description=app.description, routes=app.routes
    )
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Error"] = ERROR
    schemas["InstanceError"] = INSTANCE_ERROR
    components["securitySchemes"] = {"AdminKey": {"type": "http", "scheme": "bearer", "description": "--admin-api-key"}}
    if needs_client_key:
        components["securitySchemes"]["ApiKey"] = {"type": "http", "scheme": "bearer", "description": "a client's key"}
    paths = document["paths"]
    for path, operation in _operations(paths):
        replies = operation["responses"]
        if path in BODIES:  # an instance answers
            replies["400"] = _error_answer(_EVERYWHERE[400], "InstanceError")
        replies.pop("422", None)  # bad input is 400 here
        is_admin, is_anthropic = operation.pop("x-admin", False), path.startswith("/v1/messages")
        for status, text in (_EVERYWHERE | (_ADMIN_ERRORS if is_admin else {})).items():
            replies.setdefault(str(status), _error_answer(text, "InstanceError" if is_anthropic else "Error"))
        if is_admin:
            operation["security"] = [_NEEDS_ADMIN_KEY]
        elif needs_client_key and not operation.pop("x-open", False):
            operation["security"] = [_NEEDS_KEY]
        operation.pop("x-open", None)
    for path, summary, reply in (*_GENERATION, *_UNDIVIDED):
        paths[path] = {"post": _generation(path, summary, reply, needs_client_key)}
    for name in sorted(path.decode() for path in PUT_PATHS):
        paths[name]["put"] = {**paths[name]["post"], "operationId": f"put_{name.rsplit('/', 1)[1]}"}
    if has_tenants:
        for path, operation in _operations(paths):
            if _NEEDS_KEY in operation.get("security", ()):
                operation["parameters"] = [*operation.get("parameters", ()), _FOR_TENANT]
                schema = "InstanceError" if path.startswith("/v1/messages") else "Error"
                operation["responses"]["403"] = _error_answer(_NOT_FOR_TENANT, schema)
    return document


def _operations(paths: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in paths.items():
        for operation in methods.values():
            yield path, operation


def _error_answer(text: str, schema: str = "Error") -> dict[str, Any]:
    return {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
    }


def _generation(path: str, summary: str, reply: Schema, needs_client_key: bool) -> dict[str, Any]:
    name = path.rsplit("/", 1)[1] if path != "/v1/chat/completions" else "chat"
    operation: dict[str, Any] = {
        "summary": summary,
        "operationId": f"create_{name}",
        "requestBody": request_body(path),
        "responses": {
            "200": {
                "description": "the reply; with `stream` as server-sent events",
                "content": {
                    "application/json": {"schema": reply},
                    "text/event-stream": {},
                },
            }
        },
    }
    if (path, summary, reply) in _UNDIVIDED:
        operation["description"] = "Needs an undivided instance of the model: 404 where it has prefill and decode only."
        operation["responses"]["200"]["description"] = "the reply"
        del operation["responses"]["200"]["content"]["text/event-stream"]
    for status, text in (_EVERYWHERE | _GENERATION_ERRORS).items():
        operation["responses"][str(status)] = _error_answer(text, "InstanceError")
    if needs_client_key:
        operation["security"] = [_NEEDS_KEY]
    return operation
