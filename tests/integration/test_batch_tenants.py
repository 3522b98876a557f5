"""Two tenants of the batch service over a router and real SGLang: shares, tokens, and usage at the router."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import openai
import pytest

from sglang_ext.types import Role
from support.batch_service import jsonl, parse_jsonl, running_service, wait_batch
from support.engines import FLEET, EngineSpec
from support.reference import greedy_reference, random_prompt
from support.router_cli import ADMIN_KEY, running_router
from support.tenants import bearer, tenants_file

pytestmark = pytest.mark.integration

NEW_TOKENS = 6


def generate_line(name: str, prompt: list[int]) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling}
    return {"custom_id": name, "method": "POST", "url": "/generate", "body": body}


def create(client: openai.OpenAI, prompts: dict[str, list[int]]) -> str:
    lines = jsonl([generate_line(name, prompt) for name, prompt in prompts.items()])
    source = client.files.create(file=("input.jsonl", lines), purpose="batch")
    return client.batches.create(
        input_file_id=source.id,
        endpoint="/generate",  # type: ignore[arg-type]
        completion_window="24h",
    ).id


def test_a_flood_does_not_delay_a_small_batch_and_each_pays_its_own(tmp_path: Path) -> None:
    path = tenants_file(tmp_path, flood={}, small={}, service={"sends_for_others": True})
    floods = [{f"r{i}": random_prompt(60, seed=1000 * number + i) for i in range(150)} for number in range(4)]
    prompts = {f"r{i}": random_prompt(40 + 20 * i, seed=i) for i in range(8)}
    environment = {"SGLANG_EXT_ENDPOINT_API_KEY": "service"}
    with (
        running_router(FLEET.get(EngineSpec(Role.PLAIN, name="of-tenants")), "--tenants-file", path) as router,
        running_service(
            tmp_path, router.url, "--tenants-file", path, "--max-in-flight", "4", key="", environment=environment
        ) as service,
        service.client(api_key="flood") as flood,
        service.client(api_key="small") as small,
    ):
        flood_ids = [create(flood, each) for each in floods]
        for batch_id in flood_ids:
            wait_batch(flood, batch_id, "in_progress", "completed", timeout_s=120)
        done = wait_batch(small, create(small, prompts), timeout_s=300)
        counts = [flood.batches.retrieve(batch_id).request_counts for batch_id in flood_ids]
        left = sum(count.total - count.completed for count in counts if count is not None)
        assert left > 0, "the small batch ended behind all that came before it"
        assert done.status == "completed"
        assert done.output_file_id
        for line in parse_jsonl(small.files.content(done.output_file_id).read()):
            expected = greedy_reference(prompts[line["custom_id"]], NEW_TOKENS)
            assert line["response"]["body"]["output_ids"] == expected
        for batch_id in flood_ids:
            assert wait_batch(flood, batch_id, timeout_s=300).status == "completed"
        end_s = time.monotonic() + 60
        used: dict[str, tuple[int, int, int]] = {}
        expected_usage = {
            "flood": (600, 600 * 60, 600 * NEW_TOKENS),
            "small": (8, sum(map(len, prompts.values())), 8 * NEW_TOKENS),
        }
        while used != expected_usage:
            assert time.monotonic() < end_s, used
            reply, _ = router.call("GET", "/v1/usage", headers=bearer(ADMIN_KEY))
            used = {
                row["tenant"]: (row["requests"], row["prompt_tokens"], row["output_tokens"])
                for row in reply.body["data"]
            }
            time.sleep(0.1)
