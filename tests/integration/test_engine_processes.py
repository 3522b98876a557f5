"""Engines end completely, and survive the death of their partner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.pd import greedy, with_room
from support.reference import greedy_reference, random_prompt
from support.stand_in_cluster import wait_until_gone

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

# Heartbeats every 2 s, two may be missed, each may take 3 s to fail.
PARTNER_DEATH_LIMIT_S = 12.0
VICTIM = EngineSpec(Role.LONG, name="victim")


@pytest.fixture(scope="module")
def decode() -> Engine:
    return FLEET.get(EngineSpec(Role.DECODE))[0]


@pytest.fixture
def victim(decode: Engine) -> Iterator[Engine]:
    (engine,) = FLEET.get(VICTIM)
    yield engine
    engine.stop()


@pytest.mark.full
def test_decode_recovers_from_a_killed_prefill(decode: Engine, victim: Engine) -> None:
    prompt = random_prompt(150, seed=11)
    body = with_room({"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}, victim)
    pids = victim.process_ids()
    assert len(pids) >= 3
    with ThreadPoolExecutor(1) as thread:
        with victim.frozen_scheduler():
            waiting = thread.submit(decode.post, "/generate", body)
            decode.wait_for_load(lambda load: load["disaggregation"]["decode_transfer_queue_reqs"] == 1, 5)
            victim.kill()
            killed_at = time.monotonic()
        reply = waiting.result(timeout=60)
    assert reply.status == 500
    assert "Lost connection with prefill instance" in str(reply.body)
    decode.wait_idle(PARTNER_DEATH_LIMIT_S)
    assert time.monotonic() - killed_at < PARTNER_DEATH_LIMIT_S
    # kill -9 of the main process takes its children with it.
    assert wait_until_gone(pids, 5) == []

    (replacement,) = FLEET.get(VICTIM)
    assert replacement.process.pid != victim.process.pid
    assert greedy(replacement, decode, prompt, 8) == greedy_reference(prompt, 8)
    pids = replacement.process_ids()
    replacement.process.send_signal(signal.SIGTERM)
    assert replacement.process.wait(20) == 0
    assert wait_until_gone(pids, 5) == []


@pytest.mark.full
def test_engine_killed_while_it_starts_leaves_nothing() -> None:
    """Its children have not yet reached the point where SGLang binds them to their parent."""
    spawn = ("--start-method", "spawn")
    engine = Engine.start(EngineSpec(Role.SHORT, worker_options=spawn, has_own_imports=True))
    try:
        deadline = time.monotonic() + 300
        # Main process, resource tracker, scheduler, detokenizer; the last two are importing SGLang then.
        while len(engine.process_ids()) < 4 and engine.is_alive and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(1)
        pids = engine.process_ids()
        assert len(pids) >= 4, engine.log_tail()
        engine.kill()
        assert wait_until_gone(pids, 8) == []
    finally:
        engine.stop()


def test_engine_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """`--exit-with-parent`, with a parent that is killed while the engine is still starting."""
    starter = (
        "import subprocess, sys, time;"
        "p = subprocess.Popen([sys.executable, '-m', 'sglang_ext.cli', 'worker', '--role', 'short',"
        f" '--model-path', {str(tmp_path)!r}, '--device', 'cpu', '--exit-with-parent']);"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", starter], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    engine_pid = int(parent.stdout.readline())
    command_line = Path(f"/proc/{engine_pid}/cmdline")
    deadline_s = time.monotonic() + 60
    while b"sglang_ext.engine.launch" not in command_line.read_bytes():  # until it has become the engine
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert wait_until_gone([engine_pid], 30) == []
