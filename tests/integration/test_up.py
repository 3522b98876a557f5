"""`sglang-ext up` with real SGLang: serves, restarts what was killed, and leaves nothing running."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
import yaml

from sglang_ext.cluster.process_tree import session_processes
from sglang_ext.cluster.state import ClusterState, ProgramState, read_state
from support.stand_in_cluster import wait_until_gone
from support.tiny_model import tiny_model

pytestmark = pytest.mark.integration

START_TIMEOUT_S = 240.0


class Up:
    """A running `sglang-ext up`."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, output: Path) -> None:
        self.process = process
        self.folder = folder
        self.output = output

    @property
    def state(self) -> ClusterState:
        return read_state(self.folder)

    def program(self, name: str) -> ProgramState:
        return next(program for program in self.state.programs if program.name == name)

    def processes(self) -> list[int]:
        """Every process of every program, descendants included."""
        pids = [program.pid for program in self.state.programs if program.pid is not None]
        return [pid for leader in pids for pid in session_processes(leader)]

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, self.output.read_text()
            try:
                if all(program.phase == "ready" for program in self.state.programs):
                    return
            except OSError:
                pass  # the state is not written yet
            time.sleep(0.2)
        raise AssertionError(f"not ready within {START_TIMEOUT_S:g} s:\n{self.output.read_text()}")

    def chat(self, text: str) -> str:
        with openai.OpenAI(base_url=f"{self.state.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
            reply = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": text}], temperature=0, max_tokens=4
            )
        content = reply.choices[0].message.content
        assert reply.usage is not None
        assert reply.usage.completion_tokens > 0
        return content or ""

    def chat_until_answered(self, text: str, timeout_s: float) -> str:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return self.chat(text)
            except openai.APIError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.5)


@contextmanager
def up(tmp_path: Path) -> Iterator[Up]:
    file = tmp_path / "cluster.yaml"
    settings = {
        "model": str(tiny_model()),
        "served_model_name": "tiny",
        "name": "test",
        "run_dir": str(tmp_path / "run"),
        "device": "cpu",
        "pools": {"short": {"count": 1}, "long": {"count": 1}, "decode": {"count": 1}},
        "router": {"port": 0, "length_boundary_tokens": 64},
        "start": {"timeout_s": START_TIMEOUT_S},
    }
    file.write_text(yaml.safe_dump(settings))
    output = tmp_path / "up.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang_ext.cli", "up", "--config", str(file)],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        yield Up(process, tmp_path / "run" / "test", output)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_serves_restarts_and_stops(tmp_path: Path) -> None:
    with up(tmp_path) as cluster:
        cluster.wait_until_ready()
        assert stat.S_IMODE((cluster.folder / "state.json").stat().st_mode) == 0o600
        short_prompt, long_prompt = "def f(self):", "return self.value + other.value\n" * 40
        first = [cluster.chat(short_prompt), cluster.chat(long_prompt)]
        assert len(cluster.processes()) >= 3 * 3 + 1  # server, scheduler and detokenizer of each, the router

        decode = cluster.program("decode-0")
        assert decode.pid is not None
        os.kill(decode.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 30
        while cluster.program("decode-0").restarts == 0:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        cluster.wait_until_ready()
        again = cluster.program("decode-0")
        assert (again.url, again.restarts) == (decode.url, 1)
        assert again.pid != decode.pid
        assert [cluster.chat_until_answered(text, 60) for text in (short_prompt, long_prompt)] == first

        everyone = cluster.processes()
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.process.wait(60) == 0
        assert wait_until_gone(everyone, 0) == []
        assert not (cluster.folder / "state.json").exists()
        log = cluster.output.read_text()
        assert "decode-0: was ended by SIGKILL; starting again in 1 s" in log
        assert "Traceback" not in log


def test_kill_9_of_up_leaves_nothing_running(tmp_path: Path) -> None:
    with up(tmp_path) as cluster:
        cluster.wait_until_ready()
        everyone = cluster.processes()
        cluster.process.kill()
        cluster.process.wait()
        assert wait_until_gone(everyone, 20) == []


def test_an_instance_that_cannot_start_ends_it_with_its_log(tmp_path: Path) -> None:
    model = tmp_path / "broken"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["NoSuchModel"]}))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sglang_ext.cli", "up", "--model", str(model), "--device", "cpu"),
            *("--both", "1", "--decode", "1", "--port", "0", "--run-dir", str(tmp_path / "run"), "--name", "x"),
        ],
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "during start; everything is stopped. End of " in done.stderr
    assert "up: error:" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("  | ")]) > 3
