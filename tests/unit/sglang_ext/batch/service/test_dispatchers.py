"""Several services on one PostgreSQL store: killed at any time, every line of every batch is answered once."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from support.batch_endpoint import batch_endpoint
from support.batch_service import RunningService, chat_line, jsonl, parse_jsonl, wait_batch
from support.postgres import needs_postgres, postgres_server

pytestmark = [pytest.mark.slow, pytest.mark.chaos, needs_postgres]
KEY = "key-of-the-tests"


def services(folder: Path, endpoint_url: str, store_url: str, count: int) -> list[RunningService]:
    files = folder / "files"
    made = []
    for number in range(count):
        own = folder / f"service-{number}"
        own.mkdir()
        made.append(RunningService(own, endpoint_url, ["--store", store_url, "--files", str(files)], KEY))
    return made


@pytest.mark.parametrize(
    ("batches", "requests", "kills"),
    [(4, 300, 2), pytest.param(10, 10_000, 10, marks=[pytest.mark.full, pytest.mark.timeout(1800)])],
)
def test_every_line_once_through_kills(batches: int, requests: int, kills: int, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    lines = [chat_line(f"r{i}", f"request {i}" if i % 50 else "status 400") for i in range(requests)]
    began_s = time.monotonic()
    with postgres_server() as store_url, batch_endpoint() as endpoint:
        endpoint.delay_s = 0.01
        both = services(tmp_path, endpoint.url, store_url, 2)
        try:
            for service in both:
                service.start()
            with both[0].client() as client:
                source = client.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch").id
                ids = [
                    client.batches.create(
                        input_file_id=source, endpoint="/v1/chat/completions", completion_window="24h"
                    ).id
                    for _ in range(batches)
                ]
            for _ in range(kills):
                for service in both:
                    time.sleep(draw.uniform(0, 1.0))
                    service.kill()
                    service.start()
            with both[1].client() as client:
                for batch_id in ids:
                    batch = wait_batch(client, batch_id, timeout_s=1200)
                    assert batch.status == "completed", (seed, batch)
                    assert batch.output_file_id
                    assert batch.error_file_id
                    output = parse_jsonl(client.files.content(batch.output_file_id).read())
                    errors = parse_jsonl(client.files.content(batch.error_file_id).read())
                    assert [line["custom_id"] for line in output] == [f"r{i}" for i in range(requests) if i % 50], seed
                    assert [line["custom_id"] for line in errors] == [f"r{i}" for i in range(requests) if not i % 50]
                    assert batch.request_counts
                    assert (batch.request_counts.completed, batch.request_counts.failed) == (len(output), len(errors))
                    assert batch.usage
                    assert batch.usage.total_tokens == 5 * len(output), "counted once, as written"
        finally:
            for service in both:
                service.kill()
        sent = sum(endpoint.seen.values())
        print(f"{batches * requests} lines, {2 * kills} kills, {sent} requests: {time.monotonic() - began_s:.0f} s")
        for service in both:
            assert "Traceback" not in service.log_path.read_text(), service.log_path.read_text()[-4000:]


def test_a_killed_dispatcher_loses_its_batches_to_the_other(tmp_path: Path) -> None:
    with postgres_server() as store_url, batch_endpoint() as endpoint:
        first, second = services(tmp_path, endpoint.url, store_url, 2)
        try:
            first.start()
            endpoint.hold_prefix = "held"
            lines = [chat_line(f"r{i}", f"held {i}") for i in range(20)]
            with first.client() as client:
                source = client.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch").id
                batch_id, other_id = (
                    client.batches.create(
                        input_file_id=source, endpoint="/v1/chat/completions", completion_window="24h"
                    ).id
                    for _ in range(2)
                )
                for waited in (batch_id, other_id):
                    wait_batch(client, waited, "in_progress")
            second.start()
            first.kill()
            with second.client() as client:
                # It may be cancelled at any service, also before its lease is over.
                client.batches.cancel(other_id)
                endpoint.hold_prefix = None
                assert wait_batch(client, batch_id).status == "completed"
                assert wait_batch(client, other_id).status == "cancelled"
        finally:
            first.kill()
            second.kill()


def test_a_batch_is_cancelled_at_the_service_that_does_not_send_it(tmp_path: Path) -> None:
    with postgres_server() as store_url, batch_endpoint() as endpoint:
        both = services(tmp_path, endpoint.url, store_url, 2)
        try:
            for service in both:
                service.start()
            endpoint.hold_prefix = "held"
            with both[0].client() as client, both[1].client() as other:
                lines = [chat_line(f"r{i}", f"held {i}") for i in range(20)]
                source = client.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch").id
                batch_id = client.batches.create(
                    input_file_id=source, endpoint="/v1/chat/completions", completion_window="24h"
                ).id
                end_s = time.monotonic() + 60
                while not endpoint.in_flight:
                    assert time.monotonic() < end_s
                    time.sleep(0.02)
                other.batches.cancel(batch_id)
                batch = wait_batch(other, batch_id)
                assert batch.status == "cancelled"
                assert batch.error_file_id
                errors = parse_jsonl(other.files.content(batch.error_file_id).read())
                assert Counter(line["error"]["code"] for line in errors) == {"batch_cancelled": 20}
                assert endpoint.aborted
        finally:
            for service in both:
                service.kill()


def test_late_results_of_a_stopped_service_are_refused(tmp_path: Path) -> None:
    lines = [chat_line(f"r{i}", f"held {i}" if i < 4 else f"request {i}") for i in range(200)]
    with postgres_server() as store_url, batch_endpoint() as endpoint:
        first, second = services(tmp_path, endpoint.url, store_url, 2)
        try:
            first.start()
            endpoint.hold_prefix = "held"
            with first.client() as client:
                source = client.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch").id
                batch_id = client.batches.create(
                    input_file_id=source, endpoint="/v1/chat/completions", completion_window="24h"
                ).id
            end_s = time.monotonic() + 120
            while sum(endpoint.answered.values()) < 196 or endpoint.in_flight < 4:
                assert time.monotonic() < end_s
                time.sleep(0.02)
            second.start()
            assert first.process
            first.process.send_signal(signal.SIGSTOP)
            # Held requests arrive once more when the other service has the batch; the answers to both go out at once.
            while endpoint.seen["held 0"] < 2 or endpoint.seen["held 3"] < 2:
                assert time.monotonic() < end_s
                time.sleep(0.05)
            endpoint.hold_prefix = None
            with second.client() as client:
                batch = wait_batch(client, batch_id, timeout_s=120)
                first.process.send_signal(signal.SIGCONT)
                assert batch.status == "completed"
                assert batch.output_file_id
                output = parse_jsonl(client.files.content(batch.output_file_id).read())
                assert [line["custom_id"] for line in output] == [f"r{i}" for i in range(200)]
                # The stopped service lives on, and its results have changed nothing.
                end_s = time.monotonic() + 120
                while "another dispatcher" not in (log := first.log_path.read_text()) and ": left: " not in log:
                    assert time.monotonic() < end_s, log
                    time.sleep(0.05)
                with first.client() as awake:
                    assert awake.batches.retrieve(batch_id) == client.batches.retrieve(batch_id) == batch
        finally:
            for service in (first, second):
                service.kill()
        for service in (first, second):
            assert "Traceback" not in service.log_path.read_text(), service.log_path.read_text()[-4000:]
