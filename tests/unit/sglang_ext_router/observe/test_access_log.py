"""The access log: a line per request, whatever became of it; and nothing that happens to it holds a request up."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfigError
from sglang_ext_router.main import check_access_log
from sglang_ext_router.observe import access_log as access_log_module
from sglang_ext_router.observe.access_log import AccessEntry, AccessLog
from support.engines import free_port
from support.event_loops import Complaints
from support.raw_client import RawClient, request_bytes
from support.router_process import cluster
from support.running_time import running_s
from support.scripted_engine import DONE, ScriptedEngine, event, hang, reply, status, stream

PROMPT = {"text": "x"}
ENTRY = AccessEntry("/generate", 200, "ok", 1.0)


def lines(file: Path) -> list[dict[str, Any]]:
    """What the log holds; every line must be whole."""
    text = file.read_text() if file.exists() else ""
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def until_written(log: AccessLog, count: int, within_s: float = 10.0) -> None:
    end_s = running_s() + within_s
    while log.counts["written"] < count:
        assert running_s() < end_s, log.counts


@pytest.mark.slow
async def test_a_line_tells_all_of_a_request(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    tokens = [event({"meta_info": {"prompt_tokens": 9, "completion_tokens": count}}) for count in (1, 2)]
    async with cluster(access_log=str(file)) as served:
        served.short[0].script = stream(tokens[0], DONE)
        served.decode[0].script = stream(*tokens, DONE, delay_s=0.05)
        served.decode[0].plan(status(503))
        client = await served.connect()
        body = {"input_ids": [1, 2, 3], "stream": True}
        await client.ask("POST", "/generate", body, {"x-request-id": "mine"})
        await served.until_idle()
        await served.until(lambda: bool(lines(file)))
        (line,) = lines(file)
        times = {name: line.pop(name) for name in ("queued_s", "prefilled_s", "first_byte_s", "total_s")}
        assert 0 == times["queued_s"] < times["prefilled_s"] <= times["first_byte_s"] + 0.05 < times["total_s"] + 0.05
        assert times["first_byte_s"] + 0.045 <= times["total_s"] < 5
        assert abs(datetime.fromisoformat(line.pop("time")).timestamp() - __import__("time").time()) < 60
        assert line.pop("client").startswith("127.0.0.1:")
        assert line == {
            "path": "/generate",
            "method": "POST",
            "status": 200,
            "outcome": "ok",
            "request_id": "mine",
            "model": "m",
            "length_class": "short",
            "stream": True,
            "sequences": 1,
            "prompt_tokens_estimated": 3,
            "cached_tokens_estimated": 0,
            "prompt_tokens": 9,
            "output_tokens": 2,
            "prefill": served.short[0].url,
            "decode": served.decode[0].url,
            "attempts": 2,
        }


async def test_a_probe_that_goes_well_has_no_line(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    async with cluster(access_log=str(file)) as served, await served.connect() as client:
        for path in ("/ping", "/health", "/readyz", "/health_generate", "/v1/models"):
            assert (await client.ask("GET", path)).status == 200
        served.router.drain_worker(served.worker(served.decode[0].url), True)
        assert (await client.ask("GET", "/readyz")).status == 503
    assert [(line["path"], line["status"]) for line in lines(file)] == [("/v1/models", 200), ("/readyz", 503)]


async def test_every_request_has_one_line(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    async with cluster(access_log=str(file), retry_max_retries=0, api_key="k", admin_api_key="a") as served:
        key = {"Authorization": "Bearer k"}
        await served.ask("POST", "/generate", PROMPT, key)
        await served.ask("POST", "/generate", b"{", key)
        await served.ask("POST", "/generate", PROMPT)
        await served.ask("GET", "/workers", headers=key)
        await served.ask("GET", "/nowhere?x=1", headers=key)
        served.decode[0].plan(status(500))
        await served.ask("POST", "/generate", PROMPT, key)
        served.short[0].script = stream(event({}), DONE)
        served.decode[0].plan(stream(event({}), event({"error": {"code": 507}}), DONE, delay_s=0.02))
        await served.ask("POST", "/generate", {**PROMPT, "stream": True}, key)
        served.decode[0].script = hang()
        async with await served.connect() as client:
            await client.send(request_bytes("POST", "/generate", b'{"text": "x"}', key))
            await served.until(lambda: bool(served.router.running))
        await served.until_idle()
        await served.until(lambda: len(lines(file)) == 8)
        assert [(line["path"], line["status"], line["outcome"]) for line in lines(file)] == [
            ("/generate", 200, "ok"),
            ("/generate", 400, "error_before"),
            ("/generate", 401, "error_before"),
            ("/workers", 200, "ok"),
            ("/nowhere", 404, "error_before"),
            ("/generate", 500, "error_before"),
            ("/generate", 507, "error_after"),
            ("/generate", 499, "client_left"),
        ]
        errors = [line.get("error", "") for line in lines(file)]
        assert "JSON" in errors[1]
        assert "API key" in errors[2]
    log = served.router.access_log
    assert log is not None
    assert log.counts == {"written": 8, "failed": 0, "overflow": 0}
    assert not log._thread.is_alive()


@pytest.mark.slow
async def test_a_renamed_file_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    async with cluster(access_log=str(file)) as served:
        for name in ("first", "second"):
            await served.ask("POST", "/generate", PROMPT)
            await served.until(lambda: len(lines(file)) == 1)
            file.rename(tmp_path / name)
            if name == "second":
                file.touch()  # as logrotate's `create` does
            await served.until(file.exists)
        await served.ask("POST", "/generate", PROMPT)
        await served.until(lambda: len(lines(file)) == 1)
    assert len(lines(tmp_path / "first")) == len(lines(tmp_path / "second")) == 1


def test_what_is_told_to_reopen_does(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    log = AccessLog(str(file))
    before = log._file
    held = os.fstat(before).st_ino
    log.reopen()
    until_written_inode = running_s() + 5
    while log._wants_reopening:
        assert running_s() < until_written_inode
    log.add(ENTRY)
    until_written(log, 1)
    assert os.fstat(log._file).st_ino == held
    log.close()
    assert len(lines(file)) == 1


async def test_a_full_disk_stops_no_request(complaints: Complaints, caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(access_log="/dev/full") as served:
        for _ in range(3):
            assert (await served.ask("POST", "/generate", PROMPT)).status == 200
        log = served.router.access_log
        assert log is not None
        await served.until(lambda: log.counts["failed"] == 3)
    assert log.counts["written"] == 0
    assert [record.message for record in caplog.records if "access log" in record.message] == [
        "access log: No space left on device; lines are dropped until it can be written"
    ]
    assert complaints.messages == []


@pytest.mark.slow
def test_a_line_that_a_full_disk_cut_is_ended_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "access.log"
    log = AccessLog(str(file))
    written = os.write

    def write_less(descriptor: int, data: bytes) -> int:
        if descriptor != log._file or is_full[0] is None:
            return written(descriptor, data)
        if is_full[0] == 0:
            raise OSError(28, "No space left on device")
        count, is_full[0] = is_full[0], 0
        return written(descriptor, data[:count])

    is_full: list[int | None] = [20]
    monkeypatch.setattr(access_log_module.os, "write", write_less)
    log.add(ENTRY)
    end_s = running_s() + 10
    while log.counts["failed"] < 1:
        assert running_s() < end_s
    is_full[0] = None
    log.add(ENTRY)
    log.add(ENTRY)
    until_written(log, 2)
    log.close()
    first, *whole = file.read_text().splitlines()
    assert len(first) == 20
    assert [json.loads(line)["path"] for line in whole] == ["/generate"] * 2
    assert log.counts == {"written": 2, "failed": 1, "overflow": 0}


@pytest.mark.slow
async def test_a_reader_that_stands_still_stops_no_request(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
        async with cluster(access_log=str(pipe)) as served:
            async with await served.connect() as client:
                for _ in range(40):
                    assert (await client.ask("POST", "/generate", PROMPT)).status == 200
            log = served.router.access_log
            assert log is not None
            await served.until(lambda: log.counts["written"] > 0)
            begun_s = running_s()
        assert running_s() - begun_s < 8
        got, wait_until_s = b"", running_s() + 10
        while running_s() < wait_until_s:  # until the writer has closed its end
            try:
                piece = os.read(reader, 1 << 16)
            except BlockingIOError:
                await asyncio.sleep(0.01)
                continue
            if not piece:
                break
            got += piece
        whole = [json.loads(line) for line in got.splitlines() if line.endswith(b"}")]
        assert len(whole) >= log.counts["written"] > 0
    finally:
        os.close(reader)


async def test_a_reader_that_is_gone_stops_no_request(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    async with cluster(access_log=str(pipe)) as served:
        os.close(reader)
        assert (await served.ask("POST", "/generate", PROMPT)).status == 200
        log = served.router.access_log
        assert log is not None
        await served.until(lambda: log.counts["failed"] == 1)
        assert (await served.ask("POST", "/generate", PROMPT)).status == 200


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log_module, "MAX_PENDING", 10)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    log = AccessLog(str(pipe))
    for _ in range(1000):
        log.add(ENTRY)
    assert len(log._pending) <= 10
    assert log.counts["overflow"] > 900
    log.close()
    os.close(reader)


def test_what_a_client_writes_does_not_make_a_line_long(tmp_path: Path) -> None:
    """Many lines may wait, and long ones of several processes would mix in a pipe."""
    file = tmp_path / "access.log"
    log = AccessLog(str(file))
    log.add(ENTRY._replace(path="/" * 60_000, error="x" * 60_000))
    until_written(log, 1)
    log.close()
    line = json.loads(file.read_bytes())
    assert (line["path"], line["error"]) == ("/" * 1000, "x" * 1000)


@pytest.mark.slow
def test_a_file_number_beyond_what_select_bears(tmp_path: Path) -> None:
    """As a file that is opened again has where there are many connections."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(limits[1], 4096)), limits[1]))
    log = AccessLog(str(pipe))
    try:
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
        log._file = fcntl.fcntl(log._file, fcntl.F_DUPFD, 1500)
        for _ in range(100):
            log.add(ENTRY)
        time.sleep(0.6)
        assert log._thread.is_alive(), "it waits for the reader"
        got = b""
        while log.counts["written"] < 100:
            with contextlib.suppress(BlockingIOError):
                got += os.read(reader, 1 << 16)
            time.sleep(0.01)
    finally:
        log.close()
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_text_that_cannot_be_encoded_loses_its_line_only(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    log = AccessLog(str(file))
    log.add(ENTRY._replace(error="\ud800"))
    log.add(ENTRY)
    until_written(log, 1)
    log.close()
    assert log.counts == {"written": 1, "failed": 1, "overflow": 0}


@pytest.mark.parametrize("path", ["/nonexistent/folder/log", "/"])
def test_a_log_that_cannot_be_opened_is_refused(path: str) -> None:
    with pytest.raises(RouterConfigError, match=f"^--access-log {path}: "):
        check_access_log(path)


@pytest.mark.full
async def test_processes_share_a_pipe_and_outlive_a_hang_up() -> None:
    """The real thing: two processes, standard output, SIGHUP."""
    engines = [ScriptedEngine(Role.BOTH), ScriptedEngine(Role.DECODE)]
    for engine in engines:
        await engine.start()
        engine.script = reply()
    port = free_port()
    command = [sys.executable, "-m", "sglang_ext.cli", "router", "--port", str(port), "--processes", "2"]
    command += ["--prefill", engines[0].url, "--decode", engines[1].url, "--access-log", "-"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    count = 0
    try:
        end_s = running_s() + 20
        while count < 60:
            assert running_s() < end_s
            with contextlib.suppress(OSError):
                async with await RawClient.connect(port) as client:
                    if (await client.ask("POST", "/generate", PROMPT)).status == 200:
                        count += 1
                        if count == 30:
                            process.send_signal(signal.SIGHUP)
                        continue
            await asyncio.sleep(0.05)
    finally:
        process.terminate()
        output, _ = await asyncio.to_thread(process.communicate)
        for engine in engines:
            await engine.stop()
    assert process.returncode == 0
    whole = [json.loads(line) for line in output.splitlines()]
    assert sum(line["status"] == 200 for line in whole) == count
