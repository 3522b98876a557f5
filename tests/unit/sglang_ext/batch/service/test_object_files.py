"""The batch service with its files on S3-compatible storage: killed while it writes, through outages, ranges."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from support.batch_endpoint import batch_endpoint
from support.batch_service import RunningService, chat_line, jsonl, parse_jsonl, running_service, wait_batch
from support.object_storage import ObjectStorage, needs_object_storage
from support.postgres import needs_postgres, postgres_server

pytestmark = [pytest.mark.slow, pytest.mark.chaos, needs_object_storage]
FILES = ("--files", "s3://batches/service")
KEY = "key-of-the-tests"


def create(client: openai.OpenAI, content: bytes) -> str:
    source = client.files.create(file=("input.jsonl", content), purpose="batch").id
    return client.batches.create(input_file_id=source, endpoint="/v1/chat/completions", completion_window="24h").id


def output_ids(client: openai.OpenAI, batch_id: str, timeout_s: float = 240) -> list[str]:
    batch = wait_batch(client, batch_id, timeout_s=timeout_s)
    assert batch.status == "completed", batch
    assert batch.output_file_id
    return [line["custom_id"] for line in parse_jsonl(client.files.content(batch.output_file_id).read())]


def service_objects(storage: ObjectStorage) -> set[str]:
    return {name.removeprefix("service/") for name in storage.names() if name.startswith("service/")}


def test_a_batch_and_its_files(storage: ObjectStorage, tmp_path: Path) -> None:
    storage.put("service/of-another", b"stays")
    storage.put("service/file-" + "0" * 32, b"left by an earlier life")
    with (
        batch_endpoint() as endpoint,
        running_service(tmp_path, endpoint.url, *FILES, environment=storage.environment) as service,
        service.client() as client,
    ):
        assert service_objects(storage) == {"of-another"}
        content = jsonl([chat_line(f"r{i}", f"request {i}" if i else "status 400") for i in range(30)])
        batch_id = create(client, content)
        assert output_ids(client, batch_id) == [f"r{i}" for i in range(1, 30)]
        batch = client.batches.retrieve(batch_id)
        assert {batch.input_file_id, batch.output_file_id, batch.error_file_id, "of-another"} == service_objects(
            storage
        )
        headers = {"authorization": f"Bearer {KEY}"}
        url = f"{service.url}/v1/files/{batch.input_file_id}/content"
        for wanted, expected in (("0-9", content[:10]), ("100-", content[100:]), ("-7", content[-7:])):
            answer = httpx.get(url, headers={**headers, "range": f"bytes={wanted}"})
            assert (answer.status_code, answer.content) == (206, expected)
        assert httpx.get(url, headers={**headers, "range": f"bytes={len(content)}-"}).status_code == 416
        assert httpx.get(url, headers=headers).content == content
        client.files.delete(batch.input_file_id)
        assert batch.input_file_id not in service_objects(storage)
        with pytest.raises(openai.NotFoundError):
            client.files.content(batch.input_file_id)
        client.files.delete(str(batch.output_file_id))
        client.files.delete(str(batch.error_file_id))
    assert service_objects(storage) == {"of-another"}
    assert storage.unfinished() == 0


def test_killed_while_an_output_is_written(storage: ObjectStorage, tmp_path: Path) -> None:
    content = jsonl([chat_line(f"r{i}", f"{i} " + "y" * (1 << 19)) for i in range(40)])
    options = [*FILES, "--store", str(tmp_path / "store")]
    with batch_endpoint() as endpoint:
        service = RunningService(tmp_path, endpoint.url, options, KEY, storage.environment)
        service.start()
        try:
            endpoint.hold_prefix = "39 "
            with service.client() as client:
                batch_id = create(client, content)
                wait_batch(client, batch_id, "in_progress")
            before = service_objects(storage)
            for part_mib in (4, 12):
                storage.faults.hold_after_bytes = storage.faults.sent_bytes + (part_mib << 20)
                endpoint.hold_prefix = None
                end_s = time.monotonic() + 120
                while not storage.faults.is_holding:
                    assert time.monotonic() < end_s
                    time.sleep(0.02)
                assert service_objects(storage) == before, "nothing of it can be seen"
                service.kill()
                storage.faults.hold_after_bytes = None
                service.start()
            with service.client() as client:
                assert output_ids(client, batch_id) == [f"r{i}" for i in range(40)]
                batch = client.batches.retrieve(batch_id)
                assert service_objects(storage) == before | {str(batch.output_file_id)}
            assert storage.unfinished() == 0
            assert set(endpoint.answered.values()) == {1}
        finally:
            service.kill()
        assert "Traceback" not in service.log_path.read_text(), service.log_path.read_text()[-4000:]


@pytest.mark.parametrize("mode", ["refuse", "error", "hang"])
def test_an_outage_ends_and_the_batch_too(mode: str, storage: ObjectStorage, tmp_path: Path) -> None:
    with (
        batch_endpoint() as endpoint,
        running_service(tmp_path, endpoint.url, *FILES, environment=storage.environment) as service,
        service.client() as client,
    ):
        endpoint.hold_prefix = "held"
        batch_id = create(client, jsonl([chat_line(f"r{i}", f"held {i}") for i in range(20)]))
        wait_batch(client, batch_id, "in_progress")
        storage.faults.mode = mode
        refused = storage.faults.refused
        end_s = time.monotonic() + 3
        if mode != "hang":
            with pytest.raises(openai.InternalServerError) as caught:
                client.files.create(file=("input.jsonl", b"{}\n"), purpose="batch")
            assert caught.value.status_code == 503
        endpoint.hold_prefix = None
        # The service answers meanwhile.
        while time.monotonic() < end_s if mode == "hang" else storage.faults.refused < refused + 12:
            assert client.batches.retrieve(batch_id).status in {"in_progress", "finalizing"}
            time.sleep(0.05)
        storage.faults.mode = "pass"
        assert output_ids(client, batch_id) == [f"r{i}" for i in range(20)]
        assert storage.unfinished() == 0


@needs_postgres
def test_two_services_share_a_bucket(storage: ObjectStorage, tmp_path: Path) -> None:
    with postgres_server() as store_url, batch_endpoint() as endpoint:
        endpoint.delay_s = 0.01
        both = []
        for number in range(2):
            (tmp_path / str(number)).mkdir()
            options = ["--store", store_url, "--files", "s3://batches/shared"]
            both.append(RunningService(tmp_path / str(number), endpoint.url, options, KEY, storage.environment))
        try:
            for service in both:
                service.start()
            with both[0].client() as client:
                content = jsonl([chat_line(f"r{i}", f"request {i}") for i in range(300)])
                ids = [create(client, content) for _ in range(4)]
            for service in both:
                service.kill()
                service.start()
            with both[1].client() as client:
                for batch_id in ids:
                    assert output_ids(client, batch_id) == [f"r{i}" for i in range(300)]
        finally:
            for service in both:
                service.kill()


def test_a_place_that_cannot_be_used_is_one_line(storage: ObjectStorage, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "sglang_ext.cli", "batch", "serve", "--endpoint", "http://127.0.0.1:9"]
    words += ["--port", "0", "--store", str(tmp_path / "store")]
    for place, reason in (
        ("s3://elsewhere/x", "--files: s3://elsewhere/x/check: there is no such bucket"),
        ("s3://", "--files: s3://: must be s3://BUCKET/NAME"),
    ):
        done = subprocess.run(
            [*words, "--files", place],
            env=storage.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 2
        assert done.stderr.strip() == f"sglang-ext batch serve: {reason}"
    storage.faults.mode = "refuse"
    done = subprocess.run(
        [*words, "--files", "s3://batches/x"], env=storage.environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
