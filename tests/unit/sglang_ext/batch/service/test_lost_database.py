"""PostgreSQL is lost, at a commit or at any moment: every line is answered once, and every file of a row is there."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest

from sglang_ext.batch.database import CommitUnknownError, PostgresDatabase, StoreError
from support.batch_endpoint import batch_endpoint
from support.batch_service import RunningService, chat_line, jsonl, parse_jsonl, running_service, wait_batch
from support.postgres import Cut, commit_cutter, needs_postgres, running_postgres

pytestmark = [pytest.mark.slow, pytest.mark.chaos, needs_postgres]
KEY = "key-of-the-tests"
PATIENT: dict[str, Any] = {"max_retries": 10}


def create(client: openai.OpenAI, requests: int, batches: int) -> list[str]:
    lines = [chat_line(f"r{i}", f"request {i}" if i % 50 else "status 400") for i in range(requests)]
    source = client.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch").id
    return [
        client.batches.create(input_file_id=source, endpoint="/v1/chat/completions", completion_window="24h").id
        for _ in range(batches)
    ]


@contextmanager
def both(folder: Path, endpoint_url: str, store_url: str) -> Iterator[list[RunningService]]:
    """Two services on one store."""
    with ExitStack() as stack:
        running = []
        for name in ("first", "second"):
            (folder / name).mkdir()
            options = ("--store", store_url, "--files", str(folder / "files"))
            running.append(stack.enter_context(running_service(folder / name, endpoint_url, *options, key=KEY)))
        yield running


def check(client: openai.OpenAI, batch_id: str, requests: int) -> set[str]:
    """Wait for a batch and check that it has each line once; return its files."""
    batch = wait_batch(client, batch_id, timeout_s=300)
    assert batch.status == "completed"
    assert batch.output_file_id
    assert batch.error_file_id
    output = parse_jsonl(client.files.content(batch.output_file_id).read())
    errors = parse_jsonl(client.files.content(batch.error_file_id).read())
    assert [line["custom_id"] for line in output] == [f"r{i}" for i in range(requests) if i % 50]
    assert [line["custom_id"] for line in errors] == [f"r{i}" for i in range(requests) if not i % 50]
    assert batch.request_counts
    assert (batch.request_counts.completed, batch.request_counts.failed) == (len(output), len(errors))
    assert batch.usage
    assert batch.usage.total_tokens == 5 * len(output), "counted once, as written"
    return {batch.input_file_id, batch.output_file_id, batch.error_file_id}


@pytest.mark.parametrize("cut", list(Cut))
def test_a_lost_commit_of_a_batchs_end_loses_no_file_and_leaves_none(cut: Cut, tmp_path: Path) -> None:
    import psycopg

    files = tmp_path / "files"
    with (
        running_postgres() as server,
        commit_cutter(server) as cutter,
        batch_endpoint() as endpoint,
        running_service(tmp_path, endpoint.url, "--store", cutter.url, "--files", str(files)) as service,
        service.client(**PATIENT) as client,
    ):

        def decide(statements: str) -> Cut | None:
            is_end = "INSERT INTO service_files" in statements and "INSERT INTO service_batches" in statements
            return cut if is_end and not cutter.cuts else None

        cutter.decide = decide
        (batch_id,) = create(client, 60, 1)
        known = check(client, batch_id, 60)
        assert cutter.cuts == {cut: 1}
        assert {file.id for file in client.files.list()} == known
        end_s = time.monotonic() + 60
        with psycopg.connect(server.url) as database:
            # Neither a file without a row stays, nor lines of a batch that has ended.
            while True:
                rows = database.execute("SELECT count(*) FROM sglang_ext_batch.jobs").fetchone()
                if rows == (0,) and set(os.listdir(files)) == known:
                    break
                assert time.monotonic() < end_s, (rows, os.listdir(files), known)
                time.sleep(0.1)


@pytest.mark.parametrize("batches", [4, pytest.param(20, marks=pytest.mark.full)])
def test_commits_that_are_lost_at_random(batches: int, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    requests = 300
    with running_postgres() as server, commit_cutter(server) as cutter, batch_endpoint() as endpoint:
        endpoint.delay_s = 0.01
        with both(tmp_path, endpoint.url, cutter.url) as (first, second):
            with first.client() as client:
                ids = create(client, requests, batches)
            commits = count(draw.randrange(8))
            cutter.decide = lambda statements: None if next(commits) % 8 else draw.choice(list(Cut))
            with second.client(**PATIENT) as client:
                for batch_id in ids:
                    wait_batch(client, batch_id, timeout_s=300)
                cutter.decide = lambda statements: None
                print(f"seed {seed}: {cutter.cuts}")
                for batch_id in ids:
                    check(client, batch_id, requests)
        assert cutter.cuts


@pytest.mark.parametrize("restarts", [3, pytest.param(20, marks=pytest.mark.full)])
def test_a_server_that_is_restarted(restarts: int, tmp_path: Path) -> None:
    draw = random.Random(seed := random.randrange(1 << 30))
    requests, batches = 400, 4
    with running_postgres() as server, batch_endpoint() as endpoint:
        endpoint.delay_s = 0.02
        with both(tmp_path, endpoint.url, server.url) as (first, second):
            with first.client() as client:
                ids = create(client, requests, batches)
            for number in range(restarts):
                time.sleep(draw.uniform(0.2, 1.5))
                server.stop("fast" if number % 2 else "immediate")
                time.sleep(draw.uniform(0, 1))
                server.start()
            with second.client(**PATIENT) as client:
                for batch_id in ids:
                    check(client, batch_id, requests)
            print(f"seed {seed}: {sum(endpoint.seen.values())} requests for {requests * batches} lines")


def test_clients_are_answered_with_503_while_the_server_is_away(tmp_path: Path) -> None:
    with (
        running_postgres() as server,
        batch_endpoint() as endpoint,
        running_service(tmp_path, endpoint.url, "--store", server.url, "--files", str(tmp_path / "files")) as service,
        service.client() as client,
    ):
        (batch_id,) = create(client, 60, 1)
        check(client, batch_id, 60)
        server.stop()
        for ask in (client.batches.list, client.files.list):
            with pytest.raises(openai.InternalServerError) as error:
                ask()
            assert error.value.status_code == 503
        server.start()
        # At the first request: what was lost meanwhile is not the client's.
        assert client.batches.retrieve(batch_id).status == "completed"


def test_a_connection_that_was_lost_is_made_again() -> None:
    """A statement that changes nothing is repeated at once; the caller repeats any other."""
    with running_postgres() as server:
        database = PostgresDatabase(server.url)

        def lose() -> None:
            server.stop("fast")
            server.start()

        def add_and_lose() -> None:
            with database.transaction():
                database.execute("INSERT INTO numbers VALUES (4)")
                lose()

        try:
            database.create("CREATE TABLE IF NOT EXISTS numbers (number INTEGER NOT NULL)")
            lose()
            assert database.rows("SELECT number FROM numbers") == []
            lose()
            with database.transaction():
                database.execute("INSERT INTO numbers VALUES (1)")
            lose()
            with pytest.raises(StoreError) as error:
                database.execute("INSERT INTO numbers VALUES (2)")
            assert not isinstance(error.value, CommitUnknownError)
            database.execute("INSERT INTO numbers VALUES (3)")
            with pytest.raises(CommitUnknownError):
                add_and_lose()
            assert database.rows("SELECT number FROM numbers ORDER BY number") == [(1,), (3,)]
        finally:
            database.close()
