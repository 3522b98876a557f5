"""Tenants at a router: whose key it is, budgets with their headers, priorities, and a file that changes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from sglang_ext import key_hashes
from sglang_ext_router.config import RouterConfig
from sglang_ext_router.decide.admission import AdmissionQueue
from sglang_ext_router.decide.budgets import Bucket
from sglang_ext_router.decide.fair_admission import FairAdmissionQueue
from sglang_ext_router.observe.metrics import RouterMetrics
from sglang_ext_router.tenants.accounts import LONELY_AFTER_S, Tenants
from support.raw_client import Reply, request_bytes
from support.router_process import RunningRouter, cluster
from support.scripted_engine import DONE, chunk, event, hang, reply, status, stream, stream_head
from support.tenants import bearer, tenants_file, tenants_text

PROMPT = {"input_ids": [7] * 40, "sampling_params": {"max_new_tokens": 10}}
USED = {"text": "x", "meta_info": {"prompt_tokens": 40, "completion_tokens": 4}}
PREFIX = "x-ratelimit-"


async def ask(served: RunningRouter, key: str, body: dict[str, Any] | None = None, **headers: str) -> Reply:
    return await served.ask("POST", "/generate", PROMPT if body is None else body, bearer(key) | headers)


def shown(answer: Reply) -> dict[str, str]:
    return {name.removeprefix(PREFIX): value for name, value in answer.headers.items() if name.startswith(PREFIX)}


def tokens_left(served: RunningRouter, name: str = "a") -> float:
    tenants = served.router.tenants
    assert tenants is not None
    bucket = tenants.account(name).tokens
    assert bucket is not None
    return bucket.level


async def test_a_tenants_key_is_a_clients_key_and_no_more(tmp_path: Path) -> None:
    path = tenants_file(tmp_path, a={})
    async with cluster(tenants_file=path, api_key="client", admin_api_key="admin") as served:
        for key, code in (("a", 200), ("client", 200), ("admin", 200), ("b", 401), ("", 401)):
            assert (await ask(served, key)).status == code
        assert (await served.ask("GET", "/v1/models", headers=bearer("a"))).status == 200
        assert (await served.ask("POST", "/flush_cache", headers=bearer("a"))).status == 401
        assert {request.header("authorization") for request in served.decode[0].requests} == {"Bearer client"}
        assert shown(await ask(served, "a")) == {}


async def test_a_tenant_that_may_sends_for_others(tmp_path: Path) -> None:
    path = tenants_file(tmp_path, a={"requests_per_minute": 2}, b={}, service={"sends_for_others": True})
    async with cluster(tenants_file=path, api_key="client") as served:
        tenants = served.router.tenants
        assert tenants is not None

        async def asked_for(key: str, tenant: str) -> tuple[int, str | None]:
            answer = await ask(served, key, **{"x-sglang-ext-tenant": tenant})
            return answer.status, shown(answer).get("limit-requests")

        assert await asked_for("service", "a") == (200, "2")
        assert await asked_for("a", "a") == (200, "2")
        assert await asked_for("service", "a") == (429, "2")
        assert await asked_for("service", "b") == (200, None)
        for key, tenant in (("a", "b"), ("b", "a"), ("client", "b"), ("service", "c"), ("service", "")):
            assert (await asked_for(key, tenant))[0] == 403
        assert (await asked_for("nobody", "a"))[0] == 401
        assert (await served.ask("GET", "/v1/models", headers={"x-sglang-ext-tenant": "b"})).status == 401
        rows = await tenants.read_usage("2000-01-01", "9999-01-01", None, 0.0)
        assert {(key.tenant, count.requests) for key, count in rows} == {("a", 2), ("b", 1)}
        assert all(request.header("x-sglang-ext-tenant") is None for request in served.decode[0].requests)
        paths = (await served.ask("GET", "/openapi.json", headers=bearer("a"))).json["paths"]
        for operation in (paths["/v1/messages"]["post"], paths["/v1/models"]["get"]):
            assert [parameter["name"] for parameter in operation["parameters"]] == ["x-sglang-ext-tenant"]
            assert "403" in operation["responses"]
        assert "403" not in paths["/health"]["get"]["responses"]


async def test_without_tenants_the_document_knows_none() -> None:
    async with cluster(api_key="client") as served:
        paths = (await served.ask("GET", "/openapi.json", headers=bearer("client"))).json["paths"]
        assert "parameters" not in paths["/v1/messages"]["post"]
        assert "403" not in paths["/v1/messages"]["post"]["responses"]


async def test_requests_per_minute(tmp_path: Path) -> None:
    async with cluster(tenants_file=tenants_file(tmp_path, a={"requests_per_minute": 2}, b={})) as served:
        first = shown(await ask(served, "a"))
        assert (first["limit-requests"], first["remaining-requests"]) == ("2", "1")
        assert "limit-tokens" not in first
        assert (await ask(served, "a")).status == 200
        refused = await ask(served, "a")
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert refused.error["type"] == "rate_limit_error"
        assert "2 requests per minute of the tenant a" in refused.error["message"]
        assert 25 <= int(refused.headers["retry-after"]) <= 30
        assert shown(refused)["remaining-requests"] == "0"
        assert shown(refused)["reset-requests"] in {"1m0s", "59s"} or shown(refused)["reset-requests"].startswith("59.")
        assert (await ask(served, "b")).status == 200
        assert served.router.metrics.refused == {"rate_limited": 1}
        assert len(served.decode[0].requests) == 3


async def test_tokens_are_reserved_and_settled_by_what_was_used(tmp_path: Path) -> None:
    async with cluster(tenants_file=tenants_file(tmp_path, a={"tokens_per_minute": 100})) as served:
        served.decode[0].script = hang()
        client = await served.connect()
        await client.send(request_bytes("POST", "/generate", b'{"input_ids": [1, 2], "sampling_params": '
                                        b'{"max_new_tokens": 60}}', bearer("a")))  # fmt: skip
        await served.decode[0].received(1)
        assert tokens_left(served) == pytest.approx(38, abs=2)
        refused = await ask(served, "a")
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert "needs about 50" in refused.error["message"]
        client.close()  # what it reserved for its reply is there again
        await served.until(lambda: tokens_left(served) > 90)
        served.decode[0].script = reply(USED)
        answer = await ask(served, "a")
        assert answer.status == 200
        assert shown(answer)["limit-tokens"] == "100"
        assert 47 <= int(shown(answer)["remaining-tokens"]) <= 50
        await served.until_idle()
        assert 53 <= tokens_left(served) <= 60  # 44 of 50 were used


async def test_a_request_beyond_the_budget_is_refused_for_good(tmp_path: Path) -> None:
    async with cluster(tenants_file=tenants_file(tmp_path, a={"tokens_per_minute": 49})) as served:
        refused = await ask(served, "a")
        assert (refused.status, refused.error["code"]) == (429, "request_too_large")
        assert refused.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.headers
        assert tokens_left(served) == 49


async def test_what_no_instance_served_costs_no_tokens(tmp_path: Path) -> None:
    path = tenants_file(tmp_path, a={"tokens_per_minute": 1000})
    async with cluster(tenants_file=path, retry_max_retries=0) as served:
        served.decode[0].plan(status(503), status(400))
        for code in (503, 400):
            assert (await ask(served, "a")).status == code
        assert (await ask(served, "a", {"text": 5})).status == 400
        await served.until_idle()
        assert tokens_left(served) == 1000


async def test_a_client_that_leaves_its_stream_pays_for_what_it_got(tmp_path: Path) -> None:
    async with cluster(tenants_file=tenants_file(tmp_path, a={"tokens_per_minute": 1000})) as served:
        served.decode[0].script = hang(stream_of(7))
        client = await served.connect()
        await client.send(request_bytes("POST", "/generate", b'{"input_ids": [1, 2, 3], "stream": true}', bearer("a")))
        await client.head()
        await served.until(lambda: any(flow.record.first_byte_s is not None for flow in served.router.running))
        client.close()
        await served.until_idle()
        assert tokens_left(served) == pytest.approx(990, abs=1)


async def test_the_last_event_says_what_a_client_has_that_leaves_its_stream(tmp_path: Path) -> None:
    """An event may hold several tokens, so their number does not."""
    async with cluster(tenants_file=tenants_file(tmp_path, a={"tokens_per_minute": 1000})) as served:
        sent = {"text": "x y z", "meta_info": {"prompt_tokens": 5, "completion_tokens": 30}}
        served.decode[0].script = hang(stream_head() + chunk(event(sent)))
        client = await served.connect()
        await client.send(request_bytes("POST", "/generate", b'{"input_ids": [1, 2, 3], "stream": true}', bearer("a")))
        await client.head()
        await served.until(lambda: any(flow.record.first_byte_s is not None for flow in served.router.running))
        client.close()
        await served.until_idle()
        assert tokens_left(served) == pytest.approx(965, abs=1)
        assert served.router.metrics.aborts == {"client_gone": 1}


async def test_clients_that_leave_behind_the_last_event_have_their_whole_reply(tmp_path: Path) -> None:
    """SDKs do so: they pay what the usage says, nothing is aborted, and the request has ended well."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    said = {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 6}}
    async with cluster(tenants_file=tenants_file(tmp_path, a={"tokens_per_minute": 1000})) as served:
        sent = (
            stream_head() + chunk(event({"choices": [{"delta": {"content": "x"}}]})) + chunk(event(said)) + chunk(DONE)
        )
        served.decode[0].script = hang(sent)
        client = await served.connect()
        path = "/v1/chat/completions"
        await client.send(request_bytes("POST", path, json.dumps(body).encode(), bearer("a")))
        await client.head()
        await served.until(lambda: any(flow.record.first_byte_s is not None for flow in served.router.running))
        client.close()
        await served.until_idle()
        assert tokens_left(served) == pytest.approx(954, abs=1)
        metrics = served.router.metrics
        assert [(key[2], key[3]) for key in metrics.requests] == [(200, "ok")]
        assert metrics.aborts == {}
        assert served.decode[0].aborts == []


