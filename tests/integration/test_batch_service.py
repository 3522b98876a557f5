"""A batch through `sglang-ext batch serve`, a router and real SGLang; the client is the `openai` SDK."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support.batch_service import RunningService, jsonl, parse_jsonl, running_service, wait_batch
from support.engines import Engine
from support.reference import greedy_reference, random_prompt
from support.router_cli import RunningRouter

# The same runner as that of `batch run` over real instances, and the service killed over a stand-in, run always.
pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.full]


@pytest.fixture(scope="module")
def service(router: RunningRouter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("service"), router.url, key="") as service:
        yield service


def generate_line(custom_id: str, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling}
    return {"custom_id": custom_id, "method": "POST", "url": "/generate", "body": body}


def create(client: openai.OpenAI, lines: list[dict[str, Any]]) -> str:
    source = client.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch")
    return client.batches.create(
        input_file_id=source.id,
        endpoint="/generate",  # type: ignore[arg-type]
        completion_window="24h",
    ).id


def test_a_batch_gives_the_tokens_of_a_plain_server_through_kill_9(service: RunningService) -> None:
    prompts = {f"r{i}": random_prompt(30 + 45 * i, seed=i) for i in range(12)}  # short and long ones
    with service.client() as client:
        batch_id = create(client, [generate_line(name, prompt, 6) for name, prompt in prompts.items()])
        wait_batch(client, batch_id, "in_progress", "completed")
        time.sleep(0.3)
    service.kill()
    service.start()
    with service.client() as client:
        batch = wait_batch(client, batch_id)
        assert batch.status == "completed"
        assert batch.request_counts
        assert batch.request_counts.to_dict() == {"total": 12, "completed": 12, "failed": 0}
        assert batch.output_file_id
        assert batch.error_file_id is None
        output = parse_jsonl(client.files.content(batch.output_file_id).read())
    assert [line["custom_id"] for line in output] == list(prompts)
    for line in output:
        assert line["response"]["body"]["output_ids"] == greedy_reference(prompts[line["custom_id"]], 6)


def test_a_cancelled_batch_leaves_the_engines_idle(
    service: RunningService, router: RunningRouter, engines: list[Engine], tmp_path: Path
) -> None:
    lines = [generate_line(f"r{i}", random_prompt(40, seed=100 + i), 1500) for i in range(8)]
    with service.client() as client:
        batch_id = create(client, lines)
        end_s = time.monotonic() + 30
        while router.is_idle():
            assert time.monotonic() < end_s
            time.sleep(0.02)
        client.batches.cancel(batch_id)
        batch = wait_batch(client, batch_id)
    assert batch.status == "cancelled"
    while not router.is_idle():
        assert time.monotonic() < end_s
        time.sleep(0.02)
    for engine in engines:
        engine.wait_idle(10)
