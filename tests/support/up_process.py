"""A running `sglang-ext up` over real SGLang instances of the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import yaml

from sglang_ext.cluster.process_tree import session_processes
from sglang_ext.cluster.state import STATE_FILE, ClusterState, ProgramState
from support.tiny_model import tiny_model

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

    def wait_until_restarted(self, name: str) -> None:
        """Until the program was started again for the first time, and all are ready."""
        deadline_s = time.monotonic() + 30
        while self.program(name).restarts == 0:
            assert time.monotonic() < deadline_s, self.output.read_text()
            time.sleep(0.1)
        self.wait_until_ready()

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
def up(tmp_path: Path, **changes: Any) -> Iterator[Up]:
    """One short, one long and one decode instance; `changes` replace parts of the file."""
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
        **changes,
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


def read_state(folder: Path) -> ClusterState:
    """Read `folder`/state.json. Raises OSError or ValueError."""
    contents = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    programs = tuple(ProgramState(**program) for program in contents.pop("programs"))
    return ClusterState(**contents, programs=programs)
