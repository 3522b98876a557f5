"""`kill -9` of the service: every accepted batch ends, and every request is written once."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from support.batch_endpoint import batch_endpoint
from support.batch_service import chat_line, jsonl, parse_jsonl, running_service, wait_batch

REQUESTS = 400
BATCHES = 3


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.full)])
def test_kill_9_loses_no_accepted_batch(kills: int, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    lines = [chat_line(f"r{i}", f"request {i}" if i % 50 else "status 400") for i in range(REQUESTS)]
    with batch_endpoint() as endpoint, running_service(tmp_path, endpoint.url) as service:
        endpoint.delay_s = 0.02
        accepted: list[str] = []
        with service.client() as client:
            source = client.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch").id
        for _ in range(kills):
            with service.client() as client:
                for _ in range(draw.randint(0, BATCHES)):
                    created = client.batches.create(
                        input_file_id=source,
                        endpoint="/v1/chat/completions",
                        completion_window="24h",
                        metadata={"number": str(len(accepted))},
                    )
                    accepted.append(created.id)
            time.sleep(draw.uniform(0, 0.4))
            service.kill()
            service.start()
        with service.client() as client:
            if not accepted:
                return
            known = {batch.id: batch for batch in client.batches.list(limit=100)}
            assert set(known) == set(accepted), seed
            for number, batch_id in enumerate(accepted):
                batch = wait_batch(client, batch_id, timeout_s=120)
                assert batch.status == "completed", (seed, batch)
                assert batch.metadata == {"number": str(number)}
                assert batch.output_file_id
                assert batch.error_file_id
                output = parse_jsonl(client.files.content(batch.output_file_id).read())
                errors = parse_jsonl(client.files.content(batch.error_file_id).read())
                assert [line["custom_id"] for line in output] == [f"r{i}" for i in range(REQUESTS) if i % 50], seed
                assert [line["custom_id"] for line in errors] == [f"r{i}" for i in range(REQUESTS) if not i % 50], seed
                assert batch.request_counts
                assert batch.request_counts.total == REQUESTS
            files = {file.id for file in client.files.list()}
            assert set(os.listdir(tmp_path / "store" / "files")) == files, seed
