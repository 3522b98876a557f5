"""/v1/embeddings, /v1/rerank, /v1/score, /v1/classify: by undivided instances, with admission, retries and records."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.types import Role
from sglang_ext_router.config import WorkerAddress
from sglang_ext_router.request.prompt import BadRequestError, list_size, measure
from support.raw_client import request_bytes
from support.router_process import cluster, until
from support.scripted_engine import cut, hang, reply, response, status

ONLY_PLAIN: dict[str, Any] = {"short": 0, "long": 0, "decode": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "x", "model": "m"},
    "/v1/rerank": {"query": "q", "documents": ["a", "b"]},
    "/v1/score": {"query": "q", "items": ["a", "b"], "label_token_ids": [1, 2]},
    "/v1/classify": {"input": ["x", "y"]},
}
PATHS = tuple(BODIES)
NO_PLAIN = "no instance can serve the request now: no plain instance of m is ready"
VECTOR = {"object": "list", "data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 3, "completion_tokens": 0}}


@pytest.mark.parametrize("path", PATHS)
async def test_an_undivided_instance_answers(path: str) -> None:
    async with cluster(plain=1) as served:
        (engine,) = served.plain
        engine.script = reply(VECTOR)
        answer = await served.ask("POST", path, {**BODIES[path], "bootstrap_room": 4, "rid": "mine", "stream": True})
        assert (answer.status, answer.json) == (200, VECTOR)
        assert answer.headers["x-sglang-ext-plain"] == engine.url
        got = engine.requests[0].json
        assert got.pop("rid") != "mine"
        assert got == {**BODIES[path], "stream": True}
        assert served.upstream_requests() == 1


async def test_a_list_has_a_list_of_ids() -> None:
    """SGLang answers 500 to one id for a list, and to a list of ids for one input."""
    async with cluster(plain=1) as served:
        for given, count in (("x", 0), (["x"], 1), (["x", "y"], 2), ([5, 6], 0), ([[5, 6]], 1), ([5.0], 0)):
            await served.ask("POST", "/v1/embeddings", {"input": given})
            rid = served.plain[0].requests[-1].json["rid"]
            assert isinstance(rid, list) == (count > 0)
            assert not count or len(set(rid)) == count
    assert list_size({"input": [{"text": "a"}]}) == 0
    assert list_size({"input": [{"text": "a"}, {"image": "b"}]}) == 2


@pytest.mark.parametrize("path", PATHS)
async def test_without_an_undivided_instance_there_is_one_error(path: str) -> None:
    async with cluster() as served:
        answer = await served.ask("POST", path, BODIES[path])
        assert answer.status == 404
        assert "needs an undivided instance" in answer.error["message"]
        assert served.upstream_requests() == 0


@pytest.mark.slow
async def test_one_that_is_away_is_waited_for() -> None:
    async with cluster(plain=1, queue_timeout_secs=5.0) as served:
        (engine,) = served.plain
        await engine.stop()
        await until(lambda: not served.router.registry.ready_plain)
        asked = asyncio.create_task(served.ask("POST", "/v1/embeddings", BODIES["/v1/embeddings"]))
        await asyncio.sleep(0.1)
        await engine.start()
        assert (await asked).status == 200
    async with cluster(plain=1, queue_timeout_secs=0.1) as served:
        await served.plain[0].stop()
        await until(lambda: not served.router.registry.ready_plain)
        answer = await served.ask("POST", "/v1/embeddings", BODIES["/v1/embeddings"])
        assert (answer.status, answer.error["message"]) == (503, NO_PLAIN)


@pytest.mark.parametrize("script", [cut(), status(500), status(503)])
async def test_a_failure_moves_to_another_undivided_instance(script: Any) -> None:
    async with cluster(plain=2, long=0) as served:
        has_failed: list[int] = []

        async def play(turn: Any) -> None:
            has_failed.append(1)
            await (script if len(has_failed) == 1 else reply(VECTOR))(turn)

        for engine in served.plain:
            engine.script = play
        answer = await served.ask("POST", "/v1/embeddings", BODIES["/v1/embeddings"])
        assert (answer.status, answer.json) == (200, VECTOR)
        assert [len(engine.requests) for engine in served.plain] == [1, 1]
        assert served.router.metrics.retries["prefill"] == 1
        assert not served.short[0].requests


async def test_a_request_that_ends_instances_visits_two() -> None:
    async with cluster(plain=4, disable_circuit_breaker=True) as served:
        for engine in served.plain:
            engine.script = cut()
        answer = await served.ask("POST", "/v1/score", BODIES["/v1/score"])
        assert (answer.status, answer.headers["x-should-retry"]) == (502, "false")
        assert served.upstream_requests() == 2


async def test_an_instances_refusal_is_the_answer() -> None:
    async with cluster(plain=2) as served:
        for engine in served.plain:
            engine.script = status(400, "Input cannot be empty")
        answer = await served.ask("POST", "/v1/embeddings", {"input": ""})
        assert (answer.status, answer.error["message"]) == (400, "Input cannot be empty")
        assert served.upstream_requests() == 1


async def test_they_wait_for_admission() -> None:
    async with cluster(plain=1, max_concurrent_requests=1, queue_size=1) as served:
        served.plain[0].script = hang()
        first, second, third = [await served.connect() for _ in range(3)]
        message = request_bytes("POST", "/v1/embeddings", b'{"input": "x"}')
        await first.send(message)
        await served.plain[0].received(1)
        await second.send(message)
        await until(lambda: served.router.admission.waiting == 1)
        await third.send(message)
        assert (await third.reply()).status == 429
        first.close()
        await served.plain[0].received(2)
        second.close()


async def test_a_client_that_leaves_has_all_its_inputs_aborted() -> None:
    async with cluster(plain=1) as served:
        served.plain[0].script = hang()
        client = await served.connect()
        await client.send(request_bytes("POST", "/v1/embeddings", b'{"input": ["x", "y"]}'))
        (request,) = await served.plain[0].received(1)
        client.close()
        await until(lambda: len(served.plain[0].aborts) == 2)
        assert [abort.rid for abort in served.plain[0].aborts] == request.json["rid"]


async def test_it_is_counted_and_logged(tmp_path: Path) -> None:
    log = tmp_path / "access"
    async with cluster(plain=1, access_log=str(log)) as served:
        served.plain[0].script = reply(VECTOR)
        await served.ask("POST", "/v1/embeddings", {"input": ["x"] * 300}, {"x-request-id": "r-1"})
        await until(lambda: log.exists() and log.read_text().count("\n") == 1)
        line = json.loads(log.read_text())
        assert (line["path"], line["status"], line["request_id"]) == ("/v1/embeddings", 200, "r-1")
        assert (line["model"], line["sequences"]) == ("m", 300)
        assert "output_tokens" not in line
        assert served.router.metrics.plain == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {}),
        ("/v1/embeddings", {"input": []}),
        ("/v1/embeddings", {"input": 5}),
        ("/v1/embeddings", {"input": ["a", 5]}),
        ("/v1/embeddings", {"input": "a", "priority": 1 << 40}),
        ("/v1/embeddings", {"input": "a", "embed_overrides": [[[1.0]]]}),
        ("/v1/score", {"query": [5], "items": [[6]], "query_embed_overrides": [[1.0]]}),
        ("/v1/score", {"query": "a", "items": ["b"], "temperature": 0}),
        ("/v1/rerank", {"query": "a", "documents": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}),
        ("/v1/classify", {"input": None}),
    ],
)
async def test_bad_input_is_refused_before_it_reaches_an_instance(path: str, body: dict[str, Any]) -> None:
    async with cluster(plain=1) as served:
        answer = await served.ask("POST", path, body)
        assert answer.status == 400
        assert answer.error["param"] in (*BODIES[path], *body, "input_ids")
        assert served.upstream_requests() == 0


@pytest.mark.parametrize("path", PATHS)
async def test_methods(path: str) -> None:
    async with cluster(**ONLY_PLAIN, plain=1) as served:
        assert (await served.ask("PUT", path, BODIES[path])).status == (200 if path == "/v1/rerank" else 405)
        assert (await served.ask("GET", path)).status == 405
        moved = await served.ask("POST", f"{path}/", BODIES[path])
        assert (moved.status, moved.headers["location"]) == (307, path)


# -- models that embed --------------------------------------------------------------------------------------


async def test_a_model_that_embeds_is_not_asked_to_generate() -> None:
    """Such an instance of SGLang ends at the first request to generate."""
    async with cluster(**ONLY_PLAIN) as served:
        engine = await served.extra_engine(Role.PLAIN)
        engine.is_generation = False
        served.router.add_worker(WorkerAddress(engine.url, Role.PLAIN))
        await until(lambda: bool(served.router.registry.ready_plain))
        for path, body in (
            ("/generate", {"text": "x"}),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/messages", {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}),
        ):
            answer = await served.ask("POST", path, body)
            assert answer.status == 400
            assert "does not generate: ask /v1/embeddings" in answer.json["error"]["message"]
        assert (await served.ask("POST", "/v1/embeddings", {"input": "x"})).status == 200
        assert len(engine.requests) == 1


@pytest.mark.parametrize("roles", [(Role.PLAIN, Role.PLAIN), (Role.DECODE, Role.PLAIN)])
async def test_instances_that_embed_do_not_join_those_that_generate(roles: tuple[Role, Role]) -> None:
    async with cluster(**ONLY_PLAIN) as served:
        first, second = [await served.extra_engine(role) for role in roles]
        second.is_generation = False
        for engine in (first, second):
            worker = served.router.add_worker(WorkerAddress(engine.url, engine.role))
            await until(lambda worker=worker: worker.is_checked)
        assert served.worker(second.url).is_refused
        assert "does not generate" in served.worker(second.url).last_error
        assert not served.worker(first.url).is_refused


# -- the size of a request ----------------------------------------------------------------------------------


def test_each_document_is_read_with_its_query() -> None:
    prompt = measure(b"/v1/rerank", {"query": "q" * 100, "documents": ["d" * 50, [{"type": "text", "text": "e" * 80}]]})
    assert (prompt.sequence_count, prompt.text_bytes, prompt.longest_bytes) == (2, 332, 181)
    prompt = measure(b"/v1/score", {"query": "q" * 100, "items": ["d" * 50, "e" * 80]})
    assert (prompt.sequence_count, prompt.longest_bytes) == (2, 180)
    prompt = measure(b"/v1/score", {"query": [5] * 100, "items": [[6] * 50, [7] * 80]})
    assert (prompt.known_tokens, prompt.longest_known_tokens) == (330, 180)
    assert measure(b"/v1/score", {"items": "one"}).texts == ("one",)


def test_inputs_of_embeddings() -> None:
    assert measure(b"/v1/embeddings", {"input": "a", "stream": True, "n": 9, "max_tokens": 5})[5:8] == (1, 1, False)
    assert measure(b"/v1/embeddings", {"input": [5.0, 6.0]}).known_tokens == 2
    shown = measure(b"/v1/embeddings", {"input": [{"text": "ab", "image": "x"}, {"video": "y"}, {"text": None}]})
    assert (shown.sequence_count, shown.texts, shown.images) == (3, ("ab", "", ""), 16)
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    assert measure(b"/v1/rerank", {"query": parts, "documents": [parts, parts]}).images == 2
    with pytest.raises(BadRequestError, match="sequences"):
        measure(b"/v1/embeddings", {"input": ["a"] * 4097})


async def test_a_large_reply_is_relayed_whole() -> None:
    async with cluster(plain=1) as served:
        body = json.dumps({"data": [{"embedding": [0.125] * 4096, "index": i} for i in range(64)]}).encode()

        async def play(turn: Any) -> None:
            await turn.write(response(body))

        served.plain[0].script = play
        assert (await served.ask("POST", "/v1/embeddings", {"input": ["x"] * 64})).body == body
