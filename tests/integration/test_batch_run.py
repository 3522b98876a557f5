"""`sglang-ext batch run` over real instances: tokens and scores of the reference, through a kill, every line once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from support.engines import Engine
from support.reference import greedy_reference, logprobs_reference, random_prompt
from support.router_cli import RunningRouter

pytestmark = pytest.mark.integration

TIMEOUT_S = 120.0
TOO_LONG_TOKENS = 3000


@pytest.fixture(autouse=True)
def _nothing_left_behind(router: RunningRouter, engines: list[Engine]) -> Iterator[None]:
    yield
    for engine in engines:
        engine.wait_idle()
    assert router.is_idle()


def start(router: RunningRouter, lines: Path, output: Path, *options: str) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "sglang_ext.cli", "batch", "run", "--input", str(lines), "--output", str(output)),
        *("--endpoint", router.url, *options),
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def run(router: RunningRouter, lines: Path, output: Path, *options: str) -> tuple[int, str]:
    process = start(router, lines, output, *options)
    told, _ = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, told


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def generate_line(name: str, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling}
    return {"custom_id": name, "method": "POST", "url": "/generate", "body": body}


def test_tokens_of_the_reference_through_a_kill(router: RunningRouter, tmp_path: Path) -> None:
    lengths = [(17 * number) % 90 + 1 if number % 6 else 300 + 31 * (number % 11) for number in range(90)]
    prompts = {f"row-{number}": random_prompt(length, seed=number) for number, length in enumerate(lengths)}
    lines = write_lines(tmp_path / "rows.jsonl", [generate_line(*item, new_tokens=8) for item in prompts.items()])
    output = tmp_path / "out.jsonl"
    process = start(router, lines, output, "--limit-requests-per-s", "10")
    time.sleep(2.0)  # of nine: the process that runs the tests may stall
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not output.exists(), "the output appears whole or not at all"
    status, told = run(router, lines, output, "--limit-requests-per-s", "1000")
    assert status == 0, told
    answers = read_lines(output)
    assert [answer["custom_id"] for answer in answers] == list(prompts), "every line once, in the order of the input"
    for answer in answers:
        got = answer["response"]["body"]["output_ids"]
        assert got == greedy_reference(prompts[answer["custom_id"]], 8)


def test_a_line_that_cannot_be_served_costs_no_other(router: RunningRouter, tmp_path: Path) -> None:
    prompts = [random_prompt(length, seed=length) for length in (5, TOO_LONG_TOKENS, 40)]
    rows = [generate_line(f"row-{number}", prompt, 4) for number, prompt in enumerate(prompts)]
    output = tmp_path / "out.jsonl"
    status, told = run(router, write_lines(tmp_path / "rows.jsonl", rows), output)
    assert status == 3, told
    assert [answer["custom_id"] for answer in read_lines(output)] == ["row-0", "row-2"]
    (failed,) = [path for path in tmp_path.iterdir() if "error" in path.name]
    (line,) = read_lines(failed)
    assert line["custom_id"] == "row-1"
    assert "3000 tokens" in json.dumps(line)


def test_scores_of_the_reference(router: RunningRouter, engines: list[Engine], tmp_path: Path) -> None:
    """Without any decode instance having a part in it."""
    prompts = [random_prompt(length, seed=700 + length) for length in (1, 2, 30, 255, 400, 1100)]
    rows: list[dict[str, Any]] = [
        {"custom_id": f"row-{number}", "token_ids": prompt, "prompt_len": len(prompt) // 2}
        for number, prompt in enumerate(prompts)
    ]
    output = tmp_path / "scores.parquet"
    lines = write_lines(tmp_path / "rows.jsonl", rows)
    status, told = run(router, lines, output, "--mode", "score", "--top-logprobs", "200")
    assert status == 0, told
    table = pq.read_table(output).to_pylist()
    assert [row["custom_id"] for row in table] == [row["custom_id"] for row in rows]
    for row, prompt in zip(table, prompts, strict=True):
        assert row["token_ids"] == prompt
        assert row["prompt_len"] == len(prompt) // 2
        truth = logprobs_reference(prompt).numpy()
        assert len(row["actual_logprobs"]) == len(row["topk_ids"]) == len(prompt)
        for position in range(1, len(prompt)):
            before = truth[position - 1]
            assert row["actual_logprobs"][position] == pytest.approx(float(before[prompt[position]]), abs=1e-3)
            ids = row["topk_ids"][position]
            # float16 keeps three digits
            np.testing.assert_allclose(np.array(row["topk_logprobs"][position], float), before[ids], atol=2e-2)
            assert len(ids) == len(set(ids)) == 200
            assert before[ids].min() >= np.sort(before)[-200] - 1e-3


def test_candidates_of_each_line(router: RunningRouter, tmp_path: Path) -> None:
    prompt = random_prompt(60, seed=900)
    rows = [{"custom_id": "a", "token_ids": prompt, "candidate_ids": [11, 500, 2000]}]
    output = tmp_path / "scores.jsonl"
    status, told = run(router, write_lines(tmp_path / "rows.jsonl", rows), output, "--mode", "score")
    assert status == 0, told
    (row,) = read_lines(output)
    truth = logprobs_reference(prompt).numpy()
    for position in range(1, len(prompt)):
        assert row["topk_ids"][position] == [11, 500, 2000]
        np.testing.assert_allclose(
            np.array(row["topk_logprobs"][position], float), truth[position - 1][[11, 500, 2000]], atol=2e-2
        )


def test_messages_and_responses(router: RunningRouter, tmp_path: Path) -> None:
    """The same question in three forms has the same answer, and the same count of tokens."""
    said = [{"role": "user", "content": "def parse(line):"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": said, "max_tokens": 6, "temperature": 0},
        "/v1/messages": {"messages": said, "max_tokens": 6, "temperature": 0},
        "/v1/responses": {"input": said, "max_output_tokens": 8, "temperature": 0},  # SGLang keeps two back
    }
    with urllib.request.urlopen(f"{router.url}/v1/models", timeout=TIMEOUT_S) as reply:
        model = json.load(reply)["data"][0]["id"]
    rows = {}
    for number, (path, body) in enumerate(bodies.items()):
        line = {"custom_id": path, "method": "POST", "url": path, "body": {"model": model, **body}}
        output = tmp_path / f"out-{number}.parquet"
        status, told = run(router, write_lines(tmp_path / f"in-{number}.jsonl", [line]), output)
        assert status == 0, told + output.with_name(f"{output.name}.errors.jsonl").read_text()
        rows[path] = pq.read_table(output).to_pylist()[0]
    assert rows["/v1/chat/completions"]["text"]
    assert len({row["text"] for row in rows.values()}) == 1, rows
    assert len({str(row["usage"]) for row in rows.values()}) == 1, rows
