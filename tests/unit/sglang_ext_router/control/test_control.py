"""The control plane: what can be seen and changed, by whom, and how errors look."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from sglang_ext.types import Role
from support.event_loops import Complaints
from support.raw_client import Reply
from support.router_process import FAST, Cluster, cluster, running_router
from support.scripted_engine import BOOTSTRAP_PORT, CONTEXT_TOKENS, MODEL, ScriptedEngine, hang, response, status

PROMPT = {"text": "x"}
CLIENT = {"Authorization": "Bearer client"}
ADMIN = {"Authorization": "Bearer admin"}


def name_of(engine: ScriptedEngine) -> str:
    return f"127.0.0.1:{engine.port}"


async def workers(served: Cluster, headers: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
    answer = await served.ask("GET", "/workers", headers=headers)
    assert answer.status == 200
    return {worker["url"]: worker for worker in answer.json["workers"]}


@pytest.mark.parametrize("path", ["/health", "/healthz", "/liveness"])
async def test_health_says_only_that_the_process_lives(path: str) -> None:
    async with running_router(FAST) as running:
        answer = await running.ask("GET", path)
        assert (answer.status, answer.json) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", ["/readyz", "/readiness"])
async def test_ready_needs_an_instance_of_each_kind(path: str) -> None:
    async with cluster() as served:
        assert (await served.ask("GET", path)).status == 200
        for engine, missing in ((served.decode[0], "decode"), (served.long[0], None)):
            served.router.drain_worker(served.worker(engine.url), True)
            answer = await served.ask("GET", path)
            assert answer.status == 503
            if missing:
                assert missing in answer.error["message"]
        served.router.drain_worker(served.worker(served.decode[0].url), False)
        assert (await served.ask("GET", path)).status == 200  # short can serve long prompts
        served.router.drain_worker(served.worker(served.short[0].url), True)
        assert "prefill" in (await served.ask("GET", path)).error["message"]


async def test_the_models() -> None:
    async with cluster() as served:
        answer = await served.ask("GET", "/v1/models")
        assert answer.status == 200
        (model,) = answer.json["data"]
        assert model["parent"] is None
        assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", CONTEXT_TOKENS)
        assert answer.json["object"] == "list"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/tokenize", "/tokenize", "/v1/detokenize", "/detokenize"])
async def test_tokenising_is_asked_of_an_instance(path: str) -> None:
    async with cluster() as served:
        body = {"tokens": [1, "2"]} if "detokenize" in path else {"prompt": "x", "messages": None}
        answer = await served.ask("POST", path, body)
        assert answer.status == 200
        assert answer.json == {"path": path, "got": json.dumps(body)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/detokenize", {"tokens": [1 << 32]}, "tokens"),
        ("/v1/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [[1], [-1]]}, "tokens"),
        ("/v1/detokenize", {"tokens": [1, "-1"]}, "tokens"),
        ("/v1/detokenize", {"tokens": [[4294967296.0]]}, "tokens"),
    ],
)
async def test_what_an_instance_would_fail_on_is_refused(path: str, body: dict[str, Any], field: str) -> None:
    async with cluster() as served:
        answer = await served.ask("POST", path, body)
        assert (answer.status, answer.error["param"]) == (400, field)


async def test_responses_are_not_kept() -> None:
    async with running_router(FAST) as running:
        for method, path in (("GET", "/v1/responses/r"), ("DELETE", "/v1/responses/r")):
            assert (await running.ask(method, path)).status == 404
        answer = await running.ask("POST", "/v1/responses/r/cancel", {})
        assert (answer.status, "not kept" in answer.error["message"]) == (404, True)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/workers", "GET, POST"),
        ("POST", "/workers/x:1", "DELETE, GET"),
        ("GET", "/v1/responses", "POST"),
        ("DELETE", "/health", "GET, HEAD"),
    ],
)
async def test_a_method_that_is_not_taken_names_those_that_are(method: str, path: str, allowed: str) -> None:
    async with running_router(FAST) as running:
        for body in (None, {"x": 1}):  # with a body the gate answers
            answer = await running.ask(method, path, body)
            assert (answer.status, answer.headers["allow"]) == (405, allowed)


async def test_an_instances_own_description() -> None:
    async with cluster() as served:
        assert (await served.ask("GET", "/get_model_info")).json["path"] == "/model_info"
        described = (await served.ask("GET", "/get_server_info")).json
        assert [len(described[kind]) for kind in ("prefill", "decode")] == [2, 1]
        assert described["decode"][0]["disaggregation_mode"] == "decode"


async def test_without_instances_such_questions_get_503() -> None:
    async with running_router(FAST) as running:
        for method, path in (("POST", "/v1/tokenize"), ("GET", "/model_info")):
            answer = await running.ask(method, path, {"prompt": "x"} if method == "POST" else None)
            assert answer.status == 503
            assert answer.error["type"] == "server_error"


async def test_an_instance_that_fails_is_passed_over() -> None:
    async with cluster() as served:
        await served.short[0].stop()
        assert (await served.ask("POST", "/v1/tokenize", {"prompt": "x"})).status == 200


async def test_workers_are_described() -> None:
    async with cluster() as served:
        served.decode[0].script = hang()
        served.short[0].script = hang()
        client = await served.connect()
        await client.send(b'POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 15\r\n\r\n{"text": "abc"}')
        await served.decode[0].received(1)
        shown = await workers(served)
        assert set(shown) == {engine.url for engine in served.engines}
        prefill, decode = shown[served.short[0].url], shown[served.decode[0].url]
        assert (prefill["role"], prefill["state"], prefill["circuit"]) == ("short", "ready", "closed")
        assert (prefill["in_flight"], prefill["pending_tokens"]) == (1, 1)
        assert prefill["bootstrap_port"] == BOOTSTRAP_PORT
        assert (decode["role"], decode["in_flight"], decode["reserved_kv_tokens"]) == ("decode", 1, 1)
        assert decode["max_prompt_tokens"] == CONTEXT_TOKENS
        one = await served.ask("GET", f"/workers/{name_of(served.decode[0])}")
        assert one.json["url"] == served.decode[0].url
        pools = (await served.ask("GET", "/pools")).json
        assert pools["requests_in_flight"] == 1
        assert pools["length_boundary_tokens"] == 512
        short = pools["pools"]["short"]
        assert {key: short[key] for key in ("instances", "ready", "in_flight", "pending_tokens", "workers")} == {
            "instances": 1,
            "ready": 1,
            "in_flight": 1,
            "pending_tokens": 1,
            "workers": [served.short[0].url],
        }
        client.close()


async def test_a_worker_can_be_added_drained_and_removed_while_serving() -> None:
    async with cluster(decode=1, admin_api_key="admin") as served:
        extra = await served.extra_engine(Role.DECODE)
        answer = await served.ask("POST", "/workers", {"url": extra.url, "role": "decode"}, ADMIN)
        assert answer.status == 202
        assert answer.json["state"] in {"unhealthy", "ready"}
        await served.until_ready(4)
        old = name_of(served.decode[0])

        drained = await served.ask("POST", f"/workers/{old}/drain", {"drain": True}, ADMIN)
        assert (drained.status, drained.json["state"]) == (200, "draining")
        for _ in range(5):
            assert (await served.ask("POST", "/generate", PROMPT)).status == 200
        assert (len(served.decode[0].requests), len(extra.requests)) == (0, 5)

        resumed = await served.ask("POST", f"/workers/{old}/drain", {"drain": False}, ADMIN)
        assert resumed.json["state"] == "ready"

        extra.script = hang()
        served.router.drain_worker(served.worker(served.decode[0].url), True)
        waiting = asyncio.create_task(served.ask("POST", "/generate", PROMPT))
        await extra.received(6)
        served.router.drain_worker(served.worker(served.decode[0].url), False)
        removed = await served.ask("DELETE", f"/workers/{name_of(extra)}", headers=ADMIN)
        assert (removed.status, removed.json) == (200, {"removed": extra.url})
        assert extra.url not in await workers(served)
        assert not waiting.done()  # what it is serving runs to its end
        await extra.turns[0].write(response(b'{"text": "late"}'))
        extra.turns[0].aborted.set()
        assert (await waiting).json == {"text": "late"}
        for _ in range(3):
            assert (await served.ask("POST", "/generate", PROMPT)).status == 200
        assert len(extra.requests) == 6
        assert (await served.ask("GET", f"/workers/{name_of(extra)}")).status == 404


async def test_a_drained_worker_ends_what_it_has() -> None:
    async with cluster(decode=2, admin_api_key="admin") as served:
        for engine in served.decode:
            engine.script = hang()
        asks = [asyncio.create_task(served.ask("POST", "/generate", PROMPT)) for _ in range(10)]
        await served.until(lambda: sum(len(engine.requests) for engine in served.decode) == 10)
        await served.ask("POST", f"/workers/{name_of(served.decode[0])}/drain", {}, ADMIN)
        await asyncio.sleep(0.05)
        assert not any(ask.done() for ask in asks)
        assert all(engine.aborts == [] for engine in served.decode)
        for ask in asks:
            ask.cancel()
        for client in served.clients:
            client.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "expected", "names"),
    [
        (b"", 400, ""),
        (b"{", 400, ""),
        (b"[]", 400, ""),
        ({}, 400, "url"),
        ({"url": "http://a:1"}, 400, "role"),
        ({"url": "http://a:1", "role": "encode"}, 400, "role"),
        ({"url": "ws://a:1", "role": "decode"}, 400, "url"),
        ({"url": "a", "role": "decode"}, 400, "url"),
        ({"url": 5, "role": "decode"}, 400, "url"),
        ({"url": "http://a:1", "role": "short", "bootstrap_port": 0}, 400, "bootstrap_port"),
        ({"url": "http://a:1", "role": "short", "bootstrap_port": "x"}, 400, "bootstrap_port"),
        ({"url": "http://a:1", "role": "decode", "bootstrap_port": 5}, 400, "bootstrap_port"),
        ({"url": "http://a:1", "role": "decode", "unknown": 1}, 400, "unknown"),
    ],
)
async def test_a_bad_new_worker_is_refused(body: object, expected: int, names: str) -> None:
    async with running_router(replace(FAST, admin_api_key="admin")) as running:
        answer = await running.ask("POST", "/workers", body, ADMIN)
        assert answer.status == expected
        assert names in answer.error["message"]
        assert len(running.router.registry) == 0


async def test_a_worker_twice_gives_409() -> None:
    async with cluster(admin_api_key="admin") as served:
        answer = await served.ask("POST", "/workers", {"url": served.decode[0].url + "/", "role": "decode"}, ADMIN)
        assert answer.status == 409
        assert served.decode[0].url in answer.error["message"]


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("DELETE", ""), ("POST", "/drain")])
async def test_an_unknown_worker_gives_404(method: str, path: str) -> None:
    async with cluster(admin_api_key="admin") as served:
        answer = await served.ask(method, f"/workers/10.0.0.1:1{path}", {} if method == "POST" else None, ADMIN)
        assert (answer.status, answer.error["type"]) == (404, "not_found_error")


async def test_the_cache_is_flushed_everywhere() -> None:
    async with cluster(admin_api_key="admin") as served:
        text = "word " * 500
        await served.ask("POST", "/generate", {"text": text})
        assert served.router.planner.prefixes.index.block_count > 0
        answer = await served.ask("POST", "/flush_cache", headers=ADMIN)
        assert answer.status == 200
        assert sorted(answer.json["flushed"]) == sorted(engine.url for engine in served.engines)
        assert served.router.planner.prefixes.index.block_count == 0
        await served.decode[0].stop()
        answer = await served.ask("POST", "/flush_cache", headers=ADMIN)
        assert answer.status == 502
        assert list(answer.json["failed"]) == [served.decode[0].url]


OPEN = [("GET", "/health"), ("GET", "/healthz"), ("GET", "/readyz")]
FOR_CLIENTS = [
    *(("GET", path) for path in ("/metrics", "/docs", "/openapi.json", "/load")),
    *(("GET", path) for path in ("/v1/models", "/workers", "/pools", "/model_info", "/server_info", "/workers/x:1")),
    *(("POST", path) for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/tokenize")),
]
FOR_ADMINS = [
    *(("POST", path) for path in ("/workers", "/flush_cache", "/workers/x:1/drain", "/pools/move")),
    ("DELETE", "/workers/x:1"),
]
# keys of the router → what each kind of path answers without a key, to a client, to an administrator
MATRIX: list[tuple[dict[str, Any], dict[str, tuple[int, int, int]]]] = [
    ({}, {"open": (0, 0, 0), "client": (0, 0, 0), "admin": (403, 403, 403)}),
    ({"api_key": "client"}, {"open": (0, 0, 0), "client": (401, 0, 401), "admin": (401, 403, 401)}),
    ({"admin_api_key": "admin"}, {"open": (0, 0, 0), "client": (0, 0, 0), "admin": (401, 401, 0)}),
    (
        {"api_key": "client", "admin_api_key": "admin"},
        {"open": (0, 0, 0), "client": (401, 0, 0), "admin": (401, 401, 0)},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "expected"), MATRIX)
async def test_who_may_do_what(keys: dict[str, Any], expected: dict[str, tuple[int, int, int]]) -> None:
    """0 stands for: let in, whatever the answer."""
    async with cluster(**keys) as served:
        for kind, paths in (("open", OPEN), ("client", FOR_CLIENTS), ("admin", FOR_ADMINS)):
            for method, path in paths:
                for headers, code in zip((None, CLIENT, ADMIN), expected[kind], strict=True):
                    answer = await served.ask(method, path, PROMPT if method == "POST" else None, headers)
                    let_in = answer.status not in {401, 403}
                    assert (0 if let_in else answer.status) == code, (keys, method, path, headers)
                    if not let_in:
                        check_refusal(answer)


def check_refusal(answer: Reply) -> None:
    assert answer.error["type"] in {"authentication_error", "permission_error"}
    if answer.status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_keys_beyond_ascii_work_everywhere() -> None:
    key = "sésame-ключ"
    headers = {"Authorization": ("Bearer " + key).encode().decode("latin-1")}
    async with cluster(api_key=key) as served:
        assert (await served.ask("POST", "/generate", PROMPT, headers)).status == 200
        assert (await served.ask("GET", "/v1/models", headers=headers)).status == 200
        assert (await served.ask("GET", "/v1/models")).status == 401


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/health", "GET"),
        ("DELETE", "/workers", "GET"),
        ("PUT", "/flush_cache", "POST"),
        ("GET", "/v1/tokenize", "POST"),
    ],
)
async def test_a_wrong_method_gives_405(method: str, path: str, allowed: str) -> None:
    async with cluster() as served:
        answer = await served.ask(method, path)
        assert answer.status == 405
        assert answer.error["type"] == "invalid_request_error"
        assert allowed in answer.headers["allow"]


async def test_a_failing_handler_gives_500_and_a_log_line(complaints: Complaints) -> None:
    async with cluster() as served:

        def broken(_: str) -> tuple[bytes, str]:
            raise RuntimeError("no metrics today")

        served.router.render_metrics = broken  # type: ignore[method-assign]
        answer = await served.ask("GET", "/metrics")
        assert (answer.status, answer.error["type"]) == (500, "server_error")
        assert "no metrics today" not in answer.error["message"]
    assert complaints.messages == ["sglang_ext_router.http.asgi_bridge: GET /metrics failed"]
    complaints.messages.clear()


async def test_a_slow_control_call_whose_client_leaves() -> None:
    async with cluster() as served:
        for engine in served.engines:
            engine.health_status = None
        client = await served.connect()
        await client.send(b"GET /server_info HTTP/1.1\r\nHost: a\r\n\r\n")
        client.reset()
        await asyncio.sleep(0.05)
        assert (await served.ask("GET", "/health")).status == 200


async def test_a_control_call_under_way_does_not_fail_as_the_router_stops() -> None:
    async with cluster() as served:
        for engine in served.engines:
            engine.pages["/model_info"] = hang()
        client = await served.connect()
        await client.send(b"GET /model_info HTTP/1.1\r\nHost: a\r\n\r\n")
        await served.until(lambda: any(request.path == "/model_info" for request in served.short[0].control))


async def test_a_whole_process_answers_openapi() -> None:
    async with cluster() as served:
        described = (await served.ask("GET", "/openapi.json")).json
        assert {"/workers", "/pools", "/pools/move", "/metrics", "/v1/models"} <= set(described["paths"])


async def test_errors_of_an_instance_keep_their_status() -> None:
    async with cluster() as served:
        for engine in served.engines:
            engine.script = status(418)
        answer = await served.ask("POST", "/generate", PROMPT)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (418, 418)
