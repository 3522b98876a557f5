"""Tenants of one service: each sees its own, a flood of one holds up no other, and what a store of before becomes."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from sglang_ext.cli import main
from support.batch_endpoint import BatchEndpoint, batch_endpoint
from support.batch_service import RunningService, chat_line, jsonl, parse_jsonl, running_service, wait_batch
from support.postgres import needs_postgres, postgres_server
from support.tenants import bearer, tenants_file

pytestmark = pytest.mark.slow
POSTGRES = pytest.param("postgresql", marks=needs_postgres)


@contextmanager
def tenants_service(
    folder: Path, *options: str, store: str = "sqlite", **tenants: dict[str, Any]
) -> Iterator[tuple[RunningService, BatchEndpoint]]:
    """The service with tenants whose keys are their names; the default tenant's key is that of the tests."""
    path = tenants_file(folder, **tenants)
    with batch_endpoint() as endpoint:
        if store == "sqlite":
            with running_service(folder, endpoint.url, "--tenants-file", path, *options) as service:
                yield service, endpoint
        else:
            with postgres_server() as url:
                shared = ("--store", url, "--files", str(folder / "files"))
                with running_service(folder, endpoint.url, "--tenants-file", path, *shared, *options) as service:
                    yield service, endpoint


def create(client: openai.OpenAI, lines: list[dict[str, Any]]) -> str:
    return create_from(client, client.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch").id)


def create_from(client: openai.OpenAI, file_id: str) -> str:
    return client.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h").id


def list_behind(client: openai.OpenAI, batch_id: str) -> object:
    return client.batches.list(after=batch_id, limit=1)


def lines_of(name: str, count: int) -> list[dict[str, Any]]:
    return [chat_line(f"r{i}", f"{name} {i}") for i in range(count)]


@pytest.mark.parametrize("store", ["sqlite", POSTGRES])
def test_a_tenant_sees_its_own_only(store: str, tmp_path: Path) -> None:
    with (
        tenants_service(tmp_path, store=store, a={}, b={}) as (service, endpoint),
        service.client(api_key="a") as a,
        service.client(api_key="b") as b,
        service.client() as default,
    ):
        batch_id = create(a, lines_of("a", 3))
        done = wait_batch(a, batch_id)
        assert done.output_file_id
        assert len(parse_jsonl(a.files.content(done.output_file_id).read())) == 3
        assert {headers.get("x-sglang-ext-tenant") for headers in endpoint.headers} == {"a"}
        assert [batch.id for batch in a.batches.list()] == [batch_id]
        assert {file.id for file in a.files.list()} == {done.input_file_id, done.output_file_id}
        for other in (b, default):
            assert list(other.batches.list()) == []
            assert list(other.files.list()) == []
            asked: list[tuple[Callable[[str], object], str, int]] = [
                (other.batches.retrieve, batch_id, 404),
                (other.batches.cancel, batch_id, 404),
                (partial(list_behind, other), batch_id, 400),
                (other.files.retrieve, done.input_file_id, 404),
                (other.files.content, done.output_file_id, 404),
                (other.files.delete, done.output_file_id, 404),
                (partial(create_from, other), done.input_file_id, 404),
            ]
            for ask, name, status in asked:
                with pytest.raises(openai.APIStatusError) as error:
                    ask(name)
                assert error.value.status_code == status
        assert a.files.retrieve(done.output_file_id).id == done.output_file_id
        endpoint.headers.clear()
        wait_batch(default, create(default, lines_of("default", 2)))
        assert {headers.get("x-sglang-ext-tenant") for headers in endpoint.headers} == {None}


def test_a_wrong_key_and_one_that_comes_and_goes(tmp_path: Path) -> None:
    with tenants_service(tmp_path, a={}, b={}) as (service, _):
        for headers in ({}, bearer("c"), bearer("ab"), {"Authorization": "a"}):
            for path in ("/v1/files", "/v1/batches", "/v1/batches/batch_1", "/v1/files/file-1/content"):
                reply = httpx.get(service.url + path, headers=headers)
                assert reply.status_code == 401
                assert reply.headers["www-authenticate"] == "Bearer"
                error = reply.json()["error"]
                assert (error["type"], error["code"]) == ("authentication_error", 401)
        tenants_file(tmp_path, a={}, c={})
        end_s = time.monotonic() + 30
        expected = {"a": 200, "b": 401, "c": 200}
        while {
            key: httpx.get(f"{service.url}/v1/batches", headers=bearer(key)).status_code for key in expected
        } != expected:
            assert time.monotonic() < end_s
            time.sleep(0.1)


def test_a_file_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tenants.yaml").write_text("tenants: {a: {weight: 0}}")
    command = ["batch", "serve", "--endpoint", "http://127.0.0.1:9", "--store", str(tmp_path / "store")]
    assert main([*command, "--tenants-file", str(tmp_path / "tenants.yaml")]) == 2
    assert "--tenants-file: " in (error := capsys.readouterr().err)
    assert "tenant a: weight" in error


@pytest.mark.parametrize("store", ["sqlite", POSTGRES])
def test_a_flood_of_one_tenant_does_not_hold_up_another(store: str, tmp_path: Path) -> None:
    """The flood has more batches than are sent at a time, and none ends before the other tenant's has come."""
    batches, lines = 20, 300
    with (
        tenants_service(tmp_path, "--max-in-flight", "8", store=store, flood={}, small={}) as (service, endpoint),
        service.client(api_key="flood") as flood,
        service.client(api_key="small") as small,
    ):
        endpoint.delay_s = 0.01
        endpoint.hold_prefix = "flood"
        floods = [create(flood, lines_of(f"flood {number}", lines)) for number in range(batches)]
        end_s = time.monotonic() + 120
        while sum(batch.status == "in_progress" for batch in flood.batches.list(limit=100)) < batches:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        endpoint.hold_prefix = None
        batch_id = create(small, lines_of("small", 40))
        wait_batch(small, batch_id, timeout_s=120)
        begun = next(i for i, content in enumerate(endpoint.order) if content.startswith("small"))
        last = max(i for i, content in enumerate(endpoint.order) if content.startswith("small"))
        between = Counter(content.split()[0] for content in endpoint.order[begun : last + 1])
        # Half of what was sent meanwhile was the small tenant's, but for what had been under way.
        assert between["small"] == 40
        assert between["flood"] <= 40 + 16, between
        assert sum(flood.batches.retrieve(each).status == "completed" for each in floods) < batches
        for each in floods:
            flood.batches.cancel(each)


def test_weights_divide_what_is_sent(tmp_path: Path) -> None:
    with (
        tenants_service(tmp_path, "--max-in-flight", "8", a={}, b={"weight": 3}) as (service, endpoint),
        service.client(api_key="a") as a,
        service.client(api_key="b") as b,
    ):
        endpoint.hold_prefix = ""
        endpoint.delay_s = 0.02
        # The first has enough to be sent until the second is sent, too.
        ids = [create(a, lines_of("a", 2000)), create(b, lines_of("b", 800))]
        for client, batch_id in zip((a, b), ids, strict=True):
            wait_batch(client, batch_id, "in_progress")
        endpoint.hold_prefix = None
        wait_batch(b, ids[1])
        sent = [content[0] for content in endpoint.order]
        meanwhile = sent[sent.index("b") : len(sent) - sent[::-1].index("b")]
        assert meanwhile.count("b") == 800
        assert 3 * meanwhile.count("a") == pytest.approx(800, rel=0.15)
        a.batches.cancel(ids[0])


def test_no_more_in_flight_than_a_tenants_concurrency(tmp_path: Path) -> None:
    with (
        tenants_service(tmp_path, "--max-in-flight", "16", a={"concurrency": 2}, b={}) as (service, endpoint),
        service.client(api_key="a") as a,
        service.client(api_key="b") as b,
    ):
        endpoint.hold_prefix = "a"
        endpoint.delay_s = 0.01
        limited = create(a, lines_of("a", 60))
        end_s = time.monotonic() + 60
        while endpoint.in_flight_of["a"] < 2:
            assert time.monotonic() < end_s
            time.sleep(0.02)
        # The places that it may not have are the other's.
        wait_batch(b, create(b, lines_of("b", 200)))
        assert endpoint.in_flight_of["a"] == 2
        endpoint.hold_prefix = None
        assert wait_batch(a, limited).status == "completed"
        assert endpoint.most_in_flight_of["a"] == 2
        assert endpoint.most_in_flight_of["b"] > 2


@pytest.mark.parametrize(("status", "code"), [(429, "rate_limit_exceeded"), (403, "forbidden")])
def test_a_tenant_that_the_endpoint_refuses_waits_by_itself(status: int, code: str, tmp_path: Path) -> None:
    """Its lines wait longer than a line is tried again, and do not fail; the endpoint is not taken to be down."""
    with (
        tenants_service(tmp_path, "--max-in-flight", "4", a={}, b={}) as (service, endpoint),
        service.client(api_key="a") as a,
        service.client(api_key="b") as b,
    ):
        endpoint.refusals["a"] = (status, code)
        refused = create(a, lines_of("a", 10))
        end_s = time.monotonic() + 120
        while max(endpoint.seen.values(), default=0) < 25:
            assert wait_batch(b, create(b, lines_of(f"b {time.monotonic()}", 5))).status == "completed"
            assert time.monotonic() < end_s
        assert a.batches.retrieve(refused).status == "in_progress"
        endpoint.refusals.clear()
        done = wait_batch(a, refused)
        assert done.request_counts
        assert (done.status, done.request_counts.completed) == ("completed", 10)
    assert "is down" not in service.log_path.read_text()


def test_a_request_that_no_budget_holds_fails_by_itself(tmp_path: Path) -> None:
    with tenants_service(tmp_path, a={}) as (service, endpoint), service.client(api_key="a") as a:
        endpoint.refusals["a"] = (429, "request_too_large")
        done = wait_batch(a, create(a, lines_of("a", 3)))
        assert done.request_counts
        assert (done.status, done.request_counts.failed, sum(endpoint.seen.values())) == ("completed", 3, 3)


def test_a_store_from_before_tenants_is_the_default_tenants(tmp_path: Path) -> None:
    with (
        batch_endpoint() as endpoint,
        running_service(tmp_path, endpoint.url) as service,
        service.client() as client,
    ):
        done_id = create(client, lines_of("x", 2))
        output = wait_batch(client, done_id).output_file_id
        assert output
        endpoint.hold_prefix = "held"
        open_id = create(client, lines_of("held", 2))
        wait_batch(client, open_id, "in_progress")
        service.kill()
        database = sqlite3.connect(tmp_path / "store" / "batches.sqlite")
        database.executescript(
            "DROP INDEX service_batches_by_tenant; ALTER TABLE service_batches DROP COLUMN tenant;"
            "ALTER TABLE service_files DROP COLUMN tenant"
        )
        database.close()
        service.start()
        endpoint.hold_prefix = None
        assert wait_batch(client, open_id).status == "completed"
        assert {batch.id for batch in client.batches.list()} == {done_id, open_id}
        assert len(parse_jsonl(client.files.content(output).read())) == 2


@needs_postgres
def test_a_shared_store_from_before_tenants_is_the_default_tenants(tmp_path: Path) -> None:
    import psycopg

    with postgres_server() as url, batch_endpoint() as endpoint:
        shared = ("--store", url, "--files", str(tmp_path / "files"))
        with running_service(tmp_path, endpoint.url, *shared) as service, service.client() as client:
            done_id = create(client, lines_of("x", 2))
            wait_batch(client, done_id)
            service.terminate()
            with psycopg.connect(url, autocommit=True) as database:
                for table in ("batches", "files"):
                    database.execute(f"ALTER TABLE sglang_ext_batch.service_{table} DROP COLUMN tenant CASCADE")
            service.start()
            assert [batch.id for batch in client.batches.list()] == [done_id]
            assert len(list(client.files.list())) == 2
            assert wait_batch(client, create(client, lines_of("y", 2))).status == "completed"
