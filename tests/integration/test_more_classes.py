"""Three classes of prefill and two of decode over real SGLang: requests go where they belong, with the right tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.handshake_process import wait_until
from support.reference import greedy_reference, random_prompt
from support.router_cli import running_router

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    prefills = [EngineSpec(Role.BOTH, name=f"class-{number}") for number in range(3)]
    return FLEET.get(*prefills, *(EngineSpec(Role.DECODE, name=f"class-{number}") for number in range(2)))


def test_each_request_goes_to_the_instances_of_its_classes(engines: list[Engine], tmp_path: Path) -> None:
    file = tmp_path / "buckets.json"  # as sgl-router has it
    prefills, decodes = [engine.url for engine in engines[:3]], [engine.url for engine in engines[3:]]
    buckets = [
        {"id": "s", "stage": "prefill", "max_extend_tokens": 64, "worker_ids": prefills[:1]},
        {"id": "m", "stage": "prefill", "min_extend_tokens": 65, "max_extend_tokens": 400, "worker_ids": prefills[1:2]},
        {"id": "l", "stage": "prefill", "min_extend_tokens": 401, "worker_ids": prefills[2:]},
        {"id": "few", "stage": "decode", "max_sequence_tokens": 300, "worker_ids": decodes[:1]},
        {"id": "many", "stage": "decode", "min_sequence_tokens": 301, "worker_ids": decodes[1:]},
    ]
    file.write_text(json.dumps({"buckets": buckets}))
    with running_router(engines, "--bucket-config", str(file)) as router:
        for length, new_tokens, prefill, decode in (
            (64, 8, 0, 0),
            (65, 8, 1, 0),
            (290, 10, 1, 0),
            (290, 12, 1, 1),
            (400, 8, 1, 1),
            (401, 8, 2, 1),
            (900, 8, 2, 1),
        ):
            prompt = random_prompt(length, seed=length + new_tokens)
            sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
            reply, headers = router.call("POST", "/generate", {"input_ids": prompt, "sampling_params": sampling})
            assert reply.status == 200, reply.body
            assert reply.body["output_ids"] == greedy_reference(prompt, new_tokens)
            assert headers["x-sglang-ext-prefill"] == prefills[prefill], length
            assert headers["x-sglang-ext-decode"] == decodes[decode], (length, new_tokens)
            assert headers["x-sglang-ext-class"] == "sml"[prefill]
        wait_until(router.is_idle, 10)
