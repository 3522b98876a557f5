"""`sglang-ext batch run` with input and output on S3-compatible storage that fails, hangs and refuses."""

from __future__ import annotations

import gzip
import io
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from support.faulty_endpoint import FaultyEndpoint
from support.object_storage import ObjectStorage, needs_object_storage

pytestmark = [pytest.mark.slow, needs_object_storage]


def command(tmp_path: Path, endpoint: str, given: str, output: str, *options: str) -> list[str]:
    store = ["--store", str(tmp_path / "run.store")]
    module = [sys.executable, "-m", "sglang_ext.cli", "batch", "run"]
    files = ["--input", given, "--output", output]
    return [*module, *files, *store, "--endpoint", endpoint, "--model", "m", *options]


def run(storage: ObjectStorage, words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=storage.environment, capture_output=True, text=True, timeout=300, check=False)


def lines(count: int, size: int = 1, first: int = 0) -> bytes:
    made = ({"custom_id": f"id-{i}", "prompt": f"prompt {i} " + "x" * size} for i in range(first, first + count))
    return b"".join(json.dumps(line).encode() + b"\n" for line in made)


def ids(content: bytes) -> list[str]:
    return [json.loads(line)["custom_id"] for line in content.splitlines()]


def test_files_folders_and_formats(storage: ObjectStorage, tmp_path: Path) -> None:
    storage.put("in/a.jsonl", lines(50))
    storage.put("in/deep/b.jsonl.gz", gzip.compress(lines(50, first=50)))
    storage.put("in/notes.txt", b"no input")
    with FaultyEndpoint() as endpoint:
        done = run(storage, command(tmp_path, endpoint.url, "s3://batches/in/", "s3://batches/o/out.jsonl.gz"))
        assert done.returncode == 0, done.stderr
        assert ids(gzip.decompress(storage.get("o/out.jsonl.gz"))) == [f"id-{i}" for i in range(100)]
        assert "written: s3://batches/o/out.jsonl.gz" in done.stdout
        again = run(storage, command(tmp_path, endpoint.url, "s3://batches/in/", "s3://batches/o/out.jsonl.gz"))
        assert (again.returncode, "going on: 100 of 100" in again.stderr) == (0, True), again.stderr
        other = command(tmp_path / "x", endpoint.url, "s3://batches/in/*.jsonl*", "s3://batches/parts/")
        (tmp_path / "x").mkdir()
        assert run(storage, other).returncode == 0
        table = pq.read_table(io.BytesIO(storage.get("parts/part-00000.parquet")))
        assert table["custom_id"].to_pylist() == [f"id-{i}" for i in range(100)]
        assert set(endpoint.asked.values()) == {2}
        storage.put("in/a.jsonl", lines(49))
        changed = run(storage, command(tmp_path, endpoint.url, "s3://batches/in/", "s3://batches/o/out.jsonl.gz"))
        assert changed.returncode == 2
        assert "a.jsonl has changed" in changed.stderr
        (tmp_path / "y").mkdir()
        taken = run(storage, command(tmp_path / "y", endpoint.url, "s3://batches/in/", "s3://batches/o/out.jsonl.gz"))
        assert taken.returncode == 2
        assert "is there already" in taken.stderr
    assert storage.unfinished() == 0
    assert not [key for key in storage.names() if "check" in key]


def test_what_is_refused_is_one_line(storage: ObjectStorage, tmp_path: Path) -> None:
    storage.put("ok.jsonl", lines(1))
    endpoint = "http://127.0.0.1:9"
    for given, output, reason in (
        ("s3://batches/none.jsonl", "s3://batches/out.jsonl", "s3://batches/none.jsonl: no such object"),
        ("s3://batches/none/", "s3://batches/out.jsonl", "s3://batches/none/: no object in it ends in"),
        ("s3://batches/ok.jsonl", "s3://elsewhere/out.jsonl", "elsewhere/out.jsonl: there is no such bucket"),
        ("s3://batches/ok.jsonl", "s3://batches/ok.jsonl", "is an input, too"),
        ("s3://elsewhere/*.jsonl", "s3://batches/out.jsonl", "there is no such bucket"),
        ("s3://batches/ok.jsonl", "s3://", "must be s3://BUCKET/NAME"),
    ):
        done = run(storage, command(tmp_path, endpoint, given, output))
        assert done.returncode == 2, done.stderr
        assert reason in done.stderr
        assert "Traceback" not in done.stderr
    words = command(tmp_path, endpoint, "s3://batches/ok.jsonl", "s3://batches/out.jsonl")
    without_store = [word for word in words if word not in {"--store", str(tmp_path / "run.store")}]
    assert "--store: is needed with --output on s3://" in run(storage, without_store).stderr
    kept = dict(storage.environment)
    try:
        del storage.environment["PYTHONPATH"]
        missing = run(storage, words)
        assert missing.returncode == 2
        assert "pip install 'sglang-ext[s3]'" in missing.stderr
        assert missing.stderr.count("\n") == 1
        storage.environment.clear()
        storage.environment.update(kept)
        del storage.environment["AWS_ACCESS_KEY_ID"]
        storage.environment["AWS_SHARED_CREDENTIALS_FILE"] = str(tmp_path / "none")
        unknown = run(storage, words)
        assert (unknown.returncode, "Unable to locate credentials" in unknown.stderr) == (2, True), unknown.stderr
    finally:
        storage.environment.clear()
        storage.environment.update(kept)


def test_killed_while_writing_leaves_nothing(storage: ObjectStorage, tmp_path: Path) -> None:
    storage.put("large.jsonl", lines(40, 1 << 19))
    words = command(tmp_path, "", "s3://batches/large.jsonl", "s3://batches/large-out.jsonl")
    with FaultyEndpoint() as endpoint:
        endpoint_at = words.index("--endpoint") + 1
        words[endpoint_at] = endpoint.url
        # A reply repeats its prompt, so the output has several parts, as the input has.
        storage.faults.hold_after_bytes = storage.faults.sent_bytes + (10 << 20)
        process = subprocess.Popen(words, env=storage.environment, stderr=subprocess.PIPE)
        end_s = time.monotonic() + 120
        while not storage.faults.is_holding:
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < end_s
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        storage.faults.hold_after_bytes = None
        assert storage.unfinished() == 1, "killed between its parts"
        assert "large-out.jsonl" not in storage.names()
        done = run(storage, words)
        assert done.returncode == 0, done.stderr
        assert ids(storage.get("large-out.jsonl")) == [f"id-{i}" for i in range(40)]
        assert storage.unfinished() == 0
        assert set(endpoint.asked.values()) == {1}


def test_an_outage_is_waited_for_or_the_run_goes_on_later(storage: ObjectStorage, tmp_path: Path) -> None:
    storage.put("some.jsonl", lines(20))
    with FaultyEndpoint() as endpoint:
        words = command(tmp_path, endpoint.url, "s3://batches/some.jsonl", "s3://batches/some-out.jsonl")
        for mode in ("refuse", "error"):
            storage.faults.mode = mode
            down = run(storage, words)
            assert down.returncode == 4, down.stderr
            assert "the same command goes on from here" in down.stderr
            assert "Traceback" not in down.stderr
        # It comes back while the command tries again.
        refused = storage.faults.refused

        def come_back() -> None:
            while storage.faults.refused == refused:
                time.sleep(0.01)
            storage.faults.mode = "pass"

        waiting = threading.Thread(target=come_back)
        waiting.start()
        done = run(storage, words)
        waiting.join()
        assert done.returncode == 0, done.stderr
        assert ids(storage.get("some-out.jsonl")) == [f"id-{i}" for i in range(20)]
