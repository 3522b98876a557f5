"""The client of the fork server: a child that was forked, and a server that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from sglang_ext.cluster.fork_client import WORKER_COMMAND, ForkClient, ForkedProcess, ForkServerError
from sglang_ext.cluster.plan import Program
from sglang_ext.cluster.process import RunningProgram
from sglang_ext.types import Role

# Python stops at once where its standard library is not.
BROKEN = {"PATH": os.environ["PATH"], "PYTHONHOME": "/nowhere"}


def sleeping_child(status: int = 0, sleep_s: float = 60.0) -> ForkedProcess:
    process = subprocess.Popen(["sh", "-c", f"sleep {sleep_s}; exit {status}"])
    process.returncode = 0  # it is this test's to wait for from here on
    return ForkedProcess(process.pid)


def test_exit_status_and_signals_are_those_of_subprocess() -> None:
    ended = sleeping_child(status=3, sleep_s=0)
    assert ended.wait(10) == 3
    assert (ended.poll(), ended.wait()) == (3, 3)
    ended.kill()  # after its end: nothing
    killed = sleeping_child()
    assert killed.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        killed.wait(0.05)
    killed.terminate()
    assert killed.wait(10) == -signal.SIGTERM


def test_a_server_that_does_not_come_up(tmp_path: Path) -> None:
    with ForkClient(tmp_path / "log", BROKEN) as client:
        deadline_s = time.monotonic() + 20
        while client.is_alive and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not client.is_ready
        with (tmp_path / "log").open("ab") as output, pytest.raises(ForkServerError, match="has ended"):
            client.start([], output=output.fileno(), environment={}, cores={0})
    assert (tmp_path / "log").read_text() != ""


@pytest.mark.slow
def test_an_instance_is_executed_where_it_cannot_be_forked(tmp_path: Path) -> None:
    program = Program(
        name="short-0",
        command=(*WORKER_COMMAND, "--no-such-option"),
        env={},
        cores=None,
        url="http://127.0.0.1:9",
        ready_path="/health",
        role=Role.SHORT,
        bootstrap_port=None,
    )
    with ForkClient(tmp_path / "log", BROKEN) as client:
        running = RunningProgram(program, tmp_path / "short-0.log", "test", client)
        deadline_s = time.monotonic() + 30
        while running.exit_status is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
    lines = (tmp_path / "short-0.log").read_text().splitlines()
    assert lines[0].startswith("sglang-ext: not forked: ")
    assert running.exit_status == 2
