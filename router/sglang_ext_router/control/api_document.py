"""The router's OpenAPI document: the control plane's paths as FastAPI knows them, and the generation paths.

Beside what a path answers itself stands what every path may answer: the gate in front of it judges keys, sizes and
time (`http/access.py`, `http/http1.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from sglang_ext_router.request.request_fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENISE_FIELDS,
    GENERATE_FIELDS,
    RESPONSES_FIELDS,
    TOKENISE_FIELDS,
    Schema,
)

ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["integer", "string", "null"]},
            },
        }
    },
}
# An instance's own error: in OpenAI's shape, flat, or a line about a field.
INSTANCE_ERROR: Schema = {
    "anyOf": [
        {"$ref": "#/components/schemas/Error"},
        {"type": "object", "required": ["message"], "properties": {"message": {"type": "string"}}},
        {"type": "object", "required": ["error"], "properties": {"error": {"type": ["object", "string"]}}},
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
# Who may use a path of the control plane; a client where it has neither.
ADMIN_ONLY: dict[str, Any] = {"x-admin": True}
NO_KEY: dict[str, Any] = {"x-open": True}
_NEEDS_KEY: dict[str, list[str]] = {"ApiKey": []}
_NEEDS_ADMIN_KEY: dict[str, list[str]] = {"AdminKey": []}

_USAGE: Schema = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": {"type": "integer"},
        "completion_tokens": {"type": ["integer", "null"]},
        "total_tokens": {"type": "integer"},
    },
}


def _one_of(given: str, other: str) -> Schema:
    """`given` is there and `other` is not; null is not there."""
    return {"required": [given], "properties": {given: {"not": {"type": "null"}}, other: {"type": "null"}}}


def _body(fields: dict[str, Schema], further: Schema) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": fields,
        "description": "Further fields are passed on to the instances.",
        **further,
    }
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _completion(choice: dict[str, Schema], kind: str) -> Schema:
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["index", "finish_reason", *choice],
                    "properties": {
                        "index": {"type": "integer"},
                        "finish_reason": {"type": ["string", "null"]},
                        **choice,
                    },
                },
            },
            "usage": _USAGE,
        },
    }


_OUTPUT: Schema = {
    "type": "object",
    "required": ["text", "meta_info"],
    "properties": {
        "text": {"type": "string"},
        "output_ids": {"type": "array", "items": {"type": "integer"}},
        "meta_info": {"type": "object", "required": ["id", "finish_reason"]},
    },
}
_RESPONSE: Schema = {
    "type": "object",
    "required": ["id", "object", "created_at", "model", "output", "status"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "response"},
        "created_at": {"type": "integer"},
        "model": {"type": ["string", "null"]},
        "output": {"type": "array", "items": {"type": "object"}},
        "status": {"enum": ["completed", "incomplete", "failed"]},
        "usage": {"type": ["object", "null"]},
    },
}

TOKENISE_BODIES: dict[str, dict[str, Any]] = {
    path: _body(fields, further)
    for paths, fields, further in (
        (
            ("/v1/tokenize", "/tokenize"),
            TOKENISE_FIELDS,
            {"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]},
        ),
        (("/v1/detokenize", "/detokenize"), DETOKENISE_FIELDS, {"required": ["tokens"]}),
    )
    for path in paths
}
# Path, what it is, fields of the body, what else holds for the body, the reply that is not streamed
_GENERATION: tuple[tuple[str, str, dict[str, Schema], Schema, Schema], ...] = (
    (
        "/v1/chat/completions",
        "A chat's next message.",
        CHAT_FIELDS,
        {"required": ["messages"]},
        _completion({"message": {"type": "object", "required": ["role"]}}, "chat.completion"),
    ),
    (
        "/v1/completions",
        "What follows a text.",
        COMPLETION_FIELDS,
        {"required": ["prompt"]},
        _completion({"text": {"type": "string"}}, "text_completion"),
    ),
    (
        "/generate",
        "SGLang's own generation request.",
        GENERATE_FIELDS,
        {"anyOf": [_one_of("text", "input_ids"), _one_of("input_ids", "text")]},
        {"anyOf": [_OUTPUT, {"type": "array", "items": _OUTPUT}]},
    ),
    (
        "/v1/responses",
        "A reply in OpenAI's newer form. It is not kept: no previous_response_id, conversation or background.",
        RESPONSES_FIELDS,
        {"required": ["model", "input"]},
        _RESPONSE,
    ),
)


def answers(**errors: str) -> dict[int | str, dict[str, Any]]:
    """What a path of the control plane may answer beside what every path may: `answers(_404="no such thing")`."""
    return {int(status.removeprefix("_")): _error_answer(text) for status, text in errors.items()}


def describe_api(app: FastAPI, needs_client_key: bool) -> dict[str, Any]:
    """The document of the whole API; `needs_client_key` is whether clients have to send a key."""
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
    for operation in _operations(paths):
        replies = operation["responses"]
        if operation.get("requestBody") in TOKENISE_BODIES.values():
            replies["400"] = _error_answer(_EVERYWHERE[400], "InstanceError")
        replies.pop("422", None)  # bad input is 400 here
        is_admin = operation.pop("x-admin", False)
        for status, text in (_EVERYWHERE | (_ADMIN_ERRORS if is_admin else {})).items():
            replies.setdefault(str(status), _error_answer(text))
        if is_admin:
            operation["security"] = [_NEEDS_ADMIN_KEY]
        elif needs_client_key and not operation.pop("x-open", False):
            operation["security"] = [_NEEDS_KEY]
        operation.pop("x-open", None)
    for path, summary, fields, further, reply in _GENERATION:
        paths[path] = {"post": _generation(path, summary, fields, further, reply, needs_client_key)}
    return document


def _operations(paths: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for methods in paths.values():
        yield from methods.values()


def _error_answer(text: str, schema: str = "Error") -> dict[str, Any]:
    return {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
    }


def _generation(
    path: str, summary: str, fields: dict[str, Schema], further: Schema, reply: Schema, needs_client_key: bool
) -> dict[str, Any]:
    name = path.rsplit("/", 1)[1] if path != "/v1/chat/completions" else "chat"
    operation: dict[str, Any] = {
        "summary": summary,
        "operationId": f"create_{name}",
        "requestBody": _body(fields, further),
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
    for status, text in (_EVERYWHERE | _GENERATION_ERRORS).items():
        operation["responses"][str(status)] = _error_answer(text, "InstanceError")
    if needs_client_key:
        operation["security"] = [_NEEDS_KEY]
    return operation
