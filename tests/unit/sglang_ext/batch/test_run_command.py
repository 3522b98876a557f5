"""The real command in a process of its own: killed, starved of space, without an endpoint, refused."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sglang_ext.batch.store import BatchStore
from support.faulty_endpoint import FaultyEndpoint


def command(tmp_path: Path, endpoint: str, *options: str, name: str = "out.jsonl") -> list[str]:
    module = [sys.executable, "-m", "sglang_ext.cli", "batch", "run"]
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / name)]
    return [*module, *files, "--endpoint", endpoint, "--model", "m", *options]


def run(tmp_path: Path, endpoint: str, *options: str, name: str = "out.jsonl") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(tmp_path, endpoint, *options, name=name), capture_output=True, text=True, timeout=90, check=False
    )


def write(tmp_path: Path, prompts: list[str]) -> None:
    with (tmp_path / "in.jsonl").open("w") as opened:
        for number, prompt in enumerate(prompts):
            opened.write(json.dumps({"custom_id": f"id-{number}", "prompt": prompt}) + "\n")


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_run_and_the_same_again(tmp_path: Path) -> None:
    write(tmp_path, [f"prompt {number}" for number in range(200)])
    with FaultyEndpoint() as endpoint:
        first = run(tmp_path, endpoint.url)
        assert (first.returncode, first.stderr.count("Traceback")) == (0, 0), first.stderr
        assert "200 of 200 lines done, 0 failed, 0 left; 1200 tokens (800 of prompts)" in first.stdout
        assert ids(tmp_path / "out.jsonl") == [f"id-{number}" for number in range(200)]
        (tmp_path / "out.jsonl").unlink()
        again = run(tmp_path, endpoint.url)
        assert again.returncode == 0
        assert "going on: 200 of 200 lines done" in again.stderr
        assert ids(tmp_path / "out.jsonl") == [f"id-{number}" for number in range(200)]
        assert set(endpoint.asked.values()) == {1}


@pytest.mark.full
def test_failed_lines_and_failed_lines_again(tmp_path: Path) -> None:
    write(tmp_path, ["one", "status=400*1", "status=404*1", "two"])
    with FaultyEndpoint() as endpoint:
        first = run(tmp_path, endpoint.url)
        assert first.returncode == 3, first.stderr
        assert "2 lines failed" in first.stdout
        assert ids(tmp_path / "out.jsonl") == ["id-0", "id-3"]
        assert ids(tmp_path / "out.jsonl.errors.jsonl") == ["id-1", "id-2"]
        assert run(tmp_path, endpoint.url).returncode == 3
        again = run(tmp_path, endpoint.url, "--retry-failed")
        assert again.returncode == 0, again.stderr
        assert ids(tmp_path / "out.jsonl") == ["id-0", "id-1", "id-2", "id-3"]
        assert not (tmp_path / "out.jsonl.errors.jsonl").exists()


def kill_and_go_on(tmp_path: Path, lines: int, kills: int) -> None:
    """Kill the command at random moments; then let it finish, and look for every line once."""
    write(tmp_path, [f"slow=0.02 {'word ' * (number % 40)}{number}" for number in range(lines)])
    draw = random.Random(7)
    with FaultyEndpoint() as endpoint:
        killed = 0
        for _ in range(kills):
            process = subprocess.Popen(
                command(tmp_path, endpoint.url, "--max-in-flight", "8"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            time.sleep(draw.uniform(0.2, 2.0))
            killed += process.poll() is None
            process.kill()
            process.wait()
        assert killed >= kills // 2
        last = run(tmp_path, endpoint.url)
        assert last.returncode == 0, last.stderr
        assert ids(tmp_path / "out.jsonl") == [f"id-{number}" for number in range(lines)]
        replies = [json.loads(line)["response"]["body"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert all(reply["choices"][0]["text"].endswith(str(number)) for number, reply in enumerate(replies))
        # What was in flight when a process was killed is asked again, and no more.
        assert sum(endpoint.asked.values()) <= lines + kills * (8 + 64)
        with BatchStore.open(tmp_path / "out.jsonl.store") as store:
            assert store.jobs()[0].succeeded == lines


@pytest.mark.slow
@pytest.mark.chaos
def test_killed_at_random_moments_every_line_has_one_result(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, 1500, 4)


@pytest.mark.chaos
@pytest.mark.full
def test_killed_twenty_times(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, 8000, 20)


@pytest.mark.slow
@pytest.mark.chaos
def test_a_signal_stops_it_and_the_same_command_goes_on(tmp_path: Path) -> None:
    write(tmp_path, [f"slow=0.05 {number}" for number in range(400)])
    with FaultyEndpoint() as endpoint:
        process = subprocess.Popen(
            command(tmp_path, endpoint.url, "--max-in-flight", "4"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while len(endpoint.times_s) < 20:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        told, complained = process.communicate(timeout=30)
        assert process.returncode == 130, complained
        assert "the same command goes on from here" in complained
        assert "left;" in told
        assert not (tmp_path / "out.jsonl").exists()
        assert run(tmp_path, endpoint.url).returncode == 0
        assert len(ids(tmp_path / "out.jsonl")) == 400
        assert set(endpoint.asked.values()) == {1}  # what was in flight had its answer waited for


@pytest.mark.full
def test_a_full_store_and_then_more_space(tmp_path: Path) -> None:
    write(tmp_path, [f"{'x' * 1500} {number}" for number in range(400)])
    with FaultyEndpoint() as endpoint:
        full = run(tmp_path, endpoint.url, "--store-limit-mib", "1.4")
        assert full.returncode == 4, full.stderr
        assert "make room, and the same command goes on" in full.stderr
        assert not (tmp_path / "out.jsonl").exists()
        smaller = run(tmp_path, endpoint.url, "--store-limit-mib", "1.4")
        assert smaller.returncode == 4
        assert run(tmp_path, endpoint.url).returncode == 0
        assert len(ids(tmp_path / "out.jsonl")) == 400
        assert max(endpoint.asked.values()) <= 3


@pytest.mark.full
def test_reading_that_was_cut_short_begins_again(tmp_path: Path) -> None:
    write(tmp_path, ["x" * 1500] * 1000)
    with FaultyEndpoint() as endpoint:
        full = run(tmp_path, endpoint.url, "--store-limit-mib", "0.5")
        assert full.returncode == 4, full.stderr
        with BatchStore.open(tmp_path / "out.jsonl.store") as store:
            assert not any(job.is_ready for job in store.jobs())
        assert not endpoint.asked
        assert run(tmp_path, endpoint.url).returncode == 0
        assert ids(tmp_path / "out.jsonl") == [f"id-{number}" for number in range(1000)]


@pytest.mark.full
def test_changed_input_and_options_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, ["one", "status=400"])
    with FaultyEndpoint() as endpoint:
        assert run(tmp_path, endpoint.url).returncode == 3
        for options, named in (
            (["--model", "other"], '--model: was "m", is "other"'),
            (["--defaults", '{"max_tokens": 3}'], "--defaults: was not given"),
            (["--engine", "ray"], "--engine"),
        ):
            refused = run(tmp_path, endpoint.url, *options)
            assert refused.returncode == 2
            assert named in refused.stderr
        os.utime(tmp_path / "in.jsonl")
        assert run(tmp_path, endpoint.url).returncode == 3
        write(tmp_path, ["two", "status=400"])
        refused = run(tmp_path, endpoint.url)
        assert refused.returncode == 2
        assert "--input: in.jsonl has changed" in refused.stderr
        assert sum(endpoint.asked.values()) == 2


@pytest.mark.slow
def test_an_output_that_would_become_an_input_is_refused(tmp_path: Path) -> None:
    write(tmp_path, ["one"])
    with FaultyEndpoint() as endpoint:
        command = [
            *(sys.executable, "-m", "sglang_ext.cli", "batch", "run", "--input", str(tmp_path)),
            *("--output", str(tmp_path / "out.jsonl"), "--endpoint", endpoint.url, "--model", "m"),
        ]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert refused.returncode == 2
        assert "--output:" in refused.stderr
        assert not endpoint.asked


@pytest.mark.full
def test_what_is_wrong_with_input_is_told_and_nothing_sent(tmp_path: Path) -> None:
    lines = [
        {"custom_id": "a", "prompt": "p"},
        {"custom_id": "a", "prompt": "p"},
        {"custom_id": "b", "prompt": "p", "stream": True},
        {"custom_id": "c", "messages": [{"role": "user", "content": "x"}]},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with FaultyEndpoint() as endpoint:
        refused = run(tmp_path, endpoint.url)
        assert refused.returncode == 2
        for named in ("in.jsonl:3: stream", "in.jsonl:4: url", "in.jsonl:2: custom_id: 'a' is on in.jsonl:1"):
            assert named in refused.stderr
        assert "Traceback" not in refused.stderr
        assert not endpoint.asked
        write(tmp_path, ["fine"])
        assert run(tmp_path, endpoint.url).returncode == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-in-flight", "0"], "--max-in-flight"),
        (["--top-logprobs", "4"], "--top-logprobs"),
        (["--limit-tokens-per-s", "0"], "--limit-tokens-per-s"),
        (["--limit-requests-per-s", "-3"], "--limit-requests-per-s"),
        (["--defaults", "{"], "--defaults"),
        (["--format", "parquet"], "--format"),
        (["--store-limit-mib", "0"], "--store-limit-mib"),
    ],
)
def test_options_that_cannot_be_are_named(
    tmp_path: Path, options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang_ext.cli import main

    write(tmp_path, ["x"])
    assert main(command(tmp_path, "http://127.0.0.1:9", *options)[3:]) == 2
    told = capsys.readouterr().err
    assert named in told
    assert told.count("\n") == 1


def test_output_that_is_there_without_its_store_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang_ext.cli import main

    write(tmp_path, ["x"])
    (tmp_path / "out.jsonl").write_text("precious")
    assert main(command(tmp_path, "http://127.0.0.1:9")[3:]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == "precious"
    assert not (tmp_path / "out.jsonl.store").exists()


@pytest.mark.full
def test_a_wrong_key_stops_the_run_before_any_line_fails(tmp_path: Path) -> None:
    write(tmp_path, ["x"])
    with FaultyEndpoint(api_key="right") as endpoint:
        refused = run(tmp_path, endpoint.url, "--api-key", "wrong")
        assert refused.returncode == 2
        assert "--api-key: the endpoint refuses it" in refused.stderr
        assert run(tmp_path, endpoint.url, "--api-key", "right").returncode == 0


@pytest.mark.slow
def test_scores(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"custom_id": "a", "token_ids": [5, 6, 7], "prompt_len": 1},
        {"custom_id": "b", "token_ids": [8, 9], "candidate_ids": [3]},
        {"custom_id": "c", "token_ids": [99, 1]},  # answered without scores
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--mode", "score", "--top-logprobs", "4"]
    with FaultyEndpoint() as endpoint:
        done = run(tmp_path, endpoint.url, *options, name="out.parquet")
        assert done.returncode == 3, done.stderr
        first, second = pq.read_table(tmp_path / "out.parquet").to_pylist()
        assert (first["custom_id"], first["prompt_len"], first["topk_ids"][1]) == ("a", 1, [0, 1, 2, 3])
        assert (second["topk_ids"], second["token_ids"]) == ([[], [3]], [8, 9])
        (failed,) = (tmp_path / "out.parquet.errors.jsonl").read_text().splitlines()
        assert "no input_token_logprobs" in json.loads(failed)["error"]["message"]
        assert {headers["x-sgl-priority"] for headers in endpoint.headers} == {"low"}
        own_store = ["--store", str(tmp_path / "out.parquet.store")]
        assert run(tmp_path, endpoint.url, *options, *own_store, name="out.jsonl").returncode == 3
        line, other = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
        assert (line["custom_id"], line["prompt_len"], line["topk_ids"][1]) == ("a", 1, [0, 1, 2, 3])
        assert (other["topk_ids"], other["token_ids"]) == ([[], [3]], [8, 9])
        kit = ["--format", "distillkit", "--vocabulary", "100", "--store", str(tmp_path / "out.parquet.store")]
        exported = run(tmp_path, endpoint.url, *options, *kit, name="kit.parquet")
        assert "logprob_compressor: " in exported.stdout, exported.stderr
        assert pq.read_table(tmp_path / "kit.parquet").column_names == [
            "input_ids",
            "compressed_logprobs",
            "bytepacked_indices",
        ]
        kit[kit.index("100")] = "3"
        refused = run(tmp_path, endpoint.url, *options, *kit, name="small.parquet")
        assert (refused.returncode, "--vocabulary" in refused.stderr) == (2, True), refused.stderr
        assert not list(tmp_path.glob("small*"))
