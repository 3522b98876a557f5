"""`--engine ray`: what it refuses, how it lays lines out, and runs on Ray Data against a stand-in for the endpoint.

Ray is in a folder of its own (`make ray-env`), so its runs are other processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from sglang_ext.batch import batch_run, ray_engine, run_command
from sglang_ext.batch.inputs import Findings, InputFile, add_input
from sglang_ext.batch.lines import LineOptions, Mode
from sglang_ext.batch.scores import pack_scores
from sglang_ext.batch.store import BatchStore, StoredResult

ROOT = Path(__file__).resolve().parents[4]
RAY = ROOT / ".venv/ray"
needs_ray = pytest.mark.skipif(not (RAY / "ray").is_dir(), reason="Ray Data is not installed: `make ray-env`")


# -- without Ray ------------------------------------------------------------------------------------------------------


def options(tmp_path: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run_command.add_arguments(parser)
    given = [
        "--engine=ray",
        f"--input={tmp_path / 'in.jsonl'}",
        f"--output={tmp_path / 'out'}",
        "--endpoint=http://x:1",
    ]
    return parser.parse_args([*given, *more])


def write_lines(path: Path, count: int, tokens: int | None = None) -> None:
    bodies = ({"text": f"prompt {i}"} if tokens is None else {"input_ids": [i % 50 + 1] * tokens} for i in range(count))
    if tokens is None:
        lines = ({"custom_id": f"r{i}", "url": "/generate", "body": body} for i, body in enumerate(bodies))
    else:
        lines = ({"custom_id": f"r{i}", "token_ids": body["input_ids"]} for i, body in enumerate(bodies))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_without_ray_one_line_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    write_lines(tmp_path / "in.jsonl", 1)
    assert ray_engine.run_on_ray(options(tmp_path)) == batch_run.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "--engine ray" in line
    assert "sglang-ext[ray]" in line
    assert list(tmp_path.iterdir()) == [tmp_path / "in.jsonl"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--output=results.jsonl"], "--output"),
        (["--output=results.parquet"], "--output"),
        (["--format=jsonl"], "--output"),
        (["--retry-failed"], "--retry-failed"),
        (["--limit-requests-per-s=5"], "--limit-requests-per-s"),
        (["--limit-tokens-per-s=5"], "--limit-tokens-per-s"),
        (["--max-in-flight=0"], "--max-in-flight"),
        (["--input=nothing.jsonl"], "nothing.jsonl"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    named: str,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    write_lines(tmp_path / "in.jsonl", 1)
    assert ray_engine.run_on_ray(options(tmp_path, *given)) == batch_run.USAGE
    assert named in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "in.jsonl"]


@pytest.mark.parametrize("left", ["out.lines", "out.checkpoint", "out/part-0.parquet"])
def test_what_is_left_of_a_run_whose_store_is_gone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], left: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    write_lines(tmp_path / "in.jsonl", 1)
    (tmp_path / left).mkdir(parents=True)
    assert ray_engine.run_on_ray(options(tmp_path)) == batch_run.USAGE
    assert str(tmp_path / left).split("/part")[0] in capsys.readouterr().err


def test_lines_are_laid_out_in_row_groups_that_hold_each_of_them_once(tmp_path: Path) -> None:
    count = 1024 * 2 + 100
    write_lines(tmp_path / "in.jsonl", count)
    (tmp_path / "lines.partial").mkdir()
    (tmp_path / "lines.partial/lines-99999.parquet").write_bytes(b"of a run that was killed here")
    with BatchStore.open(tmp_path / "store") as store:
        job = store.create_job("run", {})
        findings = Findings()
        add_input(store, job, [InputFile(tmp_path / "in.jsonl", "in.jsonl")], LineOptions(), findings)
        assert not findings.count
        for _ in range(2):  # the second time they are there
            ray_engine._lay_out(store, job, Mode.GENERATE, tmp_path / "lines")
        assert len(store.lease(job, 10)) == 10, "nothing stays leased"
    groups = ray_engine._line_groups(tmp_path / "lines")
    assert [group.rows for group in groups] == [1024, 1024, 100]
    read = [row for group in groups for table in ray_engine._read_group(group) for row in table.to_pylist()]
    assert sorted(row["custom_id"] for row in read) == sorted(f"r{i}" for i in range(count))
    assert all(json.loads(row["body"]) == {"text": f"prompt {row['custom_id'][1:]}"} for row in read)
    assert [row["sort_key"] for row in read] == sorted(row["sort_key"] for row in read)
    assert not (tmp_path / "lines.partial").exists()


def stored(custom_id: str, body: bytes, error: str | None = None) -> StoredResult:
    return StoredResult(1, custom_id, error is None, 200 if error is None else 400, "", error, body, b"{}", None)


def test_a_result_table_has_a_row_for_every_line_whatever_became_of_it() -> None:
    reply = {
        "text": "yes",
        "meta_info": {"finish_reason": {"type": "stop"}, "prompt_tokens": 3, "completion_tokens": 1},
    }
    results = [
        stored("good", json.dumps(reply).encode()),
        stored("bad", b"", "HTTP 400: no"),
        stored("odd", json.dumps({"text": 5}).encode()),
        stored("odder", json.dumps({"choices": [7]}).encode()),
    ]
    rows = ray_engine.result_table(results, Mode.GENERATE).to_pylist()
    assert [row["custom_id"] for row in rows] == ["good", "bad", "odd", "odder"]
    assert (rows[0]["text"], rows[0]["finish_reason"], rows[0]["error"]) == ("yes", "stop", None)
    assert (rows[1]["text"], rows[1]["error"]) == (None, "HTTP 400: no")
    assert all("cannot be read" in row["error"] for row in rows[2:])


def scored(ids: list[int], top: int) -> dict[str, Any]:
    return {
        "text": "",
        "meta_info": {
            "prompt_tokens": len(ids),
            "completion_tokens": 1,
            "finish_reason": {"type": "length"},
            "input_token_logprobs": [[None if not i else -1.0 - i, token, None] for i, token in enumerate(ids)],
            "input_top_logprobs": [
                None if not i else [[-float(k), 9 + k, None] for k in range(top)] for i in range(len(ids))
            ],
        },
    }


@pytest.mark.parametrize("good", [0, 2])
def test_a_table_of_scores_has_errors_beside_them(good: int) -> None:
    from sglang_ext.batch.endpoint import Answer, AnswerKind
    from sglang_ext.batch.lines import parse_line

    line = parse_line({"token_ids": [5, 6, 2047]}, LineOptions(Mode.SCORE, top_logprobs=2), "f", 1)
    # SGLang calls a vocabulary's last token 0 there.
    packed = pack_scores(line, Answer(AnswerKind.OK, 200, b"", scored([5, 6, 0], 2), "", None))
    results = [stored(f"good{i}", packed) for i in range(good)] + [stored("bad", b"", "HTTP 400: no")]
    table = ray_engine.result_table(results, Mode.SCORE)
    rows = table.to_pylist()
    assert [(row["custom_id"], row["error"]) for row in rows] == [
        *((f"good{i}", None) for i in range(good)),
        ("bad", "HTTP 400: no"),
    ]
    assert rows[-1]["token_ids"] is None
    assert [row["token_ids"] for row in rows[:-1]] == [[5, 6, 2047]] * good
    assert [row["topk_ids"] for row in rows[:-1]] == [[[], [9, 10], [9, 10]]] * good


# -- on Ray Data ------------------------------------------------------------------------------------------------------


class StandIn:
    """An endpoint: 400 for prompts that end in 13, one 500 for those that end in 21, after a delay."""

    def __init__(self, delay_s: float) -> None:
        self.served: Counter[str] = Counter()
        self.priorities: set[str | None] = set()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(404, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                time.sleep(delay_s)
                stand_in.priorities.add(self.headers["x-sgl-priority"])
                if "input_ids" in body:
                    stand_in.served["scored"] += 1
                    self._answer(200, scored(body["input_ids"], body["top_logprobs_num"]))
                    return
                prompt = body["text"]
                stand_in.served[prompt] += 1
                if prompt.endswith("13"):
                    self._answer(400, {"error": {"message": "no thirteen"}})
                elif prompt.endswith("21") and stand_in.served[prompt] == 1:
                    self._answer(500, {"error": {"message": "once"}})
                else:
                    self._answer(200, {"text": prompt[::-1], "output_ids": [1, 2], "meta_info": {"prompt_tokens": 2}})

            def _answer(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def endpoint(request: pytest.FixtureRequest) -> Iterator[StandIn]:
    started = StandIn(getattr(request, "param", 0.0))
    yield started
    started.close()


def start(folder: Path, url: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sglang_ext.cli", "batch", "run", "--engine=ray", f"--endpoint={url}"]
    command += [f"--input={folder / 'in.jsonl'}", f"--output={folder / 'out'}", *more]
    path = os.pathsep.join(filter(None, [str(RAY), os.environ.get("PYTHONPATH")]))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Ray keeps its cluster's token at home.
    environment |= {"PYTHONPATH": path, "HOME": str(folder)}
    with (folder / "log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, text=True)


def finish(process: subprocess.Popen[str], folder: Path, expected: int) -> None:
    try:
        status = process.wait(240)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise AssertionError((folder / "log").read_text()[-6000:]) from None
    assert status == expected, (folder / "log").read_text()[-6000:]


def kill_sender(driver: subprocess.Popen[str]) -> None:
    """Kill the process of the actor; Ray names it after what it runs."""
    below = psutil.Process(driver.pid).children(recursive=True)
    (sender,) = [one for one in below if "LineSender" in " ".join(one.cmdline())]
    sender.kill()


def wait_for_files(driver: subprocess.Popen[str], folder: Path, count: int) -> None:
    deadline = time.monotonic() + 200
    while len(list((folder / "out").glob("*.parquet"))) < count:
        assert driver.poll() is None, (folder / "log").read_text()[-6000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def output_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted((folder / "out").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


@pytest.mark.full
@needs_ray
def test_every_line_has_a_row_and_a_bad_one_ends_nothing(tmp_path: Path, endpoint: StandIn) -> None:
    write_lines(tmp_path / "in.jsonl", 330)
    finish(start(tmp_path, endpoint.url), tmp_path, batch_run.SOME_FAILED)
    rows = output_rows(tmp_path)
    assert Counter(row["custom_id"] for row in rows) == Counter(f"r{i}" for i in range(330))
    for row in rows:
        prompt = f"prompt {row['custom_id'][1:]}"
        if prompt.endswith("13"):
            assert (row["text"], row["error"]) == (None, "HTTP 400: no thirteen")
        else:
            assert (row["text"], row["completion_token_ids"], row["error"]) == (prompt[::-1], [1, 2], None)
    assert endpoint.priorities == {"low"}
    assert {count for prompt, count in endpoint.served.items() if prompt.endswith("21")} == {2}
    assert {count for prompt, count in endpoint.served.items() if not prompt.endswith("21")} == {1}


@needs_ray
@pytest.mark.full
@pytest.mark.chaos
@pytest.mark.parametrize("endpoint", [0.05], indirect=True)
def test_a_killed_sender_and_a_killed_driver_go_on_and_a_finished_run_sends_nothing(
    tmp_path: Path, endpoint: StandIn
) -> None:
    count = 5 * 1024
    write_lines(tmp_path / "in.jsonl", count)
    process = start(tmp_path, endpoint.url, "--max-in-flight=64")
    wait_for_files(process, tmp_path, 1)
    kill_sender(process)
    wait_for_files(process, tmp_path, 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(3)  # what was in flight is answered, and Ray's processes have ended
    lists = [path for path in (tmp_path / "out.checkpoint").glob("*.parquet") if ".pending" not in path.name]
    written = {f"prompt {row['custom_id'][1:]}" for path in lists for row in pq.read_table(path).to_pylist()}
    assert 2 * 1024 <= len(written) < count
    before = {prompt: endpoint.served[prompt] for prompt in written}
    finish(start(tmp_path, endpoint.url, "--max-in-flight=64"), tmp_path, batch_run.SOME_FAILED)
    assert Counter(row["custom_id"] for row in output_rows(tmp_path)) == Counter(f"r{i}" for i in range(count))
    assert {prompt: endpoint.served[prompt] for prompt in written} == before, "what is written is not sent again"

    after = sum(endpoint.served.values())
    finish(start(tmp_path, endpoint.url, "--max-in-flight=64"), tmp_path, batch_run.SOME_FAILED)
    assert sum(endpoint.served.values()) == after
    assert len(output_rows(tmp_path)) == count

    write_lines(tmp_path / "in.jsonl", count + 1)
    finish(start(tmp_path, endpoint.url), tmp_path, batch_run.USAGE)
    assert "--input: in.jsonl has changed" in (tmp_path / "log").read_text()


@needs_ray
@pytest.mark.full
def test_scores_on_ray_are_the_columns_of_the_local_engine(tmp_path: Path, endpoint: StandIn) -> None:
    write_lines(tmp_path / "in.jsonl", 300, tokens=4)
    finish(start(tmp_path, endpoint.url, "--mode=score", "--top-logprobs=3"), tmp_path, batch_run.OK)
    rows = output_rows(tmp_path)
    assert Counter(row["custom_id"] for row in rows) == Counter(f"r{i}" for i in range(300))
    for row in rows:
        assert row["token_ids"] == [int(row["custom_id"][1:]) % 50 + 1] * 4
        assert row["topk_ids"] == [[], [9, 10, 11], [9, 10, 11], [9, 10, 11]]
        assert row["topk_logprobs"][1:] == [[0.0, -1.0, -2.0]] * 3
        assert row["actual_logprobs"] == [None, -2.0, -3.0, -4.0]
        assert row["error"] is None
