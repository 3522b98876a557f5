"""A stage of the long instance is lost behind `sglang-ext up` and its router: it is started again, nothing hangs."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from typing import Any, NamedTuple

import pytest

from sglang_ext.cluster.process_tree import session_processes
from support.pipeline import SHAPE
from support.reference import greedy_reference, random_prompt
from support.stand_in_cluster import wait_until_gone
from support.tiny_model import tiny_model
from support.up_process import Up, up

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

NEW_TOKENS = 4
LONG_TOKENS, SHORT_TOKENS = 2400, 24
LONG_CLIENTS = 3
CHECKED_ANSWERS = 12  # of the latest
ANSWERED_WITHIN_S = 150.0  # whatever the answer is
RECOVERED_WITHIN_S = 150.0
SETTINGS: dict[str, Any] = {
    "pools": {
        "short": {"count": 1},
        "long": {
            "count": 1,
            "pp": 2,
            # The stage that waits for a stopped one ends the instance.
            "args": ["--chunked-prefill-size", "32", "--watchdog-timeout", "20"],
            "worker_args": ["--set", "laps.min_chunk_tokens=16"],
        },
        "decode": {"count": 1},
    },
}


class Answered(NamedTuple):
    """A request that got its tokens."""

    began_s: float
    prompt: tuple[int, ...]
    tokens: list[int]


@dataclass
class Traffic:
    """What came of the requests of some clients, each sending one after the other."""

    answered: list[Answered] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # told by the service
    unexpected: list[str] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def succeeded(self, length: int, since_s: float) -> bool:
        with self.lock:
            return any(one.began_s >= since_s and len(one.prompt) == length for one in self.answered)


def run_client(url: str, length: int, seed: int, is_over: Event, traffic: Traffic) -> None:
    number = 0
    while not is_over.is_set():
        number += 1
        prompt = random_prompt(length, seed * 1000 + number)
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        }
        request = urllib.request.Request(
            f"{url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        began_s, error, problem, tokens = time.monotonic(), "", "", []
        try:
            with urllib.request.urlopen(request, timeout=ANSWERED_WITHIN_S) as reply:
                tokens = json.load(reply)["output_ids"]
        except urllib.error.HTTPError as answer:
            with answer:
                text = answer.read().decode(errors="replace")
            try:
                error = str(json.loads(text)["error"]["message"])
            except (ValueError, KeyError, TypeError):
                problem = f"{answer.code} without a message: {text[:200]}"
        except OSError as reason:
            problem = f"no answer: {reason!r}"
        with traffic.lock:
            if problem:
                traffic.unexpected.append(problem)
            elif error:
                traffic.errors.append(error)
            else:
                traffic.answered.append(Answered(began_s, tuple(prompt), tokens))
        if error or problem:
            time.sleep(0.2)


@contextmanager
def traffic_to(cluster: Up) -> Iterator[Traffic]:
    """Long and short prompts, until the block ends; then all have been answered."""
    is_over, traffic = Event(), Traffic()
    with ThreadPoolExecutor(LONG_CLIENTS + 1) as threads:
        lengths = [*(LONG_TOKENS for _ in range(LONG_CLIENTS)), SHORT_TOKENS]
        clients = [
            threads.submit(run_client, cluster.state.url, length, seed, is_over, traffic)
            for seed, length in enumerate(lengths, 1)
        ]
        try:
            yield traffic
        finally:
            is_over.set()
        for client in clients:
            client.result(timeout=2 * ANSWERED_WITHIN_S)


def wait_for_long_work(cluster: Up) -> None:
    """Until the long instance is in the middle of a prompt."""
    url = f"{cluster.program('long-0').url}/laps"
    deadline_s = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(url, timeout=30) as reply:
            status = json.load(reply)
        if status["parked"] or status["parks"] or 0 < status["long"]["tokens"] < LONG_CLIENTS * LONG_TOKENS:
            return
        assert time.monotonic() < deadline_s, status
        time.sleep(0.01)


def stage_of(cluster: Up, number: int) -> int:
    leader = cluster.program("long-0").pid
    assert leader is not None
    (pid,) = (
        pid
        for pid in session_processes(leader)
        if f"scheduler_PP{number}" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    )
    return pid


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "number"),
    [
        (1, signal.SIGKILL),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.full),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.full),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.full),
    ],
)
def test_the_service_recovers_from_a_lost_stage(tmp_path: Path, stage: int, number: signal.Signals) -> None:
    with up(tmp_path, model=str(tiny_model(SHAPE)), **SETTINGS) as cluster:
        cluster.wait_until_ready()
        before = cluster.program("long-0")
        assert before.pid is not None
        processes = session_processes(before.pid)
        with traffic_to(cluster) as traffic:
            wait_for_long_work(cluster)
            os.kill(stage_of(cluster, stage), number)
            deadline_s = time.monotonic() + RECOVERED_WITHIN_S
            while cluster.program("long-0").restarts == 0:
                assert time.monotonic() < deadline_s, cluster.output.read_text()
                time.sleep(0.1)
            cluster.wait_until_ready()
            ready_s = time.monotonic()
            while not all(traffic.succeeded(length, ready_s) for length in (LONG_TOKENS, SHORT_TOKENS)):
                assert time.monotonic() - ready_s < RECOVERED_WITHIN_S, (traffic.errors, traffic.unexpected)
                time.sleep(0.1)
        assert traffic.unexpected == []
        checked = [*traffic.answered[:4], *traffic.answered[-CHECKED_ANSWERS:]]
        assert all(one.tokens == greedy_reference(one.prompt, NEW_TOKENS, SHAPE) for one in checked)
        assert wait_until_gone(processes, 20) == []
        after = cluster.program("long-0")
        assert (after.url, after.restarts) == (before.url, 1)
        assert [cluster.program(name).restarts for name in ("short-0", "decode-0", "router")] == [0, 0, 0]
        # The new instance computes: it has been sent some of the prompts that succeeded.
        with urllib.request.urlopen(f"{after.url}/v1/loads", timeout=30) as reply:
            assert json.load(reply)["loads"][0]["total_prefill_uncached_tokens"] > 0
