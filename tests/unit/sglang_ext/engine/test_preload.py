"""What lets an engine be forked, and what forbids it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

from sglang_ext.engine import preload
from sglang_ext.engine.launch_plan import shared_cpu_environment
from sglang_ext.engine.preload import CannotForkError, Imports

SEEN = {"PATH": "/bin", "SGLANG_X": "1", "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "UNREAD": "a"}
IMPORTS = Imports(frozenset({"SGLANG_X", "ABSENT", "SGLANG_EXT_PARENT_PID", "CACHE"}), SEEN, {"CACHE": "/there"})


@pytest.mark.parametrize(
    ("change", "conflicts"),
    [
        ({}, []),
        ({"UNREAD": "b"}, []),  # no import read it
        ({"SGLANG_X": "2"}, ["SGLANG_X"]),
        ({"CACHE": "/there"}, []),  # which the imports set where it is missing
        ({"CACHE": "/elsewhere"}, ["CACHE"]),
        ({"ABSENT": ""}, ["ABSENT"]),  # asked for, and not there
        ({"OMP_PROC_BIND": "true"}, ["OMP_PROC_BIND"]),  # C libraries read these without being seen
        ({"OMP_WAIT_POLICY": "ACTIVE", "SGLANG_X": "2"}, ["OMP_WAIT_POLICY", "SGLANG_X"]),
        ({"OMP_NUM_THREADS": "2"}, []),  # set after the fork
        ({"SGLANG_EXT_PARENT_PID": "7"}, []),
    ],
)
def test_only_what_imports_read_is_a_conflict(change: dict[str, str], conflicts: list[str]) -> None:
    assert IMPORTS.conflicts({**SEEN, **change}) == conflicts


def test_a_variable_that_is_missing_is_a_conflict() -> None:
    wanted = {name: value for name, value in SEEN.items() if name != "SGLANG_X"}
    assert IMPORTS.conflicts(wanted) == ["SGLANG_X"]


def test_what_imports_set_themselves_is_set_in_engines_that_did_not_ask_otherwise() -> None:
    assert IMPORTS.applied_to(SEEN)["CACHE"] == "/there"
    assert IMPORTS.applied_to({**SEEN, "CACHE": "/elsewhere"})["CACHE"] == "/elsewhere"


def test_a_read_behind_a_walk_is_recorded() -> None:
    with preload._recorded_reads() as names:
        last = list(os.environ)[-1]
        os.environ.get(last)
    assert last in names


def test_reads_are_recorded_and_copies_are_not() -> None:
    with preload._recorded_reads() as names:
        dict(os.environ)
        os.environ.copy()
        os.environ.get("SGLANG_EXT_TEST_READ")
        os.getenv("SGLANG_EXT_TEST_READ_TOO", "x")
        assert "PATH" not in names
        _ = os.environ["PATH"]
    assert {"SGLANG_EXT_TEST_READ", "SGLANG_EXT_TEST_READ_TOO", "PATH"} <= names
    _ = os.environ.get("SGLANG_EXT_TEST_READ_LATER")
    assert "SGLANG_EXT_TEST_READ_LATER" not in names


def test_a_process_with_a_second_thread_is_not_forked() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        with pytest.raises(CannotForkError, match="which a fork would lose"):
            preload._require_one_thread()
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({}, None), ({"dp_size": 2}, "--dp-size"), ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num")],
)
def test_what_has_to_be_spawned(arguments: dict[str, int], reason: str | None) -> None:
    found = preload.spawn_reason(SimpleNamespace(**{"dp_size": 1, "tokenizer_worker_num": 1, **arguments}))
    assert (found is None) == (reason is None)
    assert reason is None or reason in (found or "")


FIRST_OPERATIONS_OF_TWO_THREADS = """
import multiprocessing, sys, threading
import torch
from sglang_ext.engine import preload

numbers = torch.zeros(40_000)  # an operation on fewer does not ask for threads

def compute_at_once() -> None:
    errors, barrier = [], threading.Barrier(8)

    def compute() -> None:
        barrier.wait()
        try:
            numbers.add_(1)
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=compute) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit(len(errors))

torch.set_num_threads(1)
preload.fork_instead_of_spawn()
multiprocessing.set_start_method("spawn")
for _ in range(30):
    process = multiprocessing.Process(target=compute_at_once)
    process.start()
    process.join()
    assert process.exitcode == 0, process.exitcode
"""


def test_several_threads_of_a_forked_process_may_begin_with_torch_together() -> None:
    # Two of five such processes failed while torch itself replaced the pool that the fork had lost.
    environment = {**os.environ, **shared_cpu_environment(is_offline=True)}
    command = [sys.executable, "-c", FIRST_OPERATIONS_OF_TWO_THREADS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "is spawned" not in ended.stderr


ENGINE_OF_SEVERAL_THREADS = """
import multiprocessing, os, sys
import torch
from sglang_ext.engine import preload

assert torch.get_num_threads() == 1
preload.become_engine({**os.environ, "OMP_NUM_THREADS": "3"}, preload.Imports(frozenset(), dict(os.environ)))
preload.fork_instead_of_spawn()
multiprocessing.set_start_method("spawn")
for _ in range(2):
    process = multiprocessing.Process(target=lambda: sys.exit(torch.get_num_threads()))
    process.start()
    process.join()
    print(process.exitcode)
"""


def test_an_engine_of_several_threads_is_forked_too_and_computes_with_them() -> None:
    environment = {**os.environ, **shared_cpu_environment(is_offline=True)}
    command = [sys.executable, "-c", ENGINE_OF_SEVERAL_THREADS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["3", "3"]
    assert "is spawned" not in ended.stderr


@pytest.mark.full
@pytest.mark.slow
def test_processes_of_the_tests_have_imports() -> None:
    from support.preloaded import preloaded_context

    context = preloaded_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_modules, args=(theirs,))
    process.start()
    assert ours.poll(60)
    assert ours.recv() == [True, True]
    process.join()


def _send_modules(pipe: Connection) -> None:
    pipe.send([name in sys.modules for name in ("sglang.srt.managers.scheduler", "sglang.benchmark.one_batch")])
