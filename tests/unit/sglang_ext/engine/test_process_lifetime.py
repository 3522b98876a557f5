"""Children end with their parent, also when it is killed before they asked for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from sglang_ext.engine.process_lifetime import PARENT_VARIABLE, join_process_tree

CHILD = (
    "import os, sys, time;"
    "from sglang_ext.engine.process_lifetime import join_process_tree;"
    "join_process_tree(os.environ, is_child=True);"
    "print(os.getpid(), os.environ['SGLANG_EXT_PARENT_PID'], flush=True); time.sleep(60)"
)
PARENT = (
    "import os, subprocess, sys, time;"
    "from sglang_ext.engine.process_lifetime import join_process_tree;"
    "join_process_tree(os.environ, is_child=False);"
    "subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(60)"
)


@pytest.mark.slow
def test_child_is_killed_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child, announced = map(int, parent.stdout.readline().split())
    assert announced == child
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{child}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{child}")


def test_child_of_a_dead_parent_refuses_to_go_on() -> None:
    environment = {**os.environ, PARENT_VARIABLE: "4194304"}
    child = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert child.returncode != 0
    assert "OrphanError: the parent process 4194304 has ended" in child.stderr


def test_main_process_ignores_what_it_inherited() -> None:
    environment = {PARENT_VARIABLE: "4194304"}
    join_process_tree(environment, is_child=False)
    assert environment[PARENT_VARIABLE] == str(os.getpid())