async def test_the_tokens_of_a_whole_stream_that_says_nothing_of_them(tmp_path: Path) -> None:
    """Its client leaves behind the last event: the head, the end and `[DONE]` are no tokens."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
    deltas = [{"role": "assistant"}, {"content": "x"}, {"content": "y"}]
    events = [event({"choices": [{"delta": delta}]}) for delta in deltas]
    events += [event({"choices": [{"delta": {}, "finish_reason": "stop"}]}), DONE]
    async with cluster(tenants_file=tenants_file(tmp_path, a={})) as served:
        served.decode[0].script = hang(stream_head() + b"".join(map(chunk, events)))
        client = await served.connect()
        await client.send(request_bytes("POST", "/v1/chat/completions", json.dumps(body).encode(), bearer("a")))
        await client.head()
        await served.until(lambda: any(flow.record.first_byte_s is not None for flow in served.router.running))
        client.close()
        await served.until_idle()
        (row,) = (await served.ask("GET", "/v1/usage", headers=bearer("a"))).json["data"]
        assert (row["requests"], row["output_tokens"]) == (1, 2)


def stream_of(count: int) -> bytes:
    return stream_head() + b"".join(chunk(event({"text": "x"})) for _ in range(count))


async def test_each_sequence_of_a_list_counts(tmp_path: Path) -> None:
    async with cluster(tenants_file=tenants_file(tmp_path, a={"tokens_per_minute": 10_000})) as served:
        many = [{"text": "x" * 3000, "meta_info": {"prompt_tokens": 3, "completion_tokens": 5}} for _ in range(8)]
        served.decode[0].script = reply(many)
        answer = await ask(served, "a", {"input_ids": [[1, 2, 3]] * 8})
        assert (answer.status, answer.json) == (200, many)
        await served.until_idle()
        assert tokens_left(served) == pytest.approx(10_000 - 8 * 8, abs=3)


async def test_streams_show_the_headers(tmp_path: Path) -> None:
    async with cluster(tenants_file=tenants_file(tmp_path, a={"tokens_per_minute": 1000})) as served:
        served.decode[0].script = stream(event({"text": "x"}), DONE)
        answer = await ask(served, "a", {**PROMPT, "stream": True})
        assert shown(answer)["limit-tokens"] == "1000"


async def test_the_highest_priority_of_a_tenant(tmp_path: Path) -> None:
    path = tenants_file(tmp_path, a={"max_priority": "normal"}, b={"max_priority": "low"}, c={})
    async with cluster(tenants_file=path) as served:
        given = []
        for key, asked in (("a", "real-time"), ("a", "low"), ("b", None), ("c", "real-time")):
            headers = {} if asked is None else {"x-sgl-priority": asked}
            assert (await ask(served, key, **headers)).status == 200
            parameters = served.decode[0].requests[-1].json["sampling_params"]
            given.append(parameters.get("custom_params", {}).get("sglang_ext_priority"))
        assert given == ["normal", "low", "low", "real-time"]


@pytest.mark.slow
async def test_the_file_is_read_again_and_a_bad_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_hashes, "RELOAD_INTERVAL_S", 0.02)
    path = tenants_file(tmp_path, a={"requests_per_minute": 100})
    async with cluster(tenants_file=path) as served:
        tenants = served.router.tenants
        assert tenants is not None
        assert (await ask(served, "a")).status == 200
        Path(path).write_text(tenants_text(a={"requests_per_minute": 50}, b={}))
        await served.until(lambda: tenants.find(b"b") == "b")
        assert (await ask(served, "b")).status == 200
        assert shown(await ask(served, "a"))["limit-requests"] == "50"
        with caplog.at_level(logging.WARNING):
            Path(path).write_text("tenants: {a: {keys: {x: my-secret-key}}}")
            await served.until(lambda: "stay what they were" in caplog.text)
        assert "key x is not a SHA-256" in caplog.text
        assert "my-secret-key" not in caplog.text
        assert (await ask(served, "b")).status == 200
        Path(path).write_text(tenants_text(b={}))
        await served.until(lambda: tenants.find(b"a") is None)
        assert (await ask(served, "a")).status == 401


async def test_a_tenant_that_is_removed_meanwhile(tmp_path: Path) -> None:
    """Its running request ends as it would."""
    path = tenants_file(tmp_path, a={"tokens_per_minute": 1000}, b={})
    async with cluster(tenants_file=path) as served:
        served.decode[0].script = reply(USED, delay_s=0.2)
        client = await served.connect()
        await client.send(request_bytes("POST", "/generate", b'{"input_ids": [1]}', bearer("a")))
        await served.decode[0].received(1)
        Path(path).write_text(tenants_text(b={}))
        assert served.router.tenants is not None
        served.router.tenants._keys._watched._checked_s = -9.0
        served.router.tenants.reload(served.router.loop.time())
        assert served.router.tenants.find(b"a") is None
        assert (await client.reply()).status == 200
        client.close()


async def test_nothing_is_added_without_tenants() -> None:
    async with cluster() as served:
        assert shown(await served.ask("POST", "/generate", PROMPT)) == {}
        assert served.router.tenants is None


async def test_a_tenant_is_not_charged_what_an_instance_has_cached(tmp_path: Path) -> None:
    """Its place in the queue follows from what is computed, already while the request runs."""
    prompt = {"input_ids": list(range(4000)), "sampling_params": {"max_new_tokens": 10}}
    async with cluster(tenants_file=tenants_file(tmp_path, a={}), max_concurrent_requests=4) as served:
        queue = served.router.admission
        assert isinstance(queue, FairAdmissionQueue)
        charged: list[float] = []
        prefill = served.worker(served.long[0].url)
        for turn in (1, 2):
            served.decode[0].plan(hang())
            client = await served.connect()
            await client.send(request_bytes("POST", "/generate", json.dumps(prompt).encode(), bearer("a")))
            await served.long[0].received(turn)
            await served.until(lambda: prefill.in_flight == 0)  # a prompt whose client goes earlier is not cached
            (claim,) = queue._claims.values()
            charged.append(claim.work_tokens)
            client.close()
            await served.until_idle()
        assert charged[0] == 4010
        assert 10 < charged[1] <= 200


def test_a_router_that_starts_again_fills_its_part_once_its_group_knows_it(tmp_path: Path) -> None:
    """The others have its part from when they missed it until then: it would be there twice."""
    now_s, per_s = 1000.0, 600 / 60 / 2
    config = RouterConfig(
        tenants_file=tenants_file(tmp_path, a={"tokens_per_minute": 600}),
        usage_db=str(tmp_path / "usage.db"),
        peer=("one:1", "two:1"),
        peer_key="key",
        peer_port=1,
    )

    def started(now_s: float) -> tuple[Tenants, Bucket]:
        tenants = Tenants(config, 7, RouterMetrics(60.0), now_s)
        bucket = tenants.account("a").tokens
        assert bucket is not None
        return tenants, bucket

    def joined(tenants: Tenants, bucket: Bucket, at_s: float) -> float:
        tenants.share({1}, AdmissionQueue(1, 1, 60.0), at_s)
        bucket.fill(at_s)
        return bucket.level

    first, bucket = started(now_s)
    assert joined(first, bucket, now_s) == 0.0, "it begins with nothing: what it had is not known"
    bucket.fill(now_s + 20)
    first.ledger.save([], {"a tokens": bucket.level})
    again, bucket = started(now_s)
    for later_s in (1.0, 2.0):
        again.share(set(), AdmissionQueue(1, 1, 60.0), now_s + later_s)
        bucket.fill(now_s + later_s)
        assert bucket.level == pytest.approx(20 * per_s)
    assert joined(again, bucket, now_s + 2.0) == pytest.approx((20 + 2) * per_s, abs=0.5 * per_s)
    bucket.fill(now_s + 12.0)
    assert bucket.level == pytest.approx((20 + 12) * per_s, abs=0.5 * per_s)
    later, bucket = started(now_s)
    missed_s = joined(later, bucket, now_s + 50.0) / per_s
    assert missed_s == pytest.approx(20 + LONELY_AFTER_S), "longer than that the others have divided its part"
