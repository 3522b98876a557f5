"""`sglang-ext batch run` through a router and real SGLang: text and scores are those of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from sglang_ext.cli import main
from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.reference import greedy_reference, logprobs_reference, random_prompt
from support.router_cli import RunningRouter, running_router

pytestmark = pytest.mark.integration

LENGTHS = (1, 2, 30, 100, 255, 256, 257, 400, 700)


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return FLEET.get(EngineSpec(Role.SHORT), EngineSpec(Role.LONG), EngineSpec(Role.DECODE))


@pytest.fixture(scope="module")
def router(engines: list[Engine]) -> Iterator[RunningRouter]:
    with running_router(engines, "--length-boundary-tokens", "256") as running:
        yield running


def run(router: RunningRouter, folder: Path, rows: list[dict[str, Any]], *options: str) -> list[dict[str, Any]]:
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = ["--input", str(folder / "in.jsonl"), "--output", str(folder / "out.parquet")]
    assert main(["batch", "run", *files, "--endpoint", router.url, *options]) == 0
    found: list[dict[str, Any]] = pq.read_table(folder / "out.parquet").to_pylist()
    assert [row["custom_id"] for row in found] == [row["custom_id"] for row in rows]
    return found


def test_short_and_long_prompts_give_the_tokens_of_the_reference(router: RunningRouter, tmp_path: Path) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    prompts = [random_prompt(length, seed=length) for length in LENGTHS for _ in range(2)]
    rows = [
        {"custom_id": f"r{number}", "token_ids": prompt, "sampling_params": sampling}
        for number, prompt in enumerate(prompts)
    ]
    for row, prompt in zip(run(router, tmp_path, rows), prompts, strict=True):
        assert row["error"] is None
        assert row["prompt_token_ids"] == prompt
        assert row["completion_token_ids"] == greedy_reference(prompt, 5)
        assert (row["finish_reason"], row["usage"]["completion_tokens"]) == ("length", 5)


def test_scores_are_those_of_the_reference(router: RunningRouter, tmp_path: Path) -> None:
    sequences = [random_prompt(length, seed=1000 + length) for length in LENGTHS]
    rows: list[dict[str, Any]] = [
        {"custom_id": f"s{number}", "token_ids": sequence, "prompt_len": len(sequence) // 2}
        for number, sequence in enumerate(sequences)
    ]
    rows.append({"custom_id": "candidates", "token_ids": sequences[3], "candidate_ids": [5, 3, 9]})
    found = run(router, tmp_path, rows, "--mode", "score", "--top-logprobs", "8")
    for row, sequence in zip(found, [*sequences, sequences[3]], strict=True):
        assert row["token_ids"] == sequence
        expected = logprobs_reference(sequence).numpy()[: len(sequence) - 1]  # after every token but the last
        actual = np.array(row["actual_logprobs"][1:], np.float32)
        np.testing.assert_allclose(actual, expected[np.arange(len(sequence) - 1), sequence[1:]], atol=1e-3)
        for position, (ids, logprobs) in enumerate(zip(row["topk_ids"][1:], row["topk_logprobs"][1:], strict=True)):
            assert len(ids) == (3 if row["custom_id"] == "candidates" else 8)
            np.testing.assert_allclose(logprobs, expected[position, ids], atol=2e-2)  # float16
            if row["custom_id"] != "candidates":
                best = np.sort(expected[position])[::-1][:8]
                np.testing.assert_allclose(logprobs, best, atol=2e-2)
    assert found[-1]["topk_ids"][1] == [5, 3, 9]
    assert router.is_idle()
