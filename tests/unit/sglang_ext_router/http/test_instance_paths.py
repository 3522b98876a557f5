"""The paths of a plain SGLang server at the router: every one of them is decided on, and answers as decided."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sglang_ext_router.http.instance_paths import INSTANCE_PATHS, Handling
from support.router_process import FAST, cluster, running_router
from support.scripted_engine import MODEL, reply

METHODS = {"get", "head", "post", "put", "delete", "patch", "websocket"}
# Files of SGLang with routes, and the module-level names under which they have a FastAPI application or router.
SOURCES = {"http_server.py": "app", "v1_loads.py": "router", "elastic_ep.py": "router"}
# `/metrics` is mounted, not decorated.
MOUNTED = {("GET", "/metrics")}


def entrypoints() -> Path:
    """The folder of SGLang's servers; SGLang itself is not imported."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "srt/entrypoints"


def literal(node: ast.expr) -> str | None:
    """A path as it is written, or the default of `os.environ.get(NAME, default)`; None for a variable."""
    if isinstance(node, ast.Call):
        node = node.args[1]
    return node.value if isinstance(node, ast.Constant) else None


def routes_of(source: str, owner: str) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            if not isinstance(decorator, ast.Call) or not isinstance(decorator.func, ast.Attribute):
                continue
            kind = decorator.func.attr
            if not isinstance(decorator.func.value, ast.Name) or decorator.func.value.id != owner:
                continue
            if kind != "api_route" and kind not in METHODS:
                continue
            path = literal(decorator.args[0])
            if path is None:
                continue
            methods = [kind.upper()]
            if kind == "api_route":
                given = next(keyword.value for keyword in decorator.keywords if keyword.arg == "methods")
                methods = ast.literal_eval(given)
            found |= {(method, path) for method in methods}
    return found


def test_every_path_of_sglang_is_decided_on() -> None:
    """A new path of SGLang fails here: name it in the table, and serve it, pass it on, or say why not."""
    sglang = set(MOUNTED)
    for name, owner in SOURCES.items():
        sglang |= routes_of((entrypoints() / name).read_text(), owner)
    decided = {(method, entry.path) for entry in INSTANCE_PATHS for method in entry.methods.split()}
    assert {"missing": sglang - decided, "gone": decided - sglang} == {"missing": set(), "gone": set()}
    assert len(sglang) > 100


def test_sglang_has_no_further_files_with_routes() -> None:
    tree = ast.parse((entrypoints() / "http_server.py").read_text())
    included = {
        ast.unparse(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "include_router"
    }
    assert included == {"v1_loads_router", "elastic_ep_router"}
    assert not any(
        isinstance(node, ast.Attribute) and node.attr in {"add_api_route", "add_route", "add_api_websocket_route"}
        for node in ast.walk(tree)
    )


def concrete(path: str) -> str:
    return re.sub(r"\{\w+(:path)?\}", "x", path)


async def test_what_is_not_served_is_an_error_of_openais_shape_with_the_reason() -> None:
    async with running_router(FAST) as running:
        for entry in INSTANCE_PATHS:
            if entry.handling is not Handling.NOT_SERVED:
                continue
            assert entry.reason
            for method in entry.methods.replace("WEBSOCKET", "GET").split():
                answer = await running.ask(method, concrete(entry.path), None if method == "GET" else {"model": "m"})
                assert (answer.status, answer.error["type"]) == (404, "not_found_error"), (method, entry.path)
                assert "not served here" in answer.error["message"]
                assert answer.error["message"].endswith(entry.reason)


async def test_what_is_served_is_known_without_any_instance() -> None:
    """Neither 404 nor 405, but for replies and models that do not exist."""
    async with running_router(FAST) as running:
        for entry in INSTANCE_PATHS:
            if entry.handling is Handling.NOT_SERVED:
                continue
            for method in entry.methods.split():
                answer = await running.ask(method, concrete(entry.path), {} if method in {"POST", "PUT"} else None)
                is_of_one = "{" in entry.path
                assert answer.status in ({404, 503} if is_of_one else {200, 400, 403, 503}), (method, entry.path)


@pytest.mark.parametrize("path", ["/parse_function_call", "/separate_reasoning", "/api/show"])
async def test_a_body_is_passed_on_to_one_instance(path: str) -> None:
    async with cluster(short=2) as served:
        body = {"model": MODEL, "text": "x", "reasoning_parser": "qwen3", "tools": []}
        answer = await served.ask("POST", path, body)
        assert answer.json == {"path": path, "got": json.dumps(body)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"object": "error", "message": "no", "type": "Bad Request", "code": 400}, "no"),
        ({"detail": "no"}, "no"),
        ({"error": {"message": "no"}}, "no"),
        ({"error": {"message": "no", "type": "BadRequest", "param": None, "code": 400}}, "no"),
    ],
)
@pytest.mark.parametrize("path", ["/parse_function_call", "/v1/tokenize", "/v1/messages/count_tokens"])
async def test_errors_of_instances_have_the_shape_of_the_path(path: str, given: dict[str, Any], message: str) -> None:
    async with cluster() as served:
        for engine in served.engines:
            engine.pages[path] = reply(given, 400)
        answer = await served.ask("POST", path, {"prompt": "x", "text": "x"})
        assert answer.status == 400
        if path == "/v1/messages/count_tokens":
            assert answer.json == {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
        else:
            assert answer.error["message"] == message
            assert set(answer.error) == {"message", "type", "param", "code"}


async def test_chat_has_sagemakers_name_too() -> None:
    async with cluster() as served:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = await served.ask("POST", "/invocations", body)
        assert answer.status == 200
        for engine in (served.short[0], served.decode[0]):
            assert engine.requests[0].path == "/v1/chat/completions"
        assert (await served.ask("GET", "/invocations")).status == 405


async def test_loads_of_all_instances_are_one_list() -> None:
    async with cluster(short=1, decode=2) as served:
        for number, engine in enumerate(served.engines):
            loads = [{"dp_rank": rank, "num_running_reqs": number} for rank in range(2)]
            engine.loads = {"version": "0.5.23", "accelerator": "CPU", "num_accelerators": 1, "loads": loads}
        answer = (await served.ask("GET", "/v1/loads?include=core")).json
        assert (answer["version"], answer["accelerator"]) == ("0.5.23", "CPU")
        assert answer["num_accelerators"] == len(served.engines)
        assert [(load["url"], load["role"], load["dp_rank"], load["num_running_reqs"]) for load in answer["loads"]] == [
            (engine.url, engine.role.value, rank, number)
            for number, engine in enumerate(served.engines)
            for rank in range(2)
        ]
        await served.engines[0].stop()
        assert len((await served.ask("GET", "/v1/loads")).json["loads"]) == 2 * (len(served.engines) - 1)
        refused = await served.ask("GET", "/v1/loads?format=prometheus")
        assert (refused.status, refused.error["param"]) == (400, "format")


async def test_ollama_finds_models_and_aliases() -> None:
    async with cluster(model_alias=(f"other={MODEL}",)) as served:
        for engine in served.engines:
            engine.pages["/api/tags"] = reply({"models": [{"name": MODEL, "model": MODEL, "size": 0}]})
        listed = (await served.ask("GET", "/api/tags")).json
        assert listed == {"models": [{"name": name, "model": name, "size": 0} for name in (MODEL, "other")]}
        unknown = await served.ask("POST", "/api/show", {"model": "nobody's"})
        assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
